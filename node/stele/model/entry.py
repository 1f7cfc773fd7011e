"""A log entry as the algorithm, the log and the replica share it. Imports only ids and errors.

Invariant: an entry is immutable, and `payload` is never decoded below stele.consensus, CONFIG entries excepted.
"""

from __future__ import annotations

from enum import IntEnum

from stele.model.errors import unknown_here
from stele.model.ids import OpId
from stele.model.record import record


class EntryKind(IntEnum):
    """What an entry's payload is. Numbers are on disk and on the wire."""

    NOOP = 1  # first entry of a leader's term; payload: the active configuration, repeated
    CONFIG = 2  # payload: configuration_codec bytes
    WRITE = 3  # payload: what the state machine of the tablet applies
    CEILING = 4  # payload: u64 little-endian hybrid time below which the leader may assign timestamps


ENTRY_COST_BYTES = 184
"""Of memory, for an entry beside its payload's bytes. Measured by tracemalloc, CPython 3.11: 72 for the object, 32 each for index
and timestamp (a term is mostly a small number, and shared), 33 for the header of the payload, 8 for its slot in a list, and
what lists that grow have in reserve."""
_KINDS = {int(kind): kind for kind in EntryKind}


def entry_kind_of(number: int, term: int, index: int) -> EntryKind:
    """The kind of the entry (term, index), from its number on a disk or the wire.

    Raises:
        Rejected: UNSUPPORTED_VERSION for one this program does not know.
    """
    kind = _KINDS.get(number)
    if kind is None:
        raise unknown_here(f"entry {term}.{index}: kind", number)
    return kind


@record
class Entry:
    """One entry of a replicated log. `timestamp` is a hybrid time, 0 where none was assigned."""

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
        """What the entry counts against budgets of memory."""
        return len(self.payload) + ENTRY_COST_BYTES
