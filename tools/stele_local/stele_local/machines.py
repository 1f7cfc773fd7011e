"""The machines: their power, disks, Node objects and addresses. Knows nothing of pods' processes.

Invariant: a machine that is off runs nothing and reports nothing; its Node turns NotReady after the grace
period."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stele_local.kinds import NODE, POD
from stele_local.objects import find, now
from stele_local.registry import Registry

Json = dict[str, Any]
UNREACHABLE = "node.kubernetes.io/unreachable"
_CAPACITY = {"cpu": "64", "memory": "256Gi", "pods": "110", "ephemeral-storage": "1Ti"}


@dataclass(slots=True)
class Machine:
    """One machine. `seen`: when it was last on, in seconds of the monotonic clock."""

    name: str
    zone: str
    address: str
    folder: Path
    on: bool = True
    seen: float = field(default_factory=time.monotonic)


class Machines:
    """All machines of the cluster, and the controller of their Node objects."""

    def __init__(
        self, registry: Registry, folder: Path, count: int, zones: int, network: str, grace_seconds: float
    ) -> None:
        self._registry, self._grace_seconds = registry, grace_seconds
        self._machines = {
            f"n{i + 1}": Machine(
                f"n{i + 1}", f"z{i % zones + 1}", f"{network}.0.{10 + i}", folder / f"n{i + 1}"
            )
            for i in range(count)
        }
        for machine in self:
            machine.folder.mkdir(parents=True, exist_ok=True)

    def __iter__(self) -> Iterator[Machine]:
        return iter(self._machines.values())

    def __getitem__(self, name: str) -> Machine:
        return self._machines[name]

    def __contains__(self, name: str) -> bool:
        return name in self._machines

    def get(self, name: str) -> Machine | None:
        return self._machines.get(name)

    def wipe(self, name: str) -> None:
        """Empty a machine's disks.

        Raises:
            ValueError: the machine is on.
        """
        machine = self._machines[name]
        if machine.on:
            raise ValueError(f"machine {name} is on; switch it off first")
        shutil.rmtree(machine.folder)
        machine.folder.mkdir(parents=True)

    def step(self) -> None:
        """Register and refresh the Nodes of machines that are on. Mark silent Nodes and their pods as not
        ready.
        """
        for machine in self:
            node = self._registry.find(NODE, "", machine.name)
            if machine.on:
                machine.seen = time.monotonic()
                self._report(machine, node)
            elif node is not None and time.monotonic() - machine.seen > self._grace_seconds:
                self._lose(node)

    def _report(self, machine: Machine, node: Json | None) -> None:
        if node is None:
            labels = {"kubernetes.io/hostname": machine.name, "topology.kubernetes.io/zone": machine.zone}
            labels |= {"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
            node = self._registry.create(NODE, "", {"metadata": {"name": machine.name, "labels": labels}}).obj
        told = find(node, "status", "addresses", default=[{}])[0].get("address")
        if condition(node, "Ready") == "True" and told == machine.address:
            return
        state = {
            "capacity": _CAPACITY,
            "allocatable": _CAPACITY,
            "addresses": [
                {"type": "InternalIP", "address": machine.address},
                {"type": "Hostname", "address": machine.name},
            ],
            "nodeInfo": {
                "kubeletVersion": "v1.36.0+stele-local",
                "operatingSystem": "linux",
                "architecture": "amd64",
            },
        }

        def come_back(new: Json) -> None:
            new["status"] |= state
            set_condition(new, "Ready", "True", "KubeletReady", "kubelet is posting ready status")

        self._registry.change(NODE, node, come_back, "status")
        taints = [t for t in find(node, "spec", "taints", default=[]) if t["key"] != UNREACHABLE]
        self._registry.change(NODE, node, lambda new: _set_taints(new, taints))

    def _lose(self, node: Json) -> None:
        if condition(node, "Ready") != "Unknown":
            told = ("NodeStatusUnknown", "Kubelet stopped posting node status.")
            self._registry.change(
                NODE, node, lambda new: set_condition(new, "Ready", "Unknown", *told), "status"
            )
            taints = [
                {"key": UNREACHABLE, "effect": e, "timeAdded": now()} for e in ("NoSchedule", "NoExecute")
            ]
            self._registry.change(NODE, node, lambda new: _set_taints(new, taints))
        for pod in self._registry.store.objects(POD.key):
            if pod["spec"].get("nodeName") == node["metadata"]["name"] and condition(pod, "Ready") == "True":
                self._registry.change(POD, pod, lambda new: set_condition(new, "Ready", "False"), "status")


def _set_taints(node: Json, taints: list[Json]) -> None:
    node.setdefault("spec", {}).pop("taints", None)
    if taints:
        node["spec"]["taints"] = taints


def condition(obj: Json, type_: str) -> str | None:
    return next(
        (c["status"] for c in find(obj, "status", "conditions", default=[]) if c["type"] == type_), None
    )


def set_condition(obj: Json, type_: str, value: str, reason: str = "", message: str = "") -> None:
    """Set one of `status.conditions`. The transition time changes only with the value."""
    conditions = obj.setdefault("status", {}).setdefault("conditions", [])
    old = next((c for c in conditions if c["type"] == type_), None)
    new: Json = {"type": type_, "status": value, "lastTransitionTime": now()}
    if reason:
        new["reason"] = reason
    if message:
        new["message"] = message
    if old is None:
        conditions.append(new)
        return
    if old["status"] == value:
        new["lastTransitionTime"] = old["lastTransitionTime"]
    conditions[conditions.index(old)] = new
