"""How a user says that a table is split: columns by name, split points as values. Used to create or describe
a table.

Servers, files and messages know only column ids and encoded keys (`partition.py`). Invariant: `by_ids` and
`by_names` are inverse, and neither changes which tablet a row belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

from stele.model.column import Column, shown
from stele.model.errors import Corrupt, Rejected
from stele.model.keys import decode_key, encode_tuple
from stele.model.nearest import did_you_mean
from stele.model.partition import HashPartition, PartitionSchema, RangePartition
from stele.model.ranges import Bounds, of_ranges
from stele.model.rows import python_values
from stele.model.schema import Schema
from stele.model.split_json import ENCODED, split_key


@dataclass(frozen=True, slots=True)
class HashPartitioning:
    """Spreads rows over `buckets` tablets by the hash of some key columns. `stele.hash` makes one.

    Example:
        >>> stele.hash("day", "name", buckets=4).columns
        ('day', 'name')
    """

    columns: tuple[str, ...]
    buckets: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class RangePartitioning:
    """Splits a table at values of its key columns. `stele.range` makes one.

    `split_at` ascends. An element is a value of the one column, or a tuple with a value for each column. A
    split point that is not a value of the columns, as other programs may choose, is `{"encoded": HEX}`.

    Example:
        >>> stele.range("n", split_at=[1000, 2000]).split_at
        (1000, 2000)
    """

    columns: tuple[str, ...]
    split_at: tuple[Any, ...] = ()
    ranges: tuple[tuple[Any, Any], ...] = ()
    """In place of `split_at`: the ranges as pairs of values, from (inclusive) and to (exclusive), None for no bound.
    Rows in no range are refused."""


Partitioning: TypeAlias = HashPartitioning | RangePartitioning


def by_ids(parts: Iterable[Partitioning], schema: Schema) -> PartitionSchema:
    """The partitioning with column ids for names and encoded keys for values.

    Raises:
        Rejected: a hash or the range is wrong; lists all faults.
    """
    faults: list[str] = []
    hashes: list[HashPartition] = []
    ranges: list[RangePartition] = []
    for part in parts:
        columns = _columns(part, schema, faults)
        if columns is None:
            continue
        ids = tuple(int(column.id) for column in columns)
        if isinstance(part, HashPartitioning):
            hashes.append(HashPartition(ids, part.buckets, part.seed))
        else:
            ranges.append(_range(part, ids, columns, faults))
    if len(ranges) > 1:
        faults.append(
            f"there are {len(ranges)} range partitionings; give one, which may have several columns"
        )
    found = PartitionSchema(tuple(hashes), ranges[0] if ranges else None)
    faults = faults or found.faults(schema)
    if faults:
        raise Rejected("; ".join(faults))
    return found


def by_names(partitions: PartitionSchema, schema: Schema) -> tuple[Partitioning, ...]:
    """The inverse of `by_ids`: hashes first, in their order. Empty for a table of one tablet."""
    found: list[Partitioning] = [
        HashPartitioning(_column_names(part.column_ids, schema), part.buckets, part.seed)
        for part in partitions.hash
    ]
    if partitions.range is not None:
        columns = [schema.by_id[i] for i in partitions.range.column_ids]
        names = tuple(column.name for column in columns)
        if partitions.has_gaps:
            found.append(RangePartitioning(names, (), tuple(named_bounds(partitions.range, schema))))
        else:
            values = tuple(_split_value(key, columns) for key in partitions.range.split_keys)
            found.append(RangePartitioning(names, values))
    return tuple(found)


def _range(
    part: RangePartitioning, ids: tuple[int, ...], columns: Sequence[Column], faults: list[str]
) -> RangePartition:
    if not part.ranges:
        return RangePartition(ids, tuple(_split_key(value, columns, faults) for value in part.split_at))
    if part.split_at:
        faults.append("range: it has split_at and ranges; give one of them")
    bounds = []
    for pair in part.ranges:
        try:
            bounds.append(encoded_bounds(pair, columns))
        except Rejected as exc:
            faults.append(f"range: {exc.args[0]}")
    if not faults:
        try:
            return of_ranges(ids, bounds)
        except Rejected as exc:
            faults.append(str(exc.args[0]))
    return RangePartition(ids)


def encoded_bounds(pair: Any, columns: Sequence[Column]) -> Bounds:
    """A range given as a pair of values: None, a value of the one column, a tuple with a value for each, or
    {"encoded": HEX}.

    Raises:
        Rejected: it is not such a pair, or a value does not fit.
    """
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise Rejected(
            f"{shown(pair)}: expected two bounds, like (0, 1000), or (1000, None) for no upper one"
        )
    found = []
    for value in pair:
        try:
            if value is None:
                found.append(b"")
            else:
                found.append(
                    split_key(value, columns) if isinstance(value, dict) else _encoded(value, columns)
                )
        except Rejected as exc:
            raise Rejected(f"bound {shown(value)}: {exc.args[0]}") from exc
    return found[0], found[1]


def named_bounds(part: RangePartition, schema: Schema) -> list[tuple[Any, Any]]:
    """The ranges of a table as pairs of values; None for no bound."""
    columns = [schema.by_id[i] for i in part.column_ids]
    return [
        (
            _split_value(start, columns) if start else None,
            _split_value(end, columns) if end else None,
        )
        for start, end, _ in part.covered
    ]


def _column_names(column_ids: Sequence[int], schema: Schema) -> tuple[str, ...]:
    return tuple(schema.by_id[i].name for i in column_ids)


def _columns(part: Partitioning, schema: Schema, faults: list[str]) -> list[Column] | None:
    """Return the columns that a part names. If they are wrong, return None and add the fault to `faults`."""
    kind = "hash" if isinstance(part, HashPartitioning) else "range"
    unknown = [name for name in part.columns if name not in schema.by_name]
    faults.extend(
        f"{kind}: the table has no column {shown(name)}"
        f"{did_you_mean(name, schema.by_name) or f'; expected some of {list(schema.by_name)}'}"
        for name in unknown
    )
    return None if unknown else [schema.by_name[name] for name in part.columns]


def _split_key(value: Any, columns: Sequence[Column], faults: list[str]) -> bytes:
    try:
        return split_key(value, columns) if isinstance(value, dict) else _encoded(value, columns)
    except Rejected as exc:
        faults.append(f"range: cannot split at {shown(value)}: {exc.args[0]}")
        return b""


def _encoded(value: Any, columns: Sequence[Column]) -> bytes:
    """The encoded key of a split value. Raises Rejected if it does not fit the columns."""
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    if len(values) != len(columns):
        raise Rejected(f"expected a value for each of {', '.join(column.name for column in columns)}")
    found = []
    for column, each in zip(columns, values):
        why = "it is None" if each is None else column.fault(each)
        if why:
            raise Rejected(why)
        found.append(column.array([each])[0].as_py())
    return encode_tuple(found, [column.arrow for column in columns])


def _split_value(key: bytes, columns: Sequence[Column]) -> Any:
    """Return the value that `_encoded` turns into this key; {"encoded": HEX} if there is none."""
    types = [column.arrow for column in columns]
    try:
        values = [python_values(pa.array([v], t))[0] for v, t in zip(decode_key(key, types), types)]
        if _encoded(values, columns) == key:
            return values[0] if len(values) == 1 else tuple(values)
    except (Corrupt, Rejected, ValueError):
        pass
    return {ENCODED: key.hex()}
