"""Hybrid time: physical microseconds above a logical counter (Kulkarni et al., 2014). Reads no clock of its
own.

Invariant: the values that `HybridClock.now` returns rise strictly.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection

from stele.model.ids import HybridTime

LOGICAL_BITS = 12
_LOGICAL_MASK = (1 << LOGICAL_BITS) - 1

_SHOWN_AHEAD_US = 60_000_000
"""Two times that differ by less than this are shown with the difference in seconds, because their texts look
alike."""

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)

CLOCK_OFF_MAX_US = 2_000_000
"""A node whose wall clock differs by more than this from most clocks of its cluster makes no timestamps.
Clocks under NTP differ by milliseconds; the error of the measurement is well below a second."""


TIMESTAMP_AHEAD_MAX_US = CLOCK_OFF_MAX_US + 500_000
"""How far the timestamp of a write may lie ahead of the right time. A leader's clock may be off by
CLOCK_OFF_MAX_US. Its timestamps also exceed each snapshot that it served, which may be half a second ahead."""


def snapshot_for(max_staleness_us: int, now: int, seen: int = 0) -> int:
    """Return the oldest snapshot with all writes that were acknowledged `max_staleness_us` before `now`.

    It also has all writes up to `seen`, the highest time that the client has seen. Times are hybrid times.
    """
    late_us = max_staleness_us - TIMESTAMP_AHEAD_MAX_US
    return now if late_us <= 0 else max(now - int(from_physical_us(late_us)), seen)


def agreed(clocks_us: Collection[int]) -> int | None:
    """Return the median of these clocks, if more than half are within CLOCK_OFF_MAX_US of it.

    They are read at one moment, in µs since 1970. None: they disagree, and nobody knows which is right."""
    if not clocks_us:
        return None
    middle = sorted(clocks_us)[(len(clocks_us) - 1) // 2]
    near = sum(abs(clock - middle) <= CLOCK_OFF_MAX_US for clock in clocks_us)
    return middle if 2 * near > len(clocks_us) else None


def utc(wall_us: int) -> str:
    """A wall clock's time as text, in UTC; the bare number if no calendar has that time."""
    try:
        moment = datetime.datetime.fromtimestamp(wall_us / 1e6, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return f"{wall_us} µs since 1970"
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def future_snapshot(snapshot: int, wall_us: int, clock_of: str) -> str:
    """Return the message for a snapshot in the future, with what to do. `wall_us` is the time on the clock of
    `clock_of`."""
    ahead = ahead_of("the snapshot", snapshot, wall_us, clock_of)
    return f"{ahead}; give an earlier time, or no snapshot to read the present"


def ahead_of(what: str, time: int, wall_us: int, clock_of: str) -> str:
    """Return the message that a hybrid time lies in the future. `wall_us` is the time on the clock of
    `clock_of`."""
    ahead_us = physical_us(time) - wall_us
    by = f"{ahead_us / 1e6:.1f} s " if ahead_us < _SHOWN_AHEAD_US else ""
    return f"{what} {utc(physical_us(time))} lies {by}in the future: {clock_of} says {utc(wall_us)}"


def from_physical_us(physical_us: int, logical: int = 0) -> HybridTime:
    """Hybrid time of `physical_us` microseconds since 1970."""
    return HybridTime((physical_us << LOGICAL_BITS) | logical)


def from_datetime(moment: datetime.datetime) -> HybridTime:
    """Hybrid time of a datetime. Without a time zone it is UTC.

    Raises:
        ValueError: it is before 1970, or finer than a microsecond (as pandas' times may be).
    """
    aware = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
    if aware < _EPOCH:
        raise ValueError("it is before 1970")
    if getattr(moment, "nanosecond", 0):
        raise ValueError("it is finer than a microsecond")
    return from_physical_us((aware - _EPOCH) // datetime.timedelta(microseconds=1))


def physical_us(time: int) -> int:
    """Microseconds since 1970 of a hybrid time."""
    return time >> LOGICAL_BITS


def logical(time: int) -> int:
    """The logical counter of a hybrid time."""
    return time & _LOGICAL_MASK


class HybridClock:
    """Hands out hybrid times. The owner passes `wall_us`, which returns µs since 1970; tests pass their
    own."""

    __slots__ = ("_wall_us", "last")

    def __init__(self, wall_us: Callable[[], int], *, start: int = 0) -> None:
        self._wall_us = wall_us
        self.last = start
        """The highest time handed out or observed."""

    def now(self) -> HybridTime:
        """Return a hybrid time above all that were handed out or observed."""
        self.last = self.next_at(self._wall_us())
        return HybridTime(self.last)

    def next_at(self, wall_us: int) -> int:
        """What `now` would return if the wall clock read `wall_us`."""
        wall = wall_us << LOGICAL_BITS
        return wall if wall > self.last else self.last + 1

    def observe(self, time: int) -> None:
        """Make sure that `now` never returns `time` or less again."""
        if time > self.last:
            self.last = time

    def wall_us(self) -> int:
        """The owner's wall clock, in microseconds since 1970."""
        return self._wall_us()
