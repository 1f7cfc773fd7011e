"""spec.budget.maxUnavailable: how many pods are made again at once, and where tablets allow fewer."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.observe import read_spec
from stele_operator.plan import make_plan
from tests.operator.test_budgets import with_failed
from tests.operator.together import change_nodes, found, made, of_nodes, roll, rolled, up
from tests.operator.worlds import check


@pytest.mark.parametrize(
    ("most", "factor", "tablets", "away"),
    [
        (1, 3, 2, 1),
        (2, 3, 2, 2),  # node 4 holds nothing, and goes beside others
        (2, 3, 6, 2),  # nodes 0 and 3 share no tablet
        (3, 3, 6, 2),
        (2, 5, 6, 1),  # each two nodes share a tablet, which would be left without a spare
        (4, 0, 0, 4),
        (2, 1, 6, 2),
    ],
)
def test_as_many_nodes_are_made_again_at_once_as_tablets_allow(
    most: int, factor: int, tablets: int, away: int
) -> None:
    world = made(most, factor=factor, tablets=tablets)
    change_nodes(world)
    order, at_most = roll(world)
    assert sorted(order) == [f"flights-node-{n}" for n in range(6)]
    assert at_most == away


def test_a_tablet_of_seven_replicas_can_spare_two_and_keep_a_spare() -> None:
    world = made(2, nodes=7, factor=7, tablets=1)
    change_nodes(world)
    assert roll(world)[1] == 2
    world = made(3, nodes=7, factor=7, tablets=1)
    change_nodes(world)
    assert roll(world)[1] == 2


def test_the_first_node_goes_alone_and_if_it_does_not_come_back_no_other_goes() -> None:
    world = made(3, factor=0)
    change_nodes(world)
    plan = world.step()
    (first,) = rolled(plan)
    world.silent.add(first)
    more: list[str] = []
    for _ in range(20):
        more += rolled(world.step())
    assert not more
    world.silent.clear()
    for _ in range(12):
        more += rolled(world.step())
    assert len(more) >= 3


def test_a_pod_that_was_started_again_by_itself_lets_no_other_go() -> None:
    world = made(3, factor=0)
    change_nodes(world)
    (first,) = rolled(world.step())
    while not rolled(plan := world.step()):
        pass
    (second,) = rolled(plan)
    world.step()
    raw = world.objects["Pod", second]
    world.settle()
    raw["status"]["containerStatuses"][0]["restartCount"] = 1
    observed = world.observe()
    assert not rolled(make_plan(observed))
    assert "must be ready first" in found(make_plan(observed))["RollWaits"]
    raw["status"]["containerStatuses"][0]["restartCount"] = 0
    assert rolled(make_plan(world.observe())) and first != second


@pytest.mark.parametrize("ails", ["a lost machine", "a failed replica", "a leader that left"])
def test_heals_go_first_whatever_the_budget(ails: str) -> None:
    world = made(3, nodes=8)
    change_nodes(world)
    for _ in range(30):
        plan = world.step()
        if rolled(plan) and rolled(plan) != ["flights-node-0"]:
            break
    if ails == "a lost machine":
        world.kill("n8")
        world.settle()
    elif ails == "a failed replica":
        world.tablets[0] = with_failed(world.tablets[0])
    else:
        world.tablets[0] = replace(world.tablets[0], leader_node="")
    for _ in range(4):
        plan = world.step()
        assert not rolled(plan)
    assert "RollWaits" in found(plan)


@pytest.mark.parametrize("value", [0, -1, 101, "50%", 1.5])
def test_the_operator_refuses_bad_values_by_itself(value: object) -> None:
    """Not every API server runs the rules of the schema."""
    spec, faults, _ = read_spec(TabletClusterSpec, {"spec": {"budget": {"maxUnavailable": value}}})
    assert spec is None and "spec.budget.maxUnavailable" in faults[0]


@pytest.mark.parametrize("seed", range(6))
def test_at_random_no_tablet_loses_its_majority_by_our_doing_and_a_roll_always_ends(seed: int) -> None:
    """Machines fail and come back, nodes are parked and wanted back, and the spec changes again meanwhile."""
    rng = random.Random(seed)
    most, factor = rng.choice([2, 3]), rng.choice([3, 5])
    world = made(most, nodes=7, factor=factor, tablets=rng.choice([2, 4, 7]))
    down = ""
    for _ in range(160):
        if rng.random() < 0.08:
            change_nodes(world, rng.choice("abc"))
        if rng.random() < 0.05:
            world.cluster["spec"]["nodes"]["park"] = rng.sample(
                sorted(of_nodes(world)), rng.choice([0, 1, 2])
            )
        if not down and rng.random() < 0.03:
            down = rng.choice(["n1", "n2", "n3"])
            world.kill(down)
            world.settle()
        elif down and rng.random() < 0.2:
            world.machines = [replace(m, ready=True) for m in world.machines]
            down = ""
        before = up(world)
        plan = world.step()
        check(world)
        taken = rolled(plan)
        assert len(taken) <= 1
        if taken:
            ids = of_nodes(world)
            after = before - {ids.get(name, name) for name in taken}
            away = set(ids.values()) - after
            assert len(away) <= most
            for tablet in world.tablets:
                voters = {p.node_id for p in tablet.config.voters}
                spare = len(voters & after) - (len(voters) // 2 + 1)
                if voters - before or voters - after:
                    assert spare >= (1 if len(voters & away) > 1 else 0)
    world.machines = [replace(m, ready=True) for m in world.machines]
    world.cluster["spec"]["nodes"]["park"] = []
    for _ in range(300):
        plan = world.step()
    assert not {"Rolling", "RollWaits", "RollStopped"} & set(found(plan)), found(plan)
