"""The shrinker keeps what a failure needs, and removes the rest."""

from __future__ import annotations

import pytest

from tests.sim.bugs import BUGS
from tests.sim.shrink import shrink
from tests.sim.world import World, say_less

pytestmark = pytest.mark.sim


def test_a_failure_is_left_with_the_trouble_that_it_needs() -> None:
    say_less()
    bug = next(bug for bug in BUGS if bug.label == "a message before its Persist")
    plan = bug.plan(bug.first)
    assert plan.partitions_per_s or plan.crashes_per_s or plan.loss
    found = shrink(plan, bug, runs_max=40)
    assert found is not None and bug.told in found.failure.what
    smaller = found.plan
    assert not (smaller.partitions_per_s or smaller.loss or smaller.duplicate), "no fault is needed for it"
    assert len(found.spared) == found.strikes, "and no strike"


def test_a_world_that_does_not_fail_is_not_made_smaller() -> None:
    say_less()
    bug = BUGS[0]
    plan = bug.plan(1)
    assert shrink(plan) is None
    assert World(plan).run().acknowledged > 0
