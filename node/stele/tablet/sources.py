"""What a scan reads from: column files and memtables behind one small protocol.

Invariant: the content of a source's group never changes.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import pyarrow as pa

from stele.model.column import Column
from stele.model.key_bounds import KeyRange
from stele.model.schema import Schema
from stele.tablet.groupbounds import Bounds
from stele.tablet.order import SortedRows
from stele.tablet.projection import projected
from stele.tablet.sorted_runs import U64, Mask, Run

GROUPS_PER_PIECE = 4


class Source(Protocol):
    """Sorted row versions in groups. All versions of a key are in one group."""

    @property
    def name(self) -> Hashable:
        """A name for exactly these rows. It is never used for other rows."""

    @property
    def first_keys(self) -> Sequence[bytes]:
        """The lowest key of each group."""

    @property
    def last_key(self) -> bytes:
        """The highest key."""

    @property
    def max_time(self) -> int:
        """The newest version's hybrid time."""

    def groups_between(self, lower: bytes, upper: bytes) -> range:
        """Groups that may hold keys in [lower, upper); b"" is unbounded."""

    def span(self, group: int) -> tuple[int, int]:
        """Hybrid times between which all versions of a group lie."""

    def times(self, group: int) -> U64:
        """The hybrid times of a group's rows."""

    def keys(self, group: int) -> pa.BinaryArray:
        """A group's keys."""

    def deleted(self, group: int) -> Mask | None:
        """A group's delete marks; None if it has none."""

    def bounds(self, column: Column) -> Bounds | None:
        """Return the bounds and nulls of a column, group by group; None if they are not known."""

    def batch(self, group: int, columns: tuple[Column, ...], schema: pa.Schema) -> pa.RecordBatch:
        """The given columns of a group."""

    def run(self, group: int, columns: tuple[Column, ...], schema: pa.Schema) -> Run:
        """A group as a sorted run."""


class MemorySource:
    """Rows of a memtable that were sorted together."""

    def __init__(self, rows: SortedRows, serial: int, schema: Schema) -> None:
        """`serial`, `schema`: the serial number and the schema of the memtable."""
        self._rows = rows
        self._schema = schema
        self.name: Hashable = (serial, rows.start, rows.end)
        self.first_keys = rows.first_keys
        self.last_key = rows.last_key
        self.max_time = rows.max_time

    def groups_between(self, lower: bytes, upper: bytes) -> range:
        """See Source."""
        if lower and lower > self.last_key:
            return range(0)
        start = max(0, bisect.bisect_right(self.first_keys, lower) - 1) if lower else 0
        end = bisect.bisect_left(self.first_keys, upper) if upper else len(self.first_keys)
        return range(start, end)

    def _group(self, group: int) -> Run:
        start, end = self._rows.cuts[group : group + 2]
        return self._rows.run.slice(start, end - start)

    def span(self, group: int) -> tuple[int, int]:
        """See Source."""
        return 0, self.max_time

    def times(self, group: int) -> U64:
        """See Source."""
        return self._group(group).times

    def keys(self, group: int) -> pa.BinaryArray:
        """See Source."""
        return self._group(group).keys

    def deleted(self, group: int) -> Mask | None:
        """See Source."""
        return self._group(group).deleted

    def bounds(self, column: Column) -> Bounds | None:
        """See Source."""
        return None

    def batch(self, group: int, columns: tuple[Column, ...], schema: pa.Schema) -> pa.RecordBatch:
        """See Source."""
        return self.run(group, columns, schema).batch

    def run(self, group: int, columns: tuple[Column, ...], schema: pa.Schema) -> Run:
        """See Source."""
        run = self._group(group)
        batch = projected(run.batch, self._schema, columns, schema)
        return Run(batch, run.keys, run.times, run.deleted)


def clusters(sources: Sequence[Source], lower: bytes, upper: bytes) -> list[list[Source]]:
    """Sources with keys in [lower, upper), in clusters of sources that overlap, in key order.

    No two clusters overlap. Within a cluster the sources stay newest first."""
    wanted = [(at, s) for at, s in enumerate(sources) if len(s.groups_between(lower, upper))]
    wanted.sort(key=lambda item: item[1].first_keys[0])
    found: list[list[tuple[int, Source]]] = []
    end = b""
    for at, source in wanted:
        if found and source.first_keys[0] <= end:
            found[-1].append((at, source))
            end = max(end, source.last_key)
        else:
            found.append([(at, source)])
            end = source.last_key
    return [[source for _, source in sorted(cluster, key=lambda item: item[0])] for cluster in found]


def pieces(sources: Sequence[Source], lower: bytes, upper: bytes) -> list[tuple[bytes, bytes]]:
    """Cut [lower, upper) into key ranges of a few groups each, so that a merge needs bounded memory."""
    begins = sorted({s.first_keys[g] for s in sources for g in s.groups_between(lower, upper)})
    cuts = [key for key in begins[GROUPS_PER_PIECE::GROUPS_PER_PIECE] if key > lower]
    return list(zip([lower, *cuts], [*cuts, upper]))


def reads(sources: Sequence[Source], ranges: Sequence[KeyRange]) -> list[KeyRange]:
    """Return those of these ascending ranges in which the sources have groups.

    Neighbouring ranges are joined if that adds no groups. So a group with keys of both is read once."""
    found: list[tuple[KeyRange, int]] = []
    for lower, upper in ranges:
        count = _groups(sources, lower, upper)
        if not count:
            continue
        if found:
            (start, _), before = found[-1]
            joint = _groups(sources, start, upper)
            if joint <= before + count:
                found[-1] = (start, upper), joint
                continue
        found.append(((lower, upper), count))
    return [each for each, _ in found]


def mostly(
    sources: Sequence[Source], ranges: Sequence[KeyRange], may_hold: Callable[[Source, int], bool]
) -> bool:
    """Whether at least half of all groups of these sources are in the ranges and can hold a wanted row."""
    wanted = sum(
        may_hold(source, group)
        for lower, upper in ranges
        for source in sources
        for group in source.groups_between(lower, upper)
    )
    return 2 * wanted >= sum(len(source.first_keys) for source in sources)


def _groups(sources: Sequence[Source], lower: bytes, upper: bytes) -> int:
    return sum(len(source.groups_between(lower, upper)) for source in sources)
