"""Rows are written in the order in which they were given, and whoever looks afterwards sees them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from stele.client import AsyncClient
from stele.client.bulk import BLOCK_ROWS
from stele.client.tablet import FAR_US, Observed
from stele.model.clock import HybridClock, from_physical_us, physical_us
from stele.model.errors import Code, Rejected, Retryable
from tests.client.small import EIGHT, ONE, SCHEMA, one_tablet, small_cluster


async def test_what_is_given_later_is_not_written_first(tmp_path: Path) -> None:
    """Puts, deletes and updates of one key, each begun a turn later while the blocks before it are under way."""
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, ONE)
        begun: list[asyncio.Task[int]] = []
        for number in range(60):
            row = {"id": 1, "n": number}
            for write in (table.put, table.update, lambda row: table.delete({"id": row["id"]})):
                begun.append(asyncio.ensure_future(write(row)))
                await asyncio.sleep(0)
        times = await asyncio.gather(*begun)
        assert times == sorted(times)
        assert await table.scan().count() == 0


async def test_arrow_data_is_written_in_blocks_and_the_later_row_wins(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        rows = 150_000
        data = pa.table({"id": np.arange(rows) % 100_000, "name": [str(i) for i in range(rows)]})
        seen: list[int] = []
        result = await table.write_arrow(data, on_rows=seen.append)
        assert result.rows_written == rows == sum(seen)
        assert result.timestamp > 0
        blocks = [len(tablet.attempts) for tablet in cluster.tablets.values()]
        assert sum(blocks) <= rows / 8_192 + 8
        found = (await table.scan(["id", "name"]).to_table()).to_pydict()
        wanted = {i: str(i + 100_000 if i < 50_000 else i) for i in range(100_000)}
        assert dict(zip(found["id"], found["name"])) == wanted


async def test_of_two_rows_with_one_key_the_later_wins_also_where_a_block_was_too_large(
    tmp_path: Path,
) -> None:
    """Its halves leave before what waits behind it."""
    async with one_tablet(tmp_path) as (_, table, tablet):
        tablet.before.append(lambda: Rejected("too large", code=Code.TOO_LARGE))
        ids = pa.array([7, *range(100, 100 + BLOCK_ROWS), 7])
        names = pa.array(["first", *["x"] * BLOCK_ROWS, "second"])
        await table.write_arrow(pa.table({"id": ids, "name": names}))
        assert await table.get(7, ["name"]) == {"name": "second"}


async def test_what_is_left_of_a_batch_leaves_before_the_next_one(tmp_path: Path) -> None:
    """Its rows are in the places that they had, too."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        rows = 2 * BLOCK_ROWS + 100
        first = pa.record_batch({"id": [*range(1, rows), 0], "name": ["first"] * rows})
        second = pa.record_batch({"id": np.arange(BLOCK_ROWS), "name": ["second"] * BLOCK_ROWS})
        cluster.nodes[0].speaks.clear()
        writer = table.arrow_writer()
        for batch in (first, second):
            await writer.feed(batch)
        cluster.nodes[0].speaks.set()
        await writer.finish()
        assert await table.get(0, ["name"]) == {"name": "second"}
        await table.delete({"id": 1})
        await table.delete({"id": BLOCK_ROWS + 5})
        result = await table.write_arrow(pa.Table.from_batches([first]), "delete", raise_row_errors=False)
        assert [error.row for error in result.row_errors] == [0, BLOCK_ROWS + 4]


async def test_of_rows_of_a_batch_with_one_key_the_last_wins(tmp_path: Path) -> None:
    """Among those of eight tablets, which are gathered first."""
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        number = np.arange(60_000)
        await table.write_arrow(pa.table({"id": number % 500, "n": number.astype(np.int32)}))
        found = (await table.scan(["n"], ordered=True).to_table())["n"].to_pylist()
        assert found == list(range(59_500, 60_000))


async def test_what_a_client_has_written_or_read_its_next_scan_sees(tmp_path: Path) -> None:
    """Also where the leader's clock is ahead of this machine's."""
    async with small_cluster(tmp_path) as (cluster, client), AsyncClient([cluster.master_address]) as other:
        cluster.clock = HybridClock(lambda: time.time_ns() // 1_000 + 1_500_000)
        table = await client.create_table("t", SCHEMA, EIGHT)
        await table.put({"id": 1})
        assert await table.scan().count() == 1
        await table.write_arrow(pa.table({"id": [2]}))
        assert await table.scan().count() == 2
        again = await other.open_table("t")
        assert await again.get(2, ["id"]) == {"id": 2}
        assert await again.scan().count() == 2


def test_what_a_client_has_seen_counts_for_all_its_tables_and_what_is_far_ahead_for_its_own() -> None:
    begun_us = time.time_ns() // 1_000
    client = Observed()
    table, other = Observed(client), Observed(client)
    assert physical_us(other.now()) >= begun_us
    near, far = (from_physical_us(begun_us + ahead_us) for ahead_us in (FAR_US // 2, FAR_US * 10))
    table.saw(near)
    assert client.now() == other.now() == near
    table.saw(far)
    assert (table.now(), client.now(), other.now()) == (far, near, near)
    client.saw(near + 1)  # another client's token
    assert other.now() == near + 1


async def test_the_time_of_a_write_sees_all_of_it_in_whatever_order_the_answers_come(tmp_path: Path) -> None:
    """The block that was written first is answered last, once it was asked for again."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        first = cluster.tablets_of("t")[0]
        first.after.extend([lambda: Retryable("the answer is lost", code=Code.UNAVAILABLE)] * 4)
        result = await table.write_arrow(pa.table({"id": np.arange(100)}))
        assert await table.scan(snapshot=result.timestamp).count() == 100
