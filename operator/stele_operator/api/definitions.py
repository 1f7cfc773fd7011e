"""Builds the CustomResourceDefinitions. generate writes them to crds/, and the tests compare the two.

Pure. `statuses` has the schemas of `status`.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from stele_operator.api import CLUSTER_NAME_LENGTH_MAX, GROUP, VERSION
from stele_operator.api.backup import TabletBackupScheduleSpec, TabletBackupSpec, TabletRestoreSpec
from stele_operator.api.base import rule
from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.api.group import TabletGroupSpec
from stele_operator.api.scalars import CLUSTER_NAME
from stele_operator.api.statuses import (
    BACKUP_STATUS,
    CLUSTER_STATUS,
    GROUP_STATUS,
    RESTORE_STATUS,
    SCHEDULE_STATUS,
)
from stele_operator.api.structural import structural_schema

Json = dict[str, Any]


def _column(name: str, kind: str, path: str, description: str, priority: int = 0) -> Json:
    column: Json = {"name": name, "type": kind, "jsonPath": path, "description": description}
    if priority:
        column["priority"] = priority
    return column


def _condition_path(condition: str, field: str) -> str:
    return f".status.conditions[?(@.type=='{condition}')].{field}"


_READY_COLUMNS = [
    _column("Ready", "string", _condition_path("Ready", "status"), "Whether it can be read and written."),
    _column("Reason", "string", _condition_path("Ready", "reason"), "Why."),
]
_TROUBLE_COLUMNS = [
    _column("Degraded", "string", _condition_path("Degraded", "reason"), "What is wrong."),
    _column("Stalled", "string", _condition_path("Stalled", "reason"), "What waits for a human."),
]
_TAIL_COLUMNS = [
    _column("Healthy", "integer", ".status.tablets.healthy", "Tablets with all their voters alive."),
    _column("Tablets", "integer", ".status.tablets.total", "Tablets."),
    _column("Age", "date", ".metadata.creationTimestamp", "When it was created."),
]


def _definition(
    kind: str,
    plural: str,
    short: str,
    spec: type[BaseModel],
    status: Json,
    columns: list[Json],
    rules: list[dict[str, str]],
    scale: bool,
) -> Json:
    subresources: Json = {"status": {}}
    if scale:
        subresources["scale"] = {
            "specReplicasPath": ".spec.nodes.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
    spec_schema = structural_schema(spec)
    if not spec_schema.get("required"):
        spec_schema["default"] = {}
    root: Json = {
        "type": "object",
        "description": " ".join((spec.__doc__ or "").split()),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec_schema,
            "status": status,
        },
    }
    if rules:
        root["x-kubernetes-validations"] = rules
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short],
                "categories": ["stele"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": root},
                    "subresources": subresources,
                    "additionalPrinterColumns": columns,
                }
            ],
        },
    }


def definitions() -> dict[str, Json]:
    """All CustomResourceDefinitions, by the name of their file in crds/."""
    cluster = _definition(
        "TabletCluster",
        "tabletclusters",
        "tc",
        TabletClusterSpec,
        CLUSTER_STATUS,
        [
            *_READY_COLUMNS,
            *_TROUBLE_COLUMNS,
            _column("Masters", "integer", ".status.readyMasters", "Masters that serve."),
            _column("Nodes", "integer", ".status.readyReplicas", "Nodes that serve."),
            *_TAIL_COLUMNS,
            _column(
                "Drain", "string", _condition_path("DrainBlocked", "reason"), "Why no pod may be evicted.", 1
            ),
        ],
        [
            rule(
                f"self.metadata.name.size() <= {CLUSTER_NAME_LENGTH_MAX}",
                f"metadata.name is too long: at most {CLUSTER_NAME_LENGTH_MAX} characters, because names of pods contain it",
            ),
            rule(
                f"self.metadata.name.matches('{CLUSTER_NAME}')",
                "metadata.name must be lower-case letters, digits and '-', beginning with a letter, because names of pods and "
                "Services contain it",
            ),
        ],
        scale=True,
    )
    group = _definition(
        "TabletGroup",
        "tabletgroups",
        "tg",
        TabletGroupSpec,
        GROUP_STATUS,
        [
            _column("Cluster", "string", ".spec.clusterRef.name", "The TabletCluster that holds it."),
            *_READY_COLUMNS,
            *_TROUBLE_COLUMNS,
            *_TAIL_COLUMNS,
        ],
        [],
        scale=False,
    )
    made = (cluster, group, *_of_backups())
    return {f"{d['metadata']['name'].split('.')[0]}.yaml": d for d in made}


_PHASE_COLUMNS = [
    _column("Cluster", "string", ".spec.clusterRef.name", "The TabletCluster."),
    _column("Phase", "string", ".status.phase", "Pending, Running, Succeeded or Failed."),
    _column("Reason", "string", _condition_path("Ready", "reason"), "Why."),
]
_RESULT_COLUMNS = [
    _column("Rows", "integer", ".status.rows", "Rows, or changes."),
    _column("Seconds", "integer", ".status.durationSeconds", "How long it took."),
    _column("Age", "date", ".metadata.creationTimestamp", "When it was created."),
    _column("Backup", "string", ".status.backupID", "Id of the backup.", 1),
    _column("Snapshot", "date", ".status.snapshotTime", "The moment of the rows.", 1),
]


def _of_backups() -> list[Json]:
    backup = _definition(
        "TabletBackup",
        "tabletbackups",
        "tb",
        TabletBackupSpec,
        BACKUP_STATUS,
        [
            *_PHASE_COLUMNS,
            _column("Type", "string", ".status.type", "full or incremental."),
            _column("Bytes", "integer", ".status.bytes", "Bytes of its files."),
            *_RESULT_COLUMNS,
            _column("Held", "integer", ".status.heldBytes", "Bytes of old rows that its hold keeps.", 1),
        ],
        [],
        scale=False,
    )
    restore = _definition(
        "TabletRestore",
        "tabletrestores",
        "tr",
        TabletRestoreSpec,
        RESTORE_STATUS,
        [
            *_PHASE_COLUMNS,
            _column("Verified", "boolean", ".status.verified", "Whether the tables equal the backup."),
            *_RESULT_COLUMNS,
        ],
        [],
        scale=False,
    )
    schedule = _definition(
        "TabletBackupSchedule",
        "tabletbackupschedules",
        "tbs",
        TabletBackupScheduleSpec,
        SCHEDULE_STATUS,
        [
            _column("Cluster", "string", ".spec.backup.clusterRef.name", "The TabletCluster."),
            _column("Schedule", "string", ".spec.schedule", "When."),
            _column("Suspend", "boolean", ".spec.suspend", "Whether nothing new begins."),
            *_READY_COLUMNS,
            _column("Last", "date", ".status.lastSuccessTime", "Age of the newest backup's rows."),
            _column(
                "Drilled", "string", _condition_path("Drilled", "status"), "Whether the newest drill passed."
            ),
            _column(
                "LastDrill", "date", ".status.drill.lastPassTime", "Age of the newest drill that passed."
            ),
            _column("Age", "date", ".metadata.creationTimestamp", "When it was created."),
            _column("Next", "string", ".status.nextScheduleTime", "The next time.", 1),
            _column(
                "Held",
                "integer",
                ".status.lastSuccess.heldBytes",
                "Bytes of old rows kept for the next one.",
                1,
            ),
        ],
        [
            rule(
                "self.metadata.name.size() <= 40",
                "metadata.name is too long: at most 40 characters, because names of TabletBackups contain it",
            )
        ],
        scale=False,
    )
    return [backup, restore, schedule]
