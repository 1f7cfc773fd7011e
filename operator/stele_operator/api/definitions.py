"""The CustomResourceDefinitions. Written to crds/ by generate; the tests compare.

Pure. Invariant: what the status subresource declares is what report writes.
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
from stele_operator.api.structural import structural_schema

Json = dict[str, Any]


def _text(description: str) -> Json:
    return {"type": "string", "description": description}


def _count(description: str) -> Json:
    return {"type": "integer", "format": "int64", "description": description}


def _object(description: str, **properties: Json) -> Json:
    return {"type": "object", "description": description, "properties": properties}


def _list(description: str, items: Json, items_max: int) -> Json:
    return {
        "type": "array",
        "description": description,
        "items": items,
        "maxItems": items_max,
        "x-kubernetes-list-type": "atomic",
    }


_COPIES_EQUAL = (
    "CopiesEqual: false while a new replica holds other rows than another voter; its message says what to do. "
    "Unknown while one waits to be compared."
)

_CONDITIONS: Json = {
    "type": "array",
    "description": "Ready, Reconciling, Degraded, Stalled, with the meaning that kstatus gives them. "
    + _COPIES_EQUAL,
    "x-kubernetes-list-type": "map",
    "x-kubernetes-list-map-keys": ["type"],
    "items": {
        "type": "object",
        "required": ["type", "status", "reason", "message", "lastTransitionTime"],
        "properties": {
            "type": _text("Name of the condition."),
            "status": {
                "type": "string",
                "enum": ["True", "False", "Unknown"],
                "description": "Whether the condition holds.",
            },
            "reason": _text("The reason in one word."),
            "message": _text("The reason in a sentence."),
            "lastTransitionTime": {
                "type": "string",
                "format": "date-time",
                "description": "When the status of the condition last changed.",
            },
            "observedGeneration": _count("Generation of the spec to which the condition refers."),
        },
    },
}

_TABLETS = _object(
    "Numbers of tablets.",
    total=_count("All."),
    healthy=_count("Tablets with all their voters alive."),
    underReplicated=_count("Tablets with a leader but too few live voters."),
    unavailable=_count("Tablets without a leader."),
)

_CLUSTER_STATUS = _object(
    "What the operator last saw.",
    observedGeneration=_count("Generation of the spec to which this status refers."),
    clusterUUID=_text("Identity of the cluster. Its nodes refuse any other."),
    deletionPolicy=_text(
        "What happens to the volumes if the TabletCluster is deleted now. Delete while any claim in use still belongs to "
        "it, or is itself being deleted."
    ),
    replicas=_count("Nodes that exist."),
    readyReplicas=_count("Nodes that serve."),
    readyMasters=_count("Masters that serve."),
    selector=_text("Label selector of the node pods, for /scale."),
    conditions={
        **_CONDITIONS,
        "description": "Ready, Reconciling, Degraded, Stalled, with the meaning that kstatus gives them. DrainBlocked: true while the "
        "disruption budgets allow no eviction of a master or a node; its message says why, and what to do. MajorityLost: true while "
        "tablets lost a majority of their voters for good; its message has the command that tells what may be lost. "
        + _COPIES_EQUAL,
    },
    tablets=_TABLETS,
    members=_list(
        "Nodes and masters, unhealthy ones first; at most 100.",
        _object(
            "A node or master.",
            name=_text("Name of its pod and its claim."),
            role=_text("node or master."),
            nodeUUID=_text("Identity stored on its volume."),
            machine=_text("The machine on which its pod runs."),
            zone=_text("The zone chosen for it."),
            state=_text(
                "Ready, Starting, Silent, Lost, Parked (away, and waited for), Draining, Retired, Pending or Hibernated."
            ),
            fate=_text(
                "Why it does not serve: Restarting, MachineSilent, MachineLost, MachineDeleted, VolumeLost, VolumeEmpty."
            ),
            message=_text("Details in words."),
            replicas=_count("Number of its tablet replicas."),
        ),
        100,
    ),
    healing=_object(
        "What the driver is doing.",
        active=_list(
            "Heals and moves of leaders under way; at most 20.",
            _object(
                "A tablet that is being healed, or leaders that move from one node to another.",
                tablet=_text("Id of the tablet. Absent where leaders move."),
                table=_text("Name of its table."),
                step=_text("The present step."),
                reason=_text("Why."),
                bytesDone=_count("Bytes copied."),
                bytesTotal=_count("Bytes to copy."),
                etaSeconds=_count("Remaining time of the copy at its pace so far."),
                next=_text("The next step."),
                cause=_text(
                    "Name of the heal, such as heal/7f3a91c2-12. Events and the logs of nodes have it too."
                ),
            ),
            20,
        ),
        total=_count("Number of entries, also of those left out."),
    ),
    budget=_object(
        "Who takes something away from the cluster now, or makes up for a loss. Heals go first.",
        holder=_text(
            "heal/MEMBER, drain/MEMBER, park/MEMBER, masters (their number changes), upgrade or hibernate; several, at most 10, "
            "with commas between them. Empty: nobody."
        ),
        waiting=_list("Who waits for that; at most 10.", _text("As in holder."), 10),
    ),
    plan=_object(
        "The answer to the annotation stele.dev/plan: what these changes of the spec would do.",
        text=_text("The answer, as `stele-operator plan -f` prints it; at most 8,000 characters."),
        fine={
            "type": "boolean",
            "description": "Whether all that is asked for would be reached, and every tablet could be used meanwhile.",
        },
        request=_text("Digest of the annotation to which this is the answer."),
        observedGeneration=_count("Generation of the spec to which the changes would be made."),
        time=_text("When it was answered. Later changes of the cluster are not in it."),
    ),
)

_GROUP_STATUS = _object(
    "What the operator last saw.",
    observedGeneration=_count("Generation of the spec to which this status refers."),
    tableID=_text("Identity of the table in the catalog."),
    clusterUUID=_text("Identity of the cluster that holds the table."),
    conditions=_CONDITIONS,
    tablets=_TABLETS,
    worst=_list(
        "Unhealthy tablets; at most 10.",
        _object(
            "An unhealthy tablet.",
            tablet=_text("Id of the tablet."),
            reason=_text("NoLeader, VoterLost, Growing or Creating."),
        ),
        10,
    ),
)


def _time(description: str) -> Json:
    return {"type": "string", "format": "date-time", "description": description}


_PROGRESS = _object(
    "How far the Job is.",
    rows=_count("Rows so far."),
    rowsExpected=_count("About how many rows a full backup will have."),
    bytes=_count("Bytes of files so far."),
    done=_count("Of a backup: tablets that are done. Of a restore: rows that were written or compared."),
    total=_count("Of how many."),
    etaSeconds=_count("Remaining time at the pace of the last half minute."),
)
_RUN = {
    "observedGeneration": _count("Generation of the spec to which this status refers."),
    "phase": _text("Pending, Running, Succeeded or Failed."),
    "conditions": {
        **_CONDITIONS,
        "description": "Ready: it has succeeded. Reconciling: it waits, or runs. Stalled: it has failed, or cannot go on.",
    },
    "job": _text("Name of its Job."),
    "attempts": _count("Pods of the Job that have begun."),
    "progress": _PROGRESS,
    "startTime": _time("When the Job began."),
    "completionTime": _time("When it ended."),
    "durationSeconds": _count("How long it took."),
    "backupID": _text("Id of the backup in its folder."),
    "snapshotTime": _time("The moment of the rows."),
    "rows": _count("Rows of the backup; of an incremental one, changes."),
    "error": _text("Why the last try failed."),
}
_BACKUP_STATUS = _object(
    "What the operator last saw.",
    **_RUN,
    type=_text("full or incremental: what it became."),
    base=_text("Id of the backup on which it builds."),
    tables=_count("Number of its tables."),
    bytes=_count("Bytes of its files."),
    holds=_list("Names of its holds on the tables' history.", {"type": "string"}, 2),
    heldBytes=_count(
        "About how many bytes of old rows its holds keep on the nodes now, all replicas together. 0 once they are gone."
    ),
    heldUntil=_time("When its holds end, unless they are renewed."),
    holdBroken=_text("Why its hold keeps nothing any more. The next backup is a full one then."),
    pruned=_count("Number of older backups that were removed afterwards."),
)
_RESTORE_STATUS = _object(
    "What the operator last saw.",
    **_RUN,
    tables=_list(
        "The restored tables; at most 40.",
        _object("A table.", name=_text("Its name."), rows=_count("Its rows.")),
        40,
    ),
    verified={
        "type": "boolean",
        "description": "Whether the tables were compared with the backup, and are equal.",
    },
)
_SCHEDULE_STATUS = _object(
    "What the operator last saw.",
    observedGeneration=_count("Generation of the spec to which this status refers."),
    conditions={
        **_CONDITIONS,
        "description": "Ready: the newest finished backup succeeded. Reconciling: one runs. Stalled: the schedule cannot be read. "
        "Drilled: the newest drill passed, and none is overdue.",
    },
    active=_list("Names of TabletBackups that run.", {"type": "string"}, 10),
    lastScheduleTime=_time("The newest time that was due."),
    nextScheduleTime=_time("The next time."),
    lastSuccessTime=_time(
        "The moment of the rows of the newest backup that succeeded. Its age is what a loss would cost."
    ),
    lastFullTime=_time("The moment of the rows of the newest full backup."),
    lastSuccess=_object(
        "The newest backup that succeeded.",
        name=_text("Name of the TabletBackup."),
        backupID=_text("Its id in the folder."),
        type=_text("full or incremental."),
        rows=_count("Its rows, or changes."),
        bytes=_count("Bytes of its files."),
        durationSeconds=_count("How long it took."),
        heldBytes=_count("About how many bytes of old rows its hold keeps on the nodes."),
    ),
    missed=_count("Times that were left out since the schedule exists, because nothing could begin."),
    drill=_object(
        "The newest drill.",
        since=_time("Since when drills are asked for."),
        lastScheduleTime=_time("The newest time that was due."),
        lastTime=_time("When the newest drill ended."),
        lastPassTime=_time("When a drill passed last."),
        backupID=_text("Which backup was restored."),
        rows=_count("Rows that were restored."),
        restoreSeconds={"type": "number", "description": "How long the restore took."},
        compareSeconds={"type": "number", "description": "How long the comparison took."},
    ),
)


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
        _CLUSTER_STATUS,
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
        _GROUP_STATUS,
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
        _BACKUP_STATUS,
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
        _RESTORE_STATUS,
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
        _SCHEDULE_STATUS,
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
