"""A new replica is compared with another voter after its heal: real nodes, one that holds other rows, one that is silent."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pyarrow as pa

from stele.client import AsyncClient
from stele.client.admin import cluster_view
from stele.driver.copy_checks import CopyCheck, CopyChecks, CopyMade, Voter, copies_made
from stele.driver.main import run as drive
from stele.driver.policy import Policy
from stele.driver.steps import EndIntent
from stele.driver.wire import view_from_pb
from stele.model.config import MemberType
from stele.model.ids import CATALOG_TABLET_ID
from stele.tablet.store import TabletStore
from tests.harness.processes import Cluster
from tests.tserver.local import HASHED, SCHEMA, LocalCluster

ROWS = 3_000


def made_in(view: object, new: int = -1) -> list[CopyMade]:
    """As if the last voter of each tablet had just become one. `view`: as the masters tell it."""
    told = view_from_pb(view)  # type: ignore[arg-type]
    ends = []
    for tablet in told.tablets:
        voters = [p for p in tablet.config.peers if p.member_type is MemberType.VOTER]
        ordered = sorted(voters, key=lambda p: p.node_id == tablet.leader_node, reverse=True)
        ends.append(EndIntent(tablet.tablet_id, 0, "", ordered[new].replica_id))
    return copies_made(ends, told)


async def test_replicas_that_differ_are_told_from_those_that_do_not_answer(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    found: list[CopyCheck] = []
    try:
        await cluster.start()
        async with cluster.client() as client:
            table = await client.create_table("t", SCHEMA, HASHED, replication_factor=3)
            await table.write_arrow(pa.table({"id": range(ROWS), "name": ["x"] * ROWS}))
            checks = CopyChecks(client.pool, found.append)

            async def compared() -> list[CopyCheck]:
                found.clear()
                checks.add(made_in(await cluster_view(client.masters)))
                await checks.done()
                return list(found)

            async def write() -> None:
                for number in range(1_000_000):
                    await table.put({"id": number % ROWS, "name": f"later {number}"})

            writing = asyncio.create_task(write())
            try:
                equal = await compared()
            finally:
                writing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await writing
            assert len(equal) == 4 and all(check.equal for check in equal), equal
            assert sum(check.sums[0][0] for check in equal) == ROWS
            assert CATALOG_TABLET_ID not in {check.made.tablet_id for check in equal}

            # The new replica of one tablet has the rows of another one.
            wrong = equal[0].made
            node = next(n for n in cluster.running.values() if n.node_id == wrong.new.node_id)
            mine = {r.tablet_id: r for r in node.replicas if isinstance(r.machine, TabletStore)}
            replica = mine.pop(wrong.tablet_id)
            assert replica.started is not None
            storage, kept = replica.started.storage, replica.started.storage.machine
            storage.machine = next(iter(mine.values())).machine
            told = await compared()
            storage.machine = kept
            assert [c.made.tablet_id for c in told if c.differs] == [wrong.tablet_id]
            (differs,) = [c for c in told if c.differs]
            assert (
                f"node {wrong.new.node_id[:8]}: " in differs.said and " rows with checksum " in differs.said
            )
            assert "`stele table verify t` compares all its replicas" in differs.said

            nowhere = Voter(9, wrong.new.node_id, "127.0.0.1:9")
            found.clear()
            checks.add([CopyMade(wrong.tablet_id, "t", nowhere, wrong.others)])
            await checks.done()
            assert [(c.equal, c.differs) for c in found] == [(False, False)] and "not compared: " in found[
                0
            ].said
            await checks.close()
    finally:
        await cluster.close()


async def test_after_a_heal_each_copy_is_compared(tmp_path: Path) -> None:
    """The driver ends only when it has done so."""
    found: list[CopyCheck] = []
    async with (
        Cluster(tmp_path, masters=1, nodes=4) as cluster,
        AsyncClient(cluster.master_addresses, timeout_s=60) as client,
    ):
        table = await client.create_table("t", SCHEMA, HASHED, replication_factor=3)
        await table.write_arrow(pa.table({"id": range(ROWS), "name": ["x"] * ROWS}))
        victim = cluster.nodes[0]
        view = view_from_pb(await cluster_view(client.masters))
        lost = {t.tablet_id for t in view.tablets for p in t.config.peers if p.node_id == victim.node_id}
        cluster.lose(victim)
        policy = Policy(dead_after_ms=2_000, balance_leaders=False)
        await drive(cluster.master_addresses, policy, until_healthy=True, on_copy=found.append)
        assert lost and {check.made.tablet_id for check in found} == lost
        assert all(check.equal for check in found), found
        rows = sum(check.sums[0][0] for check in found)
        assert 0 < rows <= ROWS
