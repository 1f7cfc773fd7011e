"""A bounded share of the simulation in every test run, named seeds for ever, and proof that bugs would be seen."""

from __future__ import annotations

from itertools import count, islice
from pathlib import Path

import pytest

from stele.consensus.timestamps import Timestamps
from stele.raft import RaftCore
from stele.tserver.quiet import QuietGroups
from tests.sim.bugs import PLANTED, PLANTED_STEPS, PLANTED_TIMESTAMPS
from tests.sim.plan import Weather, draw_plan
from tests.sim.world import SimulationFailure, World

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("first", range(1, 101, 10))
def test_seeds(first: int) -> None:
    for seed in range(first, first + 10):
        World(draw_plan(seed)).run()


def _regressions() -> list[tuple[int, Weather | None, bool]]:
    found = []
    for line in (Path(__file__).parent / "regressions.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            seed, rest = line.split(" ", 1)
            weather = next((w for w in Weather if rest.startswith(w.value)), None)
            found.append((int(seed), weather, "wrong clocks" in rest))
    return found


@pytest.mark.parametrize(("seed", "weather", "clocks"), _regressions())
def test_regressions(seed: int, weather: Weather | None, clocks: bool) -> None:
    World(draw_plan(seed, weather, clocks=clocks)).run()


def test_a_seed_always_tells_the_same_story() -> None:
    assert World(draw_plan(7)).run() == World(draw_plan(7)).run()


@pytest.mark.parametrize(
    ("bug", "weather", "first", "seeds"), PLANTED, ids=lambda v: getattr(v, "__name__", None)
)
def test_planted_bugs_are_caught(bug: type[RaftCore], weather: Weather, first: int, seeds: int) -> None:
    """Within `seeds` seeds from `first`; the same seeds run clean with the sound core."""
    for seed in range(first, first + seeds):
        try:
            World(draw_plan(seed, weather, clocks=False), bug, strict=False).run()
        except SimulationFailure:
            World(draw_plan(seed, weather, clocks=False)).run()
            return
    pytest.fail(f"{bug.__name__} went unseen through {seeds} seeds")


@pytest.mark.parametrize(("bug", "weather", "seed", "told"), PLANTED_STEPS)
def test_broken_promises_are_seen_when_they_are_made(
    bug: type[RaftCore], weather: Weather, seed: int, told: str
) -> None:
    with pytest.raises(SimulationFailure, match=told):
        World(draw_plan(seed, weather), bug).run()


@pytest.mark.parametrize(("bug", "first"), PLANTED_TIMESTAMPS, ids=lambda v: getattr(v, "__name__", None))
def test_planted_bugs_of_timestamps_are_caught(bug: type[Timestamps], first: int) -> None:
    timed = (plan for seed in count(first) if (plan := draw_plan(seed)).clock_off_ms and not plan.lull_ms)
    for plan in islice(timed, 8):
        try:
            World(plan, timestamps_class=bug).run()
        except SimulationFailure as failure:
            assert "timestamp" in str(failure) or "snapshot" in str(failure)
            World(plan).run()
            return
    pytest.fail(f"{bug.__name__} went unseen")


def test_groups_come_to_rest() -> None:
    worlds = [plan for seed in range(1, 31) if (plan := draw_plan(seed)).rest_after_ms is not None]
    assert sum(World(plan).run().rests for plan in worlds) > 50


def test_who_rests_though_its_leader_is_silent_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QuietGroups, "lives", lambda groups, node_id: True)
    with pytest.raises(SimulationFailure, match="at rest without a leader"):
        World(draw_plan(54, clocks=False)).run()
