"""Damaged files of a node, on real processes: the replica says FAILED, serves nothing wrong, is healed, all rows compare."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from stele.cli import ksck
from stele.cli.health import cluster_health
from stele.client import AsyncClient, AsyncTable
from stele.client.admin import cluster_view
from stele.model.errors import SteleError
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from stele.rpc.proto import common_pb2
from tests.harness import Cluster, Member
from tests.harness.commands import stele
from tests.harness.compare import rows_of_tablet, rows_that_all_replicas_hold

SCHEMA = Schema.make([("id", "int64"), ("s", "string", True)], ["id"])
THREE = PartitionSchema((HashPartition((0,), 3),))
ROWS = 4_000


def rows(first: int) -> pa.Table:
    """200 of them."""
    ids = range(first, first + 200)
    return pa.table({"id": pa.array(ids, pa.int64()), "s": [f"row {i}" for i in ids]})


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(bytes(data))


def written_segment(volume: Path) -> tuple[Path, int]:
    """The segment of the log that holds most, and where the zeros of its prepared part begin."""
    used = {path: len(path.read_bytes().rstrip(b"\0")) for path in volume.glob("wal/segment-*.wal")}
    fullest = max(used, key=lambda path: used[path])
    return fullest, used[fullest]


def flip_log(volume: Path) -> None:
    segment, used = written_segment(volume)
    flip(segment, used // 2)


def cut_log(volume: Path) -> None:
    segment, used = written_segment(volume)
    with segment.open("r+b") as file:
        file.truncate(used // 2)


def damage_stores(volume: Path) -> None:
    """One tablet's rows have a flipped byte, another's lack their end, the third's manifest is flipped."""
    stores = sorted(volume.glob("tablets/*/*/store"))  # one that was flushed twice has two files
    flipped, cut, third = (min(store.glob("rows-*")) for store in stores)
    flip(flipped, flipped.stat().st_size // 2)
    with cut.open("r+b") as file:
        file.truncate(cut.stat().st_size // 2)
    manifest = third.with_name("MANIFEST")
    flip(manifest, manifest.stat().st_size // 2)


async def failures(client: AsyncClient, node: Member) -> list[str]:
    """Why replicas of this node are FAILED, as the masters heard it."""
    view = await cluster_view(client.masters)
    return [
        report.status.error
        for tablet in view.tablets
        for report in tablet.replicas
        if report.node_id.hex() == node.node_id and report.status.state == common_pb2.FAILED
    ]


async def read_everywhere(client: AsyncClient, table: AsyncTable) -> None:
    """Have every replica read all its rows: what is damaged must refuse, and never answer otherwise than the others."""
    await table.locations.refresh()
    for tablet in table.locations.tablets:
        with suppress(SteleError):
            await rows_of_tablet(client, tablet, 3)


async def test_flipped_and_cut_files_are_told_and_healed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with (
        Cluster(tmp_path / "c", masters=1, nodes=3) as cluster,
        AsyncClient(cluster.master_addresses) as client,
    ):
        table = await client.create_table("t", SCHEMA, THREE)
        for first in range(0, ROWS, 200):
            await table.write_arrow(rows(first))
        assert await rows_that_all_replicas_hold(client, table) == ROWS
        rounds: tuple[tuple[Callable[[Path], None], Member, str], ...] = (
            (flip_log, cluster.nodes[1], "its log is damaged"),
            (cut_log, cluster.nodes[2], "its log is damaged"),
            (damage_stores, cluster.nodes[1], "CORRUPT"),
        )
        for damage, node, words in rounds:
            await cluster.stop(node)
            damage(node.directory)
            cluster.restart(node)
            await cluster.wait_ready(node)
            await table.write_arrow(rows(0))
            async with asyncio.timeout(100):
                while len(found := await failures(client, node)) < 3:
                    await read_everywhere(client, table)
                    await asyncio.sleep(0.1)
            assert all(words in error for error in found), found
            capsys.readouterr()
            code = ksck.show(await cluster_health(client, timeout_s=60))
            out = capsys.readouterr().out
            assert code == 1 and out.count("FAILED: ") == 3 and found[0] in out, out
            assert await table.scan().count() == ROWS

            code, out = await stele(cluster, "driver", "run", "--until-healthy", "--dead-after", "5")
            assert code == 0, out
            await table.write_arrow(rows(0))  # a copied replica knows no snapshot before the next write
            assert await rows_that_all_replicas_hold(client, table) == ROWS
            assert not await failures(client, node)
        assert all(member.running for member in cluster.members)
