"""Kubernetes objects as the operator wants them. Called by plan; pure functions from values to manifests.

Invariant: nothing in a running pod's manifest depends on what may change under it; addresses are names, so pods come
and go without their peers being restarted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from stele_operator.api import API_VERSION
from stele_operator.api.base import Model
from stele_operator.api.cluster import DeletionPolicy, Resources, Storage, TabletClusterSpec
from stele_operator.plan import naming
from stele_operator.plan.actions import Json
from stele_operator.plan.observation import Claim, ClusterObject, Identity, Role
from stele_operator.plan.placement import never_share, part_of

RENDER_REVISION = 2
"""Raised when a new operator renders pods in a way that they should be made anew for."""
_GRACE_S = 30  # 10 s to hand leaders over, the rest for the log's last sync on a slow disk
_DATA = "/data"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def owner(cluster: ClusterObject) -> Json:
    """The reference by which an object goes when its TabletCluster goes."""
    return {
        "apiVersion": API_VERSION,
        "kind": "TabletCluster",
        "name": cluster.name,
        "uid": cluster.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def adopting(cluster: ClusterObject, owners: Sequence[Json]) -> Json:
    """The part of a patch's metadata that makes it go with its TabletCluster; empty where it goes with that, or with something
    else, such as an earlier one of this name. Whoever deletes with `--cascade=orphan` leaves it to nobody."""
    if any(o.get("controller") for o in owners):
        return {}
    return {"ownerReferences": [*owners, owner(cluster)]}


def digest(part: Json) -> str:
    """Sixteen hex digits that stand for a part of a manifest."""
    text = json.dumps(part, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def identity_data(identity: Identity) -> dict[str, str]:
    """The ConfigMap's data, as observe reads it back."""
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
    }


def identity_config_map(cluster: ClusterObject, identity: Identity) -> Json:
    """The identity ConfigMap. It has no owner: it must outlive the TabletCluster as the volumes do."""
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
    """A member's claim, with its identity on it."""
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
    """What the spec says of the volumes of a role."""
    return part_of(spec, role).storage


def spec_hash(spec: TabletClusterSpec, role: Role, image: str) -> str:
    """Stands for what a user can change in a pod; another hash means RestartPending."""
    part = part_of(spec, role)
    stated: Json = {"image": image, "resources": _resources(part.resources), "revision": RENDER_REVISION}
    # The rest only where it is given, as pods were made before it was looked at.
    if not never_share(spec, role):
        stated["machineSpread"] = spec.nodes.machineSpread.value
    labels, annotations = part.podLabels, part.podAnnotations
    asked = {**_asked(spec, role), "podLabels": labels, "podAnnotations": annotations}
    return digest(stated | {name: value for name, value in asked.items() if value})


def _asked(spec: TabletClusterSpec, role: Role) -> Json:
    """The parts of a pod's spec that are as the user says, under their names there; empty ones left out."""
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
    """Without what is not given. What is empty stays: an empty selector selects all, an absent one nothing."""
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
) -> Json:
    """A member's pod. `masters`: names of master pods; `formation`: the flags that say how an empty volume is met;
    `keeps_off`: machines that it is not to take; `fork_id`: which copy of the cluster's volumes it belongs to."""
    role, port = member.role, naming.port_of(member.role)
    hosts = [naming.peer_host(cluster.name, cluster.namespace, m) for m in masters]
    if role == "node":
        # All of those may be replaced before the pod is, and be elsewhere after a power failure.
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
        # Startup follows the replay of a log of any length; liveness asks the event loop only.
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
    if fork_id:  # not as an option: images of releases without fork ids start all the same
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
    asked = _asked(spec, role)
    # Ours first, and for ever: Kubernetes names a fate, the masters decide loss, and nobody else moves a pod off its volume.
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
            "labels": {**(part.podLabels or {}), **naming.labels(cluster.name, role)},
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
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "runAsGroup": 1000,
                "fsGroup": 1000,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
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
    """As in the spec, with the memory limit equal to the request unless one was given."""
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
    """What is asked for, and ours beside it: both must hold."""
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
        # By name, which the label of the host need not be; Kubernetes takes one value for each of these.
        where["matchFields"] = [
            {"key": "metadata.name", "operator": "NotIn", "values": [machine]} for machine in keeps_off
        ]
    if where:
        machines = asked.get("nodeAffinity", {})
        terms = machines.get(_REQUIRED, {}).get("nodeSelectorTerms")
        # One of the terms must hold: ours is a part of each.
        both = [_both(term, where) for term in terms] if terms else [where]
        affinity["nodeAffinity"] = {**machines, _REQUIRED: {"nodeSelectorTerms": both}}
    return affinity


def _both(term: Json, where: Json) -> Json:
    if not term:
        return term  # no machine meets it; with more in it some would
    return {word: [*term.get(word, ()), *where.get(word, ())] for word in {**term, **where}}


def peers_service(cluster: ClusterObject) -> Json:
    """Headless: a DNS name for every pod, ready or not, for the members themselves."""
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
    """Ready masters only, for clients."""
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
    """How many pods of a role must stay when machines are drained."""
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
                "selector": {"matchLabels": {naming.LABEL_CLUSTER: cluster.name, naming.LABEL_ROLE: role}},
            },
        }
    )


def _digested(manifest: Json) -> Json:
    manifest["metadata"]["annotations"] = {naming.ANNOTATION_DIGEST: digest(manifest["spec"])}
    return manifest
