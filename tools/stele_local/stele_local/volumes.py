"""Claims and volumes. A volume is a folder on the machine of its first consumer, and is lost with that
machine's disks.

Owns: PVs of class `local`, the phases of claims, their growth, and the finalizer that keeps a claim while a
pod uses it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from stele_local.builtin import PVC_PROTECTION
from stele_local.kinds import NODE, POD, PV, PVC
from stele_local.machines import Machines
from stele_local.objects import find
from stele_local.registry import DeleteOptions, Registry

Json = dict[str, Any]
SELECTED = "volume.kubernetes.io/selected-node"
PV_PROTECTION = "kubernetes.io/pv-protection"


def folder(machines: Machines, volume: Json) -> Path:
    """The folder with the data of a PV, on the PV's machine."""
    return machines[machine_of(volume)].folder / "volumes" / str(volume["metadata"]["name"])


def machine_of(volume: Json) -> str:
    """The machine of a PV; "" if somebody created the PV without one."""
    terms = find(volume, "spec", "nodeAffinity", "required", "nodeSelectorTerms", default=[])
    expressions = [e for term in terms for e in term.get("matchExpressions") or ()]
    return str(expressions[0]["values"][0]) if expressions else ""


class Volumes:
    """The controller of claims and volumes."""

    def __init__(self, registry: Registry, machines: Machines) -> None:
        self._registry, self._machines = registry, machines

    def step(self) -> None:
        for claim in self._registry.store.objects(PVC.key):
            if claim["metadata"].get("deletionTimestamp"):
                self._release(claim)
            elif not claim["spec"].get("volumeName"):
                self._bind(claim)
            else:
                self._grow(claim)
        for volume in self._registry.store.objects(PV.key):
            self._reclaim(volume)

    def _bind(self, claim: Json) -> None:
        metadata = claim["metadata"]
        chosen = (metadata.get("annotations") or {}).get(SELECTED)
        if not chosen or chosen not in self._machines or not self._machines[chosen].on:
            return
        name, size = (
            f"pvc-{metadata['uid']}",
            find(claim, "spec", "resources", "requests", "storage", default="0"),
        )
        if self._registry.find(PV, "", name) is None:
            (self._machines[chosen].folder / "volumes" / name).mkdir(parents=True, exist_ok=True)
            here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [chosen]}
            reference = {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": metadata["namespace"],
            }
            reference |= {"name": metadata["name"], "uid": metadata["uid"]}
            spec = {
                "capacity": {"storage": size},
                "accessModes": claim["spec"].get("accessModes", ["ReadWriteOnce"]),
                "claimRef": reference,
                "local": {"path": f"/mnt/volumes/{name}"},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
                "persistentVolumeReclaimPolicy": "Delete",
                "storageClassName": claim["spec"]["storageClassName"],
            }
            volume = self._registry.create(PV, "", {"metadata": {"name": name}, "spec": spec}).obj
            self._registry.change(PV, volume, lambda new: new["status"].update(phase="Bound"), "status")
        bound = self._registry.change(PVC, claim, lambda new: new["spec"].update(volumeName=name))
        if bound is not None:
            state = {
                "phase": "Bound",
                "accessModes": claim["spec"].get("accessModes", []),
                "capacity": {"storage": size},
            }
            self._registry.change(PVC, bound, lambda new: new["status"].update(state), "status")

    def _grow(self, claim: Json) -> None:
        wanted = find(claim, "spec", "resources", "requests", "storage")
        volume = self._registry.find(PV, "", claim["spec"]["volumeName"])
        if volume is None:
            if claim["status"]["phase"] == "Bound":
                self._registry.change(PVC, claim, lambda new: new["status"].update(phase="Lost"), "status")
            return
        has = find(claim, "status", "capacity", "storage")
        if wanted != has and machine_of(volume) in self._machines and self._machines[machine_of(volume)].on:
            self._registry.change(PV, volume, lambda new: new["spec"]["capacity"].update(storage=wanted))
            self._registry.change(
                PVC, claim, lambda new: new["status"].update(capacity={"storage": wanted}), "status"
            )

    def _release(self, claim: Json) -> None:
        metadata = claim["metadata"]
        used = any(
            find(volume, "persistentVolumeClaim", "claimName") == metadata["name"]
            for pod in self._registry.store.objects(POD.key, metadata["namespace"])
            if pod["spec"].get("nodeName") and find(pod, "status", "phase") not in ("Succeeded", "Failed")
            for volume in pod["spec"].get("volumes") or ()
        )
        if not used and PVC_PROTECTION in metadata.get("finalizers", ()):
            kept = [f for f in metadata["finalizers"] if f != PVC_PROTECTION]
            self._registry.change(PVC, claim, lambda new: new["metadata"].update(finalizers=kept))

    def _reclaim(self, volume: Json) -> None:
        """Delete a volume whose claim is gone, once its machine is on. If its machine does not exist, delete
        it at once.
        """
        reference = volume["spec"].get("claimRef")
        metadata = volume["metadata"]
        if not reference and volume["status"]["phase"] == "Pending":
            self._registry.change(PV, volume, lambda new: new["status"].update(phase="Available"), "status")
        if reference and volume["status"]["phase"] != "Released":
            claim = self._registry.find(PVC, reference["namespace"], reference["name"])
            if claim is not None and claim["metadata"]["uid"] == reference["uid"]:
                return
            self._registry.change(PV, volume, lambda new: new["status"].update(phase="Released"), "status")
        released = reference and volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete"
        if not released and "deletionTimestamp" not in metadata:
            return
        machine = self._machines.get(machine_of(volume))
        if machine is not None:
            if not machine.on:
                return
            shutil.rmtree(folder(self._machines, volume), ignore_errors=True)
        elif self._registry.find(NODE, "", machine_of(volume)) is not None:
            return
        if "deletionTimestamp" not in metadata:
            self._registry.delete(PV, "", metadata["name"], DeleteOptions(uid=metadata["uid"]))
        self._registry.change(PV, volume, lambda new: new["metadata"].update(finalizers=[]))
