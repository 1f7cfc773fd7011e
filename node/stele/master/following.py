"""The catalog in memory follows a key space. Made by master.py, one for each key space; reads no clock.

The rows that are there are decoded a slice at a time, and the event loop turns in between: heartbeats go out however many
rows there are. What is applied meanwhile is folded in: a change of a row that was read already changes the memory, any
other is met when its row is read.

Invariant: between slices the memory is what the key space holds up to the key that was read last; once `whole`, all of it.
"""

from __future__ import annotations

import asyncio

from stele.master.catalog import Catalog
from stele.model.ids import OpId
from stele.tablet.keyspace import KeySpace

ROWS_AT_ONCE = 64
"""Decoded in one turn of the event loop, which takes some 3 ms."""


class Following:
    """`catalog` may be asked once it is `whole`."""

    def __init__(self, key_space: KeySpace) -> None:
        self.key_space = key_space
        self.catalog = Catalog()
        self.whole = False
        self._read_to = b""
        self._ended = False
        key_space.add_commit_listener(self._applied)

    async def load(self) -> None:
        """Read what is not read yet. Called by one at a time; if it fails it may be called again.

        Raises:
            As `records.decode`.
        """
        while not self.whole:
            rows = self.key_space.list(after=self._read_to, limit=ROWS_AT_ONCE)
            for key, value in rows:
                self.catalog.applied(key, None, value, self.key_space.applied)
                self._read_to = key
            if len(rows) < ROWS_AT_ONCE:
                self.catalog.opid = self.key_space.applied
                self.whole = True
                return
            await asyncio.sleep(0)

    def end(self) -> None:
        """Follow no more."""
        self._ended = True

    def _applied(self, key: bytes, old: bytes | None, new: bytes | None, opid: OpId) -> None:
        if not self._ended and (self.whole or key <= self._read_to):
            self.catalog.applied(key, old, new, opid)
