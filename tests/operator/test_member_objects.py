"""Pods and claims of a cluster that stands: kept, grown, chosen again, and left alone while it is paused."""

from __future__ import annotations

import copy

from stele_operator.plan import make_plan
from stele_operator.plan.actions import (
    CreateClaim,
    CreatePod,
    DeleteClaim,
    DeletePod,
    RegisterNode,
)
from tests.operator.world import World
from tests.operator.world_kube import merged
from tests.operator.worlds import check, made, names, node_of, touching


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
    assert not touching(plan)
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
