"""Hybrid timestamps of one replica, and the ceiling that keeps those of two leaders apart. Owned by Writes;
no I/O.

A leader assigns timestamps and serves snapshots only below a committed ceiling. A new leader begins above the
highest ceiling in its log. So the timestamps of two leaders are disjoint, and a snapshot never changes. A new
leader assigns none before its clock has passed that ceiling. Otherwise its writes would lie in the future,
and a scan at the present would miss them.

So a ceiling runs ahead of the clock as little as possible. But the next ceiling must be committed before the
present one is used up. Where commits take long, ceilings run further ahead, by a multiple of the time of the
last commit. A new leader begins as far ahead as its predecessor was. The cost is the wait of a new leader, a
few commits long. Timestamps stay those of the clock. An alternative was rejected: timestamps in the past,
below a ceiling that the clock has passed. They would save the wait. But a scan of several tablets could then
miss a write in one tablet, and see a later write in another.

Invariant: `assign` returns strictly rising values, all at or below a committed ceiling. No timestamp and no
ceiling is made of a reading of the wall clock that the node finds wrong.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from stele.model.clock import HybridClock, from_physical_us, future_snapshot, physical_us
from stele.model.errors import Code, Corrupt, Rejected
from stele.model.ids import HybridTime

_CEILING = struct.Struct("<Q")
_AHEAD_PER_COMMIT = 4
"""A ceiling runs ahead by this many times the last commit's time. The next ceiling is due when half of that
lead is left. So its commit may take twice as long as the last one.
"""


def encode_ceiling(ceiling: int) -> bytes:
    """Payload of a CEILING entry."""
    return _CEILING.pack(ceiling)


def decode_ceiling(payload: bytes) -> int:
    """The ceiling in a CEILING entry.

    Raises:
        Corrupt: if it is not eight bytes.
    """
    if len(payload) != _CEILING.size:
        raise Corrupt(f"ceiling entry: {len(payload)} bytes, expected {_CEILING.size}; copy the replica anew")
    return int(_CEILING.unpack(payload)[0])


class Timestamps:
    """The clock and the ceilings of one replica.

    A ceiling runs `ahead_us` ahead of the wall clock, and up to `ahead_max_us` where commits take long. A
    snapshot more than `error_max_us` ahead is refused. All in microseconds. `fault`: what is wrong with a
    reading of the clock, "" if nothing. `node`: the node of the clock, for messages.
    """

    def __init__(
        self,
        wall_us: Callable[[], int],
        ahead_us: int,
        ahead_max_us: int,
        error_max_us: int,
        *,
        fault: Callable[[int], str] = lambda wall_us: "",
        node: str = "",
    ) -> None:
        self._wall_us = wall_us
        self._fault = fault
        self._node = node
        self._ahead_us = ahead_us  # of the next ceiling
        self._ahead_min_us = ahead_us
        self._ahead_max_us = ahead_max_us
        self._error_max_us = error_max_us
        self._clock = HybridClock(wall_us)
        self._highest = 0  # of any ceiling in the log, committed or not
        self._committed = 0  # usable: committed by this leader in this term
        self._proposed = 0  # proposed and not yet committed; 0: none
        self._proposed_us = 0  # when, by the wall clock
        self._begins_us = 0  # of this clock: it has passed what earlier leaders may have assigned
        self.ceiling_due = False
        """Whether the next ceiling is due, as of the last `assign`."""
        self.applied = 0  # all at or below it is applied here, and will never change

    def in_log(self, ceiling: int) -> None:
        """Note a ceiling that is in the log. The next leader begins above it."""
        self._highest = max(self._highest, ceiling)

    def lead(self) -> None:
        """Begin above everything that an earlier leader may have assigned: this replica has become leader."""
        self._clock.observe(self._highest)
        self._begins_us = physical_us(self._highest)
        self._committed = 0
        self._proposed = 0
        # As far ahead as its predecessor. Otherwise it could serve no snapshot until the clock reaches that
        # one's last ceiling. If the log is further ahead than a ceiling may be, an earlier leader's clock was
        # wrong.
        ahead_us = self._begins_us - self._wall_us()
        self._run_ahead(ahead_us if ahead_us <= self._ahead_max_us else 0)

    def committed(self, ceiling: int) -> None:
        """Use a ceiling that this leader proposed, which is committed now."""
        self._committed = max(self._committed, ceiling)
        if self._proposed and ceiling >= self._proposed:
            self._proposed = 0
            self._run_ahead(_AHEAD_PER_COMMIT * (self._wall_us() - self._proposed_us))

    def lost(self) -> None:
        """Forget the proposed ceiling, which was refused or lost."""
        self._proposed = 0

    def _run_ahead(self, ahead_us: int) -> None:
        self._ahead_us = min(max(ahead_us, self._ahead_min_us), self._ahead_max_us)

    @property
    def fault(self) -> str:
        """What is wrong with the wall clock, as text; "" if nothing is.

        Until it is right, nothing is assigned.
        """
        return self._fault(self._wall_us())

    def next_ceiling(self, at_least: int = 0) -> int | None:
        """Return a ceiling to propose now.

        None: the present one lasts, the next one is on its way, time must pass first, or the wall clock is
        wrong.

        A new ceiling is due when less than half of the lead is left, or when `at_least` is above the present
        one. This is called when timestamps are used, so an unused tablet proposes no ceilings. The exception
        is a ceiling that lets the tablet forget old clients.
        """
        if self._proposed:
            return None
        wall = self._wall_us()
        if self._committed >= max(self._due(wall), at_least):
            return None
        ceiling = from_physical_us(wall + self._ahead_us)
        if ceiling <= max(self._highest, self._committed) or self._fault(wall):
            return None
        self._proposed, self._proposed_us = ceiling, wall
        return ceiling

    def _due(self, wall_us: int) -> int:
        """The next ceiling is due once the present one is below this."""
        return from_physical_us(wall_us + self._ahead_us // 2)

    @property
    def behind_ms(self) -> int:
        """For how many milliseconds no ceiling can be proposed, because the clock is behind the log.

        0: a ceiling can be proposed now, or the present one lasts.
        """
        if max(self._clock.last + 1, from_physical_us(self._wall_us())) <= self._committed:
            return 0
        highest = max(self._highest, self._committed)
        return max(0, physical_us(highest) - self._wall_us() - self._ahead_us) // 1000

    def assign(self) -> HybridTime | None:
        """Return a new timestamp at or below the committed ceiling.

        None: it must wait for a ceiling, for time to pass, or for a right clock.
        """
        wall = self._wall_us()
        time = self._clock.next_at(wall)
        if wall < self._begins_us or time > self._committed or self._fault(wall):
            return None
        self._clock.last = time
        self.ceiling_due = not self._proposed and self._committed < self._due(wall)
        return HybridTime(time)

    def stamp(self, ceiling: int) -> HybridTime:
        """The timestamp of the entry that holds `ceiling`. Later entries of this leader have higher ones.

        It is never above the ceiling, because the next leader knows only the ceiling. The clock may be above
        it, after a reserved snapshot.
        """
        return HybridTime(min(self._clock.now(), ceiling))

    def covers(self, snapshot: int) -> bool:
        """Whether a snapshot lies at or below the committed ceiling."""
        return snapshot <= self._committed

    def reserve(self, snapshot: int) -> None:
        """Assign nothing at or below `snapshot` from now on.

        Raises:
            Rejected: CLOCK_AHEAD, if it is further ahead of the wall clock than clocks may be apart.
        """
        wall = self._wall_us()
        if snapshot > from_physical_us(wall + self._error_max_us):
            raise Rejected(
                f"{future_snapshot(snapshot, wall, f'the clock of node {self._node[:8]}')}. "
                "If no snapshot was given, the clock of the caller's machine is wrong: correct it",
                code=Code.CLOCK_AHEAD,
            )
        self._clock.observe(snapshot)

    def now(self) -> HybridTime:
        """A time above all assigned so far, for a snapshot that is to see them."""
        return self._clock.now()
