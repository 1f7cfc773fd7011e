"""TabletBackupSchedules: which TabletBackups to begin and to delete, and the drills. Called by errands; pure.

The name of a TabletBackup follows from the time at which it was due, so a repeated pass makes it once.
Invariants: at most one backup of a schedule begins at a time. A time that is skipped is reported.
"""

from __future__ import annotations

import datetime
import zoneinfo
from collections.abc import Sequence
from typing import Any

from stele_operator.api import API_VERSION
from stele_operator.api.backup import (
    BackupBody,
    BackupType,
    ConcurrencyPolicy,
    Drill,
    TabletBackupScheduleSpec,
)
from stele_operator.plan import naming
from stele_operator.plan.errand_jobs import drill_arguments, in_seconds, job_name, manifest, owner_of
from stele_operator.plan.errands import (
    Create,
    Decision,
    Errand,
    JobSeen,
    Remove,
    Said,
    World,
    condition,
    conditions_of,
    duration_s,
    failure_of,
)
from stele_operator.plan.moments import seconds_of, timestamp
from stele_operator.plan.status import written

Json = dict[str, Any]
_COUNT_MAX = 1_000
_HOLD_S_MAX = 365 * 86_400.0
"""The longest hold that may be asked for, a year in seconds."""
_DRILL_GRACE_S = 3_600.0
"""Seconds after its deadline from which on a drill is overdue."""


class BadSchedule(Exception):
    """A schedule, or its time zone, cannot be read, or the schedule never comes due. The message says why."""


def _cron(text: str, zone: str, since_s: float, *, back: bool = False) -> Any:
    from cronsim import CronSim, CronSimError  # not needed where no cluster has a schedule

    try:
        moment = datetime.datetime.fromtimestamp(since_s, zoneinfo.ZoneInfo(zone))
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as exc:
        raise BadSchedule(
            f"timeZone {zone}: there is no such time zone; use a name like Europe/Zurich"
        ) from exc
    try:
        return CronSim(text, moment, reverse=back)
    except CronSimError as exc:
        raise BadSchedule(
            f"schedule {text!r}: {exc}; give five fields: minute, hour, day of month, month and day of week"
        ) from exc


def next_s(text: str, zone: str, after_s: float) -> float:
    """The first time of the schedule after a moment, in seconds since 1970.

    Raises:
        BadSchedule: the text or the zone cannot be read, or the time never comes.
    """
    try:
        return float(next(_cron(text, zone, after_s)).timestamp())
    except StopIteration as exc:
        raise BadSchedule(
            f"schedule {text!r}: it has no time within the next 50 years; correct its day and month"
        ) from exc


def due(text: str, zone: str, since_s: float, now_s: float) -> tuple[float, int]:
    """The newest time of the schedule after `since_s` and up to `now_s`, and how many such times there are,
    at most 1,000. (0, 0) if there are none.

    Raises:
        BadSchedule: the text or the zone cannot be read, or the time never comes.
    """
    newest, count = 0.0, 0
    at = next_s(text, zone, since_s)
    while at <= now_s and count < _COUNT_MAX:
        newest, count, at = at, count + 1, next_s(text, zone, at)
    if at <= now_s:
        newest = float(next(_cron(text, zone, now_s + 1, back=True)).timestamp())
    return newest, count


def decide_schedule(w: World, e: Errand) -> Decision:
    """What to do next about a TabletBackupSchedule."""
    if e.deleting:
        return Decision()
    spec = e.spec
    if not isinstance(spec, TabletBackupScheduleSpec):
        return Decision(status=_unreadable(e, "InvalidSpec", "; ".join(e.faults), w.now_s))
    try:
        coming = next_s(spec.schedule, spec.timeZone, w.now_s)
        since_s = seconds_of(e.status.get("lastScheduleTime")) or e.created_s
        newest, count = due(spec.schedule, spec.timeZone, since_s, w.now_s)
        drilling = _drill(w, e, spec) if spec.drill is not None else (Decision(), {}, None)
    except BadSchedule as exc:
        return Decision(status=_unreadable(e, "InvalidSchedule", str(exc), w.now_s))
    mine = sorted((b for b in w.backups if b.owner_uid == e.uid), key=lambda b: (b.created_s, b.name))
    active = [b for b in mine if not b.over and not b.deleting]
    begun = _begin(w, e, spec, mine, active, newest, count, coming)
    tidy = _surplus(spec, mine)
    drilled, drill_status, drill_condition = drilling
    status = _status(w, e, spec, mine, begun, coming)
    if spec.drill is not None:
        status["drill"] = drill_status
        status["conditions"] = written(
            conditions_of(e.status),
            [
                *conditions_of(status),
                drill_condition or condition("Drilled", None, ("NotDrilled", "no drill yet")),
            ],
            e.generation,
            timestamp(w.now_s),
        )
    again = min((t for t in (coming, drilled.again_s) if t), default=0.0)
    return Decision(
        actions=(*begun.actions, *tidy, *drilled.actions),
        status=status,
        events=(*begun.events, *drilled.events),
        busy=bool(active) or begun.busy or drilled.busy,
        again_s=again,
    )


def _begin(
    w: World,
    e: Errand,
    spec: TabletBackupScheduleSpec,
    mine: Sequence[Errand],
    active: Sequence[Errand],
    newest: float,
    count: int,
    coming: float,
) -> Decision:
    """What to do about the newest time that is due: begin its TabletBackup, wait, or skip it. The decision's
    `status` has lastScheduleTime and missed.
    """
    keeps: Json = {"missed": int(e.status.get("missed") or 0)}
    if last := e.status.get("lastScheduleTime"):
        keeps["lastScheduleTime"] = last
    if not count:
        return Decision(status=keeps)
    if spec.suspend:
        return Decision(status=keeps | {"lastScheduleTime": timestamp(newest)})
    late_s = w.now_s - newest
    if late_s > duration_s(spec.startingDeadline):
        told = _missed(count, newest, f"nothing began within startingDeadline ({spec.startingDeadline})")
        found = {"lastScheduleTime": timestamp(newest), "missed": keeps["missed"] + count}
        return Decision(status=found, events=(told,))
    stops: tuple[Remove, ...] = ()
    events: list[Said] = []
    if active and spec.concurrencyPolicy is ConcurrencyPolicy.FORBID:
        waits = f"the backup of {timestamp(newest)} waits for TabletBackup {active[0].name}, which still runs"
        return Decision(
            status=keeps, events=(Said("ScheduleWaits", waits, about=timestamp(newest)),), busy=True
        )
    for one in active:
        stops += (Remove("TabletBackup", one.name, one.uid),)
        events.append(
            Said(
                "BackupReplaced",
                f"TabletBackup {one.name} still ran when the next backup was due; it is deleted",
                True,
            )
        )
    if count > 1:
        events.append(_missed(count - 1, newest, "the operator was away at that time, or a backup still ran"))
        keeps["missed"] += count - 1
    made = backup_of(e, spec, mine, newest, coming, w.now_s)
    keeps["lastScheduleTime"] = timestamp(newest)
    return Decision((*stops, Create("TabletBackup", made)), keeps, tuple(events), busy=True)


def _missed(count: int, newest: float, why: str) -> Said:
    times = "1 time was" if count == 1 else f"{count:,} times were"
    return Said(
        "ScheduleMissed", f"{times} skipped until {timestamp(newest)}: {why}", True, timestamp(newest)
    )


def backup_of(
    e: Errand,
    spec: TabletBackupScheduleSpec,
    mine: Sequence[Errand],
    due_s: float,
    coming: float,
    now_s: float,
) -> Json:
    """The TabletBackup for the time `due_s`."""
    body: BackupBody = spec.backup
    chosen = body.type
    if chosen is BackupType.AUTO and spec.fullEvery is not None:
        full_s = _newest_full_s(e, mine)
        # An hour less, since a backup begins a little later each time.
        if now_s - full_s >= max(1.0, duration_s(spec.fullEvery) - 3_600.0):
            chosen = BackupType.FULL
    asked = body.model_dump(mode="json", exclude_none=True, by_alias=True) | {"type": chosen.value}
    if body.type is not BackupType.FULL and body.holdFor is None:
        between = max(
            2 * (coming - due_s), 2 * (next_s(spec.schedule, spec.timeZone, coming) - coming), 3_600.0
        )
        asked["holdFor"] = in_seconds(min(between, _HOLD_S_MAX))
    return {
        "apiVersion": API_VERSION,
        "kind": "TabletBackup",
        "metadata": {
            "name": f"{e.name}-{int(due_s // 60)}",
            "namespace": e.namespace,
            "labels": {naming.LABEL_MANAGED: naming.MANAGER, naming.LABEL_SCHEDULE: e.name},
            "ownerReferences": [owner_of("TabletBackupSchedule", e.name, e.uid)],
        },
        "spec": asked,
    }


def _succeeded(mine: Sequence[Errand]) -> list[Errand]:
    return [b for b in mine if b.phase == "Succeeded"]


def _newest_full_s(e: Errand, mine: Sequence[Errand]) -> float:
    full = [
        seconds_of(b.status.get("snapshotTime")) for b in _succeeded(mine) if b.status.get("type") == "full"
    ]
    return max([*full, seconds_of(e.status.get("lastFullTime"))], default=0.0)


def _surplus(spec: TabletBackupScheduleSpec, mine: Sequence[Errand]) -> tuple[Remove, ...]:
    """Remove finished TabletBackups beyond the limit, oldest first."""
    gone: list[Errand] = []
    for phase, limit in (("Succeeded", spec.historyLimit.succeeded), ("Failed", spec.historyLimit.failed)):
        ended = [b for b in mine if b.phase == phase and not b.deleting]
        gone += ended[:-limit]
    return tuple(Remove("TabletBackup", b.name, b.uid) for b in gone)


def _status(
    w: World,
    e: Errand,
    spec: TabletBackupScheduleSpec,
    mine: Sequence[Errand],
    begun: Decision,
    coming: float,
) -> Json:
    active = [b.name for b in mine if not b.over and not b.deleting]
    succeeded = _succeeded(mine)
    status: Json = {
        **{k: e.status[k] for k in ("lastSuccess", "lastSuccessTime") if k in e.status},
        **(begun.status or {}),
        "observedGeneration": e.generation,
        "active": active[:10],
    }
    if not spec.suspend:
        status["nextScheduleTime"] = timestamp(coming)
    if full_s := _newest_full_s(e, mine):
        status["lastFullTime"] = timestamp(full_s)
    if succeeded:
        newest = succeeded[-1]
        words = ("backupID", "type", "rows", "bytes", "durationSeconds", "heldBytes")
        status["lastSuccess"] = {"name": newest.name} | {
            k: newest.status[k] for k in words if k in newest.status
        }
        if newest.status.get("snapshotTime"):
            status["lastSuccessTime"] = newest.status["snapshotTime"]
    over = [b for b in mine if b.over]
    rest = ("NotStalled", "nothing waits for a human")
    ready: tuple[bool, tuple[str, str]]
    if over and over[-1].phase == "Failed":
        ready = False, ("BackupFailed", f"TabletBackup {over[-1].name}: {over[-1].status.get('error', '')}")
    elif spec.suspend:
        ready = True, ("Suspended", "suspend is true, so no backup begins")
    elif over:
        ready = True, ("Complete", f"TabletBackup {over[-1].name} is complete")
    else:
        ready = True, ("Scheduled", f"the first backup begins at {timestamp(coming)}")
    going = ("Running", f"TabletBackup {active[0]}") if active else ready[1]
    status["conditions"] = written(
        conditions_of(e.status),
        [
            condition("Ready", *ready),
            condition("Reconciling", bool(active), going),
            condition("Stalled", False, rest),
        ],
        e.generation,
        timestamp(w.now_s),
    )
    return status


def _unreadable(e: Errand, reason: str, message: str, now_s: float) -> Json:
    why = reason, message or "the spec cannot be read"
    parts = (("Ready", False), ("Reconciling", False), ("Stalled", True))
    found = [condition(kind, holds, why) for kind, holds in parts]
    conditions = written(conditions_of(e.status), found, e.generation, timestamp(now_s))
    return e.status | {"observedGeneration": e.generation, "conditions": conditions}


# -- drills


def _drill(w: World, e: Errand, spec: TabletBackupScheduleSpec) -> tuple[Decision, Json, Any]:
    """What to do about the drill, its part of the status, and its condition; None for the condition if
    nothing is known yet.
    """
    drill = spec.drill
    assert drill is not None
    status: Json = dict(e.status.get("drill") or {"since": timestamp(w.now_s)})
    since_s = seconds_of(status.get("lastScheduleTime")) or e.created_s
    newest, _ = due(drill.schedule, spec.timeZone, since_s, w.now_s)
    coming = next_s(drill.schedule, spec.timeZone, w.now_s)
    known = next((c for c in conditions_of(e.status) if c.type == "Drilled"), None)
    job = w.jobs.get(job_name(e.name, "drill", e.uid))
    if job is not None and job.state != "running" and not job.deleting:
        # Its result is recorded in the same pass in which it is deleted, or once more in the next.
        told, said = _drilled(status, job, w.now_s)
        removal = Remove("Job", job.name, job.uid, job.resource_version)
        return Decision((removal,), None, (said,), busy=True), status, told
    last = (e.status.get("lastSuccess") or {}).get("backupID")
    stopped = _stopped(w, spec, last, job)
    waits = stopped or ("" if newest else f"the next one begins at {timestamp(coming)}")
    told, warned = _overdue(w, spec, drill, status, known, waits)
    if job is not None:
        return Decision((), None, warned, busy=True, again_s=coming), status, told
    if not newest or spec.suspend or not last:
        return Decision((), None, warned, again_s=coming), status, told
    if stopped:
        return Decision((), None, warned, busy=True), status, told
    made = _drill_job(w, e, spec, drill, str(last))
    status["lastScheduleTime"] = timestamp(newest)
    began = Said("DrillBegan", f"backup {last} is restored into tables of other names")
    return Decision((Create("Job", made),), None, (began,), busy=True), status, told


def _stopped(w: World, spec: TabletBackupScheduleSpec, last: Any, job: JobSeen | None) -> str:
    """Why no drill can begin now, and what to do; "" if one can."""
    name = spec.backup.clusterRef.name
    cluster = w.clusters.get(name)
    if job is not None and job.deleting:
        return f"Job {job.name} of the previous drill is still being deleted: `kubectl describe` of its pod may say why"
    if job is not None:
        return f"Job {job.name} has run since {timestamp(job.started_s or w.now_s)}: wait for its end"
    if spec.suspend:
        return "suspend is true: set it to false, or remove drill from the spec"
    if cluster is None:
        return f"there is no TabletCluster {name} in this namespace: create it, or correct clusterRef"
    if cluster.spec is not None and cluster.spec.hibernate:
        return f"TabletCluster {name} hibernates: wake it"
    if not cluster.ready:
        return f"TabletCluster {name} is not Ready: its conditions say why"
    if not last:
        return "no backup has succeeded yet: the condition Ready says why"
    return ""


def _overdue(
    w: World, spec: TabletBackupScheduleSpec, drill: Drill, status: Json, known: Any, waits: str
) -> tuple[Any, tuple[Said, ...]]:
    """The condition, and an event when a drill becomes overdue. `waits`: why none begins now; "" if one does.

    If the newest drill failed, the condition keeps saying so, because that is worse than overdue.
    """
    passed_s = seconds_of(status.get("lastPassTime"))
    asked = status.get("since") or status.get("lastScheduleTime")
    wanted_s = next_s(drill.schedule, spec.timeZone, passed_s or seconds_of(asked))
    late = w.now_s > wanted_s + duration_s(drill.job.deadline) + _DRILL_GRACE_S
    reason = "" if known is None else known.reason
    before = f"the last drill passed at {timestamp(passed_s)}" if passed_s else "no drill has passed yet"
    if not late and reason == "DrillOverdue":
        return condition("Drilled", True, ("DrillPassed", before)) if passed_s else None, ()
    if not late or not waits or reason == "DrillFailed":
        return known, ()
    why = f"{before}, and one was due at {timestamp(wanted_s)}; none has ended since: {waits}"
    events = () if reason == "DrillOverdue" else (Said("DrillOverdue", why, True, timestamp(wanted_s)),)
    return condition("Drilled", False, ("DrillOverdue", why)), events


def _drill_job(w: World, e: Errand, spec: TabletBackupScheduleSpec, drill: Drill, backup_id: str) -> Json:
    cluster = w.clusters[spec.backup.clusterRef.name]
    return manifest(
        e.namespace,
        job_name(e.name, "drill", e.uid),
        "drill",
        owner_of("TabletBackupSchedule", e.name, e.uid),
        cluster.name,
        cluster.spec,
        w.image,
        spec.backup.target,
        drill.job,
        drill_arguments(spec.backup, drill, backup_id),
    )


def _drilled(status: Json, job: JobSeen, now_s: float) -> tuple[Any, Said]:
    """Record in `status` what a drill found. Returns the condition and the event."""
    result = job.last.get("result") or {}
    ended = timestamp(job.ended_s or now_s)
    status["lastTime"] = ended
    names = {
        "backup": "backupID",
        "rows": "rows",
        "restoreSeconds": "restoreSeconds",
        "compareSeconds": "compareSeconds",
    }
    status |= {name: result[word] for word, name in names.items() if word in result}
    if job.state == "complete":
        status["lastPassTime"] = ended
        told = (
            f"backup {result.get('backup', '')}: {int(result.get('rows', 0)):,} rows restored in "
            f"{result.get('restoreSeconds', 0)} s, equal to the backup"
        )
        return condition("Drilled", True, ("DrillPassed", told)), Said("DrillPassed", told)
    why = failure_of(job) or job.reason
    return condition("Drilled", False, ("DrillFailed", why)), Said("DrillFailed", why, True)
