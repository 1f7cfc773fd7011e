"""The Jobs of backups and restores: their commands and their manifests. Called by errands and schedules; pure.

Invariants: a Job's pod has no token of Kubernetes and no label of a cluster, so it is no member. Secrets reach it as
variables, never as arguments.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from stele_operator.api import API_VERSION
from stele_operator.api.backup import (
    BackupBody,
    BackupType,
    Drill,
    JobSettings,
    SparkSettings,
    TabletBackupSpec,
    TabletRestoreSpec,
    Target,
)
from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.api.scalars import seconds
from stele_operator.plan import naming
from stele_operator.plan.manifests import pod_security
from stele_operator.plan.spark_jobs import by_spark

Json = dict[str, Any]
_MOUNT = "/backup"
_GRACE_S = 10
_FINAL = [1, 2, 5]
"""Exit codes of `stele` after which another try would fail in the same way: a table differs, refused,
corrupt.
"""
_FINAL_OF_SPARK = [2, 5]
"""Like `_FINAL`, without 1: Spark also ends with 1 where another try may succeed."""


_GONE = [
    {
        "key": f"node.kubernetes.io/{taint}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": 60,
    }
    for taint in ("not-ready", "unreachable")
]
"""After a machine is gone for a minute, Kubernetes gives up its pod, so that another try begins elsewhere."""


def job_name(name: str, what: str, uid: str) -> str:
    """Name of the Job of a resource. It ends with a hash of the uid, so that a resource created anew gets another Job."""
    plain = re.sub(r"[^a-z0-9-]", "-", name)[:36].strip("-")
    digits = hashlib.blake2b(f"{uid}/{what}/{name}".encode(), digest_size=4).hexdigest()
    return f"{plain}-{what}-{digits}"


def location(target: Target) -> str:
    """The folder of backups, as an argument of the Job's command."""
    if target.claimName is None:
        return str(target.uri)
    return f"{_MOUNT}/{target.path}" if target.path else _MOUNT


def in_seconds(length_s: float) -> str:
    """A duration as options and specs write it, like "90s"."""
    return f"{max(1, round(length_s))}s"


def backup_arguments(spec: BackupBody, key: str, tables: Sequence[str], at: str | None = None) -> list[str]:
    """`stele backup create` and its options. `tables`: empty for all."""
    words = ["create", "--json-progress", "--key", key]
    if spec.type is not BackupType.FULL:
        words.append("--incremental")
    if spec.type is BackupType.AUTO:
        words.append("--full-if-needed")
    if spec.holdFor is not None:
        words += ["--hold-for", in_seconds(seconds(spec.holdFor))]
    if at:
        words += ["--at", at]
    if spec.retention.keepFull is not None:
        words += ["--keep-full", str(spec.retention.keepFull)]
    if spec.retention.keepDays is not None:
        words += ["--keep-days", str(spec.retention.keepDays)]
    if not tables:
        words.append("--all")
    return [*words, "--", location(spec.target), *tables]


def restore_arguments(spec: TabletRestoreSpec) -> list[str]:
    """`stele backup restore` and its options."""
    words = ["restore", "--json-progress", "--again"]
    if spec.verify:
        words.append("--verify")
    if spec.time is not None:
        words += ["--at", spec.time]
    for table in spec.tables:
        words += ["--table", f"{table.name}={table.newName or table.name}"]
    for part in spec.hash:
        words += ["--hash", f"{','.join(part.columns)}:{part.buckets}"]
    if spec.range is not None:
        names = ",".join(spec.range.columns)
        for bounds in spec.range.ranges:
            words += ["--range", f"{names}:{_end(bounds.from_)}..{_end(bounds.to)}"]
    if spec.replicationFactor is not None:
        words += ["--replication-factor", str(spec.replicationFactor)]
    return [*words, "--", location(spec.source), *([spec.backup] if spec.backup else [])]


def _end(values: Sequence[str] | None) -> str:
    """The end of a range, as `stele` reads it. It is JSON, since a text may contain any characters."""
    return "" if values is None else json.dumps(values[0] if len(values) == 1 else list(values))


def drill_arguments(body: BackupBody, drill: Drill, backup_id: str) -> list[str]:
    """`stele backup drill` and its options."""
    words = ["drill", "--json-progress"]
    if drill.replicationFactor is not None:
        words += ["--replication-factor", str(drill.replicationFactor)]
    return [*words, "--", location(body.target), *([backup_id] if backup_id else [])]


def backup_job(
    namespace: str,
    name: str,
    uid: str,
    job: str,
    spec: TabletBackupSpec,
    cluster: TabletClusterSpec | None,
    image: str,
    tables: Sequence[str],
) -> Json:
    """The Job that makes a backup."""
    arguments = backup_arguments(spec, uid, tables, spec.at)
    owner = owner_of("TabletBackup", name, uid)
    return manifest(
        namespace,
        job,
        "backup",
        owner,
        spec.clusterRef.name,
        cluster,
        image,
        spec.target,
        spec.job,
        arguments,
        spec.spark,
    )


def removal_job(
    namespace: str,
    name: str,
    uid: str,
    job: str,
    spec: TabletBackupSpec,
    cluster: TabletClusterSpec | None,
    image: str,
) -> Json:
    """The Job that removes a backup's data. It has no owner, since the TabletBackup is being deleted; errands.py
    deletes the Job."""
    arguments = ["remove", "--json-progress", "--yes", "--key", uid, "--", location(spec.target)]
    return manifest(
        namespace, job, "remove", None, spec.clusterRef.name, cluster, image, spec.target, spec.job, arguments
    )


def restore_job(
    namespace: str,
    name: str,
    uid: str,
    job: str,
    spec: TabletRestoreSpec,
    cluster: TabletClusterSpec | None,
    image: str,
) -> Json:
    """The Job that restores tables."""
    owner = owner_of("TabletRestore", name, uid)
    arguments = restore_arguments(spec)
    return manifest(
        namespace,
        job,
        "restore",
        owner,
        spec.clusterRef.name,
        cluster,
        image,
        spec.source,
        spec.job,
        arguments,
        spec.spark,
    )


def owner_of(kind: str, name: str, uid: str) -> Json:
    """The owner reference for objects that are made for a resource. Kubernetes deletes them once it is gone."""
    return {
        "apiVersion": API_VERSION, "kind": kind, "name": name, "uid": uid, "controller": True,
        "blockOwnerDeletion": False,
    }  # fmt: skip


def manifest(
    namespace: str,
    name: str,
    errand: str,
    owner: Json | None,
    cluster_name: str,
    cluster: TabletClusterSpec | None,
    image: str,
    target: Target,
    settings: JobSettings,
    arguments: Sequence[str],
    spark: SparkSettings | None = None,
) -> Json:
    """A Job that runs `stele backup` with these arguments, itself or by Spark."""
    labels = {naming.LABEL_ERRAND: errand, naming.LABEL_MANAGED: naming.MANAGER}
    container: Json = {
        "name": naming.CONTAINER,
        "image": (cluster.image if cluster is not None else None) or image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["stele", "backup"],
        "args": list(arguments),
        "env": [
            {
                "name": "STELE_MASTERS",
                "value": f"{naming.masters_host(cluster_name, namespace)}:{naming.PORT_MASTER}",
            },
            {"name": "STELE_TERMINATION_LOG", "value": "/dev/termination-log"},
            {"name": "HOME", "value": "/tmp"},
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if settings.resources is not None and (wanted := settings.resources.model_dump(exclude_none=True)):
        container["resources"] = wanted
    volumes: list[Json] = [{"name": "tmp", "emptyDir": {}}]
    if target.credentialsSecret is not None:
        container["envFrom"] = [{"secretRef": {"name": target.credentialsSecret.name}}]
    if target.claimName is not None:
        container["volumeMounts"].append({"name": "backup", "mountPath": _MOUNT})
        volumes.append({"name": "backup", "persistentVolumeClaim": {"claimName": target.claimName}})
    pod: Json = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(),
        "containers": [container],
        "volumes": volumes,
    }
    if settings.nodeSelector:
        pod["nodeSelector"] = dict(settings.nodeSelector)
    asked = [t.model_dump(mode="json", exclude_none=True) for t in settings.tolerations or ()]
    pod["tolerations"] = [*_GONE, *asked]
    account = settings.serviceAccountName or (cluster.serviceAccountName if cluster is not None else None)
    if account:
        pod["serviceAccountName"] = account
    if cluster is not None and cluster.imagePullSecrets:
        pod["imagePullSecrets"] = [secret.model_dump() for secret in cluster.imagePullSecrets]
    if spark is not None:
        by_spark(pod, spark, arguments, namespace)
    metadata: Json = {"name": name, "namespace": namespace, "labels": labels}
    if owner is not None:
        metadata["ownerReferences"] = [owner]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "backoffLimit": settings.backoffLimit,
            "activeDeadlineSeconds": max(1, round(seconds(settings.deadline))),
            "podFailurePolicy": {
                "rules": [
                    # A drained machine is no failure of the backup.
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "operator": "In",
                            "values": _FINAL if spark is None else _FINAL_OF_SPARK,
                        },
                    },
                ]
            },
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
