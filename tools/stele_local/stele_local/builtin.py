"""Defaults, immutable fields and rules of single built-in kinds.

Called only by `registry`. Defaults are those of a real API server, as far as stele_local or kubectl users
read them. tests/kube_contract/README.md lists the others.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

from stele_local.objects import find, quantity, without
from stele_local.status import Cause, forbidden, invalid, not_offered

Json = dict[str, Any]
PVC_PROTECTION = "kubernetes.io/pvc-protection"
_serial = itertools.count(10)


def on_create(plural: str, obj: Json) -> None:
    """Fill in defaults in place.

    Raises:
        ApiError: the object is invalid, or (501) a part of a pod is one that stele_local does not run.
    """
    match plural:
        case "pods":
            _pod(obj)
        case "jobs":
            _job(obj)
        case "persistentvolumeclaims":
            spec = obj.setdefault("spec", {})
            spec.setdefault("volumeMode", "Filesystem")
            spec.setdefault("storageClassName", "local")
            obj["status"] = {"phase": "Pending"}
            finalizers = obj["metadata"].setdefault("finalizers", [])
            if PVC_PROTECTION not in finalizers:
                finalizers.append(PVC_PROTECTION)
        case "persistentvolumes":
            obj["spec"].setdefault("persistentVolumeReclaimPolicy", "Retain")
            obj["spec"].setdefault("volumeMode", "Filesystem")
            obj["status"] = {"phase": "Pending"}
            obj["metadata"].setdefault("finalizers", ["kubernetes.io/pv-protection"])
        case "services":
            _service(obj)
        case "namespaces":
            obj["spec"] = {"finalizers": ["kubernetes"]}
            obj["status"] = {"phase": "Active"}
            obj["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = obj["metadata"]["name"]
        case "nodes":
            obj.setdefault("spec", {})
            obj.setdefault("status", {})
        case "events":
            for word, value in (("eventTime", None), ("reportingComponent", ""), ("reportingInstance", "")):
                obj.setdefault(word, value)
        case "secrets":
            obj.setdefault("type", "Opaque")
        case "poddisruptionbudgets":
            obj["status"] = {
                "currentHealthy": 0, "desiredHealthy": 0, "disruptionsAllowed": 0, "expectedPods": 0,
            }  # fmt: skip


_ONE = ("parallelism", "completions")
_NOT_IN_JOBS = (
    "ttlSecondsAfterFinished",
    "backoffLimitPerIndex",
    "successPolicy",
    "managedBy",
    "manualSelector",
)


def _job(obj: Json) -> None:
    spec, metadata = obj.setdefault("spec", {}), obj["metadata"]
    name = metadata.get("name", "")
    for word in _ONE:
        if spec.setdefault(word, 1) != 1:
            raise not_offered(f"spec.{word} of a Job other than 1")
    for word in _NOT_IN_JOBS:
        if spec.get(word) is not None:
            raise not_offered(f"spec.{word} of a Job")
    if spec.setdefault("suspend", False):
        raise not_offered("suspended Jobs")
    spec.setdefault("backoffLimit", 6)
    if spec.setdefault("completionMode", "NonIndexed") != "NonIndexed":
        raise not_offered("indexed Jobs")
    rules = find(spec, "podFailurePolicy", "rules", default=[])
    spec.setdefault("podReplacementPolicy", "Failed" if rules else "TerminatingOrFailed")
    template = spec.get("template") or {}
    inner = template.setdefault("spec", {})
    if not inner.get("containers"):
        cause = Cause("FieldValueRequired", "Required value", "spec.template.spec.containers")
        raise invalid("Job", "batch", name, [cause])
    policy = inner.get("restartPolicy") or "Always"
    if policy not in ("Never", "OnFailure"):
        why = f'Unsupported value: "{policy}": supported values: "OnFailure", "Never"'
        if not inner.get("restartPolicy"):
            why = 'Required value: valid values: "OnFailure", "Never"'
        word = "FieldValueNotSupported" if inner.get("restartPolicy") else "FieldValueRequired"
        raise invalid("Job", "batch", name, [Cause(word, why, "spec.template.spec.restartPolicy")])
    uid = metadata["uid"]
    labels = template.setdefault("metadata", {}).setdefault("labels", {})
    for prefix in ("batch.kubernetes.io/", ""):
        labels |= {f"{prefix}controller-uid": uid, f"{prefix}job-name": name}
    spec["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}
    spec["template"] = template
    obj["status"] = {}


def _job_update(name: str, old: Json, new: Json) -> None:
    for word in ("completions", "selector", "template", "podFailurePolicy", "completionMode"):
        if old["spec"].get(word) != new["spec"].get(word):
            cause = Cause("FieldValueInvalid", "Invalid value: field is immutable", f"spec.{word}")
            raise invalid("Job", "batch", name, [cause])


def _pod(obj: Json) -> None:
    spec = obj.setdefault("spec", {})
    if not spec.get("containers"):
        name = obj["metadata"].get("name", "")
        raise invalid("Pod", "", name, [Cause("FieldValueRequired", "Required value", "spec.containers")])
    for word in ("initContainers", "ephemeralContainers", "schedulingGates"):
        if spec.get(word):
            raise not_offered(f"spec.{word} of a Pod")
    if runtime := spec.get("runtimeClassName"):  # no RuntimeClass exists here
        why = f'pod rejected: RuntimeClass "{runtime}" not found'
        raise forbidden("pods", "", obj["metadata"].get("name", ""), why)
    for container in spec["containers"]:
        container.setdefault("resources", {})
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("terminationMessagePolicy", "File")
        container.setdefault("imagePullPolicy", _pull_policy(container.get("image", "")))
        _container_resources(container["resources"])
        for port in container.get("ports") or ():
            port.setdefault("protocol", "TCP")
        for word in ("startupProbe", "readinessProbe", "livenessProbe"):
            if probe := container.get(word):
                _probe(probe, word)
        for variable in container.get("env") or ():
            reference = find(variable, "valueFrom", "fieldRef")
            if reference:
                reference.setdefault("apiVersion", "v1")
    for volume in spec.get("volumes") or ():
        for word, key in (
            ("configMap", "defaultMode"),
            ("secret", "defaultMode"),
            ("downwardAPI", "defaultMode"),
        ):
            if word in volume:
                volume[word].setdefault(key, 420)
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("dnsPolicy", "ClusterFirst")
    spec.setdefault("serviceAccountName", "default")
    spec.setdefault("serviceAccount", spec["serviceAccountName"])
    spec.setdefault("securityContext", {})
    spec.setdefault("schedulerName", "default-scheduler")
    spec.setdefault("enableServiceLinks", True)
    spec.setdefault("preemptionPolicy", "PreemptLowerPriority")
    spec.setdefault("priority", 0)
    tolerations = spec.setdefault("tolerations", [])
    for word in ("not-ready", "unreachable"):
        key = f"node.kubernetes.io/{word}"
        if not any(
            t.get("key") in (key, None) and t.get("effect") in ("NoExecute", None) for t in tolerations
        ):
            tolerations.append(
                {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
            )
    obj["status"] = {"phase": "Pending", "qosClass": _qos(spec)}


def _container_resources(resources: Json) -> None:
    for name, value in (resources.get("limits") or {}).items():
        resources.setdefault("requests", {}).setdefault(name, value)


def _qos(spec: Json) -> str:
    resources = [container["resources"] for container in spec["containers"]]
    if not any(r.get("limits") or r.get("requests") for r in resources):
        return "BestEffort"
    full = all(
        set(r.get("limits") or ()) >= {"cpu", "memory"} and r.get("requests") == r.get("limits")
        for r in resources
    )
    return "Guaranteed" if full else "Burstable"


def _pull_policy(image: str) -> str:
    tag = image.rsplit("/", 1)[-1].partition(":")[2]
    return "Always" if tag in ("", "latest") else "IfNotPresent"


def _probe(probe: Json, word: str) -> None:
    for other in ("exec", "grpc"):
        if other in probe:
            raise not_offered(f"probes by {other} ({word})")
    if "httpGet" in probe:
        probe["httpGet"].setdefault("path", "/")
        probe["httpGet"].setdefault("scheme", "HTTP")
    probe.setdefault("timeoutSeconds", 1)
    probe.setdefault("periodSeconds", 10)
    probe.setdefault("successThreshold", 1)
    probe.setdefault("failureThreshold", 3)


def _service(obj: Json) -> None:
    spec = obj.setdefault("spec", {})
    spec.setdefault("type", "ClusterIP")
    if spec["type"] != "ClusterIP":
        raise not_offered(f"services of type {spec['type']}")
    for port in spec.get("ports") or ():
        port.setdefault("protocol", "TCP")
        port.setdefault("targetPort", port["port"])
    # Nothing listens on this address: the DNS name of a service resolves to its pods' addresses (see `dns`).
    spec.setdefault("clusterIP", f"10.96.0.{next(_serial) % 250}")
    spec.setdefault("clusterIPs", [spec["clusterIP"]])
    spec.setdefault("sessionAffinity", "None")
    spec.setdefault("ipFamilies", ["IPv4"])
    spec.setdefault("ipFamilyPolicy", "SingleStack")
    spec.setdefault("internalTrafficPolicy", "Cluster")
    obj["status"] = {"loadBalancer": {}}


def on_update(plural: str, old: Json, new: Json) -> None:
    """Refuse changes of immutable fields.

    Raises:
        ApiError: such a field has changed.
    """
    name = new["metadata"]["name"]
    if plural == "pods":
        _pod_update(name, old, new)
    elif plural == "jobs":
        _job_update(name, old, new)
    elif plural == "persistentvolumeclaims":
        _claim_update(name, old, new)
    elif plural in ("configmaps", "secrets") and old.get("immutable"):
        kind = "ConfigMap" if plural == "configmaps" else "Secret"
        for word in ("data", "binaryData", "stringData"):
            if old.get(word) != new.get(word):
                cause = Cause(
                    "FieldValueForbidden", "Forbidden: field is immutable when `immutable` is set", word
                )
                raise invalid(kind, "", name, [cause])


_POD_MAY_CHANGE = (
    "`spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only "
    "additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
)


def _pod_update(name: str, old: Json, new: Json) -> None:
    def fixed(obj: Json) -> Json:
        spec: Json = copy.deepcopy(obj["spec"])
        for word in ("activeDeadlineSeconds", "tolerations", "nodeName"):
            spec.pop(word, None)
        for container in spec["containers"]:
            container.pop("image", None)
        return spec

    if fixed(old) != fixed(new):
        why = f"Forbidden: pod updates may not change fields other than {_POD_MAY_CHANGE}"
        raise invalid("Pod", "", name, [Cause("FieldValueForbidden", why, "spec")])


def _claim_update(name: str, old: Json, new: Json) -> None:
    before, after = old["spec"], new["spec"]
    size = ("resources", "requests", "storage")
    bound = find(old, "status", "phase") == "Bound"
    may_change = ("resources", "volumeName") if bound else ("volumeName",)
    named = before.get("volumeName")
    if without(before, *may_change) != without(after, *may_change) or (
        named and named != after.get("volumeName")
    ):
        why = "Forbidden: spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims"
        raise invalid("PersistentVolumeClaim", "", name, [Cause("FieldValueForbidden", why, "spec")])
    if find(before, *size) == find(after, *size):
        return
    if quantity(find(after, *size, default="0")) < quantity(find(before, *size, default="0")):
        why = "Forbidden: field can not be less than status.capacity"
        cause = Cause("FieldValueForbidden", why, "spec.resources.requests.storage")
        raise invalid("PersistentVolumeClaim", "", name, [cause])
