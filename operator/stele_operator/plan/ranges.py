"""Range partitions of TabletGroups: what their bounds mean, and the steps that bring a table to the ranges of
its TabletGroup. Called by rules and masters; pure.

Invariants: a range is dropped only with allowRangeDrop. Two ranges are the same only if both bounds are. A
bad bound raises only Rejected, whatever its text is: one TabletGroup must not end the pass of its cluster.
The module that encodes keys is imported only once a table has ranges, because its libraries take 50 MB.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stele.model.errors import Rejected
from stele.model.ids import ColumnId
from stele.model.ranges import (
    AddRange,
    Bounds,
    DropRange,
    RangePartition,
    RangeStep,
    of_ranges,
    overlap,
    value_of_text,
)
from stele_operator.api.group import RangeBounds, TabletGroupSpec
from stele_operator.plan.observation import Table, TableRanges

if TYPE_CHECKING:
    from stele.model.column import Column

_SAID_MAX = 40
_KEPT = 8_192
"""How many encoded bounds are kept, since each pass needs them again. To encode a thousand ranges takes 0.2
s.
"""


def range_columns(spec: TabletGroupSpec) -> tuple[str, ...]:
    """Names of the range columns; empty for a table without ranges."""
    return tuple(spec.partitioning.range.columns) if spec.partitioning.range is not None else ()


def range_faults(spec: TabletGroupSpec) -> list[str]:
    """What is wrong with the ranges of a TabletGroup; empty if nothing is. The columns must be valid."""
    if spec.partitioning.range is None:
        return []
    columns, faults = _columns(spec), []
    found: list[tuple[Bounds, str]] = []
    for given in spec.partitioning.range.ranges:
        try:
            start, end = bounds = _bounds(given, columns)
        except Rejected as exc:
            faults.append(f"partitioning.range: range {_said(given)}: {exc.args[0]}")
            continue
        if end and start >= end:
            faults.append(f"partitioning.range: range {_said(given)} is empty: it ends before it begins")
        else:
            found.append((bounds, _said(given)))
    faults += [
        f"partitioning.range: ranges {a[1]} and {b[1]} overlap"
        for a, b in itertools.pairwise(sorted(found))
        if overlap(a[0], b[0])
    ]
    return faults


def ranges_of(spec: TabletGroupSpec, ids: Mapping[str, int]) -> RangePartition | None:
    """The ranges of a new table, with the ids of its columns; None if it has no ranges.

    Raises:
        Rejected: a bound has one of the faults that `range_faults` reports.
    """
    if spec.partitioning.range is None:
        return None
    columns = _columns(spec)
    bounds = [_bounds(given, columns) for given in spec.partitioning.range.ranges]
    return of_ranges([ids[name] for name in range_columns(spec)], bounds)


def table_ranges(spec: TabletGroupSpec) -> TableRanges | None:
    """The ranges that the TabletGroup asks for its table; None if it asks for none."""
    if spec.partitioning.range is None:
        return None
    columns = _columns(spec)
    covered = sorted(_bounds(given, columns) for given in spec.partitioning.range.ranges)
    return TableRanges(range_columns(spec), tuple(covered))


def tablets_of(spec: TabletGroupSpec) -> int:
    """How many tablets a new table has: one for each combination of buckets, in each range."""
    given = spec.partitioning.range
    return math.prod((h.buckets for h in spec.partitioning.hash), start=len(given.ranges) if given else 1)


def range_steps(spec: TabletGroupSpec, table: Table) -> tuple[tuple[RangeStep, ...], tuple[str, ...]]:
    """The changes that give a table the ranges of its TabletGroup, and why others cannot be made.

    The table and the TabletGroup must have the same range columns.
    """
    if spec.partitioning.range is None or table.range is None:
        return (), ()
    columns = _columns(spec)
    wanted = [_bounds(given, columns) for given in spec.partitioning.range.ranges]
    added = [bounds for bounds in wanted if bounds not in table.range.covered]
    left = [bounds for bounds in table.range.covered if bounds not in wanted]
    if left and not spec.allowRangeDrop:
        return (), tuple(
            f"the table has a range {_shown(bounds, columns)} that the TabletGroup lacks; set allowRangeDrop to drop it "
            "with all rows, or put the range back into the TabletGroup"
            for bounds in left
        )
    return (*(DropRange(*bounds) for bounds in left), *(AddRange(*bounds) for bounds in added)), ()


def _columns(spec: TabletGroupSpec) -> tuple[Column, ...]:
    from stele.model.column import Column

    types = {c.name: c.type.replace(" ", "") for c in spec.columns}
    return tuple(Column(ColumnId(0), name, types[name]) for name in range_columns(spec))


def _bounds(given: RangeBounds, columns: tuple[Column, ...]) -> Bounds:
    return _key(given.from_, columns), _key(given.to, columns)


def _key(texts: Sequence[str] | None, columns: tuple[Column, ...]) -> bytes:
    return _encoded(tuple(texts), columns) if texts is not None else b""


@functools.lru_cache(_KEPT)
def _encoded(texts: tuple[str, ...], columns: tuple[Column, ...]) -> bytes:
    from stele.model.split_json import split_key

    if len(texts) != len(columns):
        return split_key(list(texts), columns)  # says which values it expects
    return split_key(
        [value_of_text(text, column.type) for text, column in zip(texts, columns, strict=True)], columns
    )


def _said(given: RangeBounds) -> str:
    ends = ([_cut(text) for text in end or ()] for end in (given.from_, given.to))
    return "..".join(",".join(end) for end in ends)


def _cut(text: str) -> str:
    return text if len(text) <= _SAID_MAX else f"{text[:_SAID_MAX]}..."


def _shown(bounds: Bounds, columns: Sequence[Column]) -> str:
    """A range of a table, as `stele table describe` shows it."""
    return "..".join(_shown_key(key, columns) if key else "" for key in bounds)


def _shown_key(key: bytes, columns: Sequence[Column]) -> str:
    from stele.model.split_json import split_values

    values = split_values(key, columns)
    return ",".join(map(str, values)) if isinstance(values, list) else f"0x{key.hex()}"
