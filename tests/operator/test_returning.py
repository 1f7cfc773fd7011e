"""Machines that are back after their nodes were given up: the nodes return to service, and what was made for them goes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stele.driver.view import NodeState
from stele.model.ids import NodeId
from stele_operator.plan import make_plan
from stele_operator.plan.budgets import plan_budgets
from stele_operator.plan.fates import State
from stele_operator.plan.observation import Machine
from tests.operator.world import World
from tests.operator.worlds import check, node_of

HEALING = {"machineLostAfter": "20s", "silentAfter": "20s"}


def small(spare: int = 0) -> World:
    """Three nodes and three masters on three machines, with a table; and so many machines more."""
    world = World({"nodes": {"replicas": 3}, "healing": HEALING}, machines=3)
    world.masters_stay = True
    world.group("events", partitioning={"hash": [{"columns": ["id"], "buckets": 4}]})
    world.run()
    world.machines += [Machine(f"n{4 + i}", True, "z1") for i in range(spare)]
    return world


def bring_back(world: World, machine: str) -> None:
    """The machine has its power again."""
    world.machines = [replace(m, ready=True) if m.name == machine else m for m in world.machines]


def states(world: World) -> dict[str, State]:
    """Members by name."""
    return {m.name: m.state for m in make_plan(world.observe()).members}


def steps(world: World, count: int, prefix: int | None = None) -> None:
    """So many passes, each of which may be cut short."""
    for _ in range(count):
        world.step(prefix)
        check(world)


@pytest.mark.parametrize("prefix", [None, 1])
def test_a_machine_back_after_its_node_was_given_up_is_used_again(prefix: int | None) -> None:
    """There is no other machine: the node stayed DRAINING, the new one Pending, and no machine could be drained, for ever."""
    world = small()
    node, master = node_of(world, "n1"), node_of(world, "n1", "master")
    before = world.tablets
    world.kill("n1")
    steps(world, 30)
    now = states(world)
    assert (now[node], now["flights-node-3"]) == (State.DRAINING, State.PENDING)
    assert master in now
    bring_back(world, "n1")
    steps(world, 12, prefix)
    world.run()
    plan = make_plan(world.observe())
    everyone = {m.name for m in plan.members if m.active}
    assert everyone == {f"flights-{role}-{n}" for role in ("master", "node") for n in range(3)}
    assert all(m.state is State.READY for m in plan.members if m.active) and world.tablets == before
    for name in ("flights-node-3", "flights-master-3"):
        assert states(world)[name] is State.RETIRED and ("Pod", name) not in world.objects
        notes = world.objects["PersistentVolumeClaim", name]["metadata"]["annotations"]
        assert "stele.dev/released-at" in notes, "taken back as any volume is: it stays for keepFor"
    assert not {f.reason for f in plan.findings} & {"NodePending", "NodeLost", "MasterPending", "MasterLost"}
    spec = world.observe().cluster.spec
    assert spec is not None
    assert [b.reason for b in plan_budgets(world.observe(), spec, plan.members)] == ["", ""]
    world.now_s += 24 * 3600 + 1
    world.settle()
    world.run()
    assert ("PersistentVolumeClaim", "flights-node-3") not in world.objects


@pytest.mark.parametrize("seconds", range(20, 34))
@pytest.mark.parametrize("prefix", [None, 1, 2])
def test_whenever_it_returns_no_more_members_stay_than_are_asked_for_or_hold_rows(
    seconds: int, prefix: int | None
) -> None:
    """With a spare machine: the new node may have been made, and may have taken over."""
    world = small(spare=1)
    world.kill("n1")
    steps(world, seconds, prefix)
    bring_back(world, "n1")
    steps(world, 40, prefix)
    world.run()
    plan = make_plan(world.observe())
    named = {p.node_id for t in world.tablets for p in t.config.peers}
    nodes = [m for m in plan.members if m.role == "node" and m.active]
    assert len(nodes) == 3 and all(m.state is State.READY for m in nodes)
    assert named <= {m.node_id for m in nodes}
    assert {m.state for m in plan.members} <= {State.READY, State.RETIRED}


def test_a_node_that_is_not_needed_stays_while_another_is_away() -> None:
    world = small()
    world.kill("n1")
    steps(world, 30)
    bring_back(world, "n1")
    world.silent.add(node_of(world, "n2"))
    steps(world, 10)
    assert states(world)["flights-node-3"] is State.PENDING
    world.silent.clear()
    steps(world, 10)
    assert states(world)["flights-node-3"] is State.RETIRED


def test_a_node_that_somebody_wants_drained_stays_drained() -> None:
    world = small(spare=1)
    node_id = next(m.node_id for m in make_plan(world.observe()).members if m.name == node_of(world, "n1"))
    world.nodes[NodeId(node_id)] = replace(world.nodes[NodeId(node_id)], state=NodeState.DRAINING)
    world.kill("n1")
    steps(world, 10)
    bring_back(world, "n1")
    steps(world, 10)
    assert states(world)["flights-node-0"] in (State.DRAINING, State.RETIRED)
