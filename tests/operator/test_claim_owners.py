"""Who owns the claims: they grow, go with their cluster or stay, as deletionPolicy says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stele_operator.plan import make_plan
from stele_operator.plan.actions import (
    Action,
    PatchObject,
)
from stele_operator.plan.cluster_plan import plan_keeping
from stele_operator.plan.findings import Kind
from stele_operator.plan.status import cluster_status
from tests.operator.world import World
from tests.operator.worlds import made, names, node_of, touching


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
    assert {a.reason.partition(": ")[2] for a in touching(plan)} == {"deletionPolicy is Retain"}
    assert not any(c["metadata"].get("ownerReferences") for c in world.of("PersistentVolumeClaim"))
    assert not touching(world.step())
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
    assert {a.reason.partition(": ")[2] for a in touching(world.step())} == {"deletionPolicy is Retain"}
    for claim in world.of("PersistentVolumeClaim"):
        metadata = claim["metadata"]
        assert not metadata.get("ownerReferences")
        assert metadata["annotations"] == before[metadata["name"]]["annotations"]
    assert not touching(world.step()), "nothing new is made"
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
    assert not touching(make_plan(world.observe()))


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
    assert not touching(make_plan(world.observe()))


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
