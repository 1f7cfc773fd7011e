"""When a node that has started again is ready."""

from __future__ import annotations

import asyncio

import pytest

from stele.consensus.copy_order import CopyOrder
from stele.consensus.replica import ReplicaState
from stele.model.ids import NodeId, ReplicaId, TabletId, new_id
from stele.model.partition import PartitionSchema
from stele.tserver import health
from tests.consensus.cluster import wait_until
from tests.tserver.local import SCHEMA, LocalCluster


async def test_a_copy_that_no_configuration_names_yet_does_not_keep_its_node_from_being_ready(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears of no leader before it is added, and the driver that would add it may wait for its node to be ready."""
    monkeypatch.setattr(health, "READY_AFTER_MS", 1 << 40)
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        await table.put({"id": 1, "name": "one"})
        (tablet,) = table.locations.tablets
    cluster.ids["node-3"] = NodeId(new_id())
    fresh = await cluster.launch("node-3")
    await wait_until(lambda: fresh.replicas.opened)
    source = next(n for n in cluster.running.values() if n.replicas.holds(tablet.tablet_id))
    order = CopyOrder(TabletId(tablet.tablet_id), ReplicaId(9), source.node_id, source.address)
    copy = await fresh.manager.start_copy(order, fresh.copy_sources.at(source.node_id, source.address))
    assert copy is not None
    await wait_until(lambda: copy.progress.state in ("Done", "Failed"))
    assert copy.progress.state == "Done", copy.progress.error
    await cluster.stop("node-3")
    again = await cluster.launch("node-3")
    await wait_until(lambda: not again.health.ready())
    replica = again.replicas.get(tablet.tablet_id)
    assert replica.state is ReplicaState.CONFIGURING and replica.config.peer(replica.replica_id) is None


async def test_a_node_is_ready_once_its_replicas_have_a_leader_and_no_more_when_it_ends(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A roll goes on to the next pod when this one is ready: a second voter would be away."""
    monkeypatch.setattr(health, "READY_AFTER_MS", 1 << 40)
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        await table.put({"id": 1, "name": "one"})
    for name in ("node-0", "node-1", "node-2"):
        await cluster.stop(name)
    first = await cluster.launch("node-0")
    await wait_until(lambda: first.replicas.opened)
    assert first.health.ready() == "1 replicas have not caught up"
    await cluster.launch("node-1")
    await wait_until(lambda: first.health.ready() == "")
    stopping = asyncio.ensure_future(cluster.stop("node-0"))
    await asyncio.sleep(0)
    assert first.health.ready() == "stopping"
    await stopping


async def test_a_node_is_ready_once_it_has_what_was_written_while_it_was_away(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was as soon as it had one entry of its leader's term. A roll then took the next voter, and writes waited for the log."""
    monkeypatch.setattr(health, "READY_AFTER_MS", 1 << 40)
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        await table.put({"id": 1, "name": "one"})
        (tablet,) = table.locations.tablets
        await cluster.stop("node-2")
        text = "x" * (256 << 10)
        for first in range(2, 66, 8):
            await asyncio.gather(*(table.put({"id": n, "name": text}) for n in range(first, first + 8)))
    leader = next(
        r
        for name in ("node-0", "node-1")
        if (r := cluster.running[name].replicas.get(TabletId(tablet.tablet_id))).is_leader
    )
    written = leader.committed_opid.index
    again = await cluster.launch("node-2")
    await wait_until(lambda: again.replicas.opened)
    replica, seen = again.replicas.get(TabletId(tablet.tablet_id)), set[str]()
    while why := again.health.ready():
        seen.add(why)
        await asyncio.sleep(0)
    assert replica.committed_opid.index >= written, (replica.committed_opid, written)
    assert "1 replicas have not caught up" in seen
