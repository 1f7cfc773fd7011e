"""Arguments that no server could be asked for are refused in words, before anything is sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from stele.client import AsyncClient
from stele.model.clock import from_physical_us
from stele.model.errors import Rejected
from stele.model.partition import HashPartition, PartitionSchema
from tests.client.small import ONE, SCHEMA, small_cluster

MANY_DIGITS = 10**5_000
"""An int that Python writes as text for nobody who does not ask for it."""

HUGE: dict[str, Callable[[AsyncClient, Any], Awaitable[Any]]] = {
    "snapshot": lambda client, table: table.scan(snapshot=MANY_DIGITS).count(),
    "timeout_s": lambda client, table: client.create_table("u", SCHEMA, ONE, timeout_s=MANY_DIGITS),
    "flush_interval_s": lambda client, table: open_session(table, flush_interval_s=MANY_DIGITS),
    "replication_factor": lambda client, table: client.create_table(
        "u", SCHEMA, ONE, replication_factor=MANY_DIGITS
    ),
    "replication_factor ": lambda client, table: client.create_keyspace("u", replication_factor=MANY_DIGITS),
    "buckets": lambda client, table: make_hashed(client, buckets=MANY_DIGITS),
    "seed": lambda client, table: make_hashed(client, buckets=2, seed=MANY_DIGITS),
    "columns": lambda client, table: make_hashed(client, column=MANY_DIGITS, buckets=2),
}


async def open_session(table: Any, **options: Any) -> None:
    async with table.new_session(**options):
        pass


async def make_hashed(client: AsyncClient, column: int = 0, **options: int) -> None:
    await client.create_table("u", SCHEMA, PartitionSchema((HashPartition((column,), **options),)))


@pytest.mark.parametrize("what", HUGE)
async def test_a_number_of_any_size_is_refused_in_words(tmp_path: Path, what: str) -> None:
    async with small_cluster(tmp_path) as (_, client), asyncio.timeout(30):
        table = await client.create_table("t", SCHEMA, ONE)
        with pytest.raises(Rejected, match=r"expected|at most|not key columns"):
            await HUGE[what](client, table)
        assert [info.name for info in await client.list_tables()] == ["t"]


async def test_a_time_of_no_clock_is_not_taken_note_of(tmp_path: Path) -> None:
    """Every later scan of that client was refused, as one of the future."""
    async with small_cluster(tmp_path) as (_, client), asyncio.timeout(30):
        table = await client.create_table("t", SCHEMA, ONE)
        await table.put({"id": 1})
        minutes = int(from_physical_us(time.time_ns() // 1_000 + 5 * 60_000_000))
        for wrong in (MANY_DIGITS, 1 << 64, 1 << 63, minutes):
            with pytest.raises(Rejected, match="ahead of this machine's clock"):
                client.observe(wrong)
        assert await table.scan().count() == 1
        soon = int(from_physical_us(time.time_ns() // 1_000 + 1_000_000))
        client.observe(soon)
        assert client.now() >= soon
