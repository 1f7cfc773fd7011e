"""Ceilings and snapshots: what was served at a snapshot stays, whoever leads next."""

from __future__ import annotations

import pytest

from stele.consensus.timestamps import Timestamps
from stele.model.clock import from_physical_us, physical_us
from stele.model.errors import Code, Rejected

AHEAD_US, ERROR_US = 250_000, 500_000


class Wall:
    """A clock that stands where it is put."""

    def __init__(self) -> None:
        self.us = 1_000_000_000

    def __call__(self) -> int:
        return self.us


def test_a_ceiling_entry_is_never_stamped_above_its_ceiling() -> None:
    """A snapshot ahead of the clock is reserved; the next leader, who knows ceilings only, must not write below it."""
    wall = Wall()
    old, new = (Timestamps(wall, AHEAD_US, ERROR_US) for _ in range(2))
    old.lead()
    snapshot = from_physical_us(wall.us + 400_000)
    old.reserve(snapshot)
    ceiling = old.next_ceiling(snapshot)
    assert ceiling is not None and not old.covers(snapshot)
    old.committed(ceiling)
    served = old.stamp(ceiling)  # as high as replicas that apply the entry serve without asking
    new.in_log(ceiling)
    new.lead()
    wall.us += 10_000
    second = new.next_ceiling()
    assert second is not None
    new.committed(second)
    assigned = new.assign() or new.stamp(second)
    assert assigned > served


def test_stamps_rise_from_one_ceiling_to_the_next() -> None:
    wall = Wall()
    times = Timestamps(wall, AHEAD_US, ERROR_US)
    times.lead()
    times.reserve(from_physical_us(wall.us + 450_000))
    stamps = []
    for _ in range(5):
        ceiling = times.next_ceiling(from_physical_us(wall.us + AHEAD_US))
        assert ceiling is not None
        stamps.append(times.stamp(ceiling))
        times.committed(ceiling)
        wall.us += 100_000
    assert stamps == sorted(set(stamps))


def test_a_new_leader_writes_nothing_in_the_future_of_its_clock() -> None:
    """Else whoever scans at the present of the same clock would miss what was acknowledged before."""
    wall = Wall()
    old, new = (Timestamps(wall, AHEAD_US, ERROR_US) for _ in range(2))
    old.lead()
    ceiling = old.next_ceiling()
    assert ceiling is not None
    new.in_log(ceiling)
    new.lead()
    wall.us += 1_000
    second = new.next_ceiling()
    assert second is not None
    new.committed(second)
    assigned = []
    while len(assigned) < 10:
        time = new.assign()
        if time is not None:
            assigned.append(time)
            assert physical_us(time) <= wall.us
        wall.us += 10_000
        if renewed := new.next_ceiling():
            new.committed(renewed)
    assert assigned[0] > ceiling


def test_a_snapshot_further_ahead_than_clocks_may_be_apart_is_refused_and_moves_no_clock() -> None:
    """Else one client whose clock is wrong would stop the writes of a tablet until its time has come."""
    wall = Wall()
    times = Timestamps(wall, AHEAD_US, ERROR_US)
    times.lead()
    limit = from_physical_us(wall.us + ERROR_US)
    with pytest.raises(Rejected) as refused:
        times.reserve(limit + 1)
    assert refused.value.code is Code.CLOCK_AHEAD
    assert physical_us(times.now()) == wall.us
    times.reserve(limit)
    assert times.now() > limit
