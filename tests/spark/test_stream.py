"""The stream of a table's changes without Spark around it: what Spark calls, on real nodes."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import StructType

from stele.client import AsyncTable
from stele.model.clock import from_physical_us, physical_us
from stele.model.errors import Code, Rejected
from stele.model.partitioning import RangePartitioning
from stele_spark import slices
from stele_spark.source import SteleDataSource
from stele_spark.stream import StreamReader
from tests.spark.streaming import ALL, Row, Streams, call, held, shown, stream
from tests.tserver.local import HASHED, SCHEMA, LocalCluster, fill


def applied(copy: dict[int, str | None], rows: list[Row]) -> None:
    """Bring a copy of the table up to date, row by row, as they come."""
    for row in rows:
        if row["_op"] == "delete":
            del copy[row["id"]]
        else:
            copy[row["id"]] = row["name"]


async def content(table: AsyncTable) -> dict[int, str]:
    return {row["id"]: row["name"] async for row in table.scan()}


async def test_a_copy_that_follows_is_the_table(cluster: LocalCluster, streams: Streams) -> None:
    """The whole table first, then each change of each key, in order, once."""
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, HASHED)
        await fill(client, 20)
        query, copy = await streams.query(cluster), dict[int, str | None]()
        first = await call(query.batch)
        assert len(first) == 20 and {row["_op"] for row in first} == {"upsert"}
        assert {(row["_ts"], row["_schema"]) for row in first} == {(json.loads(query.at)["ts"], 1)}
        applied(copy, first)
        for turn in range(3):
            before = json.loads(query.at)["ts"]
            for name in ("a", "b", "c"):
                await table.put({"id": 1, "name": f"{name}{turn}"})
            await table.delete({"id": 10 + turn})
            await table.put({"id": 100 + turn, "name": "new"})
            rows = await call(query.batch)
            assert [row["name"] for row in rows if row["id"] == 1] == [f"{name}{turn}" for name in "abc"]
            assert [row["name"] for row in rows if row["_op"] == "delete"] == [None]
            assert len(rows) == 5 and all(before < row["_ts"] <= json.loads(query.at)["ts"] for row in rows)
            applied(copy, rows)
            assert copy == await content(table)
        newest = await streams.query(cluster, startingSnapshot=str(before), versions="newest")
        assert sorted((row["id"], row["name"]) for row in await call(newest.batch)) == [
            (1, "c2"),
            (12, None),
            (102, "new"),
        ]


async def test_nothing_new_is_the_same_text(cluster: LocalCluster, streams: Streams) -> None:
    """Spark compares texts. Another one, and it would run an empty batch at each trigger."""
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, HASHED)
        query = await streams.query(cluster, startingSnapshot="latest")
        start = query.at
        assert [await call(query.plan), await call(query.plan, ReadMaxRows(5))] == [start, start]
        again = await streams.query(cluster, at=start)
        assert await call(again.plan) == start, "after a restart"
        await table.put({"id": 1, "name": "x"})
        assert await call(query.plan) != start
        assert len(await call(query.batch)) == 1
        assert await call(query.plan) == query.at


async def test_a_batch_is_the_same_whenever_it_is_planned(cluster: LocalCluster, streams: Streams) -> None:
    """Spark plans a batch twice, and again after a restart, however much was written meanwhile. Of an empty one it asks,
    too."""
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, HASHED)
        await fill(client, 10)
        query = await streams.query(cluster, cursor="twice")
        for expected in (10, 4):
            end = await call(query.plan)
            rows = await call(query.rows, end)
            assert len(rows) == expected
            await table.put({"id": 20 + expected, "name": "new"})
            await table.put({"id": 3, "name": "later"})
            assert await call(query.rows, end) == rows
            again = await streams.query(cluster, at=query.at, cursor="twice")
            assert await call(again.rows, end) == rows
            assert (await call(again.plan)) != end
            empty = json.loads(end)
            assert await call(again.reader.partitions, empty, empty) == []
            assert await call(again.reader.partitions, json.loads(query.at), json.loads(query.at)) == []
            query.at = end
            if expected == 10:
                await table.put({"id": 4, "name": "more"})
                await table.put({"id": 5, "name": "more"})


def test_a_batch_ends_before_a_write_that_is_too_much_and_has_one_at_least() -> None:
    """Rows of one write have one time, so they are never in two batches."""
    times = np.array([2, 1, 1, 2, 3, 2], np.uint64)
    assert [slices._last(times, rows) for rows in (1, 2, 3, 4, 5)] == [1, 1, 1, 1, 2]


async def test_a_batch_has_about_as_many_rows_as_asked_for(
    cluster: LocalCluster, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never the rows of one write in two batches; and nothing is lost or repeated."""
    read = 0
    inner = slices._read

    async def counted(scanner: Any, most: int) -> Any:
        nonlocal read
        times, whole = await inner(scanner, most)
        read += len(times)
        return times, whole

    monkeypatch.setattr(slices, "_read", counted)
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, HASHED)
        query = await streams.query(cluster, startingSnapshot="latest", maxRowsPerTrigger="10")
        assert query.reader.getDefaultReadLimit() == ReadMaxRows(10)
        assert (await streams.query(cluster)).reader.getDefaultReadLimit() == ALL
        for n in range(60):
            await table.put({"id": n % 7, "name": f"{n}"})
        await table.write_arrow(pa.table({"id": np.arange(1_000, 1_500), "name": ["big"] * 500}))
        for n in range(60, 100):
            await table.put({"id": n % 7, "name": f"{n}"})
        found: list[list[Row]] = []
        while rows := await call(query.batch, query.reader.getDefaultReadLimit()):
            found.append(rows)
        small = [rows for rows in found if rows[0]["name"] != "big"]
        big = [row for rows in found for row in rows if row["name"] == "big"]
        assert len(big) == 500
        assert all(len(rows) <= 10 for rows in small) and len(small) <= 14, [len(rows) for rows in found]
        puts = sorted(int(row["name"]) for rows in found for row in rows if row["name"] != "big")
        assert puts == list(range(100))
        assert read < 20 * 600, "it does not read all that is left at each trigger"
        # Asked for all, it gives all, whatever the option says.
        await table.write_arrow(pa.table({"id": np.arange(50), "name": ["x"] * 50}))
        await table.put({"id": 1, "name": "y"})
        assert len(await call(query.batch, ALL)) == 51


async def test_other_columns_end_the_stream_between_two_batches(
    cluster: LocalCluster, streams: Streams
) -> None:
    """No row is given without its value in a new column. load() again, and it goes on where it was."""
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, HASHED)
        query = await streams.query(cluster, startingSnapshot="latest", cursor="c")
        chosen = await call(shown, cluster)  # named by the user, although they are all there are
        few = await streams.query(cluster, columns=chosen, startingSnapshot="latest")
        await table.put({"id": 1, "name": "old"})
        assert [row["name"] for row in await call(query.batch)] == ["old"]
        await table.put({"id": 2, "name": "between"})
        await table.alter(add=[("size", "int64", True)])
        await table.refresh()
        await table.put({"id": 3, "name": "new", "size": 7})
        with pytest.raises(
            Rejected, match=r"column size was added; .*load\(\) the table again.*same checkpoint"
        ) as caught:
            await call(query.plan)
        assert caught.value.code is Code.SCHEMA_MISMATCH
        again = await streams.query(cluster, at=query.at, cursor="c")
        rows = await call(again.batch)
        assert sorted((row["id"], row["size"], row["_schema"]) for row in rows) == [(2, None, 2), (3, 7, 2)]

        # Who has chosen columns goes on. The rows say by which schema they were read.
        rows = await call(few.batch)
        assert sorted((row["id"], row["_schema"]) for row in rows) == [(1, 2), (2, 2), (3, 2)]
        await table.alter(rename={"name": "title"})
        with pytest.raises(Rejected, match="column name is now called title"):
            await call(few.plan)
        with pytest.raises(Rejected, match="the table has no column 'name'"):
            await streams.query(cluster, columns=chosen)
        await table.alter(drop=["size"])
        with pytest.raises(
            Rejected, match=r"column size was dropped, column name is now called title|is now called"
        ):
            await call(again.plan)


async def test_where_a_stream_starts(cluster: LocalCluster, streams: Streams) -> None:
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, HASHED)
        await table.put({"id": 1, "name": "first"})
        between = client.now()
        await table.put({"id": 2, "name": "second"})
        iso = f"{np.datetime64(physical_us(between), 'us')}Z"
        for start, expected in (
            ("earliest", [1, 2]),
            (str(between), [2]),
            (iso, [2]),
            ("Table", [1, 2]),
            ("latest", []),
        ):
            query = await streams.query(cluster, startingSnapshot=start)
            assert sorted(row["id"] for row in await call(query.batch)) == expected, start
        await table.delete({"id": 2})
        assert [row["_op"] for row in await call(query.batch)] == ["delete"]
        far = from_physical_us(physical_us(client.now()) + 60_000_000)
        with pytest.raises(Rejected, match="in the future") as caught:
            await streams.query(cluster, startingSnapshot=str(far))
        assert caught.value.code is Code.CLOCK_AHEAD
        past = from_physical_us(physical_us(client.now()) - 3_600_000_000)
        with pytest.raises(Rejected, match="too slow, or was stopped too long") as caught:
            await streams.query(cluster, startingSnapshot=str(past), cursor="c")
        assert caught.value.code is Code.CURSOR_LOST


async def test_available_now_ends(cluster: LocalCluster, streams: Streams) -> None:
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, HASHED)
        await fill(client, 10)
        for limit in (ALL, ReadMaxRows(3)):
            query = await streams.query(cluster, startingSnapshot="earliest")
            await call(query.reader.prepareForTriggerAvailableNow)
            await table.put({"id": 99, "name": "later"})
            rows = []
            while more := await call(query.batch, limit):
                rows += more
            assert sorted(row["id"] for row in rows if row["name"] != "later") == list(range(10))
            assert ("later" in [row["name"] for row in rows]) == (limit != ALL), (
                "only that of the turn before"
            )
            assert await call(query.plan, limit) == query.at


async def test_a_range_that_is_added_comes_whole(cluster: LocalCluster, streams: Streams) -> None:
    """Also what is in it before the next batch, by a clock that is late."""
    async with cluster.client() as client:
        ranges = RangePartitioning(("id",), ranges=((0, 100),))
        table = await client.create_table("t", SCHEMA, ranges)
        await table.put({"id": 1, "name": "x"})
        query = await streams.query(cluster, cursor="c")
        assert len(await call(query.batch)) == 1
        await table.alter(add_ranges=[(100, 200)])
        await table.put({"id": 150, "name": "y"})
        late = {**json.loads(query.at), "ts": int(client.now())}
        query.at = json.dumps(late)
        assert [row["id"] for row in await call(query.batch)] == [150]
        assert (await held(table)).tablets_without == 0
        assert await call(query.batch) == []
        await table.alter(drop_ranges=[(0, 100)])
        await table.put({"id": 151, "name": "z"})
        assert [row["id"] for row in await call(query.batch)] == [151]


async def test_another_table_of_the_name_is_not_followed(cluster: LocalCluster, streams: Streams) -> None:
    async with cluster.client() as client:
        await client.create_table("t", SCHEMA, HASHED)
        query = await streams.query(cluster, startingSnapshot="latest")
        await client.delete_table("t")
        await client.create_table("t", SCHEMA, HASHED)
        with pytest.raises(Rejected) as caught:
            await call(query.plan)
        assert caught.value.code is Code.NOT_FOUND
        again = await streams.query(cluster, at=query.at)
        for work in (again.plan, lambda: again.rows(json.dumps({**json.loads(again.at), "ts": 1 << 62}))):
            with pytest.raises(Rejected, match=r"deleted and created again.*new checkpoint") as caught:
                await call(work)
            assert caught.value.code is Code.NOT_FOUND
        recovered = {**json.loads((await streams.query(cluster)).at), "recoveries": -1}
        other = await streams.query(cluster, at=json.dumps(recovered))
        with pytest.raises(Rejected, match="lost its majority and was recovered"):
            await call(other.plan)
        with pytest.raises(Rejected, match=r"a later release|does not know"):
            await call(other.reader.latestOffset, {"ts": 1, "more": 2}, ALL)


async def test_a_leader_that_is_lost_costs_no_more_than_an_election(
    cluster: LocalCluster, streams: Streams
) -> None:
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, HASHED)
        query = await streams.query(cluster, startingSnapshot="latest", cursor="c")
        await fill(client, 40)
        assert len(await call(query.batch)) == 40
        leader = query.reader._driver._table.asynchronous.locations.tablets[0].target().node_id
        await cluster.stop(next(name for name, node_id in cluster.ids.items() if node_id == leader))
        await table.write_arrow(pa.table({"id": range(40), "name": ["new"] * 40}))
        rows = await call(query.batch)
        assert sorted(row["id"] for row in rows) == list(range(40))


def read_alone(reader: StreamReader, tasks: list[Any]) -> list[Row]:
    return [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]


async def test_tasks_read_in_other_processes(cluster: LocalCluster, streams: Streams) -> None:
    async with cluster.client() as client:
        await client.create_table("t", SCHEMA, HASHED)
        await fill(client, 30)
        query = await streams.query(cluster)
        end = await call(query.plan)
        tasks = await call(query.reader.partitions, json.loads(query.at), json.loads(end))
        alone = await call(stream, cluster)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            rows = await asyncio.wrap_future(pool.submit(read_alone, alone, tasks))
        assert sorted(row["id"] for row in rows) == list(range(30))


async def test_what_a_stream_refuses(cluster: LocalCluster, streams: Streams) -> None:
    async with cluster.client() as client:
        await client.create_table("t", SCHEMA, HASHED)
        odd = replace(
            SCHEMA, columns=tuple(replace(c, name=c.name.replace("name", "_ts")) for c in SCHEMA.columns)
        )
        await client.create_table("odd", odd, HASHED)

    def refused(match: str, columns: StructType | None = None, **options: str) -> None:
        with pytest.raises(Rejected, match=match):
            stream(cluster, options.pop("table", "t"), columns=columns, **options)

    def check() -> None:
        source = SteleDataSource({"masters": cluster.master_address, "table": "t"})
        with pytest.raises(Rejected, match=r'"startingSnapshot" is missing: .*table, earliest, latest'):
            source.streamReader(source.schema())
        full = SteleDataSource({"masters": cluster.master_address, "table": "t", "cursor": "c"}).schema()
        with pytest.raises(Rejected, match='"cursor" is an option of a stream, not of a read'):
            SteleDataSource({"masters": cluster.master_address, "table": "t", "cursor": "c"}).reader(full)
        refused(
            "_op is missing; without it a delete looks like a row", StructType([full["id"], full["name"]])
        )
        refused(
            "'id' may be null|'name' may be null",
            StructType([full["id"], full["_op"]]).add("name", "string", False),
        )
        refused("the table has no column 'nope'", StructType([full["_op"]]).add("nope", "string"))
        refused("the table has a column _ts", table="odd")
        refused('"where" is an option of a read, not of a stream', where="id = 1")
        refused('"op" is an option of a write, not of a stream', op="insert")
        refused("\"startingSnapshot\" is 'soon': expected table, earliest, latest", startingSnapshot="soon")
        refused("\"versions\" is 'some': expected every or newest", versions="some")
        refused('"cursor": name of a hold', cursor="no spaces")
        refused('"cursorMaxBytes" needs "cursor"', cursorMaxBytes="5000000")
        for wrong in ("0", "-1", "many", "1.5"):
            refused(
                f'"maxRowsPerTrigger" is {wrong!r}: expected a whole number from 1', maxRowsPerTrigger=wrong
            )
        refused('unknown option "startingsnapshots"; did you mean|unknown option', startingSnapshots="latest")

    await asyncio.to_thread(check)
