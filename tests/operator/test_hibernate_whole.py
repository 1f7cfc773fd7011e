"""A cluster hibernates and wakes, on real processes, with the operator killed at both: the same members, the same rows."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from stele_local.kinds import POD
from tests.operator.cluster import Bench
from tests.operator.test_nodes_whole import running, whole
from tests.operator.test_whole import ROWS, count, status, write

HASTY = {
    "witnessAfter": "3s",
    "silentAfter": "3m",
    "machineLostAfter": "3m",
    "mastersDriveAfter": "5s",
    "keepFor": "1h",
}
"""Healing would begin at once, by the operator and by the masters. Waking waits for minutes, as the machine may be busy."""
ASLEEP_S = 15


def pods(made: Bench) -> dict[str, dict[str, Any]]:
    """All pods that are there, by name."""
    return {p["metadata"]["name"]: p for p in made.local.store.objects(POD.key)}


def nodes_need_masters(made: Bench) -> bool:
    """Whether there is no node, or a majority of masters that nobody has deleted."""
    now = pods(made)
    staying = [n for n, p in now.items() if "-master-" in n and "deletionTimestamp" not in p["metadata"]]
    return len(staying) >= 2 or not any("-node-" in n for n in now)


async def identities(made: Bench) -> dict[str, tuple[str, str]]:
    """The uid of each claim and the node that it belongs to."""
    found = await made.kube.list("PersistentVolumeClaim", "default")
    return {
        c["metadata"]["name"]: (c["metadata"]["uid"], c["metadata"]["annotations"]["stele.dev/node-id"])
        for c in found
    }


async def hibernate(made: Bench, asleep: bool) -> None:
    """As a user asks for it."""
    await made.kube.patch("TabletCluster", "default", "flights", {"spec": {"hibernate": asleep}})


@pytest.mark.chaos
async def test_it_hibernates_and_wakes_with_all_rows_and_the_operator_is_killed(tmp_path: Path) -> None:
    async with running(tmp_path, machines=4, nodes=3) as made:
        await made.kube.patch("TabletCluster", "default", "flights", {"spec": {"healing": HASTY}})
        await write(made)
        before = await identities(made)

        async def hibernated() -> bool:
            ready = await made.condition("TabletCluster", "flights", "Ready")
            return ready[:2] == ("False", "Hibernated") and not pods(made)

        async def some_stop() -> bool:
            # Nodes that stop fast may be gone between two looks.
            staying = [
                n for n, p in pods(made).items() if "-node-" in n and "deletionTimestamp" not in p["metadata"]
            ]
            return len(staying) < 3

        async def masters_start() -> bool:
            return any("-master-" in n for n in pods(made))

        with made.keep("nodes stop before masters and start after them", lambda: nodes_need_masters(made)):
            await hibernate(made, True)
            await made.until("nodes stop", some_stop)
            await made.end(signal.SIGKILL)
            await made.start()
            await made.until("it hibernates", hibernated)
            assert {m["state"] for m in (await status(made))["members"]} == {"Hibernated"}
            assert (await made.condition("TabletGroup", "flights", "Ready"))[:2] == ("False", "Hibernated")
            await asyncio.sleep(ASLEEP_S)
            assert await hibernated() and await identities(made) == before
            for alarm in ("Degraded", "Stalled"):
                assert (await made.condition("TabletCluster", "flights", alarm))[0] == "False"
            await hibernate(made, False)
            await made.until("masters start", masters_start)
            await made.end(signal.SIGKILL)
            await made.start()
            await made.until("all are back", lambda: whole(made, 3), 240)
        assert await count(made) == ROWS
        assert await identities(made) == before
        assert set(pods(made)) == set(before)
        reasons = {e["reason"] for e in await made.events("TabletCluster")}
        assert {"Hibernating", "Hibernated", "Waking"} <= reasons
        assert not {"NodeLost", "MasterLost", "TooManyLost", "HealBegan", "ClaimReleased"} & reasons
        logs = "".join(path.read_text(errors="replace") for path in (tmp_path / "local").rglob("*.log"))
        assert "this master drives until one returns" not in logs
