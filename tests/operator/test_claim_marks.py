"""What claims say of their nodes: labels and annotations that somebody removed, changed or made up."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from stele.driver.view import NodeState
from stele.model.ids import NodeId
from stele_operator.plan.fates import State
from tests.operator.world import World
from tests.operator.worlds import check, made, names, node_of


@pytest.mark.parametrize("released", ["yesterday", "", "inf", "-1"])
def test_what_somebody_wrote_on_a_claim_does_not_stop_the_operator(released: str) -> None:
    """A node that the masters count on keeps its pod; one that they retired is released anew, with a time that counts."""
    world = made()
    name = node_of(world, "n2")
    notes = world.objects["PersistentVolumeClaim", name]["metadata"]["annotations"]
    notes |= {"stele.dev/released-at": released, "stele.dev/serial": "three"}
    world.run()
    assert ("Pod", name) in world.objects
    node_id = NodeId(notes["stele.dev/node-id"])
    world.tables, world.tablets = [], []
    world.nodes[node_id] = replace(world.nodes[node_id], state=NodeState.RETIRED)
    world.run()
    assert ("Pod", name) not in world.objects
    notes = world.objects["PersistentVolumeClaim", name]["metadata"]["annotations"]
    assert float(notes["stele.dev/released-at"]) == pytest.approx(world.now_s, abs=60)
    check(world)


def test_a_claim_that_somebody_released_is_kept_while_the_masters_count_on_its_node() -> None:
    world = made()
    name = node_of(world, "n2")
    claim = world.objects["PersistentVolumeClaim", name]
    claim["metadata"]["annotations"]["stele.dev/released-at"] = "5"
    confirmed, world.confirmed = world.confirmed, set()
    for _ in range(3):
        world.step()
    world.confirmed = confirmed
    world.run()
    assert {("Pod", name), ("PersistentVolumeClaim", name)} <= set(world.objects)


@pytest.mark.parametrize("also", ["its pod stays", "its pod is deleted", "no master leads"])
def test_a_claim_that_lost_its_labels_is_not_gone(also: str) -> None:
    """It is not in the list; its node would be retired, and copied elsewhere, while its volume is there."""
    world = made()
    name = node_of(world, "n2")
    claim = world.objects["PersistentVolumeClaim", name]
    labels = claim["metadata"].pop("labels")
    confirmed = world.confirmed
    match also:
        case "its pod is deleted":
            del world.objects["Pod", name]
        case "no master leads":
            world.confirmed = set()
    for _ in range(3):
        world.step()
    world.confirmed = confirmed
    plan = world.run()
    claim = world.objects["PersistentVolumeClaim", name]
    assert claim["metadata"]["labels"] == labels
    assert ("Pod", name) in world.objects
    assert {m.state for m in plan.members} == {State.READY} and len(plan.members) == 8
    check(world)


@pytest.mark.parametrize("role", ["node", "master"])
@pytest.mark.parametrize("value", [None, "", "mine", "f" * 32])
@pytest.mark.parametrize("what", ["node-id", "cluster-id"])
def test_what_a_claim_no_longer_says_of_its_node_is_put_back(what: str, value: str | None, role: str) -> None:
    world = made()
    name = node_of(world, "n2", role)
    before = copy.deepcopy(world.objects["PersistentVolumeClaim", name]["metadata"])
    for pod_is in ("there", "deleted"):
        notes = world.objects["PersistentVolumeClaim", name]["metadata"]["annotations"]
        if value is None:
            del notes[f"stele.dev/{what}"]
        else:
            notes[f"stele.dev/{what}"] = value
        if pod_is == "deleted":
            del world.objects["Pod", name]
        plan = world.run()
        after = world.objects["PersistentVolumeClaim", name]["metadata"]
        assert (after["annotations"], after["labels"]) == (before["annotations"], before["labels"])
        assert ("Pod", name) in world.objects
        assert {m.state for m in plan.members} == {State.READY} and len(plan.members) == 8
    check(world)


@pytest.mark.parametrize("labelled", [True, False])
def test_a_claim_that_lost_all_that_stood_on_it_is_known_by_its_pod_or_its_labels(labelled: bool) -> None:
    world = made()
    name = node_of(world, "n2")
    metadata = world.objects["PersistentVolumeClaim", name]["metadata"]
    before = {k: metadata["annotations"][f"stele.dev/{k}"] for k in ("node-id", "cluster-id")}
    metadata["annotations"] = {}
    if labelled:
        del world.objects["Pod", name]
    else:
        del metadata["labels"]
    world.run()
    after = world.objects["PersistentVolumeClaim", name]["metadata"]["annotations"]
    assert {k: after[f"stele.dev/{k}"] for k in before} == before
    assert ("Pod", name) in world.objects
    check(world)


@pytest.mark.parametrize("says", ["nothing", "it is another cluster's"])
def test_a_claim_that_somebody_else_made_under_a_name_of_ours_is_not_taken(says: str) -> None:
    """Ours was deleted, and its volume with it: the node is replaced, and that claim is nobody's to touch."""
    world = made()
    name = node_of(world, "n2")
    claim = world.objects["PersistentVolumeClaim", name]
    claim["metadata"] |= {"uid": "eeeeeeee-0000-0000-0000-000000000000", "annotations": {}}
    if says == "nothing":
        claim["metadata"]["labels"] = {"team": "data"}
    else:
        claim["metadata"]["annotations"] = {
            "stele.dev/node-id": "e" * 32, "stele.dev/cluster-id": "d" * 32,
        }  # fmt: skip
    theirs = copy.deepcopy(claim)
    del world.objects["Pod", name]
    for _ in range(8):
        world.step()
    world.run()
    assert world.objects["PersistentVolumeClaim", name] == theirs
    assert ("Pod", name) not in world.objects and "flights-node-5" in names(world, "Pod")


def test_all_claims_lost_what_they_said_and_the_cluster_is_applied_again() -> None:
    """It is the same cluster, not a new one beside volumes that nobody knows."""
    world = made()
    before = world.objects["ConfigMap", "flights-identity"]["data"]["clusterUUID"]
    for claim in world.of("PersistentVolumeClaim"):
        for what in ("node-id", "cluster-id"):
            del claim["metadata"]["annotations"][f"stele.dev/{what}"]
    for name in names(world, "Pod"):
        del world.objects["Pod", name]
    confirmed, world.confirmed = world.confirmed, set()
    world.cluster["metadata"]["uid"] = "ffffffff-0000-0000-0000-000000000000"
    for _ in range(4):
        world.step()
    assert world.objects["ConfigMap", "flights-identity"]["data"]["clusterUUID"] == before
    assert [n for n in names(world, "Pod") if "master" in n] == [f"flights-master-{i}" for i in range(3)]
    world.confirmed = confirmed
    world.run()
    assert len(names(world, "Pod")) == len(names(world, "PersistentVolumeClaim")) == 8
    check(world)


def test_first_masters_whose_claims_lost_their_labels_form_the_cluster_all_the_same() -> None:
    world = World({"nodes": {"replicas": 3}})
    for _ in range(2):
        world.step()
    for claim in world.of("PersistentVolumeClaim"):
        claim["metadata"]["labels"] = {"team": "data"}
    world.run()
    assert world.confirmed and {"team", "stele.dev/role"} <= set(
        world.objects["PersistentVolumeClaim", "flights-master-0"]["metadata"]["labels"]
    )
