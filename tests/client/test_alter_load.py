"""Tables that are altered under load, on real processes: old and new clients at once, and nodes that are killed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from stele.client import AsyncClient, AsyncTable
from stele.model.errors import Code, SteleError
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from tests.harness import Cluster

SCHEMA = Schema.make([("id", "int64"), ("name", "string", True), ("n", "int64", False, "7")], ["id"])
FOUR = PartitionSchema((HashPartition((0,), 4),))
CHANGES = 6
_PACE_S = 0.02
"""Between the rows of one writer: without it 16 writers take all that the machine has, for as long as changes last."""


async def test_columns_come_and_go_under_load_while_a_master_and_a_node_are_killed(tmp_path: Path) -> None:
    """Nothing acknowledged is lost or wrong, each row has the default of the time when it was written, and no write
    of an old or a new client waits for long."""
    async with (
        Cluster(tmp_path, masters=3, nodes=3) as cluster,
        AsyncClient(cluster.master_addresses) as client,
        AsyncClient(cluster.master_addresses) as other,
    ):
        table = await client.create_table("t", SCHEMA, FOUR)
        old = await other.open_table("t")
        stop, waits = asyncio.Event(), [0.0]
        written: dict[int, str] = {}

        async def write(into: AsyncTable, number: int) -> None:
            while not stop.is_set():
                began = time.monotonic()
                try:
                    await into.insert({"id": number, "name": str(number)})
                    written[number] = str(number)
                except SteleError as exc:
                    assert exc.code in (Code.UNKNOWN_OUTCOME, Code.NO_QUORUM), exc
                waits.append(time.monotonic() - began)
                number += 16
                await asyncio.sleep(_PACE_S)

        writers = [asyncio.create_task(write((table, old)[n % 2], n)) for n in range(16)]
        took = []
        for change in range(CHANGES):
            began = time.monotonic()
            if change == 2:
                cluster.kill(cluster.masters[0])
            if change == 4:
                cluster.kill(cluster.nodes[0])
            drop = [f"c{change - 1}"] if change else []
            await table.alter(add=[(f"c{change}", "int64", False, str(change))], drop=drop, timeout_s=120)
            took.append(time.monotonic() - began)
            if change == 2:
                cluster.restart(cluster.masters[0])
            if change == 4:
                cluster.restart(cluster.nodes[0])
            await asyncio.sleep(0.3)
        stop.set()
        await asyncio.gather(*writers)
        found = (await table.scan(ordered=True).to_table()).to_pylist()
        by_id = {row["id"]: row for row in found}
        assert len(by_id) == len(found)
        assert {number: by_id[number]["name"] for number in written} == written
        assert {(row["n"], row[f"c{CHANGES - 1}"]) for row in found} == {(7, CHANGES - 1)}
        assert len(written) > 100
        print(
            f"{len(written)} rows, {CHANGES} changes of {min(took):.2f} to {max(took):.2f} s, "
            f"longest wait of a write {max(waits):.2f} s"
        )
