"""What /metrics of real masters and nodes says of how long requests took."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stele.client import AsyncClient
from stele.model.errors import SteleError
from stele.model.schema import Schema
from tests.harness import Cluster, Member
from tests.harness.histograms import Durations, histograms
from tests.tserver.test_wrong_clock import leader_of

SCHEMA = Schema.make([("id", "int64"), ("text", "string")], ["id"])
OF_CLIENTS = "stele_client_request_seconds"


async def shown(cluster: Cluster, member: Member, name: str) -> dict[tuple[str, ...], Durations]:
    status, text = await cluster.http(member, "/metrics")
    return histograms(text, name) if status == 200 else {}


async def counted(cluster: Cluster, kind: str, outcome: str = "ok") -> float:
    """At all nodes."""
    seen = [await shown(cluster, node, OF_CLIENTS) for node in cluster.nodes]
    return sum(each[kind, outcome].count for each in seen if (kind, outcome) in each)


async def test_each_request_counts_once_and_one_that_followers_hold_up_is_seen_to_be_slow(
    tmp_path: Path,
) -> None:
    async with (
        Cluster(tmp_path, masters=1, nodes=3) as cluster,
        AsyncClient(cluster.master_addresses, timeout_s=60) as client,
    ):
        table = await client.create_table("t", SCHEMA, ())
        space = await client.create_keyspace("k")
        for number in range(20):
            await table.put({"id": number, "text": "x"})
        for number in range(10):
            assert await table.get(number) == {"id": number, "text": "x"}
        for number in range(5):
            await space.replace(f"key-{number}", b"x")
        for number in range(3):
            assert await space.read(f"key-{number}") == b"x"
        assert (await table.scan().to_table()).num_rows == 20
        assert [
            await counted(cluster, kind) for kind in ("write", "read", "kv_write", "kv_read", "scan")
        ] == [
            *(20, 10, 5, 3, 1),
        ]
        calls = await shown(cluster, cluster.masters[0], "stele_rpc_request_seconds")
        assert calls["/stele.v1.MasterService/CreateTable", "ok"].count == 2
        assert calls["/stele.v1.MasterService/TSHeartbeat", "ok"].count > 0
        commits = [(await shown(cluster, node, "stele_commit_seconds"))[()] for node in cluster.nodes]
        assert sum(each.count for each in commits) == 25
        for member in cluster.members:
            syncs = (await shown(cluster, member, "stele_wal_sync_seconds"))[()]
            assert syncs.count > 0 and syncs.sum_s > 0

        leader = await leader_of(client, cluster, "t")
        for node in cluster.nodes:
            if node is not leader:
                cluster.pause(node)
        async with AsyncClient(cluster.master_addresses, timeout_s=2) as hurried:
            held_up = await hurried.open_table("t")
            with pytest.raises(SteleError):
                await held_up.put({"id": 1, "text": "y"})
        async with asyncio.timeout(60):
            while True:
                seen = await shown(cluster, leader, OF_CLIENTS)
                if ("write", "retry") in seen and seen["write", "retry"].over(0.25):
                    break
        for node in cluster.nodes:
            cluster.resume(node)
        await table.put({"id": 2, "text": "y"})
