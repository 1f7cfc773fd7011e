"""Where a write goes: to the replica that leads, at the address that it has now."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from stele.model.errors import Code, NotLeader, Rejected, Retryable
from stele.model.ids import ClusterId, new_id
from stele.rpc.resolve import split_address
from tests.client.small import ONE, SCHEMA, one_tablet, small_cluster
from tests.client.small_tablet import Tablet


async def test_the_leader_is_found_by_hint_and_without(tmp_path: Path) -> None:
    async with one_tablet(tmp_path) as (cluster, table, tablet):
        tablet.leader = 2
        await table.put({"id": 1})
        assert cluster.nodes[1].requests == 0  # the hint led straight to node 2
        tablet.leader = -1
        put = asyncio.ensure_future(table.put({"id": 2}))
        await asyncio.sleep(0.1)
        tablet.leader = 1
        await put
        assert await table.scan().count() == 2


async def test_another_replica_is_asked_where_the_presumed_leader_knows_of_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unled(raw: bytes) -> Tablet:
        raise NotLeader("not the leader")

    async with one_tablet(tmp_path) as (cluster, table, tablet):
        await table.put({"id": 1})
        monkeypatch.setattr(cluster.nodes[0], "_leading", unled)
        tablet.leader, tablet.heard = 1, {number: (1, -1) for number in range(3)}  # nobody says who leads
        await table.put({"id": 2})
        assert await table.get(2, ["id"]) == {"id": 2}


async def test_a_leader_that_listens_elsewhere_now_is_found(tmp_path: Path) -> None:
    """The followers name the leader, but its address is an old one: only the masters know better."""
    async with one_tablet(tmp_path) as (cluster, table, tablet):
        await table.put({"id": 1})
        await cluster.nodes[1].move()
        tablet.leader = 1
        await table.put({"id": 2})
        assert await table.get({"id": 2}) == {"id": 2, "name": None, "n": None}


async def test_an_address_that_another_cluster_has_by_now_is_passed_over(tmp_path: Path) -> None:
    """As a pod's may be, once its pod is gone: the other replicas are well."""
    async with one_tablet(tmp_path) as (cluster, table, tablet):
        node = cluster.nodes[0]
        _, port = split_address(node.address)
        await node.stop()
        node.identity = replace(node.identity, cluster_id=ClusterId(new_id()))
        await node.start(port)
        tablet.leader = 1
        await table.put({"id": 1})
        assert await table.get(1, ["id"]) == {"id": 1}


async def test_a_plan_of_another_cluster_is_not_opened(tmp_path: Path) -> None:
    """Its rows would go to this client's cluster, or this client's to the other."""
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, ONE)
        plan = table.plan_write()
        other = replace(plan, cluster_id=ClusterId(new_id()))
        with pytest.raises(Rejected, match=f"table t is in cluster {other.cluster_id[:8]}") as caught:
            client.open_planned(other)
        assert caught.value.code is Code.WRONG_CLUSTER
        await client.open_planned(plan).put({"id": 1})
        assert await table.get(1, ["id"]) == {"id": 1}


async def test_nodes_that_name_none_that_leads_are_not_asked_without_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One names itself, or two name each other. A pause is 5 ms at least, and soon 50 ms."""
    for named in ([0, 1, 2], [1, 0, 0]):
        async with one_tablet(tmp_path / f"{named[0]}", timeout_s=2.0) as (cluster, table, tablet):
            for node, other in zip(cluster.nodes, named, strict=True):
                error = NotLeader("not yet", leader_hint=cluster.nodes[other].identity.node_id)
                monkeypatch.setattr(node, "_leading", partial(refused, tablet, error))
            tablet.heard = {number: (1, -1) for number in range(3)}
            with pytest.raises(Retryable, match="found no leader"):
                await table.put({"id": 1})
            assert 2 < len(tablet.attempts) < 100


def refused(tablet: Tablet, error: NotLeader, raw: bytes) -> Tablet:
    """As a node does that does not lead."""
    tablet.attempts.append(raw)
    raise error
