"""Rows that are written without Arrow: the same tablets and the same bytes as with it, and nothing taken that may be at fault."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stele.model import keys
from stele.model.block import INSERTS, RowOp, encode_block
from stele.model.partition import HashPartition, PartitionSchema, RangePartition, assign, assign_few
from stele.model.plain import plain_rows
from stele.model.rows import batch_from_rows
from stele.model.schema import Schema

SCHEMA = Schema.make(
    [("k", "int64"), ("s", "string"), ("a", "int8"), ("b", "int16"), ("c", "int32", True), ("d", "double")],
    ["k", "s", "a", "b"],
    version=3,
)
PARTITIONING = PartitionSchema(
    (
        *(HashPartition((column,), 2 + column, column) for column in range(4)),
        HashPartition((1, 3, 0, 1), 5, 9),
    ),
    RangePartition((1, 2), tuple(sorted(keys.encode_values([(0, ("", "a", "b")), (1, (0, -1, 7))])))),
)
ROW = {"k": 1, "s": "x", "a": 2, "b": 3, "c": 4, "d": 0.5}


def _ints(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "d": st.floats(),
            "s": st.text(st.characters(codec="utf-8"), max_size=20),
            **{name: _ints(bits) for name, bits in (("k", 64), ("a", 8), ("b", 16), ("c", 32))},
        }
    ),
    min_size=1,
    max_size=64,
)


@given(ROWS, st.sampled_from(INSERTS))
def test_plain_rows_go_where_arrow_has_them_go_and_as_the_same_bytes(
    rows: list[dict[str, Any]], op: RowOp
) -> None:
    plain = plain_rows(SCHEMA)
    assert plain is not None
    found = plain.values(rows)
    assert found is not None
    values, columns = found
    batch, column_ids, _, errors = batch_from_rows(rows, SCHEMA, op)
    assert not errors
    wanted = encode_block(op, column_ids, batch, SCHEMA.version)
    assert plain.encode(op, values) == wanted
    assert encode_block(op, column_ids, plain.batch(values), SCHEMA.version) == wanted
    assert assign_few(columns, SCHEMA, PARTITIONING) == assign(batch, SCHEMA, PARTITIONING).tolist()


class _Kind(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    "other",
    [
        {"k": None},
        {"k": True},
        {"k": np.int64(1)},
        {"k": _Kind.ONE},
        {"k": 2**63},
        {"a": -129},
        {"c": None},
        {"d": 1},
        {"s": "\ud800"},
        {"s": b"x"},
        {"s": "x" * (1 << 20)},
        {"e": 1},
    ],
    ids=str,
)
def test_whatever_may_be_at_fault_is_left_to_those_who_tell_why(other: dict[str, Any]) -> None:
    plain = plain_rows(SCHEMA)
    assert plain is not None
    assert plain.values([ROW, ROW]) is not None
    assert plain.values([ROW, {**ROW, **other}]) is None


def test_what_is_no_dict_of_all_columns_is_not_plain() -> None:
    class Row(dict[str, Any]):
        pass

    plain = plain_rows(SCHEMA)
    assert plain is not None
    lacking = {name: value for name, value in ROW.items() if name != "c"}
    for row in (Row(ROW), lacking, {**lacking, "e": 1}):
        assert plain.values([ROW, row]) is None


def test_types_that_are_left_to_arrow() -> None:
    assert plain_rows(Schema.make([("k", "int64"), ("at", "date")], ["k"])) is None
    assert plain_rows(Schema.make([("k", "int64")], ["k"])) is None
