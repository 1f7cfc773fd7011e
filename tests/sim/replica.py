"""One simulated replica: the real core, a disk that forgets, a clock of its own, and the owner's duties in between.

Invariant: it keeps the duties that `stele.raft.effects` numbers; nothing of it but the disk outlives a crash.
"""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, cast

from stele.consensus.replica import Replica
from stele.model.config import Configuration
from stele.model.errors import ensure
from stele.model.ids import OpId, ReplicaId
from stele.raft import RaftCore
from stele.raft.effects import (
    ChangeCommitted,
    ChangeRefused,
    Committed,
    ConfigChanged,
    Effect,
    MessageIgnored,
    PeerForgot,
    PeerNeedsCopy,
    PeerReached,
    PeerSound,
    Persist,
    ProposalLost,
    ProposalRefused,
    Proposed,
    ReadLog,
    ReadReady,
    ReadRefused,
    Role,
    RoleChanged,
    Send,
    TransferDone,
    TransferFailed,
)
from stele.raft.events import (
    Compacted,
    DataArrived,
    Event,
    Fitness,
    InitialState,
    LogRead,
    PeerFailed,
    Persisted,
    Received,
    ReportFailed,
    RequestRead,
    Start,
    SyncStalled,
    Tick,
)
from stele.raft.invariants import check, check_change_step, check_role_step, check_step, facts
from stele.raft.messages import Message, UpdateResponse
from stele.raft.ports import fold_records, persist_calls
from stele.rpc.proto.consensus_pb2 import RestingPB
from tests.sim.checks import check_said
from tests.sim.disk import SimLog
from tests.sim.resting import RestingNode, node_of
from tests.sim.stamping import Stamping

if TYPE_CHECKING:
    from tests.sim.world import World


class SimReplica:
    """A replica, running or crashed."""

    def __init__(
        self, world: World, replica_id: ReplicaId, start: OpId, config: Configuration, witness: bool
    ) -> None:
        self.world = world
        self.replica_id = replica_id
        self.log = SimLog()
        self.log.end_snapshot(start, config)
        self.log.sync(1)
        # On disk beside the log
        self.has_data = not witness
        self.failed = False
        # Clock: own = offset + rate * world
        skew = world.plan.clock_skew
        self._rate = 1.0 + world.rng.uniform(-skew, skew)
        self._offset = world.rng.uniform(0, 100_000)
        self.core: RaftCore | None = None
        self.life = 0
        self.stalled_until = 0.0
        self._fit = True
        self.slow_disk_until = 0.0
        self._inbox: list[Event] = []
        self._idle: Event | None = None  # of which the core says that nothing follows from it by itself
        self._turn_set = False
        self._wake_at = 0.0
        self._waiting: deque[tuple[int, Send]] = deque()
        self._durable_persist = 0
        self._syncing = False
        self.applied = 0
        self.flushed = start
        # Rest
        self.node: RestingNode | None = None
        self.active_ms = 0
        self.unled_since = 0.0
        self._quiet_since: int | None = None
        self._quiet_ms = 0
        self._reads_ready: list[tuple[int, int]] = []
        self._told_failed: dict[int, bool] = {}
        # Timestamps
        self.stamping: Stamping | None = None
        self._wall_off_ms = 0.0

    # Time

    def node_ms(self) -> int:
        """Its node's own clock."""
        return int(self._offset + self._rate * self.world.now)

    def now_ms(self) -> int:
        """The core's time: the node's, without the times in which the group was at rest."""
        return (self.node_ms() if self._quiet_since is None else self._quiet_since) - self._quiet_ms

    def _world_time(self, own_ms: int) -> float:
        return (own_ms + self._quiet_ms - self._offset) / self._rate + 0.01

    def wall_us(self) -> int:
        """Microseconds since 1970, as its node has them."""
        return 1_700_000_000_000_000 + int(1000 * (self.world.now + self._wall_off_ms))

    def step_clock(self, off_ms: float) -> None:
        """The wall clock is set, right or wrong."""
        self.world.trace("the clock of {} is off by {} ms", self.replica_id, int(off_ms))
        self._wall_off_ms = off_ms

    @property
    def clock_fault(self) -> str:
        """Why its node makes no timestamps; "" if it does."""
        return "" if self._fit else "its clock is wrong"

    @property
    def quiet(self) -> bool:
        """Whether the core's time stands still."""
        return self._quiet_since is not None

    @property
    def busy(self) -> bool:
        """Whether somebody waits for a read."""
        return bool(self._reads_ready) or (self.core is not None and self.core.reads_pending)

    def rest(self) -> bool:
        """As CoreRuntime."""
        if self._inbox or self._syncing or self.log.pending or self._waiting:
            return False
        self._quiet_since = self.node_ms()
        self.world.rests += 1
        return True

    def wake(self) -> None:
        """As CoreRuntime."""
        if self._quiet_since is not None:
            self._quiet_ms += self.node_ms() - self._quiet_since
            self._quiet_since = None
            self._wake_at = 0.0
            self._set_wake()

    # Life

    @property
    def up(self) -> bool:
        """Whether it runs."""
        return self.core is not None

    @property
    def abstains(self) -> bool:
        """Whether it runs and has FAILED."""
        return self.core is not None and self.core.failed

    def start(self, hint: ReplicaId | None) -> None:
        """Read the disk, build a core, start it."""
        loaded = fold_records(self.log.load(self.flushed.index))
        config = loaded.config
        assert config is not None
        self.life += 1
        self.applied = max(self.flushed.index, loaded.start.index)
        self._durable_persist = 0
        self._quiet_since, self._quiet_ms = None, 0
        initial = InitialState(
            term=loaded.hard_state.term,
            voted_for=loaded.hard_state.voted_for,
            log_start=loaded.start,
            config=config,
            entries=loaded.entries,
            commit_index=self.applied,
            witness_without_data=not self.has_data,
            failed=self.failed,
            leader_hint=hint,
            skipped=loaded.skipped,
        )
        rng = random.Random(f"{self.world.plan.seed}/{self.replica_id}/{self.life}")
        self.core = self.world.core_class(self.world.plan.options, self.replica_id, initial, rng)
        self.world.trace(
            "{} starts at term {} with log {}", self.replica_id, initial.term, self.core.log.last_opid
        )
        if self.world.plan.clock_off_ms:
            self.stamping = Stamping(self, loaded.entries, self.world.history.ceiling_at(self.applied))
        self.feed(Fitness(self._fit))
        self.feed(Start(self.now_ms()))
        self.active_ms = self.node_ms()
        if self.world.plan.rest_after_ms is not None:
            self.node = RestingNode(self)

    def crash(self) -> None:
        """Power off: memory is gone, and what was not synced, mostly."""
        self.world.trace("{} crashes", self.replica_id)
        self.core = self.node = self.stamping = None
        self._quiet_since = None
        self.life += 1
        self.log.crash(self.world.rng)
        self._inbox.clear()
        self._waiting.clear()
        self._reads_ready.clear()
        self._turn_set = False
        self._syncing = False
        self._wake_at = 0.0
        self.world.forget_contexts(self.replica_id)

    # Turns

    def set_fit(self, fit: bool) -> None:
        """Whether its node's clock is right, also after a restart."""
        if fit != self._fit:
            self._fit = fit
            self.world.trace("{} is {}", self.replica_id, "fit" if fit else "unfit")
            self.feed(Fitness(fit))

    def feed(self, event: Event) -> None:
        """An event; taken at the next turn, together with what else has come."""
        if self.core is None:
            return
        self.wake()
        if isinstance(event, RequestRead):
            self.active_ms = self.node_ms()
        if self.node is not None and isinstance(event, PeerFailed):
            self.node.groups.lost(node_of(event.replica_id))
        self._inbox.append(event)
        if not self._turn_set:
            self._turn_set = True
            at = max(self.world.now + self.world.rng.random(), self.stalled_until)
            self.world.at(at, self._turn, self.life)

    def deliver(self, sender: ReplicaId, message: Message | RestingPB, quiet: bool, life: int) -> None:
        """Something has come over the network."""
        if life != self.life or self.core is None:
            return
        if self.node is not None:
            if self.world.now < self.stalled_until:
                self.world.at(self.stalled_until, self.deliver, sender, message, quiet, life)
                return
            self.node.groups.heard(node_of(sender))
            if isinstance(message, RestingPB):
                self.node.groups.told(node_of(sender), message)
                return
            if quiet and self.node.groups.take(cast(Replica, self.node), sender, message):
                return
        assert not isinstance(message, RestingPB)
        event = Received(sender, message, self.now_ms())
        if (
            self.core is not None
            and isinstance(message, UpdateResponse)
            and not self.quiet
            and not self.core.awaits_answer(sender, message)
        ):
            self._idle = event
        self.feed(event)

    def _turn(self, life: int) -> None:
        if life != self.life or self.core is None:
            return
        self._turn_set = False
        events, self._inbox = self._inbox, []
        if self.now_ms() >= self.core.next_deadline_ms:
            events.append(Tick(self.now_ms()))  # after the messages, so that a stall is no silence
        self._step(events)

    def _step(self, events: list[Event]) -> None:
        core = self.core
        assert core is not None
        before = facts(core)
        idle = len(events) == 1 and events[0] is self._idle
        if idle:
            core.note(events.pop())  # as CoreRuntime does, which makes no turn of it
        effects = core.step_many(events)
        if idle:
            ensure(not effects, f"{self._idle} was to have no effect by itself, and brought {effects}")
        check_step(before, facts(core))
        if self.world.strict:
            check_change_step(before, facts(core))
        check(core)
        role = before.role
        for effect in effects:
            if isinstance(effect, RoleChanged):
                check_role_step(role, effect.role)
                role = effect.role
            self._do(effect)
        self._check_told()
        self._begin_sync()
        self._set_wake()

    def _check_told(self) -> None:
        """What a leader has said of its peers is what it believes: nobody asks it again."""
        core = self.core
        if core is None or core.role is not Role.LEADER:
            return
        failed = [peer.replica_id for peer in core.progress if peer.failed]
        told = [peer.replica_id for peer in core.progress if peer.replica_id in self._told_failed]
        ensure(failed == told, f"leader {self.replica_id} believes that {failed} FAILED, and has said {told}")

    def _set_wake(self) -> None:
        assert self.core is not None
        deadline = self.core.next_deadline_ms
        if self.quiet or deadline > self.now_ms() + 1_000_000:
            return
        at = max(self._world_time(deadline), self.world.now)
        if self._wake_at <= self.world.now or at < self._wake_at:
            self._wake_at = at
            self.world.at(at, self._wake, self.life)

    def _wake(self, life: int) -> None:
        if life != self.life or self.core is None or self._wake_at > self.world.now:
            return  # of another life, or another is set: each that set one more would never end
        if self.world.now < self.stalled_until:
            self.world.at(self.stalled_until, self._wake, life)
            return
        self._wake_at = 0.0
        if self.quiet:
            return
        if self.now_ms() >= self.core.next_deadline_ms:
            events, self._inbox = self._inbox, []
            self._step([*events, Tick(self.now_ms())])
        else:
            self._set_wake()

    # Effects

    def _do(self, effect: Effect) -> None:
        world = self.world
        match effect:
            case Persist(id=persist_id):
                # Asked of the core, not of the effect: one that forgets to persist its vote has voted all the same.
                assert self.core is not None
                if effect.entries:
                    self.active_ms = self.node_ms()
                    if self.stamping is not None:
                        self.stamping.appending(effect.entries)
                voted = effect.hard_state is not None and self.core.voted_for not in (None, self.replica_id)
                for call in persist_calls(self.log, effect, lambda: self._persisted(persist_id, voted)):
                    call()
            case Send(after=after):
                if after > self._durable_persist:
                    self._waiting.append((after, effect))
                else:
                    self._send(effect)
            case Committed(entries):
                assert self.core is not None
                world.history.handed_out(self.replica_id, self.core.term, entries)
                self.applied = entries[-1].index
                for entry in entries:
                    world.clients.committed(self.replica_id, entry.opid)
                self._serve_reads()
                if self.stamping is not None:
                    self.stamping.committed(entries, self.core.term)
            case ReadReady(context, index):
                self._reads_ready.append((context, index))
                self._serve_reads()
            case RoleChanged(role=role):
                self._told_failed.clear()
                self.active_ms = self.node_ms()
                world.trace("{} is {} of term {}: {}", self.replica_id, role.value, effect.term, effect.cause)
                if self.stamping is not None:
                    self.stamping.role_changed(role)
                if role is Role.LEADER:
                    assert self.core is not None
                    world.history.elected(self.core, effect.term)
                    world.trouble.elected(self)
            case ReadLog(to, first_index, bytes_max):
                self._read_log(to, first_index, bytes_max)
            case ProposalLost(opid):
                world.history.lost(self.replica_id, opid)
                world.clients.lost(self.replica_id, opid)
                if self.stamping is not None:
                    self.stamping.lost(opid)
            case Proposed(context, opid):
                world.clients.proposed(self.replica_id, context, opid)
                if self.stamping is not None:
                    self.stamping.proposed(context, opid)
            case ProposalRefused() | ReadRefused() | TransferFailed() | ChangeRefused():
                world.clients.over(self.replica_id, effect.context)
                if self.stamping is not None:
                    self.stamping.refused(effect.context)
                if not isinstance(effect, ProposalRefused | ReadRefused):
                    world.trace("{} refuses {}: {}", self.replica_id, effect.context, effect.message)
            case TransferDone() | ChangeCommitted():
                world.trace("{}: {}", self.replica_id, type(effect).__name__)
                world.clients.over(self.replica_id, effect.context)
            case PeerReached(replica_id, reached, cause):
                how = "answers" if reached else "is silent"
                world.trace("{} finds that {} {}: {}", self.replica_id, replica_id, how, cause)
            case PeerSound(replica_id, sound, cause):
                how = "is sound" if sound else "has FAILED"
                world.trace("{} finds that {} {}: {}", self.replica_id, replica_id, how, cause)
                ensure(sound == (replica_id in self._told_failed), "what is told of a peer is no change")
                if sound:
                    del self._told_failed[replica_id]
                else:
                    self._told_failed[replica_id] = True
            case PeerForgot(replica_id, cause):
                ensure(False, f"{self.replica_id} says that {replica_id}, which is sound, forgot: {cause}")
            case MessageIgnored(sender, cause):
                ensure(False, f"{self.replica_id} ignores a message of {sender}, which is sound: {cause}")
            case PeerNeedsCopy(replica_id):
                world.driver.copy_to(replica_id, self.replica_id)
            case ConfigChanged(config, committed):
                world.trace(
                    "{} has configuration {} ({}): {}",
                    self.replica_id,
                    config.opid_index,
                    committed,
                    effect.cause,
                )

    def _serve_reads(self) -> None:
        later = []
        for context, index in self._reads_ready:
            if self.applied >= index:
                self.world.clients.read_served(self.replica_id, context, index, self.applied)
            else:
                later.append((context, index))
        self._reads_ready = later

    def _read_log(self, to: ReplicaId, first_index: int, bytes_max: int) -> None:
        entries = []
        size = 0
        index = first_index
        while (entry := self.log.entry(index)) is not None and (
            not entries or size + entry.size_bytes <= bytes_max
        ):
            entries.append(entry)
            size += entry.size_bytes
            index += 1
        answer = LogRead(to, first_index, tuple(entries))
        life = self.life
        self.world.at(self.world.now + self.world.rng.uniform(0.1, 5.0), self._feed_if, life, answer)

    def _feed_if(self, life: int, event: Event) -> None:
        if life == self.life:
            self.feed(event)

    # Disk

    def _persisted(self, persist_id: int, voted: bool) -> None:
        self._durable_persist = persist_id
        event = Persisted(persist_id)
        if self.core is not None and not self.core.awaits_disk:
            self._idle = event
        self.feed(event)
        if voted:
            self.world.trouble.voted(self)
        while self._waiting and self._waiting[0][0] <= persist_id:
            self._send(self._waiting.popleft()[1])

    def _send(self, send: Send) -> None:
        if self.world.strict:
            check_said(self.log, self.replica_id, send.to, send.message)
        self.world.send(self.replica_id, send.to, send.message)

    def _begin_sync(self) -> None:
        if self._syncing or not self.log.pending:
            return
        self._syncing = True
        world = self.world
        took = world.rng.uniform(0.05, world.plan.sync_ms)
        if world.now < self.slow_disk_until:
            took += world.rng.uniform(5.0, self.slow_disk_until - world.now + 5.0)
        world.at(world.now + took, self._end_sync, self.life, self.log.pending)
        if took > world.plan.options.election_max_ms:
            world.at(world.now + world.plan.options.election_max_ms, self._stalled, self.life)

    def _stalled(self, life: int) -> None:
        self._feed_if(life, SyncStalled(self.now_ms()))

    def _end_sync(self, life: int, count: int) -> None:
        if life != self.life:
            return
        self._syncing = False
        self.log.sync(count)
        self._begin_sync()

    # The store

    def flush(self, index: int) -> None:
        """The store holds all up to `index` on its own disk; the log before may go, at once or later."""
        core = self.core
        if core is None or not core.log.start.index < index <= min(self.applied, core.log.handed_index):
            return
        opid = core.log.opid_at(index)
        self.flushed = max(self.flushed, opid)
        if self.world.plan.keeps_log and self.world.rng.random() < 0.7:
            return
        self.log.begin_snapshot(opid)
        self.log.end_snapshot(opid, core.log.config_at(index))
        self.feed(Compacted(opid))
        self._begin_sync()

    def install(self, opid: OpId, config: Configuration) -> None:
        """A copy has come whole: what is behind it in the log goes; term and vote stay."""
        was_up = self.up
        if was_up:
            core = self.core
            assert core is not None
            if core.log.start.index >= opid.index:
                return
            self.crash()
        self.log.begin_snapshot(opid)
        self.log.end_snapshot(opid, config)
        self.log.sync(self.log.pending)
        self.has_data = True
        self.flushed = max(self.flushed, opid)
        self.world.trace("{} takes a copy at {}", self.replica_id, opid)
        if was_up:
            self.start(None)

    def data_arrived(self) -> None:
        """The rows of a witness are here and meet its log."""
        self.has_data = True
        self.feed(DataArrived())

    def fail(self, *, for_good: bool) -> None:
        """It abstains: for good, since its disk is found damaged, or until it is started again."""
        self.failed = for_good
        self.feed(ReportFailed("its log is damaged" if for_good else "it lacks memory"))
