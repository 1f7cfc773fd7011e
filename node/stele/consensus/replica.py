"""A replica as its node knows it, from the moment it is found on the volume until it is removed: its life cycle.

Made by the tablet manager; lives on the node's event loop. `started` holds its parts once bootstrap has ended; what they
do is asked of them: `replica.writes.submit(...)`, `replica.reads.snapshot_ready(...)`.

Invariant: a replica that is FAILED or STOPPED answers nothing.
"""

from __future__ import annotations

from pathlib import Path

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
    """One replica. `started` is None until bootstrap has ended, and stays so where the log is damaged."""

    def __init__(
        self, superblock: Superblock, directory: Path, host: Host, options: ReplicaOptions | None = None
    ) -> None:
        self.directory = directory
        self.host = host
        self.options = options or ReplicaOptions()
        self.standing = Standing(superblock, host, self.options.raft.election_max_ms)
        self.started: StartedReplica | None = None
        self.committed_elsewhere = 0
        """The highest index that a leader called committed since this replica FAILED, which acknowledges nothing."""

    # --- its parts

    @property
    def writes(self) -> Writes:
        """Its write path.

        Raises, as all parts do before it is started:
            Retryable: NOT_READY during bootstrap, NOT_LEADER where it FAILED before its core was made.
        """
        if self.started is None:  # asked for each block: a call less
            raise self.standing.refusal()
        return self.started.writes

    @property
    def reads(self) -> Reads:
        """Its read path."""
        return self._parts().reads

    @property
    def members(self) -> Members:
        """Its group."""
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
        """Its rows; None before it is started, once it has stopped, and for a young witness, which has none yet."""
        return self.started.storage.machine if self.started is not None else None

    @property
    def core(self) -> RaftCore | None:
        """The raft core, None before start and for a replica whose log is damaged."""
        return self.started.core if self.started is not None else None

    @property
    def runtime(self) -> CoreRuntime | None:
        """What feeds the core, None where there is none."""
        return self.started.runtime if self.started is not None else None

    # --- where it stands

    @property
    def superblock(self) -> Superblock:
        """What it is, as its file says."""
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
        """Its own id, never used again."""
        return self.standing.superblock.replica_id

    @property
    def state(self) -> ReplicaState:
        """Where it is in its life."""
        return self.standing.state

    @property
    def error(self) -> str:
        """Why it has FAILED, or why it could not be started yet."""
        return self.standing.error

    @property
    def role(self) -> Role:
        """Its role, as the core said last."""
        return self.standing.role

    @property
    def term(self) -> int:
        """The term of that role."""
        return self.standing.term

    @property
    def leader(self) -> ReplicaId | None:
        """The leader of that term, where known."""
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
    def staleness_ms(self) -> int | None:
        """How old what is applied here is at most; None: not known."""
        return self.started.staleness_ms if self.started is not None and self.running else None

    @property
    def busy(self) -> bool:
        """Whether somebody waits for an answer."""
        return self.started is not None and self.started.busy

    @property
    def active_ms(self) -> int:
        """When something last happened to it that keeps its group awake, by the node's clock; 0: never."""
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
        """What it knows of itself and, as leader, of its peers."""
        return replica_status(self.standing, self.started)

    def add_role_listener(self, listener: RoleListener) -> None:
        """Call `listener` at each change of role, term or leader, and once now."""
        self.standing.add_role_listener(listener)

    # --- life cycle

    def run(self, stream: ReplicaStream, machine: StateMachine | None, initial: InitialState) -> None:
        """Start with what bootstrap found: the stream, the machine (None: a young witness) and the log's content."""
        self.started = started = StartedReplica(
            self.standing, self.host, self.options, stream, machine, initial, self._failed
        )
        self.fit_to_lead(not started.writes.timestamps.fault)
        started.runtime.post(Start(started.runtime.now_ms()))
        self.standing.report()

    def start_waits(self, error: str) -> None:
        """It could not be started because of `error`, and will be tried again; "": it is tried now."""
        self.standing.waits(error)
        self.standing.report()

    def fail(self, reason: str) -> None:
        """Become FAILED: abstain, serve nothing, keep the files. The node goes on."""
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
        """Take part no more: no vote, no acknowledgement, no flush."""
        if not self.standing.stop(cause):
            return
        if self.started is not None:
            self.started.runtime.stop()
        self._refuse_all(Retryable("this replica is stopping; ask another", code=Code.NOT_LEADER))

    def _refuse_all(self, error: SteleError) -> None:
        if self.started is not None:
            self.started.refuse_all(error)

    def _failed(self, error: Exception) -> None:
        """What a later program wrote is no damage: as FAILED this replica would be replaced, and its rows erased."""
        if of_later_program(error):
            self._halt(f"it met what a later program wrote: {error.args[0]}")
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

    # --- what its node tells it

    def tick(self, now_ms: int) -> None:
        """Time has passed; called by the node for all its replicas, cheap when nothing is due."""
        started = self.started
        if started is None:
            return
        started.runtime.tick(now_ms)
        if self.standing.state is ReplicaState.CONFIGURING:
            started.look_whether_committed()
        if started.members.needs_copy:
            started.members.forget_copied()

    def on_message(self, from_node: NodeId, sender: ReplicaId, message: Message) -> None:
        """A message from another replica of this tablet, which may not be in this replica's configuration yet."""
        started, state = self.started, self.standing.state
        if state is ReplicaState.FAILED and isinstance(message, UpdateRequest):
            self.committed_elsewhere = max(self.committed_elsewhere, message.commit_index)
        if started is None or state is ReplicaState.STOPPED:
            return
        members = started.members
        if members.node_of.get(sender) != from_node and not members.meets(sender, from_node):
            return
        admitted = started.bounds.admit(from_node, message)
        if admitted is not None:
            started.runtime.receive(sender, admitted)

    def peer_node_failed(self, node_id: str) -> None:
        """The connection to a node was reset: its replica, if it is a peer, counts as not heard."""
        peer = self.config.peer_on(node_id)
        if peer is not None and peer.replica_id != self.replica_id and self.started is not None:
            self.started.runtime.post(PeerFailed(peer.replica_id))

    def fit_to_lead(self, fit: bool) -> None:
        """Whether its node's clock is right; else it leaves leading to the others as long as one of them can."""
        if self.started is not None:
            self.started.runtime.post(Fitness(fit))

    async def rows_arrived(self, superblock: Superblock, machine: StateMachine) -> None:
        """The rows of a young witness are here. On return they are up to the log, and it is what `superblock` says.

        Raises:
            Retryable: it does not run, or ended meanwhile; the rows are not taken.
        """
        await self._parts().rows_arrived(machine)
        self.standing.rows_arrived(superblock)
        self.standing.report()


__all__ = ["Replica", "ReplicaState", "RoleListener"]
