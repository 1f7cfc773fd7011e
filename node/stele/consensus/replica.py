"""One replica at work: raft core, its stream in the log, a state machine and the node's transport, glued together.

Made by the tablet manager (and, for the catalog, by a master); lives on the node's event loop. Owns the replica's life
cycle and its listeners, and says what each effect of the core means. Opens no sockets and decides no membership.

Invariant: nothing is answered to a client that is not committed and applied here, and a replica that is FAILED or
STOPPED answers nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stele.consensus.applier import Applier
from stele.consensus.edge import Edge
from stele.consensus.ports import Host, ReplicaOptions
from stele.consensus.replica_base import ReplicaState
from stele.consensus.replica_members import MemberPart
from stele.consensus.runtime import CoreRuntime
from stele.consensus.status import replica_status
from stele.consensus.superblock import Superblock
from stele.consensus.timestamps import decode_ceiling
from stele.model.config import decode_configuration
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Corrupt, Rejected, Retryable, SteleError, of_later_program
from stele.model.ids import NodeId, ReplicaId
from stele.raft import effects as fx
from stele.raft.core import RaftCore
from stele.raft.effects import Role
from stele.raft.events import (
    DataArrived,
    Fitness,
    InitialState,
    PeerFailed,
    ReportFailed,
    Start,
)
from stele.raft.messages import Message, UpdateRequest
from stele.rpc.proto import common_pb2
from stele.tablet.machine import Outcome, StateMachine

RoleListener = Callable[[Role, int, ReplicaId | None], None]

_PEER_IS: dict[type, tuple[str, str]] = {
    fx.PeerReached: ("peer does not answer", "peer answers again"),
    fx.PeerSound: ("peer has FAILED", "peer is sound again"),
}


class Replica(MemberPart):
    """A running replica. `machine` is None while a young witness has no rows yet."""

    def __init__(
        self, superblock: Superblock, directory: Path, host: Host, options: ReplicaOptions | None = None
    ) -> None:
        super().__init__(superblock, directory, host, options)
        self._role_listeners: list[RoleListener] = []
        self._edge: Edge | None = None
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
            in_thread=self.host.in_thread,
            applied=self._entry_applied,
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
        self._edge = Edge(core, self.host)
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
        self.ticked_ms = now_ms
        self._runtime.tick(now_ms)
        if self.state is ReplicaState.CONFIGURING:
            self._refresh_state()
        if self.needs_copy:
            self._forget_copied()

    def on_message(self, from_node: NodeId, sender: ReplicaId, message: Message) -> None:
        """A message from another replica of this tablet, which may not be in this replica's configuration yet."""
        if self.state is ReplicaState.FAILED and isinstance(message, UpdateRequest):
            self.committed_elsewhere = max(self.committed_elsewhere, message.commit_index)
        edge, runtime = self._edge, self._runtime
        if edge is None or runtime is None or self.state is ReplicaState.STOPPED:
            return
        if self._node_of.get(sender) != from_node and not self._meets(sender, from_node):
            return
        admitted = edge.admit(from_node, message)
        if admitted is not None:
            runtime.receive(sender, admitted)

    def peer_node_failed(self, node_id: str) -> None:
        """The connection to a node was reset: its replica, if it is a peer, counts as not heard."""
        peer = self.config.peer_on(node_id)
        if peer is not None and peer.replica_id != self.replica_id and self._runtime is not None:
            self._runtime.post(PeerFailed(peer.replica_id))

    def fit_to_lead(self, fit: bool) -> None:
        """Whether its node's clock is right; else it leaves leading to the others as long as one of them can."""
        if self._runtime is not None:
            self._runtime.post(Fitness(fit))

    def add_role_listener(self, listener: RoleListener) -> None:
        """Call `listener(role, term, leader)` at each change, and once now."""
        self._role_listeners.append(listener)
        listener(self.role, self.term, self.leader)

    # --- a witness's rows

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
        node_id = self._node_of.get(to)
        if node_id is not None:
            self.host.send(self, node_id, to, message)

    def appending(self, entries: tuple[Entry, ...]) -> None:
        """Entries are about to be written: remember the ceilings among them."""
        self.active_ms = self.ticked_ms
        for entry in entries:
            if entry.kind is EntryKind.CEILING:
                self.timestamps.in_log(decode_ceiling(entry.payload))

    def runtime_failed(self, error: Exception) -> None:
        """Core or log refused to go on: the core can no longer say that it leads no more."""
        self._failed(error)
        self._role_changed(
            fx.RoleChanged(Role.NON_PARTICIPANT, self.term, None, f"its core has ended: {error}")
        )

    def effect(self, effect: fx.Effect) -> None:
        """What the core says besides messages and appends."""
        match effect:
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
                self._needs_copy(replica_id, cause)
            case fx.PeerForgot(replica_id, cause):
                self._log.error("peer forgot what it acknowledged", peer=replica_id, cause=cause)
            case fx.MessageIgnored(sender, cause):
                self.host.dropped(self._node_of.get(sender, NodeId("")), "log", f"replica {sender}: {cause}")
            case fx.PeerReached(replica_id, well) | fx.PeerSound(replica_id, well):
                ill, again = _PEER_IS[type(effect)]
                if well:
                    self._log.info(again, peer=replica_id)
                else:
                    self._log.warning(ill, peer=replica_id)
                self.host.changed(self)

    def committed(self, entries: tuple[Entry, ...]) -> None:
        """Entries are committed: they are applied from here on."""
        if self._ceilings:
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
            self.last_applied_ms = self.ticked_ms
            if self._proposals.in_log:
                self._proposals.applied(entry, outcome)

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

    def _refresh_state(self) -> None:
        """Leave CONFIGURING once there is a leader, and an entry of its term known committed."""
        core = self.core
        if core is not None and self.state is ReplicaState.CONFIGURING and core.term_committed:
            self.state = ReplicaState.RUNNING
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
