"""The Kubernetes of a World: patches, the scheduler, and kubelets with the processes that they run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stele.driver.view import NodeView, Wanted
from stele.model.ids import NodeId
from stele_local.scheduler import selected
from stele_operator.plan.observation import Machine

if TYPE_CHECKING:
    from tests.operator.world import World

Json = dict[str, Any]


class Refused(Exception):
    """A precondition did not hold."""


class Forbidden(Exception):
    """The API server does not take it: a quota, or an admission rule."""


def merged(there: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(there) if isinstance(there, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def suits(spec: Json, machine: Machine) -> bool:
    """What Kubernetes makes of a pod's nodeSelector, node affinity and tolerations."""
    node = {
        "metadata": {
            "name": machine.name,
            "labels": {**machine.labels, "topology.kubernetes.io/zone": machine.zone},
        }
    }
    if not selected(spec, node):
        return False
    for taint in machine.taints:
        borne = [
            t
            for t in spec["tolerations"]
            if t["key"] == taint.key
            and t.get("effect", taint.effect) == taint.effect
            and (t["operator"] == "Exists" or t.get("value", "") == taint.value)
        ]
        if taint.effect != "PreferNoSchedule" and not borne:
            return False
    return True


def schedule(world: World, raw: Json) -> None:
    """Bind a pod to the first ready machine that suits it and has no other of its role."""
    role = raw["metadata"]["labels"]["stele.dev/role"]
    claim = world.objects["PersistentVolumeClaim", raw["metadata"]["name"]]
    pinned = claim["metadata"]["annotations"].get("volume.kubernetes.io/selected-node")
    taken = {
        p["spec"].get("nodeName")
        for p in world.of("Pod")
        if p["metadata"]["labels"]["stele.dev/role"] == role
    }
    for machine in world.machines:
        free = machine.name not in taken and pinned in (None, machine.name)
        if machine.ready and free and suits(raw["spec"], machine):
            raw["spec"]["nodeName"] = machine.name
            if not world.volumes_move:
                claim["metadata"]["annotations"]["volume.kubernetes.io/selected-node"] = machine.name
            claim["status"] = {"phase": "Bound"}
            world.touch(claim)
            return
    raw["status"] = {"phase": "Pending", "conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/5 machines fit"}
    ]}  # fmt: skip


def run_pod(world: World, raw: Json) -> None:
    """Give a bound pod its status. If its process speaks, the masters hear it."""
    machine = next((m for m in world.machines if m.name == raw["spec"].get("nodeName")), None)
    if machine is None:
        return
    metadata = raw["metadata"]
    name, node_id = metadata["name"], NodeId(metadata["annotations"]["stele.dev/node-id"])
    role = metadata["labels"]["stele.dev/role"]
    up = machine.ready and name not in world.silent
    fenced = node_id in world.nodes and world.nodes[node_id].asked is Wanted.FENCED
    holders = {n for n, _ in world.voters}
    waits = role == "master" and holders and node_id not in holders  # for a copy of the catalog
    raw["status"] = {
        "phase": "Running",
        "podIP": f"10.0.0.{int(metadata['uid'][:8], 16) % 250}",
        "conditions": [{"type": "Ready", "status": "True" if up and not fenced and not waits else "False"}],
        "containerStatuses": [
            {"name": "stele", "state": {"running": {}} if machine.ready else {}, "restartCount": 0}
        ],
    }
    world.touch(raw)
    if not up:
        return
    if role == "master":
        world.formats.setdefault(node_id, f"format-{node_id[:8]}")
        if "--first-masters" in raw["spec"]["containers"][0]["args"] and node_id not in world.confirmed:
            return
    if world.leads() or role == "master":
        view = world.nodes.get(node_id) or NodeView(node_id, role, "", "", "")
        world.nodes[node_id] = replace(view, machine=machine.name, ever_heard=True, address="a:1")
        world.heard_s[node_id] = world.now_s
        world.formed_nodes.add(node_id)
