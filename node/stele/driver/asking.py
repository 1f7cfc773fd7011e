"""Asks nodes for the newest reports of their replicas. Used by executor and by forecasts.

Invariant: a node that does not answer changes nothing; the masters' view of it is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from stele.driver.view import ClusterView
from stele.driver.wire import freshen
from stele.model.errors import SteleError
from stele.model.ids import TabletId
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import common_pb2, consensus_pb2
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub

_ASK_TIMEOUT_S = 1.0


async def ask_nodes(
    pool: ChannelPool, view: ClusterView, wanted: Mapping[str, Sequence[TabletId]]
) -> ClusterView:
    """The view with fresh reports. `wanted`: tablets by the id of the node that is asked."""
    found = await asyncio.gather(*(_ask(pool, view, node, ids) for node, ids in wanted.items()))
    told = {node: statuses for node, statuses in found if statuses}
    return await asyncio.to_thread(freshen, view, told) if told else view


async def _ask(
    pool: ChannelPool, view: ClusterView, node_id: str, tablet_ids: Sequence[TabletId]
) -> tuple[str, list[common_pb2.ReplicaStatusPB]]:
    node = view.node(node_id)
    if node is None or not node.address:
        return node_id, []
    request = consensus_pb2.GetConsensusStateRequest(tablet_ids=[id_to_pb(t) for t in tablet_ids])
    try:
        answer = await pool.unary(
            node.address,
            ConsensusServiceStub,
            "GetConsensusState",
            request,
            timeout_s=_ASK_TIMEOUT_S,
            to_node=node_id,
        )
    except SteleError:
        return node_id, []
    return node_id, list(answer.replicas)
