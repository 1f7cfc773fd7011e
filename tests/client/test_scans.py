"""Scans: one snapshot, every row once, whichever replicas it took."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stele.client import AsyncClient, Client, key_order
from stele.client.tablet_scan import PARALLEL_TABLETS
from stele.model.errors import Closed, Code, Rejected
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from tests.client.small import small_cluster
from tests.tablet.twin import flush

SCHEMA = Schema.make(
    [("day", "date"), ("id", "int64"), ("name", "string", True), ("v", "double", True)], ["day", "id"]
)
FOUR = PartitionSchema((HashPartition((0, 1), 4),))
ONE = PartitionSchema()
ROWS = 40_000


def rows() -> pa.Table:
    number = np.arange(ROWS)
    return pa.table(
        {
            "day": pa.array(number % 10, pa.int32()).cast(pa.date32()),
            "id": number,
            "name": [None if n % 7 == 0 else f"name {n}" for n in number.tolist()],
            "v": number / 2,
        }
    )


async def test_projection_predicates_ranges_limit_and_order(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, FOUR)
        await table.write_arrow(rows())
        assert (await table.scan().to_table()).num_rows == ROWS
        found = await table.scan(["id"], [("v", ">=", 100.0), ("name", "is_null")]).to_table()
        assert sorted(found["id"].to_pylist()) == [n for n in range(200, ROWS) if n % 7 == 0]
        assert found.schema.names == ["id"]
        ordered = await table.scan(["id", "day"], ordered=True, lower={"day": 3}, upper=[4]).to_table()
        assert ordered["id"].to_pylist() == [n for n in range(ROWS) if n % 10 == 3]
        for limit in (ROWS * 3 // 8, ROWS + 1, 10**30):  # of one tablet and a half, of more than there are
            assert (await table.scan(limit=limit).to_table()).num_rows == min(limit, ROWS)
            assert sum([b.num_rows async for b in table.scan(limit=limit).batches()]) == min(limit, ROWS)
        few = await table.scan(limit=17).to_table()
        assert few.num_rows == 17
        assert sum([b.num_rows async for b in table.scan(limit=17).batches()]) == 17
        first = await table.scan(["id"], ordered=True, limit=3).to_table()
        assert first["id"].to_pylist() == [0, 10, 20]
        frame = await table.scan(["id", "v"]).to_pandas()
        assert float(frame["v"].sum()) == float((np.arange(ROWS) / 2).sum())
        with pytest.raises(Rejected, match="colour"):
            table.scan(["colour"])
        with pytest.raises(Rejected):
            table.scan(predicates=[("v", ">", "much")])


async def test_a_limit_ends_the_scan_of_all_tablets(tmp_path: Path) -> None:
    """Each of them was read up to the limit, however many there are."""
    buckets = 3 * PARALLEL_TABLETS
    many = PartitionSchema((HashPartition((1,), buckets),))
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, many)
        await table.write_arrow(rows())
        for limit, least, most in ((1, 1, PARALLEL_TABLETS), (ROWS - 1, buckets, buckets)):
            for node in cluster.nodes:
                node.snapshots.clear()
            assert (await table.scan(limit=limit).to_table()).num_rows == limit
            assert least <= sum(len(node.snapshots) for node in cluster.nodes) <= most


async def test_a_snapshot_does_not_change_and_sees_what_this_client_wrote(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, FOUR)
        await table.write_arrow(rows())
        then = client.now()
        scanner = table.scan(["id"])
        await table.put({"day": "2020-01-01", "id": -1} | {"day": rows()["day"][0].as_py()})
        assert await table.scan(snapshot=then).count() == ROWS
        assert (await scanner.to_table()).num_rows == ROWS
        assert await table.scan().count() == ROWS + 1


async def test_a_snapshot_of_0_is_one_and_the_same_for_all_tablets(tmp_path: Path) -> None:
    """A node takes 0 in a ticket as its tablet's latest; the timestamp of a write that sent nothing is 0."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, FOUR)
        await table.write_arrow(rows())
        nothing = await table.write_arrow(rows().slice(0, 0))
        assert nothing.timestamp == 0
        for snapshot in (nothing.timestamp, np.int64(0), None):
            before = client.now()
            assert await table.scan(snapshot=snapshot).count() == ROWS
            asked = [node.snapshots.popleft() for node in cluster.nodes for _ in range(len(node.snapshots))]
            assert len(asked) == 4
            assert len(set(asked)) == 1
            assert asked[0] >= before > 0


async def test_an_empty_string_is_a_key_like_others(tmp_path: Path) -> None:
    """Encoded it has no bytes, which elsewhere stand for "no bound" and "nothing read yet"."""
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", Schema.make([("k", "string"), ("v", "int64")], ["k"]), ONE)
        await table.write_arrow(pa.table({"k": ["", "a", "b"], "v": [1, 2, 3]}))
        assert (await table.scan(upper=[""]).to_table()).num_rows == 0
        assert (await table.scan(lower=[""]).to_table()).num_rows == 3
        assert (await table.scan(upper=["a"]).to_table()).column("k").to_pylist() == [""]


async def test_a_bound_by_the_first_of_two_strings_may_hold_any_character(tmp_path: Path) -> None:
    """Where more follows, a string is encoded with its zero characters and its end marked."""
    async with small_cluster(tmp_path) as (_, client):
        schema = Schema.make([("a", "string"), ("b", "string")], ["a", "b"])
        table = await client.create_table("t", schema, ONE)
        keys = ["", "a", "a\0", "a\0b", "a\1", "b"]
        await table.write_arrow(pa.table({"a": keys, "b": keys}))
        for n, key in enumerate(keys):
            assert (await table.scan(lower=key, ordered=True).to_table())["a"].to_pylist() == keys[n:]
            assert (await table.scan(upper=key, ordered=True).to_table())["a"].to_pylist() == keys[:n]


async def test_a_scan_that_is_left_early_ends_everywhere(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, FOUR)
        await table.write_arrow(rows())
        batches = table.scan().batches()
        assert (await anext(batches)).num_rows > 0
        await batches.aclose()
        assert await table.scan().count() == ROWS


async def test_scans_that_are_read_slowly_hold_up_no_others(tmp_path: Path) -> None:
    """Each kept four of a client's eight threads while its reader took nothing; scans within scans waited for ever."""
    async with small_cluster(tmp_path) as (cluster, client):
        hashed = PartitionSchema((HashPartition((0,), 6),))
        table = await client.create_table("t", Schema.make([("k", "int64")], ["k"]), hashed)
        for number in range(6):
            await table.write_arrow(pa.table({"k": range(100 * number, 100 * number + 100)}))
            for tablet in cluster.tablets_of("t"):
                flush(tablet.store)  # a file each, so a batch each: more than a reader lets wait
        slow = [table.scan().batches() for _ in range(3)]
        given = [(await anext(scan)).num_rows for scan in slow]
        await asyncio.sleep(0.3)
        async with asyncio.timeout(60):
            assert await table.scan().count() == 600
            for scan, rows in zip(slow, given):
                assert rows + sum([batch.num_rows async for batch in scan]) == 600
            left = table.scan().batches()
            await anext(left)
            await left.aclose()
        async with asyncio.timeout(60):
            while any(thread.name.startswith("stele-batches") for thread in threading.enumerate()):
                await asyncio.sleep(0.05)


async def test_a_scan_by_batches_that_waits_for_its_reader_ends_with_its_client(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        hashed = PartitionSchema((HashPartition((0, 1), 16),))
        table = await client.create_table("t", SCHEMA, hashed)
        await table.write_arrow(rows())
        batches = table.scan().batches()
        await anext(batches)
        await asyncio.sleep(0.3)
        await client.close()
        with pytest.raises(Closed):
            async with asyncio.timeout(60):
                async for _ in batches:
                    pass


async def test_the_blocking_client_does_the_same(tmp_path: Path) -> None:
    def use(address: str) -> None:
        with Client([address]) as client:
            table = client.create_table("t", SCHEMA, FOUR)
            assert table.write_arrow(rows()).rows_written == ROWS
            assert table.get({"day": rows()["day"][3].as_py(), "id": 3}, ["v"]) == {"v": 1.5}
            assert table.scan(["v"]).to_table().num_rows == ROWS
            assert sum(batch.num_rows for batch in table.scan(["v"]).batches()) == ROWS
            with table.new_session() as session:
                session.delete({"day": rows()["day"][3].as_py(), "id": 3})
            assert table.scan().count() == ROWS - 1
            assert len(table.scan(limit=5).to_pandas()) == 5
            with pytest.raises(Rejected):
                client.open_table("nothing")

    async with small_cluster(tmp_path) as (cluster, _):
        await asyncio.to_thread(use, cluster.master_address)


async def test_the_blocking_client_copies_a_table_as_it_reads_it(tmp_path: Path) -> None:
    """The batches were waited for on the thread that was to read them: neither call ended, nor did close()."""

    def copy(address: str) -> None:
        with Client([address]) as client:
            old, new = client.create_table("old", SCHEMA, FOUR), client.create_table("new", SCHEMA, FOUR)
            old.write_arrow(rows())
            seen: list[int] = []
            assert new.write_arrow(old.scan().batches(), on_rows=seen.append).rows_written == ROWS
            assert sum(seen) == ROWS and new.scan().count() == ROWS
            result = new.write_arrow(old.scan().batches(), "insert", raise_row_errors=False)
            assert len(result.row_errors) == ROWS

    async with small_cluster(tmp_path) as (cluster, _), asyncio.timeout(60):
        await asyncio.to_thread(copy, cluster.master_address)


async def test_a_blocking_call_on_the_clients_own_thread_is_refused(tmp_path: Path) -> None:
    def use(address: str) -> None:
        with Client([address]) as client:
            table = client.create_table("t", SCHEMA, ONE)
            refused: list[Rejected] = []

            def look(_: int) -> None:
                for call in (lambda: table.scan().count(), client.close):
                    with pytest.raises(Rejected, match="its own thread") as caught:
                        call()
                    refused.append(caught.value)

            table.write_arrow(rows().slice(0, 5), on_rows=look)
            assert len(refused) == 2
            batches = table.scan().batches()
            next(batches)
            client.run(_end(batches))  # as the garbage collector may, wherever it runs
            with pytest.raises(SystemExit, match=r"^5$"):
                table.write_arrow(rows().slice(0, 5), on_rows=sys.exit)
            assert table.scan().count() == 5

    async def _end(batches: Iterator[pa.RecordBatch]) -> None:
        batches.close()  # type: ignore[attr-defined]

    async with small_cluster(tmp_path) as (cluster, _), asyncio.timeout(60):
        await asyncio.to_thread(use, cluster.master_address)


@pytest.mark.parametrize("columns", [["id", "id"], ["v", "id", "v"], ["name", "name"]])
@pytest.mark.parametrize("ordered", [False, True])
async def test_a_column_asked_for_twice_is_there_twice(
    tmp_path: Path, columns: list[str], ordered: bool
) -> None:
    """As a table without order it was; in batches, or in order, it was a missing key column or a KeyError."""
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, FOUR)
        await table.write_arrow(rows().slice(0, 50))
        scanner = table.scan(columns, ordered=ordered)
        found = await scanner.to_table()
        assert found.schema.names == columns and found.num_rows == 50
        assert found.column(0).equals(rows()[columns[0]].take(_by_key(50))) or not ordered
        batches = [batch async for batch in scanner.batches()]
        assert {tuple(b.schema.names) for b in batches} == {tuple(columns)}
        assert sum(b.num_rows for b in batches) == 50


def _by_key(count: int) -> list[int]:
    return sorted(range(count), key=lambda n: (n % 10, n))


@pytest.mark.parametrize("columns", [None, ["name", "v", "name"]], ids=["all", "twice"])
async def test_more_of_a_column_than_an_array_holds_is_put_in_order_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: list[str] | None
) -> None:
    """Arrow refused to join more than 2 GiB of it, of which this test holds a small part."""
    monkeypatch.setattr(key_order, "_TAKE_BYTES_MAX", 20_000)
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, FOUR)
        await table.write_arrow(rows())
        in_order = rows().take(_by_key(ROWS)).cast(SCHEMA.to_arrow())
        scanner = table.scan(columns, ordered=True)
        found = await scanner.to_table()
        assert found.equals(in_order if columns is None else in_order.select(columns))
        names = found.column("name" if columns is None else 0)
        assert names.num_chunks > 10 and all(chunk.nbytes < 40_000 for chunk in names.chunks)
        batches = [batch async for batch in scanner.batches()]
        assert pa.Table.from_batches(batches).equals(found)
        assert (await table.scan(ordered=True, limit=9).to_table()).equals(in_order.slice(0, 9))


@pytest.mark.parametrize("whole", [True, False])
async def test_a_scan_of_a_table_that_was_deleted_says_so_at_once(tmp_path: Path, whole: bool) -> None:
    """Its replicas say only that they are gone, and would be asked in turn until the scan's time is over."""
    async with small_cluster(tmp_path) as (cluster, client), AsyncClient([cluster.master_address]) as other:
        await client.create_table("t", SCHEMA, FOUR)
        table = await other.open_table("t")
        await client.delete_table("t")
        for tablet in cluster.tablets.values():
            tablet.store.close()
        cluster.tablets.clear()
        for _ in range(2):  # asked once more, it is known
            with pytest.raises(Rejected, match=r"^NOT_FOUND: no table") as caught:
                async with asyncio.timeout(60):
                    scanner = table.scan(timeout_s=600)
                    if whole:
                        await scanner.to_table()
                    else:
                        async for _ in scanner.batches():
                            pass
            assert caught.value.code is Code.NOT_FOUND


async def test_a_date_that_python_has_no_value_for_is_told_by_its_column(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, ONE)
        await table.put({"day": 3_000_000, "id": 1})
        with pytest.raises(Rejected, match=r"columns day: .*date_as_object=False"):
            await table.scan().to_pandas()
        frame = (await table.scan().to_table()).to_pandas(date_as_object=False)
        assert str(frame["day"][0]).startswith("10183-09-21")
