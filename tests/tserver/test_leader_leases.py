"""Nodes with leases of leaders: what the flag takes, what the volume remembers of it, and reads under it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from stele.client import AsyncClient
from stele.model.errors import Rejected
from stele.model.ids import ClusterId, NodeId
from stele.model.partition import PartitionSchema
from stele.model.schema import Schema
from stele.tserver.node_record import read_record
from stele.tserver.opening import _with_lease
from stele.tserver.options import NodeOptions
from stele.tserver.volume import format_volume, lock_directory
from tests.harness import Cluster, Member

SCHEMA = Schema.make([("id", "int64"), ("text", "string")], ["id"])
OPTIONS = NodeOptions(Path("/none"), NodeId("a" * 32), ClusterId("b" * 32), "127.0.0.1:0")


@pytest.mark.parametrize("length_ms", [1, 149, 5_001])
def test_a_lease_is_neither_too_short_nor_too_long(length_ms: int) -> None:
    with pytest.raises(Rejected, match=f"--leader-lease-ms {length_ms}: expected 0, or 150 to 5000"):
        replace(OPTIONS, leader_lease_ms=length_ms)


def remembered(member: Member) -> int:
    """The longest lease that a volume knows."""
    return int(json.loads((member.directory / "node.json").read_text())["promised_ms"])


async def leased_reads(cluster: Cluster) -> float:
    """How many reads the nodes have answered under leases since they started."""
    total = 0.0
    for node in cluster.nodes:
        _, metrics = await cluster.http(node, "/metrics")
        total += sum(
            float(line.split()[1])
            for line in metrics.splitlines()
            if line.startswith("stele_leased_reads_total")
        )
    return total


async def test_reads_are_answered_under_leases_and_each_volume_remembers_the_longest(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, masters=1, nodes=3, arguments=("--leader-lease-ms=3000",)) as cluster,
        AsyncClient(cluster.master_addresses, timeout_s=30) as client,
    ):
        table = await client.create_table("t", SCHEMA, PartitionSchema(), replication_factor=3)
        await table.upsert({"id": 1, "text": "x"})

        async with asyncio.timeout(120):
            while not await leased_reads(cluster):
                assert await table.get({"id": 1}) == {"id": 1, "text": "x"}
        assert {remembered(member) for member in cluster.members} == {3_000}
        cluster.arguments = ()
        for node in cluster.nodes:  # one at a time, as users do
            assert await cluster.stop(node) == 0
            cluster.launch(node)
            await cluster.wait_ready(node)
        await table.upsert({"id": 1, "text": "y"})
        assert await table.get({"id": 1}) == {"id": 1, "text": "y"}
        assert await leased_reads(cluster) == 0
        assert {remembered(member) for member in cluster.nodes} == {3_000}


def test_a_node_promises_what_its_flag_says_and_waits_for_what_its_volume_says(tmp_path: Path) -> None:
    volume = format_volume(tmp_path, lock_directory(tmp_path), OPTIONS.cluster_id, OPTIONS.node_id, "node")
    for flag_ms, promised_ms in ((0, 0), (400, 400), (900, 900), (300, 900), (0, 900)):
        raft = _with_lease(replace(OPTIONS, leader_lease_ms=flag_ms), volume).replica.raft
        assert (raft.lease_ms, raft.promised_ms) == (flag_ms, promised_ms)
        assert read_record(tmp_path).promised_ms == promised_ms, "before any replica starts"
    volume.close()
