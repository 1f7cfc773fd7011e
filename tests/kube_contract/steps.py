"""Steps of scenarios: one request each, the objects that they send, and what they are compared by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.kube_contract.crd import BASE

NAMESPACE = "contract"


CORE = f"/api/v1/namespaces/{NAMESPACE}"


SHELVES = f"{BASE}/namespaces/{NAMESPACE}/shelves"


CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


JSON = "application/json"


MERGE = "application/merge-patch+json"


TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"


@dataclass(frozen=True, slots=True)
class Step:
    """One request. `until`: repeat it until this status code comes, `settled`: until this text is in the answer (things that
    controllers do). `part`: compare only
    what stele_local answers with what is recorded, because it offers a part of it. `alongside`: further requests to
    send while this one, a watch, is open."""

    name: str
    method: str
    path: str
    body: Any = None
    type: str = ""
    accept: str = JSON
    until: int = 0
    settled: str = ""
    part: bool = False
    token: bool = True
    alongside: Sequence[Step] = field(default=())


def get(name: str, path: str, **more: Any) -> Step:
    return Step(name, "GET", path, **more)


def post(name: str, path: str, body: Any, **more: Any) -> Step:
    return Step(name, "POST", path, body, more.pop("type", JSON), **more)


def merge(name: str, path: str, body: Any, **more: Any) -> Step:
    return Step(name, "PATCH", path, body, more.pop("type", MERGE), **more)


def put(name: str, path: str, body: Any) -> Step:
    return Step(name, "PUT", path, body, JSON)


def delete(name: str, path: str, body: Any = None, **more: Any) -> Step:
    return Step(name, "DELETE", path, body, JSON if body is not None else "", **more)


def config_map(name: str, data: Any = None, **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, **metadata},
        "data": data or {"a": "1"},
    }


def owned(name: str, owner: str, **more: Any) -> dict[str, Any]:
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": owner, "uid": f"$uid({owner})", **more}
    return config_map(name, ownerReferences=[reference])


def life(plural_path: str, obj: dict[str, Any], patch: dict[str, Any], settled: str = "") -> list[Step]:
    """What every kind goes through; `settled` as in Step, once it is made."""
    name = obj["metadata"]["name"]
    path = f"{plural_path}/{name}"
    return [
        post("create", plural_path, obj),
        post("create again", plural_path, obj),
        get("get", path, settled=settled),
        get("list", f"{plural_path}?fieldSelector=metadata.name%3D{name}"),
        get("table", f"{plural_path}?fieldSelector=metadata.name%3D{name}", accept=TABLE),
        merge("patch", path, patch),
        merge("patch that changes nothing", path, patch),
        merge("patch of an old version", path, {"metadata": {"resourceVersion": "1"}}),
        delete("delete with another uid", path, {"preconditions": {"uid": "nope"}}),
        delete("delete an old version", path, {"preconditions": {"resourceVersion": "1"}}),
        delete("delete", path),
        get("gone", path, until=404),
        delete("delete what is gone", path),
        merge("patch what is gone", path, patch),
    ]


LABEL = {"metadata": {"labels": {"tier": "gold"}, "annotations": {"note": "x"}}}


CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "data-0"},
    "spec": {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "local",
        "resources": {"requests": {"storage": "1Gi"}},
    },
}


VOLUME = {
    "apiVersion": "v1",
    "kind": "PersistentVolume",
    "metadata": {"name": "contract-volume"},
    "spec": {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "contract-none",
        "local": {"path": "/mnt/none"},
        "nodeAffinity": {
            "required": {
                "nodeSelectorTerms": [
                    {
                        "matchExpressions": [
                            {"key": "kubernetes.io/hostname", "operator": "In", "values": ["nowhere"]}
                        ]
                    }
                ]
            }
        },
    },
}


SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "peers"},
    "spec": {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"app": "x"},
        "ports": [{"name": "rpc", "port": 7050}],
    },
}


BUDGET = {
    "apiVersion": "policy/v1",
    "kind": "PodDisruptionBudget",
    "metadata": {"name": "budget"},
    "spec": {
        "minAvailable": 2,
        "selector": {"matchLabels": {"app": "x"}},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    },
}


LEASE = {
    "apiVersion": "coordination.k8s.io/v1",
    "kind": "Lease",
    "metadata": {"name": "operator"},
    "spec": {"holderIdentity": "me", "leaseDurationSeconds": 15},
}


EVENT = {
    "apiVersion": "v1",
    "kind": "Event",
    "metadata": {"name": "story.1"},
    "involvedObject": {"kind": "Pod", "name": "p", "namespace": NAMESPACE, "uid": "u"},
    "reason": "Told",
    "message": "a story",
    "type": "Normal",
    "source": {"component": "contract"},
    "firstTimestamp": "2026-01-01T00:00:00Z",
    "lastTimestamp": "2026-01-01T00:00:00Z",
    "count": 1,
}


def pod(name: str, **spec: Any) -> dict[str, Any]:
    main = {
        "name": "main",
        "image": "stele/node:dev",
        "command": ["stele", "node", "run"],
        "ports": [{"containerPort": 7050}],
        "readinessProbe": {"httpGet": {"port": 7080, "path": "/readyz"}},
        "resources": {"requests": {"memory": "1Gi"}, "limits": {"memory": "1Gi"}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "x"}},
        "spec": {"automountServiceAccountToken": False, "containers": [main], **spec},
    }
