"""Makes a voter stand for election, for a tablet without a leader although a majority of its voters answers.

For `stele tablet promote` and programs of administrators. Asks the nodes; the voters decide the election, as
always.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from stele.client.nodes import cluster_view, node_called
from stele.client.recovery import Recovery, Survivor, look_for_survivors
from stele.model.errors import Code, Rejected, Retryable
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_from_pb
from stele.rpc.masters import Masters
from stele.rpc.proto import consensus_pb2, master_pb2
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub

_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Promoted:
    """The result of a promotion. `term`: the term in which the replica leads."""

    tablet_id: str
    table_name: str
    node: str
    replica_id: int
    term: int


async def promote(
    masters: Masters,
    pool: ChannelPool,
    tablet: str,
    to: str = "",
    *,
    reason: str = "",
    timeout_s: float = 30.0,
) -> Promoted:
    """Make a voter stand for election until it leads. `to`: its node; "" for the voter whose log ends last.

    Raises:
        Rejected: NOT_FOUND; UNSAFE_CHANGE, a leader is there, a majority does not answer, or the voter's log is shorter than
            another's.
        Retryable: TIMED_OUT, the others did not vote for it.
    """
    from stele.client.admin import tablet_called

    deadline = time.monotonic() + timeout_s
    view = await cluster_view(masters, timeout_s=timeout_s)
    found = tablet_called(tablet, view)
    target = id_from_pb(node_called(to, list(view.nodes)).node_id) if to else ""
    role = "master" if not found.tablet_id.strip(b"\0") else "node"
    before = await _look(pool, view, found, role)
    chosen = _chosen(before, target)
    request = consensus_pb2.RunLeaderElectionRequest(
        tablet_id=found.tablet_id, tablet_incarnation=before.incarnation, reason=reason
    )
    addresses = {id_from_pb(n.node_id): n.registration.address for n in view.nodes}
    while True:
        await pool.unary(
            addresses[chosen.node_id],
            ConsensusServiceStub,
            "RunLeaderElection",
            request,
            to_node=chosen.node_id,
        )
        await asyncio.sleep(_AGAIN_S)
        now = await _look(pool, view, found, role)
        leader = next((s for s in now.survivors if s.leads), None)
        if leader is not None:
            return Promoted(now.tablet_id, now.table_name, leader.node, leader.replica_id, leader.term)
        if time.monotonic() >= deadline:
            raise Retryable(
                f"tablet {now.tablet_id[:8]}: the others did not vote for replica {chosen.replica_id} within "
                f"{timeout_s:.0f} s; their nodes' logs say why",
                code=Code.TIMED_OUT,
            )


async def _look(
    pool: ChannelPool,
    view: master_pb2.GetClusterViewResponse,
    tablet: master_pb2.TabletViewPB,
    role: str,
) -> Recovery:
    (found,) = await look_for_survivors(pool, view, [tablet.tablet_id], role=role)
    return found


def _chosen(found: Recovery, target: str) -> Survivor:
    """The voter to promote.

    Raises:
        Rejected: it could not succeed, or is not needed.
    """
    what = f"tablet {found.tablet_id[:8]} of {found.table_name}"
    answering = [v.replica_id for v in found.voters if v.asked and not v.lost]
    voters = [s for s in found.survivors if s.replica_id in answering and s.incarnation == found.incarnation]
    leader = next((s for s in voters if s.leads), None)
    if leader is not None:
        raise Rejected(
            f"{what} has a leader, replica {leader.replica_id} on {leader.node}: `stele tablet step-down` "
            f"moves it",
            code=Code.UNSAFE_CHANGE,
        )
    if len(answering) <= len(found.voters) // 2 or not voters:
        raise Rejected(
            f"{what}: {len(answering)} of {len(found.voters)} voters answer, which is no majority, so nobody "
            "can be elected; bring nodes back, or see `stele tablet recover`",
            code=Code.UNSAFE_CHANGE,
        )
    best = max(voters, key=lambda s: s.rank(found.incarnation))
    chosen = next((s for s in voters if s.node_id == target), None) if target else best
    if chosen is None:
        raise Rejected(f"{what}: no voter with rows answers on that node", code=Code.NOT_FOUND)
    if chosen.last_logged < best.last_logged:
        raise Rejected(
            f"{what}: the log of replica {chosen.replica_id} ends at {chosen.last_logged}, that of replica "
            f"{best.replica_id} on {best.node} at {best.last_logged}: the others would not vote for it",
            code=Code.UNSAFE_CHANGE,
        )
    return chosen
