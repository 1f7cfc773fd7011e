"""Which entries a state machine has applied. Shared by both state machines; holds no rows.

Invariant: entries come in order, without gaps or repeats, and terms never fall.
"""

from __future__ import annotations

import struct

from stele.model.entry import Entry, EntryKind
from stele.model.errors import Corrupt, ensure
from stele.model.ids import OPID_NONE, OpId

_CEILING = struct.Struct("<Q")


class Progress:
    """The applied position, the highest ceiling and the newest write's timestamp."""

    __slots__ = ("_applied", "last_timestamp", "max_ceiling")

    def __init__(self, applied: OpId = OPID_NONE, max_ceiling: int = 0, last_timestamp: int = 0) -> None:
        # A tuple is cheaper than an OpId, which is rarely needed.
        self._applied = (applied.term, applied.index)
        self.max_ceiling = max_ceiling
        self.last_timestamp = last_timestamp

    @property
    def applied(self) -> OpId:
        """The last entry."""
        return OpId(*self._applied)

    def advance(self, entry: Entry) -> None:
        """Record the next entry.

        Raises:
            InvariantViolation: it is not the next one, or a write's timestamp falls.
            Corrupt: a ceiling that does not have eight bytes.
        """
        term, index = self._applied
        if entry.index != index + 1 or entry.term < term:
            ensure(
                False,
                f"entry {entry.term}.{entry.index} cannot follow {self.applied}; "
                "expected the next index and no lower term",
            )
        if entry.kind is EntryKind.WRITE:
            if entry.timestamp < self.last_timestamp:
                ensure(
                    False, f"entry {entry.opid} has timestamp {entry.timestamp}, below {self.last_timestamp}"
                )
            self.last_timestamp = entry.timestamp
        elif entry.kind is EntryKind.CEILING:
            if len(entry.payload) != _CEILING.size:
                raise Corrupt(f"entry {entry.opid}: its ceiling has {len(entry.payload)} bytes; expected 8")
            self.max_ceiling = max(self.max_ceiling, _CEILING.unpack(entry.payload)[0])
        self._applied = (entry.term, entry.index)
