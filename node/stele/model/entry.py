"""A log entry, shared by the algorithm, the log and the replica. Imports only ids and errors.

Invariant: an entry is immutable. Nothing below stele.consensus decodes `payload`, except in CONFIG entries.
"""

from __future__ import annotations

from enum import IntEnum

from stele.model.errors import unknown_here
from stele.model.ids import OpId
from stele.model.record import record


class EntryKind(IntEnum):
    """What an entry's payload is. The numbers are on disk and on the wire."""

    NOOP = 1  # first entry of a leader's term; payload: the active configuration again
    CONFIG = 2  # payload: an encoded configuration
    WRITE = 3  # payload: what the tablet's state machine applies
    CEILING = 4  # payload: u64 little-endian hybrid time below which the leader may assign timestamps


ENTRY_COST_BYTES = 184
"""Bytes of memory for an entry beside its payload. Measured by tracemalloc, CPython 3.11. The object has 72,
index and timestamp 32 each; terms are mostly small, shared numbers. The payload's header has 33, a slot in a
list 8, plus the reserve of growing lists."""
_KINDS = {int(kind): kind for kind in EntryKind}


def entry_kind_of(number: int, term: int, index: int) -> EntryKind:
    """Return the entry kind for a number from a disk or the wire. `term` and `index` are those of the entry.

    Raises:
        Rejected: UNSUPPORTED_VERSION: this program does not know the number.
    """
    kind = _KINDS.get(number)
    if kind is None:
        raise unknown_here(f"entry {term}.{index}: kind", number)
    return kind


@record
class Entry:
    """One entry of a replicated log. `timestamp` is a hybrid time; 0 if none was assigned."""

    term: int
    index: int
    kind: EntryKind
    timestamp: int
    payload: bytes

    @property
    def opid(self) -> OpId:
        """(term, index) of this entry."""
        return OpId(self.term, self.index)

    @property
    def size_bytes(self) -> int:
        """Bytes that the entry counts in memory budgets."""
        return len(self.payload) + ENTRY_COST_BYTES
