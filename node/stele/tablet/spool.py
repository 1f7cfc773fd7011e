"""Holds the key hashes of a file that is being written, in bounded memory. Called by colwriter.py.

Hashes that exceed the buffer go to an unnamed temporary file in the directory of the new file: 8 bytes a key.
It vanishes with the process. Invariant: each added hash is returned once, in rising ranges.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from stele.tablet.colformat import HASH_BYTES

U64 = npt.NDArray[np.uint64]

BUFFER_ROWS = 1 << 20
_RANGE_BITS = 12
_RANGES = 1 << _RANGE_BITS
_BEGINS = np.arange(_RANGES, dtype=np.uint64) << np.uint64(64 - _RANGE_BITS)
_RANGE_ROWS_MAX = 1 << 20
"""The most hashes returned at once, unless a single range has more. With evenly spread hashes that takes a file of
more than 4 billion."""


class HashSpool:
    """Takes hashes in any order and returns them in rising ranges. A context manager; for one thread."""

    def __init__(self, directory: Path) -> None:
        self.rows = 0
        self._directory = directory
        self._waiting: list[U64] = []
        self._waiting_rows = 0
        self._file: BinaryIO | None = None
        self._bounds: list[npt.NDArray[np.int64]] = []
        """For each part of the file: the row where each range begins, and where the last one ends."""

    def add(self, hashes: U64) -> None:
        """Add hashes.

        Raises:
            OSError: the disk failed.
        """
        self._waiting.append(hashes)
        self._waiting_rows += len(hashes)
        self.rows += len(hashes)
        if self._waiting_rows >= BUFFER_ROWS:
            self._spill()

    def _spill(self) -> None:
        part, bounds = _by_range(self._waiting)
        self._waiting, self._waiting_rows = [], 0
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115 - see `__exit__`
        view = part.view(np.uint8).data
        while view:
            view = view[self._file.write(view) or 0 :]
        begin = int(self._bounds[-1][-1]) if self._bounds else 0
        self._bounds.append(bounds + begin)

    def ranges(self) -> Iterator[tuple[int, U64]]:
        """Pairs (end, hashes) of rising ranges. Call once.

        The hashes of a range are those whose upper 32 bits are below `end` and not below the previous end, in
        any order. The last end is 2^32.

        Raises:
            OSError: the disk failed.
        """
        waiting, bounds = _by_range(self._waiting)
        self._waiting = []
        counts = np.diff(bounds) + sum(np.diff(b) for b in self._bounds)
        ends = np.cumsum(counts)
        low = 0
        while low < _RANGES:
            before = int(ends[low - 1]) if low else 0
            high = max(low + 1, int(np.searchsorted(ends, before + _RANGE_ROWS_MAX, "right")))
            parts = [self._read(int(b[low]), int(b[high])) for b in self._bounds]
            parts.append(waiting[bounds[low] : bounds[high]])
            yield high << (32 - _RANGE_BITS), np.concatenate(parts)
            low = high

    def _read(self, begin: int, end: int) -> U64:
        assert self._file is not None
        found = np.empty(end - begin, np.uint64)
        view, at = found.view(np.uint8).data, begin * HASH_BYTES
        while view:
            read = os.preadv(self._file.fileno(), [view], at)
            if not read:
                raise OSError(f"the temporary file of key hashes ends at byte {at}; the disk lost the rest")
            view, at = view[read:], at + read
        return found

    def __enter__(self) -> HashSpool:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _by_range(parts: list[U64]) -> tuple[U64, npt.NDArray[np.int64]]:
    """Return (all hashes, ascending; the index where each range begins, and where the last one ends)."""
    hashes = np.sort(np.concatenate(parts)) if parts else np.zeros(0, np.uint64)
    return hashes, np.append(np.searchsorted(hashes, _BEGINS), len(hashes))
