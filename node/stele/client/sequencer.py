"""Numbers the writes to one tablet, so that its replicas recognize a retry. Used by tablet.py and
attempts.py.

Invariant: two writes under one client id never have the same number.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

CLIENT_ID_IDLE_S = 300.0
"""A client id is replaced after this time. Nodes forget an id after 15 idle minutes
(stele.tablet.exactly_once)."""


@dataclass(slots=True)
class Sequencer:
    """Numbers the writes to one tablet under one client id, and knows which are unfinished."""

    client_id: bytes = b""
    made_us: int = 0
    known: bool = False
    """Whether the tablet has accepted a write under this client id."""
    forgotten: bool = False
    """Whether the tablet has said that it forgot this client id. New writes then use another `Sequencer`."""
    _next: int = 1
    _unfinished: dict[int, None] = field(default_factory=dict)
    _used_at: float = 0.0

    def begin(self) -> tuple[bytes, int, int]:
        """(client id, when it was made in µs since 1970, sequence) for a new write. Call `finish` under the
        same id."""
        now = time.monotonic()
        if not self._unfinished and (not self.client_id or now - self._used_at > CLIENT_ID_IDLE_S):
            self.client_id, self.made_us, self._next = os.urandom(16), time.time_ns() // 1_000, 1
            self.known = False
        self._used_at = now
        sequence = self._next
        self._next += 1
        self._unfinished[sequence] = None
        return self.client_id, self.made_us, sequence

    def finish(self, sequence: int) -> None:
        """Note that this write will not be sent again."""
        self._unfinished.pop(sequence, None)

    def lowest_unfinished(self) -> int:
        """The lowest sequence that may still be sent."""
        return next(iter(self._unfinished), self._next)
