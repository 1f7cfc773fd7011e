"""Asks nodes for the newest reports of their replicas. Used by executor, orders and forecasts.

Few tablets are asked for in one call, and few calls are made at once. One step of the event loop reads all
answers that have come. Invariant: if a node does not answer, the masters' view of it is used unchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from stele.driver.turns import Turns
from stele.driver.view import ClusterView, NodeView
from stele.driver.wire import freshen
from stele.model.errors import SteleError
from stele.model.ids import TabletId
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import common_pb2, consensus_pb2
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub

CALLS_AT_ONCE, TABLETS_AT_ONCE = 16, 12
"""The most calls at once, and the most tablets in one call. Reading the answers to all of them takes some 3
ms.
"""
_ASK_TIMEOUT_S = 1.0


class Answers:
    """The answers of nodes. `reports`: by node. `errors`: of the nodes that did not answer, which are not
    asked again.
    """

    def __init__(self) -> None:
        self.reports: dict[str, list[common_pb2.ReplicaStatusPB]] = {}
        self.errors: dict[str, SteleError] = {}


async def ask_nodes(
    pool: ChannelPool, view: ClusterView, wanted: Mapping[str, Sequence[TabletId]]
) -> ClusterView:
    """The view with fresh reports. `wanted`: tablets by the id of the node that is asked."""
    told = (await ask(pool, view, wanted)).reports
    return await asyncio.to_thread(freshen, view, told) if told else view


async def ask(
    pool: ChannelPool,
    view: ClusterView,
    wanted: Mapping[str, Sequence[TabletId]],
    *,
    timeout_s: float = _ASK_TIMEOUT_S,
) -> Answers:
    """The reports of these tablets, by the id of the node that is asked."""
    answers = Answers()
    left, turns = _calls(view, wanted), Turns()

    async def work() -> None:
        for node, tablet_ids in left:
            await turns.mine()
            if node.node_id not in answers.errors:
                await _ask(pool, node, tablet_ids, answers, timeout_s)

    workers = [asyncio.create_task(work()) for _ in range(min(CALLS_AT_ONCE, sum(map(len, wanted.values()))))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return answers


def _calls(
    view: ClusterView, wanted: Mapping[str, Sequence[TabletId]]
) -> Iterator[tuple[NodeView, Sequence[TabletId]]]:
    """The node and the tablets of each call: first one call to each node, then a second to each, and so on."""
    most = max(map(len, wanted.values()), default=0)
    for start in range(0, most, TABLETS_AT_ONCE):
        for node_id, tablet_ids in wanted.items():
            node = view.node(node_id)
            if node is not None and node.address and start < len(tablet_ids):
                yield node, tablet_ids[start : start + TABLETS_AT_ONCE]


async def _ask(
    pool: ChannelPool, node: NodeView, tablet_ids: Sequence[TabletId], answers: Answers, timeout_s: float
) -> None:
    request = consensus_pb2.GetConsensusStateRequest(tablet_ids=[id_to_pb(t) for t in tablet_ids])
    try:
        answer = await pool.unary(
            node.address,
            ConsensusServiceStub,
            "GetConsensusState",
            request,
            timeout_s=timeout_s,
            to_node=node.node_id,
        )
    except SteleError as exc:
        answers.errors[node.node_id] = exc
    else:
        answers.reports.setdefault(node.node_id, []).extend(answer.replicas)
