"""Ranges of keys from predicates, against a dumb test of every row."""

from __future__ import annotations

import datetime
import decimal
import itertools
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stele.model import keys
from stele.model.errors import Rejected
from stele.model.key_bounds import EVERYTHING, KeyRange, _after, key_ranges, keys_begin_with, within
from stele.model.partition import HashPartition, PartitionSchema, RangePartition, assign, prune
from stele.model.predicate import Predicate
from stele.model.schema import Schema
from tests.model.drawn import VALUES

_DAY = datetime.date(1970, 1, 1)
NARROW: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "int8": st.integers(-3, 3) | st.sampled_from([-128, -127, 126, 127]),
    "int16": st.integers(-3, 3) | st.sampled_from([-(1 << 15), (1 << 15) - 1]),
    "int32": st.integers(-3, 3) | st.sampled_from([-(1 << 31), (1 << 31) - 1, 255, 256]),
    "int64": st.integers(-3, 3) | st.sampled_from([-(1 << 63), (1 << 63) - 1, 255, 256]),
    "decimal(9,2)": st.sampled_from([decimal.Decimal(n) / 100 for n in (-999999999, -1, 0, 1, 2, 999999999)]),
    "string": st.sampled_from(
        ["", "\x00", "\x00\x00", "\x00\x01", "a", "a\x00", "a\x00b", "ab", "b", "é", "\U0010ffff"]
    ),
    "binary": st.sampled_from(
        [b"", b"\x00", b"\x00\x00", b"\x01", b"a", b"a\x00", b"\xff", b"\xff\x00", b"\xff\xff"]
    ),
    "date": st.integers(-2, 2).map(lambda n: _DAY + datetime.timedelta(n)),
    "timestamp": st.integers(-2, 2).map(
        lambda n: datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(microseconds=n)
    ),
}
"""Values of key columns, few enough to meet: beside each other, at the ends, and where bytes are escaped."""
COMPARISONS = ("=", "!=", "<", "<=", ">", ">=")


def _comparable(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


def true_for(predicate: Predicate, value: Any) -> bool:
    """What a predicate means, said as simply as possible."""
    match predicate.op:
        case "is_null":
            return value is None
        case "is_not_null":
            return value is not None
        case "in":
            return value is not None and _comparable(value) in [_comparable(v) for v in predicate.value]
    if value is None:
        return False
    mine, other = _comparable(value), _comparable(predicate.value)
    return (
        bool({"=": mine == other, "!=": mine != other}.get(predicate.op, False))
        or {
            "<": lambda: mine < other,
            "<=": lambda: mine <= other,
            ">": lambda: mine > other,
            ">=": lambda: mine >= other,
        }.get(predicate.op, lambda: False)()
    )


@st.composite
def cases(draw: Callable[..., Any]) -> tuple[Schema, list[dict[str, Any]], list[Predicate]]:
    """A schema of one to three key columns and a nullable one, rows, and predicates on any column."""
    types = draw(st.lists(st.sampled_from(list(NARROW)), min_size=1, max_size=3))
    columns: list[tuple[Any, ...]] = [(f"k{n}", type_) for n, type_ in enumerate(types)]
    schema = Schema.make([*columns, ("v", "int32", True)], [name for name, *_ in columns])
    wide = draw(st.booleans())  # also values from all over the type
    values = [VALUES[t] | NARROW[t] if wide and t in VALUES else NARROW[t] for t in types]
    row = st.fixed_dictionaries(
        {**{f"k{n}": value for n, value in enumerate(values)}, "v": st.none() | st.integers(-2, 2)}
    )
    rows = draw(st.lists(row, max_size=12))
    predicates = []
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(types)))
        value = values[at] if at < len(types) else st.integers(-2, 2)
        op = draw(st.sampled_from([*COMPARISONS, "=", "in", "in", "is_null", "is_not_null"]))
        if op == "in":
            predicates.append(Predicate(at, op, tuple(draw(st.lists(value, max_size=5)))))
        else:
            predicates.append(Predicate(at, op, None if op.startswith("is") else draw(value)))
    return schema, rows, predicates


def _key(schema: Schema, row: dict[str, Any]) -> bytes:
    columns = schema.key_columns
    return keys.key_list([column.array([row[column.name]]) for column in columns])[0]


def _in(ranges: list[KeyRange], key: bytes) -> bool:
    return any(lower <= key and (not upper or key < upper) for lower, upper in ranges)


def _wanted(schema: Schema, row: dict[str, Any], predicates: list[Predicate]) -> bool:
    return all(true_for(p, row[schema.by_id[p.column_id].name]) for p in predicates)


def _exact(schema: Schema, predicates: list[Predicate]) -> bool:
    """Whether ranges can say all that these predicates say: lists on the first key columns, bounds on the next."""
    ids = list(schema.key_column_ids)
    if any(p.op == "!=" or p.column_id not in ids for p in predicates):
        return False
    bounded = False
    for column_id in ids:
        ops = {p.op for p in predicates if p.column_id == column_id} - {"is_not_null"}
        if ops and bounded:
            return False
        bounded |= not ops & {"=", "in", "is_null"}
    return True


@given(cases(), st.sampled_from([1, 2, 3, 1_000]))
def test_no_wanted_row_is_outside_and_simple_ranges_have_no_other(
    case: tuple[Schema, list[dict[str, Any]], list[Predicate]], most: int
) -> None:
    schema, rows, predicates = case
    found = key_ranges(schema.key_column_ids, schema, predicates, most)
    assert len(found) <= most
    for lower, upper in found:
        assert not upper or lower < upper
    for (_, end), (start, _) in itertools.pairwise(found):
        assert end and end < start, "ascending, disjoint, and joined where they touch"
    if not predicates:
        assert found == list(EVERYTHING)
    for row in rows:
        wanted, key = _wanted(schema, row, predicates), _key(schema, row)
        assert _in(found, key) or not wanted, (row, predicates, found)
        if most == 1_000 and _exact(schema, predicates):
            assert wanted or not _in(found, key), (row, predicates, found)


@given(cases(), st.data())
def test_no_tablet_with_a_wanted_row_is_left_out(
    case: tuple[Schema, list[dict[str, Any]], list[Predicate]], data: st.DataObject
) -> None:
    schema, rows, predicates = case
    ids = list(schema.key_column_ids)
    shuffled = data.draw(st.permutations(ids))
    cut = data.draw(st.integers(0, len(ids)))
    hashes = (HashPartition(tuple(shuffled[:cut]), 3),) if cut else ()
    of_range = tuple(data.draw(st.permutations(ids))[: data.draw(st.integers(1, len(ids)))])
    splits = {
        keys.key_list([schema.by_id[i].array([row[schema.by_id[i].name]]) for i in of_range])[0]
        for row in rows[:4]
    }
    parts = PartitionSchema(hashes, RangePartition(of_range, tuple(sorted(splits - {b""}))))
    bounds = sorted({_key(schema, row) for row in rows[:2]})
    lower, upper = (bounds[0], bounds[-1]) if data.draw(st.booleans()) and len(bounds) > 1 else (b"", b"")
    kept = prune(parts, schema, predicates, lower, upper)
    assert kept == sorted(set(kept)) and set(kept) <= set(range(parts.tablets))
    if not rows:
        return
    arrays = [column.array([row[column.name] for row in rows]) for column in schema.columns]
    ordinals = assign(pa.record_batch(arrays, schema=schema.to_arrow()), schema, parts).tolist()
    for row, ordinal in zip(rows, ordinals):
        if (
            _wanted(schema, row, predicates)
            and lower <= (key := _key(schema, row))
            and (not upper or key < upper)
        ):
            assert ordinal in kept


PAIR = Schema.make([("k", "string"), ("n", "int32"), ("v", "int32", True)], ["k", "n"])
ONE = Schema.make([("id", "int64"), ("v", "int32", True)], ["id"])
TEXT = Schema.make([("k", "string")], ["k"])


def _of(schema: Schema, *predicates: tuple[Any, ...], most: int = 1_000) -> list[KeyRange]:
    return key_ranges(schema.key_column_ids, schema, [Predicate(*p) for p in predicates], most)


def _id(n: int) -> bytes:
    return (n + (1 << 63)).to_bytes(8, "big")


def test_examples() -> None:
    assert _of(ONE, (0, ">=", 5), (0, "<", 7)) == [(_id(5), _id(7))]
    assert _of(ONE, (0, ">", 5), (0, "<=", 7)) == [(_id(6), _id(8))]
    assert _of(ONE, (0, ">=", 500), (0, "<", 900), (0, ">=", 5), (0, "<", 5000)) == [(_id(500), _id(900))]
    assert _of(ONE, (0, "in", (9, 1, 2, 9)), (0, "!=", 1)) == [(_id(2), _id(3)), (_id(9), _id(10))]
    assert _of(ONE, (0, "in", (3, 1, 2))) == [(_id(1), _id(4))], "neighbours are one range"
    assert _of(ONE, (0, ">", (1 << 63) - 1)) == [] == _of(ONE, (0, "<", -(1 << 63)))
    assert _of(ONE, (0, ">=", (1 << 63) - 1)) == [(_id((1 << 63) - 1), b"")]
    assert _of(ONE, (0, ">", 1), (0, "<", 2)) == [] == _of(ONE, (0, "=", 1), (0, "=", 2))
    assert _of(ONE, (0, "is_null")) == [] == _of(ONE, (1, "in", ()))
    assert _of(ONE, (1, "=", 3), (0, "is_not_null")) == [(b"", b"")], "no key column says anything"
    assert _of(PAIR, (0, "=", "a")) == [(b"a\0\0", b"a\0\1")]
    assert _of(PAIR, (0, "=", "a"), (1, ">=", 0)) == [(b"a\0\0\x80\0\0\0", b"a\0\1")]
    assert _of(PAIR, (0, ">=", "a"), (1, "=", 0)) == [(b"a\0\0", b"")], (
        "what follows a range is left to the filter"
    )
    assert _of(TEXT, (0, "<", "")) == [] and _of(TEXT, (0, "<=", "")) == [(b"", b"\0")]
    assert _of(TEXT, (0, ">", "")) == [(b"\0", b"")] and _of(TEXT, (0, ">=", "")) == [(b"", b"")]
    with pytest.raises(Rejected, match="predicate on column id"):
        _of(ONE, (0, "=", "five"))


def test_a_long_list_becomes_a_bounded_number_of_ranges() -> None:
    found = _of(ONE, (0, "in", tuple(range(0, 100_000, 10))))
    assert len(found) == 1_000
    assert found[0] == (_id(0), _id(91)) and found[-1][1] == _id(99_991)
    pairs = [(0, "in", tuple("abcdefgh")), (1, "in", tuple(range(0, 90, 2)))]
    assert len(_of(PAIR, *pairs)) == 8 * 45
    assert len(_of(PAIR, *pairs, most=100)) == 8 * 12


def test_explicit_bounds_cut_the_ranges() -> None:
    ranges = [(b"b", b"d"), (b"f", b"")]
    assert within(ranges, b"", b"") == ranges
    assert within(ranges, b"c", b"g") == [(b"c", b"d"), (b"f", b"g")]
    assert within(ranges, b"d", b"f") == [] == within([], b"", b"")
    assert keys_begin_with((0,), ONE) and keys_begin_with((0, 1), PAIR)
    assert not keys_begin_with((0,), PAIR), "text before other columns has an end mark"
    assert not keys_begin_with((1,), PAIR)


def test_what_follows_a_prefix_has_one_byte_more_where_that_can_be() -> None:
    assert [_after(key, variable=False) for key in (b"a", b"a\xfe", b"a\xff\xff", b"\xff\xff")] == [
        b"b",
        b"a\xff",
        b"b",
        None,
    ]
    assert _after(b"\xff", variable=True) == b"\xff\x00"
