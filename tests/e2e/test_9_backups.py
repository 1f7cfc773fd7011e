"""Backups, restores, schedules and drills by resources, on a volume that the Jobs mount; a machine lost in the middle of one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from examples.demo.kube import condition
from tests.e2e.bench import ERRANDS, NAMESPACE, Bench, Json

CLAIM = "backups"
CLUSTER_REF = {"name": "flights"}
SLOW = {"resources": {"limits": {"cpu": "200m"}}, "deadline": "30m"}
"""A Job that takes long enough for something to happen meanwhile."""


@pytest.fixture
def folder(bench: Bench) -> Iterator[Json]:
    """A folder of a volume, as a target. Neither the volume nor the resources of backups are left."""
    volume = {
        "metadata": {"name": CLAIM},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    bench.core.create_namespaced_persistent_volume_claim(NAMESPACE, volume)
    try:
        yield {"claimName": CLAIM, "path": "stele/flights"}
    finally:
        bench.power.restore()
        for kind in reversed(ERRANDS):
            for name in bench.names(kind):
                if kind == "TabletBackup":
                    change(bench, name, {"deletionPolicy": "Retain"})
                delete(bench, kind, name)
            bench.until(f"no {kind} is left", lambda kind=kind: not bench.names(kind))
        bench.core.delete_namespaced_persistent_volume_claim(CLAIM, NAMESPACE)


def create(bench: Bench, kind: str, name: str, **spec: Any) -> None:
    body = {
        "apiVersion": "stele.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": spec,
    }
    bench.custom.create_namespaced_custom_object(*bench.where(kind), body)


def delete(bench: Bench, kind: str, name: str) -> None:
    """One that is gone is as good."""
    try:
        bench.custom.delete_namespaced_custom_object(*bench.where(kind), name)
    except ApiException as exc:
        if exc.status != 404:
            raise


def change(bench: Bench, name: str, spec: Json, kind: str = "TabletBackup") -> None:
    try:
        bench.custom.patch_namespaced_custom_object(*bench.where(kind), name, {"spec": spec})
    except ApiException as exc:
        if exc.status != 404:
            raise


def status(bench: Bench, kind: str, name: str) -> Json:
    found: Json = bench.custom.get_namespaced_custom_object(*bench.where(kind), name)
    return found.get("status") or {}


def ended(bench: Bench, kind: str, name: str, seconds: float = 300.0) -> Json:
    """The status of a TabletBackup or TabletRestore once it has ended."""

    def over() -> bool:
        return status(bench, kind, name).get("phase") in ("Succeeded", "Failed")

    bench.until(f"{kind} {name} has ended", over, seconds)
    found = status(bench, kind, name)
    bench.note(f"          {condition(found, 'Ready')['message']}")
    return found


def pod_of(bench: Bench, job: str) -> Any:
    """The newest pod of a Job, or None."""
    pods = bench.kube.pods(f"job-name={job}")
    return max(pods, key=lambda p: p.metadata.creation_timestamp, default=None)


def tables(bench: Bench) -> str:
    """The tables that there are, as `stele table list` has them."""
    master = bench.pods("master")[0].metadata.name
    return bench.execute(master, "stele", "table", "list", "--masters", f"flights-masters.{NAMESPACE}:7051")


def test_full_and_incremental_restored_and_removed(bench: Bench, folder: Json) -> None:
    bench.have(fresh=True)
    loaded = bench.program("load")
    create(
        bench, "TabletBackup", "one", clusterRef=CLUSTER_REF, groups=["flights"], target=folder, type="Auto",
        deletionPolicy="Delete",
    )  # fmt: skip
    one = ended(bench, "TabletBackup", "one")
    assert (one["phase"], one["type"], one["rows"]) == ("Succeeded", "full", loaded["rows"]), one
    bench.note(f"          {bench.columns('TabletBackup', 'one')}")
    pod = pod_of(bench, one["job"])
    assert pod.spec.automount_service_account_token is False
    assert not [v for v in pod.spec.volumes if v.projected or v.secret]
    assert pod.spec.security_context.run_as_non_root and "stele.dev/cluster" not in pod.metadata.labels

    stream = bench.stream()
    streamed = bench.written(stream)
    create(
        bench, "TabletBackup", "two", clusterRef=CLUSTER_REF, groups=["flights"], target=folder,
        type="Incremental", deletionPolicy="Delete",
    )  # fmt: skip
    two = ended(bench, "TabletBackup", "two")
    assert (two["phase"], two["type"], two["rows"]) == ("Succeeded", "incremental", streamed["rows"]), two
    assert two["base"] == one["backupID"]
    renamed = [{"name": "flights", "newName": "copy"}]
    create(bench, "TabletRestore", "back", clusterRef=CLUSTER_REF, source=folder, tables=renamed)
    back = ended(bench, "TabletRestore", "back")
    assert (back["phase"], back["verified"]) == ("Succeeded", True), back
    bench.compare(loaded, streamed, table="copy")
    create(bench, "TabletRestore", "taken", clusterRef=CLUSTER_REF, source=folder)
    taken = ended(bench, "TabletRestore", "taken")
    assert (taken["phase"], taken["attempts"]) == ("Failed", 1) and "exists already" in taken["error"], taken

    delete(bench, "TabletBackup", "one")

    def held() -> bool:
        stalled = condition(status(bench, "TabletBackup", "one"), "Stalled")
        return bool(stalled["reason"] == "DataNotRemoved" and two["backupID"] in stalled["message"])

    bench.until("it stays while another backup builds on it, and says so", held)
    delete(bench, "TabletBackup", "two")
    bench.until("the other goes after its data", lambda: "two" not in bench.names("TabletBackup"))
    change(bench, "one", {"deletionPolicy": "Retain"})
    bench.until("the first goes without its data", lambda: "one" not in bench.names("TabletBackup"))
    create(bench, "TabletRestore", "first", clusterRef=CLUSTER_REF, source=folder,
           tables=[{"name": "flights", "newName": "first"}])  # fmt: skip
    first = ended(bench, "TabletRestore", "first")
    assert (first["phase"], first["backupID"]) == ("Succeeded", one["backupID"]), first
    bench.compare(loaded, table="first")


def test_a_node_is_lost_in_the_middle_of_a_backup(bench: Bench, folder: Json) -> None:
    """Its leaders' rows are read from others. Nothing is tried again, and no row is missing."""
    bench.have(fresh=True)
    loaded = bench.program("load")
    create(bench, "TabletBackup", "slow", clusterRef=CLUSTER_REF, target=folder, job=SLOW)
    bench.until("rows are written", lambda: rows_so_far(bench, "slow") > 0, 240)
    pod = pod_of(bench, status(bench, "TabletBackup", "slow")["job"])
    masters = {p.spec.node_name for p in bench.pods("master")}
    operators = {p.spec.node_name for p in bench.operators()}
    others = sorted({p.spec.node_name for p in bench.pods("node")} - {pod.spec.node_name})
    machine = min(others, key=lambda m: (m in masters) + (m in operators))
    bench.power("off", machine)
    so_far = status(bench, "TabletBackup", "slow")
    assert so_far["phase"] == "Running", "it ended before the machine was off"
    bench.note(f"          {machine} off after {rows_so_far(bench, 'slow'):,} of {loaded['rows']:,} rows")
    slow = ended(bench, "TabletBackup", "slow", 600)
    assert (slow["phase"], slow["rows"], slow["attempts"]) == ("Succeeded", loaded["rows"], 1), slow
    bench.power("on", machine)
    bench.machines_ready()
    bench.until("whole again", bench.whole, 300)
    renamed = [{"name": "flights", "newName": "copy"}]
    create(bench, "TabletRestore", "back", clusterRef=CLUSTER_REF, source=folder, tables=renamed)
    assert ended(bench, "TabletRestore", "back")["verified"]
    bench.compare(loaded, table="copy")


def rows_so_far(bench: Bench, name: str) -> int:
    """Rows that a running backup has written, as its status has them."""
    return int((status(bench, "TabletBackup", name).get("progress") or {}).get("rows") or 0)


def test_the_machine_of_a_job_is_lost_and_comes_back(bench: Bench, folder: Json) -> None:
    """The volume is on that machine, so the Job waits for it and goes on. Other resources are served meanwhile."""
    bench.have(fresh=True, patient=True)
    loaded = bench.program("load")
    create(bench, "TabletBackup", "slow", clusterRef=CLUSTER_REF, target=folder, job=SLOW)
    bench.until("rows are written", lambda: rows_so_far(bench, "slow") > 0, 240)
    first = pod_of(bench, status(bench, "TabletBackup", "slow")["job"])
    machine = first.spec.node_name
    bench.power("off", machine)
    started = time.monotonic()
    create(bench, "TabletBackup", "other", clusterRef={"name": "nobody"}, target=folder)

    def served() -> bool:
        reason = condition(status(bench, "TabletBackup", "other"), "Reconciling")["reason"]
        return bool(reason == "ClusterNotFound")

    bench.until("another resource is looked at while the machine is off", served, 60)

    def tried_again() -> bool:
        pod = pod_of(bench, status(bench, "TabletBackup", "slow")["job"])
        return pod is not None and pod.metadata.uid != first.metadata.uid

    bench.until("the next try begins", tried_again, 400)
    bench.note(f"          {time.monotonic() - started:.0f} s after its machine was lost")

    def waits() -> bool:
        message = condition(status(bench, "TabletBackup", "slow"), "Reconciling")["message"]
        return "its pod does not start" in message

    bench.until("it says why it waits", waits, 60)
    bench.note(f"          {condition(status(bench, 'TabletBackup', 'slow'), 'Reconciling')['message']}")
    bench.power("on", machine)
    bench.machines_ready()
    slow = ended(bench, "TabletBackup", "slow", 600)
    assert (slow["phase"], slow["rows"]) == ("Succeeded", loaded["rows"]), slow
    assert bench.told("BackupRetried") or slow["attempts"] >= 1
    renamed = [{"name": "flights", "newName": "copy"}]
    create(bench, "TabletRestore", "back", clusterRef=CLUSTER_REF, source=folder, tables=renamed)
    assert ended(bench, "TabletRestore", "back")["verified"]
    bench.compare(loaded, table="copy")


def test_a_schedule_drills_and_a_lost_cluster_is_restored(bench: Bench, folder: Json) -> None:
    """A backup each minute and a drill of it. Then the cluster goes with all volumes, and comes back from the folder."""
    bench.have(fresh=True)
    loaded = bench.program("load")
    body = {"clusterRef": CLUSTER_REF, "type": "Auto", "target": folder, "retention": {"keepFull": 1}}
    create(
        bench, "TabletBackupSchedule", "often", schedule="* * * * *", drill={"schedule": "* * * * *"},
        historyLimit={"succeeded": 2}, backup=body,
    )  # fmt: skip

    def told() -> Json:
        return status(bench, "TabletBackupSchedule", "often")

    bench.until("a backup was made", lambda: "lastSuccess" in told(), 240)
    assert (told()["lastSuccess"]["type"], told()["lastSuccess"]["rows"]) == ("full", loaded["rows"])
    bench.until("a drill has passed", lambda: condition(told(), "Drilled")["reason"] == "DrillPassed", 400)
    bench.note(f"          {condition(told(), 'Drilled')['message']}")
    assert told()["drill"]["rows"] == loaded["rows"]
    bench.until(
        "an incremental one follows",
        lambda: told()["lastSuccess"]["type"] == "incremental" and not told()["active"],
        240,
    )
    bench.note(f"          {bench.columns('TabletBackupSchedule', 'often')}")
    change(bench, "often", {"suspend": True}, "TabletBackupSchedule")
    bench.until("it is suspended", lambda: condition(told(), "Ready")["reason"] == "Suspended")
    bench.until("no Job runs", lambda: not jobs_that_run(bench))
    assert ".drill-" not in tables(bench)
    delete(bench, "TabletBackupSchedule", "often")
    bench.until("its TabletBackups go with it", lambda: not bench.names("TabletBackup"))

    bench.clear()
    bench.apply("cluster")
    create(bench, "TabletRestore", "all", clusterRef=CLUSTER_REF, source=folder)
    restored = ended(bench, "TabletRestore", "all", 600)
    assert (restored["phase"], restored["rows"]) == ("Succeeded", loaded["rows"]), restored
    bench.apply("flights")
    bench.until("the TabletGroup has taken the table over", lambda: bench.ready("TabletGroup"))
    assert condition(bench.kube.status("TabletGroup", "flights"), "Stalled")["status"] == "False"
    bench.compare(loaded)


def jobs_that_run(bench: Bench) -> list[str]:
    batch: Any = client.BatchV1Api(bench.api)
    jobs = batch.list_namespaced_job(NAMESPACE, label_selector="stele.dev/errand").items
    return [j.metadata.name for j in jobs if j.status.active]


def test_the_rights_are_those_that_are_used(bench: Bench) -> None:
    """Asked of the API server: what the operator's account may do, and that a Job's account may do nothing."""
    (operator,) = bench.operators()
    account = f"system:serviceaccount:{NAMESPACE}:{operator.spec.service_account_name}"
    job = f"system:serviceaccount:{NAMESPACE}:default"
    reviews: Any = client.AuthorizationV1Api(bench.api)

    def may(user: str, verb: str, resource: str, namespace: str = NAMESPACE) -> bool:
        name, _, sub = resource.partition("/")
        name, _, group = name.partition(".")
        asked = {"verb": verb, "resource": name, "group": group, "subresource": sub, "namespace": namespace}
        spec = {"user": user, "groups": ["system:authenticated"], "resourceAttributes": asked}
        return bool(reviews.create_subject_access_review({"spec": spec}).status.allowed)

    used = [
        ("create", "jobs.batch"),
        ("delete", "jobs.batch"),
        ("get", "pods/log"),
        ("create", "tabletbackups.stele.dev"),
    ]
    more = [
        *(("get", "secrets"), ("list", "secrets"), ("create", "pods/exec"), ("patch", "jobs.batch")),
        *(("patch", "tabletclusters.stele.dev"), ("delete", "tabletclusters.stele.dev")),
        *(("create", "tabletrestores.stele.dev"), ("delete", "tabletgroups.stele.dev")),
        *(("create", "roles.rbac.authorization.k8s.io"), ("create", "serviceaccounts/token")),
    ]
    assert [asked for asked in used if not may(account, *asked)] == []
    assert [asked for asked in more if may(account, *asked)] == []
    assert [asked for asked in used if may(account, *asked, "default")] == []
    assert [asked for asked in [*used, *more] if may(job, *asked)] == []
