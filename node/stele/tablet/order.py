"""Rows of a memtable in key order, for scans. All scans share them. Owned by the memtable; any thread.

The rows are kept in sorted parts, each more than twice as large as all newer parts together. So a scan beside
writes sorts only what is new. However many scans run, each row is copied a logarithmic number of times in
total. One thread sorts at a time.

Invariant: a part never changes, so a scan that holds it can go on whatever is added later.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence

import pyarrow as pa

from stele.model.errors import Code, Retryable
from stele.tablet.chunk import Chunk
from stele.tablet.colformat import GROUP_BYTES, GROUP_ROWS
from stele.tablet.sorted_runs import KeyList, Run, concat, sorted_newest_first


class SortedRows:
    """The rows with ordinals `start`..`end` as a sorted run. Group `n` is its rows `cuts[n]`..`cuts[n +
    1]`."""

    __slots__ = ("cuts", "end", "first_keys", "last_key", "max_time", "run", "start")

    def __init__(self, start: int, run: Run) -> None:
        self.start = start
        self.end = start + run.rows
        self.run = run
        keys = KeyList(run.keys)
        step = min(GROUP_ROWS, max(1, GROUP_BYTES * run.rows // max(1, run.batch.nbytes)))
        self.cuts = [0]
        while self.cuts[-1] + step < run.rows:  # all versions of a key are in one group
            self.cuts.append(bisect.bisect_right(keys, keys[self.cuts[-1] + step - 1]))
        if self.cuts[-1] < run.rows:
            self.cuts.append(run.rows)
        self.first_keys: list[bytes] = [keys[at] for at in self.cuts[:-1]]
        self.last_key: bytes = keys[run.rows - 1]
        self.max_time = int(run.times.max())


class SharedOrder:
    """The rows of one memtable that were sorted so far."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: list[SortedRows] = []

    def of(self, chunks: Sequence[Chunk], rows: int) -> list[SortedRows]:
        """See `MemTable.sorted_rows`."""
        parts = self._parts
        if not parts or parts[-1].end < rows:
            with self._lock:  # a thread that waited finds the rows that the other one sorted
                parts = self._parts
                if not parts or parts[-1].end < rows:
                    parts = self._parts = _with_rest(parts, chunks, rows)
        return [part for part in reversed(parts) if part.start < rows]


def _with_rest(parts: Sequence[SortedRows], chunks: Sequence[Chunk], rows: int) -> list[SortedRows]:
    """`parts` plus the later rows, sorted together with those parts that are at most twice as large."""
    kept = list(parts)
    while kept and kept[-1].end - kept[-1].start <= 2 * (rows - kept[-1].end):
        kept.pop()
    start = kept[-1].end if kept else 0
    runs = []
    for chunk in chunks:
        if chunk.start + chunk.rows > start:
            skipped = max(0, start - chunk.start)
            runs.append(chunk.run().slice(skipped, chunk.rows - skipped))
    try:
        kept.append(SortedRows(start, sorted_newest_first(concat(runs))))
    except pa.ArrowInvalid as exc:
        raise Retryable(
            f"too many rows are in memory to sort them at once ({exc}); try again after the next flush, in some seconds",
            code=Code.NOT_READY,
        ) from exc
    return kept
