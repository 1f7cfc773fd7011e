"""New ids, of clients or jobs, whose writes this leader has proposed and not applied yet. Used by exactly_once.py and
jobs.py.

A tablet remembers a bounded number of ids, and a new one pushes out the least recently active one. A leader that
counted only applied ids would admit any number of new ones at once. Invariant: no replicated state depends on this.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Protocol


class _Active(Protocol):
    last_us: int


class Expected:
    """The new ids, all of clients or all of jobs, that have proposed writes."""

    def __init__(self) -> None:
        self._ids: set[bytes] = set()

    def __contains__(self, one: bytes) -> bool:
        return one in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, one: bytes) -> None:
        """Note that a write of this id is proposed."""
        self._ids.add(one)

    def discard(self, one: bytes) -> None:
        """Forget this id: its write was applied or lost."""
        self._ids.discard(one)

    def wait_us(self, known: Mapping[bytes, _Active], most: int, kept_us: int, wall_us: int) -> int:
        """Return for how many µs another new id must wait. Otherwise it would push out an id that was active
        within `kept_us`. 0 or less: it need not wait.

        `known`: the applied ids, least recently active first. `most`: how many are remembered.
        """
        pushed_out = len(known) + len(self._ids) - most
        if pushed_out < 0:
            return 0
        if pushed_out >= len(known):
            return kept_us
        return next(islice(known.values(), pushed_out, None)).last_us + kept_us - wall_us
