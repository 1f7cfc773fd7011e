"""The disk of a simulated node: the log's file system of tests/wal (which loses, tears and fails to read),
syncs that take the world's time, and rot.

Invariant: rot changes only bytes that a later sync proves to be synced, because the log's README excludes the
others as its limit.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

from stele.wal.files import File
from tests.wal.simfs import SECTOR, SimFiles, SimSync

if TYPE_CHECKING:
    from tests.sim.log_thread import LogThread

LOG = Path("wal")


class Disk(SimFiles):
    """Files of one node's log."""

    def rot(self, rng: random.Random, before: tuple[int, int], *, unreadable: bool) -> str:
        """Change a bit, or make a sector unreadable, below `before` (sequence, offset), in bytes that matter.
        Returns what was done; "" if there are no such bytes yet."""
        found = []
        for path in self.paths():
            kind, _, number = path.stem.rpartition("-")
            if kind == "segment" and int(number) <= before[0]:
                data = self.content(path)
                end = before[1] if int(number) == before[0] else len(data)
                found += [(path, at) for at in range(0, min(end, len(data)), 8) if any(data[at : at + 8])]
        if not found:
            return ""
        path, at = rng.choice(found)
        if unreadable:
            self.spoil(path, at // SECTOR)
            return f"sector {at // SECTOR} of {path.name} cannot be read"
        at += next(n for n in range(8) if self.content(path)[at + n])
        for data in self.copies(path):
            data[at] ^= 1 << rng.randrange(8)
        return f"byte {at} of {path.name} was changed by rot"


class WorldSync(SimSync):
    """A background sync that ends when the world decides."""

    def __init__(self, thread: LogThread) -> None:
        super().__init__()
        self._thread = thread

    def begin(self, file: File) -> None:
        super().begin(file)
        self._thread.sync_begins(self, self.begun)
