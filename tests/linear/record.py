"""All that clients did, as it comes in. Filled by workload.py, judged by __main__.

Invariant: whatever was begun stands here, unless it was certainly not done.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tests.linear.cuts import Scan
from tests.linear.history import NEVER, Kind, NotDone, Operation, State, Surprise, Told, told_by


@dataclass(slots=True)
class Record:
    """Seconds count from the making of this. `wall_us`: the wall clock at second 0, in µs since 1970."""

    operations: list[Operation] = field(default_factory=list)
    scans: list[Scan] = field(default_factory=list)
    surprises: list[str] = field(default_factory=list)
    not_done: int = 0
    followed: int = 0
    """How many reads were answered by followers."""
    wall_us: float = field(default_factory=lambda: time.time_ns() / 1_000)
    _start: float = field(default_factory=time.monotonic)

    def now(self) -> float:
        """Seconds of the monotonic clock since the start."""
        return time.monotonic() - self._start

    @property
    def unknown(self) -> int:
        """How many operations ended without a known outcome."""
        return sum(not o.complete for o in self.operations)

    def ended(
        self,
        client: str,
        key: str,
        kind: Kind,
        value: State,
        begun: float,
        told: Told = Told.DONE,
        *,
        ended: float | None = None,
        timestamp: int = 0,
        one_of_many: bool = False,
        note: str = "",
        expected: State = None,
    ) -> None:
        """An operation has ended, at this moment unless another is given."""
        if told is Told.UNKNOWN:
            ended, timestamp = NEVER, 0
        elif ended is None:
            ended = self.now()
        self.operations.append(
            Operation(key, kind, value, begun, ended, told, client, timestamp, one_of_many, note, expected)
        )

    def told(self, client: str, key: str, kind: Kind, error: Exception) -> Told | None:
        """What an error says of an operation; None if there is nothing to be judged."""
        try:
            return told_by(error, kind)
        except NotDone:
            self.not_done += 1
        except Surprise as surprise:
            self.surprises.append(f"{self.now():.3f} {client} {key}: {surprise}")
        return None
