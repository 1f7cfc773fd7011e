"""Real processes: two ranges of a table that one node leads are written to most. Their leaders part, and the numbers stay."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from stele.client import AsyncClient, AsyncTable
from stele.client.step_down import step_down
from stele.driver.leader_trials import LOADS_REST_MS
from stele.driver.main import run
from stele.driver.policy import Policy
from stele.driver.progress import Progress
from stele.driver.view import ClusterView, TabletView
from stele.model.ids import CATALOG_TABLET_ID
from stele.model.keys import encode_tuple
from stele.model.partition import PartitionSchema
from stele.model.ranges import RangePartition
from stele.model.schema import Schema
from tests.driver.test_leaders_spread import view_of
from tests.harness.processes import Cluster

RANGES, WIDE, ROWS = 6, 1_000, 1_000
WITHIN_S = 450.0
"""How long a machine may take that is much busier than this test makes it."""
POLICY = Policy(dead_after_ms=600_000, unreached_after_ms=600_000, min_disk_free_bytes=0)
SCHEMA = Schema.make([("id", "int64"), ("text", "string")], ["id"])


@asynccontextmanager
async def writing(table: AsyncTable, ranges: list[int]) -> AsyncIterator[Counter[int]]:
    """Blocks of 200 KiB go to each of these ranges, again and again. How many were acknowledged."""
    written: Counter[int] = Counter()

    async def write(number: int) -> None:
        ids = list(range(number * WIDE, number * WIDE + ROWS))
        rows = pa.table({"id": ids, "text": ["x" * 200] * ROWS})
        while True:
            await table.write_arrow(rows)
            written[number] += 1
            await asyncio.sleep(0.02)

    tasks = [asyncio.create_task(write(number)) for number in ranges]
    try:
        yield written
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


def load_of(tablet: TabletView) -> int:
    return max((r.load for r in tablet.replicas), default=0)


def told(view: ClusterView, ids: list[str]) -> str:
    """Leaders and loads, for people."""
    found = []
    for tablet_id in ids:
        tablet = view.tablet(tablet_id)
        assert tablet is not None
        found.append(f"{tablet.leader_node[:4]} {load_of(tablet):,}/s")
    return ", ".join(found)


def elections(view: ClusterView, ids: list[str]) -> int:
    """How many leaders these tablets have had, moves included."""
    return sum(t.term for n in ids if (t := view.tablet(n)) is not None)


def leads(view: ClusterView) -> Counter[str]:
    """How many tablets each node leads."""
    return Counter(t.leader_node for t in view.tablets if t.tablet_id != CATALOG_TABLET_ID)


async def until_even(client: AsyncClient) -> None:
    """Each node leads two."""
    async with asyncio.timeout(WITHIN_S):
        while sorted(leads(await view_of(client)).values()) != [2, 2, 2]:
            await asyncio.sleep(0.2)


@pytest.mark.chaos
@pytest.mark.timeout(2_400)
async def test_two_busy_leaders_part_and_nothing_goes_to_and_fro(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    records: list[Progress] = []
    async with (
        Cluster(tmp_path, masters=1, nodes=3) as cluster,
        AsyncClient(cluster.master_addresses, timeout_s=60) as client,
    ):
        splits = tuple(encode_tuple([n * WIDE], [pa.int64()]) for n in range(1, RANGES))
        table = await client.create_table(
            "t", SCHEMA, PartitionSchema((), RangePartition((0,), splits)), replication_factor=3
        )
        ids = [t.tablet_id for t in sorted(table.locations.tablets, key=lambda t: t.ordinal)]
        nodes = [n.node_id for n in cluster.nodes]
        for number, tablet_id in enumerate(ids):
            await step_down(client.masters, client.pool, tablet_id, to=nodes[number // 2], kept_s=0)
        async with writing(table, [0, 1]) as written:
            driving = asyncio.create_task(run(cluster.master_addresses, POLICY, on_progress=records.append))
            try:
                since = time.monotonic()
                while True:
                    view = await view_of(client)
                    tablets = [t for n in ids if (t := view.tablet(n)) is not None]
                    if tablets[0].leader_node != tablets[1].leader_node:
                        break
                    assert time.monotonic() - since < WITHIN_S, f"they never parted: {told(view, ids)}"
                    assert not driving.done()
                    await asyncio.sleep(0.5)
                lines.append(f"parted after {time.monotonic() - since:.0f} s: {told(view, ids)}")
                await until_even(client)
                async with asyncio.timeout(WITHIN_S):  # a pass tells of its moves when it ends
                    while not any(r.reason.endswith("/s") and r.leaders and r.leaders.moved for r in records):
                        await asyncio.sleep(0.1)
                lines += [f"{r.where}: {r.reason}" for r in records]
                async with asyncio.timeout(WITHIN_S):
                    while True:
                        before, count = elections(await view_of(client), ids), len(records)
                        await asyncio.sleep(2 * LOADS_REST_MS / 1_000)
                        view = await view_of(client)
                        since_then = records[count:]
                        if not [r for r in since_then if "load" in r.reason]:
                            break
                        # Only where a busy machine had other leaders elected may loads move some again.
                        moved = sum(r.leaders.moved for r in since_then if r.leaders)
                        assert elections(view, ids) - before > moved, f"moves go on: {since_then}"
                lines.append(f"a minute later: {told(view, ids)}")
                await until_even(client)
                assert all(written.values())
            finally:
                driving.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await driving
        _, out = await cluster.http(cluster.nodes[0], "/metrics")
        assert any(line.startswith("stele_leader_load ") for line in out.splitlines())
    with capsys.disabled():
        print("", *lines, sep="\n")
