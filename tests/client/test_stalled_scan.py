"""Scans of replicas that go silent: the process is there, its connections stand, and nothing comes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stele.client import AsyncClient, AsyncScanner, AsyncTable
from stele.model.partition import PartitionSchema
from stele.model.schema import Schema
from stele.rpc import flight_client
from tests.harness import Cluster
from tests.harness.processes import Member

SCHEMA = Schema.make([("id", "int64"), ("text", "string")], ["id"])
ROWS = 300_000


def serving(cluster: Cluster, scanner: AsyncScanner) -> Member:
    """The node that the scan's only tablet is read from."""
    address = scanner.plan.tablets[0].target().flight_address
    return next(m for m in cluster.nodes if address.startswith(f"{m.host}:"))


async def test_a_node_that_stops_in_the_middle_of_a_scan_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle, and before its first batch: it takes the connection and the ticket, and is silent."""
    monkeypatch.setattr(flight_client, "STALL_TIMEOUT_S", 2.0)
    async with Cluster(tmp_path, masters=1, nodes=3) as cluster:
        async with AsyncClient(cluster.master_addresses) as client:
            table = await client.create_table("t", SCHEMA, PartitionSchema())
            text = "x" * 250  # more than what sockets and windows hold
            await table.write_arrow(pa.table({"id": np.arange(ROWS), "text": pa.array([text] * ROWS)}))
        for whole in (False, True):
            async with AsyncClient(cluster.master_addresses) as client:
                await one_stops(cluster, await client.open_table("t"), whole)


async def one_stops(cluster: Cluster, table: AsyncTable, whole: bool) -> None:
    scanner = table.scan(["id", "text"], ordered=True)
    stopped: list[Member] = []
    try:
        async with asyncio.timeout(90):
            if whole:
                await table.scan(["id"], limit=1).to_table()
                stopped.append(serving(cluster, scanner))
                cluster.pause(stopped[0])
                found = (await scanner.to_table())["id"].to_numpy()
            else:
                parts = []
                async for batch in scanner.batches():
                    if not stopped:
                        stopped.append(serving(cluster, scanner))
                        cluster.pause(stopped[0])
                    parts.append(batch.column(0).to_numpy())
                found = np.concatenate(parts)
        assert np.array_equal(found, np.arange(ROWS))
    finally:
        for member in stopped:
            cluster.resume(member)
