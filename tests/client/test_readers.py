"""Scans as other libraries and notebooks take them: DuckDB, Polars, pandas, a for loop, HTML."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars
import pyarrow as pa
import pytest

from stele.client import Client, Table, WriteResult, html
from stele.model.block import RowError
from stele.model.clock import from_datetime, from_physical_us
from stele.model.errors import Code, Rejected
from stele.model.schema import Schema
from tests.client.small import EIGHT, SCHEMA, small_cluster

ROWS = 20_000


@asynccontextmanager
async def blocking(tmp_path: Path) -> AsyncIterator[Callable[[Callable[[Table], Any]], Any]]:
    """Runs what is given with a blocking table of ROWS rows, in a thread."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        await table.write_arrow(
            pa.table(
                {"id": np.arange(ROWS), "name": [f"n{i}" for i in range(ROWS)], "n": np.arange(ROWS) % 7}
            )
        )

        def work(use: Callable[[Table], Any]) -> Any:
            with Client(cluster.master_address) as opened:
                return use(opened.open_table("t"))

        async def run(use: Callable[[Table], Any]) -> Any:
            return await asyncio.to_thread(work, use)

        yield run


async def test_duckdb_reads_a_scan(tmp_path: Path) -> None:
    def use(table: Table) -> None:
        found = table.scan(["id", "n"], "id < 10000")
        with duckdb.connect() as connection:
            connection.register("found", found)
            some = connection.sql("SELECT count(*), sum(n) FROM found WHERE id >= 5000").fetchall()
            assert some == [(5_000, sum(i % 7 for i in range(5_000, 10_000)))]
            again = connection.sql("SELECT count(*) FROM found").fetchall()
            assert again == [(10_000,)]
            connection.unregister("found")

    async with blocking(tmp_path) as run:
        await run(use)


async def test_polars_pandas_and_arrow_read_a_scan(tmp_path: Path) -> None:
    def use(table: Table) -> None:
        scan = table.scan(["id", "name"], "n = 3", ordered=True)
        wanted = [i for i in range(ROWS) if i % 7 == 3]
        frame = polars.DataFrame(scan)
        assert frame["id"].to_list() == wanted and frame["name"][0] == "n3"
        assert pa.table(scan).num_rows == len(wanted)
        assert scan.to_pandas()["id"].tolist() == wanted
        assert pa.RecordBatchReader.from_stream(scan).schema == scan.asynchronous.plan.arrow_schema

    async with blocking(tmp_path) as run:
        await run(use)


async def test_a_scan_is_read_row_by_row(tmp_path: Path) -> None:
    def use(table: Table) -> None:
        scan = table.scan(ordered=True, limit=3)
        assert list(scan) == list(scan) == [{"id": i, "name": f"n{i}", "n": i} for i in range(3)]
        assert next(iter(table.scan(predicates=("id", "=", 70))))["n"] == 0

    async with blocking(tmp_path) as run:
        await run(use)
    async with small_cluster(tmp_path / "other") as (_, client):
        table = await client.create_table("t", SCHEMA)
        await table.put({"id": 1})
        assert [row async for row in table.scan()] == [{"id": 1, "name": None, "n": None}]


async def test_a_scan_that_fails_says_so_to_who_reads_its_stream(tmp_path: Path) -> None:
    def use(table: Table) -> None:
        table._client.delete_table("t")
        with pytest.raises(Exception, match="was deleted"):
            pa.table(table.scan())

    async with blocking(tmp_path) as run:
        await run(use)


async def test_a_snapshot_may_be_a_datetime(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA)
        await table.put({"id": 1})
        between = datetime.now(UTC)
        await table.put({"id": 2})
        later = between + timedelta(seconds=30)
        for given in (
            between,
            between.replace(tzinfo=None),
            between.astimezone(timezone(timedelta(hours=3))),
        ):
            assert table.scan(snapshot=given).plan.snapshot == from_datetime(between)
        assert table.scan(snapshot=later).plan.snapshot > client.now()
        moment = datetime(2024, 5, 1, 12, 0, 0, 1)
        assert from_datetime(moment) == from_physical_us(1_714_564_800_000_001)
        for wrong, told in (
            (date(2024, 5, 1), "or a datetime"),
            (datetime(1969, 1, 1), "before 1970"),
            (pd.Timestamp("2024-01-01T00:00:00.000000001"), "finer than a microsecond"),
            (True, "or a datetime"),
            (
                datetime(9999, 1, 1),
                "the snapshot 9999-01-01 00:00:00 UTC lies in the future: this machine's clock says 20",
            ),
        ):
            with pytest.raises(Rejected, match=told):
                table.scan(snapshot=wrong)


async def test_a_datetime_reads_the_rows_as_they_were(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        await table.put({"id": 1, "name": "old"})
        await table.put({"id": 2, "name": "deleted later"})
        between = datetime.now(UTC)
        await table.put({"id": 1, "name": "new"})
        await table.delete({"id": 2})
        await table.put({"id": 3, "name": "made later"})

        async def names(snapshot: datetime | None) -> dict[int, str]:
            rows = (await table.scan(["id", "name"], snapshot=snapshot).to_table()).to_pydict()
            return dict(zip(rows["id"], rows["name"], strict=True))

        assert await names(None) == {1: "new", 3: "made later"}
        elsewhere = between.astimezone(timezone(timedelta(hours=-7)))
        for given in (between, between.replace(tzinfo=None), elsewhere):
            assert await names(given) == {1: "old", 2: "deleted later"}
            assert await table.scan(snapshot=given).count() == 2
        assert await names(between - timedelta(seconds=30)) == {}


async def test_notebooks_are_shown_text_and_no_markup(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        name = "<script>alert(1)</script>"
        table = await client.create_table(name, SCHEMA, EIGHT)
        shown = table._repr_html_()
        assert "&lt;script&gt;" in shown and "<script>" not in shown
        assert "8 tablets" in shown and "<td>id</td><td>int64</td><td>no</td><td>yes</td>" in shown
        assert "scan of 8 tablets at 20" in table.scan(["id"])._repr_html_()
    errors = [RowError(i, Code.ALREADY_PRESENT, "<b>") for i in range(12)]
    shown = WriteResult("<t>", 5, errors)._repr_html_()
    assert "table &lt;t&gt;: 5 rows written, 12 refused, the first 10 of them" in shown
    assert shown.count("<td>&lt;b&gt;</td>") == 10 and "<b>" not in shown
    assert html.of_result("t", 1, ()) == "<div><p>table t: 1 row written</p></div>"


async def test_what_a_schema_was_made_of_is_written_as_it_stands(tmp_path: Path) -> None:
    kinds = pa.array(["a", "b"]).dictionary_encode()
    data = pa.table(
        {
            "id": pa.array([1, 2], pa.uint8()),
            "kind": kinds,
            "at": pa.array([0, 1_000], pa.timestamp("ns", "Europe/Paris")),
            "day": pa.array([86_400_000, 0], pa.date64()),
            "raw": pa.array([b"ab", b"cd"], pa.binary(2)),
            "text": pa.array(["x", None], pa.large_string()),
            "half": pa.array([0.5, 1.5], pa.float32()),
        }
    )
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", Schema.from_arrow(data, key=["id", "kind"]))
        assert (await table.write_arrow(data)).rows_written == 2
        row = await table.get((1, "a"), ["day", "raw", "text", "half"])
        assert row == {"day": date(1970, 1, 2), "raw": b"ab", "text": "x", "half": 0.5}
