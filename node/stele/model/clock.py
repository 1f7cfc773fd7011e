"""Hybrid time: physical microseconds above a logical counter (Kulkarni et al., 2014). Reads no clock of its own.

Invariant: values that `HybridClock.now` hands out rise strictly.
"""

from __future__ import annotations

from collections.abc import Callable

from stele.model.ids import HybridTime

LOGICAL_BITS = 12
_LOGICAL_MASK = (1 << LOGICAL_BITS) - 1


def from_physical_us(physical_us: int, logical: int = 0) -> HybridTime:
    """Hybrid time of `physical_us` microseconds since 1970."""
    return HybridTime((physical_us << LOGICAL_BITS) | logical)


def physical_us(time: int) -> int:
    """Microseconds since 1970 of a hybrid time."""
    return time >> LOGICAL_BITS


def logical(time: int) -> int:
    """The logical counter of a hybrid time."""
    return time & _LOGICAL_MASK


class HybridClock:
    """Hands out hybrid times. `wall_us` returns microseconds since 1970; it is the owner's, so tests may own time."""

    __slots__ = ("_last", "_wall_us")

    def __init__(self, wall_us: Callable[[], int], *, start: int = 0) -> None:
        self._wall_us = wall_us
        self._last = start

    def now(self) -> HybridTime:
        """A hybrid time above all that were handed out or observed before."""
        wall = self._wall_us() << LOGICAL_BITS
        self._last = wall if wall > self._last else self._last + 1
        return HybridTime(self._last)

    def observe(self, time: int) -> None:
        """Never hand out `time` or less from now on."""
        if time > self._last:
            self._last = time

    @property
    def last(self) -> int:
        """The highest time handed out or observed."""
        return self._last

    def wall_us(self) -> int:
        """The owner's wall clock, microseconds since 1970."""
        return self._wall_us()
