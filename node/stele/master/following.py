"""Keeps the catalog in memory up to date with a key space. Made by master.py, one for each key space; reads
no clock.

The existing rows are decoded slice by slice, and other tasks run between slices, so heartbeats go out in
time. Changes that are applied meanwhile are not lost. If the row was already read, the memory changes at
once; otherwise the slice that reads the row sees the change.

Invariant: between slices the memory equals the key space up to the last key that was read. Once `complete`,
it equals all of it.
"""

from __future__ import annotations

import asyncio

from stele.master.catalog import Catalog
from stele.model.ids import OpId
from stele.tablet.keyspace import KeySpace

ROWS_AT_ONCE = 64
"""Rows decoded in one turn of the event loop, which takes some 3 ms."""


class Following:
    """Follows one key space. `catalog` may be used once `complete`."""

    def __init__(self, key_space: KeySpace) -> None:
        self.key_space = key_space
        self.catalog = Catalog()
        self.complete = False
        self._read_to = b""
        self._ended = False
        key_space.add_commit_listener(self._applied)

    async def load(self) -> None:
        """Read the remaining rows. Only one task may call it at a time; after a failure it may be called
        again.

        Raises:
            As `row_encoding.decode`.
        """
        while not self.complete:
            rows = self.key_space.list(after=self._read_to, limit=ROWS_AT_ONCE)
            for key, value in rows:
                self.catalog.applied(key, None, value, self.key_space.applied)
                self._read_to = key
            if len(rows) < ROWS_AT_ONCE:
                self.catalog.opid = self.key_space.applied
                self.complete = True
                return
            await asyncio.sleep(0)

    def end(self) -> None:
        """Stop following."""
        self._ended = True

    def _applied(self, key: bytes, old: bytes | None, new: bytes | None, opid: OpId) -> None:
        if not self._ended and (self.complete or key <= self._read_to):
            self.catalog.applied(key, old, new, opid)
