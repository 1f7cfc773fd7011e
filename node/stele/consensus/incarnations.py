"""Whether a replica takes a message, by the incarnation of the tablet that the message carries. Called for
each message.

A recovery after a lost majority raises the incarnation of a tablet (stele.model.incarnation). The replicas
that it left behind may return and elect a leader. They would commit entries in a log that the others have
given up.

Invariant: no message crosses between two incarnations. A replica that hears of a higher one becomes FAILED,
is removed and copied anew. One that hears of a lower one answers with its own, and accepts nothing.
"""

from __future__ import annotations

from stele.consensus.replica import Replica
from stele.model.ids import NodeId, ReplicaId
from stele.model.incarnation import shown, within_reach
from stele.raft.messages import VoteResponse

OUTDATED = VoteResponse(0, False, True, 0, False, True)
"""The answer to a message of a lower incarnation. The incarnation in its envelope is what matters. Earlier
releases take the answer for that of a voter that abstains.
"""


def same_incarnation(replica: Replica, from_node: NodeId, sender: ReplicaId, told: int) -> bool:
    """Whether `replica` may take a message that carries the incarnation `told` (0: the tablet was never recovered)."""
    own = replica.superblock.tablet_incarnation
    if told == own:
        return True
    if told < own:
        replica.host.send(replica, from_node, sender, OUTDATED)
        return False
    peer = replica.config.peer(sender)
    if peer is None or peer.node_id != from_node or not within_reach(told, own):
        why = (
            f"a message of incarnation {shown(told)} of tablet {replica.tablet_id[:8]}; its sender is no peer of "
            f"the replica here, which is at {shown(own)}"
        )
        replica.host.dropped(from_node, "incarnation", why)
        return False
    replica.fail(
        f"the tablet was recovered as incarnation {shown(told)}, but this replica has incarnation {shown(own)}: the "
        f"masters remove it, and it is copied anew"
    )
    return False
