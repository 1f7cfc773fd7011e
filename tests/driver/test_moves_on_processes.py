"""Real processes under writes: the replication factor goes 1, 3, 5, 3; then a move by hand, and a new node
that fills. No row is lost."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from stele.client import AsyncClient
from stele.client.admin import cluster_view
from stele.client.placing import move_replica, release_tablet
from stele.driver.main import run as drive
from stele.driver.policy import Policy
from stele.driver.progress import Progress
from stele.driver.view import ClusterView
from stele.driver.wire import view_from_pb
from stele.model.config import MemberType
from stele.model.ids import CATALOG_TABLET_ID
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from tests.harness import Cluster

SCHEMA = Schema.make([("id", "int64"), ("n", "int64", True)], ["id"])
POLICY = Policy(dead_after_ms=120_000, max_copies=4, rebalance=True)
WITHIN_S = 240.0


class Writer:
    """Puts rows one after the other, and measures how long each waits."""

    def __init__(self, client: AsyncClient, table: str) -> None:
        self._client = client
        self._table = table
        self.written = 0
        self.longest_s = 0.0
        self._task = asyncio.create_task(self._write())

    async def _write(self) -> None:
        table = await self._client.open_table(self._table)
        while True:
            began = time.monotonic()
            await table.put({"id": self.written, "n": self.written * 7})
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.written += 1
            await asyncio.sleep(0.02)

    def take_longest_ms(self) -> float:
        """The longest wait since the last call."""
        if self._task.done():
            self._task.result()
        longest, self.longest_s = self.longest_s * 1_000, 0.0
        return longest

    async def stop(self) -> None:
        """Stop writing; raises what a write raised."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if not self._task.cancelled():
            self._task.result()


@asynccontextmanager
async def driving(masters: list[str], told: list[Progress], policy: Policy = POLICY) -> AsyncIterator[None]:
    """A driver at work."""
    task = asyncio.create_task(drive(masters, policy, on_progress=told.append))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(client: AsyncClient, done: Callable[[ClusterView], bool]) -> ClusterView:
    """Wait for a state of the cluster."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        view = view_from_pb(await cluster_view(client.masters))
        if done(view):
            return view
        assert time.monotonic() < deadline, f"it never came: {view}"
        await asyncio.sleep(0.2)


def at_rest(view: ClusterView, factor: int) -> bool:
    """Every tablet has this many voters, and nothing is under way."""
    mine = [t for t in view.tablets if t.tablet_id != CATALOG_TABLET_ID]
    voters = [[p for p in t.config.peers if p.member_type is MemberType.VOTER] for t in mine]
    exact = all(len(v) == factor == len(t.config.peers) for v, t in zip(voters, mine, strict=True))
    return not view.intents and exact and all(t.leader_node for t in mine)


def shares(view: ClusterView) -> Counter[str]:
    """The number of replicas of tables, by node."""
    found = Counter({n.node_id: 0 for n in view.nodes if n.role == "node"})
    found.update(p.node_id for t in view.tablets if t.tablet_id != CATALOG_TABLET_ID for p in t.config.peers)
    return found


async def test_replicas_change_and_move_under_writes_without_a_lost_row(tmp_path: Path) -> None:
    told: list[Progress] = []
    async with (
        Cluster(tmp_path, masters=1, nodes=5) as cluster,
        AsyncClient(cluster.master_addresses, timeout_s=60) as client,
    ):
        parts = PartitionSchema((HashPartition((0,), 4),))
        await client.create_table("t", SCHEMA, parts, replication_factor=1)
        writer = Writer(client, "t")
        async with driving(cluster.master_addresses, told):
            for factor in (3, 5, 3):
                began = time.monotonic()
                await client.set_replication_factor("t", factor)
                await until(client, lambda view, wanted=factor: at_rest(view, wanted))  # type: ignore[misc]
                print(
                    f"factor {factor}: {time.monotonic() - began:.1f} s, longest write "
                    f"{writer.take_longest_ms():.0f} ms"
                )
            view = await until(client, lambda view: at_rest(view, 3))
            tablet = next(t for t in view.tablets if t.tablet_id != CATALOG_TABLET_ID)
            source = tablet.leader_node
            target = next(
                n.node_id for n in view.nodes if n.role == "node" and tablet.config.peer_on(n.node_id) is None
            )
            await move_replica(client.masters, tablet.tablet_id, source, target, owner="test")

            def moved(view: ClusterView) -> bool:
                now = view.tablet(tablet.tablet_id)
                there = now is not None and now.config.peer_on(target) and not now.config.peer_on(source)
                return bool(there) and at_rest(view, 3)

            await until(client, moved)
            print(f"a leader's replica moved: longest write {writer.take_longest_ms():.0f} ms")
            await release_tablet(client.masters, tablet.tablet_id)
            added = cluster.add_node()
            await cluster.wait_ready(added)
            view = await until(client, lambda view: shares(view)[added.node_id] >= 2 and at_rest(view, 3))
            print(
                f"a new node: {sorted(shares(view).values())}, longest write {writer.take_longest_ms():.0f} "
                f"ms"
            )
        await writer.stop()
        assert writer.written > 100
        rows = await (await client.open_table("t")).scan().to_table()
        assert sorted(rows["id"].to_pylist()) == list(range(len(rows))) and len(rows) >= writer.written
        assert all(n == i * 7 for i, n in zip(rows["id"].to_pylist(), rows["n"].to_pylist(), strict=True))
    refused = [p for p in told if p.error]
    print(f"{writer.written} rows, {len(told)} records of steps, {len(refused)} with an error")
