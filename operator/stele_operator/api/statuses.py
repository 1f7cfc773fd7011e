"""The schemas of `status` of the custom resources. Used by definitions.

Pure. Invariant: report writes exactly the fields that these schemas declare.
"""

from __future__ import annotations

from typing import Any

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

CLUSTER_STATUS = _object(
    "What the operator last saw.",
    observedGeneration=_count("Generation of the spec to which this status refers."),
    clusterUUID=_text("Identity of the cluster. Its nodes refuse any other."),
    deletionPolicy=_text(
        "What happens to the volumes if the TabletCluster is deleted now. Delete while a claim in use belongs to the "
        "TabletCluster, or is itself being deleted; otherwise Retain."
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
            zone=_text("The zone chosen for the member."),
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
        waiting=_list("Who waits for the budget; at most 10.", _text("As in holder."), 10),
    ),
    plan=_object(
        "The answer to the annotation stele.dev/plan: what these changes of the spec would do.",
        text=_text("The answer, as `stele-operator plan -f` prints it; at most 8,000 characters."),
        fine={
            "type": "boolean",
            "description": "Whether all that is asked for would be reached, and every tablet could be used meanwhile.",
        },
        request=_text("Digest of the annotation to which this is the answer."),
        observedGeneration=_count("Generation of the spec that the changes would change."),
        time=_text("When it was answered. Later changes of the cluster are not in it."),
    ),
)

GROUP_STATUS = _object(
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
BACKUP_STATUS = _object(
    "What the operator last saw.",
    **_RUN,
    type=_text("Whether it became a full or an incremental backup."),
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
RESTORE_STATUS = _object(
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
SCHEDULE_STATUS = _object(
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
