"""Scans as JSON; predicates that do not fit are refused."""

from __future__ import annotations

import datetime
import decimal

import numpy as np
import pyarrow as pa
import pytest

from stele.model.errors import Rejected
from stele.model.predicate import Predicate, ScanSpec
from stele.model.schema import Schema

SCHEMA = Schema.make(
    [("k", "int64"), ("t", "timestamp", True), ("c", "decimal(9,2)", True), ("s", "string", True)], ["k"]
)


def test_a_scan_codes_whole() -> None:
    spec = ScanSpec(
        (3, 0),
        (
            Predicate(0, "in", (1, 2)),
            Predicate(1, "<", datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)),
            Predicate(2, ">=", decimal.Decimal("1.25")),
            Predicate(3, "is_null"),
        ),
        b"\x01",
        b"\xff",
        17,
        True,
        b"\x05",
        100,
    )
    assert ScanSpec.from_json(spec.to_json(SCHEMA), SCHEMA) == spec
    assert ScanSpec.from_json(ScanSpec().to_json(SCHEMA), SCHEMA) == ScanSpec()


@pytest.mark.parametrize(
    "predicate",
    [
        Predicate(9, "=", 1),
        Predicate(0, "~", 1),
        Predicate(0, "=", "x"),
        Predicate(0, "=", None),
        Predicate(0, "in", (1, None)),
    ],
)
def test_predicates_that_do_not_fit_are_refused(predicate: Predicate) -> None:
    with pytest.raises(Rejected):
        predicate.array(SCHEMA)


def test_garbage_is_no_scan() -> None:
    good = ScanSpec((0,), (Predicate(0, "=", 1),)).to_json(SCHEMA)
    for bad in (
        "",
        "[]",
        "{}",
        good.replace('"columns":[0]', '"columns":[8]'),
        good.replace("[0,", "[3,"),
        good[:-9],
    ):
        with pytest.raises(Rejected):
            ScanSpec.from_json(bad, SCHEMA)


@pytest.mark.parametrize("value", [1.5, decimal.Decimal("1.5"), float("inf"), True])
def test_what_is_no_whole_number_is_not_made_one(value: object) -> None:
    """`k < 1.5` would have become `k < 1`, and would have left out the ones."""
    with pytest.raises(Rejected, match=r"k: .* is not an int64"):
        Predicate(0, "<", value).array(SCHEMA)
    with pytest.raises(Rejected, match=r"k: .* is not an int64"):
        Predicate(0, "in", (1, value)).array(SCHEMA)
    assert Predicate(0, "<", 2.0).array(SCHEMA).to_pylist() == [2]


@pytest.mark.parametrize(
    ("predicate", "words"),
    [
        (Predicate(3, "in", "UA"), "\"in\" takes a list of values, got 'UA'; write it in []"),
        (Predicate(3, "in", b"UA"), "takes a list of values"),
        (Predicate(3, "in", {"UA": 1}), "takes a list of values"),
        (Predicate(0, "in", 5), "takes a list of values, got 5"),
        (Predicate(0, "in"), "takes a list of values, got None"),
        (
            Predicate(0, "~", 1),
            "operator '~' is unknown; expected one of =, !=, <, <=, >, >=, in, is_null, is_not_null",
        ),
        (Predicate(1, "is_null", True), "is_null takes no value, got True"),
        (Predicate(0, "=", [1, 2]), "[1, 2] is not an int64"),
    ],
)
def test_a_refusal_says_what_was_expected(predicate: Predicate, words: str) -> None:
    with pytest.raises(Rejected, match="predicate on") as caught:
        predicate.array(SCHEMA)
    assert words in str(caught.value)


def test_in_takes_what_holds_several_values() -> None:
    for several in ([1, 2], (1, 2), {1, 2}, range(1, 3), np.array([1, 2]), pa.array([1, 2]), iter([1, 2])):
        assert Predicate(0, "in", several).array(SCHEMA).to_pylist() == [1, 2], several
    assert Predicate(0, "in", []).array(SCHEMA).to_pylist() == []
