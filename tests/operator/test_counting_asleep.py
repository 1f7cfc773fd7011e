"""The number of masters and spec.hibernate: asked for while the other is under way; both end as they were asked for."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stele_operator.plan import Plan, make_plan
from stele_operator.plan.actions import CreateClaim, SetMasterCount
from tests.operator.test_counting import HEALING, ask, found, made, pods, recorded, settle, step
from tests.operator.test_hibernation import DAYS_S, hibernate
from tests.operator.world import World
from tests.operator.worlds import names

WAKING_PASSES = 12
"""A wake whose members all come takes fewer passes. To wait for one that cannot be ready would take 15 (`silentAfter`)."""


def sleep(world: World) -> Plan:
    """Pass until it sleeps. Nothing changes the number meanwhile."""
    hibernate(world)
    voters, wanted = list(world.voters), world.masters_wanted
    for _ in range(20):
        plan = step(world)
        assert not [a for a in plan.actions if isinstance(a, CreateClaim | SetMasterCount)]
        assert (world.voters, world.masters_wanted) == (voters, wanted)
        if "Hibernated" in found(plan):
            assert not names(world, "Pod") and plan.policy is None
            return plan
    raise AssertionError(found(plan))


def wake(world: World, passes: int = WAKING_PASSES) -> None:
    """Pass until it is awake. No member is made, and none leaves, before."""
    hibernate(world, False)
    voters = list(world.voters)
    for _ in range(passes):
        plan = step(world)
        if plan.policy is not None:
            return
        assert not [a for a in plan.actions if isinstance(a, CreateClaim | SetMasterCount)]
        assert world.voters == voters
        assert not {"MastersLost", "MasterLost", "MastersChanging"} & set(found(plan))
    raise AssertionError(found(plan))


CHANGES = [(1, 3), (3, 5), (5, 3), (3, 1), (5, 1)]


@pytest.mark.parametrize("passes", range(13))
@pytest.mark.parametrize(("first", "then"), CHANGES)
def test_asleep_half_way_it_goes_on_after_waking(first: int, then: int, passes: int) -> None:
    world = made(first)
    ask(world, then)
    for _ in range(passes):
        step(world)
    sleep(world)
    world.now_s += DAYS_S
    wake(world)
    settle(world, 200)
    assert len(pods(world)) == then


@pytest.mark.parametrize("passes", range(0, 12, 2))
@pytest.mark.parametrize(("first", "then"), CHANGES)
def test_taken_back_while_it_sleeps(first: int, then: int, passes: int) -> None:
    world = made(first)
    ask(world, then)
    for _ in range(passes):
        step(world)
    sleep(world)
    ask(world, first)
    for _ in range(3):
        assert not step(world).actions
    wake(world)
    settle(world, 200)
    assert len(pods(world)) == first


@pytest.mark.parametrize(("first", "then"), CHANGES)
def test_a_number_asked_for_while_it_sleeps_is_acted_on_after_waking(first: int, then: int) -> None:
    world = made(first)
    sleep(world)
    ask(world, then)
    for _ in range(3):
        assert not step(world).actions
    assert recorded(world) == first
    wake(world)
    settle(world, 200)


@pytest.mark.parametrize("passes", range(0, 12, 3))
@pytest.mark.parametrize(("first", "then"), [(3, 5), (5, 3), (5, 1)])
def test_a_machine_that_dies_while_it_sleeps_half_way(first: int, then: int, passes: int) -> None:
    """Waking waits as long as healing would; then the lost master is replaced, or is one of those that leave."""
    world = made(first, machines=9)
    ask(world, then)
    for _ in range(passes):
        step(world)
    if len(world.voters) < 3:
        return
    machine = next(n.machine for n in world.nodes.values() if n.node_id == world.voters[0][0])
    sleep(world)
    world.kill(machine)
    wake(world, 60)
    settle(world, 300)


def test_hibernation_holds_the_budget_and_the_change_shows_again_after_waking() -> None:
    world = made(3)
    ask(world, 5)
    plan = step(world)
    assert "MastersChanging" in found(plan)
    sleep(world)
    assert "MastersChanging" not in found(make_plan(world.observe()))
    wake(world)
    assert "MastersChanging" in found(make_plan(world.observe()))
    settle(world)


@pytest.mark.parametrize("seed", range(10))
def test_random_numbers_sleeps_and_interrupted_passes(seed: int) -> None:
    """Whatever is asked for, and wherever a pass is cut off, it ends as it was asked for last."""
    rng = random.Random(seed)
    world = made(rng.choice((1, 3, 5)), machines=8)
    asleep = False
    for _ in range(150):
        if rng.random() < 0.08:
            ask(world, rng.choice((1, 3, 5)))
        if rng.random() < 0.08:
            asleep = not asleep
            hibernate(world, asleep)
        if rng.random() < 0.02:
            world.now_s += DAYS_S
            world.settle()
        step(world, rng.choice((None, None, 0, 1, 2, 3)))
    hibernate(world, False)
    settle(world, 300)


def test_an_even_number_is_refused_whatever_the_api_server_took() -> None:
    world = made(3)
    for asked in (0, 2, 4, 6):
        ask(world, asked)
        plan = step(world)
        assert f"masters.replicas is {asked}; it must be 1, 3 or 5" in found(plan)["InvalidSpec"]
        assert not plan.actions and plan.policy is None
        assert (len(pods(world)), recorded(world), world.masters_wanted) == (3, 3, 3)
    ask(world, 5)
    settle(world)


@pytest.mark.parametrize("away", [1, 2])
def test_five_to_one_directly_while_masters_are_away(away: int) -> None:
    """Those that are away leave first, so no vote of theirs is missing on the way."""
    world = made(5, machines=9, healing={**HEALING, "maxLostNodes": 2})
    lost = [n for n, _ in world.voters[3 : 3 + away]]  # no node is on their machines, so nothing heals first
    for node_id in lost:
        world.kill(next(n.machine for n in world.nodes.values() if n.node_id == node_id))
    for _ in range(8):  # until they count as silent
        step(world)
    ask(world, 1)
    left: list[str] = []
    for _ in range(60):
        before = [n for n, _ in world.voters]
        step(world)
        left += [n for n in before if n not in {v for v, _ in world.voters}]
    assert set(left[:away]) == set(lost) and len(left) == 4
    settle(world, 300)


@pytest.mark.parametrize("away", [1, 2])
def test_five_to_one_while_machines_die_at_that_moment(away: int) -> None:
    """Nobody knows yet that they are silent. A change that no majority would take is not made, and it ends all the same."""
    world = made(5, machines=9, healing={**HEALING, "maxLostNodes": 2})
    ask(world, 1)
    step(world)
    for node_id in [n for n, _ in world.voters[1 : 1 + away]]:
        world.kill(next(n.machine for n in world.nodes.values() if n.node_id == node_id))
    settle(world, 300)


def test_five_to_one_waits_for_a_majority_and_goes_on_once_it_is_back() -> None:
    world = made(5, machines=9)
    gone = {n.machine for n in world.nodes.values() if n.node_id in {v for v, _ in world.voters[:3]}}
    for machine in gone:
        world.kill(machine)
    ask(world, 1)
    for _ in range(30):
        step(world)
    assert len(world.voters) == 5 and len(pods(world)) == 5
    world.machines = [replace(m, ready=True) for m in world.machines]
    settle(world, 300)
