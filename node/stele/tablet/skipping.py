"""Which groups of rows a scan need not read, judged by its predicates. Called by view.py; opens no files.

A group without wanted rows may hide older versions that are wanted. So it is skipped only if no older source has
a group that can hold wanted rows (`needed`).

Invariant: in a skipped group some predicate is true for no row, in any version.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from stele.model.column import Column
from stele.model.predicate import Predicate
from stele.model.schema import Schema
from stele.tablet.groupbounds import Bounds, ordered
from stele.tablet.sorted_runs import Run
from stele.tablet.sources import Source

_MayHold = Callable[[Bounds, int], bool]


@dataclass(frozen=True, slots=True)
class _Test:
    """One predicate: its column, and whether a group with these bounds can hold a row for which it is true."""

    column: Column
    may_hold: _MayHold


class Wanted:
    """Decides which groups can hold wanted rows. For one scan only, because it remembers the bounds of its sources."""

    def __init__(self, predicates: Iterable[Predicate], schema: Schema) -> None:
        """Raises Rejected for a predicate that does not fit the schema.

        Predicates on the first key column are left out: the ranges of keys say the same (stele.model.key_bounds)."""
        first = schema.key_column_ids[0]
        self._tests = [
            _Test(schema.by_id[p.column_id], _may_hold(p, schema)) for p in predicates if p.column_id != first
        ]
        self._known: dict[Hashable, list[tuple[_MayHold, Bounds]]] = {}

    def __call__(self, source: Source, group: int) -> bool:
        """Whether a row of this group can be wanted.

        Raises:
            Corrupt: the file is damaged.
        """
        if not self._tests:
            return True
        known = self._known.get(source.name)
        if known is None:
            found = [(test.may_hold, source.bounds(test.column)) for test in self._tests]
            known = [(may_hold, bounds) for may_hold, bounds in found if bounds is not None]
            self._known[source.name] = known
        return all(may_hold(bounds, group) for may_hold, bounds in known)


def _may_hold(predicate: Predicate, schema: Schema) -> _MayHold:
    values = sorted(ordered(predicate.array(schema)))
    match predicate.op:
        case "is_null":
            return Bounds.has_null
        case "is_not_null" | "!=":
            return Bounds.has_value
        case _ if not values:
            return lambda bounds, group: False  # nothing is in an empty list, and nothing compares with NaN
        case "<":
            return lambda bounds, group: _reaches(bounds, group, None, values[0])
        case "<=":
            return lambda bounds, group: _reaches(bounds, group, None, values[0] + b"\x00")
        case ">":
            return lambda bounds, group: _reaches(bounds, group, values[0] + b"\x00", None)
        case ">=":
            return lambda bounds, group: _reaches(bounds, group, values[0], None)
        case _:
            return lambda bounds, group: _has_one(bounds, group, values)


def _reaches(bounds: Bounds, group: int, lowest: bytes | None, below: bytes | None) -> bool:
    """Whether the group can hold a value in [lowest, below). None: no bound on that side."""
    lower, upper = bounds.ends(group)
    return (
        bounds.has_value(group)
        and (lowest is None or upper is None or upper >= lowest)
        and (below is None or lower is None or lower < below)
    )


def _has_one(bounds: Bounds, group: int, values: Sequence[bytes]) -> bool:
    """Whether one of these values, which ascend, can be in the group."""
    lower, upper = bounds.ends(group)
    at = 0 if lower is None else bisect.bisect_left(values, lower)
    return bounds.has_value(group) and at < len(values) and (upper is None or values[at] <= upper)


Needed = list[tuple[Source, list[tuple[int, bool]]]]
"""The groups to read of each source, newest source first. For each group: whether it can hold wanted rows."""


def needed(sources: Sequence[Source], low: bytes, high: bytes, wanted: Wanted) -> Needed:
    """Return what a merge of these overlapping sources must read for keys in [low, high). Newest sources come first.

    A group without a wanted row may hide older versions. So it is needed if an older source has a group with one."""
    found: Needed = []
    below = False
    for source in reversed(sources):
        groups = [(group, wanted(source, group)) for group in source.groups_between(low, high)]
        found.append((source, [each for each in groups if each[1] or below]))
        below = below or any(can for _, can in groups)
    return found[::-1]


def runs_of(
    source: Source, groups: Iterable[tuple[int, bool]], columns: tuple[Column, ...], schema: pa.Schema
) -> Iterator[Run]:
    """A source's groups from `needed`, as runs. The rows of a group without a wanted row become deletes, which hide
    older versions."""
    for group, shown in groups:
        yield source.run(group, columns, schema) if shown else _hiding(source, group, schema)


def _hiding(source: Source, group: int, schema: pa.Schema) -> Run:
    """A group without a wanted row, with all of its versions as deletes. Its columns are not read."""
    keys = source.keys(group)
    arrays = [pa.nulls(len(keys), field.type) for field in schema]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    return Run(batch, keys, source.times(group), np.ones(len(keys), bool))
