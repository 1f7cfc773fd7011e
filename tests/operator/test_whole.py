"""The whole of it: apply, write, lose a machine for good, kill the operator in the middle, heal, read back."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stele.client import AsyncClient
from stele_local.kinds import POD
from tests.operator.cluster import Bench, bench

ROWS = 2_000
COLUMNS = [{"name": "id", "type": "int64"}, {"name": "text", "type": "string", "nullable": True}]
HASH = {"hash": [{"columns": ["id"], "buckets": 3}]}


async def masters(made: Bench) -> list[str]:
    """Addresses of master pods."""
    pods = await made.kube.list("Pod", "default", "stele.dev/role=master")
    return [f"{p['status']['podIP']}:7051" for p in pods if p["status"].get("podIP")]


async def ready(made: Bench, kind: str) -> bool:
    """Whether the example's resource of a kind is Ready."""
    return (await made.condition(kind, "flights", "Ready"))[0] == "True"


async def write(made: Bench) -> None:
    """Write all rows."""
    batch = pa.table({"id": pa.array(range(ROWS), pa.int64()), "text": [f"row {i}" for i in range(ROWS)]})
    async with AsyncClient(",".join(await masters(made))) as client:
        table = await client.open_table("flights")
        await table.write_arrow(batch)


async def count(made: Bench) -> int:
    """How many rows there are."""
    async with AsyncClient(",".join(await masters(made))) as client:
        table = await client.open_table("flights")
        return await table.scan(columns=["id"]).count()


async def status(made: Bench) -> dict[str, Any]:
    """The TabletCluster's status."""
    found = await made.kube.get("TabletCluster", "default", "flights")
    return (found or {}).get("status") or {}


@pytest.mark.chaos
async def test_a_machine_is_lost_and_the_operator_killed_and_all_is_healed(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        await made.start()
        await made.apply("cluster", nodes={"replicas": 4, "storage": {"size": "1Gi"}})
        await made.apply("flights", columns=COLUMNS, primaryKey=["id"], partitioning=HASH)
        await made.until("the cluster is Ready", lambda: ready(made, "TabletCluster"))
        await made.until("the table is Ready", lambda: ready(made, "TabletGroup"))
        await write(made)
        assert await count(made) == ROWS

        await made.local.off("n1")
        await made.local.wipe("n1")

        async def begun() -> bool:
            return "HealBegan" in {e["reason"] for e in await made.events("TabletCluster")}

        await made.until("healing has begun", begun)
        await made.end(signal.SIGKILL)
        await asyncio.sleep(0.5)
        await made.start()

        async def healed() -> bool:
            now = await status(made)
            tablets = now.get("tablets") or {}
            lost = [m for m in now.get("members", ()) if m.get("machine") == "n1" and m["state"] != "Retired"]
            return (
                tablets.get("healthy") == tablets.get("total") == 3 and not lost and now["readyMasters"] == 3
            )

        await made.until("everything is healed and the lost are retired", healed)
        assert await count(made) == ROWS

        async def told() -> bool:
            wanted = {"NodeLost", "PodDeleted", "ClaimReleased", "HealEnded", "CopiesCompared"}
            return wanted <= {e["reason"] for e in await made.events("TabletCluster")}

        await made.until("all of it is told, and the new replicas are compared", told)
        reasons = {e["reason"] for e in await made.events("TabletCluster")}
        assert "CopyDiffers" not in reasons
        assert not {"Beginning", "Copying", "Demoting", "AddingWitness", "Removing", "Ending"} & reasons
        await check_cause(made, tmp_path / "local")


async def check_cause(made: Bench, folder: Path) -> None:
    """The heal of the node is named by its event and by the log of a pod that changed members for it."""
    ended = [e["message"] for e in await made.events("TabletCluster") if e["reason"] == "HealEnded"]
    causes = {cause for message in ended for cause in re.findall(r"heal/[0-9a-f]{8}-\d+", message)}
    lines = [line for path in folder.rglob("*.log") for line in path.read_text(errors="replace").splitlines()]
    changes = [line for line in lines if "configuration" in line]
    assert any(f"{cause}: " in line for cause in causes for line in changes), causes


async def refused(made: Bench) -> None:
    """A table that the masters will never make waits for a human, and its cluster is at rest."""
    twice = [{"name": "id", "type": "int64"}, {"name": "ID", "type": "int64"}]
    await made.apply("flights", columns=twice, primaryKey=["id"], partitioning={})

    async def told() -> bool:
        return (await made.condition("TabletGroup", "flights", "Stalled"))[:2] == ("True", "Refused")

    await made.until("the group says that its table is refused", told)
    message = (await made.condition("TabletGroup", "flights", "Stalled"))[2]
    assert "column ID" in message and message.endswith("delete the TabletGroup and create it again")

    async def at_rest() -> bool:
        both = [
            await made.condition(kind, "flights", "Reconciling") for kind in ("TabletGroup", "TabletCluster")
        ]
        return [holds for holds, *_ in both] == ["False", "False"]

    await made.until("nothing more is done about it", at_rest)
    assert (await made.condition("TabletGroup", "flights", "Ready"))[:2] == ("False", "Refused")
    group = await made.kube.get("TabletGroup", "default", "flights")
    assert group is not None
    await made.kube.delete("TabletGroup", "default", "flights", group["metadata"]["uid"], "")


@pytest.mark.chaos
async def test_a_first_masters_volume_comes_up_empty_under_the_pod_that_formed_the_cluster(
    tmp_path: Path,
) -> None:
    """The kubelet starts the same pod again, with --first-masters: it formatted the volume, answered, and was never replaced."""
    name = "flights-master-0"
    async with bench(tmp_path) as made:
        await made.start()
        await made.apply("cluster", nodes={"replicas": 3, "storage": {"size": "1Gi"}})
        await made.until("the cluster is Ready", lambda: ready(made, "TabletCluster"))
        formed = (await status(made))["clusterUUID"]
        await refused(made)
        pod = await made.kube.get("Pod", "default", name)
        assert pod is not None and "--first-masters" in pod["spec"]["containers"][0]["args"]
        claim = await made.kube.get("PersistentVolumeClaim", "default", name)
        machine = made.local.machines[pod["spec"]["nodeName"]]
        await made.local.off(machine.name)
        assert claim is not None
        volume = machine.folder / "volumes" / claim["spec"]["volumeName"] / "stele"
        shutil.rmtree(volume)
        volume.mkdir()
        await made.local.on(machine.name)

        async def replaced() -> bool:
            now = await status(made)
            pods = await made.names("Pod")
            return name not in pods and "flights-master-3" in pods and now["readyMasters"] == 3

        await made.until("it was replaced", replaced)
        await made.until("the cluster is Ready again", lambda: ready(made, "TabletCluster"))
        assert (await status(made))["clusterUUID"] == formed


def placed(made: Bench) -> dict[str, str]:
    """Machines of the nodes that have one."""
    pods = (
        p for p in made.local.store.objects(POD.key) if p["metadata"]["labels"]["stele.dev/role"] == "node"
    )
    return {p["metadata"]["name"]: p["spec"]["nodeName"] for p in pods if p["spec"].get("nodeName")}


async def back(made: Bench, name: str, uid: str) -> bool:
    """Whether another pod of this name is ready, and the tablets are whole."""
    pod = await made.kube.get("Pod", "default", name)
    if pod is None or pod["metadata"]["uid"] == uid:
        return False
    conditions = {c["type"]: c["status"] for c in pod.get("status", {}).get("conditions", ())}
    tablets = (await status(made)).get("tablets") or {}
    return conditions.get("Ready") == "True" and tablets.get("healthy") == tablets.get("total") == 3


@pytest.mark.chaos
async def test_pods_are_deleted_while_a_new_node_waits_for_a_machine_and_each_comes_back_on_its_own(
    tmp_path: Path,
) -> None:
    """The scheduler is woken by each deletion, and looks at the one that waits before the operator acts."""
    async with bench(tmp_path, machines=3) as made:
        await made.start()
        await made.apply("cluster", nodes={"replicas": 4, "storage": {"size": "1Gi"}})
        await made.apply("flights", columns=COLUMNS, primaryKey=["id"], partitioning=HASH)
        await made.until("the cluster is Ready", lambda: ready(made, "TabletCluster"))
        await made.until("the table is Ready", lambda: ready(made, "TabletGroup"))
        await write(made)

        async def as_before() -> bool:
            now = await status(made)
            states = sorted(m["state"] for m in now["members"])
            waits = (await made.condition("TabletCluster", "flights", "Degraded"))[1] == "NodePending"
            return waits and states == ["Pending", *["Ready"] * 6]

        await made.until("one node waits, all others serve", as_before)
        before = placed(made)
        assert sorted(before.values()) == ["n1", "n2", "n3"]
        with made.keep("nobody is where another was", lambda: placed(made).items() <= before.items()):
            for name in sorted(before):
                pod = await made.kube.get("Pod", "default", name)
                assert pod is not None
                uid = pod["metadata"]["uid"]
                await made.kube.delete("Pod", "default", name, uid, "")
                await made.until(f"{name} is back", partial(back, made, name, uid))
            await made.until("one node waits, all others serve", as_before)
        assert placed(made) == before
        assert await count(made) == ROWS


@pytest.mark.chaos
async def test_a_machine_back_after_its_node_was_given_up_is_in_service_again(tmp_path: Path) -> None:
    """There is no spare machine. Node and master stayed DRAINING, those made for them Pending, and no machine could be drained."""
    healing = {"witnessAfter": "3s", "silentAfter": "6s", "machineLostAfter": "6s", "keepFor": "1h"}
    async with bench(tmp_path, machines=3) as made:
        await made.start()
        await made.apply("cluster", nodes={"replicas": 3, "storage": {"size": "1Gi"}}, healing=healing)
        await made.apply("flights", columns=COLUMNS, primaryKey=["id"], partitioning=HASH)
        await made.until("the cluster is Ready", lambda: ready(made, "TabletCluster"))
        await made.until("the table is Ready", lambda: ready(made, "TabletGroup"))
        await write(made)

        async def states() -> dict[str, str]:
            return {m["name"]: m["state"] for m in (await status(made)).get("members", ())}

        before = {n: s for n, s in (await states()).items() if s == "Ready"}
        assert len(before) == 6
        machine = placed(made)["flights-node-0"]
        await made.local.off(machine)

        async def given_up() -> bool:
            now = await states()
            waiting = {"flights-node-3", "flights-master-3"}
            return list(now.values()).count("Draining") == 2 and waiting <= await made.names("Pod")

        await made.until("both are given up, and others are made that find no machine", given_up)
        await made.end(signal.SIGKILL)
        await made.local.on(machine)
        await made.start()

        async def in_service() -> bool:
            now = await status(made)
            members = await states()
            told = now.get("tablets", {})  # nothing while no master leads
            whole = told.get("healthy") == told.get("total") == 3
            drain = await made.condition("TabletCluster", "flights", "DrainBlocked")
            return whole and before.items() <= members.items() and drain[0] == "False"

        await made.until("they are in service again, and a machine may be drained", in_service)

        async def taken_back() -> bool:
            return {"flights-node-3", "flights-master-3"}.isdisjoint(await made.names("Pod"))

        await made.until("what was made for them is taken back", taken_back)
        assert await count(made) == ROWS
        assert "Returning" in {e["reason"] for e in await made.events("TabletCluster")}
