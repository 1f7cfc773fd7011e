"""A bounded share of the simulation of whole nodes in every test run, and proof that faults would be seen."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.nodesim.__main__ import found_after
from tests.nodesim.bugs import BUGS, Bug
from tests.nodesim.world import World, say_less
from tests.sim.plan import draw_plan

pytestmark = pytest.mark.sim


@pytest.fixture(autouse=True)
def _quiet() -> None:
    say_less()


@pytest.mark.parametrize("first", range(1, 31, 10))
def test_seeds(first: int) -> None:
    for seed in range(first, first + 10):
        World(draw_plan(seed)).run()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.label)
def test_planted_faults_are_found(bug: Bug) -> None:
    found = found_after(bug, bug.first, 6)
    assert found is not None and any(told in found[1] for told in bug.told.split("|")), found


def test_a_seed_tells_the_same_story_whatever_the_hashes() -> None:
    """Sets and dicts of strings are in another order in each process unless told otherwise."""
    stories = []
    for hashes in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-m", "tests.nodesim", "--seed", "9"],
            env={**os.environ, "PYTHONHASHSEED": hashes},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        stories.append(run.stdout)
    assert stories[0] == stories[1] and "LEADER" in stories[0]
