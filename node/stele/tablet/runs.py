"""Runs: rows with their keys, timestamps and delete marks, and how several become one. Used by scans, flush and the
compaction worker alike, so that they cannot disagree. Opens no files.

Invariant: a sorted run has its keys ascending, and the versions of one key newest first.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stele.model import keys as key_bytes

U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.int64]


@dataclass(slots=True)
class Run:
    """Rows as columns. `deleted` None: none is. `batch` may hold a projection; it has a column count of its own."""

    batch: pa.RecordBatch
    keys: pa.BinaryArray
    times: U64
    deleted: Mask | None

    @property
    def rows(self) -> int:
        """How many versions."""
        return len(self.keys)

    def slice(self, start: int, length: int) -> Run:
        """Rows start..start+length, without a copy."""
        deleted = None if self.deleted is None else self.deleted[start : start + length]
        return Run(
            self.batch.slice(start, length),
            self.keys.slice(start, length),
            self.times[start : start + length],
            deleted,
        )

    def between(self, lower: bytes, upper: bytes) -> Run:
        """Of a sorted run, the rows with keys in [lower, upper); b"" is unbounded."""
        keys = KeyList(self.keys)
        start = bisect.bisect_left(keys, lower) if lower else 0
        end = bisect.bisect_left(keys, upper) if upper else len(keys)
        return self if start == 0 and end == len(keys) else self.slice(start, max(0, end - start))

    def take(self, positions: Positions) -> Run:
        """These rows, in this order."""
        indices = pa.array(positions)
        deleted = None if self.deleted is None else self.deleted[positions]
        return Run(take_batch(self.batch, indices), self.keys.take(indices), self.times[positions], deleted)


def take_batch(batch: pa.RecordBatch, indices: pa.Array) -> pa.RecordBatch:
    """Rows of a batch, also of one without columns."""
    if batch.num_columns == 0:
        return batch
    return batch.take(indices)


def concat(runs: Sequence[Run]) -> Run:
    """One run after the other, unsorted."""
    if len(runs) == 1:
        return runs[0]
    deleted = None
    if any(r.deleted is not None for r in runs):
        deleted = np.concatenate([np.zeros(r.rows, bool) if r.deleted is None else r.deleted for r in runs])
    return Run(
        concat_batches([r.batch for r in runs]),
        pa.concat_arrays([r.keys for r in runs]),
        np.concatenate([r.times for r in runs]),
        deleted,
    )


def concat_batches(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of all rows."""
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    arrays = [pa.concat_arrays([b.column(i) for b in batches]) for i in range(first.num_columns)]
    return pa.RecordBatch.from_arrays(arrays, schema=first.schema)


def _in_order(runs: Sequence[Run]) -> tuple[Run, Positions, Mask]:
    """(the runs concatenated, their order by key and newest first, whether a row in that order repeats the key)."""
    whole = concat(runs)
    if len(runs) == 1:
        return whole, np.arange(whole.rows), key_bytes.same_as_before(whole.keys)
    order = key_bytes.sort_order(whole.keys)
    return whole, order, key_bytes.same_as_before(whole.keys.take(pa.array(order)))


def _deleted_at(deleted: Mask | None, positions: Positions) -> Mask:
    return np.zeros(len(positions), bool) if deleted is None else deleted[positions]


def visible(runs: Sequence[Run], snapshot: int) -> tuple[Run, Positions]:
    """(the runs concatenated, positions in it of the newest live version of each key at or below `snapshot`, by key).

    `runs` are sorted and come newest first.
    """
    whole, order, same = _in_order(runs)
    in_time = whole.times[order] <= snapshot
    if in_time.all():
        chosen = order[~same]
    else:
        group = np.cumsum(~same)
        at = np.flatnonzero(in_time)
        first = np.ones(len(at), bool)
        first[1:] = group[at[1:]] != group[at[:-1]]
        chosen = order[at[first]]
    if whole.deleted is not None:
        chosen = chosen[~whole.deleted[chosen]]
    return whole, chosen


def compacted(runs: Sequence[Run], mark: int, *, bottom: bool) -> Run:
    """The runs as one sorted run without the versions that no snapshot at or above `mark` can see.

    `runs` are sorted and come newest first. `bottom`: nothing older lies below, so a delete at or below `mark` goes, too.
    """
    whole, order, same = _in_order(runs)
    times = whole.times[order]
    old = times <= mark
    keep = np.ones(len(order), bool)
    if len(order) > 1:
        # The first version at or below the mark is what a snapshot at the mark sees; those after it are history.
        keep[1:] &= ~(same[1:] & old[:-1])
        # Rows of one entry share a timestamp; only the last one written, which stands first, can ever be seen.
        keep[1:] &= ~(same[1:] & (times[1:] == times[:-1]))
    if bottom and whole.deleted is not None:
        keep &= ~(old & _deleted_at(whole.deleted, order))
    return whole.take(order[keep])


def sorted_newest_first(run: Run) -> Run:
    """A run whose rows stand in the order they were applied, as a sorted run."""
    backwards = np.arange(run.rows - 1, -1, -1)
    order = key_bytes.sort_order(run.keys.take(pa.array(backwards)))
    return run.take(backwards[order])


class KeyList:
    """A binary array as a sequence of bytes, for `bisect`."""

    __slots__ = ("_keys",)

    def __init__(self, keys: pa.BinaryArray) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, at: int) -> Any:
        return self._keys[at].as_py()


def lower_bound(haystack: pa.BinaryArray, needles: pa.BinaryArray) -> Positions:
    """For each needle the first position in the sorted haystack that is not below it. Vectorised binary search, but for
    long keys."""
    low = np.zeros(len(needles), np.int64)
    high = np.full(len(needles), len(haystack), np.int64)
    if len(haystack) == 0 or len(needles) == 0:
        return low
    width = (max(key_bytes.longest(haystack), key_bytes.longest(needles)) + 7) // 8
    if width > key_bytes.WORDS_MAX:
        listed = KeyList(haystack)
        return np.array([bisect.bisect_left(listed, needle) for needle in needles.to_pylist()], np.int64)
    hay_words, hay_lengths = key_bytes.words(haystack, width)
    hay_big = [w.byteswap() for w in hay_words]
    wanted_words, wanted_lengths = key_bytes.words(needles, width)
    wanted_big = [w.byteswap() for w in wanted_words]
    while True:
        open_ = low < high
        if not open_.any():
            return low
        middle = np.minimum((low + high) // 2, len(haystack) - 1)
        below = hay_lengths[middle] < wanted_lengths
        for hay, wanted in zip(reversed(hay_big), reversed(wanted_big)):
            found = np.take(hay, middle)
            below = (found < wanted) | ((found == wanted) & below)
        low = np.where(open_ & below, middle + 1, low)
        high = np.where(open_ & ~below, middle, high)
