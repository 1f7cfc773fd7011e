"""Schemas of Arrow data and of frames."""

from __future__ import annotations

from datetime import date
from typing import Any

import pandas as pd
import polars
import pyarrow as pa
import pytest

from stele.model.errors import Rejected
from stele.model.schema import Schema

ARROW = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field("day", pa.date32(), nullable=False),
        pa.field("name", pa.large_string()),
        pa.field("kind", pa.dictionary(pa.int32(), pa.string())),
        pa.field("small", pa.uint8(), nullable=False),
        pa.field("at", pa.timestamp("ns", "Europe/Paris")),
        pa.field("price", pa.decimal128(10, 2)),
        pa.field("raw", pa.binary(16)),
        pa.field("long", pa.date64()),
    ]
)
WANTED = [
    ("id", "int64", False),
    ("day", "date", False),
    ("name", "string", True),
    ("kind", "string", True),
    ("small", "int16", False),
    ("at", "timestamp", True),
    ("price", "decimal(10,2)", True),
    ("raw", "binary", True),
    ("long", "date", True),
]


def columns(schema: Schema) -> list[tuple[str, str, bool]]:
    return [(c.name, c.type, c.nullable) for c in schema.columns]


@pytest.mark.parametrize("data", [ARROW, ARROW.empty_table(), pa.RecordBatchReader.from_batches(ARROW, [])])
def test_arrow_data_gives_its_columns(data: Any) -> None:
    schema = Schema.from_arrow(data, key=["id", "day"])
    assert columns(schema) == WANTED and [c.name for c in schema.key_columns] == ["id", "day"]
    assert columns(Schema.from_arrow(data, "id"))[0] == ("id", "int64", False)


def test_frames_give_their_columns() -> None:
    frame = {"id": [1, 2], "name": ["a", None], "day": [date(2024, 1, 1)] * 2, "x": [1.5, None]}
    wanted = [("id", "int64", False), ("name", "string", True), ("day", "date", True), ("x", "double", True)]
    assert columns(Schema.from_arrow(pd.DataFrame(frame), ["id"])) == wanted
    assert columns(Schema.from_arrow(polars.DataFrame(frame), ["id"])) == wanted


def test_types_that_no_column_has_are_told_by_their_columns() -> None:
    bad = pa.schema(
        [("id", pa.int64()), ("u", pa.uint64()), ("list", pa.list_(pa.int8())), ("nothing", pa.null())]
    )
    with pytest.raises(Rejected) as told:
        Schema.from_arrow(bad, key=["id"])
    assert all(
        f"column {name}: no column type holds the Arrow type {bad.field(name).type}" in str(told.value)
        for name in ("u", "list", "nothing")
    )
    with pytest.raises(Rejected, match="did you mean 'day'"):
        Schema.from_arrow(ARROW, key=["dayy"])
    with pytest.raises(Rejected, match="column x: a double cannot be a key column"):
        Schema.from_arrow(pa.schema([("x", pa.float64())]), key=["x"])
    for wrong in (3, None, [("id", "int64")], "id"):
        with pytest.raises(Rejected, match=r"expected a pyarrow\.Schema"):
            Schema.from_arrow(wrong, key=["id"])
