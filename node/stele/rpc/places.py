"""Places for the streams that a node serves at once, shared out fairly among callers. Used by flight.py; any
thread.

Invariants: at most `count` places are taken. A caller with many cannot keep out one with none: the last
quarter is for callers below an equal share. If no place is free, a stream whose reader took nothing for
YIELD_S gives way. It is chosen among the callers with the most places.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable

YIELD_S = 1.0


class Place:
    """A stream's place. `idle_since_s`: since when its reader takes nothing, on time.monotonic; infinity
    while the reader takes batches.

    `give_way` ends the stream if its reader still takes nothing."""

    __slots__ = ("_places", "give_way", "idle_since_s", "source")

    def __init__(self, places: Places, source: str) -> None:
        self._places: Places | None = places
        self.source = source
        self.idle_since_s = math.inf
        self.give_way: Callable[[], None] = lambda: None

    def release(self) -> None:
        """Free the place. A second call does nothing."""
        places, self._places = self._places, None
        if places is not None:
            places.left(self)


class Places:
    """Lets at most `count` streams of one kind be served at once. Each takes a `Place`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.RLock()  # a stream may be freed at any memory allocation, also in here
        self._taken: dict[Place, None] = {}
        self._of: Counter[str] = Counter()

    def take(self, source: str) -> Place | None:
        """A place for a stream of this caller; None if there is none."""
        for _ in range(self._count + 1):
            with self._lock:
                if self._may_take(source):
                    place = Place(self, source)
                    self._taken[place] = None
                    self._of[source] += 1
                    return place
                idle = self._idle_longest(source)
            if idle is None:
                return None
            idle.give_way()
        return None

    def left(self, place: Place) -> None:
        """Note that the stream of this place has ended."""
        with self._lock:
            if self._taken.pop(place, place) is None:
                self._of[place.source] -= 1
                if not self._of[place.source]:
                    del self._of[place.source]

    def _may_take(self, source: str) -> bool:
        free = self._count - len(self._taken)
        callers = len(self._of) + (source not in self._of)
        return free > self._count // 4 or (free > 0 and self._of[source] < -(-self._count // max(callers, 2)))

    def _idle_longest(self, source: str) -> Place | None:
        before_s, own = time.monotonic() - YIELD_S, self._of[source]
        idle = [
            place
            for place in self._taken
            if place.idle_since_s <= before_s and (place.source == source or self._of[place.source] > own)
        ]
        return max(idle, key=lambda place: (self._of[place.source], -place.idle_since_s), default=None)
