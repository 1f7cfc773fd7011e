"""Partitionings with names and values mean what the same ones with column ids and encoded keys mean, and back."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest

from stele.model.errors import Rejected
from stele.model.keys import encode_tuple
from stele.model.nearest import did_you_mean, nearest
from stele.model.partition import HashPartition, PartitionSchema, RangePartition
from stele.model.partitioning import HashPartitioning, Partitioning, RangePartitioning, by_ids, by_names
from stele.model.schema import Schema

SCHEMA = Schema.make(
    [("day", "date"), ("name", "string"), ("n", "int64"), ("x", "double")], ["day", "name", "n"]
)
DAYS = (date(2024, 1, 1), date(2024, 7, 1))
DAY_KEYS = tuple(encode_tuple((day,), [pa.date32()]) for day in DAYS)


def test_names_become_ids_and_values_become_split_keys_and_back() -> None:
    by_id = PartitionSchema(
        (HashPartition((1,), 4), HashPartition((2, 0), 2, 7)), RangePartition((0,), DAY_KEYS)
    )
    parts = (
        HashPartitioning(("name",), 4),
        HashPartitioning(("n", "day"), 2, 7),
        RangePartitioning(("day",), DAYS),
    )
    assert by_ids(parts, SCHEMA) == by_id
    assert by_names(by_id, SCHEMA) == parts
    as_tuples = RangePartitioning(("day",), tuple((day,) for day in DAYS))
    assert by_ids([as_tuples], SCHEMA).range == by_id.range
    pairs = by_ids([RangePartitioning(("name", "n"), (("a", 1),))], SCHEMA)
    assert pairs.range is not None
    assert pairs.range.split_keys == (encode_tuple(("a", 1), [pa.string(), pa.int64()]),)
    assert by_ids([], SCHEMA) == PartitionSchema() and by_names(PartitionSchema(), SCHEMA) == ()


@pytest.mark.parametrize(
    ("type_", "values"),
    [
        ("int8", (-5, 0, 7)),
        ("string", ("a", "a\0", "ü")),
        ("binary", (b"\0", b"\0\xff")),
        ("date", DAYS),
        ("timestamp", (datetime(2024, 1, 1, tzinfo=UTC), datetime(2024, 1, 1, 0, 0, 0, 1, tzinfo=UTC))),
        ("decimal(9,2)", (Decimal("-1.50"), Decimal("2.25"))),
    ],
)
def test_split_values_of_every_key_type_come_back(type_: str, values: tuple[object, ...]) -> None:
    schema = Schema.make([("k", type_), ("n", "int64")], ["k", "n"])
    for part in (
        RangePartitioning(("k",), values),
        RangePartitioning(("k", "n"), tuple((value, 3) for value in values)),
    ):
        assert by_names(by_ids([part], schema), schema) == (part,)


def test_a_split_key_that_is_no_value_comes_back_in_hex() -> None:
    """Other programs may cut a key within a value."""
    cut = PartitionSchema(range=RangePartition((2,), (b"\x80",)))
    (part,) = by_names(cut, SCHEMA)
    assert part == RangePartitioning(("n",), ({"encoded": "80"},))
    assert by_ids([part], SCHEMA) == cut


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (HashPartitioning(("dya",), 2), "hash: the table has no column 'dya'; did you mean 'day'?"),
        (HashPartitioning(("zz",), 2), "hash: the table has no column 'zz'; expected some of ['day', 'name'"),
        (HashPartitioning(("x",), 2), "['x'] are not key columns"),
        (HashPartitioning(("day",), 1), "1 buckets; expected 2 or more"),
        (HashPartitioning((), 2), "hash: it names no columns"),
        (RangePartitioning(("day",), ("x",)), "range: cannot split at 'x': column day: 'x' is not a date"),
        (RangePartitioning(("day",), (None,)), "range: cannot split at None: it is None"),
        (RangePartitioning(("day", "n"), DAYS), "expected a value for each of day, n"),
        (RangePartitioning(("day",), DAYS[::-1]), "split keys must be ascending"),
        (RangePartitioning(("day",), ({"encoded": "x"},)), 'expected values, or {"encoded": HEX}'),
    ],
)
def test_names_and_values_that_do_not_fit_are_told(part: Partitioning, told: str) -> None:
    with pytest.raises(Rejected) as caught:
        by_ids([part], SCHEMA)
    assert told in str(caught.value)


def test_all_faults_are_told_together() -> None:
    parts = [HashPartitioning(("a",), 2), RangePartitioning(("b",), ()), RangePartitioning(("day",), ())]
    with pytest.raises(Rejected) as caught:
        by_ids([*parts, RangePartitioning(("n",), ())], SCHEMA)
    message = str(caught.value)
    assert (
        "no column 'a'" in message
        and "no column 'b'" in message
        and "there are 2 range partitionings" in message
    )


def test_the_nearest_known_word_is_named() -> None:
    known = ("replicationFactor", "nullable", "columns")
    assert [nearest(w, known) for w in ("Nullabel", "replicas", "column", "zzz", "")] == [
        "nullable",
        "replicationFactor",
        "columns",
        None,
        None,
    ]
    assert did_you_mean("colums", known) == "; did you mean 'columns'?" and did_you_mean("zzz", known) == ""
