"""Rows to batches: all that is wrong with a row, and nothing of its neighbours."""

from __future__ import annotations

import io
from datetime import UTC, date, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from stele.cli import scan
from stele.model.block import Block, RowOp
from stele.model.errors import Rejected
from stele.model.rows import batch_from_rows, check_row, null_faults, python_rows, row_faults
from stele.model.schema import Schema

SCHEMA = Schema.make(
    [("id", "int64"), ("name", "string"), ("n", "int32"), ("note", "string", True)],
    ["id"],
)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"id": 1, "name": "x"}, "column n is missing and has no default; expected an int32"),
        ({"id": 1}, "columns name, n are missing and have no default; expected a string, an int32"),
        (
            {"id": None, "name": None, "n": 1},
            "columns id, name are null; expected an int64, a string",
        ),
        (
            {"id": 1.5, "colour": 1, "size": 2, "n": None},
            "columns colour, size are unknown; expected id, name, n, note; "
            "column id: 1.5 is not an int64 (it is not a whole number); column n is null; expected an int32; "
            "column name is missing and has no default; expected a string",
        ),
    ],
)
def test_all_faults_of_a_row_are_told_and_its_neighbours_go_on(row: dict[str, object], why: str) -> None:
    good = {"id": 7, "name": "good", "n": 1}
    batch, _, kept, errors = batch_from_rows([good, row, good], SCHEMA, RowOp.UPSERT)
    assert [(error.row, error.message) for error in errors] == [(1, why)]
    assert kept.tolist() == [0, 2] and batch["id"].to_pylist() == [7, 7]


def test_a_block_tells_all_faults_of_a_row_too() -> None:
    ids = pa.array([1, None], pa.int64())
    batch = pa.record_batch([ids], schema=SCHEMA.to_arrow([0]))
    errors = null_faults(Block(1, (0,), batch, RowOp.INSERT, None), SCHEMA)
    lacking = "columns name, n are missing and have no default; expected a string, an int32"
    assert [e.message for e in errors] == [lacking, f"column id is null; expected an int64; {lacking}"]


def test_a_decimal_of_too_many_digits_is_refused_by_its_row() -> None:
    """A node refuses a block with one as a whole."""
    schema = Schema.make([("id", "int64"), ("price", "decimal(4,2)")], ["id"])
    prices = pa.array([Decimal("1.25"), Decimal("12345.00"), Decimal("99.99")], pa.decimal128(12, 2))
    narrow = pa.Array.from_buffers(pa.decimal128(4, 2), 3, prices.buffers())
    batch = pa.record_batch([pa.array([1, 2, 3]), narrow], schema=schema.to_arrow())
    (error,) = row_faults(Block(1, (0, 1), batch, RowOp.UPSERT, None), schema)
    told = "column price: Decimal('12345.00') is not a decimal(4,2) (it has too many digits)"
    assert (error.row, error.message) == (1, told)


def test_an_array_that_is_broken_as_a_whole_is_not_read() -> None:
    schema = Schema.make([("s", "string")], ["s"])
    offsets = pa.py_buffer(np.array([0, 1, 1_000_000, 2], np.int32))
    broken = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"ab")])
    batch = pa.record_batch([broken], schema=schema.to_arrow())
    with pytest.raises(Rejected, match="column s: the Arrow array is invalid: "):
        row_faults(Block(1, (0,), batch, RowOp.UPSERT, None), schema)


@pytest.mark.parametrize("row", [[1, 2], 5, None, "id", ("id", 1), {"id"}])
def test_what_is_no_mapping_is_no_row(row: object) -> None:
    with pytest.raises(Rejected, match=r"row .*: expected a mapping of column names to values.*, got "):
        check_row(row)
    check_row({"id": 1})


def test_what_python_has_no_value_for_is_its_number() -> None:
    at, day = 253_402_329_599_000_000, 2**31 - 1
    batch = pa.record_batch(
        {
            "at": pa.array([at, None, 0], pa.timestamp("us", tz="UTC")),
            "day": pa.array([day, -day, 0], pa.date32()),
            "s": ["x", None, ""],
        }
    )
    assert python_rows(batch) == [
        {"at": at, "day": day, "s": "x"},
        {"at": None, "day": -day, "s": None},
        {"at": datetime(1970, 1, 1, tzinfo=UTC), "day": date(1970, 1, 1), "s": ""},
    ]
    assert python_rows(batch.slice(2)) == batch.slice(2).to_pylist()


@pytest.mark.parametrize("form", ["json", "csv"])
def test_the_command_line_prints_it(form: str) -> None:
    batch = pa.record_batch({"at": pa.array([253_402_329_599_000_000], pa.timestamp("us", tz="UTC"))})
    sink = io.BytesIO()
    writer = scan._writer(form, sink, batch.schema)
    writer(batch)
    writer(None)
    assert sink.getvalue().splitlines()[-1] in (
        b'{"at": 253402329599000000}',
        b'"+253402329599000000"',
    )
