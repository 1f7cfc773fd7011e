"""One replica at work: raft core, its stream in the log, a state machine and the node's transport, glued together.

Made by the tablet manager (and, for the catalog, by a master); lives on the node's event loop. Owns the replica's life
cycle, its proposals, its timestamps and its listeners. Opens no sockets and decides no membership.

Invariant: nothing is answered to a client that is not committed and applied here, and a replica that is FAILED or
STOPPED answers nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stele.consensus.applier import Applier
from stele.consensus.ports import Host, ReplicaOptions
from stele.consensus.replica_base import ReplicaState
from stele.consensus.replica_read import ReadPart
from stele.consensus.runtime import CoreRuntime
from stele.consensus.status import replica_status
from stele.consensus.superblock import Superblock
from stele.consensus.timestamps import decode_ceiling
from stele.consensus.whole import Whole
from stele.model.config import Configuration, Peer, decode_configuration
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Corrupt, Rejected, Retryable, SteleError, error_for, of_later_program
from stele.model.ids import NodeId, OpId, ReplicaId
from stele.raft import effects as fx
from stele.raft.core import RaftCore
from stele.raft.effects import Role
from stele.raft.events import (
    Applied,
    ChangeType,
    Compacted,
    DataArrived,
    Fitness,
    InitialState,
    PeerFailed,
    ProposeChange,
    Received,
    ReportFailed,
    Start,
    TransferLeadership,
)
from stele.raft.messages import Message, UpdateRequest
from stele.raft.status import PeerState
from stele.rpc.proto import common_pb2
from stele.tablet.files import translate
from stele.tablet.machine import Outcome, StateMachine

LOG_KEPT_MS = 120_000
"""How long flushed entries stay for a peer to come."""
RoleListener = Callable[[Role, int, ReplicaId | None], None]

_PEER_IS: dict[type, tuple[str, str]] = {
    fx.PeerReached: ("peer does not answer", "peer answers again"),
    fx.PeerSound: ("peer has FAILED", "peer is sound again"),
}


class Replica(ReadPart):
    """A running replica. `machine` is None while a young witness has no rows yet."""

    def __init__(
        self, superblock: Superblock, directory: Path, host: Host, options: ReplicaOptions | None = None
    ) -> None:
        super().__init__(superblock, directory, host, options)
        self._flushed_marks: deque[tuple[int, int]] = deque()
        self._configs: list[Configuration] = []
        self._node_of: dict[ReplicaId, NodeId] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._role_listeners: list[RoleListener] = []
        self._flushing = asyncio.Lock()
        self._flushes = Whole()
        self.needs_copy: dict[ReplicaId, str] = {}
        self.last_applied_ms = 0
        self.committed_elsewhere = 0
        """What a leader last said to be committed since this replica FAILED, and so acknowledges nothing."""

    # --- life cycle

    @property
    def busy(self) -> bool:
        """Whether somebody waits for an answer."""
        return bool(
            len(self._proposals)
            or self._reads
            or self._read_futures
            or self._answers
            or self._ceiling_waiters
        )

    def status(self) -> common_pb2.ReplicaStatusPB:
        """What it knows of itself and, as leader, of its peers."""
        return replica_status(self)

    def run(self, stream: Any, machine: StateMachine | None, initial: InitialState) -> None:
        """Start with what bootstrap found: the stream, the machine (None: a young witness) and the log's content."""
        self.stream = stream
        self.machine = machine
        self._applier = Applier(
            slice_ms=self.options.apply_slice_ms,
            applied=self._entry_applied,
            slice_done=self._slice_done,
            failed=self._failed,
        )
        if machine is not None:
            self._applier.attach(machine)
            self.committed_opid = machine.applied
            self.timestamps.in_log(machine.max_ceiling)
        else:
            self._applier.committed_index = initial.commit_index
        self._remember(initial.config)
        for _, config in initial.skipped.configs:
            self._remember(config)
        for entry in initial.entries:
            if entry.kind is EntryKind.CEILING:
                self.timestamps.in_log(decode_ceiling(entry.payload))
            if entry.kind is EntryKind.CONFIG:
                self._remember(decode_configuration(entry.payload))
        core = RaftCore(self.options.raft, self.replica_id, initial, self.host)
        status = core.status()
        self.config, self.committed_config = status.config, status.committed_config
        self.term = status.term
        self._runtime = CoreRuntime(core, stream, self, self.host.now_ms)
        self.state = ReplicaState.CONFIGURING
        self.fit_to_lead(not self.timestamps.fault)
        self._runtime.post(Start(self._runtime.now_ms()))
        self.host.changed(self)

    def fail(self, reason: str) -> None:
        """Become FAILED: abstain, serve nothing, keep the files. The node goes on."""
        if self.state in (ReplicaState.FAILED, ReplicaState.STOPPED):
            return
        self._log.error("replica failed", error=reason)
        self.state = ReplicaState.FAILED
        self.error = reason
        if self._runtime is not None:
            self._runtime.post(ReportFailed(reason))
        self._end_all(Retryable(f"this replica is FAILED: {reason}; ask another", code=Code.NOT_LEADER))
        self.host.changed(self)

    async def stop(self) -> None:
        """Stop taking part and close the store. Idempotent."""
        self._halt()
        async with self._flushing:
            machine, self.machine = self.machine, None
        if machine is not None:
            await self.host.in_thread(machine.close)

    def _halt(self) -> None:
        """Take part no more: no vote, no acknowledgement, no flush."""
        if self.state is ReplicaState.STOPPED:
            return
        self.state = ReplicaState.STOPPED
        if self._runtime is not None:
            self._runtime.stop()
        self._end_all(Retryable("this replica is stopping; ask another", code=Code.NOT_LEADER))

    def _end_all(self, error: SteleError) -> None:
        self._stop_writes(error)
        self._refuse_reads(error)
        for context in list(self._answers):
            self._answer(context, None, error)
        if self._applier is not None:
            self._applier.stop(error)

    def tick(self, now_ms: int) -> None:
        """Time has passed; called by the node for all its replicas, cheap when nothing is due."""
        if self._runtime is None:
            return
        self._runtime.tick(now_ms)
        if self.state is ReplicaState.CONFIGURING:
            self._refresh_state()
        if self.needs_copy:
            self._forget_copied()

    def on_message(self, from_node: NodeId, sender: ReplicaId, message: Message) -> None:
        """A message from another replica of this tablet, which may not be in this replica's configuration yet."""
        if self.state is ReplicaState.FAILED and isinstance(message, UpdateRequest):
            self.committed_elsewhere = max(self.committed_elsewhere, message.commit_index)
        if self._runtime is not None and self.state is not ReplicaState.STOPPED:
            self._node_of[sender] = from_node
            self._runtime.post(Received(sender, message, self._runtime.now_ms()))

    def peer_node_failed(self, node_id: str) -> None:
        """The connection to a node was reset: its replica, if it is a peer, counts as not heard."""
        peer = self.config.peer_on(node_id)
        if peer is not None and peer.replica_id != self.replica_id and self._runtime is not None:
            self._runtime.post(PeerFailed(peer.replica_id))

    def fit_to_lead(self, fit: bool) -> None:
        """Whether its node's clock is right; else it leaves leading to the others as long as one of them can."""
        if self._runtime is not None:
            self._runtime.post(Fitness(fit))

    # --- membership and leadership

    async def change_config(self, change_type: ChangeType, peer: Peer, cas_opid_index: int) -> Configuration:
        """Change one member; returns the committed configuration.

        Raises:
            Retryable: NOT_LEADER, NOT_READY, CHANGE_IN_PROGRESS, STEPPING_DOWN.
            Rejected: CAS_FAILED, UNSAFE_CHANGE.
        """
        self.check_leader()
        context = next(self._contexts)
        config: Configuration = await self._ask(
            context, ProposeChange(context, change_type, peer, cas_opid_index)
        )
        return config

    async def transfer_leadership(self, target: ReplicaId | None = None) -> None:
        """Hand leadership to `target`, or to the most advanced voter.

        Raises:
            Retryable: NOT_LEADER, TIMED_OUT (it leads on), NOT_READY.
            Rejected: the target cannot lead.
        """
        self.check_leader()
        context = next(self._contexts)
        now_ms = self._runtime.now_ms() if self._runtime is not None else 0
        await self._ask(context, TransferLeadership(context, target, now_ms))

    async def _ask(self, context: int, event: ProposeChange | TransferLeadership) -> Any:
        if self._runtime is None:
            raise self._not_leader()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[context] = future
        self._runtime.post(event)
        return await asyncio.shield(future)

    def add_role_listener(self, listener: RoleListener) -> None:
        """Call `listener(role, term, leader)` at each change, and once now."""
        self._role_listeners.append(listener)
        listener(self.role, self.term, self.leader)

    def config_at(self, index: int) -> Configuration:
        """The configuration that was in force at a log index at or above the last flush."""
        for config in reversed(self._configs):
            if config.opid_index <= index:
                return config
        return self._configs[0]

    def _remember(self, config: Configuration) -> None:
        self._configs = [c for c in self._configs if c.opid_index < config.opid_index][-15:]
        self._configs.append(config)

    # --- flushing, the log's beginning, a witness's rows

    async def flush(self) -> OpId:
        """Write what is in memory to synced files and let the log go up to there; what the store holds then.

        A flush once begun belongs to the replica: cancelling ends only the waiting, or the store would wait for ever
        for the end of a flush that nobody finishes.

        Raises:
            Retryable: DISK_FULL, NOT_READY for a replica without rows.
        """
        return await self._flushes.run(self._flush())

    async def _flush(self) -> OpId:
        async with self._flushing:
            machine = self.machine
            if machine is None or not self.running:
                raise Retryable("this replica holds no rows to flush", code=Code.NOT_READY)
            job = machine.begin_flush()
            if job is not None:
                await self.host.in_thread(job.write)
                machine.finish_flush(job)
                self.stream.set_flushed(machine.flushed.index)
            return machine.flushed

    def anchor_log(self, now_ms: int) -> None:
        """Hold the log for peers that lag, and for a while for a copy that is not yet a peer.

        The log bounds what an anchor may hold, and gives up what the disk has no space for; past that a peer needs a copy.
        What this replica itself still needs is held without an anchor, and what it has flushed a majority has committed.
        """
        core, machine = self.core, self.machine
        if core is None or machine is None:
            return
        status = core.status()
        behind = min((p.match_index for p in status.peers), default=status.all_replicated_index)
        self._flushed_marks.append((now_ms, machine.flushed.index))
        while len(self._flushed_marks) > 1 and self._flushed_marks[1][0] <= now_ms - LOG_KEPT_MS:
            self._flushed_marks.popleft()
        wanted = min(behind, self._flushed_marks[0][1])
        self.stream.anchor("peers", max(wanted, self.stream.start.index) + 1, gives_way=True)

    def log_collected(self, start: OpId) -> None:
        """The log up to and including `start` is gone."""
        if self._runtime is not None:
            self._runtime.post(Compacted(start))

    def log_reaches(self, opid: OpId) -> bool:
        """Whether this replica's log holds the committed entry `opid` durably.

        Raises:
            Retryable: it never will, because the replica does not run, or its log begins later.
        """
        core = self.core
        if core is None or not self.running:
            raise Retryable(f"the replica does not take part: {self.error or self.state.name}")
        if opid.index < core.log.start.index:
            raise Retryable(f"the log begins after {core.log.start}, the copy ends at {opid}; copy anew")
        return core.log.durable_index >= opid.index and core.log.term_at(opid.index) == opid.term

    async def data_arrived(self, machine: StateMachine) -> None:
        """The rows of a young witness are here: bring them up to the log, then tell the leader."""
        if self._applier is None or self._runtime is None:
            raise Retryable("the replica is not running", code=Code.NOT_READY)
        self.timestamps.in_log(machine.max_ceiling)
        try:
            await self._applier.catch_up(machine, self.read_log)
        except SteleError as exc:
            if of_later_program(exc):
                self._failed(exc)
            raise
        self.machine = machine
        self.stream.set_flushed(machine.flushed.index)
        self._runtime.post(DataArrived())
        self.host.changed(self)

    # --- EffectSink

    def send(self, to: ReplicaId, message: Message) -> None:
        """A message may leave now."""
        peer = self.config.peer(to) or self.committed_config.peer(to)
        node_id = peer.node_id if peer is not None else self._node_of.get(to)
        if node_id is not None:
            self.host.send(self, node_id, to, message)

    def appending(self, entries: tuple[Entry, ...]) -> None:
        """Entries are about to be written: remember the ceilings among them."""
        self.active_ms = self.host.now_ms()
        for entry in entries:
            if entry.kind is EntryKind.CEILING:
                self.timestamps.in_log(decode_ceiling(entry.payload))

    def runtime_failed(self, error: Exception) -> None:
        """Core or log refused to go on: the core can no longer say that it leads no more."""
        self._failed(error)
        self._role_changed(
            fx.RoleChanged(Role.NON_PARTICIPANT, self.term, None, f"its core has ended: {error}")
        )

    async def read_log(self, first_index: int, bytes_max: int) -> tuple[Entry, ...]:
        """Entries from the log, read in a thread; none if they were collected, which the core may not know yet.

        Raises:
            Retryable: the system has no descriptor or memory for it just now.
            Corrupt: the disk does not give what was written.
        """
        try:
            return tuple(await self.host.in_thread(self.stream.read_entries, first_index, bytes_max))
        except Rejected as exc:
            if exc.code is not Code.NOT_FOUND:
                raise
            return ()
        except OSError as exc:
            raise translate(exc, "reading the log") from exc
        except MemoryError as exc:
            raise Retryable("reading the log: no memory just now; give the node more, or try again") from exc

    def effect(self, effect: fx.Effect) -> None:
        """What the core says besides messages and appends."""
        match effect:
            case fx.Committed(entries):
                self._committed(entries)
            case fx.Proposed(context, opid):
                self._write_proposed(context, opid)
            case fx.ProposalRefused(context, code, message):
                self._write_refused(context, self._error(code, message))
            case fx.ProposalLost(opid):
                self._write_lost(opid)
            case fx.ReadReady(context, index):
                self._read_ready(context, index)
            case fx.ReadRefused(context, code, message):
                self._read_refused(context, self._error(code, message))
            case fx.RoleChanged():
                self._role_changed(effect)
            case fx.ConfigChanged(config, committed, cause):
                self._config_changed(config, committed, cause)
            case fx.ChangeCommitted(context, config):
                self._answer(context, config, None)
            case fx.TransferDone(context):
                self._answer(context, None, None)
            case fx.ChangeRefused(context, code, message) | fx.TransferFailed(context, code, message):
                self._answer(context, None, self._error(code, message))
            case fx.PeerNeedsCopy(replica_id, cause):
                if replica_id not in self.needs_copy:
                    self._log.warning("peer needs a copy", peer=replica_id, cause=cause)
                    self.needs_copy[replica_id] = cause
                    self.host.changed(self)  # the masters hear of it from this leader alone
            case fx.PeerReached(replica_id, well) | fx.PeerSound(replica_id, well):
                ill, again = _PEER_IS[type(effect)]
                if well:
                    self._log.info(again, peer=replica_id)
                else:
                    self._log.warning(ill, peer=replica_id)
                self.host.changed(self)

    def _error(self, code: Code, message: str) -> SteleError:
        if code is Code.NOT_LEADER:
            return self._not_leader()
        return error_for(code, message)

    def _answer(self, context: int, value: Any, error: SteleError | None) -> None:
        future = self._answers.pop(context, None)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
            future.exception()  # whoever asked may have gone

    def _committed(self, entries: tuple[Entry, ...]) -> None:
        self._ceilings_committed(entries)
        self.committed_opid = entries[-1].opid
        if self._applier is not None:
            self._applier.add(entries)
        if self.state is ReplicaState.CONFIGURING and entries[-1].term == self.term:
            self._refresh_state()

    def _entry_applied(self, entry: Entry, outcome: Outcome) -> None:
        if entry.timestamp > self.timestamps.applied:
            self.timestamps.applied = entry.timestamp
        if entry.kind is EntryKind.WRITE:
            self.last_applied_ms = self.host.now_ms()
            self._proposals.applied(entry, outcome)

    def _slice_done(self, index: int) -> None:
        if self._runtime is not None:
            self._runtime.tell(Applied(index))

    def _role_changed(self, change: fx.RoleChanged) -> None:
        led = self.role is Role.LEADER
        if change.leader is None and (self.leader is not None or led):
            self._leaderless_since_ms = self.host.now_ms()
        self.role, self.term, self.leader = change.role, change.term, change.leader
        self._serves = change.serves
        self.active_ms = self.host.now_ms()
        self._log.info("role", role=self.role.name, term=self.term, leader=self.leader, cause=change.cause)
        if self.role is Role.LEADER and not led:
            self._begin_writes()
        elif led and self.role is not Role.LEADER:
            error = self._not_leader()
            self._end_writes(error)
            self._refuse_reads(error)
            self.needs_copy.clear()
        if self.running:
            self.state = ReplicaState.CONFIGURING
            self._refresh_state()
        for listener in self._role_listeners:
            listener(self.role, self.term, self.leader)
        self.host.changed(self)

    def _config_changed(self, config: Configuration, committed: bool, cause: str) -> None:
        if committed:
            self.committed_config = config
        else:
            self.config = config
        if committed and self.config.opid_index <= config.opid_index:
            self.config = config
        self._remember(config)
        self._log.info("configuration", index=config.opid_index, committed=committed, cause=cause)
        self.host.changed(self)

    def _refresh_state(self) -> None:
        """Leave CONFIGURING once there is a leader, and an entry of its term known committed."""
        core = self.core
        if core is not None and self.state is ReplicaState.CONFIGURING and core.term_committed:
            self.state = ReplicaState.RUNNING
            self.host.changed(self)

    def _forget_copied(self) -> None:
        """Peers that are gone, or whose acknowledgement came after all: believed to lack entries they would be replaced."""
        peers = self.core.status().peers if self.core is not None else ()
        lacking = {p.replica_id for p in peers if p.state is PeerState.SNAPSHOT}
        if not self.needs_copy.keys() <= lacking:
            self.needs_copy = {peer: cause for peer, cause in self.needs_copy.items() if peer in lacking}
            self.host.changed(self)

    def _failed(self, error: Exception) -> None:
        """What a later program wrote is no damage: as FAILED this replica would be replaced, and its rows erased."""
        if of_later_program(error):
            self._halt()
            self.host.fail(
                Rejected(
                    f"replica {self.replica_id} of tablet {self.tablet_id} met what a later program wrote, upgrade this "
                    f"one: {error.args[0]}",
                    code=Code.UNSUPPORTED_VERSION,
                )
            )
        elif isinstance(error, Corrupt):
            self.fail(str(error))
        else:
            self.fail(f"{error}; the node's log has more")


__all__ = ["Replica", "ReplicaState", "RoleListener"]
