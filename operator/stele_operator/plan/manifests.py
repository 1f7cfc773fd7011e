"""The manifests of Kubernetes objects. Called by plan; pure functions from values to manifests.

Invariant: a running pod's manifest contains nothing that may change under it. Addresses are DNS names, so
when a pod is replaced its peers need no restart.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from stele_operator.api import API_VERSION
from stele_operator.api.base import Model
from stele_operator.api.cluster import DeletionPolicy, Resources, Storage, TabletClusterSpec
from stele_operator.api.scalars import byte_count, seconds
from stele_operator.plan import naming
from stele_operator.plan.actions import Json
from stele_operator.plan.observation import Claim, ClusterObject, Identity, Role
from stele_operator.plan.placement import never_share, part_of

RENDER_REVISION = 2
"""Raised when a new operator changes manifests so that running pods should be created again."""
_GRACE_S = 30  # 10 s to hand over leaders, the rest for the log's last sync on a slow disk
_DATA = "/data"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def pod_security() -> Json:
    """The security context of every pod that runs Stele: no root, and volumes that its group may write."""
    return {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "fsGroup": 1000,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def owner(cluster: ClusterObject) -> Json:
    """The owner reference that makes Kubernetes delete an object when its TabletCluster is deleted."""
    return {
        "apiVersion": API_VERSION,
        "kind": "TabletCluster",
        "name": cluster.name,
        "uid": cluster.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def adopting(cluster: ClusterObject, owners: Sequence[Json]) -> Json:
    """The metadata patch that makes the TabletCluster the owner of an object.

    Empty if the object already has an owner, this TabletCluster or another object. `kubectl delete
    --cascade=orphan` leaves objects without owner.
    """
    if any(o.get("controller") for o in owners):
        return {}
    return {"ownerReferences": [*owners, owner(cluster)]}


def digest(part: Json) -> str:
    """A hash of a part of a manifest, as sixteen hex digits."""
    text = json.dumps(part, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def identity_data(identity: Identity) -> dict[str, str]:
    """The data of the identity ConfigMap, in the form that observe reads."""
    return {
        "clusterUUID": identity.cluster_id,
        "ownerUID": identity.owner_uid,
        "nextMaster": str(identity.next_serial["master"]),
        "nextNode": str(identity.next_serial["node"]),
        "ownMaster": str(identity.own_from("master")),
        "ownNode": str(identity.own_from("node")),
        "firstMasters": json.dumps([[m.name, m.node_id] for m in identity.first_masters]),
        "forkID": identity.fork_id,
        "formed": json.dumps(identity.formed, sort_keys=True) if identity.formed else "",
        "asleep": "true" if identity.asleep else "",
        "masters": str(identity.masters),
        "wakingSince": str(identity.waking_s) if identity.waking_s else "",
    }


def identity_config_map(cluster: ClusterObject, identity: Identity) -> Json:
    """The identity ConfigMap. It has no owner, because it must outlive the TabletCluster as the volumes do."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": naming.identity_name(cluster.name),
            "namespace": cluster.namespace,
            "labels": naming.labels(cluster.name),
        },
        "data": identity_data(identity),
    }


def claim(
    cluster: ClusterObject,
    spec: TabletClusterSpec,
    role: Role,
    name: str,
    node_id: str,
    cluster_id: str,
    zone: str,
) -> Json:
    """The manifest of a member's claim, with the member's identity on it."""
    storage = storage_of(spec, role)
    body: Json = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": storage.size}},
    }
    if storage.className is not None:
        body["storageClassName"] = storage.className
    metadata: Json = {
        "name": name,
        "namespace": cluster.namespace,
        "labels": naming.labels(cluster.name, role),
        "annotations": {
            naming.ANNOTATION_NODE_ID: node_id,
            naming.ANNOTATION_CLUSTER_ID: cluster_id,
            naming.ANNOTATION_ZONE: zone,
        },
    }
    if spec.deletionPolicy is DeletionPolicy.DELETE:
        metadata["ownerReferences"] = [owner(cluster)]
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": body}


def storage_of(spec: TabletClusterSpec, role: Role) -> Storage:
    """The storage settings of a role in the spec."""
    return part_of(spec, role).storage


def spec_hash(spec: TabletClusterSpec, role: Role, image: str) -> str:
    """A hash of everything in a pod that a user can change. A pod that carries another hash is
    RestartPending.
    """
    part = part_of(spec, role)
    stated: Json = {"image": image, "resources": _resources(part.resources), "revision": RENDER_REVISION}
    # Other fields only if they are given, because older pods were created before those fields existed.
    if not never_share(spec, role):
        stated["machineSpread"] = spec.nodes.machineSpread.value
    labels, annotations = part.podLabels, part.podAnnotations
    flags = {
        "log": log_flags(spec, role),
        "leaderLease": lease_flags(spec),
        "logLevel": level_flags(spec),
    }
    asked = {**_asked(spec, role), "podLabels": labels, "podAnnotations": annotations, **flags}
    return digest(stated | {name: value for name, value in asked.items() if value})


def log_flags(spec: TabletClusterSpec, role: Role) -> list[str]:
    """The flags for the log. Empty if the spec does not set it, because images of release 0.1 do not know
    them.
    """
    log = part_of(spec, role).log
    if log is None:
        return []
    segment_mib = byte_count(log.segmentSize) >> 20
    return ["--wal-segment-mib", str(segment_mib), "--wal-spare-segments", str(log.spareSegments)]


def lease_flags(spec: TabletClusterSpec) -> list[str]:
    """The flag for leases of leaders. Empty without leases, because images of release 0.1 do not know it."""
    lease_ms = round(seconds(spec.leaderLease or "0s") * 1000)
    return ["--leader-lease-ms", str(lease_ms)] if lease_ms else []


def level_flags(spec: TabletClusterSpec) -> list[str]:
    """The flag for what members write to their output. There is none if nothing is said."""
    return ["--log-level", spec.logLevel.value] if spec.logLevel is not None else []


def _asked(spec: TabletClusterSpec, role: Role) -> Json:
    """The parts of a pod's spec that the user gave, by their field names in a pod. Empty parts are left out."""
    part = part_of(spec, role)
    dumped: Json = {
        "imagePullSecrets": [secret.model_dump() for secret in spec.imagePullSecrets or ()],
        "serviceAccountName": spec.serviceAccountName,
        "nodeSelector": part.nodeSelector,
        "tolerations": [_as_said(t) for t in part.tolerations or ()],
        "affinity": {name: said for name, said in _as_said(part.affinity).items() if said},
        "topologySpreadConstraints": [_as_said(c) for c in part.topologySpreadConstraints or ()],
        "priorityClassName": part.priorityClassName,
        "runtimeClassName": part.runtimeClassName,
        "schedulerName": part.schedulerName,
    }
    return {name: value for name, value in dumped.items() if value}


def _as_said(part: Model | None) -> Json:
    """A part without absent fields. Empty fields stay: an empty selector selects all, an absent one
    nothing."""
    said: Json = part.model_dump(mode="json", exclude_none=True) if part is not None else {}
    return said


def pod(
    cluster: ClusterObject,
    spec: TabletClusterSpec,
    member: Claim,
    image: str,
    masters: Sequence[str],
    formation: Sequence[str],
    keeps_off: Sequence[str],
    fork_id: str = "",
    *,
    parked: bool = False,
) -> Json:
    """The manifest of a member's pod. `masters`: names of master pods. `formation`: flags for an empty
    volume. `keeps_off`: machines that it must not use. `fork_id`: the copy of the cluster's volumes to which
    the member belongs. `parked`: no disruption budget counts the pod.
    """
    role, port = member.role, naming.port_of(member.role)
    hosts = [naming.peer_host(cluster.name, cluster.namespace, m) for m in masters]
    if role == "node":
        # All masters may be replaced during the life of this pod, so add the Service that any ready master
        # answers.
        hosts.append(naming.masters_host(cluster.name, cluster.namespace))
    arguments = [
        "--data-dir", f"{_DATA}/stele",
        "--node-id", member.node_id,
        "--cluster-id", member.cluster_id,
        "--listen", f"[$(POD_IP)]:{port}",  # in brackets, as it may be an IPv6 address
        "--advertise", f"[$(POD_IP)]:{port}",
        "--masters", ",".join(f"{host}:{naming.PORT_MASTER}" for host in hosts),
        "--machine", "$(MACHINE)",
        "--zone", member.zone,
        "--http-port", str(naming.PORT_HTTP),
        "--flight-port", str(naming.PORT_FLIGHT),
        *log_flags(spec, role),
        *lease_flags(spec),
        *level_flags(spec),
        *formation,
    ]  # fmt: skip
    container: Json = {
        "name": naming.CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["stele", role, "run"],
        "args": arguments,
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "MACHINE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "STELE_TERMINATION_LOG", "value": "/dev/termination-log"},
        ],
        "ports": [
            {"name": "grpc", "containerPort": port},
            {"name": "flight", "containerPort": naming.PORT_FLIGHT},
            {"name": "http", "containerPort": naming.PORT_HTTP},
            {"name": "stream", "containerPort": naming.PORT_STREAM},  # no flag: the image's default
        ],
        # Startup allows for the replay of a log of any length. Liveness only checks the event loop.
        "startupProbe": _probe("/startupz", period_s=1, failures=3600),
        "livenessProbe": _probe("/livez", period_s=10, failures=6),
        "readinessProbe": _probe("/readyz", period_s=2, failures=2),
        "volumeMounts": [{"name": "data", "mountPath": _DATA}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,  # a node writes to its volume and nowhere else
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if fork_id:  # a variable, not an option: images of releases without fork ids ignore it
        container["env"].append({"name": "STELE_FORK_ID", "value": fork_id})
    part = part_of(spec, role)
    resources = _resources(part.resources)
    if resources:
        container["resources"] = resources
    annotations = {
        **(part.podAnnotations or {}),
        naming.ANNOTATION_NODE_ID: member.node_id,
        naming.ANNOTATION_CLAIM_UID: member.uid,
        naming.ANNOTATION_HASH: spec_hash(spec, role, image),
    }
    if keeps_off:
        annotations[naming.ANNOTATION_KEEPS_OFF] = ",".join(keeps_off)
    mark = {naming.LABEL_PARKED: "true"} if parked else {}
    asked = _asked(spec, role)
    # Tolerate Kubernetes' own taints for ever: only the masters decide that a node is lost, and no one else
    # may move its pod.
    tolerations = [
        *(
            {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute"}
            for taint in ("not-ready", "unreachable")
        ),
        *asked.get("tolerations", ()),
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": member.name,
            "namespace": cluster.namespace,
            "labels": {**(part.podLabels or {}), **naming.labels(cluster.name, role), **mark},
            "annotations": annotations,
            "ownerReferences": [owner(cluster)],
        },
        "spec": {
            **asked,
            "hostname": member.name,
            "subdomain": naming.peers_service(cluster.name),
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": _GRACE_S,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": pod_security(),
            "affinity": _affinity(
                cluster.name, spec, role, member.zone, keeps_off, asked.get("affinity", {})
            ),
            "tolerations": tolerations,
            "containers": [container],
            "volumes": [
                {"name": "data", "persistentVolumeClaim": {"claimName": member.name}},
            ],
        },
    }


def _resources(resources: Resources | None) -> Json:
    """Resources from the spec. If only a memory request is given, the limit equals it."""
    if resources is None:
        return {}
    requests, limits = dict(resources.requests or {}), dict(resources.limits or {})
    if "memory" in requests:
        limits.setdefault("memory", requests["memory"])
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _probe(path: str, period_s: int, failures: int) -> Json:
    return {
        "httpGet": {"path": path, "port": naming.PORT_HTTP},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _affinity(
    cluster: str, spec: TabletClusterSpec, role: Role, zone: str, keeps_off: Sequence[str], asked: Json
) -> Json:
    """The user's affinity combined with the operator's own terms; both must match."""
    term = {
        "labelSelector": {"matchLabels": {naming.LABEL_CLUSTER: cluster, naming.LABEL_ROLE: role}},
        "topologyKey": naming.LABEL_HOST,
    }
    spread: Json = (
        {_REQUIRED: [term]}
        if never_share(spec, role)
        else {_PREFERRED: [{"weight": 100, "podAffinityTerm": term}]}
    )
    more = asked.get("podAntiAffinity", {})
    apart = {word: [*spread.get(word, ()), *more.get(word, ())] for word in (_REQUIRED, _PREFERRED)}
    affinity: Json = {**asked, "podAntiAffinity": {word: terms for word, terms in apart.items() if terms}}
    where: Json = {}
    if zone:
        where["matchExpressions"] = [{"key": naming.LABEL_ZONE, "operator": "In", "values": [zone]}]
    if keeps_off:
        # By the machine's name, since the hostname label may differ from it. Each matchFields entry takes one
        # value.
        where["matchFields"] = [
            {"key": "metadata.name", "operator": "NotIn", "values": [machine]} for machine in keeps_off
        ]
    if where:
        machines = asked.get("nodeAffinity", {})
        terms = machines.get(_REQUIRED, {}).get("nodeSelectorTerms")
        # Terms are alternatives, so the operator's conditions are added to each of them.
        both = [_both(term, where) for term in terms] if terms else [where]
        affinity["nodeAffinity"] = {**machines, _REQUIRED: {"nodeSelectorTerms": both}}
    return affinity


def _both(term: Json, where: Json) -> Json:
    if not term:
        return term  # an empty term matches no machine; with added conditions it would match some
    return {word: [*term.get(word, ()), *where.get(word, ())] for word in {**term, **where}}


def peers_service(cluster: ClusterObject) -> Json:
    """The headless Service that gives every pod a DNS name, ready or not, for the members themselves."""
    return _service(
        cluster,
        naming.peers_service(cluster.name),
        {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {naming.LABEL_CLUSTER: cluster.name},
            "ports": [{"name": "http", "port": naming.PORT_HTTP, "targetPort": naming.PORT_HTTP}],
        },
    )


def masters_service(cluster: ClusterObject) -> Json:
    """The Service of ready masters, for clients."""
    return _service(
        cluster,
        naming.masters_service(cluster.name),
        {
            "selector": {naming.LABEL_CLUSTER: cluster.name, naming.LABEL_ROLE: "master"},
            "ports": [{"name": "grpc", "port": naming.PORT_MASTER, "targetPort": naming.PORT_MASTER}],
        },
    )


def _service(cluster: ClusterObject, name: str, spec: Json) -> Json:
    return _digested(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": name,
                "namespace": cluster.namespace,
                "labels": naming.labels(cluster.name),
                "ownerReferences": [owner(cluster)],
            },
            "spec": spec,
        }
    )


def disruption_budget(cluster: ClusterObject, role: Role, min_available: int) -> Json:
    """The PodDisruptionBudget of a role. `min_available`: pods that must stay when machines are drained."""
    return _digested(
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {
                "name": naming.disruption_budget(cluster.name, role),
                "namespace": cluster.namespace,
                "labels": naming.labels(cluster.name),
                "ownerReferences": [owner(cluster)],
            },
            "spec": {
                "minAvailable": min_available,
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
                "selector": {
                    "matchLabels": {naming.LABEL_CLUSTER: cluster.name, naming.LABEL_ROLE: role},
                    "matchExpressions": [{"key": naming.LABEL_PARKED, "operator": "DoesNotExist"}],
                },
            },
        }
    )


def _digested(manifest: Json) -> Json:
    manifest["metadata"]["annotations"] = {naming.ANNOTATION_DIGEST: digest(manifest["spec"])}
    return manifest
