"""Reads at followers of real processes that are stopped for a while, and whose wall clocks are set: none is older than allowed."""

from __future__ import annotations

import asyncio
from pathlib import Path

from stele.client import AsyncClient
from stele.client.table import AsyncTable
from stele.model.schema import Schema
from tests.harness.processes import Cluster, Member

SCHEMA = Schema.make([("id", "int64"), ("n", "int64")], ["id"])
ALLOWED_S = 1.0


async def _follower(cluster: Cluster, table: AsyncTable) -> Member:
    """The follower at which this client reads."""
    for _ in range(100):
        found = await table.get(1, max_staleness=ALLOWED_S)
        again = await table.get(1, max_staleness=ALLOWED_S)
        if found.node_id == again.node_id and again.age_s > 0:
            return cluster.member(again.node_id)
        await asyncio.sleep(0.05)
    raise AssertionError("no follower answers")


async def test_a_follower_that_was_stopped_or_whose_clock_is_wrong_serves_nothing_too_old(
    tmp_path: Path,
) -> None:
    async with Cluster(tmp_path, masters=1, nodes=3, clocks=True) as cluster:
        masters = cluster.master_addresses
        async with AsyncClient(masters, timeout_s=60) as writer, AsyncClient(masters, timeout_s=60) as reader:
            written = await writer.create_table("t", SCHEMA, ())
            await written.put({"id": 1, "n": 0})
            table = await reader.open_table("t")
            await table.get(1)
            for number in range(1, 7):
                follower = await _follower(cluster, table)
                cluster.pause(follower)
                await written.put({"id": 1, "n": number})
                await asyncio.sleep(ALLOWED_S + 0.3)
                # It comes with all that was sent meanwhile, in any order.
                reading = asyncio.create_task(table.get(1, max_staleness=ALLOWED_S))
                await asyncio.sleep(0.05)
                cluster.resume(follower)
                found = await reading
                assert found.row == {"id": 1, "n": number}, f"{found.age_s} s are told"
            for number, ahead_s in enumerate((-3_600.0, 3_600.0, 0.0), 10):
                follower = await _follower(cluster, table)
                cluster.set_clock(follower, ahead_s)
                await asyncio.sleep(0.2)
                await written.put({"id": 1, "n": number})
                await asyncio.sleep(ALLOWED_S + 0.2)
                found = await table.get(1, max_staleness=ALLOWED_S)
                assert found.row == {"id": 1, "n": number} and 0 <= found.age_s <= ALLOWED_S + 0.5
