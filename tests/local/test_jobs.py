"""Jobs: one pod at a time, tried again up to a limit, ended by a deadline or an exit code; failed pods stay."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stele_local import processes
from stele_local.cluster import LocalCluster
from stele_local.kinds import JOB, POD
from stele_local.registry import DeleteOptions
from stele_local.status import ApiError
from tests.local.conftest import SETTINGS, until

Json = dict[str, Any]
SLEEP = "import time; print('up', flush=True); time.sleep(600)"


def job(name: str, code: str, **spec: Any) -> Json:
    """A Job that runs Python code."""
    container = {"name": "main", "image": "stele/node:dev", "command": ["python", "-c", code]}
    pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}
    return {"metadata": {"name": name}, "spec": {"template": {"spec": pod}, **spec}}


def status(cluster: LocalCluster, name: str) -> Json:
    found: Json = cluster.registry.get(JOB, "default", name).get("status") or {}
    return found


def over(cluster: LocalCluster, name: str) -> tuple[str, str]:
    """(Complete or Failed, why) of a Job that has ended; else empty."""
    for condition in status(cluster, name).get("conditions") or ():
        if condition["type"] in ("Complete", "Failed"):
            return condition["type"], condition["reason"]
    return "", ""


def phases(cluster: LocalCluster) -> list[str]:
    return sorted(p["status"]["phase"] for p in cluster.store.objects(POD.key))


async def test_a_job_runs_once_and_its_pod_stays_until_the_job_is_deleted(cluster: LocalCluster) -> None:
    made = cluster.registry.create(JOB, "default", job("a", "print('done')")).obj
    assert (made["spec"]["backoffLimit"], made["spec"]["podReplacementPolicy"]) == (6, "TerminatingOrFailed")
    await until(lambda: over(cluster, "a") == ("Complete", "CompletionsReached"), "it is complete")
    told = status(cluster, "a")
    assert (told["succeeded"], told["ready"], "failed" in told, "active" in told) == (1, 0, False, False)
    assert told["completionTime"] >= told["startTime"]
    (pod,) = cluster.store.objects(POD.key)
    assert pod["metadata"]["labels"]["batch.kubernetes.io/job-name"] == "a"
    assert pod["metadata"]["name"].startswith("a-") and phases(cluster) == ["Succeeded"]
    cluster.registry.delete(JOB, "default", "a", DeleteOptions())
    await until(lambda: not cluster.store.objects(POD.key), "its pod goes with it")


async def test_it_is_tried_again_up_to_the_limit_and_all_failed_pods_stay(cluster: LocalCluster) -> None:
    cluster.registry.create(JOB, "default", job("a", "raise SystemExit(75)", backoffLimit=2))
    await until(lambda: over(cluster, "a") == ("Failed", "BackoffLimitExceeded"), "it has failed")
    assert status(cluster, "a")["failed"] == 3 and phases(cluster) == ["Failed"] * 3
    await asyncio.sleep(1.5)
    assert len(cluster.store.objects(POD.key)) == 3


async def test_an_exit_code_of_the_policy_ends_it_at_once(cluster: LocalCluster) -> None:
    rules = [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2, 5]}}]
    cluster.registry.create(
        JOB, "default", job("a", "raise SystemExit(2)", podFailurePolicy={"rules": rules})
    )
    await until(lambda: over(cluster, "a") == ("Failed", "PodFailurePolicy"), "it has failed")
    (told,) = [c["message"] for c in status(cluster, "a")["conditions"] if c["type"] == "Failed"]
    assert "exit code 2 matching FailJob rule at index 0" in told
    assert phases(cluster) == ["Failed"]


async def test_a_deadline_ends_what_is_stuck(cluster: LocalCluster) -> None:
    cluster.registry.create(JOB, "default", job("a", SLEEP, activeDeadlineSeconds=1))
    await until(lambda: over(cluster, "a") == ("Failed", "DeadlineExceeded"), "its time is over")
    await until(lambda: not processes.left_over(cluster.folder), "its process is gone")


async def test_a_pod_that_is_killed_or_deleted_is_replaced_and_counted(cluster: LocalCluster) -> None:
    cluster.registry.create(JOB, "default", job("a", SLEEP))

    def running() -> Json | None:
        pods = [p for p in cluster.store.objects(POD.key) if p["status"]["phase"] == "Running"]
        return pods[0] if len(pods) == 1 else None

    first = await until(running, "it runs")
    pid = int(first["status"]["containerStatuses"][0]["containerID"].removeprefix("process://"))
    os.kill(pid, signal.SIGKILL)
    second = await until(lambda: (p := running()) and p != first and p, "it runs again")
    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    name = second["metadata"]["name"]
    cluster.registry.delete(POD, "default", name, DeleteOptions(grace_seconds=1))
    await until(lambda: (p := running()) and p["metadata"]["name"] != name and p, "and once more")
    await until(lambda: status(cluster, "a").get("failed") == 2, "both are counted")
    assert phases(cluster) == ["Failed", "Running"]  # the deleted one is gone


async def test_what_is_counted_survives_a_restart_of_the_cluster(tmp_path: Path) -> None:
    """With the machine off, a pod is not run again: it was deleted while nobody looked."""
    async with LocalCluster(tmp_path, SETTINGS) as cluster:
        cluster.registry.create(JOB, "default", job("a", "raise SystemExit(75)", backoffLimit=1))
        await until(lambda: over(cluster, "a")[0] == "Failed", "it has failed")
    async with LocalCluster(tmp_path, SETTINGS) as again:
        await asyncio.sleep(1.5)
        assert status(again, "a")["failed"] == 2 and len(again.store.objects(POD.key)) == 2


async def test_what_a_real_api_server_refuses_is_refused(cluster: LocalCluster) -> None:
    always = job("a", "print(1)")
    always["spec"]["template"]["spec"]["restartPolicy"] = "Always"
    with pytest.raises(ApiError, match='Unsupported value: "Always"'):
        cluster.registry.create(JOB, "default", always)
    with pytest.raises(ApiError, match="completions of a Job other than 1"):
        cluster.registry.create(JOB, "default", job("a", "print(1)", completions=2))
    cluster.registry.create(JOB, "default", job("a", SLEEP))
    with pytest.raises(ApiError, match="field is immutable"):
        cluster.registry.patch(
            JOB, "default", "a", {"spec": {"template": {"metadata": {"labels": {"x": "y"}}}}}
        )
    cluster.registry.patch(JOB, "default", "a", {"spec": {"activeDeadlineSeconds": 600}})


async def test_a_deletion_by_http_keeps_the_pods_unless_it_says_otherwise(cluster: LocalCluster) -> None:
    """As the API has it for Jobs alone; kubectl asks for Background."""
    headers = {"Authorization": f"Bearer {cluster.token}"}
    path = f"{cluster.url}/apis/batch/v1/namespaces/default/jobs"
    async with aiohttp.ClientSession(headers=headers) as session:
        for name, body, left in (("a", {}, 1), ("b", {"propagationPolicy": "Background"}, 1)):
            cluster.registry.create(JOB, "default", job(name, "print('done')"))
            await until(lambda name=name: over(cluster, name)[0] == "Complete", "it is complete")
            async with session.delete(f"{path}/{name}", json=body) as answer:
                assert answer.status == 200
            await until(lambda name=name: not cluster.registry.find(JOB, "default", name), "it is gone")
            await until(lambda left=left: len(cluster.store.objects(POD.key)) == left, "only a's pod is left")
