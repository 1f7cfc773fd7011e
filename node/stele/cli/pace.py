"""Estimates how long work still takes, at the pace of the last half minute. Used by the commands of backups.

Invariant: it gives no estimate before it has seen a second of progress.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_WINDOW_S = 30.0
_EACH_S = 1.0


class Pace:
    """Estimates the time left from how much was done at each call. Not for several threads at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()

    def left_s(self, done: int, total: int | None) -> int | None:
        """Return the seconds until `total` is done; None while this cannot be estimated.

        Only the last half minute counts, because a continued backup finds most of its rows at once.
        """
        now = self._clock()
        if not self._seen or now - self._seen[-1][0] >= _EACH_S:
            self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] >= _WINDOW_S:
            self._seen.popleft()
        since, before = self._seen[0]
        if total is None or now - since < _EACH_S or done <= before:
            return None
        return round(max(0, total - done) * (now - since) / (done - before))
