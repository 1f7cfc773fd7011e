"""What a process may use, and what it makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from stele.metrics import REGISTRY
from stele.model.errors import Code, Retryable
from stele.rpc.ticket import ScanCommand
from stele.tserver.memory import LEAST_BYTES, MemoryShares, memory_limit
from stele.tserver.node import Node
from stele.tserver.scan import Scans
from tests.tserver.local import SCHEMA, LocalCluster

NODES = 1  # of the cluster

MIB = 1 << 20
MACHINE = f"MemTotal:       {8 << 20} kB\nMemFree:        100 kB\n"


def told(root: Path, cgroup: str, files: dict[str, str]) -> int:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(MACHINE)
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return memory_limit(root / "proc", root / "groups")


CASES = {
    "no group": ("", {}, 8 << 30),
    "version 2, in a container": ("0::/\n", {"memory.max": f"{512 * MIB}\n"}, 512 * MIB),
    "version 2, no limit": ("0::/\n", {"memory.max": "max\n"}, 8 << 30),
    "version 2, the limit above": (
        "0::/pods/a\n",
        {"pods/a/memory.max": "max\n", "pods/memory.max": f"{256 * MIB}\n"},
        256 * MIB,
    ),
    "version 1": (
        "9:name=systemd:/\n4:cpu,memory:/a\n0::/\n",
        {
            "memory/a/memory.limit_in_bytes": f"{300 * MIB}",
            "memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}",
        },
        300 * MIB,
    ),
    "version 1, in a container that is told the machine's path": (
        "4:memory:/kubepods/pod1\n",
        {"memory/memory.limit_in_bytes": f"{400 * MIB}"},
        400 * MIB,
    ),
    "a limit above the machine": ("0::/\n", {"memory.max": f"{1 << 40}"}, 8 << 30),
}


@pytest.mark.parametrize(("cgroup", "files", "limit"), CASES.values(), ids=CASES.keys())
def test_the_least_limit_counts(tmp_path: Path, cgroup: str, files: dict[str, str], limit: int) -> None:
    assert told(tmp_path, cgroup, files) == limit


def test_nothing_that_tells_is_no_limit(tmp_path: Path) -> None:
    assert memory_limit(tmp_path, tmp_path) == 0


def test_shares_fit_into_small_limits_and_are_the_defaults_in_large_ones() -> None:
    most = MemoryShares()
    large = MemoryShares.of(16 << 30)
    assert (large.budget_bytes, large.queue_bytes, large.cache_bytes, large.stores_bytes) == (
        most.budget_bytes,
        most.queue_bytes,
        most.cache_bytes,
        most.stores_bytes,
    )
    for limit in range(384 * MIB, 4 << 30, 64 * MIB):
        shares = MemoryShares.of(limit)
        together = shares.budget_bytes + shares.queue_bytes + shares.cache_bytes + 3 * shares.stores_bytes
        assert together <= limit - 192 * MIB
        assert min(shares.budget_bytes, shares.stores_bytes) >= LEAST_BYTES
    assert MemoryShares.of(512 * MIB, 100 * MIB).budget_bytes == 100 * MIB
    assert MemoryShares.of(0) == most


async def begun(node: Node, scans: Scans) -> Iterator[pa.RecordBatch]:
    """A scan of the node's tablet whose reader takes nothing after the first batch."""

    def begin() -> Iterator[pa.RecordBatch]:
        (replica,) = node.replicas
        (endpoint,) = scans.plan(ScanCommand(tablet_id=replica.tablet_id)).endpoints
        _, batches = scans.scan(endpoint.ticket)
        rows = iter(batches)
        next(rows)
        return rows

    return await asyncio.to_thread(begin)


async def test_what_slow_readers_hold_of_memory_is_bounded(cluster: LocalCluster) -> None:
    """Each held the memtable that it was begun on, flushed or not: 32 of them beside a writer took 4 to 5 GB."""
    node = cluster.running["node-0"]
    scans = Scans(node.plans.plan, node.replicas, node.scan_memory, node.load)
    node.scan_memory.bytes_max = 1
    refusals = partial(REGISTRY.get_sample_value, "stele_flight_throttled_total", {"want": "memory"})
    before = refusals() or 0.0
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, replication_factor=1)
        (replica,) = node.replicas

        async def write(first: int) -> None:
            await table.write_arrow(pa.table({"id": range(first, first + 100), "name": ["n"] * 100}))

        await write(0)
        slow = await begun(node, scans)
        beside = await begun(node, scans)  # what it holds is held already
        await replica.storage.flush()
        after = await begun(node, scans)  # it reads a file
        assert (refusals() or 0.0) == before
        await write(100)
        for _ in range(20):  # where the machine stands still so long, nobody answers in time
            with pytest.raises(Retryable) as refused:
                await table.scan(timeout_s=0.2).to_table()
            if refused.value.code is Code.THROTTLED:
                break
        assert refused.value.code is Code.THROTTLED
        assert (refusals() or 0.0) > before
        waits = asyncio.ensure_future(table.scan().to_table())
        slow.close()  # type: ignore[attr-defined]
        del beside  # its reader has left
        found = await waits
        assert sorted(found.column("id").to_pylist()) == list(range(200))
        assert sum(batch.num_rows for batch in after) == 0  # the first had all
    assert not node.scan_memory._scans
