"""Machines with labels and taints, and where pods land on them: for tests of what a user says of pods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.operator.world import World

Json = dict[str, Any]
SSD = {"disk": "ssd"}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
DEDICATED = {"key": "stele", "operator": "Equal", "value": "nodes", "effect": "NoSchedule"}
OURS = [
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute"}
    for taint in ("not-ready", "unreachable")
]


def world_of(spec: Json, labels: Json | None = None, taints: Json | None = None, machines: int = 5) -> World:
    """Machines with labels and taints of their own, by name; nothing has been done yet."""
    world = World(spec, machines=machines)
    world.machines = [
        replace(m, labels=(labels or {}).get(m.name, {}), taints=(taints or {}).get(m.name, ()))
        for m in world.machines
    ]
    return world


def asks(*terms: Json) -> Json:
    """An affinity for machines of which one of the terms holds."""
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": list(terms)}}}


def label(key: str, operator: str, *values: str) -> Json:
    """A term that says something of one label."""
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


def name(operator: str, value: str) -> Json:
    """A term that says something of the machine's name."""
    return {"matchFields": [{"key": "metadata.name", "operator": operator, "values": [value]}]}


def pods(world: World, role: str) -> list[Json]:
    """Pods of a role."""
    return [p for p in world.of("Pod") if p["metadata"]["labels"]["stele.dev/role"] == role]


def where(world: World, role: str) -> set[str]:
    """Machines of a role's pods; the empty one of those that have none."""
    return {p["spec"].get("nodeName", "") for p in pods(world, role)}


EVEN = {
    "maxSkew": 1,
    "topologyKey": "topology.kubernetes.io/rack",
    "whenUnsatisfiable": "ScheduleAnyway",
    "labelSelector": {},  # all: not the same as none
}
