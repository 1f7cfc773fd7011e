"""Finds a smaller world that fails in the same way: it removes faults one at a time while the failure stays.

First whole kinds of faults, then single strikes. Invariant: what it returns has failed like the first run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from tests.sim.bugs import Bug
from tests.sim.plan import Plan
from tests.sim.world import SimulationFailure, World

_HARMLESS: tuple[tuple[str, Any], ...] = (
    ("leaves", ""),
    ("failures", False),
    ("loss", 0.0),
    ("duplicate", 0.0),
    ("slow_message", 0.0),
    ("partitions_per_s", 0.0),
    ("crashes_per_s", 0.0),
    ("crash_after_vote", 0.0),
    ("crash_after_election", 0.0),
    ("crash_in_change", 0.0),
    ("reaches", ()),
    ("rushes_per_s", 0.0),
    ("alarms_per_s", 0.0),
    ("usurpers_per_s", 0.0),
    ("returns", 0.0),
    ("late_answers", 0.0),
    ("reads_back", 0.0),
    ("stalls_per_s", 0.0),
    ("slow_disks_per_s", 0.0),
    ("unfit_per_s", 0.0),
    ("disk_errors_per_s", 0.0),
    ("full_disks_per_s", 0.0),
    ("cuts_per_s", 0.0),
    ("rots_per_s", 0.0),
    ("kill", 0.0),
    ("clock_off_ms", 0.0),
    ("clock_skew", 0.0),
    ("rest_after_ms", None),
    ("changes_per_s", 0.0),
    ("transfers_per_s", 0.0),
    ("flushes_per_s", 0.0),
    ("snapshots_per_s", 0.0),
    ("reads_per_s", 0.0),
    ("hinted", False),
)
"""Fields of a plan, with the values that remove their faults."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """`without`: fields of the plan that do not matter; `spared`: strikes that do not, of all `strikes`; `runs`: how many runs
    it took."""

    plan: Plan
    spared: frozenset[int]
    strikes: int
    without: tuple[str, ...]
    failure: SimulationFailure
    runs: int


class _Shrinker:
    def __init__(self, bug: Bug | None, runs_max: int) -> None:
        self._bug = bug
        self._runs_max = runs_max
        self.runs = 0
        self.strikes = 0

    def fails(self, plan: Plan, spared: frozenset[int]) -> SimulationFailure | None:
        """The failure in that world, or None."""
        self.runs += 1
        planted: AbstractContextManager[None] = nullcontext() if self._bug is None else self._bug.planted()
        world = World(plan, strict=self._bug is None or self._bug.strict, spared=spared)
        try:
            with planted:
                world.run()
        except SimulationFailure as exc:
            return exc
        finally:
            self.strikes = world.faults.strikes_total
        return None

    @property
    def tired(self) -> bool:
        return self.runs >= self._runs_max


def _kind(failure: SimulationFailure) -> str:
    """The kind of failure, without replica and time."""
    return re.sub(r"\d[\d.]*", "#", failure.what.split(" ms: ", 1)[1])[:60]


def _chunks(numbers: list[int]) -> Iterator[list[int]]:
    size = len(numbers)
    while size >= 1:
        for at in range(0, len(numbers), size):
            yield numbers[at : at + size]
        size //= 2


def shrink(plan: Plan, bug: Bug | None = None, runs_max: int = 150) -> Shrunk | None:
    """A smaller world that fails like this one, after at most `runs_max` runs. None: this one does not
    fail."""
    shrinker = _Shrinker(bug, runs_max)
    failure = shrinker.fails(plan, frozenset())
    if failure is None:
        return None
    kind = _kind(failure)
    without = []
    for name, harmless in _HARMLESS:
        if getattr(plan, name) == harmless or shrinker.tired:
            continue
        smaller = replace(plan, **{name: harmless})
        found = shrinker.fails(smaller, frozenset())
        if found is not None and _kind(found) == kind:
            plan, failure = smaller, found
            without.append(name)
    shrinker.fails(plan, frozenset())
    strikes = shrinker.strikes
    spared: frozenset[int] = frozenset()
    for chunk in _chunks(list(range(1, strikes + 1))):
        if shrinker.tired or spared.issuperset(chunk):
            continue
        found = shrinker.fails(plan, spared.union(chunk))
        if found is not None and _kind(found) == kind:
            spared, failure = spared.union(chunk), found
    return Shrunk(plan, spared, strikes, tuple(without), failure, shrinker.runs)
