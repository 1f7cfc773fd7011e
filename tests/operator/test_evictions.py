"""The PodDisruptionBudgets: how many pods may be evicted at once, and what DrainBlocked says."""

from __future__ import annotations

import pytest

from stele_operator.plan.actions import CreatePod
from tests.operator.test_budgets import with_failed
from tests.operator.together import Slow, drains, least, made, pass_by


@pytest.mark.parametrize(
    ("most", "factor", "stay", "told", "bound"),
    [
        (1, 5, 5, "one node and", False),
        (2, 5, 4, "2 nodes and", False),
        (3, 5, 4, "2 nodes and", True),
        (2, 3, 5, "one node and", True),
        (3, 0, 3, "3 nodes and", False),
        (100, 0, 0, "6 nodes and", False),
    ],
)
def test_as_many_pods_may_be_evicted_as_any_tablet_can_lose(
    most: int, factor: int, stay: int, told: str, bound: bool
) -> None:
    world = made(most, factor=factor, tablets=6)
    assert (least(world), least(world, "master")) == (stay, 2)
    message = drains(world)["message"]
    assert message.startswith(f"{told} one master may be evicted at a time")
    assert ("with more nodes away, these tablets could lose their majority: " in message) == bound
    assert ("with more masters away, these tablets could lose their majority: the catalog" in message) == (
        most > 1
    )


@pytest.mark.parametrize("heard", [False, True])
def test_after_one_was_evicted_only_as_many_more_may_go_as_before(heard: bool) -> None:
    """Also while the masters still hear the node of a pod that has gone."""
    world = made(3, factor=5, tablets=6)
    assert least(world) == 4
    world.silent.add("flights-node-2")
    world.settle()
    if heard:
        world.step()
    else:
        for _ in range(6):
            world.step()
    assert least(world) == 4
    assert drains(world)["status"] == "False"
    world.silent.add("flights-node-3")
    for _ in range(6):
        world.step()
    assert least(world) in (4, 6) and drains(world)["status"] == "True"


def test_a_tablet_that_lacks_a_voter_for_another_reason_lets_fewer_go() -> None:
    world = made(2, factor=5, tablets=6)
    world.tablets[0] = with_failed(world.tablets[0])
    world.step()
    assert least(world) == 5
    world.tablets[0] = with_failed(world.tablets[0], 2)
    world.step()
    assert least(world) == 6


def test_five_masters_may_be_evicted_two_at_a_time_and_are_made_again_one_by_one() -> None:
    world = Slow({"nodes": {"replicas": 3}, "masters": {"replicas": 5}, "budget": {"maxUnavailable": 2}})
    pass_by(world, 40)
    assert least(world, "master") == 3
    world.cluster["spec"]["masters"]["podAnnotations"] = {"note": "x"}
    ids = {p["metadata"]["name"] for p in world.of("Pod") if "master" in p["metadata"]["name"]}
    for _ in range(80):
        world.step()
        ready = {
            p["metadata"]["name"] for p in world.of("Pod") if p["status"]["conditions"][0]["status"] == "True"
        }
        assert len(ids - ready) <= 1


def test_beside_a_parked_node_that_still_runs_only_its_own_pod_may_be_evicted() -> None:
    """Any pod could be, and then whoever parked the node switched its machine off."""
    world = made(1, factor=3, tablets=6)
    assert least(world) == 5
    world.cluster["spec"]["nodes"]["park"] = ["flights-node-1"]
    for _ in range(4):
        world.step()
    counted = {
        p["metadata"]["name"] for p in world.of("Pod") if "stele.dev/parked" not in p["metadata"]["labels"]
    }
    assert "flights-node-1" not in counted and "flights-node-2" in counted
    selector = world.objects["PodDisruptionBudget", "flights-nodes"]["spec"]["selector"]
    assert selector["matchExpressions"] == [{"key": "stele.dev/parked", "operator": "DoesNotExist"}]
    assert least(world) == 5, "all of the five that count"
    told = drains(world)
    assert (told["status"], told["reason"]) == ("True", "NodeParked")
    assert "flights-node-1 is parked" in told["message"]
    world.cluster["spec"]["budget"]["maxUnavailable"] = 2
    world.tablets, world.tables = [], []
    del world.objects["TabletGroup", "events"]
    world.step()
    assert least(world) == 4 and drains(world)["reason"] == "Drainable"
    world.cluster["spec"]["nodes"]["park"] = []
    for _ in range(4):
        world.step()
    assert all("stele.dev/parked" not in p["metadata"]["labels"] for p in world.of("Pod"))
    assert least(world) == 4
    assert not world.step().actions


def test_the_next_pod_of_a_parked_node_is_marked_from_the_start() -> None:
    """Until a mark of its own came, its disruption budget would let another node go beside it."""
    world = made(1, factor=3, tablets=6)
    world.cluster["spec"]["nodes"]["park"] = ["flights-node-1"]
    for _ in range(4):
        world.step()
    del world.objects["Pod", "flights-node-1"]
    begun = [a.manifest["metadata"] for a in world.step().actions if isinstance(a, CreatePod)]
    assert [m["name"] for m in begun] == ["flights-node-1"]
    assert begun[0]["labels"]["stele.dev/parked"] == "true"
    world.cluster["spec"]["nodes"]["park"] = []
    for _ in range(4):
        world.step()
    assert "stele.dev/parked" not in world.objects["Pod", "flights-node-1"]["metadata"]["labels"]
