"""A bounded share of the simulator in every test run, and proof that it finds planted faults."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import cache
from zlib import crc32

import pytest

from tests.sim.bugs import BUGS, Bug
from tests.sim.draw import draw_plan, weather_of
from tests.sim.plan import Plan, Weather
from tests.sim.world import Outcome, World, say_less

pytestmark = pytest.mark.sim


@pytest.fixture(autouse=True)
def _quiet() -> None:
    say_less()


@cache
def run(plan: Plan) -> Outcome:
    """A run of sound code. Several tests ask for the same one; a run takes a second, and gives the same each time."""
    return World(plan).run()


@pytest.mark.parametrize("first", range(1, 13, 6))
def test_seeds(first: int) -> None:
    for seed in range(first, first + 6):
        run(draw_plan(seed))


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(3300668, id="rows of a restarted witness end beyond what it knows to be committed"),
        pytest.param(3302475, id="a witness is demoted before its rows came"),
        pytest.param(5326, id="a promotion widens the rule of commits behind an answer"),
    ],
)
def test_seeds_that_found_a_fault(seed: int) -> None:
    run(draw_plan(seed))


@pytest.mark.parametrize("weather", Weather)
def test_every_weather(weather: Weather) -> None:
    run(draw_plan(31, weather))


def test_a_run_of_many_seeds_has_the_weathers_that_no_seed_draws() -> None:
    """Leases and reads at followers were in no run of ten thousand seeds."""
    asked = Counter(weather_of(seed) for seed in range(1, 401))
    by_turns = {Weather.CLOCKS, Weather.FULL_DISKS, Weather.FOLLOWERS, Weather.LEASES}
    assert set(asked) == {None, *by_turns} and all(asked[weather] == 20 for weather in by_turns), asked
    arguments = ["--seeds", "1", "--start", "31", "--weather", "leases"]
    command = [sys.executable, "-m", "tests.sim", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "reads under a lease" in done.stdout


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.label)
def test_planted_faults_are_found(bug: Bug) -> None:
    found = bug.found_after(bug.first, 3)
    assert found is not None, f"{bug.label} went unseen"
    run(bug.plan(bug.first + found[0] - 1))  # sound code passes


def test_a_seed_tells_the_same_story_whatever_the_hashes() -> None:
    """Sets and dicts of strings have another order in each process unless PYTHONHASHSEED is set."""
    stories = []
    for hashes in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-m", "tests.sim", "--seed", "9"],
            env={**os.environ, "PYTHONHASHSEED": hashes},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        stories.append(run.stdout)
    assert stories[0] == stories[1] and "LEADER" in stories[0]


def test_a_seed_writes_the_same_bytes_to_every_disk() -> None:
    """Ids of segments came from the operating system. Rot changes only bytes that are not 0, so it found
    other bytes in each run."""

    def written() -> list[tuple[str, int]]:
        world = World(draw_plan(3))
        world.run()
        disks = ((node.replica_id, node.disk) for node in world.all_nodes())
        return [(f"{n} {path}", crc32(disk.content(path))) for n, disk in disks for path in disk.paths()]

    assert written() == written()


def test_groups_come_to_rest() -> None:
    worlds = [plan for seed in range(1, 61) if (plan := draw_plan(seed)).rest_after_ms is not None]
    assert sum(run(plan).rests for plan in worlds[:3]) > 10


def test_no_seeds_are_refused() -> None:
    command = [sys.executable, "-m", "tests.sim", "--seeds", "-1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "--seeds -1: expected 1 or more" in done.stderr
