"""Runs backups and restores as Jobs: decides what to do next about one resource. Called by errands; pure.

Each resource has one Job, whose command is safe to repeat. A repeated backup is found by its key. A repeated
restore accepts tables that equal the backup as its own. Invariants: work that has ended is never begun again.
With `deletionPolicy: Delete` a TabletBackup is deleted only after its data. A Job is deleted only by its uid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stele_operator.api.backup import TabletBackupScheduleSpec, TabletBackupSpec, TabletRestoreSpec
from stele_operator.api.cluster import DeletionPolicy, TabletClusterSpec
from stele_operator.api.scalars import seconds
from stele_operator.plan.errand_holds import FIELDS, Seen, names_of, with_holds
from stele_operator.plan.errand_jobs import (
    backup_job,
    job_name,
    removal_job,
    restore_job,
)
from stele_operator.plan.moments import timestamp
from stele_operator.plan.naming import FINALIZER_BACKUP
from stele_operator.plan.observation import Condition
from stele_operator.plan.status import written

Json = dict[str, Any]
Spec = TabletBackupSpec | TabletRestoreSpec | TabletBackupScheduleSpec
_MESSAGE_MAX = 1_000
_ERROR_MAX = 600
REMOVE_AGAIN_S = 300.0
"""Seconds that a Job which could not remove data stays, before another Job tries again."""


@dataclass(frozen=True, slots=True)
class ClusterSeen:
    """A TabletCluster, as far as a Job needs it. `masters`: how many masters serve."""

    name: str
    spec: TabletClusterSpec | None
    ready: bool
    masters: int


@dataclass(frozen=True, slots=True)
class JobSeen:
    """A Job with its pods. `state`: running, complete or failed. `last`: the result of the newest pod that
    has ended. `progress`: the progress that the running pod reported. `waits`: why its pod does not start.
    """

    name: str
    uid: str
    resource_version: str
    state: str
    reason: str = ""
    started_s: float = 0.0
    ended_s: float = 0.0
    failed: int = 0
    deleting: bool = False
    last: Json = field(default_factory=dict)
    progress: Json = field(default_factory=dict)
    pod_started_s: float = 0.0
    waits: str = ""


@dataclass(frozen=True, slots=True)
class Errand:
    """A TabletBackup, TabletBackupSchedule or TabletRestore as it was observed."""

    kind: str
    namespace: str
    name: str
    uid: str
    resource_version: str
    generation: int
    created_s: float
    deleting: bool
    finalizers: tuple[str, ...]
    owner_uid: str
    spec: Spec | None
    faults: tuple[str, ...]
    status: Json

    @property
    def phase(self) -> str:
        """The phase in the status: Pending, Running, Succeeded or Failed."""
        return str(self.status.get("phase") or "Pending")

    @property
    def over(self) -> bool:
        """Whether the work has ended, well or not."""
        return self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class World:
    """What exists in one namespace. `tables`: the table of each TabletGroup, by the group's name. `jobs`: by
    name. `image`: the default image of nodes.
    """

    now_s: float
    image: str
    clusters: Mapping[str, ClusterSeen]
    tables: Mapping[str, str]
    jobs: Mapping[str, JobSeen]
    backups: Sequence[Errand] = ()
    holds: Seen = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Create:
    """Create an object. If it exists already, that counts as done."""

    kind: str
    manifest: Json


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete an object."""

    kind: str
    name: str
    uid: str
    resource_version: str = ""


@dataclass(frozen=True, slots=True)
class Finalize:
    """Set the finalizers of the resource."""

    finalizers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Said:
    """An event about the resource. `about`: what identifies the event if its message changes."""

    reason: str
    message: str
    warning: bool = False
    about: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do about a resource, in this order: the actions, the status, the events. `status`: None keeps
    the present one. `events` are sent only if the actions and the status were written.
    """

    actions: tuple[Create | Remove | Finalize, ...] = ()
    status: Json | None = None
    events: tuple[Said, ...] = ()
    busy: bool = False
    """Whether to look again soon."""
    again_s: float = 0.0
    """When to look again at the latest, in seconds since 1970; 0: whenever."""


@dataclass(frozen=True, slots=True)
class _Words:
    began: str
    retried: str
    complete: str
    failed: str
    what: str


_WORDS = {
    "TabletBackup": _Words("BackupBegan", "BackupRetried", "BackupComplete", "BackupFailed", "backup"),
    "TabletRestore": _Words("RestoreBegan", "RestoreRetried", "RestoreComplete", "RestoreFailed", "restore"),
}


def decide(w: World, e: Errand) -> Decision:
    """What to do next about a TabletBackup or TabletRestore."""
    if e.deleting:
        return _let_go(w, e)
    spec = e.spec
    if not isinstance(spec, TabletBackupSpec | TabletRestoreSpec):
        return Decision(
            status=_stalled(e, "InvalidSpec", "; ".join(e.faults) or "the spec cannot be read", w.now_s)
        )
    if (keeping := _keeping(e, spec)) is not None:
        return Decision(actions=(keeping,), busy=True)
    if e.over:
        return _after(w, e, spec)
    name = job_name(e.name, _WORDS[e.kind].what, e.uid)
    job = w.jobs.get(name)
    if job is None:
        return _begin(w, e, spec, name)
    if job.deleting:
        return Decision(busy=True)
    return _follow(w, e, spec, job)


def holds_of(e: Errand, jobs: Mapping[str, JobSeen]) -> list[str]:
    """Names of a backup's holds on the history of its tables, from its status and its Job."""
    job = None if e.over else jobs.get(job_name(e.name, _WORDS[e.kind].what, e.uid))
    return names_of(e.status, {} if job is None else job.progress)


def _after(w: World, e: Errand, spec: TabletBackupSpec | TabletRestoreSpec) -> Decision:
    """What to do about a backup or restore that has ended: show what its hold costs, until the hold is gone."""
    found = with_holds(e.status, holds_of(e, w.jobs), spec.clusterRef.name, w.holds, over=True)
    broken = str(found.get("holdBroken") or "")
    said = Said(
        "HoldBroken", f"{broken}; the next incremental backup has no base: make a full one", True, "hold"
    )
    return Decision(
        status=None if found == e.status else found,
        events=(said,) if broken and not e.status.get("holdBroken") else (),
    )


def _keeping(e: Errand, spec: TabletBackupSpec | TabletRestoreSpec) -> Finalize | None:
    wanted = isinstance(spec, TabletBackupSpec) and spec.deletionPolicy is DeletionPolicy.DELETE
    if wanted == (FINALIZER_BACKUP in e.finalizers):
        return None
    others = tuple(f for f in e.finalizers if f != FINALIZER_BACKUP)
    return Finalize((*others, FINALIZER_BACKUP) if wanted else others)


def _begin(w: World, e: Errand, spec: TabletBackupSpec | TabletRestoreSpec, name: str) -> Decision:
    words = _WORDS[e.kind]
    waits = _why_not_yet(w, spec)
    if waits is not None:
        return Decision(status=_status(e, "Pending", waits, w.now_s), busy=True)
    cluster = w.clusters[spec.clusterRef.name]
    if isinstance(spec, TabletBackupSpec):
        manifest = backup_job(e.namespace, e.name, e.uid, name, spec, cluster.spec, w.image, _tables(w, spec))
    else:
        manifest = restore_job(e.namespace, e.name, e.uid, name, spec, cluster.spec, w.image)
    why = "Running", f"Job {name} was created"
    status = _status(e, "Pending", why, w.now_s) | {"job": name}
    began = Said(words.began, f"Job {name}: {shown_command(manifest)}")
    return Decision(actions=(Create("Job", manifest),), status=status, events=(began,), busy=True)


def shown_command(manifest: Json) -> str:
    """The command that a Job runs, as one would type it."""
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    return " ".join([*container["command"], *container["args"]])[:500]


def _tables(w: World, spec: TabletBackupSpec) -> list[str]:
    return list(dict.fromkeys([*spec.tables, *(w.tables[group] for group in spec.groups)]))


def _why_not_yet(w: World, spec: TabletBackupSpec | TabletRestoreSpec) -> tuple[str, str] | None:
    """The reason and message why the work cannot begin now; None if it can."""
    name = spec.clusterRef.name
    cluster = w.clusters.get(name)
    if cluster is None:
        return (
            "ClusterNotFound",
            f"there is no TabletCluster {name} in this namespace: create it, or correct clusterRef",
        )
    if cluster.spec is not None and cluster.spec.hibernate:
        return (
            "Hibernated",
            f"TabletCluster {name} hibernates; the work begins once the cluster is woken (spec.hibernate: false)",
        )
    if isinstance(spec, TabletRestoreSpec):
        if not cluster.ready:
            return (
                "ClusterNotReady",
                f"TabletCluster {name} is not Ready (its conditions say why); the work begins once it is",
            )
        return None
    if not cluster.masters:
        return "ClusterNotReady", f"no master of TabletCluster {name} serves; the work begins once one does"
    if missing := [group for group in spec.groups if group not in w.tables]:
        return (
            "GroupNotFound",
            f"there is no TabletGroup {', '.join(missing)} in this namespace: create it, or correct groups",
        )
    return None


def _follow(w: World, e: Errand, spec: TabletBackupSpec | TabletRestoreSpec, job: JobSeen) -> Decision:
    words, limit = _WORDS[e.kind], spec.job.backoffLimit
    ran: Json = {"job": job.name, "attempts": job.failed + 1}
    if job.started_s:
        ran["startTime"] = timestamp(job.started_s)
    error = failure_of(job)
    events: list[Said] = []
    if job.state == "running":
        before = f"; the try before failed: {error}" if job.failed and error else ""
        told = f"try {job.failed + 1} of {limit + 1}{before}"
        if job.waits:
            told = f"its pod does not start: {job.waits}"
        status = _status(e, "Running", ("Running", told), w.now_s) | ran
        if job.progress:
            status["progress"] = _progress(job, w.now_s)
        status = with_holds(status, holds_of(e, w.jobs), spec.clusterRef.name, w.holds, over=False)
        if job.failed:
            status["error"] = error
        if job.failed > int(e.status.get("attempts") or 1) - 1:
            events.append(Said(words.retried, f"try {job.failed} failed: {error}", True, f"{job.failed}"))
        return Decision(status=status, events=tuple(events), busy=True)
    retries = job.failed if job.state == "complete" else job.failed - 1
    if (
        retries > int(e.status.get("attempts") or 1) - 1
    ):  # between two passes a try failed, and the next one ended
        events.append(
            Said(words.retried, f"try {retries} failed, and it was tried again", True, f"{retries}")
        )
    ran["completionTime"] = timestamp(job.ended_s or w.now_s)
    ran["durationSeconds"] = max(0, round((job.ended_s or w.now_s) - (job.started_s or w.now_s)))
    result = job.last.get("result") or {}
    if job.state == "complete":
        ran["attempts"] = job.failed + 1
        status = _status(e, "Succeeded", ("Complete", _told(words.what, result)), w.now_s)
        events.append(Said(words.complete, _told(words.what, result)))
        if result.get("pruneError"):
            events.append(Said("PruneFailed", f"older backups are not removed: {result['pruneError']}", True))
        return Decision(status=status | ran | _result(result), events=tuple(events))
    ran["attempts"] = job.failed
    ran |= {
        word: e.status[word] for word in FIELDS if word in e.status
    }  # a hold outlasts its Job for a while
    why = error
    if job.reason == "DeadlineExceeded":
        why = f"it took longer than job.deadline ({spec.job.deadline}){f'; the last error: {error}' if error else ''}"
    status = (
        _status(e, "Failed", (words.failed, why), w.now_s)
        | ran
        | _result(result)
        | {"error": why[:_ERROR_MAX]}
    )
    return Decision(status=status, events=(*events, Said(words.failed, why, True)))


def failure_of(job: JobSeen) -> str:
    """Why the newest pod that has ended failed, in words; "" if none failed."""
    error = job.last.get("error") or {}
    differences = (job.last.get("result") or {}).get("differences") or []
    if error.get("message"):
        code = f"{error['code']}: " if error.get("code") else ""
        return f"{code}{error['message']}"[:_ERROR_MAX]
    if differences:
        return f"a restored table differs: {differences[0]}"[:_ERROR_MAX]
    if job.last.get("killed"):
        return str(job.last["killed"])[:_ERROR_MAX]
    return "its pod was killed or deleted" if job.failed else ""


def _told(what: str, result: Json) -> str:
    if not result:
        return f"the {what} is complete; its pod is gone, so nothing more is known about it"
    tables = result.get("tables")
    count = result.get("tableCount") or (tables if isinstance(tables, int) else len(tables or ()))
    kind = f"{result['kind']} " if result.get("kind") else ""
    same = ", equal to the backup" if result.get("verified") else ""
    size = f", {int(result['bytes']):,} bytes" if result.get("bytes") is not None else ""
    return (
        f"{kind}{what} {'' if what == 'backup' else 'of '}{result.get('backup', '')}: {count} table(s), "
        f"{int(result.get('rows', 0)):,} rows{size}, as of {result.get('time', '')}{same}"
    )


_FROM_RESULT = {
    "backup": "backupID", "kind": "type", "base": "base", "time": "snapshotTime", "tables": "tables", "rows": "rows",
    "bytes": "bytes", "holds": "holds", "pruned": "pruned", "verified": "verified",
}  # fmt: skip


def _result(result: Json) -> Json:
    found = {
        name: result[word] for word, name in _FROM_RESULT.items() if result.get(word) not in (None, "", [])
    }
    if result.get("differences"):
        found["verified"] = False
    return found


_PROGRESS = ("rows", "rowsExpected", "bytes", "done", "total", "etaSeconds")


def _progress(job: JobSeen, now_s: float) -> Json:
    found = {k: int(v) for k, v in job.progress.items() if k in _PROGRESS}
    done, total = found.get("done", 0), found.get("total", 0)
    known = "etaSeconds" in found or "rowsExpected" in found
    if not known and job.pod_started_s and 0 < done < total:
        found["etaSeconds"] = round(max(0.0, now_s - job.pod_started_s) * (total - done) / done)
    return found


def _let_go(w: World, e: Errand) -> Decision:
    """What to do about a resource that is being deleted: remove its data first, if its spec asks for that."""
    if FINALIZER_BACKUP not in e.finalizers:
        return Decision()
    spec = e.spec
    gone = Finalize(tuple(f for f in e.finalizers if f != FINALIZER_BACKUP))
    name = job_name(e.name, "remove", e.uid)
    removal, own = w.jobs.get(name), w.jobs.get(job_name(e.name, "backup", e.uid))
    tidy = () if removal is None or removal.deleting else (Remove("Job", removal.name, removal.uid),)
    if not isinstance(spec, TabletBackupSpec) or spec.deletionPolicy is not DeletionPolicy.DELETE:
        return Decision(actions=(*tidy, gone))
    if own is not None and own.state == "running":
        return Decision(actions=() if own.deleting else (Remove("Job", own.name, own.uid),), busy=True)
    if removal is None:
        cluster = w.clusters.get(spec.clusterRef.name)
        made = removal_job(e.namespace, e.name, e.uid, name, spec, cluster.spec if cluster else None, w.image)
        told = "RemovingData", f"Job {name} removes the backup from its folder"
        return Decision(actions=(Create("Job", made),), status=_leaving(e, told, False, w.now_s), busy=True)
    if removal.state == "complete":
        removed = (removal.last.get("result") or {}).get("removed") or []
        event = Said("DataRemoved", f"removed {', '.join(removed) or 'nothing: there was no such backup'}")
        return Decision(actions=(*tidy, gone), events=(event,))
    if removal.state == "running":
        told = "RemovingData", removal.waits or f"Job {name} removes the backup from its folder"
        return Decision(status=_leaving(e, told, False, w.now_s), busy=True)
    why = (
        f"{failure_of(removal)}; the removal is tried again. To delete the TabletBackup and keep its data, set deletionPolicy "
        "to Retain"
    )
    status = _leaving(e, ("DataNotRemoved", why), True, w.now_s)
    event = Said("DataNotRemoved", why, True, "removal")
    again_s = (removal.ended_s or w.now_s) + REMOVE_AGAIN_S
    return Decision(
        actions=tidy if w.now_s >= again_s else (), status=status, events=(event,), again_s=again_s
    )


# -- statuses


def conditions_of(status: Json) -> tuple[Condition, ...]:
    """The conditions in a status."""
    return tuple(
        Condition(
            c["type"], c["status"], c.get("reason", ""), c.get("message", ""), c.get("lastTransitionTime", "")
        )
        for c in status.get("conditions") or ()
    )


def condition(kind: str, holds: bool | None, why: tuple[str, str]) -> Condition:
    """A condition of this kind. `holds`: None if it is unknown. `why`: reason and message."""
    word = "Unknown" if holds is None else "True" if holds else "False"
    return Condition(kind, word, why[0], why[1][:_MESSAGE_MAX])


def _conditions(e: Errand, ready: Condition, others: Sequence[Condition], now_s: float) -> list[Json]:
    return written(conditions_of(e.status), [ready, *others], e.generation, timestamp(now_s))


_KEPT = ("startTime", "job", "attempts", "error", *FIELDS)


def _status(e: Errand, phase: str, why: tuple[str, str], now_s: float) -> Json:
    going, failed = phase in ("Pending", "Running"), phase == "Failed"
    rest = ("NotStalled", "nothing waits for a human")
    return {
        **{word: e.status[word] for word in _KEPT if going and word in e.status},
        "observedGeneration": e.generation,
        "phase": phase,
        "conditions": _conditions(
            e,
            condition("Ready", phase == "Succeeded", why),
            (condition("Reconciling", going, why), condition("Stalled", failed, why if failed else rest)),
            now_s,
        ),
    }


def _stalled(e: Errand, reason: str, message: str, now_s: float) -> Json:
    why = reason, message
    found = _status(e, "Pending", why, now_s)
    parts = (condition("Reconciling", False, why), condition("Stalled", True, why))
    return found | {"conditions": _conditions(e, condition("Ready", False, why), parts, now_s)}


def _leaving(e: Errand, why: tuple[str, str], stalled: bool, now_s: float) -> Json:
    """The status of a TabletBackup whose data are being removed. It keeps what the present status says about
    the backup.
    """
    rest = ("NotStalled", "nothing waits for a human")
    parts = (condition("Reconciling", True, why), condition("Stalled", stalled, why if stalled else rest))
    found = _conditions(e, condition("Ready", False, why), parts, now_s)
    return e.status | {"observedGeneration": e.generation, "conditions": found}


def duration_s(text: str) -> float:
    """The seconds of a duration in a spec, such as "90s"."""
    return float(seconds(text))
