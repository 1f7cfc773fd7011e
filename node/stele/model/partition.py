"""Which tablet a row belongs to. Shared by client, master and Spark; knows no locations.

A table's partitions are the cross product of its hash buckets and its ranges. They are numbered in nested loops: the
first hash is the outermost loop, the range the innermost. That number is the tablet's ordinal. Tablets of ranges that
were added later follow, range after range. A row outside all ranges has the ordinal OUTSIDE.

Invariant: the ordinal of a row depends only on its bytes and the partition schema (stele hash v1, golden
vectors).
"""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stele.model import keys
from stele.model.column import shown
from stele.model.errors import Rejected
from stele.model.hashing import hash_binary, hash_bytes, hash_ints, hash_rows
from stele.model.jsons import parse_json
from stele.model.key_bounds import Values, domain, key_ranges, keys_begin_with, products, within
from stele.model.predicate import Predicate
from stele.model.ranges import UNCOVERED
from stele.model.ranges import RangePartition as RangePartition
from stele.model.schema import Schema

OUTSIDE = -1
"""Stands for the ordinal of rows that no range covers."""
TABLETS_MAX = 100_000
_FEW_ROWS = 32
_FEW_FIXED_ROWS = 8
"""Up to _FEW_ROWS rows are hashed one by one, because numpy calls cost more. If all columns have a fixed width, up to
_FEW_FIXED_ROWS are."""
_COMBINATIONS_MAX = 256


@dataclass(frozen=True, slots=True)
class HashPartition:
    """Rows go to `hash(columns, seed) mod buckets`."""

    column_ids: tuple[int, ...] = ()
    buckets: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Partition:
    """What one tablet holds: a bucket per hash, and a range [start, end); b"" means unbounded."""

    hash_buckets: tuple[int, ...] = ()
    range_start: bytes = b""
    range_end: bytes = b""

    def __str__(self) -> str:
        parts = [f"hash {b}" for b in self.hash_buckets]
        if self.range_start or self.range_end:
            parts.append(f"range [{self.range_start.hex() or '-∞'}, {self.range_end.hex() or '∞'})")
        return ", ".join(parts) or "all rows"


@dataclass(frozen=True, slots=True)
class PartitionSchema:
    """How a table is split, by column ids. Both parts empty: one tablet. `partitioning.by_ids` makes it from
    names."""

    hash: tuple[HashPartition, ...] = ()
    range: RangePartition | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.hash, (tuple, list)) or not all(
            isinstance(h, HashPartition) for h in self.hash
        ):
            raise Rejected(
                f"hash {shown(self.hash)}: expected a tuple of HashPartition, like (HashPartition((0,), 4),)"
            )
        if not isinstance(self.range, (RangePartition, type(None))):
            raise Rejected(f"range {shown(self.range)}: expected a RangePartition")

    @property
    def ranges(self) -> int:
        """The number of ranges."""
        return 1 if self.range is None else self.range.ranges

    @property
    def buckets(self) -> int:
        """The number of combinations of hash buckets."""
        return math.prod(part.buckets for part in self.hash)

    @property
    def tablets(self) -> int:
        """The number of tablets."""
        return self.ranges * self.buckets

    @property
    def has_gaps(self) -> bool:
        """Whether there are rows that no tablet takes."""
        return self.range is not None and self.range.has_gaps

    def faults(self, schema: Schema) -> list[str]:
        """All faults of this partitioning for a table of `schema`, as messages; empty if there are none."""
        found: list[str] = []
        seen: set[int] = set()
        for part in self.hash:
            if no_ids := _no_ids("hash", part.column_ids):
                found.append(no_ids)
                continue
            found.extend(_column_faults("hash", part.column_ids, schema))
            if part.buckets < 2:
                found.append(
                    f"hash of {_named(part.column_ids, schema)}: it has {shown(part.buckets)} buckets; "
                    "expected 2 or more"
                )
            if not 0 <= part.seed < 1 << 32:
                found.append(
                    f"hash of {_named(part.column_ids, schema)}: the seed is {shown(part.seed)}; "
                    "expected a number of 32 bits"
                )
            twice = seen.intersection(part.column_ids)
            if twice:
                found.append(
                    f"hash: columns {_named(sorted(twice), schema)} are in two hashes; expected each column in one"
                )
            seen.update(part.column_ids)
        if self.range is not None:
            no_ids = _no_ids("range", self.range.column_ids)
            found.extend([no_ids] if no_ids else _column_faults("range", self.range.column_ids, schema))
            found.extend(self.range.faults())
        if self.tablets > TABLETS_MAX:
            found.append(
                f"the table would have {shown(self.tablets)} tablets; at most {TABLETS_MAX} are allowed"
            )
        return found

    def to_json(self) -> str:
        """JSON text. Equal values give equal text."""
        range_: list[Any] | None = None
        if (part := self.range) is not None:
            range_ = [list(part.column_ids), [s.hex() for s in part.split_keys]]
            range_ += [list(part.numbers), part.first, part.next_number] if part.numbers else []
        hashes = [[list(h.column_ids), h.buckets, h.seed] for h in self.hash]
        return json.dumps({"hash": hashes, "range": range_}, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> PartitionSchema:
        """The inverse of `to_json`.

        Raises:
            Rejected: the text is not a partition schema.
        """
        try:
            raw = parse_json(text)
            hashes = tuple(HashPartition(tuple(c), int(b), int(s)) for c, b, s in raw["hash"])
            range_ = raw["range"]
            if range_ is None:
                return PartitionSchema(hashes)
            splits = tuple(bytes.fromhex(s) for s in range_[1])
            numbers, first, next_number = range_[2:] or ((), 0, 0)
            return PartitionSchema(
                hashes, RangePartition(tuple(range_[0]), splits, tuple(numbers), int(first), int(next_number))
            )
        except (ValueError, TypeError, KeyError, IndexError) as exc:
            raise Rejected(f"partitioning: {exc!r}; the text is not a partition schema") from exc


def _no_ids(kind: str, column_ids: object) -> str:
    """The message for a value that is not a tuple of column ids; it is often a tuple of names."""
    if isinstance(column_ids, (tuple, list)) and all(hasattr(one, "__index__") for one in column_ids):
        return ""
    return (
        f"{kind}: columns {shown(column_ids)}: expected column ids, like (0, 1); "
        f"for names use stele.{kind}(...)"
    )


def _named(column_ids: Sequence[int], schema: Schema) -> list[str]:
    return [schema.by_id[i].name if i in schema.by_id else shown(i) for i in column_ids]


def _column_faults(kind: str, column_ids: Sequence[int], schema: Schema) -> list[str]:
    if not column_ids:
        return [f"{kind}: it names no columns"]
    outside = [i for i in column_ids if not schema.is_key(i)]
    names = _named(outside, schema)
    found = (
        [
            f"{kind}: {names} are not key columns; "
            "only key columns are allowed, because a row never changes its tablet"
        ]
        if outside
        else []
    )
    if len(set(column_ids)) != len(column_ids):
        found.append(f"{kind}: it names a column twice")
    return found


def partitions(partitioning: PartitionSchema) -> list[Partition]:
    """All partitions, in the order of their ordinals."""
    return [part for _, part in numbered(partitioning)]


def numbered(partitioning: PartitionSchema) -> list[tuple[int, Partition]]:
    """All partitions with their ordinals, ascending."""
    ranged = partitioning.range or RangePartition()
    buckets = itertools.product(*(range(h.buckets) for h in partitioning.hash))
    count = partitioning.buckets
    found = [
        (ranged.ordinal(number, count, at), Partition(chosen, start, end))
        for at, chosen in enumerate(buckets)
        for start, end, number in ranged.covered
    ]
    return sorted(found, key=lambda each: each[0])


def dropped_ordinals(before: PartitionSchema, now: PartitionSchema) -> frozenset[int]:
    """The ordinals of partitions that are in `before`, but not in `now`."""
    there = {ordinal for ordinal, _ in numbered(now)}
    return frozenset(ordinal for ordinal, _ in numbered(before) if ordinal not in there)


def assign(batch: pa.RecordBatch, schema: Schema, partitioning: PartitionSchema) -> npt.NDArray[np.int64]:
    """The tablet ordinal of each row, or OUTSIDE.

    Raises:
        Rejected: a partition column is missing or has nulls.
    """
    ordinals = np.zeros(len(batch), np.int64)
    for part in partitioning.hash:
        ordinals = ordinals * part.buckets + _buckets(batch, schema, part)
    ranged = partitioning.range
    if ranged is None:
        return ordinals
    encoded = keys.encode_columns(batch, schema, ranged.column_ids)
    pieces = _range_of(encoded, ranged.split_keys)
    if not ranged.numbers:
        return ordinals * partitioning.ranges + pieces
    numbers = np.array(ranged.numbers, np.int64)[pieces]
    later = numbers * partitioning.buckets + ordinals
    found = np.where(numbers < ranged.first, ordinals * ranged.first + numbers, later)
    return np.where(numbers == UNCOVERED, OUTSIDE, found)


_WIDTHS = {"int8": 1, "int16": 2, "int32": 4, "int64": 8, "string": 0}
"""The bytes of integer types. Text has varying lengths."""


def assign_few(
    columns: Mapping[int, Sequence[Any]], schema: Schema, partitioning: PartitionSchema
) -> list[int]:
    """As `assign`, for some dozens of rows given as Python values by column id. The values are integers and text
    that fit their columns."""

    def given(column_ids: Sequence[int]) -> list[tuple[int, Sequence[Any]]]:
        return [(_WIDTHS[schema.by_id[each].type], columns[each]) for each in column_ids]

    found = [0] * len(next(iter(columns.values())))
    for part in partitioning.hash:
        parts, buckets = given(part.column_ids), part.buckets
        width, values = parts[0]
        if width and len(parts) == 1:
            hashes = hash_ints(values, width, part.seed)
        else:
            hashes = [hash_bytes(key, part.seed) for key in keys.encode_values(parts)]
        found = [ordinal * buckets + h % buckets for ordinal, h in zip(found, hashes)]
    ranged = partitioning.range
    if ranged is not None:
        splits, numbers = ranged.split_keys, ranged.numbers
        pieces = [bisect_right(splits, key) for key in keys.encode_values(given(ranged.column_ids))]
        if not numbers:
            return [ordinal * (len(splits) + 1) + piece for ordinal, piece in zip(found, pieces)]
        buckets = partitioning.buckets
        found = [
            OUTSIDE if numbers[piece] == UNCOVERED else ranged.ordinal(numbers[piece], buckets, bucket)
            for bucket, piece in zip(found, pieces)
        ]
    return found


def _buckets(batch: pa.RecordBatch, schema: Schema, part: HashPartition) -> npt.NDArray[np.int64]:
    if len(batch) > _FEW_FIXED_ROWS:
        fixed = keys.fixed_rows(batch, schema, part.column_ids)
        if fixed is not None:
            return (hash_rows(fixed, part.seed) % np.uint64(part.buckets)).astype(np.int64)
    if len(batch) > _FEW_ROWS:
        hashes = hash_binary(keys.encode_columns(batch, schema, part.column_ids), part.seed)
        return (hashes % np.uint64(part.buckets)).astype(np.int64)
    listed = keys.column_list(batch, schema, part.column_ids)
    return np.array([hash_bytes(key, part.seed) % part.buckets for key in listed], np.int64)


def _range_of(encoded: pa.BinaryArray, splits: Sequence[bytes]) -> npt.NDArray[np.int64]:
    if not splits:
        return np.zeros(len(encoded), np.int64)
    # Sort splits and keys together, each split before equal keys. The splits before a key are those at or
    # below it.
    order = keys.sort_order(pa.concat_arrays([pa.array(splits, pa.binary()), encoded]))
    places = np.empty(len(order), np.int64)
    places[order] = np.cumsum(order < len(splits))
    return places[len(splits) :]


def rows_by_tablet(
    ordinals: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], list[tuple[int, int, int]]]:
    """Return (order, [(ordinal, start, end)]). The rows `order[start:end]` belong to the tablet `ordinal`.

    Ordinals ascend. Rows of one tablet keep their order."""
    order = ordinals.argsort(kind="stable")
    if not len(order):
        return order, []
    ordered = ordinals[order]
    ends = ((ordered[1:] != ordered[:-1]).nonzero()[0] + 1).tolist()
    starts = [0, *ends]
    return order, list(zip(ordered[starts].tolist(), starts, [*ends, len(order)]))


def prune(
    partitioning: PartitionSchema,
    schema: Schema,
    predicates: Sequence[Predicate],
    lower: bytes = b"",
    upper: bytes = b"",
) -> list[int]:
    """Return the ordinals of the tablets that may hold a row for which all predicates are true, ascending.

    `lower`, `upper`: encoded keys; only rows of [lower, upper) are wanted, b"" means unbounded. The result may
    include tablets without such a row, but never omits one with such a row.

    A hash excludes tablets only if the predicates leave few values for each of its columns. A range does so if
    they have = or "in" on its first columns, or a comparison on the column after these.
    """
    if not within(key_ranges(schema.key_column_ids, schema, predicates), lower, upper):
        return []
    allowed = [_hash_buckets(part, schema, predicates) for part in partitioning.hash]
    ranged, buckets = partitioning.range or RangePartition(), partitioning.buckets
    pieces = _pieces(ranged, schema, predicates, lower, upper)
    numbers = [n for piece in pieces if (n := ranged.piece_numbers[piece]) != UNCOVERED]
    found = []
    for chosen in itertools.product(*allowed):
        bucket = 0
        for part, place in zip(partitioning.hash, chosen):
            bucket = bucket * part.buckets + place
        found += [ranged.ordinal(number, buckets, bucket) for number in numbers]
    return sorted(found)


def may_be_outside(
    partitioning: PartitionSchema,
    schema: Schema,
    predicates: Sequence[Predicate],
    lower: bytes = b"",
    upper: bytes = b"",
) -> bool:
    """Whether a row that satisfies all predicates may lie outside all ranges."""
    ranged = partitioning.range
    if ranged is None or not ranged.has_gaps:
        return False
    return any(ranged.numbers[p] == UNCOVERED for p in _pieces(ranged, schema, predicates, lower, upper))


def _hash_buckets(part: HashPartition, schema: Schema, predicates: Sequence[Predicate]) -> Sequence[int]:
    columns = [schema.by_id[i] for i in part.column_ids]
    domains = [d for c in columns if isinstance(d := domain(c, schema, predicates), Values)]
    encoded = products(columns, domains, _COMBINATIONS_MAX) if len(domains) == len(columns) else None
    if encoded is None:
        return range(part.buckets)
    hashes = hash_binary(pa.array(encoded, pa.binary()), part.seed)
    return sorted({int(b) for b in hashes % np.uint64(part.buckets)})


def _pieces(
    ranged: RangePartition, schema: Schema, predicates: Sequence[Predicate], lower: bytes, upper: bytes
) -> list[int]:
    """The pieces between split keys that may hold a wanted row, ascending."""
    splits, column_ids = ranged.split_keys, ranged.column_ids
    if not splits:
        return [0]
    found = key_ranges(column_ids, schema, predicates)
    if keys_begin_with(column_ids, schema):
        found = within(found, lower, upper)
    wanted: set[int] = set()
    for start, end in found:
        wanted.update(
            range(bisect_right(splits, start), (bisect_left(splits, end) if end else len(splits)) + 1)
        )
    return sorted(wanted)
