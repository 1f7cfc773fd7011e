"""One simulated node: a real log and a real replica with a real store. Only its clocks, disk, threads and
network are simulated.

A life begins with `boot` and ends with `crash` (power) or `exits` (only the process). Invariant: only the
files and the superblock outlive a life, and what a twin remembers to check the next start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from stele.consensus import recovering
from stele.consensus.bootstrap import STORE, create_machine, start_replica
from stele.consensus.recovering import SoleVoter
from stele.consensus.replica import Replica, ReplicaState
from stele.consensus.superblock import DataState, Superblock
from stele.model.config import Configuration
from stele.model.errors import Retryable, SteleError, ensure
from stele.model.ids import OPID_NONE, OpId, ReplicaId, StreamKey, TableId, TabletId
from stele.raft import RaftCore
from stele.raft.effects import Role
from stele.raft.ports import fold_records
from stele.tserver.log_space import LogSpace
from stele.tserver.ticker import ReplicaClock
from stele.wal import Log
from tests.sim.checks import check_start
from tests.sim.clock import Clocks
from tests.sim.disk import LOG, Disk, WorldSync
from tests.sim.host import SimHost
from tests.sim.log_thread import LogThread
from tests.sim.loop import SimLoop
from tests.sim.messenger import Said, SimMessenger, node_of, one_replica
from tests.sim.rows import NEIGHBOUR, Rows
from tests.sim.twin import Twin, WatchedStream

if TYPE_CHECKING:
    from tests.sim.world import World

TABLET = TabletId("7" * 32)


class SimNode:
    """A node and its replica, running or not."""

    def __init__(self, world: World, replica_id: ReplicaId) -> None:
        self.world = world
        self.replica_id = replica_id
        self.node_id = node_of(replica_id)
        # What is on its volume
        self.disk = Disk()
        self.directory = world.directory / f"n{replica_id}"
        content = world.content
        self.superblock = Superblock(
            TABLET, replica_id, TableId("1" * 32), "t", content.kind, DataState.READY, content.schema
        )
        self.twins: dict[StreamKey, Twin] = {}
        self.clocks = Clocks(world)
        self.fit = True
        """Whether its node says that its wall clock is right, also after a restart."""
        self.host = SimHost(self)
        self.rows = Rows(self)
        self.formed = False
        self.history = world.history
        # A life
        self.life = 0
        self.loop: SimLoop | None = None
        self.log: Log | None = None
        self.replica: Replica | None = None
        self.stalled_until = 0.0
        self.slow_disk_until = 0.0
        self.unled_since = 0.0
        self.may_fail = ""
        """Why its replica may be FAILED; "": it must not be."""
        self.let_go = False
        """Whether its log dropped entries because the replica was FAILED and others have them. Then it never
        starts again."""
        self.retired = False
        self.power_lost = False
        """Whether its last life ended with a power loss."""
        self.gone = False
        """Whether it never starts again, though no configuration change removed it."""
        self.told_failed: dict[int, bool] = {}
        self._ticks = True
        """Whether its replica is ticked: not while it rests."""
        self.thread: LogThread | None = None
        self.messenger: SimMessenger
        self.space: LogSpace | None = None

    # Its state, as the world sees it

    @property
    def up(self) -> bool:
        """Whether its process runs."""
        return self.loop is not None

    @property
    def core(self) -> RaftCore | None:
        """The replica's core, while it takes part or abstains."""
        return self.replica.core if self.replica is not None else None

    @property
    def leads(self) -> bool:
        """Whether its core believes that it leads."""
        core = self.core
        return core is not None and core.role is Role.LEADER

    @property
    def older(self) -> bool:
        """Whether its program knows no questions about leaders."""
        return self.world.plan.older == "all" or (self.world.plan.older == "odd" and self.replica_id % 2 == 1)

    @property
    def failed(self) -> bool:
        """Whether its replica is FAILED, or will never come back."""
        return self.retired or (self.replica is not None and self.replica.state is ReplicaState.FAILED)

    @property
    def has_data(self) -> bool:
        """Whether it holds rows, or will hold them once it has started."""
        return self.superblock.data_state is DataState.READY

    @property
    def resting(self) -> bool:
        """Whether its core's time stands still."""
        runtime = self.replica.runtime if self.replica is not None else None
        return runtime is not None and runtime.quiet

    @property
    def machine(self) -> Any:
        """The store; None if there is none."""
        return self.replica.machine if self.replica is not None else None

    # Clocks

    def set_fit(self, fit: bool) -> None:
        """Its node finds its wall clock wrong, or right again."""
        if fit != self.fit:
            self.fit = fit
            self.world.trace("{} is {}", self.replica_id, "fit" if fit else "unfit")
            self.soon(lambda: self._with_replica(lambda replica: replica.fit_to_lead(fit)))

    def _with_replica(self, act: Callable[[Replica], None]) -> None:
        if self.replica is not None:
            act(self.replica)

    # Life

    @property
    def twin(self) -> Twin:
        """The key of its replica's stream."""
        return self.twins[self.superblock.key]

    def form(self, start: OpId, config: Configuration, files: Any = None) -> None:
        """Write the content of its volume: log, store and superblock. `files`: fills the store from a
        copy."""
        self.formed = True
        log = Log.open(LOG, self.world.plan.log, self.node_id, _run_all, files=self.disk, threads=False)
        for key in (self.superblock.key, StreamKey(NEIGHBOUR, self.replica_id)):
            at = start if key.tablet_id == TABLET else OPID_NONE
            self.twins[key] = Twin(at)
            log.create_stream(key, at, config)
        log.turn()
        log.close()
        self.directory.mkdir()
        if self.superblock.data_state is DataState.READY:
            if files is None:
                create_machine(self.superblock, self.directory).close()
            else:
                files(self.directory / STORE)

    def boot(self) -> None:
        """Start the process."""
        if self.retired or self.gone or self.up or not self.formed:
            return
        world = self.world
        self.life += 1
        self.loop = loop = SimLoop(self)  # type: ignore[abstract]
        self.ticker = ReplicaClock(lambda: int(self.clocks.monotonic_ms() * 1e6))
        self.told_failed.clear()
        self._ticks = True

        def dispatch(callbacks: list[Callable[[], None]]) -> None:
            loop.call_soon(_run_all, callbacks)

        try:
            self.log = Log.open(
                LOG,
                world.plan.log,
                self.node_id,
                dispatch,
                files=self.disk,
                on_failure=lambda error: self.exits(f"its log failed: {error.__cause__ or error}"),
                threads=False,
            )
        except (OSError, SteleError) as exc:
            if not self.lost_power():
                self._opens_no_log(exc)
            return
        world.judge(self._check_log)
        self.thread = LogThread(self, self.log)
        self.log.attach(loop, WorldSync(self.thread), clock=loop.time)
        hint = world.hint_for(self)
        if hint is not None:
            self.superblock = replace(self.superblock, leader_hint=hint)
        self.replica = Replica(self.superblock, self.directory, self.host, world.plan.replica)
        self.space = LogSpace(one_replica(self.replica), self.log, self.host)
        self.messenger = SimMessenger(self, self.replica, self.ticker.now_ms())
        loop.create_task(self._start(self.replica))
        if world.masters is not None:
            world.masters.boots(self)
        loop.call_later(world.rng.random() * 0.001 * world.plan.tick_ms, self._tick)

    def becomes_sole_voter(self, order: SoleVoter) -> None:
        """Make its replica the only voter of its tablet, on the volume of a process that has ended."""
        self.superblock = recovering.with_incarnation(self.superblock, order)
        self.log = Log.open(LOG, self.world.plan.log, self.node_id, _run_all, files=self.disk, threads=False)
        self.world.judge(self._check_log)
        written: list[bool] = []
        recovering.make_sole_voter(
            self.stream(order.key), self.node_id, "", order, lambda: written.append(True)
        )
        while not written:
            self.log.turn()
        self.log.close()
        self.log = None

    def _opens_no_log(self, exc: Exception) -> None:
        self.exits(f"its log does not open: {exc}", again=False)
        if isinstance(exc, OSError):
            self.world.at(self.world.now + self.world.rng.uniform(20.0, 500.0), self.boot)
        elif self.may_fail:
            self.retired = True
        else:
            self.world.failed(f"node {self.replica_id} does not open its log: {exc}")

    async def _start(self, replica: Replica) -> None:
        try:
            await start_replica(self.superblock, self.directory, self, self.host, replica=replica)
        except Retryable as exc:
            self.exits(f"its replica does not start: {exc}")
            return
        if replica.core is not None:
            if not self.fit:
                replica.fit_to_lead(False)
            if not self.may_fail:
                self.world.judge(check_start, replica.core, self.twin.durable)
            self.world.trace(
                "{} starts at term {} with log {}",
                self.replica_id,
                replica.core.term,
                replica.core.log.last_opid,
            )

    # As bootstrap reads it from the log

    @property
    def recovery(self) -> Any:
        assert self.log is not None
        return self.log.recovery

    def stream(self, key: StreamKey) -> Any:
        """The replica's stream, watched by its twin."""
        assert self.log is not None
        return WatchedStream(self.log.stream(key), self.twins[key], self._voted)

    def _voted(self, voted_for: ReplicaId) -> None:
        if voted_for != self.replica_id:
            self.world.faults.voted(self)

    def _check_log(self) -> None:
        """Check a start: the log holds what it reported durable, with what was under way, or it reports
        damage."""
        assert self.log is not None
        for key, twin in self.twins.items():
            if key in self.log.recovery.failed:
                ensure(
                    bool(self.may_fail),
                    f"the log of {self.replica_id} is damaged: {self.log.recovery.failed}",
                )
                self.world.met["a stream FAILED by rot"] += 1
                continue
            what = f"node {self.replica_id}'s stream of {'its replica' if key.tablet_id == TABLET else 'a neighbour'}"
            loaded = fold_records(self.log.stream(key).load())
            taken = twin.compare(what, loaded, power_lost=self.power_lost)
            if key.tablet_id == TABLET and self.power_lost:
                self.history.power_took(self.replica_id, taken)

    def _tick(self) -> None:
        if self.loop is None or self.replica is None:
            return
        self.ticker.tick()
        now_ms = self.ticker.now_ms()
        if self._ticks:
            self._ticks = self.replica.tick(now_ms)
        self.messenger.tick(now_ms)
        self.loop.call_later(0.001 * self.world.plan.tick_ms, self._tick)

    def woken(self) -> None:
        """Its replica rests no more."""
        self._ticks = True
        if self.replica is not None:
            self.messenger.woken(self.superblock.key)

    def soon(self, act: Callable[[], object]) -> None:
        """Run the call in its loop."""
        if self.loop is not None:
            self.loop.call_soon(act)

    def run(self, work: Coroutine[Any, Any, Any], over: Callable[[asyncio.Task[Any]], None]) -> None:
        """Run a coroutine in its loop. `over` gets its end, unless the node ends first."""
        if self.loop is None:
            work.close()
            return
        self.loop.create_task(work).add_done_callback(over)

    def _end(self) -> None:
        assert self.loop is not None
        self.loop.close()
        if self.log is not None and self.log.shared.states[self.superblock.key].abandoned:
            self.let_go = True
        self.loop = self.log = self.replica = self.space = self.thread = None
        self.life += 1

    def crash(self) -> None:
        """Power off: memory is lost, and most of what was not synced."""
        if self.loop is None:
            return
        self.world.trace("{} loses power", self.replica_id)
        self.world.met["power lost"] += 1
        self._end()
        self.power_lost = True
        self.disk = cast(Disk, self.disk.crash(self.world.rng))
        self.world.disk_faults_end(self)

    def exits(self, why: str, *, again: bool = True) -> None:
        """The process ends by itself or is killed; the page cache stays."""
        if self.loop is None:
            return
        self.world.trace("{} ends: {}", self.replica_id, why)
        self._end()
        self.power_lost = False
        self.world.disk_faults_end(self)
        if again:
            self.world.at(self.world.now + self.world.rng.uniform(20.0, 500.0), self.boot)

    def ends(self) -> None:
        """The world ends; nothing of it may continue."""
        if self.loop is not None:
            self.disk.off = True
            self._end()

    def lost_power(self) -> bool:
        """Whether the power was lost within a file operation."""
        if not self.disk.off:
            return False
        self.world.met["power lost within a file operation"] += 1
        self.crash()
        self.world.at(self.world.now + self.world.rng.uniform(1.0, 500.0), self.boot)
        return True

    def turned(self) -> None:
        """A turn of its loop has ended."""
        loop, replica = self.loop, self.replica
        if loop is None or self.lost_power():
            return
        if loop.broke is not None:
            self.world.failed(f"a callback of {self.replica_id} raised {loop.broke!r}", loop.broke)
        # A process whose log has failed ends as soon as it learns of it.
        sound = self.log is not None and self.log.failed is None
        if replica is not None and replica.state is ReplicaState.FAILED and sound and not self.may_fail:
            self.world.failed(f"replica {self.replica_id} has FAILED: {replica.error}")
        if self.thread is not None:
            self.thread.look()

    def disk_waits(self) -> float:
        """By how many milliseconds its disk is slower than usual now."""
        if self.world.now >= self.slow_disk_until:
            return 0.0
        return self.world.rng.uniform(5.0, self.slow_disk_until - self.world.now + 5.0)

    # Messages

    def deliver(self, sender: ReplicaId, message: Said, quiet: bool, incarnation: int) -> None:
        """A message has arrived over the network. `incarnation`: its sender's, of the tablet."""
        if self.loop is not None:
            self.loop.call_soon(self._received, sender, message, quiet, incarnation)

    def _received(self, sender: ReplicaId, message: Said, quiet: bool, incarnation: int) -> None:
        if self.replica is not None:
            self.messenger.received(sender, message, quiet, incarnation)

    def lost(self, replica_id: ReplicaId) -> None:
        """The connection to another node was reset."""

        def tell() -> None:
            self.messenger.lost(node_of(replica_id))
            if self.replica is not None:
                self.replica.peer_node_failed(node_of(replica_id))

        self.soon(tell)

    # Failure

    def breaks(self, why: str) -> None:
        """Its replica FAILS, although nothing it has is wrong."""
        self.may_fail = why
        self.soon(lambda: self._with_replica(lambda replica: replica.fail(why)))


def _run_all(callbacks: list[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()
