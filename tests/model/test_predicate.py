"""Scans as JSON; predicates that do not fit are refused."""

from __future__ import annotations

import datetime
import decimal

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
    with pytest.raises(Rejected, match=r"k: .* is no int64"):
        Predicate(0, "<", value).array(SCHEMA)
    with pytest.raises(Rejected, match=r"k: .* is no int64"):
        Predicate(0, "in", (1, value)).array(SCHEMA)
    assert Predicate(0, "<", 2.0).array(SCHEMA).to_pylist() == [2]
