"""Machines that nothing selects, and pods that Kubernetes does not take: what is told, and what mends it."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stele_operator.observe import parse_machine
from stele_operator.plan import make_plan
from stele_operator.plan.actions import CreatePod, DeletePod
from stele_operator.plan.fates import State
from stele_operator.plan.findings import Kind
from stele_operator.plan.observation import Taint
from stele_operator.plan.status import restart_pending
from tests.operator.cluster import Bench, bench
from tests.operator.placing import (
    SSD,
    asks,
    label,
    name,
    where,
    world_of,
)
from tests.operator.world import World
from tests.operator.worlds import check, conditions, made, node_of

Json = dict[str, Any]


def test_a_selector_that_no_machine_carries_is_told_before_a_pod_waits_for_it() -> None:
    world = made()
    world.cluster["spec"]["nodes"] |= {"nodeSelector": {"disk": "sdd", "arch": "x"}}
    plan = world.run()
    (stalled,) = [f for f in plan.findings if f.kind is Kind.STALLED]
    assert stalled.reason == "NoMachineSelected"
    assert (
        stalled.message
        == "nodes.nodeSelector asks for arch=x, disk=sdd, which no machine matches; label machines, or correct the spec"
    )
    assert {m.state for m in plan.members} == {State.READY}, "nothing that runs is touched"
    world.cluster["spec"]["nodes"] |= {"affinity": asks(label("cores", "Gt", "8"), name("In", "n9"))}
    (both,) = [f for f in make_plan(world.observe()).findings if f.kind is Kind.STALLED]
    terms = "cores Gt 8 or metadata.name In n9"
    asked = f"nodes.nodeSelector and nodes.affinity ask for arch=x, disk=sdd, and for {terms}"
    assert both.message == f"{asked}, which no machine matches; label machines, or correct the spec"
    del world.cluster["spec"]["nodes"]["nodeSelector"]
    (alone,) = [f for f in make_plan(world.observe()).findings if f.kind is Kind.STALLED]
    assert (
        alone.message
        == f"nodes.affinity asks for {terms}, which no machine matches; label machines, or correct the spec"
    )
    world.machines_known = False
    assert not [f for f in make_plan(world.observe()).findings if f.kind is Kind.STALLED]


def test_a_zone_in_which_no_machine_carries_it_is_named() -> None:
    """Else members would stand in fewer zones than were asked for, and nobody would know."""
    world = world_of(
        {
            "zones": ["z1", "z2", "z3"],
            "masters": {"replicas": 1},
            "nodes": {"replicas": 2, "nodeSelector": SSD},
        },
        labels={"n1": SSD, "n2": SSD, "n4": SSD},
    )
    plan = world.run()
    assert [(f.kind, f.message) for f in plan.findings] == [
        (
            Kind.STALLED,
            "nodes.nodeSelector asks for disk=ssd, which no machine in zone z3 matches; label machines there, or correct the spec",
        )
    ]
    assert where(world, "node") == {"n1", "n2"}


def test_members_on_machines_that_the_selector_leaves_out_are_named_and_stay() -> None:
    world = world_of({"nodes": {"replicas": 3}}, labels={"n1": SSD, "n2": SSD, "n4": SSD})
    world.run()
    out = node_of(world, "n3")
    world.cluster["spec"]["nodes"] |= {"nodeSelector": SSD}
    plan = world.run()
    (told,) = [f for f in plan.findings if f.reason == "Misplaced"]
    assert f"{out} (on machine n3, which nodes.nodeSelector leaves out)" in told.message
    assert "n1" not in told.message and where(world, "node") == {"n1", "n2", "n3"}
    status, reason, message = conditions(world)["Reconciling"]
    assert (status, reason) == ("False", "Misplaced") and "RestartPending" not in reason
    assert "keep an older spec" in message
    world.cluster["spec"]["nodes"] |= {"nodeSelector": {}, "affinity": asks(name("NotIn", "n1"))}
    (told,) = [f for f in world.run().findings if f.reason == "Misplaced"]
    assert f"{node_of(world, 'n1')} (on machine n1, which nodes.affinity leaves out)" in told.message


def test_a_scheduler_that_places_nothing_is_named() -> None:
    """Nobody else would: such a pod has no condition."""
    world = World({"nodes": {"replicas": 3}})
    world.run()
    world.cluster["spec"]["nodes"] |= {"replicas": 4, "schedulerName": "volcano"}
    world.machines = world.machines[:3]
    world.run()
    waits = world.objects["Pod", "flights-node-3"]
    waits["status"] = {"phase": "Pending"}
    for seconds, told in ((1, ""), (60, "volcano (nodes.schedulerName) has not placed it")):
        world.now_s += seconds
        found = [f.message for f in make_plan(world.observe()).findings if f.reason == "NodePending"]
        assert [told in message for message in found] == [True] * bool(told)


def test_one_whose_machine_is_left_out_since_is_made_anew_elsewhere_once_its_claim_is_deleted() -> None:
    """As the message says."""
    world = world_of({"nodes": {"replicas": 3}}, labels={"n1": SSD, "n2": SSD, "n4": SSD})
    world.run()
    out = node_of(world, "n3")
    world.cluster["spec"]["nodes"] |= {"nodeSelector": SSD}
    world.run()
    del world.objects["PersistentVolumeClaim", out]
    del world.objects["Pod", out]
    for _ in range(8):
        world.step()
    world.run()
    assert where(world, "node") == {"n1", "n2", "n4"}
    check(world)


def test_a_selector_that_is_put_right_reaches_pods_that_wait() -> None:
    world = world_of({"nodes": {"replicas": 3, "nodeSelector": {"disk": "sdd"}}})
    world.machines = [replace(m, labels=SSD) for m in world.machines]
    for _ in range(20):
        world.step()
    assert where(world, "node") == {""}
    assert not make_plan(world.observe()).actions, "nothing is tried in vain"
    assert conditions(world)["Stalled"][1] == "NoMachineSelected"
    world.cluster["spec"]["nodes"] |= {"nodeSelector": SSD}
    plan = world.step()
    assert len([a for a in plan.actions if isinstance(a, DeletePod)]) == 3
    world.run()
    assert "" not in where(world, "node") and not restart_pending(world.observe())
    check(world)


REFUSED = {
    "priority": 'pods "{name}" is forbidden: no PriorityClass with name high was found',
    "account": 'pods "{name}" is forbidden: error looking up service account data/tablets: serviceaccount "tablets" not found',
}


@pytest.mark.parametrize("sentence", REFUSED.values(), ids=REFUSED.keys())
def test_what_a_pod_names_and_is_not_there_is_told_in_the_api_servers_words(sentence: str) -> None:
    world = made()
    name = node_of(world, "n2")
    world.forbidden["Pod", name] = sentence
    del world.objects["Pod", name]
    node_id = world.objects["PersistentVolumeClaim", name]["metadata"]["annotations"]["stele.dev/node-id"]
    world.heard_s[node_id] -= 60
    plan = world.step()
    assert any(isinstance(a, CreatePod) for a in plan.actions), "it is tried again"
    (lost,) = [f for f in plan.findings if f.reason == "NodeLost"]
    assert sentence.format(name=name) in lost.message


def test_labels_and_taints_of_a_machine_are_read() -> None:
    raw = {
        "metadata": {"name": "n1", "labels": {"disk": "ssd", "topology.kubernetes.io/zone": "z1"}},
        "spec": {"taints": [{"key": "gpu", "effect": "NoSchedule"}, {"key": "a", "value": "b", "effect": "NoExecute"}]},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }  # fmt: skip
    seen = parse_machine(copy.deepcopy(raw))
    assert seen.labels == raw["metadata"]["labels"] and seen.zone == "z1"
    assert seen.taints == (Taint("gpu", "", "NoSchedule"), Taint("a", "b", "NoExecute"))
    bare = parse_machine({"metadata": {"name": "n2"}})
    assert (bare.labels, bare.taints, bare.schedulable) == ({}, (), True)


# -- on a Kubernetes


async def give(made: Bench, machine: str, label: str, tainted: bool) -> None:
    """What `kubectl label node` and `kubectl taint node` do."""
    taint = {"key": "stele", "value": label, "effect": "NoSchedule"}
    patch: Json = {"metadata": {"labels": {"stele": label}}, "spec": {"taints": [taint] if tainted else None}}
    await made.kube.patch("Node", "", machine, patch)


async def test_a_cluster_on_machines_of_its_own_stands_there_and_says_for_what_it_waits(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as made:

        async def there() -> bool:
            return await made.names("Node") == {f"n{n}" for n in range(1, 6)}

        async def placed(role: str) -> list[str]:
            found = await made.kube.list("Pod", "default", f"stele.dev/role={role}")
            return sorted(p["spec"].get("nodeName", "") for p in found)

        async def waits() -> bool:
            _, reason, message = await made.condition("TabletCluster", "flights", "Degraded")
            words = (
                "no machine takes it: 0/5 nodes are available",
                "didn't match Pod's node affinity/selector",
            )
            told = reason == "NodePending" and all(word in message for word in words)
            return told and await placed("node") == ["", "n4", "n5"]

        async def ready() -> bool:
            cluster = await made.kube.get("TabletCluster", "default", "flights")
            return ((cluster or {}).get("status") or {}).get("readyReplicas") == 3

        await made.until("the machines are there", there)
        await give(made, "n2", "masters", tainted=False)
        for machine in ("n4", "n5"):
            await give(made, machine, "nodes", tainted=True)
        await made.start()
        await made.apply(
            "cluster",
            imagePullSecrets=[{"name": "registry"}],
            masters={"replicas": 1, "storage": {"size": "1Gi"}, "nodeSelector": {"stele": "masters"}},
            nodes={
                "replicas": 3,
                "storage": {"size": "1Gi"},
                "nodeSelector": {"stele": "nodes"},
                "tolerations": [{"key": "stele", "value": "nodes", "effect": "NoSchedule"}],
                "podLabels": {"team": "data"},
            },
        )
        await made.until("the third node says why it waits", waits)
        assert await placed("master") == ["n2"]
        await give(made, "n1", "nodes", tainted=True)
        await made.until("all nodes are ready", ready)
        assert await placed("node") == ["n1", "n4", "n5"]
        teams = await made.kube.list("Pod", "default", "team=data")
        assert len(teams) == 3
