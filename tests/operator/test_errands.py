"""What is decided about TabletBackups and TabletRestores, and what their Jobs run. No processes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.errands import last_line, parse, seen_job
from stele_operator.plan.errand_holds import HoldSeen
from stele_operator.plan.errand_jobs import job_name
from stele_operator.plan.errands import (
    REMOVE_AGAIN_S,
    ClusterSeen,
    Create,
    Decision,
    Errand,
    Finalize,
    JobSeen,
    Remove,
    World,
    decide,
)
from stele_operator.plan.naming import FINALIZER_BACKUP, LABEL_CLUSTER

Json = dict[str, Any]
NOW = 1_800_000_000.0
TARGET: Json = {"uri": "s3://bucket/stele"}
FLIGHTS = ClusterSeen("flights", TabletClusterSpec(), ready=True, masters=3)


def errand(kind: str = "TabletBackup", status: Json | None = None, **more: Any) -> Errand:
    spec: Json = {"clusterRef": {"name": "flights"}} | (
        {"source": TARGET} if kind == "TabletRestore" else {"target": TARGET}
    )
    metadata = {
        "name": "one", "namespace": "data", "uid": "u1", "resourceVersion": "7", "generation": 1,
        "creationTimestamp": "2026-01-01T00:00:00Z", **more.pop("metadata", {}),
    }  # fmt: skip
    return parse({"kind": kind, "metadata": metadata, "spec": spec | more, "status": status or {}})


def world(*jobs: JobSeen, **more: Any) -> World:
    parts: Json = {"clusters": {"flights": FLIGHTS}, "tables": {"g": "flights"}, "now_s": NOW} | more
    return World(image="stele:1", jobs={job.name: job for job in jobs}, **parts)


def job(state: str = "running", what: str = "backup", **more: Any) -> JobSeen:
    return JobSeen(job_name("one", what, "u1"), "j1", "9", state, started_s=NOW - 100, **more)


def conditions(decision: Decision) -> dict[str, tuple[str, str]]:
    assert decision.status is not None
    return {c["type"]: (c["status"], c["reason"]) for c in decision.status["conditions"]}


def made(decision: Decision) -> Json:
    (create,) = decision.actions
    assert isinstance(create, Create)
    return create.manifest


def arguments(decision: Decision) -> str:
    return " ".join(made(decision)["spec"]["template"]["spec"]["containers"][0]["args"])


def test_a_backup_begins_as_a_job_that_is_no_member_and_has_no_rights() -> None:
    asked = decide(
        world(),
        errand(
            groups=["g"], tables=["planes"], type="Auto", holdFor="1d12h", at="2026-01-01",
            retention={"keepFull": 4, "keepDays": 28}, target={**TARGET, "credentialsSecret": {"name": "bucket"}},
            job={"backoffLimit": 1, "deadline": "2h"},
        ),
    )  # fmt: skip
    assert arguments(asked) == (
        "create --json-progress --key u1 --incremental --full-if-needed --hold-for 129600s --at 2026-01-01 --keep-full 4 "
        "--keep-days 28 -- s3://bucket/stele planes flights"
    )
    manifest = made(asked)
    pod = manifest["spec"]["template"]["spec"]
    assert (manifest["spec"]["backoffLimit"], manifest["spec"]["activeDeadlineSeconds"]) == (1, 7_200)
    assert manifest["metadata"]["ownerReferences"][0]["uid"] == "u1"
    assert LABEL_CLUSTER not in manifest["spec"]["template"]["metadata"]["labels"]
    assert pod["automountServiceAccountToken"] is False and pod["restartPolicy"] == "Never"
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "bucket"}}]
    assert {"name": "STELE_MASTERS", "value": "flights-masters.data.svc:7051"} in pod["containers"][0]["env"]
    assert [s.reason for s in asked.events] == ["BackupBegan"]


def test_spark_does_the_work_in_the_jobs_pod_without_any_right_or_in_pods_that_it_makes() -> None:
    spark: Json = {"image": "spark:1", "conf": {"spark.executor.memory": "2g", "spark.ui.enabled": "true"}}
    secret = {"credentialsSecret": {"name": "bucket"}}
    local = made(decide(world(), errand(spark=spark, target=TARGET | secret)))["spec"]["template"]["spec"]
    (container,) = local["containers"]
    assert (container["image"], container["command"]) == ("spark:1", ["python", "-m", "stele_spark.submit"])
    words = container["args"]
    assert words[:2] == ["--master", "local[*,4]"] and "spark.executor.memory=2g" in words
    assert "spark.ui.enabled=false" in words and "spark.ui.enabled=true" not in words
    assert words[words.index("backup") :] == [
        "backup",
        "--json-progress",
        "--key",
        "u1",
        "--all",
        "--",
        TARGET["uri"],
    ]
    assert local["automountServiceAccountToken"] is False
    final = made(decide(world(), errand(spark=spark)))["spec"]["podFailurePolicy"]["rules"][1]
    assert final["onExitCodes"]["values"] == [2, 5], "Spark ends with 1 also where another try may succeed"

    settings = {"serviceAccountName": "stele-spark", "nodeSelector": {"disk": "fast"}}
    more = errand("TabletRestore", spark=spark | {"executors": 3}, source=TARGET | secret, job=settings)
    driver = made(decide(world(), more))["spec"]["template"]["spec"]
    (container,) = driver["containers"]
    words = container["args"]
    assert words[:2] == ["--master", "k8s://https://kubernetes.default.svc"] and "restore" in words
    for setting in (
        "spark.executor.instances=3", "spark.kubernetes.namespace=data", "spark.driver.host=$(STELE_POD_IP)",
        "spark.driver.bindAddress=$(STELE_POD_IP)",  # Spark tells its executors the address that it binds
        "spark.kubernetes.driver.pod.name=$(STELE_POD_NAME)", "spark.kubernetes.container.image=spark:1",
    ):  # fmt: skip
        assert setting in words
    assert (driver["automountServiceAccountToken"], driver["serviceAccountName"]) == (True, "stele-spark")
    variables = {v["name"]: v.get("value") for v in container["env"]}
    executor = json.loads(str(variables["STELE_EXECUTOR_POD"]))["spec"]
    assert executor["automountServiceAccountToken"] is False and "serviceAccountName" not in executor
    assert executor["nodeSelector"] == {"disk": "fast"}
    assert executor["containers"][0]["envFrom"] == [{"secretRef": {"name": "bucket"}}]
    # Spark mounts a volume of its own at spark.local.dir unless it finds one of this name; Kubernetes refuses two at one path.
    assert "spark.local.dir=/tmp" in words
    assert executor["containers"][0]["volumeMounts"] == [{"name": "spark-local-dir-1", "mountPath": "/tmp"}]
    assert executor["volumes"] == [{"name": "spark-local-dir-1", "emptyDir": {}}]
    faulty = decide(world(), errand(spark={"image": "x", "conf": {"executor.memory": "1g"}}))
    assert conditions(faulty)["Stalled"] == ("True", "InvalidSpec")


def test_all_tables_and_a_volume() -> None:
    asked = decide(world(), errand(target={"claimName": "backups", "path": "nightly"}))
    assert arguments(asked) == "create --json-progress --key u1 --all -- /backup/nightly"
    pod = made(asked)["spec"]["template"]["spec"]
    assert {"name": "backup", "persistentVolumeClaim": {"claimName": "backups"}} in pod["volumes"]


def test_a_restore_names_tables_and_waits_until_the_cluster_is_ready() -> None:
    restore = errand(
        "TabletRestore", tables=[{"name": "a"}, {"name": "b", "newName": "c"}], time="2026-05-01",
        hash=[{"columns": ["x", "y"], "buckets": 4}], replicationFactor=5,
        range={"columns": ["x"], "ranges": [{"to": ["10"]}, {"from": ["10"], "to": ['a"b']}]},
    )  # fmt: skip
    assert arguments(decide(world(), restore)) == (
        "restore --json-progress --again --verify --at 2026-05-01 --table a=a --table b=c --hash x,y:4 "
        '--range x:.."10" --range x:"10".."a\\"b" '
        "--replication-factor 5 -- s3://bucket/stele"
    )
    waits = decide(world(clusters={"flights": dataclasses.replace(FLIGHTS, ready=False)}), restore)
    assert not waits.actions and waits.busy
    assert conditions(waits)["Reconciling"] == ("True", "ClusterNotReady")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"clusters": {}}, "ClusterNotFound"),
        ({"clusters": {"flights": dataclasses.replace(FLIGHTS, masters=0)}}, "ClusterNotReady"),
        (
            {"clusters": {"flights": dataclasses.replace(FLIGHTS, spec=TabletClusterSpec(hibernate=True))}},
            "Hibernated",
        ),
        ({"tables": {}}, "GroupNotFound"),
    ],
)
def test_what_it_waits_for_is_told(more: Json, reason: str) -> None:
    waits = decide(world(**more), errand(groups=["g"]))
    assert not waits.actions and conditions(waits)["Ready"] == ("False", reason)


def test_a_spec_that_cannot_be_read_waits_for_a_human() -> None:
    stuck = decide(world(), errand(type="Half"))
    assert not stuck.actions and conditions(stuck)["Stalled"] == ("True", "InvalidSpec")


def test_progress_has_an_end_in_sight_and_a_retry_says_why() -> None:
    progress = {"rows": 10, "bytes": 5, "done": 2, "total": 8}
    error = {"error": {"code": "DISK_FULL", "message": "no space", "again": True}}
    seen = job(progress=progress, pod_started_s=NOW - 30, failed=1, last=error)
    runs = decide(world(seen), errand())
    assert runs.status is not None
    assert runs.status["progress"] == {**progress, "etaSeconds": 90}
    one = {"rows": 10, "bytes": 5, "done": 0, "total": 1, "rowsExpected": 40, "etaSeconds": 12, "holds": []}
    large = decide(world(job(progress=one, pod_started_s=NOW - 30)), errand())
    assert large.status is not None
    assert large.status["progress"] == {k: v for k, v in one.items() if k != "holds"}, "one tablet, under way"
    assert (runs.status["phase"], runs.status["attempts"], runs.status["error"]) == (
        "Running",
        2,
        "DISK_FULL: no space",
    )
    assert [s.reason for s in runs.events] == ["BackupRetried"]
    again = decide(world(seen), errand(status=runs.status))
    assert not again.events and again.status == runs.status


def test_a_retry_whose_next_try_has_ended_is_told_too() -> None:
    """Two tries failed between two passes of a busy operator, and only the end was told."""
    for state, failed, told in (
        ("failed", 2, ["BackupRetried", "BackupFailed"]),
        ("complete", 1, ["BackupRetried", "BackupComplete"]),
        ("failed", 1, ["BackupFailed"]),
        ("complete", 0, ["BackupComplete"]),
    ):
        ends = decide(world(job(state, failed=failed, ended_s=NOW)), errand(status={"attempts": 1}))
        assert [s.reason for s in ends.events] == told
    known = decide(world(job("failed", failed=2, ended_s=NOW)), errand(status={"attempts": 2}))
    assert [s.reason for s in known.events] == ["BackupFailed"]


def test_the_result_stays_whatever_becomes_of_the_job() -> None:
    result = {
        "backup": "b1",
        "kind": "full",
        "time": "2026-01-01T00:00:00Z",
        "tables": 1,
        "rows": 9,
        "bytes": 70,
        "holds": ["chain-b1"],
    }
    done = decide(world(job("complete", ended_s=NOW, last={"result": result})), errand())
    assert done.status is not None and conditions(done)["Ready"] == ("True", "Complete")
    assert {k: done.status[k] for k in ("backupID", "rows", "bytes", "holds", "durationSeconds", "type")} == {
        "backupID": "b1", "rows": 9, "bytes": 70, "holds": ["chain-b1"], "durationSeconds": 100, "type": "full",
    }  # fmt: skip
    assert decide(world(), errand(status=done.status)) == Decision()  # the Job is gone; nothing begins again


def test_what_its_hold_costs_is_told_while_it_runs_and_until_the_hold_is_gone() -> None:
    def costs(size: int, since_s: float = NOW - 100, broken: str = "") -> HoldSeen:
        return HoldSeen(size, since_s, NOW + 60, broken)

    until = "2027-01-15T08:01:00Z"
    running = job(progress={"rows": 1, "holds": ["backup-b1", "chain-b0"]})
    before = decide(world(running), errand())
    assert before.status is not None and "heldBytes" not in before.status, "nobody knows it yet"
    both = {("flights", "backup-b1"): costs(5), ("flights", "chain-b0"): costs(70)}
    runs = decide(world(running, holds=both), errand(status=before.status))
    assert runs.status is not None
    assert (runs.status["heldBytes"], runs.status["heldUntil"]) == (70, until), "the older one has it all"
    failed = decide(world(job("failed", failed=4, ended_s=NOW)), errand(status=runs.status))
    assert failed.status is not None and failed.status["heldBytes"] == 70, "the hold outlasts the Job"

    result = {"backup": "b1", "time": "2027-01-15T07:59:00Z", "holds": ["chain-b0"]}
    done = decide(world(job("complete", ended_s=NOW, last={"result": result})), errand())
    assert done.status is not None
    over = errand(status=done.status)
    assert decide(world(), over) == Decision(), "nobody knows it now"
    name, moment = ("flights", "chain-b0"), NOW - 60
    held = decide(world(holds={name: costs(7, moment)}), over)
    assert held.status == done.status | {"heldBytes": 7, "heldUntil": until} and not held.events
    over = errand(status=held.status)
    assert decide(world(holds={name: costs(7, moment)}), over) == Decision()
    for gone in (None, costs(9, moment + 30)):  # it has ended, or has moved on to a younger backup
        left = decide(world(holds={name: gone}), over)
        assert left.status is not None and left.status["heldBytes"] == 0
        assert not {"holds", "heldUntil"} & set(left.status)
        assert decide(world(holds={name: costs(9, moment)}), errand(status=left.status)) == Decision()
    broken = decide(world(holds={name: costs(0, moment, "it kept too much")}), over)
    assert broken.status is not None and broken.status["heldBytes"] == 0
    assert broken.status["holdBroken"] == "it kept too much" and "heldUntil" not in broken.status
    assert [s.reason for s in broken.events] == ["HoldBroken"]
    again = decide(world(holds={name: costs(0, moment, "it kept too much")}), errand(status=broken.status))
    assert again == Decision()


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (job("failed", reason="DeadlineExceeded"), "longer than job.deadline (6h)"),
        (job("failed", failed=4, last={"error": {"code": "NOT_FOUND", "message": "no such table t"}}), "NOT_FOUND: no such table t"),
        (job("failed", failed=1, last={"killed": "its pod ended with 137 (OOMKilled)"}), "137 (OOMKilled)"),
        (job("failed", failed=1, last={"result": {"differences": ["t has other values"]}}), "t has other values"),
    ],
)  # fmt: skip
def test_a_failure_is_told_in_words(seen: JobSeen, words: str) -> None:
    failed = decide(world(seen), errand())
    assert failed.status is not None and words in failed.status["error"]
    assert conditions(failed) == {
        "Ready": ("False", "BackupFailed"), "Reconciling": ("False", "BackupFailed"), "Stalled": ("True", "BackupFailed"),
    }  # fmt: skip


def test_the_data_go_first_and_a_refusal_holds_the_resource() -> None:
    first = decide(world(), errand(deletionPolicy="Delete"))
    assert first.actions == (Finalize((FINALIZER_BACKUP,)),)
    going = {"deletionTimestamp": "2026-01-02T00:00:00Z", "finalizers": [FINALIZER_BACKUP, "other"]}
    leaving = errand(deletionPolicy="Delete", metadata=going)
    own = job()
    assert decide(world(own), leaving).actions == (Remove("Job", own.name, own.uid),)
    asked = decide(world(), leaving)
    assert arguments(asked) == "remove --json-progress --yes --key u1 -- s3://bucket/stele"
    assert "ownerReferences" not in made(asked)["metadata"]
    removal = job("complete", "remove", last={"result": {"removed": ["b1"]}})
    gone = decide(world(removal), leaving)
    assert gone.actions == (Remove("Job", removal.name, removal.uid), Finalize(("other",)))
    refused = job("failed", "remove", ended_s=NOW, last={"error": {"message": "b2 builds on b1"}})
    held = decide(world(refused), leaving)
    assert not held.actions and conditions(held)["Stalled"] == ("True", "DataNotRemoved")
    again = decide(world(refused, now_s=NOW + REMOVE_AGAIN_S), leaving)
    assert again.actions == (Remove("Job", refused.name, refused.uid),)
    kept = errand(deletionPolicy="Retain", metadata=going)
    assert decide(world(refused), kept).actions[-1] == Finalize(("other",))


def test_a_job_is_read_from_what_kubernetes_says() -> None:
    message = '{"error":{"code":"DISK_FULL","message":"full","again":true}}\n'
    ended = {"exitCode": 75, "reason": "Error", "message": message, "finishedAt": "2026-01-01T00:01:00Z"}
    pods = [
        {"metadata": {"name": "p1", "creationTimestamp": "2026-01-01T00:00:00Z"},
         "status": {"phase": "Failed", "containerStatuses": [{"state": {"terminated": ended}}]}},
        {"metadata": {"name": "p2", "creationTimestamp": "2026-01-01T00:02:00Z"},
         "status": {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull", "message": "no"}}}]}},
    ]  # fmt: skip
    raw = {
        "metadata": {"name": "j", "uid": "u", "resourceVersion": "1"},
        "status": {"failed": 1, "active": 1},
    }
    seen = seen_job(raw, pods, NOW)
    assert (seen.state, seen.failed, seen.last["error"]["code"]) == ("running", 1, "DISK_FULL")
    assert seen.waits == "ErrImagePull: no"
    raw["status"] = {
        "failed": 1,
        "conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}],
    }
    assert seen_job(raw, pods[:1], NOW).state == "failed"
    assert last_line('noise\n{"a":1}\n{"b":2}\n{cut') == {"b": 2}


@pytest.mark.parametrize("good", ["p1", "p2"])
def test_of_two_ends_in_one_second_the_good_one_is_what_a_backup_says(good: str) -> None:
    """Kubernetes tells seconds. A pod was killed and its successor done within one: the status had no rows."""
    states: dict[bool, Json] = {
        False: {"exitCode": 137, "reason": "Error", "finishedAt": "2026-01-01T00:01:00Z"},
        True: {"exitCode": 0, "message": '{"backup":"b","rows":5}', "finishedAt": "2026-01-01T00:01:00Z"},
    }
    pods = [
        {"metadata": {"name": name, "creationTimestamp": "2026-01-01T00:00:00Z"},
         "status": {"containerStatuses": [{"state": {"terminated": states[name == good]}}]}}
        for name in ("p1", "p2")
    ]  # fmt: skip
    raw = {
        "metadata": {"name": "j", "uid": "u", "resourceVersion": "1"},
        "status": {"failed": 1, "conditions": [{"type": "Complete", "status": "True"}]},
    }
    assert seen_job(raw, pods, NOW).last == {"backup": "b", "rows": 5}
