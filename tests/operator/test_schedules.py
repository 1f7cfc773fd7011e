"""When backups of a schedule begin, what is left out, what goes, and when a drill is due. No processes, no clock."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

import pytest

from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.errands import parse
from stele_operator.plan.errand_jobs import job_name
from stele_operator.plan.errands import ClusterSeen, Create, Decision, Errand, JobSeen, Remove, World
from stele_operator.plan.schedules import BadSchedule, decide_schedule, due, next_s
from tests.operator.test_errands import FLIGHTS, TARGET, conditions

Json = dict[str, Any]


def at(text: str) -> float:
    return datetime.datetime.fromisoformat(f"{text}+00:00").timestamp()


CREATED = "2026-01-01T00:00:00Z"


def schedule(status: Json | None = None, backup: Json | None = None, **spec: Any) -> Errand:
    body = {"clusterRef": {"name": "flights"}, "target": TARGET} | (backup or {})
    metadata = {
        "name": "nightly",
        "namespace": "data",
        "uid": "s1",
        "resourceVersion": "3",
        "generation": 2,
        "creationTimestamp": CREATED,
    }
    raw = {
        "kind": "TabletBackupSchedule",
        "metadata": metadata,
        "spec": {"schedule": "30 2 * * *", "backup": body} | spec,
    }
    return parse(raw | {"status": status or {}})


def made_by(number: int, phase: str, **status: Any) -> Errand:
    metadata = {
        "name": f"nightly-{number}", "namespace": "data", "uid": f"b{number}", "resourceVersion": "4",
        "creationTimestamp": f"2026-01-{number:02}T02:30:00Z",
        "ownerReferences": [{"uid": "s1", "controller": True}],
    }  # fmt: skip
    spec = {"clusterRef": {"name": "flights"}, "target": TARGET}
    return parse(
        {"kind": "TabletBackup", "metadata": metadata, "spec": spec, "status": {"phase": phase, **status}}
    )


def world(now: str, *backups: Errand, jobs: tuple[JobSeen, ...] = ()) -> World:
    return World(at(now), "stele:1", {"flights": FLIGHTS}, {}, {job.name: job for job in jobs}, backups)


def begun(decision: Decision) -> list[Json]:
    return [a.manifest for a in decision.actions if isinstance(a, Create) and a.kind == "TabletBackup"]


def reasons(decision: Decision) -> list[str]:
    return [said.reason for said in decision.events]


def test_times_are_those_of_the_zone_also_when_its_clocks_change() -> None:
    berlin = "Europe/Berlin"
    assert next_s("30 2 * * *", berlin, at("2026-01-01T00:00:00")) == at("2026-01-01T01:30:00")
    assert next_s("30 2 * * *", berlin, at("2026-07-01T00:00:00")) == at("2026-07-01T00:30:00")
    # 02:30 does not exist on 29 March, and comes twice on 25 October: once each day all the same.
    march = due("30 2 * * *", berlin, at("2026-03-28T12:00:00"), at("2026-03-30T12:00:00"))
    october = due("30 2 * * *", berlin, at("2026-10-24T12:00:00"), at("2026-10-26T12:00:00"))
    assert (march[1], october[1]) == (2, 2)
    assert due("* * * * *", "Etc/UTC", 0.0, at("2026-01-01T00:00:30")) == (at("2026-01-01T00:00:00"), 1_000)
    assert due("30 2 * * *", "Etc/UTC", at("2026-01-01T03:00:00"), at("2026-01-01T04:00:00")) == (0.0, 0)


@pytest.mark.parametrize(
    ("spec", "words"),
    [({"schedule": "61 2 * * *"}, "Bad minute"), ({"timeZone": "Mars/Olympus"}, "no such time zone")],
)
def test_a_schedule_that_cannot_be_read_is_told(spec: Json, words: str) -> None:
    stuck = decide_schedule(world("2026-01-02T00:00:00"), schedule(**spec))
    assert not stuck.actions and conditions(stuck)["Stalled"] == ("True", "InvalidSchedule")
    assert stuck.status is not None and words in stuck.status["conditions"][0]["message"]
    with pytest.raises(BadSchedule):
        next_s("0 0 31 2 *", "Etc/UTC", 0.0)


def test_a_backup_begins_once_at_its_time() -> None:
    before = decide_schedule(world("2026-01-01T02:29:00"), schedule())
    assert not before.actions and before.again_s == at("2026-01-01T02:30:00")
    assert conditions(before)["Ready"] == ("True", "Scheduled")
    now = world("2026-01-01T02:30:01")
    (made,) = begun(decide_schedule(now, schedule()))
    assert made["metadata"]["name"] == f"nightly-{int(at('2026-01-01T02:30:00') // 60)}"
    assert made["metadata"]["ownerReferences"][0]["uid"] == "s1"
    assert begun(decide_schedule(now, schedule())) == [
        made
    ]  # killed before the status was written: the same again
    status = decide_schedule(now, schedule()).status
    assert begun(decide_schedule(world("2026-01-01T02:31:00"), schedule(status))) == []


def test_what_is_missed_is_told_and_counted() -> None:
    found = decide_schedule(world("2026-01-04T02:31:00"), schedule())
    assert len(begun(found)) == 1 and reasons(found) == ["ScheduleMissed"]
    assert found.status is not None and found.status["missed"] == 3
    late = decide_schedule(
        world("2026-01-04T12:00:00"), schedule(found.status | {"lastScheduleTime": "2026-01-02T02:30:00Z"})
    )
    assert not begun(late) and reasons(late) == ["ScheduleMissed"]
    assert late.status is not None and late.status["missed"] == 5
    resting = decide_schedule(world("2026-01-04T02:31:00"), schedule(suspend=True))
    assert not begun(resting) and not resting.events and conditions(resting)["Ready"] == ("True", "Suspended")


def test_the_next_one_waits_for_the_one_that_runs_or_replaces_it() -> None:
    running = made_by(1, "Running")
    status = {"lastScheduleTime": "2026-01-01T02:30:00Z"}
    waits = decide_schedule(world("2026-01-02T02:31:00", running), schedule(status))
    assert not waits.actions and reasons(waits) == ["ScheduleWaits"] and waits.busy
    assert waits.status is not None and waits.status["lastScheduleTime"] == status["lastScheduleTime"]
    instead = decide_schedule(
        world("2026-01-02T02:31:00", running), schedule(status, concurrencyPolicy="Replace")
    )
    assert instead.actions[0] == Remove("TabletBackup", "nightly-1", "b1") and len(begun(instead)) == 1
    foreign = dataclasses.replace(running, owner_uid="another")
    assert len(begun(decide_schedule(world("2026-01-02T02:31:00", foreign), schedule(status)))) == 1


def test_full_ones_come_again_and_the_history_is_held_until_the_next() -> None:
    auto = {"type": "Auto"}
    full = made_by(1, "Succeeded", type="full", snapshotTime="2026-01-01T02:30:05Z", backupID="x", rows=1)
    status = {"lastScheduleTime": "2026-01-01T02:30:00Z"}
    for now, wanted in (("2026-01-02T02:31:00", "Auto"), ("2026-01-08T02:30:01", "Full")):
        (made,) = begun(decide_schedule(world(now, full), schedule(status, auto, fullEvery="7d")))
        assert made["spec"]["type"] == wanted, now
        assert made["spec"]["holdFor"] == "172800s"
    (first,) = begun(decide_schedule(world("2026-01-01T02:30:01"), schedule(None, auto, fullEvery="7d")))
    assert first["spec"]["type"] == "Full"
    (yearly,) = begun(
        decide_schedule(world("2027-01-01T00:00:01"), schedule(None, auto, schedule="0 0 1 1 *"))
    )
    assert yearly["spec"]["holdFor"] == f"{365 * 86_400}s"
    (plain,) = begun(decide_schedule(world("2026-01-01T02:30:01"), schedule()))
    assert "holdFor" not in plain["spec"]


def test_the_oldest_objects_go_and_the_newest_success_is_remembered() -> None:
    done = [
        made_by(
            n,
            "Succeeded",
            type="full",
            snapshotTime=f"2026-01-{n:02}T02:30:05Z",
            backupID=f"x{n}",
            rows=n,
            bytes=9,
            durationSeconds=4,
        )
        for n in range(1, 4)
    ]
    failed = [made_by(n, "Failed", error="no") for n in range(4, 6)]
    e = schedule({"lastScheduleTime": "2026-01-05T02:30:00Z"}, historyLimit={"succeeded": 2, "failed": 1})
    found = decide_schedule(world("2026-01-05T03:00:00", *done, *failed), e)
    assert found.actions == (
        Remove("TabletBackup", "nightly-1", "b1"),
        Remove("TabletBackup", "nightly-4", "b4"),
    )
    assert found.status is not None
    assert found.status["lastSuccessTime"] == "2026-01-03T02:30:05Z"
    assert found.status["lastSuccess"] == {
        "name": "nightly-3", "backupID": "x3", "type": "full", "rows": 3, "bytes": 9, "durationSeconds": 4,
    }  # fmt: skip
    assert conditions(found)["Ready"] == ("False", "BackupFailed")
    later = decide_schedule(world("2026-01-05T03:00:00"), schedule(found.status))
    assert later.status is not None and later.status["lastSuccess"] == found.status["lastSuccess"]


def test_a_drill_is_due_runs_once_and_its_result_is_kept() -> None:
    status: Json = {
        "lastScheduleTime": "2026-02-01T02:30:00Z",
        "lastSuccess": {"backupID": "x9"},
        "missed": 0,
    }
    e = schedule(status, drill={"schedule": "0 4 1 * *"})
    found = decide_schedule(world("2026-02-01T04:00:01"), e)
    (create,) = found.actions
    assert isinstance(create, Create) and create.kind == "Job" and reasons(found) == ["DrillBegan"]
    args = create.manifest["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args == ["drill", "--json-progress", "--", "s3://bucket/stele", "x9"]
    assert conditions(found)["Drilled"] == ("Unknown", "NotDrilled")
    assert found.status is not None
    name = job_name("nightly", "drill", "s1")
    running = JobSeen(name, "j", "1", "running")
    assert found.status["drill"] == {
        "since": "2026-02-01T04:00:01Z",
        "lastScheduleTime": "2026-02-01T04:00:00Z",
    }
    e = schedule(found.status, drill={"schedule": "0 4 1 * *"})
    assert decide_schedule(world("2026-02-01T04:01:00", jobs=(running,)), e).actions == ()
    last = {"result": {"backup": "x9", "rows": 7, "restoreSeconds": 1.5, "compareSeconds": 0.5}}
    done = dataclasses.replace(running, state="complete", last=last, ended_s=at("2026-02-01T04:02:00"))
    passed = decide_schedule(world("2026-02-01T04:03:00", jobs=(done,)), e)
    assert passed.actions == (Remove("Job", name, "j", "1"),) and reasons(passed) == ["DrillPassed"]
    assert conditions(passed)["Drilled"] == ("True", "DrillPassed")
    assert passed.status is not None
    assert (
        passed.status["drill"]["lastPassTime"] == "2026-02-01T04:02:00Z"
        and passed.status["drill"]["rows"] == 7
    )
    after = decide_schedule(
        world("2026-02-01T04:04:00"), schedule(passed.status, drill={"schedule": "0 4 1 * *"})
    )
    assert not after.actions and conditions(after)["Drilled"] == ("True", "DrillPassed")
    failed = dataclasses.replace(running, state="failed", failed=1, last={"error": {"message": "damaged"}})
    worse = decide_schedule(world("2026-02-01T04:03:00", jobs=(failed,)), e)
    assert conditions(worse)["Drilled"] == ("False", "DrillFailed")


PASSED: Json = {
    "lastScheduleTime": "2026-04-01T02:30:00Z",
    "lastSuccess": {"backupID": "x9"},
    "drill": {"lastScheduleTime": "2026-02-01T04:00:00Z", "lastPassTime": "2026-02-01T04:02:00Z"},
    "conditions": [{"type": "Drilled", "status": "True", "reason": "DrillPassed", "message": "equal"}],
}
"""A schedule whose drill of February passed."""
MONTHLY: Json = {"schedule": "0 4 1 * *"}


def drill_told(w: World, e: Errand) -> tuple[str, str, str, list[str]]:
    """(Status, reason and message of Drilled, the reasons of events about drills)."""
    found = decide_schedule(w, e)
    assert found.status is not None
    (told,) = [c for c in found.status["conditions"] if c["type"] == "Drilled"]
    events = [reason for reason in reasons(found) if reason.startswith("Drill")]
    return told["status"], told["reason"], told["message"], events


HIBERNATING = dataclasses.replace(FLIGHTS, spec=TabletClusterSpec(hibernate=True))


@pytest.mark.parametrize(
    ("spec", "cluster", "status", "why"),
    [
        ({"suspend": True}, FLIGHTS, {}, "suspend is true: set it to false, or remove drill from the spec"),
        (
            {},
            None,
            {},
            "there is no TabletCluster flights in this namespace: create it, or correct clusterRef",
        ),
        ({}, HIBERNATING, {}, "TabletCluster flights hibernates: wake it"),
        ({}, dataclasses.replace(FLIGHTS, ready=False), {}, "TabletCluster flights is not Ready: its"),
        ({}, FLIGHTS, {"lastSuccess": {}}, "no backup has succeeded yet: the condition Ready says why"),
    ],
)
def test_a_drill_that_is_overdue_is_told_once_with_what_to_do(
    spec: Json, cluster: ClusterSeen | None, status: Json, why: str
) -> None:
    clusters = {"flights": cluster} if cluster is not None else {}
    e = schedule(PASSED | status, drill=MONTHLY, **spec)

    def seen(now: str, by: Errand = e) -> tuple[str, str, str, list[str]]:
        return drill_told(dataclasses.replace(world(now), clusters=clusters), by)

    # It was due at 04:00. It may take job.deadline, 6 h, and an hour more.
    assert seen("2026-03-01T11:00:00")[:2] == ("True", "DrillPassed")
    found = seen("2026-03-01T11:00:01")
    assert (found[0], found[1], found[3]) == ("False", "DrillOverdue", ["DrillOverdue"])
    began = "the last drill passed at 2026-02-01T04:02:00Z, and one was due at 2026-03-01T04:00:00Z"
    assert found[2].startswith(f"{began}; none has ended since: {why}"), found[2]
    later = dataclasses.replace(
        e,
        status=e.status
        | {"conditions": [dict(zip(("status", "reason", "message"), found)) | {"type": "Drilled"}]},
    )
    assert seen("2026-03-02T11:00:01", later)[1:4:2] == ("DrillOverdue", [])
    # With another schedule nothing is due before May.
    rare = dataclasses.replace(later, spec=schedule(drill={"schedule": "0 4 1 5 *"}, **spec).spec)
    assert seen("2026-03-02T11:00:01", rare)[:2] == ("True", "DrillPassed")


def test_a_drill_that_failed_or_runs_or_was_never_due_is_not_called_overdue() -> None:
    failed = PASSED | {
        "conditions": [{"type": "Drilled", "status": "False", "reason": "DrillFailed", "message": "x"}]
    }
    e = schedule(failed, drill=MONTHLY, suspend=True)
    assert drill_told(world("2026-03-05T00:00:00"), e)[1:3] == ("DrillFailed", "x")
    # Drills are asked for only now, of an old schedule.
    fresh = schedule({"lastScheduleTime": "2026-04-01T02:30:00Z"}, drill=MONTHLY)
    told = decide_schedule(world("2026-04-15T00:00:00"), fresh)
    assert told.status is not None and told.status["drill"] == {"since": "2026-04-15T00:00:00Z"}
    assert conditions(told)["Drilled"] == ("Unknown", "NotDrilled")
    again = schedule(told.status, drill=MONTHLY)
    assert drill_told(world("2026-05-01T10:59:00"), again)[1] == "NotDrilled"
    status, reason, message, events = drill_told(world("2026-05-01T11:01:00"), again)
    assert (status, reason, events) == ("False", "DrillOverdue", ["DrillOverdue"])
    assert message.startswith(
        "no drill has passed yet, and one was due at 2026-05-01T04:00:00Z; none has ended"
    )
    # Once the hindrance is gone it begins, and stays overdue until it has passed.
    job = JobSeen(
        job_name("nightly", "drill", "s1"), "j", "1", "running", started_s=at("2026-05-01T12:00:00")
    )
    ran = drill_told(world("2026-05-01T12:01:00", jobs=(job,)), schedule(PASSED, drill=MONTHLY))
    assert ran[1] == "DrillOverdue" and "has run since 2026-05-01T12:00:00Z: wait for its end" in ran[2]
    # Somebody has deleted the Job of the drill that was due.
    lost = PASSED | {"drill": PASSED["drill"] | {"lastScheduleTime": "2026-03-01T04:00:00Z"}}
    ran = drill_told(world("2026-03-05T00:00:00"), schedule(lost, drill=MONTHLY))
    assert ran[1] == "DrillOverdue" and ran[2].endswith("the next one begins at 2026-04-01T04:00:00Z")
