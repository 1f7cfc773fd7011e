"""What Arrow data becomes in columns of other types: the same, or refused."""

from __future__ import annotations

import random
import re
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from stele.client.arrow_input import fit
from stele.model.block import RowOp
from stele.model.errors import Rejected
from stele.model.schema import Schema

NEW_YORK = pa.timestamp("us", "America/New_York")


class _Unfit(Exception):
    """Why values do not fit, by row."""

    def __init__(self, by_row: dict[int, str]) -> None:
        super().__init__(by_row)
        self.by_row = by_row


def _fitted(array: pa.Array, type_: str) -> list[Any]:
    schema = Schema.make([("k", "int64"), ("c", type_, True)], ["k"])
    rows = pa.record_batch([pa.array(range(len(array)), pa.int64()), array], names=["k", "c"])
    batch, ids, outdated = fit(rows, "t", schema, RowOp.UPSERT)
    assert ids == (0, 1)
    if outdated:
        assert list(outdated) == [1] and all(batch.column(1)[row].as_py() is None for row in outdated[1])
        raise _Unfit(outdated[1])
    found: list[Any] = batch.column(1).to_pylist()
    return found


@pytest.mark.parametrize(
    ("array", "type_", "why"),
    [
        (pa.array([None, 1e300]), "float", "1e\\+300 is not a float .it is too large"),
        (pa.array(["1", "1e39"]), "float", "'1e39' is not a float"),
        (pa.array(["1", "1e999"]), "double", "'1e999' is not a double"),
        (pa.array([1.25, 1.005]), "decimal(5,2)", "1.005 is not a decimal"),
        (
            pa.array([datetime(2024, 5, 1), datetime(2024, 5, 1, 1)]),
            "date",
            "1, 1, 0\\) is not a date .it has a time of day",
        ),
        (pa.array([datetime(2024, 5, 1)], NEW_YORK), "date", "is not a date"),
        (pa.array([-(2**62)], pa.timestamp("us")), "date", "is not a date"),
        (pa.array([datetime(2024, 5, 1, 1)]).dictionary_encode(), "date", "is not a date"),
        (pa.array([1], pa.timestamp("ns")), "timestamp", "is not a timestamp"),
        (pa.array([5, 1000]), "decimal(5,2)", "1000 is not a decimal"),
        (pa.array([2**63 - 1]), "decimal(38,20)", "is not a decimal"),
        (pa.array([1], pa.uint8()), "decimal(2,2)", "1 is not a decimal"),
        (pa.array([2, 1.5]), "int32", r"1.5 is not an int32 \(it is not a whole number\)$"),
        (pa.array([2, 1 << 40]), "int32", r"1099511627776 is not an int32 \(it is out of range\)$"),
        (pa.array([2.0, float("nan")]), "int64", "nan is not an int64"),
        (pa.array([None, "2", "two"]), "int32", "'two' is not an int32"),
        (pa.array([b"2", b"\xff"]).view(pa.string()), "int32", r"b'\\xff' is not an int32"),
        (
            pa.array([b"2", b"\xff"]).view(pa.string()).dictionary_encode(),
            "int32",
            r"b'\\xff' is not an int32",
        ),
    ],
)
def test_a_value_that_a_cast_would_change_is_refused(array: pa.Array, type_: str, why: str) -> None:
    with pytest.raises(_Unfit) as caught:
        _fitted(array, type_)
    ((row, text),) = caught.value.by_row.items()
    assert re.match(rf"column c: .*{why}", text), text
    assert row == len(array) - 1


@pytest.mark.parametrize(
    ("array", "type_", "why"),
    [
        (pa.array([5, 0]), "bool", "a number is not a bool"),
        (pa.array([0.5]), "bool", "a number is not a bool"),
        (pa.array([Decimal("1")]), "bool", "a number is not a bool"),
        (pa.array([1]), "date", "int64 does not fit date"),
        (pa.array([True]), "timestamp", "bool does not fit timestamp"),
        (pa.array(["one", None, "two"]), "int32", "string does not fit int32 .*'one' is not an int32"),
        (pa.array(["one", "two"]).dictionary_encode(), "int32", "column c: 'one' is not an int32"),
    ],
)
def test_a_type_that_is_never_made_from_another_is_refused_as_a_whole(
    array: pa.Array, type_: str, why: str
) -> None:
    with pytest.raises(Rejected, match=rf"column c: .* does not fit .*{why}|column c: {why}"):
        _fitted(array, type_)


@pytest.mark.parametrize(
    ("array", "type_", "found"),
    [
        (pa.array([None, datetime(2024, 5, 1)]), "date", [None, date(2024, 5, 1)]),
        (pa.array([datetime(2024, 5, 1, 4)], NEW_YORK), "date", [date(2024, 5, 1)]),
        (pa.array([None, 0.25, float("inf")]), "float", [None, 0.25, float("inf")]),
        (pa.array(["inf", "-Infinity", "2"]), "float", [float("inf"), float("-inf"), 2.0]),
        (pa.array([None, 0.57, -1e-2]), "decimal(5,2)", [None, Decimal("0.57"), Decimal("-0.01")]),
        (pa.array([0.1], pa.float32()), "decimal(5,2)", [Decimal("0.10")]),
        (pa.array([5, None, -999]), "decimal(5,2)", [Decimal("5.00"), None, Decimal("-999.00")]),
        (pa.array([5]), "decimal(38,20)", [Decimal(5)]),
        (pa.array([-(2**63), 2**63 - 1]), "decimal(19,0)", [Decimal(-(2**63)), Decimal(2**63 - 1)]),
        (pa.array([2**64 - 1], pa.uint64()), "decimal(20,0)", [Decimal(2**64 - 1)]),
        (pa.array([7], pa.int8()), "decimal(1,0)", [Decimal(7)]),
        (pa.array([5, 5]).dictionary_encode(), "decimal(5,2)", [Decimal("5.00"), Decimal("5.00")]),
        (pa.array(["a", None]).dictionary_encode(), "string", ["a", None]),
        (pa.array([], pa.timestamp("us")), "date", []),
    ],
)
def test_a_cast_that_loses_nothing_is_made(array: pa.Array, type_: str, found: list[Any]) -> None:
    assert _fitted(array, type_) == found


def test_decimals_are_made_of_numbers_with_no_more_digits() -> None:
    """From a decimal Arrow does not make the nearest number, so a plain cast back does not tell."""
    rng = random.Random(7)
    for digits in (1, 2, 5, 9):
        numbers = [round(rng.uniform(-1000, 1000), digits) for _ in range(2_000)]
        assert _fitted(pa.array(numbers), f"decimal(20,{digits})") == [
            Decimal(repr(number)).quantize(Decimal(1).scaleb(-digits)) for number in numbers
        ]


def test_an_unknown_column_is_named_in_quotes_and_an_index_of_pandas_with_its_remedy() -> None:
    schema = Schema.make([("k", "int64")], ["k"])
    rows = pa.record_batch([pa.array([1])] * 3, names=["k", "", "__index_level_0__"])
    with pytest.raises(Rejected, match=r"unknown column ''; .*from_pandas\(frame, preserve_index=False\)"):
        fit(rows, "t", schema, RowOp.UPSERT)
