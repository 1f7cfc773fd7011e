"""Partitionings that name their columns mean what the same ones with column ids mean."""

from __future__ import annotations

from datetime import date
from typing import Any

import pyarrow as pa
import pytest

from stele.model.errors import Rejected
from stele.model.keys import encode_tuple
from stele.model.named_parts import with_ids
from stele.model.nearest import meant, nearest
from stele.model.partition import HashPartition, PartitionSchema, RangePartition
from stele.model.schema import Schema

SCHEMA = Schema.make(
    [("day", "date"), ("name", "string"), ("n", "int64"), ("x", "double")], ["day", "name", "n"]
)
DAYS = [date(2024, 1, 1), date(2024, 7, 1)]
DAY_KEYS = tuple(encode_tuple((day,), [pa.date32()]) for day in DAYS)


def test_names_become_ids_and_values_become_split_keys() -> None:
    by_id = PartitionSchema(
        (HashPartition((1,), 4), HashPartition((2, 0), 2, 7)), RangePartition((0,), DAY_KEYS)
    )
    for range_ in (
        RangePartition(columns=["day"], split_at=DAYS),
        RangePartition(columns=("day",), split_at=tuple((day,) for day in DAYS)),
        RangePartition((0,), split_at=DAYS),
        RangePartition(columns=["day"], split_keys=DAY_KEYS),
    ):
        hashes = (
            HashPartition(columns=["name"], buckets=4),
            HashPartition(columns=["n", "day"], buckets=2, seed=7),
        )
        assert with_ids(PartitionSchema(hashes, range_), SCHEMA) == by_id
    assert with_ids(by_id, SCHEMA) == by_id
    pairs = with_ids(
        PartitionSchema(range=RangePartition(columns=["name", "n"], split_at=[("a", 1)])), SCHEMA
    )
    assert pairs.range is not None
    assert pairs.range.split_keys == (encode_tuple(("a", 1), [pa.string(), pa.int64()]),)


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (HashPartition(columns=["dya"], buckets=2), "hash: no column 'dya'; did you mean 'day'?"),
        (HashPartition(columns=["zz"], buckets=2), "hash: no column 'zz'; expected some of ['day', 'name'"),
        (
            HashPartition(columns="day", buckets=2),
            "hash: columns 'day': expected a list of names, like ['day']",
        ),
        (HashPartition(columns=[0], buckets=2), "hash: columns [0]: expected a list of names"),  # type: ignore[list-item]
        (HashPartition((0,), 2, columns=["day"]), "hash: columns and column_ids are both given"),
        (RangePartition(columns=["day"], split_at=["x"]), "range: split at 'x': column day: 'x' is no date"),
        (RangePartition(columns=["day"], split_at=[None]), "range: split at None: it is None"),
        (RangePartition(columns=["day"], split_at="ab"), "range: split_at 'ab': expected a list of values"),
        (RangePartition(columns=["day", "n"], split_at=DAYS), "expected a value for each of day, n"),
        (RangePartition((0,), DAY_KEYS, split_at=DAYS), "range: split_at and split_keys are both given"),
    ],
)
def test_names_and_values_that_do_not_fit_are_told(part: Any, told: str) -> None:
    given = PartitionSchema((part,)) if isinstance(part, HashPartition) else PartitionSchema(range=part)
    with pytest.raises(Rejected) as caught:
        with_ids(given, SCHEMA)
    assert told in str(caught.value)


def test_faults_that_ids_have_are_told_of_names_too() -> None:
    for part, told in (
        (HashPartition(columns=["x"], buckets=2), "['x'] are not key columns"),
        (HashPartition(columns=["day"]), "0 buckets; expected 2 or more"),
        (HashPartition(buckets=2), "hash: no columns"),
    ):
        bound = with_ids(PartitionSchema((part,)), SCHEMA)
        assert told in "; ".join(bound.faults(SCHEMA))


def test_the_nearest_known_word_is_named() -> None:
    known = ("replicationFactor", "nullable", "columns")
    assert [nearest(w, known) for w in ("Nullabel", "replicas", "column", "zzz", "")] == [
        "nullable",
        "replicationFactor",
        "columns",
        None,
        None,
    ]
    assert meant("colums", known) == "; did you mean 'columns'?" and meant("zzz", known) == ""
