"""`write_arrow` takes frames of pandas and polars, and whatever gives an Arrow stream, as scans are read by them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars
import pyarrow as pa
import pytest

from stele.client import AsyncTable, Client
from stele.client.arrow_input import batches_of
from stele.model.errors import Rejected
from tests.client.small import EIGHT, SCHEMA, small_cluster

ROWS = 20_000
WANTED = [{"id": i, "name": f"n{i}", "n": i % 7} for i in range(ROWS)]


def arrow() -> pa.Table:
    return pa.Table.from_pylist(WANTED)


def of_duckdb() -> Any:
    return duckdb.sql(f"SELECT i AS id, 'n' || i AS name, i % 7 AS n FROM range({ROWS}) AS r(i)")


FRAMES = {
    "pandas": lambda: pd.DataFrame(WANTED),
    "pandas, filtered": lambda: pd.DataFrame([{"id": -1, "name": "x", "n": 0}, *WANTED]).query("id >= 0"),
    "pandas, indexed": lambda: pd.DataFrame(WANTED).set_index("id"),
    "pandas, indexed by one name of two": lambda: pd.DataFrame(WANTED).set_index(
        pd.MultiIndex.from_arrays([range(ROWS), range(ROWS)], names=["id", None])
    )[["name", "n"]],
    "polars": lambda: polars.DataFrame(WANTED),
    "duckdb": of_duckdb,
    "stream": lambda: Stream(arrow()),
}


class Stream:
    """What has an Arrow stream and nothing else."""

    def __init__(self, data: pa.Table | pa.RecordBatchReader) -> None:
        self._data = data

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._data.__arrow_c_stream__(requested_schema)


async def rows_of(table: AsyncTable) -> list[dict[str, Any]]:
    return [row async for row in table.scan(ordered=True)]


@pytest.mark.parametrize("kind", FRAMES)
async def test_a_frame_is_written_as_it_stands(tmp_path: Path, kind: str) -> None:
    async with small_cluster(tmp_path) as (_, client), asyncio.timeout(60):
        table = await client.create_table("t", SCHEMA, EIGHT)
        assert (await table.write_arrow(FRAMES[kind]())).rows_written == ROWS  # type: ignore[no-untyped-call]
        assert await rows_of(table) == WANTED


async def test_the_blocking_client_writes_frames_and_scans(tmp_path: Path) -> None:
    def copy(address: str) -> None:
        with Client([address]) as client:
            old, new = client.create_table("old", SCHEMA, EIGHT), client.create_table("new", SCHEMA, EIGHT)
            assert old.write_arrow(polars.DataFrame(WANTED)).rows_written == ROWS
            assert new.write_arrow(old.scan()).rows_written == ROWS
            assert new.write_arrow(old.scan().to_pandas(), "delete").rows_written == ROWS
            client.delete_table("old")
            with pytest.raises(Rejected, match="was deleted"):  # as the scan says it, not as a C stream does
                new.write_arrow(old.scan())

    async with small_cluster(tmp_path) as (cluster, _), asyncio.timeout(60):
        await asyncio.to_thread(copy, cluster.master_address)


async def test_what_is_no_frame_of_rows_is_refused(tmp_path: Path) -> None:
    mixed = pd.DataFrame({"id": [1, 2], "name": ["a", 5]})
    twice = pd.DataFrame([[1, 2]], columns=["id", "id"])
    async with small_cluster(tmp_path) as (_, client), asyncio.timeout(60):
        table = await client.create_table("t", SCHEMA, EIGHT)
        for data, told in (
            (mixed, "write_arrow: the DataFrame is not Arrow data: .*column name"),
            (twice, "write_arrow: the DataFrame is not Arrow data: Duplicate column names"),
            (pd.DataFrame({"id": [1], "colour": ["red"]}), "unknown column 'colour'"),
            (polars.Series([1, 2]), "Series is not Arrow data"),
            (pd.Series([1, 2]), "Series is not Arrow data|int is not Arrow data"),
            ({"id": [1]}, r"pass pyarrow.Table.from_pylist\(\[row, ...\]\)"),
            ([{"id": 1}], r"pass pyarrow.Table.from_pylist\(\[row, ...\]\)"),
            ("rows.parquet", "str is not Arrow data; expected a pyarrow Table, a DataFrame"),
        ):
            with pytest.raises(Rejected, match=told):
                await table.write_arrow(data)  # type: ignore[arg-type]
        assert await table.scan().count() == 0


def test_pandas_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pandas")
    assert sum(batch.num_rows for batch in batches_of(arrow())) == ROWS
    assert sum(batch.num_rows for batch in batches_of(polars.DataFrame({"id": np.arange(5)}))) == 5
    assert "pandas" not in sys.modules


async def test_a_stream_that_takes_long_leaves_the_loop_alone(tmp_path: Path) -> None:
    """A batch of another library is made by its own code, which knows of no event loop."""
    turns, begun = 0, asyncio.Event()

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1
            begun.set()

    def slow() -> Iterator[pa.RecordBatch]:
        for batch in arrow().to_batches():
            before = turns
            while turns < before + 3:  # endless where the loop waits for this
                pass
            yield batch

    async with small_cluster(tmp_path) as (_, client), asyncio.timeout(60):
        table = await client.create_table("t", SCHEMA, EIGHT)
        counting = asyncio.create_task(count())
        await begun.wait()
        reader = pa.RecordBatchReader.from_batches(arrow().schema, slow())
        assert (await table.write_arrow(Stream(reader))).rows_written == ROWS
        counting.cancel()
