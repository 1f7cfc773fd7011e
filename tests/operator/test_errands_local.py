"""The task for backups on stele_local, with real Jobs and the chart's rights, but without a cluster: what fails, and what needs none."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stele import backup
from stele.backup.folder import Folder
from stele.backup.manifest import MANIFEST, Manifest
from stele_operator import errands, metrics
from stele_operator.errands import Errands
from stele_operator.kube import Kube, configuration
from stele_operator.report import Reporter
from tests.backup.tables import made_by_hand
from tests.operator.cluster import Bench, bench

Json = dict[str, Any]


@asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[Bench]:
    """A Kubernetes with a TabletCluster that seems to serve, and the task in this process."""
    async with bench(tmp_path, machines=1) as made:
        await made.apply("cluster")
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "Writable",
            "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        status = {"status": {"readyMasters": 3, "conditions": [ready]}}
        await made.kube.patch("TabletCluster", "default", "flights", status, "status")
        kube = Kube(await configuration(str(made._kubeconfig)))
        task = asyncio.create_task(
            Errands(kube, Reporter(kube, "test"), ("default",), "stele:1", lambda *_: None).run_for_ever()
        )
        try:
            yield made
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await kube.close()


async def create(made: Bench, kind: str, name: str, **spec: Any) -> Json:
    body = {"apiVersion": "stele.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}
    return await made.kube.create(kind, "default", body)


async def status(made: Bench, kind: str, name: str) -> Json:
    found = await made.kube.get(kind, "default", name)
    return (found or {}).get("status") or {}


async def test_what_cannot_be_is_tried_told_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "backups"
    target = {"uri": f"file://{folder}"}
    async with served(tmp_path) as made:
        cluster, once = {"name": "flights"}, {"backoffLimit": 1}
        one = await create(
            made, "TabletBackup", "one", clusterRef=cluster, target=target, job=once, deletionPolicy="Delete"
        )
        await create(
            made, "TabletRestore", "lost", clusterRef=cluster, source={"uri": f"file://{tmp_path}/nowhere"}
        )

        async def ended() -> bool:
            both = [
                await status(made, kind, name)
                for kind, name in (("TabletBackup", "one"), ("TabletRestore", "lost"))
            ]
            return [s.get("phase") for s in both] == ["Failed", "Failed"]

        await made.until("both have failed", ended, 500)
        told = await status(made, "TabletBackup", "one")
        assert told["attempts"] == 2 and told["error"].startswith("UNAVAILABLE: "), told
        assert (await made.condition("TabletBackup", "one", "Stalled"))[:2] == ("True", "BackupFailed")
        series = {"namespace": "default", "kind": "TabletBackup", "name": "one", "type": "Stalled"}
        labels = series | {"reason": "BackupFailed"}
        assert metrics.registry.get_sample_value("stele_operator_backup_condition", labels) == 1
        lost = await status(made, "TabletRestore", "lost")
        assert lost["attempts"] == 1 and "nowhere: there is no such folder" in lost["error"], lost
        reasons = {e["reason"] for e in await made.events("TabletBackup")}
        assert {"BackupBegan", "BackupRetried", "BackupFailed"} <= reasons

        # A complete backup of this key lies there, made before the pod was killed: it goes with its resource.
        by_hand = made_by_hand(folder)
        manifest = dataclasses.replace(by_hand, key=one["metadata"]["uid"])
        Folder.at(folder).put(f"{by_hand.backup_id}/{MANIFEST}", manifest.sealed())
        (found,) = backup.list_backups(folder)
        assert isinstance(found.manifest, Manifest) and found.manifest.key
        made_by_hand(folder)  # another one stays
        await made.kube.delete("TabletBackup", "default", "one", one["metadata"]["uid"], "")

        async def gone() -> bool:
            return "one" not in await made.names("TabletBackup")

        await made.until("it goes after its data", gone, 500)

        async def unseen() -> bool:
            return metrics.registry.get_sample_value("stele_operator_backup_condition", labels) is None

        await made.until("its series go", unseen, 60)
        (left,) = backup.list_backups(folder)
        assert left.manifest is not None and not left.manifest.key
        assert not [name for name in await made.names("Job") if "remove" in name]


async def test_a_schedule_makes_what_is_due_and_tells_what_was_missed(tmp_path: Path) -> None:
    async with served(tmp_path) as made:
        body = {"clusterRef": {"name": "nobody"}, "type": "Auto", "target": {"uri": f"file://{tmp_path}/b"}}
        await create(
            made,
            "TabletBackupSchedule",
            "yearly",
            schedule="0 0 1 1 *",
            startingDeadline="3650d",
            backup=body,
        )

        async def waits() -> bool:
            return (await made.condition("TabletBackupSchedule", "yearly", "Ready"))[:2] == (
                "True",
                "Scheduled",
            )

        await made.until("it waits for its first time", waits, 300)
        before = {"status": {"lastScheduleTime": "2024-06-01T00:00:00Z"}}
        await made.kube.patch("TabletBackupSchedule", "default", "yearly", before, "status")

        async def began() -> bool:
            return bool((await status(made, "TabletBackupSchedule", "yearly")).get("active"))

        await made.until("a backup begins", began, 300)
        told = await status(made, "TabletBackupSchedule", "yearly")
        assert told["missed"] >= 1 and told["lastScheduleTime"].endswith("-01-01T00:00:00Z"), told
        (name,) = await made.names("TabletBackup")
        assert name == told["active"][0]
        made_one = await made.kube.get("TabletBackup", "default", name)
        assert made_one is not None and made_one["spec"]["holdFor"].endswith("s")

        async def explained() -> bool:
            return (await made.condition("TabletBackup", name, "Reconciling"))[1] == "ClusterNotFound"

        await made.until("it says what it waits for", explained, 300)
        assert "ScheduleMissed" in {e["reason"] for e in await made.events("TabletBackupSchedule")}


async def test_a_machine_that_is_off_stops_no_other_resource(tmp_path: Path) -> None:
    """The log of a Job's pod cannot be read then, so its progress is unknown. That is all."""
    async with served(tmp_path) as made:
        target = {"uri": f"file://{tmp_path}/backups"}
        await create(made, "TabletBackup", "one", clusterRef={"name": "flights"}, target=target)

        async def runs() -> bool:
            phases = [p["status"].get("phase") for p in await made.kube.list("Pod", "default")]
            return phases == ["Running"]

        await made.until("its Job runs", runs, 300)
        await made.local.off("n1")
        await create(made, "TabletBackup", "two", clusterRef={"name": "nobody"}, target=target)

        async def explained() -> bool:
            return (await made.condition("TabletBackup", "two", "Reconciling"))[1] == "ClusterNotFound"

        await made.until("the other one is looked at", explained, 300)
        assert await runs(), "its pod still seems to run"


async def test_a_pod_of_a_machine_that_is_gone_makes_room_for_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes keeps a Job's pod by a finalizer until it has ended, and its machine cannot tell that."""
    monkeypatch.setattr(errands, "_HANGS_AFTER_S", 1.0)
    async with served(tmp_path) as made:
        target = {"uri": f"file://{tmp_path}/backups"}
        await create(made, "TabletBackup", "one", clusterRef={"name": "flights"}, target=target)

        async def pods() -> list[Json]:
            return await made.kube.list("Pod", "default")

        async def runs() -> bool:
            return [p["status"].get("phase") for p in await pods()] == ["Running"]

        await made.until("its Job runs", runs, 300)
        (pod,) = await pods()
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        tracked = {"metadata": {"finalizers": ["batch.kubernetes.io/job-tracking"]}}
        await made.kube.patch("Pod", "default", name, tracked)
        await made.local.off("n1")
        await made.kube.delete("Pod", "default", name, uid, "")  # as Kubernetes evicts it

        async def replaced() -> bool:
            there = await pods()
            return bool(there) and uid not in {p["metadata"]["uid"] for p in there}

        await made.until("another pod waits for a machine", replaced, 300)
