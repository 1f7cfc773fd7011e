"""Quiet groups: an idle group sends no heartbeats, and time stands still for its cores. Instead its nodes
listen for each other.

The leader of an idle group sends one last update, marked quiet, and stops its core's time. A follower that
has all entries, and follows that leader, stops its own time and does not answer. Any other replica answers as
usual, which wakes the leader. The next message, write, read or change wakes a replica. So does a peer's node
that falls silent. The replica's time goes on where it stopped.

Invariant: a core's time stands still only while the nodes of all its peers are heard. Safety never depends on
time.
"""

from __future__ import annotations

from collections.abc import Callable

from stele.consensus.replica import Replica
from stele.model.config import MemberType
from stele.model.ids import NodeId, ReplicaId
from stele.raft.effects import Role
from stele.raft.messages import Message, UpdateRequest

QUIET_AFTER_MS = 3_000
"""A group rests after it has been idle for this long."""


def peer_nodes(replica: Replica) -> tuple[NodeId, ...]:
    """The nodes of a replica's peers."""
    return tuple(p.node_id for p in replica.config.peers if p.node_id != replica.host.node_id)


def begin_quiet(replica: Replica, heard: Callable[[NodeId], bool]) -> bool:
    """Let a leader rest if nothing is under way, all peers have all entries, and their nodes are heard.

    Returns whether it rests.
    """
    core, runtime = replica.core, replica.runtime
    if core is None or runtime is None or runtime.quiet or not (replica.running and replica.is_leader):
        return False
    if replica.host.now_ms() - replica.active_ms < QUIET_AFTER_MS or replica.busy:
        return False
    status = core.status()
    last = status.last_logged
    complete = (
        status.term_committed
        and status.commit_index == last.index == replica.applied_index
        and status.pending_change_index is None
        and status.transferring_to is None
        and len(status.peers) == len(status.config.peers) - 1
        and all(p.match_index == last.index and p.reachable for p in status.peers)
        and all(p.member_type is MemberType.VOTER for p in status.config.peers)
        and all(heard(node_id) for node_id in peer_nodes(replica))
    )
    if not complete or not runtime.rest():
        return False
    message = UpdateRequest(status.term, last, (), status.commit_index, 0, runtime.now_ms(), last.index)
    for peer in status.config.peers:
        if peer.replica_id != replica.replica_id:
            replica.host.send(replica, peer.node_id, peer.replica_id, message, quiet=True)
    return True


def follow_quiet(
    replica: Replica, sender: ReplicaId, message: Message, heard: Callable[[NodeId], bool]
) -> bool:
    """Let a follower that has not FAILED rest with its leader, if it has all entries.

    Returns whether it rests. If not, handle the message as any other.
    """
    core, runtime = replica.core, replica.runtime
    if core is None or runtime is None or not (replica.running and isinstance(message, UpdateRequest)):
        return False  # who FAILED must answer, so that its leader and the masters know
    if replica.role is not Role.FOLLOWER or replica.leader != sender or replica.term != message.term:
        return False
    if not all(heard(node_id) for node_id in peer_nodes(replica)):
        return False
    status = core.status()
    agrees = (
        status.term_committed
        and status.last_logged == status.last_durable == message.preceding
        and status.commit_index == message.commit_index == replica.applied_index
    )
    return agrees and (runtime.quiet or runtime.rest())
