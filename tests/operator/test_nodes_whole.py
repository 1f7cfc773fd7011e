"""Scale out and in, and a parked machine, on real processes: rows written meanwhile are there, and victims are named before."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stele.client import AsyncClient
from tests.operator.cluster import Bench, bench
from tests.operator.test_whole import COLUMNS, HASH, count, masters, placed, ready, status

PAUSE_S = 0.04
"""Between two writes. A row costs all processes together 7 ms of a processor, which they need for what is tested."""
HEALING = {"witnessAfter": "3s", "silentAfter": "8s", "machineLostAfter": "8s", "keepFor": "1h"}


class Writer:
    """Writes row after row while the test goes on. `longest_s`: the longest that one write took."""

    def __init__(self) -> None:
        self.rows = 0
        self.longest_s = 0.0

    async def run(self, made: Bench) -> None:
        async with AsyncClient(",".join(await masters(made)), timeout_s=60) as client:
            table = await client.open_table("flights")
            while True:
                began = time.monotonic()
                async with table.new_session() as session:
                    await session.upsert({"id": self.rows, "text": f"row {self.rows}"})
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                self.rows += 1
                await asyncio.sleep(PAUSE_S)


@contextlib.asynccontextmanager
async def writing(made: Bench) -> AsyncIterator[Writer]:
    """A writer; afterwards all its rows are read back."""
    writer = Writer()
    task = asyncio.create_task(writer.run(made))
    try:
        yield writer
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    found = await count(made)
    assert found in (writer.rows, writer.rows + 1)  # the last one may be written and not answered
    print(f"{writer.rows} rows, longest write {writer.longest_s * 1000:.0f} ms")


async def whole(made: Bench, nodes: int) -> bool:
    """So many nodes are ready, nobody is on the way, and all tablets are whole."""
    now = await status(made)
    tablets = now.get("tablets") or {}
    states = [m["state"] for m in now.get("members", ()) if m["role"] == "node" and m["state"] != "Retired"]
    return states == ["Ready"] * nodes and tablets.get("healthy") == tablets.get("total") == 3


async def change(made: Bench, **nodes: Any) -> None:
    """Another spec.nodes."""
    await made.kube.patch("TabletCluster", "default", "flights", {"spec": {"nodes": nodes}})


@contextlib.asynccontextmanager
async def running(tmp_path: Path, machines: int, nodes: int) -> AsyncIterator[Bench]:
    """A cluster with its table."""
    async with bench(tmp_path, machines=machines) as made:
        await made.start()
        await made.apply("cluster", nodes={"replicas": nodes, "storage": {"size": "1Gi"}}, healing=HEALING)
        await made.apply("flights", columns=COLUMNS, primaryKey=["id"], partitioning=HASH)
        await made.until("the cluster is Ready", lambda: ready(made, "TabletCluster"))
        await made.until("the table is Ready", lambda: ready(made, "TabletGroup"))
        yield made


async def scale_in_below_the_factor_is_refused(made: Bench) -> None:
    """Then the number is set back, and nothing was changed."""
    await change(made, replicas=2)

    async def refused() -> bool:
        holds, reason, message = await made.condition("TabletCluster", "flights", "Stalled")
        return (holds, reason) == ("True", "DrainRefused") and "3 replicas need a machine each" in message

    await made.until("it is refused, and says why", refused)
    await change(made, replicas=3)

    async def set_back() -> bool:
        return (await made.condition("TabletCluster", "flights", "Stalled"))[0] == "False"

    await made.until("nothing is stalled any more", set_back)
    assert await whole(made, 3)


@pytest.mark.chaos
async def test_nodes_are_scaled_out_and_in_under_writes_and_the_operator_is_killed(tmp_path: Path) -> None:
    async with running(tmp_path, machines=5, nodes=3) as made:
        await scale_in_below_the_factor_is_refused(made)
        async with writing(made):
            await change(made, replicas=5)
            await made.until("five nodes serve", lambda: whole(made, 5))
            named = {"flights-node-0", "flights-node-1"}
            await change(made, replicas=3, retire=sorted(named))
            told: list[str] = []

            async def victims_are_named() -> bool:
                told.append((await made.condition("TabletCluster", "flights", "Reconciling"))[2])
                return all(name in told[-1] for name in named)

            await made.until("the victims are named", victims_are_named)

            async def told_as_event() -> bool:  # the kill may lose an event; the status is what lasts
                return "Draining" in {e["reason"] for e in await made.events("TabletCluster")}

            await made.until("an event says that they are drained", told_as_event)
            await made.end(signal.SIGKILL)
            await made.start()
            await made.until("three nodes serve", lambda: whole(made, 3), 240)

            async def gone() -> bool:
                return named.isdisjoint(await made.names("Pod"))

            await made.until("the pods of the others are gone", gone)

        async def let_go() -> bool:
            claims = {
                c["metadata"]["name"]: c for c in await made.kube.list("PersistentVolumeClaim", "default")
            }
            return all("stele.dev/released-at" in claims[name]["metadata"]["annotations"] for name in named)

        await made.until("their claims are let go", let_go)
        reasons = {e["reason"] for e in await made.events("TabletCluster")}
        assert {"Draining", "Retiring", "ClaimReleased"} <= reasons and "NodeLost" not in reasons


@pytest.mark.chaos
async def test_a_parked_machine_is_away_longer_than_any_time_of_healing_and_is_back(tmp_path: Path) -> None:
    async with running(tmp_path, machines=4, nodes=4) as made:
        machines = placed(made)
        # A machine without a master, as only the node is parked.
        pods = await made.kube.list("Pod", "default", "stele.dev/role=master")
        taken = {p["spec"].get("nodeName") for p in pods}
        name = next(n for n, machine in machines.items() if machine not in taken)
        before = {m["name"]: m["nodeUUID"] for m in (await status(made))["members"]}
        async with writing(made):
            await change(made, park=[name])

            async def parked() -> bool:
                return any(
                    m["name"] == name and "nodes.park names it" in m.get("message", "")
                    for m in (await status(made))["members"]
                )

            await made.until("it is parked", parked)
            await made.local.off(machines[name])

            async def away() -> bool:
                return any(
                    m["name"] == name and m["state"] == "Parked" for m in (await status(made))["members"]
                )

            await made.until("it is away", away)
            await asyncio.sleep(20)
            assert await away()
            reasons = {e["reason"] for e in await made.events("TabletCluster")}
            assert not {"HealBegan", "NodeLost", "NodePending"} & reasons
            await made.local.on(machines[name])
            await made.until("it is back", lambda: whole(made, 4))
            await change(made, park=[])
            assert {m["name"]: m["nodeUUID"] for m in (await status(made))["members"]} == before
