"""Where a pod runs. Level-triggered: each pass tries every pod without a machine.

Knows: readiness, taints, cordons, nodeSelector, required node affinity, the machine of a bound claim, required pod
anti-affinity (both ways). Left out: resources, preferences but an even spread, topologySpreadConstraints."""

from __future__ import annotations

from collections import Counter
from typing import Any

from stele_local.controllers import Recorder
from stele_local.kinds import NODE, POD, PV, PVC
from stele_local.machines import Machines, condition, set_condition
from stele_local.objects import find
from stele_local.registry import Registry
from stele_local.selection import matches_selector
from stele_local.volumes import SELECTED, machine_of

Json = dict[str, Any]
_CORDONED = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


class Scheduler:
    """Binds pending pods to machines."""

    def __init__(self, registry: Registry, machines: Machines) -> None:
        self._registry, self._machines = registry, machines
        self._recorder = Recorder(registry, "default-scheduler")

    def step(self) -> None:
        for pod in self._registry.store.objects(POD.key):
            if not pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"]:
                self._place(pod)

    def _place(self, pod: Json) -> None:
        claims = self._claims(pod)
        if isinstance(claims, str):
            self._refuse(pod, f"0/{len(self._nodes())} nodes are available: {claims}.")
            return
        fits, reasons = [], Counter[str]()
        for node in self._nodes():
            reason = self._objection(pod, claims, node)
            if reason:
                reasons[reason] += 1
            else:
                fits.append(node["metadata"]["name"])
        if not fits:
            told = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
            self._refuse(pod, f"0/{len(self._nodes())} nodes are available: {told or 'no nodes'}.")
            return
        load = Counter(p["spec"].get("nodeName") for p in self._registry.store.objects(POD.key))
        self._bind(pod, claims, min(fits, key=lambda name: (load[name], name)))

    def _nodes(self) -> list[Json]:
        return self._registry.store.objects(NODE.key)

    def _claims(self, pod: Json) -> list[Json] | str:
        found = []
        for volume in pod["spec"].get("volumes") or ():
            name = find(volume, "persistentVolumeClaim", "claimName")
            if name is None:
                continue
            claim = self._registry.find(PVC, pod["metadata"]["namespace"], name)
            if claim is None:
                return f'persistentvolumeclaim "{name}" not found'
            if claim["metadata"].get("deletionTimestamp"):
                return f'persistentvolumeclaim "{name}" is being deleted'
            found.append(claim)
        return found

    def _objection(self, pod: Json, claims: list[Json], node: Json) -> str:
        spec, labels = pod["spec"], node["metadata"].get("labels") or {}
        if find(node, "spec", "unschedulable") and not _tolerates(spec, _CORDONED):
            return "node(s) were unschedulable"
        for taint in find(node, "spec", "taints", default=[]):
            if taint["effect"] in ("NoSchedule", "NoExecute") and not _tolerates(spec, taint):
                return f"node(s) had untolerated taint(s) {{{taint['key']}: {taint.get('value', '')}}}"
        if condition(node, "Ready") != "True":
            return "node(s) were not ready"
        if any(labels.get(key) != value for key, value in (spec.get("nodeSelector") or {}).items()):
            return "node(s) didn't match Pod's node affinity/selector"
        terms = find(spec, "affinity", "nodeAffinity", _REQUIRED, "nodeSelectorTerms")
        if terms is not None and not any(_term_holds(term, node) for term in terms):
            return "node(s) didn't match Pod's node affinity/selector"
        for claim in claims:
            volume = self._registry.find(PV, "", claim["spec"].get("volumeName", ""))
            chosen = (
                machine_of(volume) if volume else (claim["metadata"].get("annotations") or {}).get(SELECTED)
            )
            if chosen and chosen != node["metadata"]["name"]:
                return "node(s) didn't match PersistentVolume's node affinity"
        return self._anti_affinity(pod, node)

    def _anti_affinity(self, pod: Json, node: Json) -> str:
        machines = {n["metadata"]["name"]: n["metadata"].get("labels") or {} for n in self._nodes()}
        here = machines[node["metadata"]["name"]]
        for other in self._registry.store.objects(POD.key):
            where = machines.get(other["spec"].get("nodeName", ""))
            if where is None or find(other, "status", "phase") in ("Succeeded", "Failed"):
                continue
            for one, with_ in ((pod, other), (other, pod)):
                for term in find(one["spec"], "affinity", "podAntiAffinity", _REQUIRED, default=[]):
                    key = term["topologyKey"]
                    if here.get(key) == where.get(key) is not None and _selects(term, one, with_):
                        if one is pod:
                            return "node(s) didn't match pod anti-affinity rules"
                        return "node(s) didn't satisfy existing pods anti-affinity rules"
        return ""

    def _bind(self, pod: Json, claims: list[Json], machine: str) -> None:
        for claim in claims:
            if not claim["spec"].get("volumeName"):
                self._registry.change(
                    PVC,
                    claim,
                    lambda new: new["metadata"].update(
                        annotations={**new["metadata"].get("annotations", {}), SELECTED: machine}
                    ),
                )
        bound = self._registry.change(POD, pod, lambda new: new["spec"].update(nodeName=machine))
        if bound is not None:
            self._registry.change(
                POD, bound, lambda new: set_condition(new, "PodScheduled", "True"), "status"
            )
            name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
            self._recorder.tell(pod, POD, "Normal", "Scheduled", f"Successfully assigned {name} to {machine}")

    def _refuse(self, pod: Json, message: str) -> None:
        conditions = find(pod, "status", "conditions", default=[])
        if any(c["type"] == "PodScheduled" and c.get("message") == message for c in conditions):
            return
        self._registry.change(
            POD,
            pod,
            lambda new: set_condition(new, "PodScheduled", "False", "Unschedulable", message),
            "status",
        )
        self._recorder.tell(pod, POD, "Warning", "FailedScheduling", message)


def _tolerates(spec: Json, taint: Json) -> bool:
    return any(_bears(toleration, taint) for toleration in spec.get("tolerations") or ())


def _bears(toleration: Json, taint: Json) -> bool:
    """Without a key every taint, without an effect all of its; the operator is Equal unless it says Exists."""
    if toleration.get("effect") not in (taint["effect"], None, ""):
        return False
    if toleration.get("key") not in (taint["key"], None, ""):
        return False
    return toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", "")


def _term_holds(term: Json, node: Json) -> bool:
    labels = node["metadata"].get("labels") or {}
    fields = {"metadata.name": node["metadata"]["name"]}
    return matches_selector({"matchExpressions": term.get("matchExpressions")}, labels) and matches_selector(
        {"matchExpressions": term.get("matchFields")}, fields
    )


def _selects(term: Json, owner: Json, other: Json) -> bool:
    namespaces = term.get("namespaces") or [owner["metadata"]["namespace"]]
    if other["metadata"]["namespace"] not in namespaces:
        return False
    return matches_selector(term.get("labelSelector"), other["metadata"].get("labels") or {})
