"""Finds the rows of a memtable by the hash of their key. Owned by the memtable; not thread-safe.

The memtable makes one only when keys of big blocks are looked up. Invariant: it holds exactly the rows with
ordinals below `end`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stele.tablet.chunk import U64
from stele.tablet.sorted_runs import Positions


class Keys(Protocol):
    """The rows that are indexed."""

    def key_at(self, ordinal: int) -> bytes:
        """The key of one row."""

    def keys_at(self, ordinals: Positions) -> pa.BinaryArray:
        """The keys of these rows."""


class HashIndex:
    """Sorted (hash, ordinal) pairs in parts of falling size, so that a row is merged a logarithmic number of
    times."""

    def __init__(self) -> None:
        self.end = 0
        self._parts: list[tuple[U64, Positions]] = []

    def add(self, hashes: U64) -> None:
        """Add the hashes of the keys of the next rows."""
        ordinals = np.arange(self.end, self.end + len(hashes), dtype=np.int64)
        order = np.argsort(hashes, kind="stable")
        self._parts.append((hashes[order], ordinals[order]))
        self.end += len(hashes)
        while len(self._parts) > 1 and len(self._parts[-2][0]) <= 2 * len(self._parts[-1][0]):
            newer_hashes, newer = self._parts.pop()
            older_hashes, older = self._parts.pop()
            both = np.concatenate((older_hashes, newer_hashes))
            order = np.argsort(both, kind="stable")
            self._parts.append((both[order], np.concatenate((older, newer))[order]))

    def candidates(self, hash_: int) -> list[int]:
        """Ordinals of rows with this hash, highest first."""
        found: list[int] = []
        wanted = np.uint64(hash_)
        for hashes, ordinals in reversed(self._parts):
            low, high = np.searchsorted(hashes, wanted, "left"), np.searchsorted(hashes, wanted, "right")
            found.extend(reversed(ordinals[low:high].tolist()))
        return found

    def newest(self, keys: pa.BinaryArray, hashes: U64, table: Keys) -> Positions:
        """Ordinal of the newest row of `table` with each key; -1 if there is none."""
        found = np.full(len(keys), -1, np.int64)
        left = np.arange(len(keys))
        for part_hashes, ordinals in reversed(self._parts):
            place = np.searchsorted(part_hashes, hashes[left], "right") - 1
            hit = (place >= 0) & (part_hashes[np.maximum(place, 0)] == hashes[left])
            if not hit.any():
                continue
            rows, candidates = left[hit], ordinals[place[hit]]
            wanted = keys.take(pa.array(rows))
            same = np.asarray(pc.equal(wanted, table.keys_at(candidates)))
            found[rows[same]] = candidates[same]
            for row in rows[~same].tolist():  # hash collision: compare each candidate
                found[row] = self._exact(keys[row].as_py(), int(hashes[row]), table)
            left = left[found[left] < 0]
            if len(left) == 0:
                break
        return found

    def _exact(self, key: bytes, hash_: int, table: Keys) -> int:
        for ordinal in self.candidates(hash_):
            if table.key_at(ordinal) == key:
                return ordinal
        return -1
