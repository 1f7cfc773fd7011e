"""Assigns pods to machines. Level-triggered: each pass tries every pod without a machine.

Respects: readiness, taints, cordons, nodeSelector, required node affinity, the machine of a bound claim,
required pod affinity and anti-affinity (both ways), and required topologySpreadConstraints. Ignores:
resources and preferences. Pods are spread evenly where nothing else decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from stele_local.controllers import Recorder
from stele_local.kinds import NAMESPACE, NODE, POD, PV, PVC
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
            spec, going = pod["spec"], "deletionTimestamp" in pod["metadata"]
            if not spec.get("nodeName") and not going and spec["schedulerName"] == "default-scheduler":
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
        spec = pod["spec"]
        if find(node, "spec", "unschedulable") and not _tolerates(spec, _CORDONED):
            return "node(s) were unschedulable"
        for taint in _not_borne(spec, node):
            return f"node(s) had untolerated taint(s) {{{taint['key']}: {taint.get('value', '')}}}"
        if condition(node, "Ready") != "True":
            return "node(s) were not ready"
        if not selected(spec, node):
            return "node(s) didn't match Pod's node affinity/selector"
        for claim in claims:
            volume = self._registry.find(PV, "", claim["spec"].get("volumeName", ""))
            chosen = (
                machine_of(volume) if volume else (claim["metadata"].get("annotations") or {}).get(SELECTED)
            )
            if chosen and chosen != node["metadata"]["name"]:
                return "node(s) didn't match PersistentVolume's node affinity"
        return self._uneven(pod, node) or self._affinity(pod, node) or self._anti_affinity(pod, node)

    def _placed(self) -> Iterator[tuple[Json, Json]]:
        """Pods with a machine that have not ended, each with its machine."""
        machines = {n["metadata"]["name"]: n for n in self._nodes()}
        for pod in self._registry.store.objects(POD.key):
            machine = machines.get(pod["spec"].get("nodeName", ""))
            if machine is not None and find(pod, "status", "phase") not in ("Succeeded", "Failed"):
                yield pod, machine

    def _uneven(self, pod: Json, node: Json) -> str:
        """Why topologySpreadConstraints exclude the machine; "" if they allow it."""
        for rule in pod["spec"].get("topologySpreadConstraints") or ():
            if rule["whenUnsatisfiable"] != "DoNotSchedule":
                continue
            here = _labels(node).get(rule["topologyKey"])
            if here is None:
                return "node(s) didn't match pod topology spread constraints (missing required label)"
            count = self._spread(pod, rule)
            least = min(count.values()) if len(count) >= rule.get("minDomains", 1) else 0
            itself = matches_selector(rule.get("labelSelector"), _labels(pod))
            if count[here] + itself - least > rule["maxSkew"]:
                return "node(s) didn't match pod topology spread constraints"
        return ""

    def _spread(self, pod: Json, rule: Json) -> dict[str, int]:
        """How many pods the constraint counts in each topology domain that has a machine for the pod."""
        key, spec = rule["topologyKey"], pod["spec"]
        able = [
            n
            for n in self._nodes()
            if (rule.get("nodeAffinityPolicy") == "Ignore" or selected(spec, n))
            and (rule.get("nodeTaintsPolicy") != "Honor" or not _not_borne(spec, n))
        ]
        count = {_labels(n)[key]: 0 for n in able if key in _labels(n)}
        for other, machine in self._placed():
            same = other["metadata"]["namespace"] == pod["metadata"]["namespace"]
            stays = same and "deletionTimestamp" not in other["metadata"]
            place = _labels(machine).get(key)
            if stays and place in count and matches_selector(rule.get("labelSelector"), _labels(other)):
                count[place] += 1
        return count

    def _affinity(self, pod: Json, node: Json) -> str:
        for term in find(pod["spec"], "affinity", "podAffinity", _REQUIRED, default=[]):
            key, here = term["topologyKey"], _labels(node).get(term["topologyKey"])
            others = [_labels(m).get(key) for other, m in self._placed() if self._selects(term, pod, other)]
            # If no pod matches the term yet, a pod that matches its own term may be the first.
            first = not others and self._selects(term, pod, pod)
            if here is None or (here not in others and not first):
                return "node(s) didn't match pod affinity rules"
        return ""

    def _anti_affinity(self, pod: Json, node: Json) -> str:
        here = _labels(node)
        for other, machine in self._placed():
            where = _labels(machine)
            for one, with_ in ((pod, other), (other, pod)):
                for term in find(one["spec"], "affinity", "podAntiAffinity", _REQUIRED, default=[]):
                    key = term["topologyKey"]
                    if here.get(key) == where.get(key) is not None and self._selects(term, one, with_):
                        if one is pod:
                            return "node(s) didn't match pod anti-affinity rules"
                        return "node(s) didn't satisfy existing pods anti-affinity rules"
        return ""

    def _selects(self, term: Json, owner: Json, other: Json) -> bool:
        """Whether an affinity term of pod `owner` selects pod `other`."""
        spaces = set(term.get("namespaces") or ())
        if (selector := term.get("namespaceSelector")) is not None:
            found = self._registry.store.objects(NAMESPACE.key)
            spaces |= {
                space["metadata"]["name"] for space in found if matches_selector(selector, _labels(space))
            }
        elif not spaces:
            spaces = {owner["metadata"]["namespace"]}
        return other["metadata"]["namespace"] in spaces and matches_selector(
            term.get("labelSelector"), _labels(other)
        )

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
    """Whether a toleration matches a taint. Without a key it matches every taint, without an effect every
    effect. The default operator is Equal.
    """
    if toleration.get("effect") not in (taint["effect"], None, ""):
        return False
    if toleration.get("key") not in (taint["key"], None, ""):
        return False
    return toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", "")


def _labels(obj: Json) -> Json:
    return obj["metadata"].get("labels") or {}


def _not_borne(spec: Json, node: Json) -> list[Json]:
    """Taints of the machine that exclude the pod, because it does not tolerate them."""
    taints = find(node, "spec", "taints", default=[])
    return [t for t in taints if t["effect"] in ("NoSchedule", "NoExecute") and not _tolerates(spec, t)]


def selected(spec: Json, node: Json) -> bool:
    """Whether a pod's nodeSelector and node affinity match the machine."""
    if any(_labels(node).get(key) != value for key, value in (spec.get("nodeSelector") or {}).items()):
        return False
    terms = find(spec, "affinity", "nodeAffinity", _REQUIRED, "nodeSelectorTerms")
    return terms is None or any(_term_holds(term, node) for term in terms)


def _term_holds(term: Json, node: Json) -> bool:
    """Whether a term matches the machine. An empty term matches none."""
    labels, fields = term.get("matchExpressions"), term.get("matchFields")
    named = matches_selector({"matchExpressions": fields}, {"metadata.name": node["metadata"]["name"]})
    return bool(labels or fields) and named and matches_selector({"matchExpressions": labels}, _labels(node))
