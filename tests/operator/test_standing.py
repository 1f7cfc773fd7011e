"""The policy by which the masters heal while the operator is away follows the TabletCluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stele.driver.policy import StandingPolicy
from stele.driver.view import Away, Holder
from stele.model.errors import Code, Rejected
from stele_operator.masters import MasterLink
from stele_operator.plan import make_plan
from stele_operator.plan.actions import SetDriverPolicy
from tests.operator.desk import Kept
from tests.operator.world import World
from tests.operator.worlds import made
from tests.tserver.local import LocalCluster

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


async def test_an_operator_that_lost_its_claim_changes_no_policy_by_what_it_saw_before(
    tmp_path: Path,
) -> None:
    """A late call of an operator that stood still took back which nodes its successor had sent away."""
    policy = StandingPolicy(30_000, 1, 4, 0, 120_000, OWNER)
    cluster = LocalCluster(tmp_path, nodes=1)
    links = [MasterLink(cluster.cluster_id, "operator") for _ in range(2)]
    try:
        await cluster.start()
        before, after = links
        for link in links:
            link.learn([cluster.master_address])
        await before.driver.ensure_claim()
        await before.set_policy(policy)
        await after.driver.ensure_claim()
        away = (Holder("upgrade", (Away("a" * 32),)),)
        await after.set_policy(replace(policy, holding=away))
        with pytest.raises(Rejected) as caught:
            await before.set_policy(policy)
        assert caught.value.code is Code.STALE_EPOCH
        seen = (await after.catalog()).standing
        assert seen is not None and seen.holding == away
        assert before.driver.claim is None  # so its next pass claims, and decides anew
        for _ in range(2):  # the first ends the claim
            await after.set_policy(replace(policy, held="TabletCluster data/flights hibernates"))
    finally:
        for link in links:
            await link.close()
        await cluster.close()
