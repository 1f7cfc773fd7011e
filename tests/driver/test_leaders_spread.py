"""Real processes: 24 tablets on three nodes. Leaders are piled up and spread under writes, and spread after restarts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stele.client import AsyncClient, AsyncTable
from stele.client.admin import cluster_view
from stele.client.step_down import step_down
from stele.driver.leader_balance import Group, shares
from stele.driver.main import run
from stele.driver.policy import Policy
from stele.driver.progress import Progress
from stele.driver.view import ClusterView
from stele.driver.wire import view_from_pb
from stele.model.ids import CATALOG_TABLET_ID
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from tests.harness.processes import Cluster, Member

TABLETS = 24
WRITERS = 4
PAUSE_S = 0.02
"""Without a pause they take all processors, and the moves wait."""
WITHIN_S = 60.0
POLICY = Policy(dead_after_ms=600_000, unreached_after_ms=600_000, min_disk_free_bytes=0)


@dataclass
class Waits:
    """How long each write took, and what was acknowledged."""

    seconds: list[float] = field(default_factory=list)
    rows: int = 0

    def told(self, when: str) -> str:
        """The figures so far. Counting starts again after that."""
        found, self.seconds = sorted(self.seconds), []
        mid, late = found[len(found) // 2], found[len(found) * 99 // 100]
        return (
            f"{when}: {len(found)} writes, half within {mid * 1e3:.1f} ms, 99 % within {late * 1e3:.1f} ms, "
            f"the longest {found[-1] * 1e3:.0f} ms"
        )


@asynccontextmanager
async def writing(table: AsyncTable) -> AsyncIterator[Waits]:
    """Some writers write rows one at a time meanwhile."""
    waits = Waits()

    async def write(first: int) -> None:
        number = first
        while True:
            began = time.monotonic()
            await table.put({"id": number, "text": "x"})
            waits.seconds.append(time.monotonic() - began)
            waits.rows += 1
            number += WRITERS
            await asyncio.sleep(PAUSE_S)

    tasks = [asyncio.create_task(write(n)) for n in range(WRITERS)]
    try:
        yield waits
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def view_of(client: AsyncClient) -> ClusterView:
    return view_from_pb(await cluster_view(client.masters, timeout_s=60))


def led(view: ClusterView) -> tuple[Counter[str], int]:
    """How many tablets each node leads, and the largest excess over a share."""
    mine = [t for t in view.tablets if t.tablet_id != CATALOG_TABLET_ID and t.leader_node]
    groups = [
        Group(t.tablet_id, t.table_id, t.leader_node, tuple(sorted(p.node_id for p in t.config.voters)))
        for t in mine
    ]
    share, load = shares(groups), Counter(g.leader for g in groups)
    over = max((load[n] - share[n] for n in load), default=0)
    return load, over if len(mine) == TABLETS else TABLETS


async def spread(client: AsyncClient, since: float) -> str:
    """Wait until no node leads more than one above its share. Returns the time it took, and how many each
    leads."""
    async with asyncio.timeout(2 * WITHIN_S):
        while True:
            load, over = led(await view_of(client))
            if over <= 1:
                return f"{time.monotonic() - since:.1f} s, {'/'.join(map(str, sorted(load.values())))}"
            await asyncio.sleep(0.2)


async def pile_up(client: AsyncClient, node: Member) -> None:
    """One node leads all."""
    for tablet in (await view_of(client)).tablets:
        if tablet.tablet_id != CATALOG_TABLET_ID:
            await step_down(client.masters, client.pool, tablet.tablet_id, to=node.node_id, kept_s=0)


async def move_the_catalog(client: AsyncClient, cluster: Cluster) -> None:
    """Sent to a master that does not lead."""
    before = (await view_of(client)).leader_master
    target = next(m.node_id for m in cluster.masters if m.node_id != before)
    moved = await step_down(client.masters, client.pool, CATALOG_TABLET_ID, to=target, timeout_s=60)
    assert (moved.before, moved.after) == (before[:8], target[:8])
    async with asyncio.timeout(WITHIN_S):
        while (await view_of(client)).leader_master != target:
            await asyncio.sleep(0.1)


@pytest.mark.chaos
async def test_leaders_are_spread_under_writes_and_after_restarts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    told: list[Progress] = []
    async with (
        Cluster(tmp_path, masters=3, nodes=3) as cluster,
        AsyncClient(cluster.master_addresses, timeout_s=60) as client,
    ):
        schema = Schema.make([("id", "int64"), ("text", "string")], ["id"])
        table = await client.create_table(
            "t", schema, PartitionSchema((HashPartition((0,), TABLETS, 0),), None)
        )
        await move_the_catalog(client, cluster)
        async with writing(table) as waits:
            await asyncio.sleep(5)
            lines.append(waits.told("no leader moves"))
            await pile_up(client, cluster.nodes[0])
            lines.append(waits.told(f"{TABLETS} leaders are moved to one node by hand"))
            load, _ = led(await view_of(client))
            driving = asyncio.create_task(run(cluster.master_addresses, POLICY, on_progress=told.append))
            try:
                took = await spread(client, time.monotonic())
                lines.append(waits.told(f"spread from {'/'.join(map(str, load.values()))} in {took}"))
                await asyncio.sleep(2)  # a pass tells of its moves when it ends
                # On a busy machine an election may move a leader, and the driver moves it back.
                deadline, count = time.monotonic() + 60, -1
                while len(told) != count:
                    assert time.monotonic() < deadline, f"moves go on: {told[count:]}"
                    count = len(told)
                    await asyncio.sleep(5)
                for node in cluster.nodes:
                    waits.seconds.clear()
                    await cluster.stop(node)
                    cluster.restart(node)
                    await cluster.wait_ready(node)
                    took = await spread(client, time.monotonic())
                    lines.append(waits.told(f"{node.name} restarted, leaders spread {took}"))
                    assert float(took.split(" ")[0]) < WITHIN_S
            finally:
                driving.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await driving
        written = waits.rows
        found = await table.scan(columns=["id"]).count()
        assert written <= found <= written + WRITERS, "a row was lost"
    errors = [r.error for r in told if r.error]
    with capsys.disabled():
        print("", *lines, *(f"{r.where}: {r.reason}" for r in told[:4]), f"refused: {errors}", sep="\n")
    assert {r.kind for r in told} - {"Blocked"} == {"MoveLeader"}
    assert all(r.kind == "MoveLeader" or r.leaders is None for r in told)
