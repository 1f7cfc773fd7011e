"""A copy that holds other rows is on record until it is equal again, and the next driver compares what one left. Real nodes and masters."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stele.client.copies import compared_copies
from stele.driver.copy_checks import CopyCheck
from stele.driver.executor import Executor
from stele.driver.main import run as drive
from stele.driver.policy import Policy
from stele.driver.view import ClusterView
from stele.tablet.store import TabletStore
from tests.client.commands import runner
from tests.consensus.cluster import WAIT_S
from tests.tserver.local import HASHED, SCHEMA, LocalCluster

ROWS = 2_000
POLICY = Policy(dead_after_ms=2_000, balance_leaders=False, rebalance=False)


class Ends(Executor):
    """A driver that ends before it compares anything."""

    async def compare_copies(self, view: ClusterView) -> None: ...


async def test_what_one_driver_leaves_the_next_compares_and_a_difference_stays_until_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = LocalCluster(tmp_path, nodes=4)
    run = runner(cluster, monkeypatch)
    found: list[CopyCheck] = []
    try:
        await cluster.start()
        async with cluster.client() as client:
            table = await client.create_table("t", SCHEMA, HASHED, replication_factor=3)
            await table.write_arrow(pa.table({"id": range(ROWS), "name": ["x"] * ROWS}))
            assert await compared_copies(client, "t") == []
            assert "copies compared" not in (await run("table", "describe", "t"))[1]
            held = {
                n: sum(isinstance(r.machine, TabletStore) for r in node.replicas)
                for n, node in cluster.running.items()
            }
            await cluster.stop(max(held, key=lambda name: held[name]))
            first = Ends(client.pool, [cluster.master_address], holder="first")

            async def healed() -> bool:
                report = await first.run_once(POLICY)
                return report.idle and any(t.copies for t in report.view.tablets)

            async with asyncio.timeout(WAIT_S):
                while not await healed():
                    await asyncio.sleep(0.1)
            await first.close()
            waiting = await compared_copies(client, "t")
            assert waiting and {c.record.result for c in waiting} == {"Waits"}
            assert f"copies compared: 0 of {len(waiting)}" in (await run("table", "describe", "t"))[1]

            # The new replica of one tablet holds the rows of another one.
            wrong = waiting[0]
            node = next(n for n in cluster.running.values() if n.node_id == wrong.node_id)
            stores = {r.tablet_id: r for r in node.replicas if isinstance(r.machine, TabletStore)}
            storage: Any = stores.pop(wrong.tablet_id).started
            kept, storage.storage.machine = storage.storage.machine, next(iter(stores.values())).machine

            async def driven() -> list[CopyCheck]:
                found.clear()
                await drive([cluster.master_address], POLICY, until_healthy=True, on_copy=found.append)
                return list(found)

            assert len(await driven()) == len(waiting)
            assert [c.made.tablet_id for c in found if c.differs] == [wrong.tablet_id]
            told = {c.tablet_id: c.record for c in await compared_copies(client, "t")}
            assert told.keys() == {c.tablet_id for c in waiting}
            assert [t for t, record in told.items() if record.differs] == [wrong.tablet_id]
            (check,) = [c for c in found if c.differs]
            assert (told[wrong.tablet_id].rows, told[wrong.tablet_id].checksum) == check.sums[0]

            _, out, _ = await run("table", "describe", "t")
            assert (
                f"copies compared: {len(waiting)} of {len(waiting)}, the last " in out
                and "1 replica DIFFERS" in out
            )
            _, out, _ = await run("tablet", "describe", wrong.tablet_id[:8])
            (line,) = [line for line in out.splitlines() if "DIFFERS from replica" in line]
            assert (
                "`stele table verify t` compares all replicas" in line and f"{check.sums[0][1]:016x}" in line
            )
            (shown,) = json.loads((await run("tablet", "describe", wrong.tablet_id[:8], "--json"))[1])[
                "copies"
            ]
            assert shown["result"] == "Differs" and shown["checksum"] == f"{check.sums[0][1]:016x}"
            described = json.loads((await run("table", "describe", "t", "--json"))[1])["copies"]
            assert sorted(c["result"] for c in described) == ["Differs"] + ["Equal"] * (len(waiting) - 1)
            code, out, _ = await run("ksck")
            assert code == 1 and f"tablet {wrong.tablet_id[:8]} of t: replica " in out
            assert "1 replica with other rows than another voter, all tablets healthy" in out

            # Each driver compares it again, and ends the difference once it holds the rows of all others.
            assert [c.differs for c in await driven()] == [True]
            storage.storage.machine = kept
            assert [c.equal for c in await driven()] == [True] and await driven() == []
            assert {c.record.result for c in await compared_copies(client, "t")} == {"Equal"}
            assert "1 replica with other rows" not in (await run("ksck"))[1]
    finally:
        await cluster.close()
