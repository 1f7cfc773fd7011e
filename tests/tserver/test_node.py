"""Nodes under a master: tables, writes, scans, restarts, all through sockets."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from stele.client.admin import cluster_view
from stele.client.health import examine
from stele.consensus.replica import Replica
from stele.model.errors import Rejected
from stele.model.ids import NodeId, new_id
from stele.model.partition import HashPartition, PartitionSchema
from stele.raft.status import PeerState
from stele.tserver.node import start_node
from stele.tserver.options import (
    NodeOptions,
)
from tests.consensus.cluster import WAIT_S, wait_until
from tests.tserver.local import HASHED, SCHEMA, LocalCluster, count, fill


async def test_write_scan_restart(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        await client.create_table("t", SCHEMA, HASHED)
        await fill(client, 500)
        assert await count(client) == 500
        assert (await (await client.open_table("t")).get({"id": 7})) == {"id": 7, "name": "n7"}
    before = {name: cluster.running[name].incarnation for name in ("node-0", "node-1", "node-2")}
    for name in before:
        await cluster.stop(name)
    for name, incarnation in before.items():
        node = await cluster.launch(name)
        assert node.incarnation == incarnation + 1
    async with cluster.client() as client:
        assert await count(client) == 500
        await fill(client, 600)
        assert await count(client) == 600


async def test_a_node_that_refuses_writes_for_want_of_space_says_so_to_the_masters(
    cluster: LocalCluster,
) -> None:
    """What is low is said by who refuses: its own mark, on its own disk."""
    node = cluster.running["node-1"]
    options = node.log.shared.options
    async with cluster.client() as client:
        for low in (True, False):
            node.log.shared.options = replace(options, low_space_bytes=1 << 60) if low else options
            wanted = [node.node_id] if low else []
            async with asyncio.timeout(WAIT_S):
                while True:
                    told = examine(await cluster_view(client.masters))
                    if [n.node_id for n in told.low_on_disk] == wanted and told.healthy:
                        break
                    await asyncio.sleep(0.05)
            assert all(n.disk_free_bytes for n in told.nodes)


async def test_a_client_whose_masters_were_all_replaced_asks_the_nodes(cluster: LocalCluster) -> None:
    """It had asked no master meanwhile, and its addresses were nobody's: it found none for ever, beside nodes that knew."""
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        await table.put({"id": 1, "name": "one"})
        client.masters._given = ["127.0.0.1:1"]
        client.masters._known = ["127.0.0.1:1"]
        await table.locations.refresh()
        assert [info.name for info in await client.list_tables()] == ["t"]


async def test_readiness_and_hand_over_at_stop(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stele.tserver.node.HAND_OVER_S", 60.0)
    for name, node in cluster.running.items():
        await wait_until(lambda node=node: not node.health.ready())
        assert node.health.identity()["formed"], name
    async with cluster.client() as client:
        await client.create_table("t", SCHEMA, HASHED)
        await fill(client, 50)
        stopped = cluster.running["node-0"]
        close, led = stopped.manager.close, list[Replica]()

        async def noted() -> None:
            led.extend(r for r in stopped.replicas if r.is_leader)
            await close()

        monkeypatch.setattr(stopped.manager, "close", noted)
        await cluster.stop("node-0", hand_over=True)
        assert not led

        def leaders() -> int:
            return sum(r.is_leader for n in cluster.running.values() for r in n.replicas)

        await wait_until(lambda: leaders() == 5)  # four tablets and the catalog
        await fill(client, 60)
        assert await count(client) == 60


async def test_a_key_space_over_the_wire(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        kv = await client.create_keyspace("k")
        await kv.replace(b"a", b"1")
        assert await kv.read(b"a") == b"1"
        await kv.delete(b"a")
        assert await kv.read(b"a") is None


async def test_a_port_in_use_is_one_line_that_says_what_to_do(cluster: LocalCluster, tmp_path: Path) -> None:
    options = cluster.options("node-0")
    with pytest.raises(Rejected) as refused:
        await start_node(NodeOptions(tmp_path / "x", NodeId(new_id()), cluster.cluster_id, options.listen))
    assert "in use" in str(refused.value)


async def test_leaders_do_not_pile_up_where_nodes_restart_one_after_another(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 12 tablets the first node of each configuration got all: 4/5/3 leaders became 12/0/0."""
    monkeypatch.setattr("stele.tserver.node.HAND_OVER_S", 60.0)
    many = PartitionSchema((HashPartition((0,), 12),))
    async with cluster.client() as client:
        await client.create_table("t", SCHEMA, many)
        await fill(client, 100)
        names = ["node-0", "node-1", "node-2"]

        def leaders() -> dict[str, int]:
            return {
                n: sum(r.is_leader for r in cluster.running[n].replicas)
                for n in names
                if n in cluster.running
            }

        def all_keep_up() -> bool:
            """As their leaders see it: who restarted a moment ago may not have answered yet."""
            led = [
                r.core.status() for n in names for r in cluster.running[n].replicas if r.is_leader and r.core
            ]
            peers = [p for status in led for p in status.peers]
            return len(led) == 12 and all(p.reachable and p.state is PeerState.REPLICATE for p in peers)

        for name in names:
            await wait_until(all_keep_up)
            await cluster.stop(name, hand_over=True)
            await wait_until(lambda: sum(leaders().values()) == 12)
            assert max(leaders().values()) <= 8, f"without {name}: {leaders()}"
            await cluster.launch(name)
        await fill(client, 120)
        assert await count(client) == 120
