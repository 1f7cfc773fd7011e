"""The volumes of a small cluster of release 0.1.0: one master, one node. Committed, so that each checkout can read them.

python -m tests.upgrade.volumes     makes them anew; needs the tag v0.1.0
"""

from __future__ import annotations

import asyncio
import json
import tarfile
import tempfile
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

from stele.client import AsyncClient
from stele.client.columns import column
from stele.client.partitioning import hash as hashed
from stele.model.ids import ClusterId, NodeId
from stele.model.schema import Schema
from tests.harness.processes import Cluster
from tests.upgrade.release import unpacked

ARCHIVE = Path(__file__).with_name("volumes-0.1.0.tar.xz")
TABLE = "rows"
SCHEMA = Schema.make(
    [
        column("k", "int64"),
        column("text", "string", nullable=True),
        column("amount", "decimal(9,2)", default=Decimal("1.50")),
        column("day", "date", nullable=True),
        column("raw", "binary", nullable=True),
    ],
    key=["k"],
)
ROWS, DELETED = 300, 50
KEYS = {f"key-{n}".encode(): f"value-{n}".encode() for n in range(20)}
_ABOUT = "about.json"


def row(k: int) -> dict[str, Any]:
    """The row with this key."""
    return {
        "k": k,
        "text": None if k % 7 == 0 else f"text {k} ä",
        "amount": Decimal(k) / 4,
        "day": date(2024, 1, 1 + k % 28),
        "raw": bytes([k % 256]) * (k % 5),
    }


def expected() -> dict[int, dict[str, Any]]:
    """All rows of the table."""
    return {k: row(k) for k in range(DELETED, ROWS)}


def cluster_of(directory: Path) -> Cluster:
    """One master, one node; logs as small as they can be."""
    return Cluster(directory, masters=1, nodes=1)


def unpack(directory: Path) -> Cluster:
    """The cluster of the committed volumes below `directory`, not started."""
    directory.mkdir(parents=True)
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, filter="data")
    about = json.loads((directory / _ABOUT).read_text())
    cluster = cluster_of(directory)
    cluster.cluster_id = ClusterId(about["cluster_id"])
    for member in cluster.members:
        member.node_id = NodeId(about["nodes"][member.name])
    return cluster


async def make() -> None:
    """Write ARCHIVE."""
    with tempfile.TemporaryDirectory() as home:
        program = unpacked(Path(home) / "release")
        cluster = cluster_of(Path(home) / "cluster")
        for member in cluster.members:
            member.program = program
        async with cluster:
            await _fill(cluster)
            for member in (*cluster.nodes, *cluster.masters):
                assert await cluster.stop(member, 120.0) == 0
        about = {"cluster_id": cluster.cluster_id, "nodes": {m.name: m.node_id for m in cluster.members}}
        (cluster.directory / _ABOUT).write_text(json.dumps(about, indent=1))
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            for name in (_ABOUT, *(m.name for m in cluster.members)):
                archive.add(cluster.directory / name, arcname=name)


async def _fill(cluster: Cluster) -> None:
    async with AsyncClient(cluster.master_addresses) as client:
        table = await client.create_table(TABLE, SCHEMA, [hashed("k", buckets=2)], replication_factor=1)
        for k in range(ROWS):
            await table.insert(row(k))
        for k in range(DELETED):
            await table.delete({"k": k})
        space = await client.create_keyspace("keys", replication_factor=1)
        for key, value in KEYS.items():
            await space.insert(key, value)


if __name__ == "__main__":
    asyncio.run(make())
