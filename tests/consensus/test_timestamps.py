"""Ceilings and snapshots: what was served at a snapshot stays, whoever leads next."""

from __future__ import annotations

import pytest

from stele.consensus.timestamps import Timestamps
from stele.model.clock import from_physical_us, physical_us
from stele.model.errors import Code, Rejected

AHEAD_US, AHEAD_MAX_US, ERROR_US = 250_000, 5_000_000, 500_000
TICK_US = 2_000


class Wall:
    """A clock that stands where it is put."""

    def __init__(self) -> None:
        self.us = 1_000_000_000

    def __call__(self) -> int:
        return self.us


def timestamps(wall: Wall) -> Timestamps:
    """Of a replica with the usual options."""
    return Timestamps(wall, AHEAD_US, AHEAD_MAX_US, ERROR_US)


class Leader:
    """Writes as often as it can; each ceiling is committed `commit_us` after it was proposed."""

    def __init__(self, wall: Wall, times: Timestamps, commit_us: int) -> None:
        self.wall = wall
        self.times = times
        self.commit_us = commit_us
        self.ceilings = [0]
        self.committed = 0
        self.assigned = [0]
        self._due: tuple[int, int] | None = None  # when the ceiling that is on its way is committed, and it
        times.lead()

    def lead(self, for_us: int) -> int:
        """How many of its moments had a timestamp, in a hundred."""
        moments = for_us // TICK_US
        before = len(self.assigned)
        for _ in range(moments):
            self.wall.us += TICK_US
            self.moment()
        return (len(self.assigned) - before) * 100 // moments

    def moment(self) -> None:
        wall, times = self.wall.us, self.times
        if self._due is not None and wall >= self._due[0]:
            self.committed = self._due[1]
            times.committed(self.committed)
            self._due = None
        time = times.assign()
        if time is not None:
            assert self.assigned[-1] < time <= self.committed
            assert physical_us(time) == wall, "neither in the future nor in the past"
            self.assigned.append(time)
        due = times.ceiling_due
        ceiling = times.next_ceiling()
        assert time is None or due == (ceiling is not None), (
            "whoever has a timestamp asks for a ceiling when it is due"
        )
        if ceiling is not None:
            assert self._due is None and self.ceilings[-1] < ceiling
            assert physical_us(ceiling) - wall <= AHEAD_MAX_US
            times.in_log(ceiling)
            self.ceilings.append(ceiling)
            self._due = wall + self.commit_us, ceiling


def test_a_ceiling_entry_is_never_stamped_above_its_ceiling() -> None:
    """A snapshot ahead of the clock is reserved; the next leader, who knows ceilings only, must not write below it."""
    wall = Wall()
    old, new = (timestamps(wall) for _ in range(2))
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
    times = timestamps(wall)
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
    old, new = (timestamps(wall) for _ in range(2))
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
    times = timestamps(wall)
    times.lead()
    limit = from_physical_us(wall.us + ERROR_US)
    with pytest.raises(Rejected) as refused:
        times.reserve(limit + 1)
    assert refused.value.code is Code.CLOCK_AHEAD
    assert "lies 0.5 s in the future: the clock of node" in str(refused.value)
    assert "give an earlier time, or no snapshot to read the present" in str(refused.value)
    assert physical_us(times.now()) == wall.us
    with pytest.raises(Rejected, match=r"the snapshot 1970-.* UTC lies in the future: the clock of node"):
        times.reserve(from_physical_us(wall.us + 3_600_000_000))
    times.reserve(limit)
    assert times.now() > limit


@pytest.mark.parametrize("commit_ms", [1, 60, 150, 251, 1_000, 2_400])
def test_writes_proceed_however_long_ceilings_take(commit_ms: int) -> None:
    """What took longer than the lead lay in the past once it was committed, and so did the next, for ever."""
    wall = Wall()
    leader = Leader(wall, timestamps(wall), commit_ms * 1_000)
    leader.lead(3 * leader.commit_us + TICK_US)  # the first is too late where it takes longer than the lead
    assert leader.lead(60_000_000) > 98


def test_of_ceilings_that_take_almost_as_long_as_they_may_run_ahead_a_part_is_left() -> None:
    wall = Wall()
    assert Leader(wall, timestamps(wall), 4_000_000).lead(60_000_000) > 10


def test_ceilings_run_no_further_ahead_than_quick_commits_need() -> None:
    """One that took long is not paid for ever."""
    wall = Wall()
    leader = Leader(wall, timestamps(wall), 1_000_000)
    leader.lead(10_000_000)
    assert physical_us(leader.ceilings[-1]) > wall.us + AHEAD_US
    leader.commit_us = 5_000
    leader.lead(10_000_000)
    assert physical_us(leader.ceilings[-1]) <= wall.us + AHEAD_US


@pytest.mark.parametrize("commit_ms", [1_000, 3_000])
def test_who_leads_where_commits_take_long_serves_snapshots_at_once_and_writes_above_all_before(
    commit_ms: int,
) -> None:
    wall = Wall()
    old = Leader(wall, timestamps(wall), commit_ms * 1_000)
    old.lead(20_000_000)
    times = timestamps(wall)
    for ceiling in old.ceilings:
        times.in_log(ceiling)
    highest = old.ceilings[-1]
    new = Leader(wall, times, commit_ms * 1_000)
    wall.us += TICK_US
    new.moment()
    assert times.behind_ms == 0, "no clock is wrong"
    assert new.ceilings[-1] > highest, "proposed already"
    wait_us = max(physical_us(highest) - wall.us, 0)
    new.lead(wait_us + 3 * new.commit_us)
    assert new.assigned[1] > highest > old.assigned[-1]


def test_who_leads_after_one_whose_clock_was_far_ahead_says_so() -> None:
    wall = Wall()
    times = timestamps(wall)
    times.in_log(from_physical_us(wall.us + 3_600_000_000))
    times.lead()
    assert times.behind_ms == 3_600_000 - AHEAD_US // 1_000
    assert times.next_ceiling() is None and times.assign() is None
