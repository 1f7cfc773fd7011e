"""Recent entries of all streams, bounded in bytes; the oldest written leave first. Guarded by the log's lock.

Invariant: an entry that is not yet written is never dropped. A dropped entry is in its stream's extents, on
disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from stele.model.entry import ENTRY_COST_BYTES, Entry
from stele.wal.state import State

_PLACE_BYTES = 112
"""Bytes of memory for an entry's place in its stream's dict and in the common order. Measured as
`ENTRY_COST_BYTES` was."""
_COST_BYTES = ENTRY_COST_BYTES + _PLACE_BYTES


class EntryCache:
    """Knows the order in which entries were written. `State.cache` holds the entries themselves."""

    __slots__ = ("_bytes_max", "_fifo", "bytes")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._fifo: deque[tuple[State, Entry]] = deque()
        self.bytes = 0

    def add(self, state: State, written: Sequence[Entry]) -> None:
        """Count entries that are written and indexed, then drop the oldest until the bound holds. Skips void
        entries."""
        fifo, held = self._fifo, state.cache
        for entry in written:
            if held.get(entry.index) is entry:
                fifo.append((state, entry))
                self.bytes += len(entry.payload) + _COST_BYTES
        while self.bytes > self._bytes_max and fifo:
            state, entry = fifo.popleft()
            self.bytes -= len(entry.payload) + _COST_BYTES
            if state.cache.get(entry.index) is entry:
                del state.cache[entry.index]
