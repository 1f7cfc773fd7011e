"""Nodes are asked for few reports at once, and one that does not answer holds nobody up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from stele.driver.asking import CALLS_AT_ONCE, TABLETS_AT_ONCE, ask
from stele.driver.known import Known
from stele.driver.planner import plan
from stele.driver.steps import BeginIntent, Step
from stele.driver.view import ClusterView
from stele.driver.witness_starts import WitnessStarts
from stele.model.errors import Code, Retryable, SteleError
from stele.model.ids import ClusterId, OpId, TabletId
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_from_pb, id_to_pb, opid_to_pb
from stele.rpc.errors import abort_with
from stele.rpc.identity import Identity
from stele.rpc.proto import common_pb2
from stele.rpc.proto import consensus_pb2 as cpb
from stele.rpc.proto.consensus_pb2_grpc import (
    ConsensusServiceServicer,
    add_ConsensusServiceServicer_to_server,
)
from tests.driver.test_known import POLICY, cluster_of, node_id


class Nodes(ConsensusServiceServicer):
    """All nodes. `refuses`: those that answer with an error. `silent`: (node, tablet) that are not told of."""

    def __init__(self) -> None:
        self.address = ""
        self.refuses: set[str] = set()
        self.silent: set[tuple[str, str]] = set()
        self.asked: Counter[str] = Counter()
        self.largest = self.at_once = self._now = 0

    async def GetConsensusState(self, request: cpb.GetConsensusStateRequest, context: Any) -> Any:
        node = str(dict(context.invocation_metadata())["stele-to-node"])
        self.asked[node] += 1
        self.largest = max(self.largest, len(request.tablet_ids))
        self._now += 1
        self.at_once = max(self.at_once, self._now)
        await asyncio.sleep(0.01)  # so that the others come meanwhile
        self._now -= 1
        if node in self.refuses:
            await abort_with(context, Retryable("it starts", code=Code.NOT_READY))
        return cpb.GetConsensusStateResponse(
            node_id=id_to_pb(node),
            replicas=[
                common_pb2.ReplicaStatusPB(tablet_id=raw, last_committed=opid_to_pb(OpId(1, int(node, 16))))
                for raw in request.tablet_ids
                if (node, id_from_pb(raw)) not in self.silent
            ],
        )


@asynccontextmanager
async def asked() -> AsyncIterator[tuple[Nodes, ChannelPool]]:
    """Nodes on one port, and a pool to call them."""
    nodes, server, pool = Nodes(), grpc.aio.server(), ChannelPool(Identity(ClusterId("c" * 32)))
    add_ConsensusServiceServicer_to_server(nodes, server)  # type: ignore[no-untyped-call]
    nodes.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield nodes, pool
    finally:
        await pool.close()
        await server.stop(None)


def at(nodes: Nodes, view: ClusterView) -> ClusterView:
    """The view of a cluster whose nodes are there."""
    return replace(view, nodes=tuple(replace(n, address=nodes.address) for n in view.nodes))


async def test_many_tablets_are_asked_for_in_small_calls_a_few_at_once() -> None:
    """All answers that have come are read in one step of the event loop. Those of a lost node's tablets held it."""
    async with asked() as (nodes, pool):
        view = at(nodes, cluster_of(400))
        wanted: dict[str, list[TabletId]] = {}
        for t in view.tablets:
            wanted.setdefault(t.leader_node, []).append(t.tablet_id)
        told = await ask(pool, view, wanted)
        assert {n: {id_from_pb(r.tablet_id) for r in found} for n, found in told.reports.items()} == {
            n: set(ids) for n, ids in wanted.items()
        }
        assert nodes.largest == TABLETS_AT_ONCE and 1 < nodes.at_once <= CALLS_AT_ONCE


async def test_a_node_that_does_not_answer_is_asked_no_more_and_the_others_are() -> None:
    async with asked() as (nodes, pool):
        view, silent, other = at(nodes, cluster_of(6)), node_id(1), node_id(2)
        nodes.refuses = {silent}
        many = [TabletId(f"{n:032x}") for n in range(100 * TABLETS_AT_ONCE)]
        told = await ask(pool, view, {silent: many, other: many[:30]})
        assert told.errors[silent].code is Code.NOT_READY and set(told.errors) == {silent}
        assert nodes.asked[silent] <= CALLS_AT_ONCE and len(told.reports[other]) == 30


def begun(view: ClusterView) -> tuple[tuple[Step, ...], WitnessStarts, Any]:
    """What a plan begins after a node was lost."""
    lost = replace(view, nodes=(replace(view.nodes[0], heartbeat_age_ms=60_000), *view.nodes[1:]))
    known = Known()
    steps = plan(lost, POLICY, known=known)
    return steps, WitnessStarts(), {s.tablet.tablet_id: s for s in known.judged.restless()}


async def test_a_witness_begins_where_the_slowest_voter_is_and_not_before_all_have_told() -> None:
    async with asked() as (nodes, pool):
        view = at(nodes, cluster_of(12))
        steps, starts, situations = begun(view)
        first, second, third, *others = [s.tablet_id for s in steps if isinstance(s, BeginIntent)]
        voters = {t: [m.peer.node_id for m in situations[t].data_voters] for t in situations}
        nodes.silent = {(voters[first][1], first)}
        await starts.look(pool, view, steps, situations)
        with pytest.raises(Retryable, match="does not know a committed entry yet"):
            starts.of(first)
        for tablet_id in (second, third, *others):
            assert starts.of(tablet_id) == OpId(1, min(int(n, 16) for n in voters[tablet_id]))
        nodes.refuses = {voters[second][0]}
        again = WitnessStarts()
        await again.look(pool, view, steps, situations)
        with pytest.raises(SteleError, match="it starts"):
            again.of(second)
