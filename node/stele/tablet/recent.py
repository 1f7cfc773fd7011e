"""The newest changes of a key space, in memory, for those who watch it. Owned by KeySpace; used in the owner's thread.

A revision is the log index of a committed change, so it is the same on all replicas and after a restart. Revisions rise,
with gaps. What is kept is bounded by count and bytes. A replica that starts keeps what it applies from its last flush on.

Invariant: every change after `start` is here, in order, and those of one write are together.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Protocol

from stele.tablet.pairs import size_of

WRITES_MAX = 8_192
"""The most writes that are kept."""
BYTES_MAX = 4 << 20
"""The most bytes that are kept: keys and values, with 256 more for each key. The newest write is kept whatever its size."""
_TIMES_MAX = 1_024
_NEW_MAX = 16
"""A search begins with this many of the newest writes, from the end."""
_revision = attrgetter("revision")

Change = tuple[bytes, bytes | None]
"""A key, and its new value; None: it was removed."""


class Written:
    """What one write has changed. `encoded`: kept here by the code that sends it, so that it is encoded only once."""

    __slots__ = ("changes", "encoded", "revision", "size_bytes")

    def __init__(self, revision: int, changes: Sequence[Change]) -> None:
        self.revision = revision
        self.changes = changes
        self.encoded: Sequence[bytes] | None = None
        self.size_bytes = sum(size_of(key, value or b"") for key, value in changes)


class Reader(Protocol):
    """Hands the changes on to those who watch."""

    @property
    def read_to(self) -> int:
        """The revision up to which this reader has taken all changes."""

    def written(self) -> None:
        """Called after each new change. Must not raise."""


class Recent:
    """The changes after revision `start`. What `reader` has not taken yet is kept, whatever the bounds."""

    def __init__(self, start: int, *, writes_max: int = WRITES_MAX, bytes_max: int = BYTES_MAX) -> None:
        self.start = start
        self.reader: Reader | None = None
        self._writes_max = writes_max
        self._bytes_max = bytes_max
        self._writes: deque[Written] = deque()
        self._bytes = 0
        self._times: deque[tuple[int, int]] = deque(maxlen=_TIMES_MAX)  # (timestamp, revision), ascending

    def add(self, revision: int, timestamp: int, changes: Sequence[Change]) -> None:
        """Note that a write was applied; it may have changed nothing."""
        self._times.append((timestamp, revision))
        if not changes:
            return
        written = Written(revision, changes)
        self._writes.append(written)
        self._bytes += written.size_bytes
        self.trim()
        if self.reader is not None:
            self.reader.written()

    def trim(self) -> None:
        """Drop the oldest writes above the bounds, but none that the reader has not taken yet."""
        taken = math.inf if self.reader is None else self.reader.read_to
        while len(self._writes) > 1 and (
            len(self._writes) > self._writes_max or self._bytes > self._bytes_max
        ):
            if self._writes[0].revision > taken:
                return
            oldest = self._writes.popleft()
            self._bytes -= oldest.size_bytes
            self.start = oldest.revision

    def after(self, revision: int) -> Iterator[Written]:
        """The writes after a revision, which is `start` or later. Nothing may change meanwhile."""
        writes = self._writes
        new = 0
        while new < _NEW_MAX and new < len(writes) and writes[-1 - new].revision > revision:
            new += 1
        if new < _NEW_MAX:  # a deque is slow in its middle
            return iter([writes[at] for at in range(-new, 0)])
        at = bisect.bisect_right(writes, revision, key=_revision)
        return itertools.islice(writes, at, None)

    def revision_at(self, timestamp: int) -> int:
        """Return the revision of the write with this hybrid time; 0 if the write is no longer kept here."""
        at = bisect.bisect_left(self._times, (timestamp, 0))
        found = self._times[at] if at < len(self._times) else (0, 0)
        return found[1] if found[0] == timestamp else 0
