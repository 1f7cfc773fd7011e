"""Makes tables for `kubectl get`. Pure: from a kind and its objects to the `Table` body that kubectl prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from stele_local.kinds import Column, Kind
from stele_local.objects import age, find, json_path, parse_time

Json = dict[str, Any]


def _text(*keys: str, default: str = "<none>") -> Callable[[Json], Any]:
    return lambda obj: find(obj, *keys, default=default)


def _count(key: str) -> Callable[[Json], Any]:
    return lambda obj: len(obj.get(key) or {})


def _ready(pod: Json) -> str:
    states = find(pod, "status", "containerStatuses", default=[])
    return f"{sum(bool(s.get('ready')) for s in states)}/{len(pod['spec']['containers'])}"


def _phase(pod: Json) -> str:
    """The text in kubectl's STATUS column: the first container's reason if there is one, else the phase."""
    shown = find(pod, "status", "reason") or find(pod, "status", "phase", default="Unknown")
    for state in find(pod, "status", "containerStatuses", default=[]):
        shown = (
            find(state, "state", "waiting", "reason") or find(state, "state", "terminated", "reason") or shown
        )
    return "Terminating" if pod["metadata"].get("deletionTimestamp") else shown


def _restarts(pod: Json) -> str:
    states = find(pod, "status", "containerStatuses", default=[])
    total = sum(s.get("restartCount", 0) for s in states)
    last = max((find(s, "lastState", "terminated", "finishedAt", default="") for s in states), default="")
    return f"{total} ({age(last)} ago)" if total and last else str(total)


def _node_status(node: Json) -> str:
    ready = next(
        (c["status"] for c in find(node, "status", "conditions", default=[]) if c["type"] == "Ready"), None
    )
    word = {"True": "Ready", None: "Unknown"}.get(ready, "NotReady")
    return word + (",SchedulingDisabled" if find(node, "spec", "unschedulable") else "")


def _internal_address(node: Json) -> str:
    listed = find(node, "status", "addresses", default=[])
    return next((a["address"] for a in listed if a["type"] == "InternalIP"), "<none>")


def _modes(obj: Json) -> str:
    short = {
        "ReadWriteOnce": "RWO",
        "ReadOnlyMany": "ROX",
        "ReadWriteMany": "RWX",
        "ReadWriteOncePod": "RWOP",
    }
    return ",".join(short.get(mode, mode) for mode in find(obj, "spec", "accessModes", default=[]))


def _claim(volume: Json) -> str:
    claim = find(volume, "spec", "claimRef")
    return f"{claim['namespace']}/{claim['name']}" if claim else ""


def _ports(service: Json) -> str:
    ports = find(service, "spec", "ports", default=[])
    return ",".join(f"{port['port']}/{port['protocol']}" for port in ports) or "<none>"


def _about(event: Json) -> str:
    involved = event.get("involvedObject") or {}
    return f"{str(involved.get('kind', '')).lower()}/{involved.get('name', '')}"


def _seen(event: Json) -> str:
    return age(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"])


def _job_state(job: Json) -> str:
    for condition in find(job, "status", "conditions", default=[]):
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            return str(condition["type"])
    return "Terminating" if job["metadata"].get("deletionTimestamp") else "Running"


def _job_time(job: Json) -> str:
    started, ended = find(job, "status", "startTime"), find(job, "status", "completionTime")
    if not started:
        return ""
    return age(started) if not ended else f"{int((parse_time(ended) - parse_time(started)).total_seconds())}s"


def _of_template(word: str) -> Callable[[Json], Any]:
    return lambda job: ",".join(c.get(word, "") for c in job["spec"]["template"]["spec"]["containers"])


Cells = tuple[tuple[str, str, int, Callable[[Json], Any]], ...]
_AGE_CELL = ("Age", "string", 0, lambda obj: age(obj["metadata"].get("creationTimestamp")))
_NAME_CELL = ("Name", "string", 0, _text("metadata", "name"))
_BUILT_IN: dict[str, Cells] = {
    "pods": (
        _NAME_CELL,
        ("Ready", "string", 0, _ready),
        ("Status", "string", 0, _phase),
        ("Restarts", "string", 0, _restarts),
        _AGE_CELL,
        ("IP", "string", 1, _text("status", "podIP")),
        ("Node", "string", 1, _text("spec", "nodeName")),
        ("Nominated Node", "string", 1, lambda _: "<none>"),
        ("Readiness Gates", "string", 1, lambda _: "<none>"),
    ),
    "nodes": (
        _NAME_CELL,
        ("Status", "string", 0, _node_status),
        ("Roles", "string", 0, lambda _: "<none>"),
        _AGE_CELL,
        ("Version", "string", 0, _text("status", "nodeInfo", "kubeletVersion", default="")),
        ("Internal-IP", "string", 1, _internal_address),
        ("External-IP", "string", 1, lambda _: "<none>"),
        *((n, "string", 1, lambda _: "<unknown>") for n in ("OS-Image", "Kernel-Version", "Container-Runtime")),
    ),
    "persistentvolumeclaims": (
        _NAME_CELL,
        ("Status", "string", 0, lambda o: "Terminating" if o["metadata"].get("deletionTimestamp") else o["status"]["phase"]),
        ("Volume", "string", 0, _text("spec", "volumeName", default="")),
        ("Capacity", "string", 0, _text("status", "capacity", "storage", default="")),
        ("Access Modes", "string", 0, lambda o: _modes(o) if find(o, "spec", "volumeName") else ""),
        ("StorageClass", "string", 0, _text("spec", "storageClassName", default="")),
        ("VolumeAttributesClass", "string", 0, lambda _: "<unset>"),
        _AGE_CELL,
        ("VolumeMode", "string", 1, _text("spec", "volumeMode")),
    ),
    "persistentvolumes": (
        _NAME_CELL,
        ("Capacity", "string", 0, _text("spec", "capacity", "storage", default="")),
        ("Access Modes", "string", 0, _modes),
        ("Reclaim Policy", "string", 0, _text("spec", "persistentVolumeReclaimPolicy", default="")),
        ("Status", "string", 0, lambda o: "Terminating" if o["metadata"].get("deletionTimestamp") else o["status"]["phase"]),
        ("Claim", "string", 0, _claim),
        ("StorageClass", "string", 0, _text("spec", "storageClassName", default="")),
        ("VolumeAttributesClass", "string", 0, lambda _: "<unset>"),
        ("Reason", "string", 0, _text("status", "reason", default="")),
        _AGE_CELL,
        ("VolumeMode", "string", 1, _text("spec", "volumeMode")),
    ),
    "events": (
        ("Last Seen", "string", 0, _seen),
        ("Type", "string", 0, _text("type", default="")),
        ("Reason", "string", 0, _text("reason", default="")),
        ("Object", "string", 0, _about),
        ("Subobject", "string", 1, _text("involvedObject", "fieldPath", default="")),
        ("Source", "string", 1, _text("source", "component", default="")),
        ("Message", "string", 0, lambda o: str(o.get("message", "")).strip()),
        ("First Seen", "string", 1, lambda o: age(o.get("firstTimestamp") or o["metadata"]["creationTimestamp"])),
        ("Count", "string", 1, lambda o: o.get("count", 1)),
        ("Name", "string", 1, _text("metadata", "name")),
    ),
    "services": (
        _NAME_CELL,
        ("Type", "string", 0, _text("spec", "type")),
        ("Cluster-IP", "string", 0, _text("spec", "clusterIP")),
        ("External-IP", "string", 0, lambda _: "<none>"),
        ("Port(s)", "string", 0, _ports),
        _AGE_CELL,
        ("Selector", "string", 1, lambda o: ",".join(f"{k}={v}" for k, v in sorted((find(o, "spec", "selector") or {}).items())) or "<none>"),
    ),
    "configmaps": (_NAME_CELL, ("Data", "string", 0, _count("data")), _AGE_CELL),
    "secrets": (_NAME_CELL, ("Type", "string", 0, _text("type")), ("Data", "string", 0, _count("data")), _AGE_CELL),
    "namespaces": (_NAME_CELL, ("Status", "string", 0, _text("status", "phase")), _AGE_CELL),
    "jobs": (
        _NAME_CELL,
        ("Status", "string", 0, _job_state),
        ("Completions", "string", 0, lambda o: f"{find(o, 'status', 'succeeded', default=0)}/1"),
        ("Duration", "string", 0, _job_time),
        _AGE_CELL,
        ("Containers", "string", 1, _of_template("name")),
        ("Images", "string", 1, _of_template("image")),
        ("Selector", "string", 1, lambda o: ",".join(f"{k}={v}" for k, v in sorted((find(o, "spec", "selector", "matchLabels") or {}).items())) or "<none>"),
    ),
    "leases": (_NAME_CELL, ("Holder", "string", 0, _text("spec", "holderIdentity", default="")), _AGE_CELL),
    "poddisruptionbudgets": (
        _NAME_CELL,
        ("Min Available", "string", 0, lambda o: str(find(o, "spec", "minAvailable", default="N/A"))),
        ("Max Unavailable", "string", 0, lambda o: str(find(o, "spec", "maxUnavailable", default="N/A"))),
        ("Allowed Disruptions", "integer", 0, lambda o: find(o, "status", "disruptionsAllowed", default=0)),
        _AGE_CELL,
    ),
}  # fmt: skip


def _custom(kind: Kind) -> Cells:
    columns = kind.columns or (Column("Age", "date", ".metadata.creationTimestamp"),)
    return (_NAME_CELL, *((c.name, c.type, c.priority, _cell(c)) for c in columns))


def _cell(column: Column) -> Callable[[Json], Any]:
    def read(obj: Json) -> Any:
        values = list(json_path(obj, column.path))
        if not values:
            return None
        value = values[0] if len(values) == 1 else ",".join(str(v) for v in values)
        if column.type == "date":
            return age(value)
        fits: Any = {"integer": int, "number": (int, float), "boolean": bool}.get(column.type)
        return str(value) if column.type == "string" else value if fits and isinstance(value, fits) else None

    return read


def render(kind: Kind, objects: Iterable[Json], version: str, include: str, headed: bool = True) -> Json:
    """The Table of these objects. `include`: None, Metadata or Object, as in the parameter includeObject."""
    if kind.custom:
        cells = _custom(kind)
    else:
        cells = _BUILT_IN.get(
            kind.plural, (_NAME_CELL, ("Created At", "date", 0, _text("metadata", "creationTimestamp")))
        )
    rows = []
    for obj in objects:
        row: Json = {"cells": [read(obj) for _, _, _, read in cells]}
        if include == "Metadata":
            row["object"] = {
                "kind": "PartialObjectMetadata",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": obj["metadata"],
            }
        else:
            row["object"] = obj if include == "Object" else None
        rows.append(row)
    definitions = [
        {
            "name": name,
            "type": type_,
            "format": "name" if name == "Name" else "",
            "description": "",
            "priority": priority,
        }
        for name, type_, priority, _ in cells
    ]
    body = {"kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": {"resourceVersion": version}}
    return body | {"columnDefinitions": definitions if headed else [], "rows": rows}
