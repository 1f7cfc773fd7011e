"""The log's segments are as long as the flags say, whatever length those had that a node wrote before."""

from __future__ import annotations

from pathlib import Path

from stele.client import AsyncClient
from stele.model.partition import PartitionSchema
from stele.model.schema import Schema
from tests.harness import Cluster
from tests.harness.segments import SEGMENT_BYTES
from tests.tserver.local import LocalCluster

MIB = 1 << 20
SCHEMA = Schema.make([("id", "int64"), ("text", "string")], ["id"])


def longest(data: Path) -> float:
    """The length of a node's longest segment, in MiB. One that is being prepared is shorter."""
    return max(path.stat().st_size for path in (data / "wal").glob("*.wal")) / MIB


async def test_segments_have_the_length_that_the_flag_says_and_another_one_after_a_restart(
    tmp_path: Path,
) -> None:
    flags = ("--wal-segment-mib=4", "--wal-spare-segments=0")
    async with (
        Cluster(tmp_path, masters=1, nodes=1, arguments=flags) as cluster,
        AsyncClient(cluster.master_addresses, timeout_s=30) as client,
    ):
        table = await client.create_table("t", SCHEMA, PartitionSchema(), replication_factor=1)
        for number in range(4):
            await table.upsert({"id": number, "text": "x" * MIB})
        assert 4 <= longest(cluster.nodes[0].directory) < 6
        assert await cluster.stop(cluster.nodes[0]) == 0
        cluster.arguments = ("--wal-segment-mib=9",)
        cluster.launch(cluster.nodes[0])
        await cluster.wait_ready(cluster.nodes[0])
        for number in range(4, 10):
            await table.upsert({"id": number, "text": "y" * MIB})
        assert 9 <= longest(cluster.nodes[0].directory) < 11
        found = await table.scan(["id"]).to_table()
        assert sorted(found["id"].to_pylist()) == list(range(10))


async def test_nodes_of_tests_have_small_segments(tmp_path: Path) -> None:
    """Long ones cost each start some tenths of a second of a processor, and a second of the disk."""
    for name in ("here", "processes"):
        (tmp_path / name).mkdir()
    cluster = await LocalCluster(tmp_path / "here", 1).start()
    await cluster.close()
    async with Cluster(tmp_path / "processes", masters=1, nodes=1) as processes:
        made = [member.directory for member in processes.members]
    for data in (*((tmp_path / "here" / name) for name in cluster.ids), *made):
        assert longest(data) == SEGMENT_BYTES / MIB, data
