"""Machines lose power and disks; volumes stay with them; pods are placed where they may be."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stele_local import processes
from stele_local.cluster import LocalCluster
from stele_local.kinds import EVENT, NODE, POD, PV, PVC
from stele_local.registry import DeleteOptions
from stele_local.status import ApiError
from tests.local.conftest import claim, condition, container_status, pod, until

Json = dict[str, Any]
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def _node_ready(cluster: LocalCluster, name: str) -> str:
    conditions = cluster.registry.get(NODE, "", name)["status"]["conditions"]
    return next(c["status"] for c in conditions if c["type"] == "Ready")


def _data(cluster: LocalCluster, claim_name: str) -> Path:
    volume = cluster.registry.get(PVC, "default", claim_name)["spec"]["volumeName"]
    return next((cluster.folder / "machines").glob(f"*/volumes/{volume}"))


async def _started(cluster: LocalCluster) -> str:
    cluster.registry.create(PVC, "default", claim("data-a"))
    assert cluster.registry.get(PVC, "default", "data-a")["status"]["phase"] == "Pending"
    cluster.registry.create(POD, "default", pod("a", claim="data-a"))
    await until(lambda: condition(cluster, "a") == "True", "a is ready")
    return str(cluster.registry.get(POD, "default", "a")["spec"]["nodeName"])


async def test_power_failure_and_return(cluster: LocalCluster) -> None:
    machine = await _started(cluster)
    await cluster.off(machine)
    assert processes.left_over(cluster.folder) == []
    await until(lambda: _node_ready(cluster, machine) == "Unknown", "its node is NotReady")
    await until(lambda: condition(cluster, "a") == "False", "a is not ready")
    assert "running" in container_status(cluster, "a")["state"], "the last status stays"
    with pytest.raises(ApiError, match=":10250: connect: no route to host"):
        await cluster._kubelet.read_log(cluster.registry.get(POD, "default", "a"), {})
    cluster.registry.delete(POD, "default", "a", DeleteOptions())
    await cluster.on(machine)
    await until(lambda: not cluster.registry.find(POD, "default", "a"), "its deletion ends once it is back")
    cluster.registry.create(POD, "default", pod("a", claim="data-a"))
    await until(lambda: condition(cluster, "a") == "True", "a is ready again")
    assert cluster.registry.get(POD, "default", "a")["spec"]["nodeName"] == machine
    assert (_data(cluster, "data-a") / "starts").read_text() == "xx"


STRAY = """
import subprocess, sys, time
wait = [sys.executable, "-c", "import time; print('strays', flush=True); time.sleep(600)"]
subprocess.Popen(wait, start_new_session=True)
time.sleep(600)
"""


async def test_no_process_of_a_machine_is_left_once_it_is_off(cluster: LocalCluster) -> None:
    """Neither one that left its container's process group; the other machines' run on."""
    strays = pod("strays", "python", "-c", STRAY, container={"readinessProbe": None})
    cluster.registry.create(POD, "default", strays)
    cluster.registry.create(POD, "default", pod("stays", nodeSelector={"kubernetes.io/hostname": "n3"}))
    await until(lambda: condition(cluster, "stays") == "True", "the other pod is ready")
    logs = cluster.folder / "logs" / "default"
    await until(lambda: any(log.read_text() for log in logs.glob("strays-*/main-0.log")), "it has strayed")
    machine = cluster.registry.get(POD, "default", "strays")["spec"]["nodeName"]
    assert machine != "n3"
    stays = int(container_status(cluster, "stays")["containerID"].removeprefix("process://"))
    assert len(processes.left_over(cluster.folder)) == 3
    await cluster.off(machine)
    assert processes.left_over(cluster.folder) == [stays]


async def test_what_a_pod_was_before_its_machine_lost_power_is_not_told_after(cluster: LocalCluster) -> None:
    """Switched off and on without a pause between: what ends of the earlier life must not speak for the later one."""
    machine = await _started(cluster)
    await asyncio.gather(cluster.off(machine), cluster.on(machine))
    await until(lambda: container_status(cluster, "a")["restartCount"] == 1, "it was started again")
    await until(lambda: condition(cluster, "a") == "True", "a is ready again")
    assert (_data(cluster, "data-a") / "starts").read_text() == "xx"


async def test_the_same_pod_runs_on_after_power_returns(cluster: LocalCluster) -> None:
    machine = await _started(cluster)
    await cluster.off(machine)
    await until(lambda: condition(cluster, "a") == "False", "a is not ready")
    await cluster.on(machine)
    await until(lambda: condition(cluster, "a") == "True", "a is ready again")
    assert container_status(cluster, "a")["restartCount"] == 1
    await until(lambda: _node_ready(cluster, machine) == "True", "its node is Ready")


async def test_wiped_disks_stay_lost(cluster: LocalCluster) -> None:
    machine = await _started(cluster)
    with pytest.raises(ValueError, match="switch it off first"):
        await cluster.wipe(machine)
    await cluster.off(machine)
    await cluster.wipe(machine)
    await cluster.on(machine)

    def told() -> bool:
        return any("does not exist" in event["message"] for event in cluster.registry.list(EVENT, "default"))

    await until(told, "FailedMount is told")
    waiting = container_status(cluster, "a")["state"]["waiting"]
    assert waiting["reason"] == "ContainerCreating" and condition(cluster, "a") == "False"


async def test_a_lost_machine_is_let_go_by_force(cluster: LocalCluster) -> None:
    machine = await _started(cluster)
    await cluster.off(machine)
    await until(lambda: _node_ready(cluster, machine) == "Unknown", "its node is NotReady")
    cluster.registry.delete(PVC, "default", "data-a", DeleteOptions())
    assert cluster.registry.get(PVC, "default", "data-a")["metadata"]["finalizers"] == [
        "kubernetes.io/pvc-protection"
    ]
    cluster.registry.delete(POD, "default", "a", DeleteOptions())
    assert cluster.registry.get(POD, "default", "a")["metadata"]["deletionGracePeriodSeconds"] == 5
    cluster.registry.delete(POD, "default", "a", DeleteOptions(grace_seconds=0))
    assert cluster.registry.find(POD, "default", "a") is None
    await until(lambda: not cluster.registry.find(PVC, "default", "data-a"), "the claim is gone")
    assert cluster.registry.list(PV), "the volume waits for its machine"
    cluster.registry.delete(NODE, "", machine, DeleteOptions())
    await cluster.on(machine)
    await until(lambda: not cluster.registry.list(PV), "the volume is gone")
    await until(lambda: _node_ready(cluster, machine) == "True", "its node is back")


async def test_volumes_grow_and_go(cluster: LocalCluster) -> None:
    await _started(cluster)
    data = _data(cluster, "data-a")
    grown = {"spec": {"resources": {"requests": {"storage": "2Gi"}}}}
    cluster.registry.patch(PVC, "default", "data-a", grown)
    await until(
        lambda: cluster.registry.get(PVC, "default", "data-a")["status"]["capacity"]["storage"] == "2Gi",
        "it grew",
    )
    cluster.registry.delete(POD, "default", "a", DeleteOptions())
    cluster.registry.delete(PVC, "default", "data-a", DeleteOptions())
    await until(lambda: not cluster.registry.list(PV), "the volume is gone")
    assert not data.exists() and not cluster.registry.list(PVC)


async def test_placement(cluster: LocalCluster) -> None:
    apart = {"labelSelector": {"matchLabels": {"app": "x"}}, "topologyKey": "kubernetes.io/hostname"}
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    for index in range(4):
        cluster.registry.create(POD, "default", pod(f"p{index}", affinity=affinity))
    await until(lambda: condition(cluster, "p3", "PodScheduled") == "False", "the fourth has no machine")
    placed = {cluster.registry.get(POD, "default", f"p{i}")["spec"]["nodeName"] for i in range(3)}
    assert placed == {"n1", "n2", "n3"}
    zoned = pod("z", nodeSelector={"topology.kubernetes.io/zone": "z2"})
    zoned["metadata"]["labels"] = {}
    cluster.registry.create(POD, "default", zoned)
    await until(
        lambda: cluster.registry.get(POD, "default", "z")["spec"].get("nodeName") == "n2", "z is in its zone"
    )
    cluster.registry.delete(POD, "default", "p0", DeleteOptions())
    await until(lambda: condition(cluster, "p3") == "True", "the fourth took its place")


def _is_scheduled(cluster: LocalCluster, name: str, status: str) -> bool:
    return condition(cluster, name, "PodScheduled") == status


def _tolerates(*tolerations: dict[str, str]) -> dict[str, Any]:
    return {"tolerations": list(tolerations)}


async def _placed_one_by_one(cluster: LocalCluster, cases: dict[str, tuple[Json, str]]) -> None:
    """Pods of these specs are made, and each is given its machine, or the empty one is said to be: none."""
    for name, (spec, machine) in cases.items():
        cluster.registry.create(POD, "default", pod(name, **spec))
        await until(partial(_is_scheduled, cluster, name, "True" if machine else "False"), name)
        assert cluster.registry.get(POD, "default", name)["spec"].get("nodeName", "") == machine, name


def _asks(**one: Any) -> Json:
    terms = [{"matchExpressions": [{"key": "cores", **one}]}]
    return {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}}}


def _beside(selector: Json | None, **more: Any) -> Json:
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": selector, **more}
    return {"affinity": {"podAffinity": {REQUIRED: [term]}}}


def _even(**more: Any) -> Json:
    rule = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
    spread = {**rule, "labelSelector": {"matchLabels": {"app": "x"}}, **more}
    return {"topologySpreadConstraints": [spread], "nodeSelector": {"cores": "16"}}


async def test_what_a_pod_says_of_machines_and_other_pods_is_kept_to(cluster: LocalCluster) -> None:
    """A term that holds nowhere, or that is none, keeps no other pod from its machine."""
    await until(lambda: len(cluster.registry.list(NODE)) == 3, "all machines are there")
    for name, cores in (("n1", "4"), ("n2", "many"), ("n3", "16")):
        cluster.registry.patch(NODE, "", name, {"metadata": {"labels": {"cores": cores}}})
    mine, other = {"matchLabels": {"app": "x"}}, {"matchLabels": {"app": "y"}}
    kinds = {"matchExpressions": [{"key": "app", "operator": "In", "values": ["x"]}]}
    cluster.registry.create(POD, "default", pod("another-scheduler", schedulerName="volcano"))
    cases: dict[str, tuple[Json, str]] = {
        "first-of-its-kind": ({**_beside(mine), "nodeSelector": {"cores": "16"}}, "n3"),
        "beside-it": (_beside(kinds), "n3"),
        "beside-nobody": (_beside(other), ""),
        "beside-none": (_beside(None), ""),
        "beside-one-elsewhere": (_beside(mine, namespaces=["web"]), ""),
        "beside-one-anywhere": (_beside(mine, namespaceSelector={}), "n3"),
        "more": (_asks(operator="Gt", values=["4"]), "n3"),
        "less": (_asks(operator="Lt", values=["16"]), "n1"),
        "no-number": (_asks(operator="Gt", values=["x"]), ""),
        "no-operator": (_asks(operator="Like", values=["x"]), ""),
        "even": (_even(), "n3"),  # there is one machine for it
        "uneven": (_even(nodeAffinityPolicy="Ignore"), ""),
        "less-uneven": (_even(nodeAffinityPolicy="Ignore", maxSkew=9), "n3"),
        "wished": (_even(nodeAffinityPolicy="Ignore", whenUnsatisfiable="ScheduleAnyway"), "n3"),
        "too-few-places": (_even(minDomains=4), ""),
        "no-place": (_even(topologyKey="rack"), ""),
        "tainted-machines-do-not-count": (_even(nodeAffinityPolicy="Ignore", nodeTaintsPolicy="Honor"), "n3"),
    }
    *before, last = cases.items()
    await _placed_one_by_one(cluster, dict(before))
    for name in ("n1", "n2"):
        taint = {"key": "spot", "effect": "NoSchedule"}
        cluster.registry.patch(NODE, "", name, {"spec": {"taints": [taint]}})
    await _placed_one_by_one(cluster, dict([last]))
    assert not condition(cluster, "another-scheduler", "PodScheduled")
    with pytest.raises(ApiError, match='forbidden: pod rejected: RuntimeClass "kata" not found'):
        cluster.registry.create(POD, "default", pod("kept", runtimeClassName="kata"))


async def test_taints_keep_pods_off_that_do_not_tolerate_them(cluster: LocalCluster) -> None:
    await until(lambda: len(cluster.registry.list(NODE)) == 3, "all machines are there")
    for name, taint in (
        ("n1", {"key": "gpu", "value": "a100", "effect": "NoSchedule"}),
        ("n2", {"key": "gpu", "value": "h100", "effect": "NoExecute"}),
        ("n3", {"key": "spot", "effect": "NoSchedule"}),
    ):
        cluster.registry.patch(NODE, "", name, {"spec": {"taints": [taint]}})
    of_n1 = {"key": "gpu", "value": "a100"}
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "none": ({}, ""),
        "value": (_tolerates({**of_n1, "operator": "Equal", "effect": "NoSchedule"}), "n1"),
        "default": (_tolerates(of_n1), "n1"),
        "exists": (_tolerates({"key": "gpu", "operator": "Exists", "effect": "NoExecute"}), "n2"),
        "other-value": (_tolerates({"key": "gpu", "value": "l4"}), ""),
        "other-effect": (_tolerates({"key": "spot", "effect": "NoExecute"}), ""),
        "no-value": (_tolerates({"key": "spot"}), "n3"),
        "selected": (
            {**_tolerates({"operator": "Exists"}), "nodeSelector": {"kubernetes.io/hostname": "n3"}},
            "n3",
        ),
    }
    await _placed_one_by_one(cluster, cases)
    told = next(
        c["message"]
        for c in cluster.registry.get(POD, "default", "none")["status"]["conditions"]
        if c["type"] == "PodScheduled"
    )
    assert "1 node(s) had untolerated taint(s) {gpu: a100}" in told and "0/3 nodes are available" in told


async def test_a_pod_takes_no_machine_that_its_affinity_names_and_the_next_one_that_is_free(
    cluster: LocalCluster,
) -> None:
    apart = {"labelSelector": {"matchLabels": {"app": "x"}}, "topologyKey": "kubernetes.io/hostname"}
    off = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("n1", "n2")]
    affinity = {"podAntiAffinity": {REQUIRED: [apart]}}
    kept = affinity | {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchFields": off}]}}}
    for index in range(3):
        cluster.registry.create(POD, "default", pod(f"p{index}", affinity=affinity))
    await until(lambda: condition(cluster, "p2") == "True", "each machine has a pod")
    at = {cluster.registry.get(POD, "default", f"p{i}")["spec"]["nodeName"]: f"p{i}" for i in range(3)}
    cluster.registry.create(POD, "default", pod("waits", affinity=kept))
    await until(lambda: condition(cluster, "waits", "PodScheduled") == "False", "no machine is free")
    cluster.registry.delete(POD, "default", at["n1"], DeleteOptions())
    await until(lambda: not cluster.registry.find(POD, "default", at["n1"]), "a machine is free")
    cluster.registry.create(POD, "default", pod("next", affinity=affinity))
    await until(lambda: condition(cluster, "next") == "True", "one that was made later took it")
    assert cluster.registry.get(POD, "default", "next")["spec"]["nodeName"] == "n1"
    assert not cluster.registry.get(POD, "default", "waits")["spec"].get("nodeName")
    cluster.registry.delete(POD, "default", at["n3"], DeleteOptions())
    await until(lambda: condition(cluster, "waits") == "True", "it takes the third")
    assert cluster.registry.get(POD, "default", "waits")["spec"]["nodeName"] == "n3"


async def test_a_volume_of_no_machine_does_not_end_the_care_for_the_others(cluster: LocalCluster) -> None:
    """Made by hand, as kubectl lets one."""
    spec = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": "/x"}}
    cluster.registry.create(PV, "", {"metadata": {"name": "by-hand"}, "spec": spec})
    cluster.registry.delete(PV, "", "by-hand", DeleteOptions())
    await asyncio.sleep(0.2)
    cluster.registry.create(PVC, "default", claim("c"))
    cluster.registry.create(POD, "default", pod("a", claim="c"))
    await until(lambda: condition(cluster, "a") == "True", "a has its volume")
    await until(lambda: not cluster.registry.find(PV, "", "by-hand"), "the one made by hand is gone")
