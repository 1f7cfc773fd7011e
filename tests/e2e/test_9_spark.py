"""A backup and a restore by Spark: its driver in the Job's pod makes pods for executors, by the rights that the chart gives it."""

from __future__ import annotations

import os
import shlex
from typing import Any

from kubernetes import client

from examples.demo.outside import image, run
from tests.e2e.bench import NAMESPACE, Bench, Json
from tests.e2e.test_9_backups import CLUSTER_REF, create, ended, pod_of, status
from tests.e2e.test_9_backups import folder as folder

ACCOUNT = "stele-spark"
EXECUTORS = "spark-role=executor"
SPARK: Json = {
    "image": image("spark"),
    "executors": 2,
    # Driver and executors share the machine of the volume, which may have two cores.
    "conf": {"spark.executor.memory": "512m", "spark.kubernetes.executor.request.cores": "100m"},
}
JOB: Json = {"serviceAccountName": ACCOUNT, "backoffLimit": 0, "deadline": "15m"}


def seen(bench: Bench, kind: str, name: str) -> list[Any]:
    """The pods of the executors once all run. Notes what their driver said if it ended before."""

    def run_all() -> bool:
        if status(bench, kind, name).get("phase") in ("Succeeded", "Failed"):
            raise AssertionError(f"{name} ended before its executors ran: {status(bench, kind, name)}")
        return sum(p.status.phase == "Running" for p in bench.kube.pods(EXECUTORS)) == SPARK["executors"]

    bench.until(f"the executors of {name} run", run_all, 240)
    return bench.kube.pods(EXECUTORS)


def test_executors_in_pods_back_up_and_restore(bench: Bench, folder: Json) -> None:
    if load := shlex.split(os.environ.get("STELE_IMAGE_LOAD", "")):
        run([*load, image("spark")], 1800)
    bench.have(fresh=True)
    loaded = bench.program("load")
    bench.place.upgrade(f"spark.serviceAccount={ACCOUNT}")
    create(bench, "TabletBackup", "large", clusterRef=CLUSTER_REF, target=folder, spark=SPARK, job=JOB)
    for pod in seen(bench, "TabletBackup", "large"):
        assert pod.spec.automount_service_account_token is False and pod.spec.service_account_name != ACCOUNT
        assert not [v for v in pod.spec.volumes if v.projected or v.secret]
        assert pod.spec.security_context.run_as_non_root
    driver = pod_of(bench, status(bench, "TabletBackup", "large")["job"])
    assert driver.spec.service_account_name == ACCOUNT
    large = ended(bench, "TabletBackup", "large", 600)
    assert (large["phase"], large["rows"], large["attempts"]) == ("Succeeded", loaded["rows"], 1), large
    bench.until("the executors are gone", lambda: not bench.kube.pods(EXECUTORS))
    renamed = [{"name": "flights", "newName": "copy"}]
    create(
        bench, "TabletRestore", "back", clusterRef=CLUSTER_REF, source=folder, tables=renamed, spark=SPARK, job=JOB
    )  # fmt: skip
    seen(bench, "TabletRestore", "back")
    back = ended(bench, "TabletRestore", "back", 600)
    assert (back["phase"], back["verified"]) == ("Succeeded", True), back
    bench.compare(loaded, table="copy")
    rights(bench)


def rights(bench: Bench) -> None:
    """Asked of the API server: what the driver's account may do."""
    reviews: Any = client.AuthorizationV1Api(bench.api)

    def may(verb: str, resource: str, namespace: str = NAMESPACE) -> bool:
        name, _, group = resource.partition(".")
        asked = {"verb": verb, "resource": name, "group": group, "namespace": namespace}
        user = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"
        spec = {"user": user, "groups": ["system:authenticated"], "resourceAttributes": asked}
        return bool(reviews.create_subject_access_review({"spec": spec}).status.allowed)

    assert may("create", "pods") and may("delete", "pods")
    more = [("get", "secrets"), ("create", "services"), ("patch", "pods"), ("create", "jobs.batch")]
    more += [("list", "tabletclusters.stele.dev"), ("create", "tabletbackups.stele.dev")]
    assert [asked for asked in more if may(*asked)] == []
    assert not may("create", "pods", "default")
