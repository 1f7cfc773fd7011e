"""Rows that are refused: each by itself, by its place, its key and its reason, and the others are written."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stele.client import Client, RowErrors
from stele.model.block import RowOp
from stele.model.errors import Code, Rejected, SteleError
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from stele.rpc.channels import MESSAGE_BYTES_MAX
from tests.client.small import EIGHT, ONE, SCHEMA, one_tablet, small_cluster


async def test_columns_that_change_within_a_write_are_told_with_the_table(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("readings", SCHEMA, ONE)
        batches = [pa.record_batch({"id": [1], "n": [1]}), pa.record_batch({"id": [2]})]
        with pytest.raises(Rejected, match=r"table readings: .*id, n.*then id"):
            await table.write_arrow(batches)


async def test_a_row_that_is_no_mapping_is_told_and_harms_no_other(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, ONE)
        with pytest.raises((TypeError, SteleError)):
            await table.put(5)  # type: ignore[arg-type]
        await table.put({"id": 1})


class _Unreadable(dict[str, object]):
    """Whose names cannot be read, as of rows whose source was closed."""

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("unreadable")

    def get(self, *_: object) -> object:
        raise RuntimeError("unreadable")


async def test_a_row_that_cannot_be_read_harms_no_other(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        await table.put({"id": 1})
        for n, write in enumerate((table.put, table.update, table.delete)):
            writes = asyncio.gather(
                table.put({"id": 2, "n": n}),
                write(_Unreadable(id=3, n=n)),
                table.update({"id": 1, "n": n}),
                return_exceptions=True,
            )
            good, bad, also_good = await asyncio.wait_for(writes, 5)
            assert isinstance(bad, RuntimeError)
            assert (type(good), type(also_good)) == (int, int)
            assert [await table.get(i) for i in (1, 2)] == [{"id": i, "name": None, "n": n} for i in (1, 2)]


_MANY_DIGITS = 10**5_000
"""An int that Python writes as text for nobody who does not ask for it."""


@pytest.mark.parametrize("bad", [{"id": 3, "n": _MANY_DIGITS}, {"id": _MANY_DIGITS, "n": 1}])
async def test_a_value_that_has_no_text_costs_its_own_row(tmp_path: Path, bad: dict[str, int]) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, ONE)
        results = await asyncio.gather(
            *(table.put(row) for row in ({"id": 1}, bad, {"id": 2})), return_exceptions=True
        )
        assert [type(result) for result in results] == [int, Rejected, int]
        assert isinstance(results[1], Rejected) and "(it is out of range)" in results[1].args[0]
        with pytest.raises(RowErrors) as caught:
            async with table.new_session() as session:
                for row in ({"id": 4}, bad, {"id": 5}):
                    await session.upsert(row)
        assert [(e.row, e.code) for e in caught.value.errors] == [(1, Code.INVALID_ARGUMENT)]
        assert await table.scan().count() == 4
        with pytest.raises(Rejected):
            await table.get({"id": _MANY_DIGITS})
        with pytest.raises(Rejected):
            await table.get([1, _MANY_DIGITS])


class _Unbound(Decimal):
    """A number that cannot be asked what it is."""

    def is_finite(self) -> bool:
        raise RuntimeError("unbound")


async def test_a_row_that_a_session_cannot_read_harms_no_other(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, ONE)
        with pytest.raises(RowErrors) as caught:
            async with table.new_session() as session:
                for n in range(5):
                    await session.upsert({"id": n, "n": _Unbound() if n == 3 else n})
                await session.upsert({"id": 5, _MANY_DIGITS: 5})
                await session.upsert({"id": _Unbound()})
                await session.update({"id": 0, "n": 7})
        told = [(e.row, e.code, e.message.rpartition(": ")[2]) for e in caught.value.errors]
        assert told == [
            (3, Code.INTERNAL, "RuntimeError('unbound')"),
            (5, Code.INVALID_ARGUMENT, "column <int> is unknown; expected id, name, n"),
            (6, Code.INTERNAL, "RuntimeError('unbound')"),
        ]
        found = (await table.scan(["id", "n"], ordered=True).to_table()).to_pylist()
        assert found == [{"id": n, "n": n or 7} for n in (0, 1, 2, 4)]


async def test_rows_fail_for_reasons_of_their_own(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        results = await asyncio.gather(
            table.put({"id": 1}),
            table.put({"id": "one"}),
            table.put({"id": None}),
            table.put({"id": 2, "colour": "red"}),
            table.update({"id": 3, "n": 1}),
            table.delete({"id": 4}),
            return_exceptions=True,
        )
        codes = [r.code if isinstance(r, SteleError) else None for r in results]
        assert codes == [None, *[Code.INVALID_ARGUMENT] * 3, Code.NOT_FOUND, Code.NOT_FOUND]
        assert [r.args[0] for r in results if isinstance(r, SteleError)] == [
            "table t: id='one': column id: 'one' is not an int64 (it is of type str; expected an int)",
            "table t: column id is null; expected an int64",
            "table t: id=2: column colour is unknown; expected id, name, n",
            "table t: id=3: the key is absent",
            "table t: id=4: the key is absent",
        ]


async def test_a_refused_row_is_named_by_its_table_and_key(tmp_path: Path) -> None:
    schema = Schema.make([("at", "timestamp"), ("b", "string"), ("n", "int32", True)], ["at", "b"])
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("two", schema)
        row = {"at": datetime(2013, 1, 1, 5, tzinfo=UTC), "b": "x", "n": 1}
        key = "at=2013-01-01 05:00:00+00:00, b='x'"
        await table.put(row)
        with pytest.raises(Rejected, match="ALREADY_PRESENT") as caught:
            await table.insert(row)
        assert caught.value.args[0] == f"table two: {key}: the key is present; use upsert to overwrite it"
        with pytest.raises(RowErrors, match="ALREADY_PRESENT") as caught:
            await table.write_arrow(pa.Table.from_pylist([row], schema=table.arrow_schema), "insert")
        told = f"table two: 1 of 1 row was refused: row 0: ALREADY_PRESENT {key}: the key"
        assert caught.value.args[0].startswith(told)
        with pytest.raises(RowErrors) as caught:
            async with table.new_session(flush_interval_s=0) as session:
                await session.insert({**row, "b": "y"})
                await session.update({**row, "b": "z"})
                await session.insert({"at": 5.5})
        assert [(e.row, e.message.partition(": ")[0]) for e in caught.value.errors] == [
            (1, "at=2013-01-01 05:00:00+00:00, b='z'"),
            (2, "column at"),
        ]


async def test_row_errors_of_arrow_data_point_into_the_input(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        await table.put({"id": 70_001})
        ids = [None if i == 5 else i for i in range(80_000)]
        with pytest.raises(RowErrors) as caught:
            await table.write_arrow(pa.table({"id": pa.array(ids, pa.int32())}), "insert")
        assert [(e.row, e.code) for e in caught.value.errors] == [
            (5, Code.INVALID_ARGUMENT),
            (70_001, Code.ALREADY_PRESENT),
        ]
        codes = [e.code for e in caught.value.errors]
        assert f"{codes[0]} {codes[1]!s} %s" % codes[0] == "INVALID_ARGUMENT ALREADY_PRESENT INVALID_ARGUMENT"
        assert caught.value.result.rows_written == 79_998
        assert await table.scan().count() == 79_999


@pytest.mark.parametrize("kind", ["table", "reader", "batches", "blocking"])
async def test_a_value_that_does_not_cast_costs_its_own_row(tmp_path: Path, kind: str) -> None:
    """It ended the write when part of it was done, as what is refused before anything is done, and was not named."""
    rows = 200_000
    n = np.arange(rows, dtype=np.float64)
    n[[70_000, rows - 1]] = 1.5, np.inf
    data = pa.table({"id": np.arange(rows), "n": n})
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        with pytest.raises(RowErrors) as caught:
            if kind == "blocking":
                await asyncio.to_thread(_write_blocking, cluster.master_address, data)
            else:
                given = {
                    "table": data,
                    "reader": data.to_reader(50_000),
                    "batches": iter(data.to_batches(50_000)),
                }
                await table.write_arrow(given[kind])
        assert [(e.row, e.code, e.message) for e in caught.value.errors] == [
            (
                70_000,
                Code.INVALID_ARGUMENT,
                "id=70000: column n: 1.5 is not an int32 (it is not a whole number)",
            ),
            (
                rows - 1,
                Code.INVALID_ARGUMENT,
                f"id={rows - 1}: column n: inf is not an int32 (it is not a whole number)",
            ),
        ]
        assert caught.value.result.rows_written == await table.scan().count() == rows - 2
        with pytest.raises(RowErrors) as by_row:
            async with table.new_session() as session:
                await session.upsert({"id": 70_000, "n": 1.5})
        assert by_row.value.errors[0].message == caught.value.errors[0].message
        result = await table.write_arrow(data.slice(69_999, 2), raise_row_errors=False)
        assert (result.rows_written, [e.row for e in result.row_errors]) == (1, [1])


def _write_blocking(master: str, data: pa.Table) -> None:
    with Client([master]) as client:
        client.open_table("t").write_arrow(data)


async def test_text_of_which_nothing_fits_costs_its_rows_alone_once_a_write_has_begun(tmp_path: Path) -> None:
    """Before that it is of another kind, and nothing is written."""
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        batches = [pa.record_batch({"id": [row], "n": [text]}) for row, text in enumerate(("1", "x"))]
        result = await table.write_arrow(iter(batches), raise_row_errors=False)
        assert (result.rows_written, [error.row for error in result.row_errors]) == (1, [1])
        with pytest.raises(Rejected, match="string does not fit int32"):
            await table.write_arrow(iter(batches[1:]))


async def test_all_faults_of_a_row_are_told_together(tmp_path: Path) -> None:
    schema = Schema.make([("id", "int64"), ("a", "int32"), ("b", "int32"), ("c", "int32")], ["id"])
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", schema, ONE)
        rows = pa.table({"id": [1, 2, 1.5], "a": [1, 1.5, 1], "b": [1, None, 1], "c": [1, 2.5, 1.0]})
        result = await table.write_arrow(rows, raise_row_errors=False)
        assert [(e.row, e.message) for e in result.row_errors] == [
            (
                1,
                "id=2: column a: 1.5 is not an int32 (it is not a whole number); column c: 2.5 is not an int32 (it is not a whole number); "
                "column b is null; expected an int32",
            ),
            (2, "column id: 1.5 is not an int64 (it is not a whole number)"),
        ]
        assert await table.scan().count() == 1


async def test_types_that_do_not_fit_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    good = pa.record_batch({"id": list(range(20_000)), "n": [1] * 20_000})
    words = pa.record_batch({"id": [1, 2], "n": ["one", "two"]})
    dates = pa.record_batch({"id": [1], "n": pa.array([datetime(2024, 5, 1)])})
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        with pytest.raises(Rejected, match=r"column n: string does not fit int32 .*'one' is not an int32"):
            await table.write_arrow(words)
        for last in (dates, pa.record_batch({"id": [1]}), pa.record_batch({"id": [1], "m": [1]}), {"id": 1}):
            with pytest.raises(Rejected):
                await table.write_arrow([good, last])  # type: ignore[list-item]
        assert await table.scan().count() == 0


def as_text(values: list[bytes | None]) -> pa.Array:
    """An array that says it is of strings, whatever stands in it: as files, other programs and a cast in Spark leave them."""
    return pa.array(values, pa.binary()).view(pa.string())


@pytest.mark.parametrize("key", ["id", "s"])
async def test_a_string_that_is_not_utf8_is_refused_by_its_row(tmp_path: Path, key: str) -> None:
    """Its neighbours are written; it is told by its position, its key and its column, as a null is."""
    schema = Schema.make([("id", "int64", key != "id"), ("s", "string", key != "s"), ("n", "int64")], [key])
    text: list[bytes | None] = [b"row %d" % n for n in range(100)]
    text[50], text[60], text[70] = b"\xffA", b"\xffB", None
    n = [None if row == 60 else row for row in range(100)]
    async with small_cluster(tmp_path) as (_, client):
        eight = PartitionSchema((HashPartition((["id", "s"].index(key),), 8),))
        table = await client.create_table("t", schema, eight)
        rows = pa.record_batch({"id": list(range(100)), "s": as_text(text), "n": n})
        result = await table.write_arrow(rows, raise_row_errors=False)
        refused = {error.row: error.message for error in result.row_errors}
        assert {error.code for error in result.row_errors} == {Code.INVALID_ARGUMENT}
        places = {"id": ("id=50", "id=60"), "s": (r"s=b'\xffA'", r"s=b'\xffB'")}[key]
        assert refused.pop(50) == rf"{places[0]}: column s: b'\xffA' is not UTF-8"
        assert refused.pop(60) == (
            rf"{places[1]}: column s: b'\xffB' is not UTF-8; column n is null; expected an int64"
        )
        assert list(refused) == ([] if key == "id" else [70])  # a key is never null
        assert result.rows_written == 98 - len(refused) == await table.scan().count()


async def test_columns_that_do_not_fit_are_all_named(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        data = pa.table({"colour": ["red"], "n": ["many"]})
        with pytest.raises(Rejected, match=r"^INVALID_ARGUMENT: table t: .*colour.*id is missing.*column n"):
            await table.write_arrow(data)


async def test_rows_behind_one_that_cannot_be_sent_keep_their_places(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, ONE)
        await table.put({"id": 3})
        rows = pa.table({"id": pa.array([None, 2, 3, None, 3], pa.int64())})
        result = await table.write_arrow(rows, "insert", raise_row_errors=False)
        invalid, there = Code.INVALID_ARGUMENT, Code.ALREADY_PRESENT
        assert [(e.row, e.code) for e in result.row_errors] == [
            (0, invalid),
            (2, there),
            (3, invalid),
            (4, there),
        ]
        assert result.rows_written == 1


async def test_an_update_of_arrow_data_leaves_out_columns_that_an_insert_needs(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        schema = Schema.make([("id", "int64"), ("a", "int64"), ("b", "int64")], ["id"])
        table = await client.create_table("t", schema, ONE)
        await table.put({"id": 1, "a": 2, "b": 3})
        await table.write_arrow(pa.table({"id": [1], "b": [4]}), "update")
        assert await table.get(1) == {"id": 1, "a": 2, "b": 4}
        for op in ("insert", "upsert"):
            with pytest.raises(Rejected, match="column a is missing"):
                await table.write_arrow(pa.table({"id": [1], "b": [4]}), op)


class Gone(dict[str, Any]):
    """As a row of a database whose session has ended."""

    def __iter__(self) -> Iterator[str]:
        raise LookupError("the session has ended")


async def test_a_row_that_cannot_be_looked_at_fails_alone(tmp_path: Path) -> None:
    async with one_tablet(tmp_path) as (_, table, _), asyncio.timeout(60):
        await table.put({"id": 1})
        rows = [table._rows.put(RowOp.UPDATE, row) for row in (Gone(id=1, n=1), {"id": 1, "n": 2})]
        ends = await asyncio.gather(*rows, return_exceptions=True)
        assert isinstance(ends[0], LookupError) and isinstance(ends[1], int)


async def test_a_row_that_is_too_large_is_told_by_its_table_and_key(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, ONE)
        large = {"id": 2, "name": "x" * (MESSAGE_BYTES_MAX + 1)}
        results = await asyncio.gather(
            *(table.put(row) for row in ({"id": 1}, large, {"id": 3})), return_exceptions=True
        )
        assert [type(result) for result in results] == [int, Rejected, int]
        assert isinstance(results[1], Rejected) and results[1].code is Code.TOO_LARGE
        assert re.match("table t: id=2: the write has [0-9]+ bytes; at most [0-9]+", results[1].args[0])
