"""Which tablet a row is in never changes (golden), pruning never loses a row."""

from __future__ import annotations

import bisect
import tracemalloc
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stele.model import keys
from stele.model.column import arrow_type
from stele.model.errors import Rejected
from stele.model.hashing import hash_bytes
from stele.model.partition import (
    HashPartition,
    Partition,
    PartitionSchema,
    RangePartition,
    assign,
    assign_few,
    partitions,
    prune,
    rows_by_tablet,
)
from stele.model.predicate import Predicate
from stele.model.schema import Schema

SCHEMA = Schema.make([("a", "string"), ("n", "int64"), ("v", "double", True)], ["a", "n"])


def _splits(*values: tuple[str, int]) -> tuple[bytes, ...]:
    return tuple(keys.encode_tuple(v, (pa.string(), pa.int64())) for v in values)


WHOLE = PartitionSchema(
    (HashPartition((1,), 4), HashPartition((0,), 3, 9)), RangePartition((0, 1), _splits(("b", 0), ("c", 5)))
)


def _batch(rows: list[tuple[str, int]]) -> pa.RecordBatch:
    return pa.record_batch(
        [pa.array([r[0] for r in rows], pa.string()), pa.array([r[1] for r in rows], pa.int64())],
        schema=SCHEMA.to_arrow((0, 1)),
    )


def test_golden_ordinals() -> None:
    rows = [("a", 1), ("b", -1), ("b", 0), ("c", 5), ("", 7), ("zz", 10**12)]
    assert assign(_batch(rows), SCHEMA, WHOLE).tolist() == [0, 27, 1, 23, 21, 29]
    eight = PartitionSchema((HashPartition((0, 1), 8),))
    assert assign(_batch(rows), SCHEMA, eight).tolist() == [3, 1, 5, 6, 2, 0]
    assert assign(_batch(rows), SCHEMA, PartitionSchema()).tolist() == [0] * 6


@pytest.mark.parametrize("rows", [1, 8, 9, 32, 33, 100])
def test_a_row_is_in_the_same_tablet_whoever_is_written_with_it(rows: int) -> None:
    """One by one or together, of fixed width or not, in a part of a batch too."""
    types = [("i", "int64"), ("s", "int16"), ("b", "bool"), ("t", "string"), ("d", "decimal(9,2)")]
    schema = Schema.make([(name, type_) for name, type_ in types], [name for name, _ in types])
    whole = (HashPartition((0,), 7), HashPartition((1, 2, 4), 3, 5), HashPartition((3,), 4))
    rng = np.random.default_rng(rows)
    ints = rng.integers(-(2**63), 2**63 - 1, rows + 3)
    values = [
        ints,
        ints.astype(np.int16),
        ints % 2 == 0,
        [f"{i}" for i in ints],
        [Decimal(int(i) % 999) for i in ints],
    ]
    arrays = [pa.array(each, arrow_type(type_)) for each, (_, type_) in zip(values, types)]
    batch = pa.record_batch(arrays, schema=schema.to_arrow()).slice(3)
    wanted = [0] * rows
    for part in whole:
        for at, key in enumerate(keys.encode_columns(batch, schema, part.column_ids).to_pylist()):
            wanted[at] = wanted[at] * part.buckets + hash_bytes(key, part.seed) % part.buckets
    assert assign(batch, schema, PartitionSchema(whole)).tolist() == wanted


@given(
    st.lists(st.binary(max_size=9), min_size=1, max_size=80),
    st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=8, unique=True),
    st.booleans(),
)
def test_a_key_is_in_the_range_between_two_splits(
    values: list[bytes], splits: list[bytes], long: bool
) -> None:
    if long:
        values, splits = [v + bytes(200) for v in values], [s + bytes(200) for s in splits] + splits
    splits.sort()
    schema = Schema.make([("k", "binary")], ["k"])
    batch = pa.record_batch([pa.array(values, pa.binary())], schema=schema.to_arrow())
    parts = PartitionSchema((), RangePartition((0,), tuple(splits)))
    assert parts.faults(schema) == []
    found = assign(batch, schema, parts).tolist()
    assert found == [bisect.bisect_right(splits, value) for value in values]


def test_one_long_key_among_many_costs_its_own_bytes() -> None:
    """It cost its length in every row: of 200,000 rows with one key of 8,000 bytes, a loader took 3 GB."""
    schema = Schema.make([("k", "string")], ["k"])
    batch = pa.record_batch(
        [pa.array([*(f"key {n:06}" for n in range(10_000)), "x" * 8_000])], schema=schema.to_arrow()
    )
    parts = PartitionSchema((), RangePartition((0,), (b"key 005000", b"l")))
    tracemalloc.start()
    found = assign(batch, schema, parts)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.bincount(found).tolist() == [5_000, 5_000, 1]
    assert peak < 8 << 20


def test_partitions_are_the_cross_product_in_a_fixed_order() -> None:
    found = partitions(WHOLE)
    assert len(found) == WHOLE.tablets == 36
    first, second = WHOLE.range.split_keys if WHOLE.range else ()
    assert found[0] == Partition((0, 0), b"", first)
    assert found[1] == Partition((0, 0), first, second)
    assert found[3] == Partition((0, 1), b"", first)
    assert found[35] == Partition((3, 2), second, b"")
    assert str(found[1]).startswith("hash 0, hash 0, range [62")
    assert partitions(PartitionSchema()) == [Partition()]


TEXT = st.sampled_from(["", "a", "b", "b\x00", "bb", "c", "d"])
ROW = st.tuples(TEXT, st.integers(-2, 8))
PREDICATE = st.one_of(
    st.builds(Predicate, st.just(0), st.sampled_from(["=", "!=", "<", "<=", ">", ">="]), TEXT),
    st.builds(Predicate, st.just(1), st.sampled_from(["=", "!=", "<", "<=", ">", ">="]), st.integers(-2, 8)),
    st.builds(Predicate, st.just(0), st.just("in"), st.lists(TEXT, max_size=3).map(tuple)),
    st.builds(Predicate, st.just(1), st.just("in"), st.lists(st.integers(-2, 8), max_size=3).map(tuple)),
    st.just(Predicate(0, "is_not_null")),
)


def _true(predicate: Predicate, row: tuple[str, int]) -> bool:
    value: Any = row[predicate.column_id]
    value = value.encode() if isinstance(value, str) else value
    other: Any = predicate.value
    if predicate.op == "in":
        return row[predicate.column_id] in other
    other = other.encode() if isinstance(other, str) else other
    tests = {"=": "__eq__", "!=": "__ne__", "<": "__lt__", "<=": "__le__", ">": "__gt__", ">=": "__ge__"}
    return predicate.op == "is_not_null" or bool(getattr(value, tests[predicate.op])(other))


@given(st.lists(ROW, min_size=1, max_size=20), st.lists(PREDICATE, max_size=3))
def test_pruning_never_leaves_out_a_tablet_with_a_row(
    rows: list[tuple[str, int]], predicates: list[Predicate]
) -> None:
    kept = prune(WHOLE, SCHEMA, predicates)
    assert kept == sorted(set(kept))
    ordinals = assign(_batch(rows), SCHEMA, WHOLE).tolist()
    for row, ordinal in zip(rows, ordinals):
        if all(_true(p, row) for p in predicates):
            assert ordinal in kept


def test_a_key_at_a_split_is_in_the_range_above_it() -> None:
    """Few rows and many find the same tablet."""
    for row in [("b", -1), ("b", 0), ("c", 4), ("c", 5)]:
        few = assign_few({0: [row[0]], 1: [row[1]]}, SCHEMA, WHOLE)
        assert few == assign(_batch([row]), SCHEMA, WHOLE).tolist()
        assert few[0] % WHOLE.ranges == {("b", -1): 0, ("b", 0): 1, ("c", 4): 1, ("c", 5): 2}[row]


def test_pruning_prunes() -> None:
    one = prune(WHOLE, SCHEMA, [Predicate(0, "=", "d"), Predicate(1, "=", 3)])
    assert one == assign(_batch([("d", 3)]), SCHEMA, WHOLE).tolist()
    assert len(prune(WHOLE, SCHEMA, [Predicate(1, "in", (1, 2))])) <= 18
    assert len(prune(WHOLE, SCHEMA, [Predicate(0, "<", "b")])) == 12
    assert len(prune(WHOLE, SCHEMA, [Predicate(0, "<=", "b")])) == 24
    assert prune(WHOLE, SCHEMA, [Predicate(0, "in", ())]) == []
    for op in ("<", "<=", ">", ">="):
        assert len(prune(WHOLE, SCHEMA, [Predicate(1, op, 3)])) == 36, "a hash says nothing of what is larger"
    few = [Predicate(1, ">=", 3), Predicate(1, "<", 5)]
    assert prune(WHOLE, SCHEMA, few) == prune(WHOLE, SCHEMA, [Predicate(1, "in", (3, 4))])
    assert prune(WHOLE, SCHEMA, [Predicate(1, ">", 4), Predicate(1, "<", 5)]) == []
    assert prune(WHOLE, SCHEMA, [Predicate(1, "is_null")]) == []


def test_more_combinations_than_numpy_can_count_prune_nothing() -> None:
    """65,536 values for each of four columns were counted as none, and then made."""
    schema = Schema.make([(name, "int32") for name in "abcd"], list("abcd"))
    parts = PartitionSchema((HashPartition((0, 1, 2, 3), 4),))
    values = tuple(range(1 << 16))
    assert prune(parts, schema, [Predicate(column, "in", values) for column in range(4)]) == [0, 1, 2, 3]


def test_runs_keep_the_order_of_rows() -> None:
    order, found = rows_by_tablet(np.array([2, 0, 2, 0, 1, 1, 2, 0, 0, 2]))
    assert [(ordinal, order[start:end].tolist()) for ordinal, start, end in found] == [
        (0, [1, 3, 7, 8]),
        (1, [4, 5]),
        (2, [0, 2, 6, 9]),
    ]
    assert rows_by_tablet(np.zeros(0, np.int64))[1] == []


def test_faults_and_json() -> None:
    assert WHOLE.faults(SCHEMA) == []
    assert PartitionSchema.from_json(WHOLE.to_json()) == WHOLE
    assert PartitionSchema.from_json(PartitionSchema().to_json()) == PartitionSchema()
    bad = PartitionSchema(
        (HashPartition((2,), 1), HashPartition((0, 0), 5000), HashPartition((0,), 5000)),
        RangePartition((7,), (b"b", b"a")),
    )
    text = "; ".join(bad.faults(SCHEMA))
    for part in ("['v']", "1 buckets", "names a column twice", "two hashes", "ascending", "['7']", "tablets"):
        assert part in text, part
    with pytest.raises(Rejected):
        PartitionSchema.from_json("{}")


@pytest.mark.parametrize("columns", [("v",), "v", 0, (0.5,)])
def test_columns_of_a_partition_are_ids(columns: object) -> None:
    for kind, bad in (
        ("hash", PartitionSchema((HashPartition(columns, 4),))),  # type: ignore[arg-type]
        ("range", PartitionSchema(range=RangePartition(columns))),  # type: ignore[arg-type]
    ):
        assert bad.faults(SCHEMA) == [
            f"{kind}: columns {columns!r}: expected column ids, like (0, 1); for names use stele.{kind}(...)"
        ]


def test_parts_of_a_partitioning_are_of_their_kinds() -> None:
    one = HashPartition((0,), 4)
    with pytest.raises(
        Rejected, match=r"hash HashPartition.*: expected a tuple of HashPartition, like \(HashPartition"
    ):
        PartitionSchema(one)  # type: ignore[arg-type]
    with pytest.raises(Rejected, match="hash"):
        PartitionSchema(((0,),))  # type: ignore[arg-type]
    with pytest.raises(Rejected, match=r"range .*: expected a RangePartition"):
        PartitionSchema(range=one)  # type: ignore[arg-type]
    assert PartitionSchema([one]).tablets == 4  # type: ignore[arg-type]
