"""The simulated world: one clock, one queue of what happens next, one source of chance, a network that misbehaves.

    World(draw_plan(seed)).run()

Phases: faults, heal, then the group must converge and make progress. Raises SimulationFailure with the seed and the
story so far. Invariant: the same plan and code give the same run, to the last event.
"""

from __future__ import annotations

import heapq
import logging
import random
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from stele.consensus.superblock import DataState
from stele.model.config import Configuration
from stele.model.errors import SteleError, ensure
from stele.model.ids import OPID_NONE, ReplicaId
from stele.raft.invariants import check_group
from stele.raft.messages import Message
from stele.rpc.proto.consensus_pb2 import RestingPB
from tests.nodesim.checks import History
from tests.nodesim.clients import Clients
from tests.nodesim.driver import Driver, sim_peer
from tests.nodesim.node import SimNode
from tests.nodesim.trouble import Trouble
from tests.nodesim.watch import watching
from tests.sim.plan import Plan, draw_plan

_HEAL_MS_MAX = 30_000
_EVENTS_MAX = 1_000_000
_UNLED_MS_MAX = 2_500
STORY_LINES = 400
_SHM = Path("/dev/shm")


class SimulationFailure(Exception):
    """Something happened that must never happen."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to."""

    seed: int
    simulated_ms: int
    events: int
    committed: int
    acknowledged: int
    retries: int
    reads: int
    terms: int
    config_changes: int
    rests: int


class World:
    """One run. It remembers the newest `story_lines` of what happened; None: all. Without `strict` a promise that no disk
    holds, and a change that comes too early, are seen by what comes of them alone.

    `met`: how often each kind of trouble was met.
    """

    def __init__(self, plan: Plan, *, strict: bool = True, story_lines: int | None = STORY_LINES) -> None:
        self.plan = plan
        self.strict = strict
        self.rng = random.Random(f"world/{plan.seed}")
        self.now = 0.0
        self.met: Counter[str] = Counter()
        self.directory = Path(".")
        first = Configuration(-1, tuple(sim_peer(n) for n in range(1, plan.voters + 1)))
        self.history = History(first)
        self.clients = Clients(self)
        self.driver = Driver(self)
        self.trouble = Trouble(self)
        self.nodes: dict[int, SimNode] = {}
        self.healing = False
        self._failure: SteleError | AssertionError | None = None
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self._events = 0
        self._story: deque[tuple[float, str, tuple[object, ...]]] = deque(maxlen=story_lines)
        self._hint = ReplicaId(self.rng.randint(1, plan.voters)) if plan.hinted else None
        self._first = first

    # What others ask of the world

    def at(self, when: float, act: Callable[..., None], *arguments: object) -> None:
        """Let `act(*arguments)` happen at `when`."""
        self._sequence += 1
        heapq.heappush(self._queue, (when, self._sequence, act, arguments))

    def trace(self, text: str, *arguments: object) -> None:
        """A line of the story."""
        self._story.append((self.now, text, arguments))

    def judge(self, check: Callable[..., None], *arguments: Any) -> None:
        """Run a check; what it finds ends the run, although production's code may catch it."""
        try:
            check(*arguments)
        except (SteleError, AssertionError, KeyError, IndexError) as exc:
            if self._failure is None:
                self._failure = exc if isinstance(exc, SteleError) else AssertionError(repr(exc))

    def failed(self, why: str, cause: BaseException | None = None) -> None:
        """Something happened that must never happen."""
        if self._failure is None:
            self._failure = AssertionError(why)
            self._failure.__cause__ = cause

    def all_nodes(self) -> list[SimNode]:
        """All, in order of their ids."""
        return list(self.nodes.values())

    def latency(self) -> float:
        """How long a message takes, in milliseconds."""
        plan = self.plan
        latest = min(plan.delay_max_ms, plan.delay_min_ms + 2.0) if self.healing else plan.delay_max_ms
        return self.rng.uniform(plan.delay_min_ms, latest)

    def hint_for(self, node: SimNode) -> ReplicaId | None:
        """Whom the masters name to a replica that starts."""
        if node.life == 1:
            return self._hint
        return self.trouble.hint(node)

    def disk_faults_end(self, node: SimNode) -> None:
        """A process ended, so its disk's next one begins without the fault that ended it."""
        node.disk.sync_error = node.disk.write_error = False

    def send(
        self, sender: ReplicaId, to: ReplicaId, message: Message | RestingPB, *, quiet: bool = False
    ) -> None:
        """Through the network: lost, doubled, late, out of order."""
        plan, rng = self.plan, self.rng
        copies = 1
        if not self.healing:
            if plan.loss and rng.random() < plan.loss:
                self.met["a message lost"] += 1
                return
            if plan.duplicate and rng.random() < plan.duplicate:
                self.met["a message doubled"] += 1
                copies = 2
        for _ in range(copies):
            delay = self.latency()
            if not self.healing and plan.slow_message and rng.random() < plan.slow_message:
                self.met["a message late"] += 1
                delay += rng.uniform(0.0, 2000.0)
            self.at(self.now + delay, self._deliver, sender, to, message, quiet)

    def _deliver(self, sender: ReplicaId, to: ReplicaId, message: Message | RestingPB, quiet: bool) -> None:
        node = self.nodes.get(to)
        if node is not None and node.up and self.trouble.lets_through(sender, to, message):
            node.deliver(sender, message, quiet)

    # The run

    def run(self) -> Outcome:
        """All phases.

        Raises:
            SimulationFailure: with the seed, what was broken, and the story.
        """
        self.directory = Path(tempfile.mkdtemp(prefix="stele-sim-", dir=_SHM if _SHM.is_dir() else None))
        try:
            with watching(self.plan.rest_after_ms):
                self._run()
        except (SteleError, AssertionError, KeyError, IndexError, TypeError) as exc:
            raise SimulationFailure(self._report(exc)) from exc
        finally:
            for node in self.all_nodes():
                node.ends()
            shutil.rmtree(self.directory)
        return Outcome(
            self.plan.seed,
            int(self.now),
            self._events,
            self.history.committed_index,
            len(self.history.acknowledged),
            self.clients.retries,
            self.clients.reads,
            len(self.history.leaders),
            self.history.config.opid_index,
            self.met["a group at rest"],
        )

    def _run(self) -> None:
        for peer in self._first.peers:
            node = self.nodes[peer.replica_id] = SimNode(self, peer.replica_id)
            node.form(OPID_NONE, self._first)
        for node in self.all_nodes():
            node.boot()
        self._arrange()
        self._run_until(self.plan.fault_ms, lambda: False)
        self._heal()
        target = len(self.history.acknowledged)
        done = self._run_until(self.now + _HEAL_MS_MAX, lambda: self._converged(target))
        ensure(
            done or self._hopeless(),
            f"no convergence within {_HEAL_MS_MAX} ms of healing: {self._state()}",
        )
        self.history.finish()
        self.clients.finish()
        self._check_all()

    def _run_until(self, end: float, done: Callable[[], bool]) -> bool:
        next_check = self.now
        while self._queue and self._queue[0][0] <= end:
            self.now, _, act, arguments = heapq.heappop(self._queue)
            self._events += 1
            ensure(self._events < _EVENTS_MAX, f"more than {_EVENTS_MAX} events: something chatters")
            act(*arguments)
            if self._failure is not None:
                raise self._failure
            if self.now >= next_check:
                next_check = self.now + 50.0
                if done():
                    return True
        self.now = end
        return False

    def _check_all(self) -> None:
        """What a group must be at any moment; and what a leader has said of its peers is what it believes."""
        check_group([node.core for node in self.all_nodes() if node.core is not None])
        for node in self.all_nodes():
            core = node.core
            if core is not None and node.leads:
                peers = core.status().peers
                failed = [peer.replica_id for peer in peers if peer.failed]
                told = [peer.replica_id for peer in peers if peer.replica_id in node.told_failed]
                ensure(
                    failed == told,
                    f"leader {node.replica_id} believes that {failed} FAILED, and has said {told}",
                )

    def _check_rests(self) -> None:
        """Nobody rests for long without a leader that leads."""
        for node in self.all_nodes():
            core = node.core
            leader = self.nodes[core.leader].core if core is not None and core.leader is not None else None
            led = core is not None and leader is not None and self.nodes[core.leader or 0].leads
            if node.resting:
                self.met["a group at rest"] += 1
            if not node.resting or self.now < node.stalled_until or (led and leader.term == core.term):  # type: ignore[union-attr]
                node.unled_since = self.now
            ensure(
                self.now - node.unled_since < _UNLED_MS_MAX,
                f"replica {node.replica_id} has been at rest without a leader for {_UNLED_MS_MAX} ms",
            )

    def _arrange(self) -> None:
        plan = self.plan
        self._often(plan.writes_per_s, self._write)
        self._often(plan.reads_per_s, self._read)
        self._often(plan.snapshots_per_s, self.clients.snapshot)
        self._often(plan.changes_per_s, self.driver.change)
        self._often(plan.transfers_per_s, self.driver.transfer)
        self._often(plan.flushes_per_s, self._flush)
        self._often(4.0, self._collect)
        self._often(20.0, self._neighbour)
        for per_s, act in (
            (plan.partitions_per_s, self.trouble.partition),
            (plan.crashes_per_s, self.trouble.crash),
            (plan.rushes_per_s, self.trouble.rush),
            (plan.alarms_per_s, self.trouble.alarm),
            (plan.stalls_per_s, self.trouble.stall),
            (plan.slow_disks_per_s, self.trouble.slow_disk),
            (plan.unfit_per_s, self.trouble.unfit),
            (plan.disk_errors_per_s, self.trouble.disk_error),
            (plan.full_disks_per_s, self.trouble.full_disk),
            (plan.cuts_per_s, self.trouble.cut_power),
            (plan.rots_per_s, self.trouble.rot),
            (2.0 if plan.clock_off_ms else 0.0, self.trouble.step_clock),
        ):
            self._often(per_s, act)
        self._often(4.0, self._check_all)
        self._often(2.0, self.driver.tombstone_removed)
        self._often(2.0, self.driver.mend)
        if plan.rest_after_ms is not None:
            self._often(10.0, self._check_rests)
            self._often(plan.rest_crashes_per_s, self.trouble.crash_at_rest)
        if plan.failures:
            self.at(self.rng.uniform(500.0, plan.fault_ms), self.trouble.fail_one)

    def _often(self, per_s: float, act: Callable[[], None]) -> None:
        """Let it happen at random moments, so many times a second."""
        if per_s <= 0:
            return
        going_on = (
            self._write,
            self._read,
            self._flush,
            self._collect,
            self.driver.mend,
            self.driver.tombstone_removed,
        )

        def happen() -> None:
            # When healing, clients, nodes and the driver go on; trouble and changes stop.
            if not self.healing or act in going_on:
                act()
            self.at(self.now + self.rng.expovariate(per_s / 1000.0), happen)

        self.at(self.now + self.rng.expovariate(per_s / 1000.0), happen)

    def some_up(self) -> SimNode | None:
        """Any node whose process runs."""
        up = [node for node in self.all_nodes() if node.up]
        return self.rng.choice(up) if up else None

    def asked(self) -> SimNode | None:
        """Whom a client asks: who leads, and now and then anybody."""
        return self.driver.leader() if self.rng.random() < 0.9 else self.some_up()

    @property
    def _lull(self) -> bool:
        """Whether the clients of a world whose groups rest let them."""
        return self.plan.rest_after_ms is not None and int(self.now / self.plan.lull_ms) % 2 == 1

    def _write(self) -> None:
        if not self._lull and not (
            self.healing and self.rng.random() < 0.8
        ):  # so that the slowest can catch up
            self.clients.write()

    def _read(self) -> None:
        if not self._lull:
            self.clients.read()

    def _flush(self) -> None:
        node = self.some_up()
        if node is not None:
            node.flush()

    def _collect(self) -> None:
        node = self.some_up()
        if node is not None:
            node.collect()

    def _neighbour(self) -> None:
        node = self.some_up()
        if node is not None:
            node.soon(node.neighbour_writes)

    # Healing

    def _heal(self) -> None:
        self.trace("all heals")
        self.healing = True
        self.trouble.end()
        for node in self.all_nodes():
            node.stalled_until = min(node.stalled_until, self.now)
            node.slow_disk_until = min(node.slow_disk_until, self.now)
            self.disk_faults_end(node)
            node.set_fit(True)  # where all clocks are wrong nobody makes a timestamp
            self.trouble.restart(node)

    def _converged(self, target: int) -> bool:
        """One leader, a write since healing, and every sound peer has what the leader has committed."""
        if len(self.history.acknowledged) <= target:
            return False
        leaders = [node.core for node in self.all_nodes() if node.core is not None and node.leads]
        if len(leaders) != 1:
            return False
        leader = leaders[0]
        if leader.pending_change_index is not None or leader.status().transferring_to is not None:
            return False
        for peer in leader.config.peers:
            node = self.nodes[peer.replica_id]
            core = node.core
            if node.failed:
                continue
            if core is None or core.term != leader.term or core.leader != leader.self_replica:
                return False
            if core.log.handed_index < leader.commit_index - 40 or core.config != leader.config:
                return False
            if not core.term_committed:
                return False
        return True

    def _hopeless(self) -> bool:
        """A FAILED voter may, for good, be one too many in the configuration that is in force."""
        for node in self.all_nodes():
            if node.core is None:
                continue
            config = node.core.config
            sound = [p for p in config.voters if not self.nodes[p.replica_id].failed]
            if config.voters and len(sound) < config.majority:
                return True
        return False

    # Telling

    def _state(self) -> str:
        parts = []
        for node in self.all_nodes():
            core = node.core
            if core is None:
                parts.append(
                    f"{node.replica_id} {'retired' if node.retired else 'up' if node.up else 'down'}"
                )
            else:
                log = core.log
                parts.append(
                    f"{node.replica_id} {core.role.value} term {core.term} leader {core.leader} commit "
                    f"{core.commit_index} log {log.start}..{log.last_opid} config {core.config.opid_index}"
                    f"[{','.join(f'{p.replica_id}{p.member_type.name[0]}' for p in core.config.peers)}]"
                    f"{' FAILED' if node.failed else ''}{'' if node.has_data else ' no rows'}"
                )
        return "; ".join(parts)

    def add_node(self, data_state: DataState = DataState.READY) -> SimNode:
        """A new node, whose volume is empty."""
        replica_id = ReplicaId(len(self.nodes) + 1)
        node = self.nodes[replica_id] = SimNode(self, replica_id)
        node.superblock = node.superblock.with_state(data_state)
        return node

    def story(self) -> str:
        """The newest lines, one each, with their times in milliseconds."""
        return "\n".join(f"{now:9.1f}  {text.format(*arguments)}" for now, text, arguments in self._story)

    def _report(self, exc: BaseException) -> str:
        return f"{self.story()}\nseed {self.plan.seed} at {self.now:.1f} ms: {exc!r}\nplan: {self.plan}\nstate: {self._state()}"


def say_less() -> None:
    """What nodes log is not news here: the story tells what matters."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def tell_seed(seed: int) -> Iterator[str]:
    """The whole story of a seed, then what came of it. Raises SimulationFailure, after the story, if it fails."""
    world = World(draw_plan(seed), story_lines=None)
    try:
        result = world.run()
    except SimulationFailure as exc:
        yield world.story()
        raise SimulationFailure(str(exc).removeprefix(world.story()).lstrip()) from None
    yield world.story()
    yield f"{world.plan}\n{result}"


def run_seed(seed: int) -> tuple[int, int, Counter[str], str]:
    """(seed, acknowledged writes, trouble met, what failed or nothing), as other processes need it."""
    world = World(draw_plan(seed), story_lines=STORY_LINES)
    try:
        return seed, world.run().acknowledged, world.met, ""
    except SimulationFailure as exc:
        return seed, 0, world.met, str(exc)
