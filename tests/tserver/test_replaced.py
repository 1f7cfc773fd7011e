"""A tablet that nobody leads in time is REPLACED by another: who had opened its table or key space before goes on with that."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from stele.client import AsyncClient, AsyncScanner
from stele.master.leadership import MasterOptions
from stele.master.master import Master
from tests.consensus.cluster import wait_until
from tests.tserver.local import SCHEMA, LocalCluster, master_of

# A node that is off is taken for alive, so that tablets are placed there.
MASTER = MasterOptions(
    heartbeat_interval_ms=200, alive_ms=600_000, create_timeout_ms=3_000, order_retry_ms=100, sweep_ms=100
)


async def test_what_was_opened_before_its_tablet_was_replaced_goes_on_with_the_next(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path, nodes=1, master_options=MASTER)
    try:
        await cluster.start()
        async with AsyncClient([cluster.master_address], timeout_s=60) as client:
            await cluster.stop("node-0")
            space = await client.create_keyspace("k", replication_factor=1, wait=False)
            table = await client.create_table("t", SCHEMA, replication_factor=1, wait=False)
            waiting = [
                asyncio.create_task(space.replace("a", "1")),
                asyncio.create_task(table.put({"id": 1, "name": "n"})),
            ]
            scans = [
                asyncio.create_task(table.scan().to_table()),
                asyncio.create_task(_by_batches(table.scan(ordered=True))),
            ]
            master = master_of(cluster.running["master"])
            await wait_until(lambda: _replaced(master) == 2, timeout_s=60)
            lead = master.lead
            assert lead is not None
            lead.options = replace(MASTER, create_timeout_ms=600_000)  # a slow node makes them in the end
            await cluster.launch("node-0")
            await asyncio.gather(*waiting)
            for scan in scans:  # at a snapshot before the put
                assert (await scan).num_rows == 0
            assert await space.read("a") == b"1"
            assert await table.get(1) == {"id": 1, "name": "n"}
    finally:
        await cluster.close()


async def _by_batches(scanner: AsyncScanner) -> pa.Table:
    return pa.Table.from_batches([batch async for batch in scanner.batches()], scanner.plan.arrow_schema)


def _replaced(master: Master) -> int:
    """How many tables have lost a tablet so, by the master that leads."""
    lead = master.lead
    tablets = lead.catalog.tablets.values() if lead is not None else ()
    return len({t.table_id for t in tablets if t.state == "REPLACED"})
