"""Rolls, parked nodes and heals share one budget: who holds it, who waits for it, and what the status and the catalog say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stele.driver.view import Away, Holder
from stele_operator.plan import make_plan
from stele_operator.plan.fates import State
from stele_operator.plan.status import cluster_status
from tests.operator.together import NEXT, budget, change_nodes, found, made, of_nodes, roll, rolled, safe, up


def test_a_parked_node_and_a_roll_share_the_budget() -> None:
    world = made(2, factor=3, tablets=6)
    world.cluster["spec"]["nodes"]["park"] = ["flights-node-1"]
    for _ in range(3):
        world.step()
    parked = of_nodes(world)["flights-node-1"]
    assert world.nodes[parked].parked
    world.silent.add("flights-node-1")
    for _ in range(8):
        world.step()
    change_nodes(world)
    taken: list[str] = []
    for _ in range(60):
        plan = world.step()
        safe(world)
        taken += rolled(plan)
        status = cluster_status(world.observe(), plan, (), "now")["budget"]
        if rolled(plan):
            assert status == {"holder": "park/flights-node-1, upgrade", "waiting": []}
    assert taken == ["flights-node-4"], "the only one that shares no tablet with the parked one"
    assert status == {"holder": "park/flights-node-1", "waiting": ["upgrade"]}


def test_a_second_node_is_not_parked_while_one_is_and_the_budget_is_one() -> None:
    world = made(1, factor=0)
    world.cluster["spec"]["nodes"]["park"] = ["flights-node-0", "flights-node-1"]
    for _ in range(3):
        plan = world.step()
    ids = of_nodes(world)
    assert [world.nodes[ids[f"flights-node-{n}"]].parked for n in (0, 1)] == [True, False]
    assert found(plan)["ParkRefused"] == (
        "flights-node-1 cannot be parked: flights-node-0 is parked, and budget.maxUnavailable is 1; raise "
        "budget.maxUnavailable, or remove a name from nodes.park"
    )
    world.silent.add("flights-node-0")
    for _ in range(5):
        plan = world.step()
    status = cluster_status(world.observe(), plan, (), "now")["budget"]
    assert status == {"holder": "park/flights-node-0", "waiting": ["park/flights-node-1"]}
    world.cluster["spec"]["budget"]["maxUnavailable"] = 2
    for _ in range(2):
        plan = world.step()
    assert world.nodes[ids["flights-node-1"]].parked and "ParkRefused" not in found(plan)


def test_a_node_waits_to_be_parked_for_one_that_is_made_again() -> None:
    world = made(1, factor=3, tablets=6)
    change_nodes(world)
    assert rolled(world.step()) == ["flights-node-0"]
    world.cluster["spec"]["nodes"]["park"] = ["flights-node-3"]
    plan = world.step()
    assert found(plan)["ParkWaits"] == (
        "flights-node-3 waits to be parked: flights-node-0 must be back first, since budget.maxUnavailable is 1"
    )
    told = cluster_status(world.observe(), plan, (), "now")["budget"]
    assert told == {"holder": "upgrade", "waiting": ["park/flights-node-3"]}
    for _ in range(12):
        plan = world.step()
    assert world.nodes[of_nodes(world)["flights-node-3"]].parked


def test_a_roll_and_a_park_do_not_begin_together() -> None:
    """Both were begun in one pass: nobody was away when it began."""
    world = made(1, factor=3, tablets=6)
    change_nodes(world)
    world.cluster["spec"]["nodes"]["park"] = ["flights-node-1"]
    o = world.observe()
    plan = make_plan(o)
    assert plan.policy is not None and list(plan.policy.parked) == [of_nodes(world)["flights-node-1"]]
    assert rolled(plan) == []
    assert found(plan)["RollWaits"].endswith("flights-node-0 waits: flights-node-1 must be parked first")
    assert cluster_status(o, plan, (), "now")["budget"] == {
        "holder": "park/flights-node-1",
        "waiting": ["upgrade"],
    }
    world.step()
    world.cluster["spec"]["nodes"]["park"] = []
    order, most = roll(world)
    assert len(order) == 6 and most == 1


def test_a_roll_waits_while_nodes_leave_and_is_told() -> None:
    """It was in no list: neither did it hold the budget, nor did it wait."""
    world = made(1, factor=3, tablets=6)
    world.drains = False
    change_nodes(world)
    world.cluster["spec"]["nodes"] |= {"replicas": 5, "retire": ["flights-node-1"]}
    for _ in range(4):
        o = world.observe()
        plan = make_plan(o)
        assert not rolled(plan)
        assert "flights-node-1 must leave first" in found(plan)["RollWaits"]
        told = cluster_status(o, plan, (), "now")["budget"]
        assert told == {"holder": "drain/flights-node-1", "waiting": ["upgrade"]}
        world.step()


def test_the_catalog_names_the_holder_before_a_pod_goes_and_until_it_is_back() -> None:
    """And another operator, which remembers nothing, finds it there."""
    world = made(1, factor=3, tablets=6)
    change_nodes(world)
    plan = make_plan(world.observe())
    names = [type(a).__name__ for a in plan.actions]
    assert names.index("SetDriverPolicy") < names.index("RollPod")
    world.step()
    assert world.standing is not None
    away = of_nodes(world)["flights-node-0"]
    incarnation = world.nodes[away].incarnation
    assert world.standing.holding == (Holder("upgrade", (Away(away, incarnation),)),)
    world.cluster["spec"]["nodes"]["park"] = ["flights-node-3"]
    plan = world.step()
    assert world.standing.holding == (Holder("upgrade", (Away(away, incarnation),)),)
    assert world.standing.waiting == ("park/flights-node-3",)
    assert rolled(plan) == []
    for _ in range(12):
        world.step()
        assert (away in up(world)) or [a.node_id for a in world.standing.holding[-1].away] == [away]
    assert world.standing.holding == (Holder("park/flights-node-3"),)
    assert world.standing.waiting == ("upgrade",)
    world.cluster["spec"]["nodes"]["park"] = []
    roll(world)
    for _ in range(3):
        world.step()
    assert (world.standing.holding, world.standing.waiting) == ((), ())


def test_a_pod_that_never_comes_back_is_lost_and_the_roll_lets_go_of_it() -> None:
    world = made(1, factor=3, tablets=6)
    change_nodes(world)
    world.step()
    world.silent.add("flights-node-0")
    world.drains = False
    for _ in range(60):
        plan = world.step()
    assert world.standing is not None
    assert world.standing.holding == (Holder("heal/flights-node-0"),)
    assert budget(world, plan) == {"holder": "heal/flights-node-0", "waiting": ["upgrade"]}


def test_whoever_is_away_in_any_case_may_be_parked() -> None:
    """Parked, it is waited for and not replaced."""
    world = made(1, factor=3, tablets=6)
    world.silent.add("flights-node-2")
    for _ in range(5):
        world.step()
    world.cluster["spec"]["nodes"]["park"] = ["flights-node-2"]
    world.step()
    assert world.nodes[of_nodes(world)["flights-node-2"]].parked


def test_each_lost_member_holds_the_budget_and_none_of_them_waits() -> None:
    world = made(1, nodes=8, factor=3, tablets=8)
    world.cluster["spec"]["healing"] = {"witnessAfter": "5s", "maxLostNodes": 2}
    world.cluster["spec"]["image"] = NEXT
    world.drains = False
    for name in ("flights-node-1", "flights-node-5"):
        world.silent.add(name)
    for _ in range(10):
        plan = world.step()
    lost = {m.name for m in plan.members if m.state is State.LOST}
    assert lost == {"flights-node-1", "flights-node-5"}
    told = cluster_status(world.observe(), plan, (), "now")["budget"]
    assert told == {"holder": "heal/flights-node-1, heal/flights-node-5", "waiting": ["upgrade"]}


@pytest.mark.parametrize(("most", "taken"), [(1, []), (2, ["flights-node-4"])])
def test_a_parked_node_that_is_still_there_counts_as_away(most: int, taken: list[str]) -> None:
    """Whoever parked it may switch its machine off at any moment, without asking again."""
    world = made(most, factor=3, tablets=6)
    world.cluster["spec"]["nodes"]["park"] = ["flights-node-1"]
    for _ in range(3):
        world.step()
    change_nodes(world)
    order: list[str] = []
    parked = of_nodes(world)["flights-node-1"]
    world.tablets = [  # leaders leave it
        replace(t, leader_node=next(p.node_id for p in t.config.voters if p.node_id != parked))
        for t in world.tablets
    ]
    for _ in range(40):
        plan = world.step()
        order += rolled(plan)
        gone = set(of_nodes(world).values()) - up(world) | {parked}
        for tablet in world.tablets:
            voters = {p.node_id for p in tablet.config.voters}
            assert len(voters - gone) > len(voters) // 2, (tablet.tablet_id, gone)
    assert order == taken
    assert "flights-node-1 must be ready first" in found(plan)["RollWaits"]
    status = cluster_status(world.observe(), plan, (), "now")["budget"]
    assert status == {"holder": "park/flights-node-1", "waiting": ["upgrade"]}
    world.cluster["spec"]["nodes"]["park"] = []
    assert set(roll(world)[0]) == {f"flights-node-{n}" for n in range(6)} - set(taken)
