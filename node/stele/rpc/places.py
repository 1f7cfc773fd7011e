"""Places for streams that a node serves at once: shared out to its callers, and taken from those who take nothing. Used by
flight.py; any thread.

Invariants: no more than `count` places are taken. Who has none is not kept out by one caller that has many: the last quarter
is for callers below an equal share. Where none is free, a stream whose reader takes nothing for YIELD_S gives way, of the
callers that have the most.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable

YIELD_S = 1.0


class Place:
    """Of one stream. `idle_since_s`: since when its reader lets it wait, on time.monotonic; infinity while it works.
    `give_way` ends the stream, if its reader still lets it wait."""

    __slots__ = ("_places", "give_way", "idle_since_s", "source")

    def __init__(self, places: Places, source: str) -> None:
        self._places: Places | None = places
        self.source = source
        self.idle_since_s = math.inf
        self.give_way: Callable[[], None] = lambda: None

    def release(self) -> None:
        """Another may have it; a second call does nothing."""
        places, self._places = self._places, None
        if places is not None:
            places.left(self)


class Places:
    """`count` of them, for one kind of stream."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.RLock()  # the end of a stream may come wherever memory is taken, in here too
        self._taken: dict[Place, None] = {}
        self._of: Counter[str] = Counter()

    def take(self, source: str) -> Place | None:
        """A place for a stream of this caller; None: there is none."""
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
        """Its stream has ended."""
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
