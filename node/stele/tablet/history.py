"""The history marks of a store: how far back snapshots are served, and which versions may be dropped.

Made by store.py. Reads what applying, holds, jobs and the manifest say, and changes nothing. Any thread.

Invariant: a version that a snapshot at or above `mark` shows is never dropped, nor one that a remembered job needs.
"""

from __future__ import annotations

from collections.abc import Callable

from stele.model.clock import from_physical_us, physical_us
from stele.tablet.applying import Applying
from stele.tablet.contents import Contents
from stele.tablet.holding import Holding
from stele.tablet.jobs import Jobs
from stele.tablet.progress import Progress


class History:
    """How far back a store serves snapshots, and which old versions it may drop.

    `default_us`: the length of history where the schema names none."""

    def __init__(
        self,
        contents: Contents,
        applying: Applying,
        progress: Progress,
        holding: Holding,
        jobs: Jobs,
        *,
        default_us: int,
        wall_us: Callable[[], int],
        steady_us: Callable[[], int],
    ) -> None:
        self._contents = contents
        self._applying = applying
        self._progress = progress
        self._holding = holding
        self._jobs = jobs
        self.default_us = default_us
        self._wall_us = wall_us
        self._steady_us = steady_us

    @property
    def length_us(self) -> int:
        """How long old versions are kept for snapshots, in microseconds before the present."""
        return self._contents.state.active.schema.history_ms * 1_000 or self.default_us

    @property
    def mark(self) -> int:
        """Hybrid time below which no snapshot is served."""
        return max(self._contents.state.manifest.history_mark, self._holding.mark(self.free_mark))

    @property
    def free_mark(self) -> int:
        """What `mark` would be without holds and without what was dropped. It follows the present, but stays below the
        newest write.

        Snapshots above the newest write all show the same rows, and are always served. Each replica has its
        own mark; marks differ by how late each replica has applied. If the newest write's time is ahead of the wall
        clock, the wall clock is used. Otherwise snapshots of the present could fall below the mark.
        """
        # `apply` sets these in the reverse order, so another thread can only see too short a time.
        newest, written_us = self._progress.last_timestamp, self._applying.written_us
        rested_us = max(0, self._steady_us() - written_us)
        lag = min(physical_us(newest) + rested_us, self._wall_us()) - self.length_us
        return min(self._applying.readable, from_physical_us(lag)) if lag > 0 else 0

    @property
    def drop_mark(self) -> int:
        """Versions that only snapshots below this hybrid time see may be dropped."""
        # In this order: a job that enters in between has its first write above the mark.
        return min(self.mark, self._jobs.held)
