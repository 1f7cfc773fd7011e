"""Backups, restores, schedules and drills by resources: a real cluster, real Jobs, a folder of this machine."""

from __future__ import annotations

import asyncio
import datetime
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import stele
from stele import backup
from stele.client import AsyncClient
from stele_local.kinds import POD
from tests.operator.cluster import Bench, bench
from tests.operator.test_whole import COLUMNS, HASH, masters, ready

Json = dict[str, Any]
ROWS = 5_000


def resource(kind: str, name: str, **spec: Any) -> Json:
    return {
        "apiVersion": "stele.dev/v1alpha1", "kind": kind, "metadata": {"name": name},
        "spec": spec,
    }  # fmt: skip


async def status(made: Bench, kind: str, name: str) -> Json:
    found = await made.kube.get(kind, "default", name)
    return (found or {}).get("status") or {}


async def create(made: Bench, kind: str, name: str, **spec: Any) -> Json:
    return await made.kube.create(kind, "default", resource(kind, name, **spec))


async def ended(made: Bench, kind: str, name: str, seconds: float = 500.0) -> Json:
    """The status of a TabletBackup or TabletRestore once it has ended."""

    async def over() -> bool:
        return (await status(made, kind, name)).get("phase") in ("Succeeded", "Failed")

    await made.until(f"{kind} {name} has ended", over, seconds)
    return await status(made, kind, name)


async def write(made: Bench, begin: int, count: int) -> None:
    ids = range(begin, begin + count)
    batch = pa.table({"id": pa.array(ids, pa.int64()), "text": [f"row {i}" for i in ids]})
    async with AsyncClient(",".join(await masters(made))) as client:
        await (await client.open_table("flights")).write_arrow(batch)


async def rows(made: Bench, table: str) -> list[Json]:
    async with AsyncClient(",".join(await masters(made))) as client:
        scan = (await client.open_table(table)).scan()
        found = [row async for batch in scan.batches() for row in batch.to_pylist()]
        return sorted(found, key=lambda row: row["id"])


async def partitioning(made: Bench, table: str) -> Any:
    async with AsyncClient(",".join(await masters(made))) as client:
        return (await client.describe(table)).partitioning


async def tables(made: Bench) -> set[str]:
    async with AsyncClient(",".join(await masters(made))) as client:
        return {info.name for info in await client.list_tables()}


@asynccontextmanager
async def filled(tmp_path: Path) -> AsyncIterator[Bench]:
    """A cluster of three nodes with one table of rows."""
    async with bench(tmp_path) as made:
        await made.start()
        small = {"storage": {"size": "1Gi"}}
        await made.apply("cluster", masters={"replicas": 1, **small}, nodes={"replicas": 3, **small})
        await made.apply("flights", columns=COLUMNS, primaryKey=["id"], partitioning=HASH)
        await made.until("the cluster is Ready", lambda: ready(made, "TabletCluster"), 600)
        await made.until("the table is Ready", lambda: ready(made, "TabletGroup"), 600)
        await write(made, 0, ROWS)
        yield made


def clear(body: Json) -> set[str]:
    return {c["type"] for c in body["conditions"] if c["status"] == "True"}


@pytest.mark.chaos
async def test_full_incremental_restored_refused_and_removed(tmp_path: Path) -> None:
    folder, cluster = tmp_path / "backups", {"name": "flights"}
    target = {"uri": f"file://{folder}"}
    async with filled(tmp_path) as made:
        await create(
            made, "TabletBackup", "one", clusterRef=cluster, groups=["flights"], target=target, type="Auto",
            deletionPolicy="Delete",
        )  # fmt: skip
        one = await ended(made, "TabletBackup", "one")
        assert (one["phase"], one["type"], one["rows"], one["attempts"]) == ("Succeeded", "full", ROWS, 1), (
            one
        )
        assert clear(one) == {"Ready"} and one["bytes"] > 0 and one["snapshotTime"] <= one["completionTime"]

        async def held_by_one() -> bool:
            told = await status(made, "TabletBackup", "one")
            return bool(told.get("heldUntil")) and told["heldBytes"] >= 0

        await made.until("it says what its hold costs", held_by_one, 500)
        assert (await status(made, "TabletBackup", "one"))["holds"] == [f"chain-{one['backupID']}"]
        await write(made, ROWS, 100)
        await asyncio.sleep(2)  # a status tells times in seconds, and by them whose hold it is
        await create(
            made,
            "TabletBackup",
            "two",
            clusterRef=cluster,
            tables=["flights"],
            target=target,
            type="Incremental",
        )
        two = await ended(made, "TabletBackup", "two")
        assert (two["phase"], two["type"], two["rows"], two["base"]) == (
            "Succeeded",
            "incremental",
            100,
            one["backupID"],
        ), two
        assert [b.backup_id for b in backup.list_backups(folder)] == [two["backupID"], one["backupID"]]

        async def held_by_two() -> bool:
            before, after = [await status(made, "TabletBackup", name) for name in ("one", "two")]
            return (
                "heldUntil" in after and not {"holds", "heldUntil"} & set(before) and before["heldBytes"] == 0
            )

        await made.until("the hold is the younger one's", held_by_two, 500)

        renamed = [{"name": "flights", "newName": "copy"}]
        await create(
            made, "TabletRestore", "back", clusterRef=cluster, source=target, tables=renamed, replicationFactor=1,
            hash=[{"columns": ["id"], "buckets": 2}],
        )  # fmt: skip
        back = await ended(made, "TabletRestore", "back")
        assert (back["phase"], back["rows"], back["verified"]) == ("Succeeded", ROWS + 100, True), back
        assert await rows(made, "copy") == await rows(made, "flights")
        await create(made, "TabletRestore", "first", clusterRef=cluster, source=target, backup=one["backupID"],
                     tables=[{"name": "flights", "newName": "first"}],
                     range={"columns": ["id"], "ranges": [{"to": ["1000"]}, {"from": ["1000"]}]})  # fmt: skip
        first = await ended(made, "TabletRestore", "first")
        assert (first["rows"], len(await rows(made, "first"))) == (ROWS, ROWS)
        assert await partitioning(made, "first") == (stele.range("id", split_at=[1000]),)

        # What cannot be is told in plain words, at the first try.
        await create(made, "TabletRestore", "taken", clusterRef=cluster, source=target)
        taken = await ended(made, "TabletRestore", "taken")
        assert (taken["phase"], taken["attempts"]) == ("Failed", 1) and clear(taken) == {"Stalled"}
        assert "table flights exists already" in taken["error"]
        await create(
            made, "TabletBackup", "nowhere", clusterRef=cluster, target={"uri": "file:///proc/nowhere"}
        )
        nowhere = await ended(made, "TabletBackup", "nowhere")
        assert nowhere["phase"] == "Failed" and "/proc/nowhere" in nowhere["error"], nowhere
        await create(made, "TabletBackup", "nothing", clusterRef=cluster, tables=["nothing"], target=target)
        assert "NOT_FOUND" in (await ended(made, "TabletBackup", "nothing"))["error"]

        # The data go with the resource, but not while another backup builds on them.
        found = await made.kube.get("TabletBackup", "default", "one")
        assert found is not None
        await made.kube.delete("TabletBackup", "default", "one", found["metadata"]["uid"], "")

        async def held() -> bool:
            return (await made.condition("TabletBackup", "one", "Stalled"))[:2] == ("True", "DataNotRemoved")

        await made.until("it says why it stays", held, 500)
        assert two["backupID"] in (await made.condition("TabletBackup", "one", "Stalled"))[2]
        await made.kube.patch("TabletBackup", "default", "one", {"spec": {"deletionPolicy": "Retain"}})

        async def gone() -> bool:
            return "one" not in await made.names("TabletBackup")

        await made.until("it goes, and its data stay", gone)
        assert len(backup.list_backups(folder)) == 2
        reasons = {e["reason"] for e in await made.events("TabletBackup")}
        assert {"BackupBegan", "BackupComplete", "BackupFailed", "DataNotRemoved"} <= reasons


@pytest.mark.chaos
async def test_one_resource_restores_a_whole_cluster_onto_an_empty_one(tmp_path: Path) -> None:
    small, target = {"storage": {"size": "1Gi"}}, {"uri": f"file://{tmp_path}/backups"}
    ranges = {"range": {"columns": ["id"], "ranges": [{"to": ["100"]}, {"from": ["100"]}]}}

    async def all_of(cluster: str, table: str) -> list[Json]:
        pods = await made.kube.list("Pod", "default", f"stele.dev/role=master,stele.dev/cluster={cluster}")
        async with AsyncClient([f"{pod['status']['podIP']}:7051" for pod in pods]) as client:
            scan = (await client.open_table(table)).scan()
            return sorted([r async for b in scan.batches() for r in b.to_pylist()], key=lambda r: r["id"])

    async def group(name: str, cluster: str, table: str, how: Json, factor: int) -> None:
        await create(
            made, "TabletGroup", name, clusterRef={"name": cluster}, tableName=table, columns=COLUMNS, primaryKey=["id"],
            partitioning=how, replicationFactor=factor,
        )  # fmt: skip

        async def fits() -> bool:
            return (await made.condition("TabletGroup", name, "Ready"))[0] == "True"

        await made.until(f"TabletGroup {name} is Ready", fits, 500)

    async with filled(tmp_path) as made:
        await group("months", "flights", "months", ranges, 1)
        async with AsyncClient(await masters(made)) as client:
            await (await client.open_table("months")).write_arrow(
                pa.table({"id": range(200), "text": ["m"] * 200})
            )
        await create(made, "TabletBackup", "all", clusterRef={"name": "flights"}, target=target)
        both = await ended(made, "TabletBackup", "all")
        assert (both["phase"], both["tables"], both["rows"]) == ("Succeeded", 2, ROWS + 200), both

        await create(
            made, "TabletRestore", "again", clusterRef={"name": "again"}, source=target, replicationFactor=1
        )

        async def waits() -> bool:
            return (await made.condition("TabletRestore", "again", "Reconciling"))[1] == "ClusterNotFound"

        await made.until("it waits for its cluster", waits)
        await create(made, "TabletCluster", "again", masters={"replicas": 1, **small}, nodes={"replicas": 1, **small})  # fmt: skip
        again = await ended(made, "TabletRestore", "again", 800)
        assert (again["phase"], again["rows"], again["verified"]) == ("Succeeded", ROWS + 200, True), again
        assert {t["name"]: t["rows"] for t in again["tables"]} == {"flights": ROWS, "months": 200}
        for name, how in (("flights", HASH), ("months", ranges)):
            assert await all_of("again", name) == await all_of("flights", name)
            await group(f"again-{name}", "again", name, how, 1)  # it takes over the table that fits
            assert len(await all_of("again", name)) == {"flights": ROWS, "months": 200}[name]


@pytest.mark.chaos
@pytest.mark.spark
async def test_spark_makes_a_backup_and_restores_it_in_jobs(tmp_path: Path) -> None:
    target, cluster = {"uri": f"file://{tmp_path}/backups"}, {"name": "flights"}
    spark = {"image": "stele/spark:0", "conf": {"spark.log.level": "ERROR"}}
    async with filled(tmp_path) as made:
        await create(made, "TabletBackup", "one", clusterRef=cluster, target=target, type="Auto", spark=spark)
        one = await ended(made, "TabletBackup", "one", 800)
        assert (one["phase"], one["type"], one["rows"], one["attempts"]) == ("Succeeded", "full", ROWS, 1), (
            one
        )
        (event,) = [e for e in await made.events("TabletBackup") if e["reason"] == "BackupBegan"]
        assert "stele_spark.submit --master local[*,4]" in event["message"]
        renamed = [{"name": "flights", "newName": "copy"}]
        await create(
            made, "TabletRestore", "back", clusterRef=cluster, source=target, tables=renamed, spark=spark
        )
        back = await ended(made, "TabletRestore", "back", 800)
        assert (back["phase"], back["rows"], back["verified"]) == ("Succeeded", ROWS, True), back
        assert await rows(made, "copy") == await rows(made, "flights")
        await create(made, "TabletRestore", "taken", clusterRef=cluster, source=target, spark=spark)
        taken = await ended(made, "TabletRestore", "taken", 800)
        assert (taken["phase"], taken["attempts"]) == ("Failed", 1)
        assert "table flights exists already" in taken["error"], taken


@pytest.mark.chaos
async def test_a_killed_job_and_a_killed_node_end_in_a_whole_backup(tmp_path: Path) -> None:
    folder, cluster = tmp_path / "backups", {"name": "flights"}
    target = {"uri": f"file://{folder}"}
    async with filled(tmp_path) as made:
        await create(made, "TabletBackup", "one", clusterRef=cluster, target=target, deletionPolicy="Delete")

        def job_pods() -> list[Json]:
            pods = made.local.store.objects(POD.key)
            return [
                p
                for p in pods
                if "stele.dev/errand" in p["metadata"]["labels"] and p["status"]["phase"] == "Running"
            ]

        async def runs() -> bool:
            return bool(job_pods())

        await made.until("its Job runs", runs, 500)
        (pod,) = job_pods()
        node = next(p for p in made.local.store.objects(POD.key) if p["metadata"]["name"] == "flights-node-0")
        for victim in (pod, node):
            container = victim["status"]["containerStatuses"][0]
            os.kill(int(container["containerID"].removeprefix("process://")), signal.SIGKILL)
        one = await ended(made, "TabletBackup", "one", 500)
        assert (one["phase"], one["rows"]) == ("Succeeded", ROWS), one
        assert one["attempts"] >= 2
        assert "BackupRetried" in {e["reason"] for e in await made.events("TabletBackup")}
        assert backup.verify(folder).faults == []
        found = await made.kube.get("TabletBackup", "default", "one")
        assert found is not None
        await made.kube.delete("TabletBackup", "default", "one", found["metadata"]["uid"], "")

        async def gone() -> bool:
            return "one" not in await made.names("TabletBackup")

        await made.until("it goes after its data", gone, 500)
        assert backup.list_backups(folder) == []
        assert not [n for n in await made.names("Job") if "remove" in n]


@pytest.mark.chaos
async def test_a_schedule_makes_backups_prunes_drills_and_tells_what_was_missed(tmp_path: Path) -> None:
    folder, cluster = tmp_path / "backups", {"name": "flights"}
    async with filled(tmp_path) as made:
        await create(
            made, "TabletBackupSchedule", "often", schedule="0 0 1 1 *", drill={"schedule": "0 0 1 1 *"},
            historyLimit={"succeeded": 1}, startingDeadline="3650d",
            backup={"clusterRef": cluster, "type": "Auto", "target": {"uri": f"file://{folder}"}, "retention": {"keepFull": 1}},
        )  # fmt: skip

        async def scheduled() -> bool:
            return (await made.condition("TabletBackupSchedule", "often", "Ready"))[:2] == (
                "True",
                "Scheduled",
            )

        await made.until("it waits for its first time", scheduled)

        async def rewind(**fields: Any) -> None:
            """As if the operator had looked last three years ago."""
            await made.kube.patch("TabletBackupSchedule", "default", "often", {"status": fields}, "status")

        now = datetime.datetime.now(datetime.UTC)
        ago = f"{now.year - 3}-06-01T00:00:00Z"
        await rewind(lastScheduleTime=ago)

        async def first() -> bool:
            return "lastSuccess" in await status(made, "TabletBackupSchedule", "often")

        await made.until("a backup was made", first, 500)
        told = await status(made, "TabletBackupSchedule", "often")
        assert told["missed"] == 2 and told["lastScheduleTime"] == f"{now.year}-01-01T00:00:00Z"
        assert (told["lastSuccess"]["type"], told["lastSuccess"]["rows"]) == ("full", ROWS)
        assert told["nextScheduleTime"] == f"{now.year + 1}-01-01T00:00:00Z"
        assert "ScheduleMissed" in {e["reason"] for e in await made.events("TabletBackupSchedule")}

        await rewind(drill={"lastScheduleTime": ago})

        async def drilled() -> bool:
            return (await made.condition("TabletBackupSchedule", "often", "Drilled"))[:2] == (
                "True",
                "DrillPassed",
            )

        await made.until("a drill has passed", drilled, 500)
        drill = (await status(made, "TabletBackupSchedule", "often"))["drill"]
        assert drill["rows"] == ROWS and drill["backupID"] == told["lastSuccess"]["backupID"], drill
        assert await tables(made) == {"flights"}

        async def suspend(value: bool) -> None:
            await made.kube.patch("TabletBackupSchedule", "default", "often", {"spec": {"suspend": value}})

        await suspend(True)
        await rewind(drill={"lastScheduleTime": ago, "lastPassTime": ago})

        async def overdue() -> bool:
            found = await made.condition("TabletBackupSchedule", "often", "Drilled")
            return found[:2] == ("False", "DrillOverdue") and "suspend is true" in found[2]

        await made.until("a suspended drill is overdue", overdue)
        assert "DrillOverdue" in {e["reason"] for e in await made.events("TabletBackupSchedule")}
        shutil.rmtree(next(path for path in folder.glob("2*/flights-*")))
        await suspend(False)

        async def failed() -> bool:
            return (await made.condition("TabletBackupSchedule", "often", "Drilled"))[:2] == (
                "False",
                "DrillFailed",
            )

        await made.until("a drill of a damaged backup fails", failed, 500)
        assert await tables(made) == {"flights"}
