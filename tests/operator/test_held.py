"""A cluster to which nothing is done, since it is paused or its spec breaks a rule: what goes wrong is told all the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stele_operator.plan import make_plan
from stele_operator.plan.findings import Kind
from stele_operator.plan.status import group_status
from tests.operator.world import World
from tests.operator.worlds import NOW, conditions, made, node_of, touching

HELD = {
    "paused": {"paused": True},
    "a rule is broken": {"masters": {"replicas": 4}},
    "the spec cannot be read": {"masters": {"replicas": "many"}},
}
held = pytest.mark.parametrize("how", HELD)


def hold(world: World, how: str) -> None:
    world.cluster["spec"].update(HELD[how])
    world.touch(world.cluster)


def degraded(world: World) -> tuple[str, str]:
    """Whether it is, and why."""
    return conditions(world)["Degraded"][:2]


def full(world: World) -> None:
    world.nodes = {n: replace(node, disk_low=True) for n, node in world.nodes.items()}


def wrong_clock(world: World) -> None:
    node_id = next(n for n, node in world.nodes.items() if node.role == "node")
    world.nodes[node_id] = replace(world.nodes[node_id], clock_ahead_us=9_000_000)


def lost(world: World) -> None:
    world.kill("n2")
    world.now_s += 31
    world.settle()


def never_starts(world: World) -> None:
    """A new node's pod, which no machine takes."""
    world.cluster["spec"]["nodes"]["replicas"] = 6
    world.run()


AILMENTS: dict[str, Any] = {
    "DiskFull": full,
    "ClockWrong": wrong_clock,
    "NodeLost": lost,
    "NodePending": never_starts,
}


@held
@pytest.mark.parametrize("reason", AILMENTS)
def test_what_degrades_it_is_told(reason: str, how: str) -> None:
    world = made()
    AILMENTS[reason](world)
    hold(world, how)
    found = {f.reason for f in make_plan(world.observe()).findings if f.kind is Kind.DEGRADED}
    assert reason in found
    assert degraded(world)[0] == "True"


@held
def test_volumes_that_are_about_to_go_are_told(how: str) -> None:
    """A drain destroys them, also of a cluster that is paused."""
    world = made()
    hold(world, how)
    for claim in world.of("PersistentVolumeClaim"):
        claim["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    status, _, message = conditions(world)["Stalled"]
    assert status == "True" and "somebody deleted the claims flights-" in message


@held
def test_lost_masters_are_told(how: str) -> None:
    world = made()
    hold(world, how)
    world.confirmed.clear()
    for n in range(2):
        del world.objects["PersistentVolumeClaim", f"flights-master-{n}"]
        del world.objects["Pod", f"flights-master-{n}"]
    assert "MastersLost" in {f.reason for f in make_plan(world.observe()).findings}


@pytest.mark.parametrize("how", [name for name in HELD if "cannot be read" not in name])
def test_too_many_lost_nodes_are_told(how: str) -> None:
    world = made()
    hold(world, how)
    for machine in ("n4", "n5"):
        world.kill(machine)
    world.now_s += 31
    world.settle()
    plan = make_plan(world.observe())
    assert "TooManyLost" in {f.reason for f in plan.findings}
    assert plan.policy is None


@held
def test_it_is_told_first_that_nothing_is_done_and_nothing_is(how: str) -> None:
    world = made()
    del world.objects["Pod", node_of(world, "n2")]
    full(world)
    hold(world, how)
    told = conditions(world)
    if how == "paused":
        assert told["Reconciling"][:2] == ("False", "Paused")
    else:
        assert told["Stalled"][:2] == ("True", "InvalidSpec")
        assert told["Reconciling"][0] == "False"
    assert not touching(make_plan(world.observe()))


def test_tables_of_a_paused_cluster_are_told_as_they_are() -> None:
    world = made()
    world.group("later")
    world.kill("n2")
    world.now_s += 31
    world.settle()
    hold(world, "paused")
    seen = world.observe()
    plan = make_plan(seen)
    statuses = {g.name: group_status(seen, plan, g, NOW) for g in seen.groups}
    told = {
        (name, c["type"]): (c["status"], c["reason"])
        for name, status in statuses.items()
        for c in status["conditions"]
    }
    assert told["events", "Degraded"] == ("True", "VoterLost")
    assert told["later", "Ready"] == ("False", "Paused")
    assert not touching(plan)
