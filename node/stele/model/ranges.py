"""Ranges of a table: which pieces of the key space between split keys have tablets, and how they change. Pure.

Called by partition.py, by masters for each change of ranges, and by what describes tables. Invariant: the number
of a range is never used again, so the ordinals of its tablets never change, whatever is added or dropped.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stele.model.errors import Rejected

UNCOVERED = -1
"""Stands for the number of a piece that no range covers."""
NUMBERS_MAX = 1 << 31
STEPS_MAX = 1_000
"""The most changes of ranges in one request."""

Bounds = tuple[bytes, bytes]
"""[start, end) of a range, as encoded keys; b"" means unbounded."""


@dataclass(frozen=True, slots=True)
class RangePartition:
    """Split keys cut the key space into pieces. Each piece is a range that takes rows, or is uncovered.

    `split_keys`: encoded values of `column_ids`, ascending. A split key is the first key of its piece. `numbers`: for
    each piece the number of its range, or UNCOVERED. Empty: all pieces are ranges, numbered from 0. With `numbers`,
    `first` is how many ranges the table was created with, and `next_number` the number of the next new range.
    """

    column_ids: tuple[int, ...] = ()
    split_keys: tuple[bytes, ...] = ()
    numbers: tuple[int, ...] = ()
    first: int = 0
    next_number: int = 0

    @property
    def pieces(self) -> list[Bounds]:
        """The bounds of all pieces, covered or not, ascending."""
        return list(itertools.pairwise((b"", *self.split_keys, b"")))

    @property
    def piece_numbers(self) -> Sequence[int]:
        """The number of each piece, or UNCOVERED."""
        return self.numbers or range(len(self.split_keys) + 1)

    @property
    def covered(self) -> list[tuple[bytes, bytes, int]]:
        """(start, end, number) of each range, ascending."""
        return [(*piece, n) for piece, n in zip(self.pieces, self.piece_numbers) if n != UNCOVERED]

    @property
    def ranges(self) -> int:
        """How many ranges there are."""
        return len(self.split_keys) + 1 - self.numbers.count(UNCOVERED)

    @property
    def has_gaps(self) -> bool:
        """Whether there are keys that no range covers."""
        return UNCOVERED in self.numbers

    def ordinal(self, number: int, buckets: int, bucket: int) -> int:
        """The ordinal of a tablet, by the number of its range and its hash bucket."""
        first = self.first if self.numbers else len(self.split_keys) + 1
        return bucket * first + number if number < first else number * buckets + bucket

    def faults(self) -> list[str]:
        """What is wrong with the split keys and numbers."""
        splits = self.split_keys
        if any(a >= b for a, b in itertools.pairwise(splits)) or any(not s for s in splits):
            return ["range: split keys must be ascending, each once, none empty"]
        if not self.numbers:
            return []
        used = [n for n in self.numbers if n != UNCOVERED]
        if (
            len(self.numbers) != len(splits) + 1
            or not used
            or len(set(used)) != len(used)
            or not 0 <= min(used) <= max(used) < self.next_number <= NUMBERS_MAX
            or not 0 < self.first <= self.next_number
            or any(a == b == UNCOVERED for a, b in itertools.pairwise(self.numbers))
        ):
            return [
                "range: each covered piece needs a number of its own, two uncovered pieces may not be adjacent, and "
                "at least one must be covered"
            ]
        return []


@dataclass(frozen=True, slots=True)
class AddRange:
    """Add an empty range [start, end), which must not overlap another one; b"" means unbounded."""

    start: bytes = b""
    end: bytes = b""


@dataclass(frozen=True, slots=True)
class DropRange:
    """Drop the range with exactly these bounds, with its rows."""

    start: bytes = b""
    end: bytes = b""


RangeStep = AddRange | DropRange
_INTEGER = re.compile(r"-?[0-9]{1,20}\Z")
_TRUTH = {"true": True, "false": False}


def value_of_text(given: Any, column_type: str) -> Any:
    """Convert a bound given as text to an int or a bool, if the column has such values. Dates, decimals and
    others stay text. A bound that is not text is returned unchanged."""
    if not isinstance(given, str):
        return given
    if column_type == "bool":
        return _TRUTH.get(given, given)
    return int(given) if column_type.startswith("int") and _INTEGER.match(given) else given


def shown_bounds(start: bytes, end: bytes) -> str:
    """A range as text, by its encoded keys: for programs without the schema."""
    return f"[{start.hex() or '-∞'}, {end.hex() or '∞'})"


def of_ranges(column_ids: Iterable[int], ranges: Iterable[Bounds]) -> RangePartition:
    """The ranges of a new table.

    Raises:
        Rejected: a range is empty or overlaps another, or there are no ranges. Lists all faults.
    """
    given = sorted(ranges)
    faults = [f for start, end in given if (f := _empty(start, end))]
    faults += [
        f"ranges {shown_bounds(*a)} and {shown_bounds(*b)} overlap"
        for a, b in itertools.pairwise(given)
        if overlap(a, b)
    ]
    if faults or not given:
        raise Rejected("range: " + ("; ".join(faults) or "there are no ranges; give at least one"))
    made = _made(column_ids, [(*bounds, n) for n, bounds in enumerate(given)], len(given), len(given))
    return made if made.has_gaps else replace(made, numbers=(), first=0, next_number=0)


def with_steps(
    part: RangePartition,
    steps: Sequence[RangeStep],
    show: Callable[[bytes, bytes], str] = shown_bounds,
) -> RangePartition:
    """Return the ranges after these changes. Drops come first, so that a range can be dropped and added again in
    one request. `show` gives a range as text for messages.

    Raises:
        Rejected: lists every change that cannot be made.
    """
    if not 0 < len(steps) <= STEPS_MAX:
        raise Rejected(f"{len(steps)} changes of ranges; expected 1 to {STEPS_MAX}")
    faults: list[str] = []
    covered = {(start, end): number for start, end, number in part.covered}
    first = part.first if part.numbers else part.ranges
    next_number = part.next_number if part.numbers else part.ranges
    for step in steps:
        if isinstance(step, DropRange) and covered.pop((step.start, step.end), None) is None:
            near = [show(*b) for b in covered if overlap(b, (step.start, step.end))][:3]
            hint = f"; there is {', '.join(near)}" if near else ""
            faults.append(f"there is no range {show(step.start, step.end)}{hint}")
    for step in steps:
        if not isinstance(step, AddRange):
            continue
        bounds = (step.start, step.end)
        near = [show(*b) for b in covered if overlap(b, bounds)][:3]
        if fault := _empty(*bounds, show) or (
            f"range {show(*bounds)}: overlaps {', '.join(near)}" if near else ""
        ):
            faults.append(fault)
            continue
        covered[bounds] = next_number
        next_number += 1
    if next_number > NUMBERS_MAX:
        faults.append(
            f"the table has had {NUMBERS_MAX} ranges in all, the most allowed, so none can be added; create a new table"
        )
    if not faults and not covered:
        faults.append("no range would be left; add another one first, or delete the table")
    if faults:
        raise Rejected("; ".join(faults))
    return _made(part.column_ids, sorted((*b, n) for b, n in covered.items()), first, next_number)


def overlap(a: Bounds, b: Bounds) -> bool:
    """Whether two ranges have a key in common."""
    return (not b[1] or a[0] < b[1]) and (not a[1] or b[0] < a[1])


def _empty(start: bytes, end: bytes, show: Callable[[bytes, bytes], str] = shown_bounds) -> str:
    return f"range {show(start, end)} is empty: it ends before it begins" if end and start >= end else ""


def _made(
    column_ids: Iterable[int], covered: Sequence[tuple[bytes, bytes, int]], first: int, next_number: int
) -> RangePartition:
    """The pieces for ranges that ascend and do not overlap."""
    splits: list[bytes] = []
    numbers: list[int] = []
    at = b""
    for start, end, number in covered:
        if start != at:
            numbers.append(UNCOVERED)
            splits.append(start)
        numbers.append(number)
        if end:
            splits.append(end)
        at = end
    if at:
        numbers.append(UNCOVERED)
    return RangePartition(tuple(column_ids), tuple(splits), tuple(numbers), first, next_number)
