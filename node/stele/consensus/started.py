"""A replica whose core runs: makes its parts from what bootstrap found, and gives them the effects of the
core.

Made by `Replica.run`; lives on the node's event loop. Opens no sockets and decides no membership.

Invariant: a client's write is answered only after it is committed and applied here. The exception is a write
in memory, which may be answered once every voter has logged it (early.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

from stele.consensus.applier import Applier
from stele.consensus.following import Following
from stele.consensus.members import Members
from stele.consensus.message_bounds import MessageBounds
from stele.consensus.ports import Host, ReplicaOptions, ReplicaStream
from stele.consensus.reads import Reads
from stele.consensus.runtime import CoreRuntime
from stele.consensus.state import ReplicaState, Standing
from stele.consensus.storage import Storage
from stele.consensus.timestamps import Timestamps, decode_ceiling
from stele.consensus.writes import Writes
from stele.model.cluster_version import LEADER_LEASES_VERSION
from stele.model.entry import Entry, EntryKind
from stele.model.errors import SteleError, of_later_program
from stele.model.ids import OPID_NONE, NodeId, OpId, ReplicaId
from stele.raft import effects as fx
from stele.raft.core import RaftCore
from stele.raft.effects import Role
from stele.raft.events import DataArrived, InitialState
from stele.raft.messages import Message
from stele.tablet.machine import StateMachine

_PEER_IS: dict[type, tuple[str, str]] = {
    fx.PeerReached: ("peer does not answer", "peer answers again"),
    fx.PeerSound: ("peer has FAILED", "peer is sound again"),
}


class StartedReplica:
    """The parts of one replica, and the EffectSink of its core. `failed` is called with the error that ends
    it.

    `active_ms`: when its log or its role last changed, by the node's clock.
    """

    def __init__(
        self,
        standing: Standing,
        host: Host,
        options: ReplicaOptions,
        stream: ReplicaStream,
        machine: StateMachine | None,
        initial: InitialState,
        failed: Callable[[Exception], None],
    ) -> None:
        self._standing = standing
        self._host = host
        self._failed = failed
        self._options = options
        self.active_ms = host.now_ms()
        self.committed_opid: OpId = machine.applied if machine is not None else OPID_NONE
        self.core = RaftCore(options.raft, standing.replica_id, initial, host)
        lease_clock = partial(_lease_clock, host) if options.raft.lease_ms else None
        self.runtime = CoreRuntime(self.core, stream, self, host.now_ms, lease_clock)
        self.bounds = MessageBounds(self.core, host)
        contexts = itertools.count(1)
        self.members = Members(standing, host, self.runtime, contexts, initial)
        self.storage = Storage(standing, host, stream, self.runtime, machine)
        self.writes = Writes(
            standing,
            host,
            options,
            self.runtime,
            self.storage,
            _timestamps(host, options, machine, initial),
            contexts,
        )
        self.applier = Applier(
            slice_ms=options.apply_slice_ms,
            in_thread=host.in_thread,
            applied=self.writes.applied,
            failed=failed,
        )
        if machine is not None:
            self.applier.attach(machine)
        else:
            self.applier.committed_index = initial.commit_index
        self.reads = Reads(
            standing, host, options, self.runtime, self.storage, self.writes, self.applier, contexts
        )
        self.following = Following(standing, host, self.core, self.members.node_of.get, self.applier)
        status = self.core.status()
        standing.begin(status.term, status.config, status.committed_config)

    # --- questions

    @property
    def busy(self) -> bool:
        """Whether a caller waits for an answer."""
        return self.writes.busy or self.reads.busy or self.members.busy

    @property
    def caught_up(self) -> bool:
        """As `Replica.caught_up`."""
        return self.runtime.quiet or self.core.caught_up_ms is not None

    # --- a witness's rows, the end

    async def rows_arrived(self, machine: StateMachine) -> None:
        """Apply the log beyond the rows that a young witness has received, then tell the leader."""
        self.writes.timestamps.in_log(machine.max_ceiling)
        try:
            await self.applier.catch_up(machine, self.storage.read_log)
        except SteleError as exc:
            if of_later_program(exc):
                self._failed(exc)
            raise
        self.storage.take(machine)
        self.runtime.post(DataArrived())

    def refuse_all(self, error: SteleError) -> None:
        """Give each caller that waits `error`, or UNKNOWN_OUTCOME, because the replica ends."""
        self.writes.stop(error)
        self.reads.refuse_all(error)
        self.members.refuse_all(error)
        self.applier.stop(error)

    # --- EffectSink

    def takes_beats(self, to: ReplicaId) -> bool:
        """As `EffectSink.takes_beats`."""
        node_id = self.members.node_of.get(to)
        return node_id is not None and self._host.takes_beats(node_id)

    def beat(self, to: ReplicaId, term: int, commit_index: int) -> None:
        """As `EffectSink.beat`."""
        node_id = self.members.node_of.get(to)
        if node_id is not None:
            self._host.beat(self._standing, node_id, to, term, commit_index)

    def send(self, to: ReplicaId, message: Message) -> None:
        """Send a Raft message. Whatever it depended on is durable."""
        node_id = self.members.node_of.get(to)
        if node_id is not None:
            self._host.send(self._standing, node_id, to, message)

    def appending(self, entries: tuple[Entry, ...]) -> None:
        """Note the ceilings among entries that are about to be written to the log."""
        self.active_ms = self.runtime.ticked_ms
        for entry in entries:
            if entry.kind is EntryKind.CEILING:
                self.writes.timestamps.in_log(decode_ceiling(entry.payload))

    def committed(self, entries: tuple[Entry, ...]) -> None:
        """Have committed entries applied."""
        if self.writes.ceilings:
            self.writes.ceilings_committed(entries)
        if self.writes.proposals.in_log:
            self.writes.proposals.committed(entries)
        self.committed_opid = entries[-1].opid
        self.applier.add(entries)
        if self._standing.state is ReplicaState.CONFIGURING and entries[-1].term == self._standing.term:
            self.leave_configuring()

    async def read_log(self, first_index: int, bytes_max: int) -> tuple[Entry, ...]:
        """As `Storage.read_log`."""
        return await self.storage.read_log(first_index, bytes_max)

    def woken(self) -> None:
        """Have the node tick this replica again: the core's time goes on."""
        self._host.woken(self._standing)

    def runtime_failed(self, error: Exception) -> None:
        """End the replica: the core or the log has failed. Report that it no longer leads, which the core
        cannot do.
        """
        self._failed(error)
        cause = f"its core has ended: {error}"
        self._role_changed(fx.RoleChanged(Role.NON_PARTICIPANT, self._standing.term, None, cause))

    def effect(self, effect: fx.Effect) -> None:
        """Give any other effect to the part that it concerns."""
        standing, log = self._standing, self._standing.log
        match effect:
            case fx.Proposed(context, opid):
                self.writes.proposed(context, opid)
            case fx.ProposalRefused(context, code, message):
                self.writes.refused(context, standing.error_of(code, message))
            case fx.HeldByAll(index):
                self.writes.held_by_all(index)
            case fx.ProposalLost(opid):
                self.writes.lost(opid)
            case fx.ReadReady(context, index):
                self.reads.ready(context, index)
            case fx.ReadRefused(context, code, message):
                self.reads.refused(context, standing.error_of(code, message))
            case fx.RoleChanged():
                self._role_changed(effect)
            case fx.ConfigChanged():
                self.members.configured(effect)
            case fx.ChangeCommitted(context, config):
                self.members.changed(context, config)
            case fx.TransferDone(context):
                self.members.transferred(context)
            case fx.ChangeRefused(context, code, message) | fx.TransferFailed(context, code, message):
                self.members.refused(context, standing.error_of(code, message))
            case fx.PeerNeedsCopy(replica_id, cause):
                self.members.peer_needs_copy(replica_id, cause)
            case fx.PeerForgot(replica_id, cause):
                log.error("peer forgot what it acknowledged", peer=replica_id, cause=cause)
            case fx.MessageIgnored(sender, cause):
                node_id = self.members.node_of.get(sender, NodeId(""))
                self._host.dropped(node_id, "log", f"replica {sender}: {cause}")
            case fx.PeerReached(replica_id, well, cause) | fx.PeerSound(replica_id, well, cause):
                ill, again = _PEER_IS[type(effect)]
                if well:
                    log.info(again, peer=replica_id, cause=cause)
                else:
                    log.warning(ill, peer=replica_id, cause=cause)
                standing.report()

    def _role_changed(self, change: fx.RoleChanged) -> None:
        standing = self._standing
        led = standing.role is Role.LEADER
        standing.role_changed(change)
        self.active_ms = self._host.now_ms()
        if standing.role is Role.LEADER and not led:
            self.writes.begin_leading()
        elif led and standing.role is not Role.LEADER:
            error = standing.not_leader()
            self.writes.end_leading(error)
            self.reads.refuse_all(error)
            self.members.end_leading()
        self.leave_configuring()
        standing.tell()

    def leave_configuring(self) -> None:
        """Leave CONFIGURING if a leader is known, and an entry of its term is known committed."""
        if self.core.term_committed:
            self._standing.term_committed()


def _lease_clock(host: Host) -> int:
    """Return the node's steady clock in milliseconds. 0: leases are off, because a node may run a release
    that forgets its promises.
    """
    return host.steady_us() // 1_000 if host.cluster_version() >= LEADER_LEASES_VERSION else 0


def _timestamps(
    host: Host, options: ReplicaOptions, machine: StateMachine | None, initial: InitialState
) -> Timestamps:
    """Make timestamps that begin above all ceilings in the store and in the log's last entries."""
    timestamps = Timestamps(
        host.wall_us,
        options.ceiling_ahead_us,
        options.ceiling_ahead_max_ms * 1000,
        options.clock_error_max_ms * 1000,
        fault=host.clock_fault,
        node=host.node_id,
    )
    if machine is not None:
        timestamps.in_log(machine.max_ceiling)
    for entry in initial.entries:
        if entry.kind is EntryKind.CEILING:
            timestamps.in_log(decode_ceiling(entry.payload))
    return timestamps
