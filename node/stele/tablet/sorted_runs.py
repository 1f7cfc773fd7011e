"""Runs: rows with their keys, timestamps and delete marks, and how to merge them. Opens no files.

Scans, flush and the compaction worker all use this, so they cannot disagree. Invariant: a sorted run has its
keys ascending, and the versions of one key newest first.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stele.model import keys as key_bytes

U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.int64]

RUN_BYTES_MAX = 512 << 20
"""The most bytes of a run that a merge makes, plus one row. A run is held in memory, and an Arrow array holds
at most 2 GiB."""
_FEW_BYTES = 16 << 20
"""Runs of up to this many bytes in total are joined whole. Of larger ones only the wanted rows are copied."""


@dataclass(slots=True)
class Run:
    """Rows as columns. `deleted` is None if no row is a delete. `batch` may be a projection, even without
    columns."""

    batch: pa.RecordBatch
    keys: pa.BinaryArray
    times: U64
    deleted: Mask | None

    @property
    def rows(self) -> int:
        """The number of row versions."""
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
        """For a sorted run: the rows with keys in [lower, upper); b"" is unbounded."""
        keys = KeyList(self.keys)
        start = bisect.bisect_left(keys, lower) if lower else 0
        end = bisect.bisect_left(keys, upper) if upper else len(keys)
        return self if start == 0 and end == len(keys) else self.slice(start, max(0, end - start))

    def take(self, positions: Positions) -> Run:
        """The rows at `positions`, in that order."""
        indices = pa.array(positions)
        deleted = None if self.deleted is None else self.deleted[positions]
        return Run(take_batch(self.batch, indices), self.keys.take(indices), self.times[positions], deleted)


_Part = tuple[pa.RecordBatch, pa.Array | None]
"""A batch and the positions of some of its rows; None: all rows."""


def take_batch(batch: pa.RecordBatch, indices: pa.Array) -> pa.RecordBatch:
    """Rows of a batch. Works also for a batch without columns."""
    if batch.num_columns == 0:
        return batch
    return batch.take(indices)


def concat(runs: Sequence[Run]) -> Run:
    """The runs one after the other, unsorted."""
    if len(runs) == 1:
        return runs[0]
    return Run(
        concat_batches([r.batch for r in runs]),
        pa.concat_arrays([r.keys for r in runs]),
        np.concatenate([r.times for r in runs]),
        _concat_deleted(runs),
    )


def _concat_deleted(runs: Sequence[Run]) -> Mask | None:
    if all(r.deleted is None for r in runs):
        return None
    return np.concatenate([np.zeros(r.rows, bool) if r.deleted is None else r.deleted for r in runs])


_LONG_BYTES = 2_048


def has_long(array: pa.Array) -> bool:
    """Whether a value is so long that some hundreds of them must not be copied on the event loop."""
    if not pa.types.is_string(array.type) and not pa.types.is_binary(array.type):
        return False
    return key_bytes.longest(array) > _LONG_BYTES


def concat_batches(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch with all rows. All batches must have the same schema."""
    if len(batches) == 1:
        return batches[0]
    return pa.concat_batches(batches)


@dataclass(slots=True)
class _Versions:
    """Several runs one after the other, without columns: keys, times, delete marks, and their order, newest
    first.

    `same`: whether a row, in that order, has the key of the row before it."""

    keys: pa.BinaryArray
    times: U64
    deleted: Mask | None
    order: Positions
    same: Mask


def _in_order(runs: Sequence[Run]) -> _Versions:
    if len(runs) == 1:
        run = runs[0]
        return _Versions(
            run.keys, run.times, run.deleted, np.arange(run.rows), key_bytes.same_as_before(run.keys)
        )
    keys = pa.concat_arrays([r.keys for r in runs])
    order = key_bytes.sort_order(keys)
    same = key_bytes.same_as_before(keys.take(pa.array(order)))
    return _Versions(keys, np.concatenate([r.times for r in runs]), _concat_deleted(runs), order, same)


def _newest_first(keys: pa.BinaryArray) -> Positions:
    """The positions of rows in the order of their keys, newest first. The rows are in the order they were applied."""
    backwards = np.arange(len(keys) - 1, -1, -1)
    return backwards[key_bytes.sort_order(keys.take(pa.array(backwards)))]


def _as_applied(runs: Sequence[Run]) -> _Versions:
    keys = pa.concat_arrays([r.keys for r in runs])
    order = _newest_first(keys)
    same = key_bytes.same_as_before(keys.take(pa.array(order)))
    return _Versions(keys, np.concatenate([r.times for r in runs]), _concat_deleted(runs), order, same)


def _gathered(runs: Sequence[Run], positions: Positions) -> pa.RecordBatch:
    """Return the rows at these positions. They count through all runs, one after the other; each occurs once.

    Of small runs all rows are joined first, because that is faster. The rows of large runs may exceed an Arrow array, so
    only the wanted ones are copied."""
    if len(runs) == 1 or not len(positions):
        return take_batch(runs[0].batch, pa.array(positions))
    rows = sum(r.rows for r in runs)
    if len(positions) == rows or sum(r.batch.nbytes for r in runs) <= _FEW_BYTES:
        parts: list[_Part] = [(r.batch, None) for r in runs]
    else:
        wanted = np.zeros(rows, bool)
        wanted[positions] = True
        parts = list(_wanted_parts(runs, wanted))
        positions = (np.cumsum(wanted) - 1)[positions]
        rows = len(positions)
    order = None if np.array_equal(positions, np.arange(rows)) else pa.array(positions)
    schema = runs[0].batch.schema
    arrays = [_joined([(batch.column(i), at) for batch, at in parts], order) for i in range(len(schema))]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _wanted_parts(runs: Sequence[Run], wanted: Mask) -> Iterator[_Part]:
    start = 0
    for run in runs:
        at = np.flatnonzero(wanted[start : start + run.rows])
        start += run.rows
        if len(at) and at[-1] - at[0] == len(at) - 1:
            yield run.batch.slice(at[0], len(at)), None
        elif len(at):
            yield run.batch, pa.array(at)


def _joined(parts: Sequence[tuple[pa.Array, pa.Array | None]], order: pa.Array | None) -> pa.Array:
    """The given rows of each array (None: all), one after the other, then reordered by `order` (None:
    not)."""
    taken = [array if rows is None else array.take(rows) for array, rows in parts]
    whole = taken[0] if len(taken) == 1 else pa.concat_arrays(taken)
    del taken  # may be large, and the next step needs as much again
    return whole if order is None else whole.take(order)


def visible(runs: Sequence[Run], snapshot: int) -> pa.RecordBatch:
    """The newest live version of each key at or below `snapshot`, by key.

    `runs` are sorted and come newest first.
    """
    versions = _in_order(runs)
    order, same = versions.order, versions.same
    in_time = versions.times[order] <= snapshot
    if in_time.all():
        chosen = order[~same]
    else:
        group = np.cumsum(~same)
        at = np.flatnonzero(in_time)
        first = np.ones(len(at), bool)
        first[1:] = group[at[1:]] != group[at[:-1]]
        chosen = order[at[first]]
    if versions.deleted is not None:
        chosen = chosen[~versions.deleted[chosen]]
    if len(runs) == 1 and len(chosen) == len(order):
        return runs[0].batch
    return _gathered(runs, chosen)


def changed(runs: Sequence[Run], *, every: bool) -> Run:
    """All rows of these runs by key: `every` version of a key, oldest first, or the newest one alone.

    `runs` are sorted and come newest first. Of rows that one entry wrote to a key, the last one counts."""
    versions = _in_order(runs)
    order, same = versions.order, versions.same
    if not every:
        return _picked(runs, versions, order[~same])
    times = versions.times[order]
    last = np.ones(len(order), bool)
    last[1:] = ~(same[1:] & (times[1:] == times[:-1]))
    chosen, key = order[last], np.cumsum(~same)[last]
    return _picked(runs, versions, chosen[np.lexsort((-np.arange(len(chosen)), key))])


class Kept:
    """The rows of sorted runs that must be kept: versions that a snapshot at or above `mark` can see.

    `runs` are newest first. `layers`: the kept rows as runs of at most about `RUN_BYTES_MAX`, with rising
    keys. If a key's versions exceed that, the newest are in the first layer, the next in the second, and so
    on. Layers relate to each other as files do: newer ones first.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        mark: int,
        *,
        bottom: bool,
        as_applied: bool = False,
        run_bytes: int | None = None,
    ) -> None:
        """`bottom`: no older file lies below, so a delete at or below `mark` can go too.

        `as_applied`: the rows are in the order they were applied, oldest run first. `run_bytes`: the most
        bytes of a run with several keys.
        """
        run_bytes = RUN_BYTES_MAX if run_bytes is None else run_bytes
        self._runs = runs
        self._versions = _as_applied(runs) if as_applied else _in_order(runs)
        keep = _kept(self._versions, mark, bottom)
        chosen = self._versions.order[keep]
        if sum(r.batch.nbytes for r in runs) <= run_bytes:
            self.layers = [[chosen]]
        else:
            sizes = np.concatenate([_row_bytes(r.batch) for r in runs])[chosen]
            # A key's first version goes only together with all others, so a kept repeat still follows a kept
            # row.
            self.layers = _layers(chosen, sizes, self._versions.same[keep], run_bytes)

    def run(self, positions: Positions) -> Run:
        """A run of the rows at positions from `layers`."""
        return _picked(self._runs, self._versions, positions)


def _picked(runs: Sequence[Run], versions: _Versions, positions: Positions) -> Run:
    deleted = None if versions.deleted is None else versions.deleted[positions]
    keys = versions.keys.take(pa.array(positions))
    return Run(_gathered(runs, positions), keys, versions.times[positions], deleted)


def _kept(versions: _Versions, mark: int, bottom: bool) -> Mask:
    """Which rows stay, in the sorted order."""
    order, same = versions.order, versions.same
    times = versions.times[order]
    old = times <= mark
    keep = np.ones(len(order), bool)
    if len(order) > 1:
        # A snapshot at the mark sees the first version at or below the mark. Later rows of that key are
        # history.
        keep[1:] &= ~(same[1:] & old[:-1])
        # Rows of one entry share a timestamp. Only the last one written can be seen, and it comes first.
        keep[1:] &= ~(same[1:] & (times[1:] == times[:-1]))
    if bottom and versions.deleted is not None:
        keep &= ~(old & versions.deleted[order])
    return keep


def kept_rows(runs: Sequence[Run], mark: int) -> Mask:
    """Which rows a merge at `mark` keeps, for the runs laid one after the other. Looks at no columns.

    The runs are sorted and newest first, and no older file lies below them."""
    kept = np.zeros(sum(run.rows for run in runs), bool)
    if runs:
        versions = _in_order(runs)
        kept[versions.order[_kept(versions, mark, True)]] = True
    return kept


def _row_bytes(batch: pa.RecordBatch) -> Positions:
    """About how many bytes each row takes."""
    sizes = np.full(batch.num_rows, batch.num_columns, np.int64)  # validity bits, rounded up
    for array in batch.columns:
        if pa.types.is_string(array.type) or pa.types.is_binary(array.type):
            offsets, _ = key_bytes.binary_parts(array)
            sizes += np.diff(offsets)
        else:
            sizes += -(-array.type.bit_width // 8)
    return sizes


def _layers(chosen: Positions, sizes: Positions, same: Mask, run_bytes: int) -> list[list[Positions]]:
    key = np.cumsum(~same) - 1
    before = np.cumsum(sizes) - sizes
    layer = (before - before[~same][key]) // RUN_BYTES_MAX
    every = [np.flatnonzero(layer == number) for number in range(int(layer.max(initial=0)) + 1)]
    return [[chosen[at[part]] for part in _cuts(sizes[at], key[at], run_bytes)] for at in every]


def _cuts(sizes: Positions, key: Positions, run_bytes: int) -> Iterator[slice]:
    """Slices of whole keys, each of at most about `run_bytes`."""
    bounds = [*np.flatnonzero(np.diff(key, prepend=-1)).tolist(), len(key)]
    ends = np.cumsum(np.append(0, sizes))
    start = 0
    while start < len(key):
        fitting = int(np.searchsorted(ends, ends[start] + run_bytes, "right")) - 1
        end = bounds[bisect.bisect_right(bounds, fitting) - 1]
        if end <= start:  # a single key exceeds it: the layer takes no more of that key
            end = bounds[bisect.bisect_right(bounds, start)]
        yield slice(start, end)
        start = end


def sorted_newest_first(run: Run) -> Run:
    """Sort a run whose rows are in the order they were applied."""
    return run.take(_newest_first(run.keys))


_KEYS_A_NEEDLE = 512
"""With at most one needle for this many keys, each needle is searched by itself. A vectorised search would read all
keys."""


class KeyList:
    """Presents a binary array as a sequence of bytes, for `bisect`."""

    __slots__ = ("_keys",)

    def __init__(self, keys: pa.BinaryArray) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, at: int) -> Any:
        return self._keys[at].as_py()


class SortedKeys:
    """The sorted keys of a group, to be searched many times. Any thread.

    Keys of one length are searched as they lie in memory, which costs a tenth of a search in Python."""

    __slots__ = ("_cells", "keys")

    def __init__(self, keys: pa.BinaryArray) -> None:
        self.keys = keys
        self._cells = _cells(keys)

    def find(self, key: bytes) -> int:
        """The first row with this key; -1 if there is none."""
        cells = self._cells
        if cells is None or len(key) != cells.itemsize:
            at = bisect.bisect_left(KeyList(self.keys), key)
        else:
            at = int(cells.searchsorted(key))
        return at if at < len(self.keys) and self.keys[at].as_py() == key else -1

    def find_all(self, keys: pa.BinaryArray) -> Positions:
        """For each of the keys the first row with it; -1 if there is none."""
        size = len(self.keys)
        if size == 0 or len(keys) == 0:
            return np.full(len(keys), -1, np.int64)
        wanted = _cells(keys)
        if self._cells is not None and wanted is not None and wanted.dtype == self._cells.dtype:
            at = self._cells.searchsorted(wanted)
            same = self._cells[np.minimum(at, size - 1)] == wanted
        else:
            at = lower_bound(self.keys, keys)
            there = pa.array(np.minimum(at, size - 1))
            same = np.asarray(pc.equal(self.keys.take(there), keys))
        found: Positions = np.where((at < size) & same, at, -1)
        return found


def _cells(keys: pa.BinaryArray) -> npt.NDArray[np.bytes_] | None:
    """Return the keys as a numpy array over their memory, if all have one length; else None.

    numpy compares such cells as unsigned bytes. It ignores zeros at their ends, which changes nothing among keys of one length."""
    offsets, data = key_bytes.binary_parts(keys)
    if len(keys) == 0:
        return None
    begin, length = int(offsets[0]), int(offsets[1] - offsets[0])
    if length == 0 or not bool((np.diff(offsets) == length).all()):
        return None
    return data[begin : begin + length * len(keys)].view(f"S{length}")


def lower_bound(haystack: pa.BinaryArray, needles: pa.BinaryArray) -> Positions:
    """Return for each needle the first position in the sorted haystack whose key is not below the needle.

    A vectorised binary search, except for few or long keys."""
    low = np.zeros(len(needles), np.int64)
    high = np.full(len(needles), len(haystack), np.int64)
    if len(haystack) == 0 or len(needles) == 0:
        return low
    width = (max(key_bytes.longest(haystack), key_bytes.longest(needles)) + 7) // 8
    if width > key_bytes.WORDS_MAX or len(needles) * _KEYS_A_NEEDLE <= len(haystack):
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
