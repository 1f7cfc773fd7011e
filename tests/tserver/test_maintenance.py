"""What a node does in the background beside flushes and merges: it forgets, gives way and is measured."""

from __future__ import annotations

import asyncio

import pytest

from stele.tablet.store import TabletStore
from stele.tserver import maintenance
from tests.consensus.cluster import wait_until
from tests.tserver.local import SCHEMA, LocalCluster
from tests.tserver.maintaining import anew, at_rest, with_files, with_room

NODES = 1  # of the cluster


async def test_of_a_replica_that_is_gone_nothing_is_remembered(cluster: LocalCluster) -> None:
    node = cluster.running["node-0"]
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, replication_factor=1)
        await table.put({"id": 1, "name": "n"})
        loops = await at_rest(node)
        await loops.flush_due()
        assert len(loops._since) == 1
        await client.delete_table("t")
        await wait_until(lambda: not len(node.replicas))
        loops._all_flush_due_ms = 0
        await loops.flush_due()
        assert not loops._since


@pytest.mark.parametrize("look", ["for a merge", "for dead rows", "for a flush"])
async def test_a_look_at_many_stores_gives_way_to_all_else(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    """With 1,300 tablets each look held the event loop for 5 ms and more."""
    monkeypatch.setattr(maintenance, "STORES_AT_ONCE", 2)
    node = cluster.running["node-0"]
    await with_room(node, 0)
    await with_files(cluster, 5)
    loops = await at_rest(node)
    loops._reclaim_ms = 0
    async with cluster.client() as client:
        for number in range(5):
            await (await client.open_table(f"t{number}")).put({"id": 9, "name": "n"})
    step = {"for a merge": loops._next_merge, "for dead rows": loops._next_reclaim}.get(
        look, loops._flush_round
    )
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.ensure_future(others())
    await asyncio.sleep(0)
    assert not await step()
    beside.cancel()
    assert turns == 2


async def test_a_tablet_at_rest_forgets_its_clients(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each program's id stayed until somebody else wrote to the same tablet, in memory and in its files."""
    node = cluster.running["node-0"]
    monkeypatch.setattr(maintenance, "COLLECT_S", 0.05)
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, replication_factor=1)
        (store,) = (r.machine for r in node.replicas if isinstance(r.machine, TabletStore))
        await table.put({"id": 1, "name": "n"})
        assert store.clients_idle_us is not None
        monkeypatch.setattr(store._once, "_idle_us", 0)
        await anew(node)
        await wait_until(lambda: store.clients_idle_us is None)


async def test_metrics_tell_what_is_there_when_they_are_read(cluster: LocalCluster) -> None:
    node = cluster.running["node-0"]
    route = node.servers._http._routes["/metrics"]
    for number in range(1, 4):
        async with cluster.client() as client:
            await client.create_table(f"t{number}", SCHEMA, replication_factor=1)
        await wait_until(lambda: all(replica.is_leader for replica in node.replicas))
        assert f"stele_replicas_leading {number}.0" in (await route()).body.decode()
