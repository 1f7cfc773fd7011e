"""Which keys can belong to a row for which predicates are true: ranges of encoded keys. Pure; reads no rows.

Clients use it to choose tablets (`partition.prune`), and nodes to choose what they read (`tablet.view`). Predicates on
leading key columns count: = and "in" on the first ones, and any comparison on the next one.

Invariant: a row for which all predicates are true has a key in one of the ranges. Other keys may be in them too, so
whoever reads a range still filters its rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from stele.model import keys
from stele.model.column import Column
from stele.model.predicate import Predicate
from stele.model.schema import Schema

RANGES_MAX = 1_000
"""The most ranges of one scan. Values of a longer list share ranges with their neighbours."""
ENUMERATED_MAX = 64
"""A column with at most this many possible values is treated as a list of them. So `id >= 5 AND id < 7` finds the hash
buckets of 5 and 6."""

KeyRange = tuple[bytes, bytes]
"""[lower, upper) of encoded keys; b"" means unbounded."""
EVERYTHING: tuple[KeyRange, ...] = ((b"", b""),)


@dataclass(frozen=True, slots=True)
class Values:
    """The values that a column may have: each encoded alone, ascending, without duplicates."""

    encoded: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A column's value, encoded alone, is in [lower, upper). None: unbounded."""

    lower: bytes | None = None
    upper: bytes | None = None


Domain = Values | Span
"""The values that predicates allow for a key column. Empty `Values`: no row can be wanted."""


def domain(column: Column, schema: Schema, predicates: Iterable[Predicate]) -> Domain:
    """The values that a key column can have in a row for which all predicates are true.

    Raises:
        Rejected: a predicate on this column does not fit it.
    """
    variable = _variable(column)
    listed: set[bytes] | None = None
    without: set[bytes] = set()
    lower: bytes | None = None
    upper: bytes | None = None
    for predicate in predicates:
        if predicate.column_id != column.id or predicate.op == "is_not_null":
            continue
        if predicate.op == "is_null":
            return Values(())  # key columns have no nulls
        given = _encoded_alone(predicate.array(schema))
        if predicate.op in ("=", "in"):
            listed = set(given) if listed is None else listed & set(given)
        elif predicate.op == "!=":
            without.update(given)
        elif predicate.op in (">=", ">"):
            at = given[0] if predicate.op == ">=" else _after(given[0], variable)
            if at is None:
                return Values(())
            lower = at if lower is None else max(lower, at)
        else:
            at = given[0] if predicate.op == "<" else _after(given[0], variable)
            if at is not None:
                upper = at if upper is None else min(upper, at)
    if listed is None:
        listed = _few(column, lower, upper)
    if listed is None:
        return Values(()) if _is_empty(lower, upper) else Span(lower, upper)
    kept = listed - without
    return Values(tuple(sorted(v for v in kept if _within(v, lower, upper))))


def key_ranges(
    column_ids: Sequence[int], schema: Schema, predicates: Sequence[Predicate], ranges_max: int = RANGES_MAX
) -> list[KeyRange]:
    """Return the ranges that contain all wanted rows. A range bounds these columns, encoded in this order.

    Ranges are ascending and disjoint, none is empty, and there are at most `ranges_max`. If no row can be wanted,
    the list is empty. If the predicates do not restrict these columns, it is `list(EVERYTHING)`.

    Raises:
        Rejected: a predicate does not fit its column.
    """
    if any(p.op == "in" and p.value == () for p in predicates):
        return []
    columns = [schema.by_id[i] for i in column_ids]
    named = {p.column_id for p in predicates}
    domains = [domain(c, schema, predicates) if c.id in named else Span() for c in columns]
    if Values(()) in domains:
        return []
    prefixes = [b""]
    for position, (column, left) in enumerate(zip(columns, domains)):
        last = position == len(columns) - 1
        if isinstance(left, Values) and len(prefixes) * len(left.encoded) <= ranges_max:
            rendered = [_rendered(v, column, last) for v in left.encoded]
            prefixes = [p + v for p, v in itertools.product(prefixes, rendered)]
            if last:
                return _joined((p, _after(p, _variable(column))) for p in prefixes)
            continue
        spans = [left] if isinstance(left, Span) else _hulls(left, column, ranges_max // len(prefixes))
        return _joined(_placed(p, span, column, last) for p, span in itertools.product(prefixes, spans))
    return list(EVERYTHING)  # of no columns


def within(ranges: Iterable[KeyRange], lower: bytes, upper: bytes) -> list[KeyRange]:
    """Return the parts of these ascending ranges that lie in [lower, upper). b"" means unbounded."""
    found = []
    for start, end in ranges:
        low = max(start, lower)
        high = min(end, upper) if end and upper else end or upper
        if not high or low < high:
            found.append((low, high))
    return found


def keys_begin_with(column_ids: Sequence[int], schema: Schema) -> bool:
    """Whether each encoded key begins with the bytes of these columns as `keys.encode_columns` gives them."""
    ids = schema.key_column_ids
    if tuple(column_ids) != tuple(ids[: len(column_ids)]):
        return False
    return len(column_ids) == len(ids) or not _variable(schema.by_id[column_ids[-1]])


def products(columns: Sequence[Column], domains: Sequence[Values], most: int) -> list[bytes] | None:
    """All combinations of these values, encoded in this order; None if there are more than `most`."""
    count = 1
    for left in domains:
        count *= len(left.encoded)
        if count > most:
            return None
    last = len(columns) - 1
    rendered = [
        [_rendered(value, column, position == last) for value in left.encoded]
        for position, (column, left) in enumerate(zip(columns, domains))
    ]
    return [b"".join(parts) for parts in itertools.product(*rendered)]


def _variable(column: Column) -> bool:
    return column.type in ("string", "binary")


def _encoded_alone(values: pa.Array) -> list[bytes]:
    found: list[bytes] = keys.encode_arrays([values]).to_pylist()
    return found


def _rendered(value: bytes, column: Column, last: bool) -> bytes:
    """Convert a value that was encoded alone into its bytes within a key."""
    return value if last or not _variable(column) else keys.escaped(value)


def _after(key: bytes, variable: bool) -> bytes | None:
    """Return the lowest bytes above `key`. None: there are none.

    If keys have a fixed length (not `variable`): the lowest bytes above all keys that begin with `key`."""
    if variable:
        return key + b"\x00"
    stem = key.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


def _few(column: Column, lower: bytes | None, upper: bytes | None) -> set[bytes] | None:
    """Return all values of [lower, upper); None if these are not few. For a bool column, return both values."""
    if _variable(column):
        one = lower is not None and upper == lower + b"\x00"
        return {lower} if one and lower is not None else None
    if pa.types.is_boolean(column.arrow):
        return {b"\x00", b"\x01"}
    width = column.arrow.bit_width // 8
    low = int.from_bytes(lower or b"", "big")
    high = int.from_bytes(upper, "big") if upper is not None else 1 << (8 * width)
    if high - low > ENUMERATED_MAX:
        return None
    return {number.to_bytes(width, "big") for number in range(low, high)}


def _within(value: bytes, lower: bytes | None, upper: bytes | None) -> bool:
    return (lower is None or lower <= value) and (upper is None or value < upper)


def _is_empty(lower: bytes | None, upper: bytes | None) -> bool:
    return upper is not None and upper <= (lower or b"")


def _hulls(values: Values, column: Column, most: int) -> list[Span]:
    """Return at most `most` spans that together cover all values. Each covers consecutive values."""
    each = -(-len(values.encoded) // most)
    starts = range(0, len(values.encoded), each)
    parts = [values.encoded[start : start + each] for start in starts]
    return [Span(part[0], _after(part[-1], _variable(column))) for part in parts]


def _placed(prefix: bytes, span: Span, column: Column, last: bool) -> tuple[bytes, bytes | None]:
    """The keys that begin with `prefix`, followed by a value of the span."""
    lower = b"" if span.lower is None else _rendered(span.lower, column, last)
    if span.upper is None:
        return prefix + lower, _after(prefix, False)
    return prefix + lower, prefix + _rendered(span.upper, column, last)


def _joined(ranges: Iterable[tuple[bytes, bytes | None]]) -> list[KeyRange]:
    """Return the ascending ranges without empty ones, with adjacent ones joined. An upper None means unbounded."""
    found: list[KeyRange] = []
    for lower, upper in ranges:
        if upper is not None and upper <= lower:
            continue
        if found and found[-1][1] == lower:
            lower = found.pop()[0]
        found.append((lower, upper or b""))
    return found
