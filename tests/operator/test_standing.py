"""The policy by which the masters heal while the operator is away follows the TabletCluster."""

from __future__ import annotations

from dataclasses import replace

from stele.driver.policy import StandingPolicy
from stele_operator.masters import MasterLink
from stele_operator.plan import make_plan
from stele_operator.plan.actions import SetDriverPolicy
from tests.operator.desk import Kept
from tests.operator.world import World
from tests.operator.worlds import made

OWNER = "TabletCluster data/flights"


def test_the_masters_get_the_policy_of_the_spec_and_each_change_of_it() -> None:
    world = made()
    assert world.standing == StandingPolicy(30_000, 1, 4, (100 << 20) // 4, 120_000, OWNER)
    world.cluster["spec"]["healing"] = {"witnessAfter": "45s", "maxLostNodes": 2, "mastersDriveAfter": "0s"}
    world.cluster["spec"]["budget"] = {"copies": 2}
    world.run()
    assert world.standing == StandingPolicy(45_000, 2, 2, (100 << 20) // 2, 0, OWNER)
    assert not any(isinstance(a, SetDriverPolicy) for a in make_plan(world.observe()).actions)


def test_nobody_heals_a_paused_cluster() -> None:
    world = made()
    world.cluster["spec"]["paused"] = True
    world.run()
    assert world.standing == StandingPolicy(30_000, 1, 4, (100 << 20) // 4, 0, OWNER)
    world.cluster["spec"]["paused"] = False
    world.run()
    assert world.standing is not None and world.standing.drive_after_ms == 120_000


def test_a_spec_that_breaks_a_rule_leaves_the_policy_as_it_is() -> None:
    world = made()
    before = world.standing
    world.cluster["spec"]["masters"] = {"replicas": 2}
    world.cluster["spec"]["healing"] = {"witnessAfter": "45s"}
    world.run()
    assert world.standing == before


def test_masters_of_an_earlier_version_keep_no_policy_and_are_not_asked_to() -> None:
    world = made()
    world.standing = None
    o = world.observe()
    assert o.catalog is not None and o.catalog.standing is None
    assert not any(isinstance(a, SetDriverPolicy) for a in make_plan(o).actions)
    unknown = replace(o, catalog=None)
    assert not any(isinstance(a, SetDriverPolicy) for a in make_plan(unknown).actions)


def test_times_without_end_are_cut_to_what_masters_take() -> None:
    world: World = made()
    world.cluster["spec"]["healing"] = {"mastersDriveAfter": "99999999d"}
    world.run()
    assert world.standing is not None and not world.standing.faults


async def test_an_operator_that_may_not_heal_leaves_it_to_the_masters() -> None:
    """It said at each pass that it was at work, though the spec broke a rule: then nobody healed."""
    world = made()
    task = Kept(world)
    task._link = MasterLink("f" * 32, "test")
    try:
        await task.run_pass()
        assert task._link.at_work
        world.cluster["spec"]["masters"] = {"replicas": 2}
        await task.run_pass()
        assert not task._link.at_work
    finally:
        await task._hang_up()
