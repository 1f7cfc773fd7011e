"""The life cycle of a replica, from when its node finds it on the volume until it is removed.

Made by the tablet manager; lives on the node's event loop. `started` holds its parts once bootstrap has
ended. Callers use the parts themselves: `replica.writes.submit(...)`, `replica.reads.snapshot_ready(...)`.

Invariant: a replica that is FAILED or STOPPED answers nothing.
"""

from __future__ import annotations

from pathlib import Path

from stele.consensus.following import Following
from stele.consensus.members import Members
from stele.consensus.ports import Host, ReplicaOptions, ReplicaStream
from stele.consensus.reads import Reads
from stele.consensus.runtime import CoreRuntime
from stele.consensus.started import StartedReplica
from stele.consensus.state import ReplicaState, RoleListener, Standing
from stele.consensus.status import replica_status
from stele.consensus.storage import Storage
from stele.consensus.superblock import Superblock
from stele.consensus.writes import Writes
from stele.model.config import Configuration, Peer
from stele.model.errors import Code, Corrupt, Rejected, Retryable, SteleError, of_later_program
from stele.model.ids import OPID_NONE, NodeId, OpId, ReplicaId, TabletId
from stele.raft.core import RaftCore
from stele.raft.effects import Role
from stele.raft.events import Fitness, InitialState, PeerFailed, ReportFailed, Start
from stele.raft.messages import Message, UpdateRequest
from stele.rpc.proto import common_pb2
from stele.tablet.machine import StateMachine


class Replica:
    """One replica. `started` is None until bootstrap has ended, and stays None if the log is damaged."""

    def __init__(
        self, superblock: Superblock, directory: Path, host: Host, options: ReplicaOptions | None = None
    ) -> None:
        self.directory = directory
        self.host = host
        self.options = options or ReplicaOptions()
        self.standing = Standing(superblock, host, self.options.raft.election_max_ms)
        self.started: StartedReplica | None = None
        self.committed_elsewhere = 0
        """The highest commit index that a leader has sent since this replica FAILED."""
        self.load = 0
        """The requests of clients per second, as reported to the masters (`stele.tserver.leader_load`)."""

    # --- its parts

    @property
    def writes(self) -> Writes:
        """Its write path. The other parts raise the same errors before the replica is started.

        Raises:
            Retryable: NOT_READY during bootstrap, NOT_LEADER if it FAILED before its core was made.
        """
        if self.started is None:  # as `_parts`, which would cost one more call for each block
            raise self.standing.refusal()
        return self.started.writes

    @property
    def reads(self) -> Reads:
        """Its read path."""
        return self._parts().reads

    @property
    def following(self) -> Following:
        """What a follower knows about the age of its rows. Raises as `writes`."""
        return self._parts().following

    @property
    def members(self) -> Members:
        """Members and leadership of its group."""
        return self._parts().members

    @property
    def storage(self) -> Storage:
        """Its rows and its log."""
        return self._parts().storage

    def _parts(self) -> StartedReplica:
        if self.started is None:
            raise self.standing.refusal()
        return self.started

    @property
    def machine(self) -> StateMachine | None:
        """Its state machine.

        None before it is started, after it has stopped, and for a young witness, which has no rows.
        """
        return self.started.storage.machine if self.started is not None else None

    @property
    def core(self) -> RaftCore | None:
        """The raft core; None before it is started, and if its log is damaged."""
        return self.started.core if self.started is not None else None

    @property
    def runtime(self) -> CoreRuntime | None:
        """The runtime of the core; None where there is no core."""
        return self.started.runtime if self.started is not None else None

    # --- its state

    @property
    def superblock(self) -> Superblock:
        """Its superblock, as on disk."""
        return self.standing.superblock

    @property
    def raw_tablet_id(self) -> bytes:
        """The id of its tablet, as messages carry it."""
        return self.standing.raw_tablet_id

    @property
    def tablet_id(self) -> TabletId:
        """The tablet this is a replica of."""
        return self.standing.superblock.tablet_id

    @property
    def replica_id(self) -> ReplicaId:
        """Its own id, which no other replica ever gets."""
        return self.standing.superblock.replica_id

    @property
    def state(self) -> ReplicaState:
        """Its life-cycle state."""
        return self.standing.state

    @property
    def error(self) -> str:
        """Why it FAILED, or why it could not be started yet."""
        return self.standing.error

    @property
    def role(self) -> Role:
        """Its role, as the core said last."""
        return self.standing.role

    @property
    def term(self) -> int:
        """The present term."""
        return self.standing.term

    @property
    def leader(self) -> ReplicaId | None:
        """The leader of the present term, where known."""
        return self.standing.leader

    @property
    def config(self) -> Configuration:
        """The active configuration, committed or not."""
        return self.standing.config

    @property
    def committed_config(self) -> Configuration:
        """The last configuration known committed."""
        return self.standing.committed_config

    @property
    def is_leader(self) -> bool:
        """Whether it leads and holds rows."""
        return self.standing.leads

    @property
    def running(self) -> bool:
        """Whether it takes part: neither BOOTSTRAPPING, STOPPED nor FAILED."""
        return self.standing.running

    @property
    def committed_opid(self) -> OpId:
        """The last entry known committed."""
        return self.started.committed_opid if self.started is not None else OPID_NONE

    @property
    def applied_index(self) -> int:
        """The last log index that is applied."""
        return self.started.applier.applied_index if self.started is not None else 0

    @property
    def caught_up(self) -> bool:
        """Whether it had, at some time since its start, everything that its leader had committed."""
        return self.started is not None and self.running and self.started.caught_up

    @property
    def busy(self) -> bool:
        """Whether a caller waits for an answer."""
        return self.started is not None and self.started.busy

    @property
    def active_ms(self) -> int:
        """When its log, role or reads last changed, by the node's clock; 0: never.

        A group rests after some idle time.
        """
        started = self.started
        return max(started.active_ms, started.reads.asked_ms) if started is not None else 0

    def leader_peer(self) -> Peer | None:
        """The leader, where known."""
        return self.standing.leader_peer()

    def check_leader(self) -> None:
        """Raise unless this replica leads and holds rows: NOT_READY, NOT_LEADER with a hint, or NO_QUORUM."""
        if not self.standing.leads:
            raise self.standing.refusal()

    def status(self) -> common_pb2.ReplicaStatusPB:
        """The status of this replica and, if it leads, of its peers."""
        status = replica_status(self.standing, self.started)
        status.load = self.load
        return status

    def add_role_listener(self, listener: RoleListener) -> None:
        """Call `listener` at each change of role, term or leader, and once now."""
        self.standing.add_role_listener(listener)

    # --- life cycle

    def run(self, stream: ReplicaStream, machine: StateMachine | None, initial: InitialState) -> None:
        """Start with the stream, the state machine and the log's content that bootstrap found.

        `machine` None: a young witness, which has no rows.
        """
        self.started = started = StartedReplica(
            self.standing, self.host, self.options, stream, machine, initial, self._failed
        )
        self.fit_to_lead(not started.writes.timestamps.fault)
        started.runtime.post(Start(started.runtime.now_ms()))
        self.standing.report()

    def start_waits(self, error: str) -> None:
        """Note that the start failed because of `error`, and is tried again later. "": it is being tried now."""
        self.standing.waits(error)
        self.standing.report()

    def fail(self, reason: str) -> None:
        """Become FAILED: abstain, serve nothing, keep the files. The node itself continues."""
        if not self.standing.fail(reason):
            return
        if self.started is not None:
            self.started.runtime.post(ReportFailed(reason))
        self._refuse_all(Retryable(f"this replica is FAILED: {reason}; ask another", code=Code.NOT_LEADER))
        self.standing.report()

    async def stop(self) -> None:
        """Stop taking part and close the store. Idempotent."""
        self._halt("it was removed, or its node stops")
        if self.started is not None:
            await self.started.storage.close()

    def _halt(self, cause: str) -> None:
        """Stop taking part: no vote, no acknowledgement, no flush."""
        if not self.standing.stop(cause):
            return
        if self.started is not None:
            self.started.runtime.stop()
        self._refuse_all(Retryable("this replica is stopping; ask another", code=Code.NOT_LEADER))

    def _refuse_all(self, error: SteleError) -> None:
        if self.started is not None:
            self.started.refuse_all(error)

    def _failed(self, error: Exception) -> None:
        """End this replica because of `error`.

        Files of a later release are not damage. A FAILED replica would be replaced and its rows erased, so
        the node ends instead.
        """
        if of_later_program(error):
            self._halt(f"it has data that a later release wrote: {error.args[0]}")
            self.host.fail(
                Rejected(
                    f"replica {self.replica_id} of tablet {self.tablet_id[:8]} has data that a later release wrote; "
                    f"upgrade this node: {error.args[0]}",
                    code=Code.UNSUPPORTED_VERSION,
                )
            )
        elif isinstance(error, Corrupt):
            self.fail(str(error))
        else:
            self.fail(f"{error}; see the node's log for more")

    # --- what its node reports to it

    def tick(self, now_ms: int) -> bool:
        """Tell the core that time has passed. Returns whether more ticks are needed.

        A replica at rest needs none until `Host.woken`.
        """
        started = self.started
        if started is None:
            return True
        started.runtime.tick(now_ms)
        if self.standing.state is ReplicaState.CONFIGURING:
            started.leave_configuring()
        if started.members.needs_copy:
            started.members.forget_copied()
            return True
        return not started.runtime.quiet or self.standing.state is not ReplicaState.RUNNING

    def vouches(self, from_node: NodeId, leader: ReplicaId, term: int) -> bool:
        """Whether this replica follows `leader`, on that node, in `term`. If so, it has not voted in a later
        term until now.
        """
        started = self.started
        return (
            started is not None
            and self.standing.running
            and started.members.node_of.get(leader) == from_node
            and started.core.vouches(leader, term)
        )

    def take_beat(
        self, from_node: NodeId, leader: ReplicaId, term: int, commit_index: int, now_ms: int
    ) -> bool:
        """Hear that `leader`, on that node, leads `term` and has committed up to `commit_index`.

        Returns False if it must send a heartbeat: this replica does not follow it, or a heartbeat would say more."""
        started = self.started
        return (
            started is not None
            and self.standing.running
            and started.members.node_of.get(leader) == from_node
            and started.runtime.take_beat(leader, term, commit_index, now_ms)
        )

    def beat_answered(self, peer: ReplicaId, term: int, followed: bool, now_ms: int) -> None:
        """A peer answered a beat of this replica of that term: it followed, or wants a heartbeat."""
        started = self.started
        if started is not None:
            started.runtime.beat_answered(peer, term, followed, now_ms)

    def has_on(self, node_id: NodeId, replica_id: ReplicaId) -> bool:
        """Whether this replica's configurations place replica `replica_id` of its group on node `node_id`."""
        return self.started is not None and self.started.members.node_of.get(replica_id) == node_id

    def on_message(self, from_node: NodeId, sender: ReplicaId, message: Message) -> None:
        """Take a message from another replica of this tablet. This replica's configuration may not name the
        sender yet.
        """
        started, state = self.started, self.standing.state
        if state is ReplicaState.FAILED and isinstance(message, UpdateRequest):
            self.committed_elsewhere = max(self.committed_elsewhere, message.commit_index)
        if started is None or state is ReplicaState.STOPPED:
            return
        members = started.members
        if members.node_of.get(sender) != from_node and not members.learn_sender(sender, from_node):
            return
        admitted = started.bounds.admit(from_node, message)
        if admitted is not None:
            started.runtime.receive(sender, admitted)

    def peer_node_failed(self, node_id: str) -> None:
        """Tell the core that a peer has failed: the connection to its node was reset."""
        peer = self.config.peer_on(node_id)
        if peer is not None and peer.replica_id != self.replica_id and self.started is not None:
            self.started.runtime.post(PeerFailed(peer.replica_id))

    def fit_to_lead(self, fit: bool) -> None:
        """Tell the core whether its node's clock is right. If not, this replica leads only where no other
        can.
        """
        if self.started is not None:
            self.started.runtime.post(Fitness(fit))

    async def rows_arrived(self, superblock: Superblock, machine: StateMachine) -> None:
        """Take in the rows that a young witness has received. On return they hold all that is committed, and
        `superblock` is in force.

        Raises:
            Retryable: the replica does not run, or ended meanwhile. The rows are not taken in.
        """
        await self._parts().rows_arrived(machine)
        self.standing.rows_arrived(superblock)
        self.standing.report()


__all__ = ["Replica", "ReplicaState", "RoleListener"]
