"""Pods and claims of a cluster that stands: kept, grown, chosen again, and left alone while it is paused."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from stele.driver.view import NodeState
from stele.model.ids import NodeId
from stele_operator.plan import make_plan
from stele_operator.plan.actions import (
    Action,
    CreateClaim,
    CreatePod,
    DeleteClaim,
    DeletePod,
    PatchObject,
    RegisterNode,
)
from stele_operator.plan.cluster_plan import plan_keeping
from stele_operator.plan.fates import State
from stele_operator.plan.findings import Kind
from stele_operator.plan.status import cluster_status
from tests.operator.world import World, merged
from tests.operator.worlds import check, made, names, node_of


def test_a_pod_that_is_gone_comes_back_on_its_volume() -> None:
    world = made()
    uid = world.objects["PersistentVolumeClaim", "flights-node-2"]["metadata"]["uid"]
    del world.objects["Pod", "flights-node-2"]
    plan = world.step()
    assert [a.reason for a in plan.actions] == ["flights-node-2: starts again on its volume"]
    world.run()
    assert world.objects["PersistentVolumeClaim", "flights-node-2"]["metadata"]["uid"] == uid


def test_pods_may_do_nothing_but_their_work() -> None:
    for pod in made().of("Pod"):
        spec = pod["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsUser"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert spec["automountServiceAccountToken"] is False


def test_nodes_whose_claims_are_refused_do_not_fill_the_catalog() -> None:
    """A quota, or an admission rule: it may last for days, and a pass comes every second."""
    world = World({"nodes": {"replicas": 3}})
    world.run()
    world.cluster["spec"]["nodes"]["replicas"] = 5
    known = len(world.nodes)
    for _ in range(10):
        for action in make_plan(world.observe()).actions:
            if not isinstance(action, CreateClaim):
                world.apply(action)
        world.now_s += 1
    assert len(world.nodes) == known
    world.run()
    assert len([n for n in names(world, "Pod") if "node" in n]) == 5
    assert len(world.nodes) == known + 2
    check(world)


def test_a_node_is_registered_before_its_pod_starts() -> None:
    world = World({"nodes": {"replicas": 3}})
    world.run()
    world.cluster["spec"]["nodes"]["replicas"] = 4
    order = []
    for _ in range(6):
        plan = world.step()
        order += [a for a in plan.actions if isinstance(a, RegisterNode | CreatePod)]
    assert [type(a) for a in order] == [RegisterNode, CreatePod]


def test_more_nodes_are_asked_for_and_come() -> None:
    world = World({"nodes": {"replicas": 3}})
    world.run()
    world.cluster["spec"]["nodes"]["replicas"] = 5
    world.run()
    assert len([n for n in names(world, "Pod") if "node" in n]) == 5
    check(world)


def test_storage_grows_and_owners_follow_the_deletion_policy() -> None:
    world = made()
    world.cluster["spec"] |= {
        "deletionPolicy": "Delete",
        "nodes": {"replicas": 5, "storage": {"size": "20Gi"}},
    }
    world.run()
    claim = world.objects["PersistentVolumeClaim", "flights-node-0"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "20Gi"
    assert claim["metadata"]["ownerReferences"][0]["kind"] == "TabletCluster"
    world.cluster["spec"]["deletionPolicy"] = "Retain"
    world.run()
    assert "ownerReferences" not in world.objects["PersistentVolumeClaim", "flights-node-0"]["metadata"]


class NeverGrows(World):
    """Its storage class has no allowVolumeExpansion, or a quota is full."""

    def apply(self, action: Action) -> None:
        grows = (
            isinstance(action, PatchObject)
            and action.kind == "PersistentVolumeClaim"
            and "spec" in action.patch
        )
        if not grows:
            super().apply(action)


def test_a_size_that_is_refused_does_not_hold_up_who_owns_the_volumes() -> None:
    """Else they would go with the TabletCluster though it says Retain."""
    world = NeverGrows({"nodes": {"replicas": 3}, "deletionPolicy": "Delete"})
    world.run()
    world.cluster["spec"] |= {
        "nodes": {"replicas": 3, "storage": {"size": "20Gi"}},
        "deletionPolicy": "Retain",
    }
    for _ in range(3):
        world.step()
    assert not [
        c["metadata"]["name"]
        for c in world.of("PersistentVolumeClaim")
        if c["metadata"].get("ownerReferences")
    ]
    claim = world.objects["PersistentVolumeClaim", "flights-node-0"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "10Gi"
    assert next(a.reason for a in world.step().actions) == "flights-node-0: storage.size is now 20Gi"


@pytest.mark.parametrize("also", [{"paused": True}, {"masters": {"replicas": 2}}])
def test_retain_takes_effect_whatever_else_the_spec_says(also: dict[str, Any]) -> None:
    """Kubernetes takes what is owned when the TabletCluster goes, and asks neither for `paused` nor for our rules."""
    world = World({"nodes": {"replicas": 3}, "deletionPolicy": "Delete"})
    world.run()
    world.cluster["spec"] |= {"deletionPolicy": "Retain", **also}
    plan = world.step()
    assert {a.reason.partition(": ")[2] for a in plan.actions} == {"deletionPolicy is Retain"}
    assert not any(c["metadata"].get("ownerReferences") for c in world.of("PersistentVolumeClaim"))
    assert not world.step().actions
    world.cluster["spec"]["deletionPolicy"] = "Delete"
    assert not make_plan(world.observe()).actions, "to take volumes into possession can wait"


@pytest.mark.parametrize("also", [{}, {"paused": True}, {"masters": {"replicas": 2}}])
@pytest.mark.parametrize("led", [True, False])
def test_retain_takes_effect_while_the_cluster_is_being_deleted(also: dict[str, Any], led: bool) -> None:
    """A foreground deletion, or somebody's finalizer, holds the TabletCluster: whatever still belongs to it when it goes
    is deleted after it."""
    world = World({"nodes": {"replicas": 3}, "deletionPolicy": "Delete"})
    world.run()
    before = {c["metadata"]["name"]: c["metadata"] for c in world.of("PersistentVolumeClaim")}
    world.cluster["spec"] |= {"deletionPolicy": "Retain", **also}
    world.cluster["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    del world.objects["Pod", "flights-node-2"]
    if not led:
        world.confirmed.clear()
    assert plan_keeping(world.observe()) == make_plan(world.observe()).actions
    assert {a.reason.partition(": ")[2] for a in world.step().actions} == {"deletionPolicy is Retain"}
    for claim in world.of("PersistentVolumeClaim"):
        metadata = claim["metadata"]
        assert not metadata.get("ownerReferences")
        assert metadata["annotations"] == before[metadata["name"]]["annotations"]
    assert not world.step().actions, "nothing new is made"
    assert not plan_keeping(world.observe())


@pytest.mark.parametrize("policy", ["Delete", "Retain"])
def test_before_the_masters_are_asked_nothing_is_done_to_a_cluster_that_stays(policy: str) -> None:
    world = World({"nodes": {"replicas": 3}, "deletionPolicy": "Delete"})
    world.run()
    world.cluster["spec"]["deletionPolicy"] = policy
    assert not plan_keeping(world.observe())
    world.cluster["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert bool(plan_keeping(world.observe())) is (policy == "Retain")


@pytest.mark.parametrize("also", [{"paused": True}, {"masters": {"replicas": 2}}])
def test_volumes_that_go_with_an_earlier_cluster_of_this_name_are_not_kept_from_it(
    also: dict[str, Any],
) -> None:
    """It was deleted under Delete and applied again under Retain: what is left of it is on its way out."""
    world = World({"nodes": {"replicas": 3}, "deletionPolicy": "Delete"})
    world.run()
    world.cluster["spec"] |= {"deletionPolicy": "Retain", **also}
    assert make_plan(world.observe()).actions
    for raw in world.of("PersistentVolumeClaim"):
        raw["metadata"]["ownerReferences"][0]["uid"] = "ffffffff-0000-0000-0000-000000000000"
    assert not make_plan(world.observe()).actions


@pytest.mark.parametrize("role", ["node", "master"])
def test_a_volume_that_somebody_made_larger_stays_so_and_stops_nothing(role: str) -> None:
    """By hand, or by a controller that grows volumes; or the TabletCluster was applied again with a smaller size."""
    world = made()
    grown, name = f"flights-{role}-0", node_of(world, "n2")
    world.objects["PersistentVolumeClaim", grown]["spec"]["resources"]["requests"]["storage"] = "20Gi"
    del world.objects["Pod", name]
    plan = world.step()
    assert [a.reason for a in plan.actions] == [f"{name}: starts again on its volume"]
    assert plan.policy is not None and {f.kind for f in plan.findings} <= {Kind.REMARK}
    (remark,) = world.run().findings
    assert (remark.kind, remark.reason) == (Kind.REMARK, "VolumesLarger") and grown in remark.message
    claim = world.objects["PersistentVolumeClaim", grown]
    assert claim["spec"]["resources"]["requests"]["storage"] == "20Gi"


def test_what_was_left_to_nobody_goes_with_the_cluster_that_is_applied_again() -> None:
    """`kubectl delete tc --cascade=orphan`, and all runs on; the next plain delete is to end it."""
    world = made()
    before = names(world, "Pod")
    world.cluster["metadata"]["uid"] = "ffffffff-0000-0000-0000-000000000000"
    kinds = ("Pod", "Service", "PodDisruptionBudget")
    for raw in (raw for kind in kinds for raw in world.of(kind)):
        del raw["metadata"]["ownerReferences"]
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "name": "theirs", "uid": "1"}
    world.objects["Pod", before[0]]["metadata"]["ownerReferences"] = [theirs]
    uids = {name: world.objects["Pod", name]["metadata"]["uid"] for name in before}
    world.run()
    for raw in (raw for kind in kinds for raw in world.of(kind)):
        owner = raw["metadata"]["ownerReferences"][-1]
        assert (owner["kind"], owner["uid"]) == ("TabletCluster", world.cluster["metadata"]["uid"])
    assert world.objects["Pod", before[0]]["metadata"]["ownerReferences"][0] == theirs
    assert {name: world.objects["Pod", name]["metadata"]["uid"] for name in names(world, "Pod")} == uids


def test_what_belongs_to_somebody_else_is_left_to_him() -> None:
    """An earlier TabletCluster of this name, whose pods Kubernetes takes."""
    world = made()
    for raw in (*world.of("Pod"), *world.of("Service")):
        raw["metadata"]["ownerReferences"][0]["uid"] = "eeeeeeee-0000-0000-0000-000000000000"
    assert not make_plan(world.observe()).actions


def test_the_status_tells_which_deletion_policy_is_in_force() -> None:
    """Volumes go with the TabletCluster until the last claim was let go, whatever the spec says meanwhile."""
    world = made()

    def told() -> str:
        observed = world.observe()
        return str(
            cluster_status(observed, make_plan(observed), (), "2026-01-01T00:00:00Z")["deletionPolicy"]
        )

    assert told() == "Retain"
    world.cluster["spec"]["deletionPolicy"] = "Delete"
    world.run()
    assert told() == "Delete"
    world.cluster["spec"]["deletionPolicy"] = "Retain"
    world.step(prefix=3)
    assert told() == "Delete"
    world.run()
    assert told() == "Retain"


def test_a_released_claim_says_nothing_of_the_deletion_policy() -> None:
    """It keeps its owner until it goes, perhaps a day later: who waits for Retain need not wait for that."""
    world = made()
    observed = world.observe()
    first, *others = observed.claims
    for released_s, told in ((None, "Delete"), (world.now_s, "Retain")):
        claims = (replace(first, owned=True, released_s=released_s), *others)
        seen = replace(observed, claims=claims)
        status = cluster_status(seen, make_plan(seen), (), "2026-01-01T00:00:00Z")
        assert status["deletionPolicy"] == told


def test_claims_that_go_with_their_pods_are_told_and_the_volumes_are_not_said_to_stay() -> None:
    """`kubectl delete pvc -l ...`, and all still runs, since Kubernetes holds each claim for its pod."""
    world = made()
    for raw in world.of("PersistentVolumeClaim"):
        raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    plan = world.step()
    assert not [a for a in plan.actions if a.kind != "PodDisruptionBudget"]
    observed = world.observe()
    status = cluster_status(observed, plan, (), "2026-01-01T00:00:00Z")
    (stalled,) = [c for c in status["conditions"] if c["type"] == "Stalled"]
    assert (stalled["status"], stalled["reason"]) == ("True", "ClaimsGoing")
    assert "flights-master-0" in stalled["message"] and "and 3 more" in stalled["message"]
    assert "kubectl delete pod" in stalled["message"]
    assert status["deletionPolicy"] == "Delete"
    world.confirmed = set()
    findings = make_plan(world.observe()).findings
    assert [f.reason for f in findings if f.kind is Kind.STALLED] == ["ClaimsGoing"], "no volume is lost yet"


def test_a_claim_that_goes_is_made_up_for_once_its_pod_was_deleted() -> None:
    world = made()
    name = node_of(world, "n2")
    world.objects["PersistentVolumeClaim", name]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.run()
    del (
        world.objects["Pod", name],
        world.objects["PersistentVolumeClaim", name],
    )  # Kubernetes lets it go with its pod
    for _ in range(8):
        world.step()
    plan = world.run()
    assert not plan.findings
    assert "flights-node-5" in names(world, "Pod")
    check(world)


def test_no_pod_is_made_on_a_claim_that_is_being_deleted() -> None:
    """Nor is anything else done to it: its pod alone held it, and the claim goes as soon as Kubernetes has looked."""
    world = made()
    name = "flights-node-1"
    claim = world.objects["PersistentVolumeClaim", name]
    claim["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.touch(claim)
    del world.objects["Pod", name]
    plan = make_plan(world.observe())
    assert [a for a in plan.actions if getattr(a, "name", "") == name] == []
    del claim["metadata"]["deletionTimestamp"]
    again = make_plan(world.observe())
    assert [type(a) for a in again.actions if getattr(a, "name", "") == name] == [CreatePod]


def test_a_volume_chosen_on_a_machine_that_went_down_is_chosen_again() -> None:
    world = World({"nodes": {"replicas": 3}})
    for _ in range(3):
        world.step()
    world.kill("n1")
    claim = world.objects["PersistentVolumeClaim", "flights-master-0"]
    claim["metadata"]["annotations"]["volume.kubernetes.io/selected-node"] = "n1"
    claim["status"] = {"phase": "Pending"}
    world.objects["Pod", "flights-master-0"]["spec"].pop("nodeName", None)
    world.formats.clear()
    world.now_s += 61
    plan = make_plan(world.observe())
    deleted = [a for a in plan.actions if "which is down" in a.reason]
    assert [type(a) for a in deleted] == [DeletePod, DeleteClaim]
    # Where machines cannot be read nobody knows that it is down: its volume may take its time.
    world.machines_known = False
    assert not [a for a in make_plan(world.observe()).actions if isinstance(a, DeletePod | DeleteClaim)]
    # And one that is made holds what is on it, whatever its machine does.
    world.machines_known = True
    claim["status"] = {"phase": "Bound"}
    assert not [a for a in make_plan(world.observe()).actions if isinstance(a, DeletePod | DeleteClaim)]


def test_nothing_is_made_or_healed_for_a_cluster_that_is_being_deleted() -> None:
    """`kubectl delete --cascade=foreground` holds it until its pods are gone: made anew, they would hold it for ever."""
    world = made()
    world.cluster["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    del world.objects["Pod", "flights-node-2"]
    plan = make_plan(world.observe())
    assert not plan.actions and plan.policy is None


def test_paused_touches_nothing() -> None:
    world = made()
    world.cluster["spec"]["paused"] = True
    del world.objects["Pod", "flights-node-0"]
    plan = make_plan(world.observe())
    assert not plan.actions
    assert plan.policy is None
    assert [f.reason for f in plan.findings] == ["Paused"]


def test_what_was_changed_by_hand_in_services_and_budgets_is_put_back() -> None:
    """A budget opened for a drain and forgotten; a Service that leads elsewhere. What the API server adds is left."""
    world = made()
    budget = world.objects["PodDisruptionBudget", "flights-nodes"]
    service = world.objects["Service", "flights-masters"]
    wanted = copy.deepcopy((budget["spec"], service["spec"]))
    service["spec"] |= {"clusterIP": "10.0.0.1", "sessionAffinity": "None"}
    service["spec"]["ports"][0]["protocol"] = "TCP"
    assert not make_plan(world.observe()).actions
    budget["spec"]["minAvailable"] = 0
    service["spec"]["selector"]["stele.dev/role"] = "node"
    world.run()
    for raw, spec in zip(
        (world.objects["PodDisruptionBudget", "flights-nodes"], world.objects["Service", "flights-masters"]),
        wanted,
        strict=True,
    ):
        assert merged(raw["spec"], {k: v for k, v in spec.items() if k != "ports"}) == raw["spec"]


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
