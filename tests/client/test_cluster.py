"""The client on real processes: what was acknowledged is there, once, also when nodes are killed in between."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stele.client import AsyncClient
from stele.client.admin import cluster_view
from stele.client.health import examine
from stele.client.tablet_scan import TabletScan
from stele.model.errors import Code, SteleError
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from tests.harness import Cluster

SCHEMA = Schema.make([("id", "int64"), ("name", "string", True), ("n", "int64", True)], ["id"])
FOUR = PartitionSchema((HashPartition((0,), 4),))


async def test_tables_rows_and_key_spaces_on_real_nodes(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, masters=1, nodes=3) as cluster,
        AsyncClient(cluster.master_addresses) as client,
    ):
        table = await client.create_table("t", SCHEMA, FOUR)
        data = pa.table({"id": np.arange(50_000), "name": [f"n{i}" for i in range(50_000)]})
        assert (await table.write_arrow(data)).rows_written == 50_000
        then = client.now()
        await table.update({"id": 7, "n": 70})
        await table.delete({"id": 8})
        assert await table.get({"id": 7}) == {"id": 7, "name": "n7", "n": 70}
        assert await table.scan().count() == 49_999
        assert await table.scan(snapshot=then).count() == 50_000
        found = await table.scan(["id"], [("id", "<", 10)], ordered=True).to_table()
        assert found["id"].to_pylist() == [0, 1, 2, 3, 4, 5, 6, 7, 9]
        space = await client.create_keyspace("s")
        assert await space.elect("primary", "me") == "me"
        assert await space.list() == [(b"primary", b"me")]
        health = examine(await cluster_view(client.masters))
        async with asyncio.timeout(60):
            while not (health.healthy and {node.state for node in health.nodes} == {"alive"}):
                await asyncio.sleep(0.1)
                health = examine(await cluster_view(client.masters))
        for _ in range(10):  # where the machine stands still a node is silent for a while
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "stele.cli", "ksck", "--masters", cluster.master_addresses[0]),
                stdout=asyncio.subprocess.PIPE,
            )
            out, _ = await process.communicate()
            if process.returncode == 0:
                break
        assert process.returncode == 0, out.decode()
        assert out.decode().splitlines()[-1] == "OK"
        await client.delete_table("t")
        assert [info.name for info in await client.list_tables()] == ["s"]


async def test_a_leader_that_says_nothing_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped: nothing is refused, its connection stands, and here neither an attempt nor pings time out."""
    monkeypatch.setattr("stele.client.attempts.ATTEMPT_TIMEOUT_S", 300.0)
    monkeypatch.setattr("stele.rpc.connection.KEEPALIVE_TIME_MS", 300_000)
    async with (
        Cluster(tmp_path, masters=1, nodes=3) as cluster,
        AsyncClient(cluster.master_addresses, timeout_s=300) as client,
    ):
        table = await client.create_table("t", SCHEMA, FOUR)
        await table.write_arrow(pa.table({"id": np.arange(100)}))
        stopped = cluster.member(table.locations.by_ordinal([0])[0].target().node_id)
        cluster.pause(stopped)
        try:
            async with asyncio.timeout(60):
                await asyncio.gather(*(table.put({"id": n, "n": n}) for n in range(100)))
                assert await table.get({"id": 7}) == {"id": 7, "name": None, "n": 7}
        finally:
            cluster.resume(stopped)


async def test_inserts_while_nodes_are_killed_are_there_once(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, masters=1, nodes=3) as cluster,
        AsyncClient(cluster.master_addresses) as client,
    ):
        table = await client.create_table("t", SCHEMA, FOUR)
        acknowledged: list[int] = []
        unknown: list[int] = []
        stop = asyncio.Event()

        async def write(number: int) -> None:
            while not stop.is_set():
                try:
                    await table.insert({"id": number})
                    acknowledged.append(number)
                except SteleError as exc:
                    # A retry of an insert that had been done would be told ALREADY_PRESENT.
                    assert exc.code in (Code.UNKNOWN_OUTCOME, Code.NO_QUORUM), exc
                    unknown.append(number)
                number += 8

        writers = [asyncio.ensure_future(write(number)) for number in range(8)]
        await cluster.kill_each()
        stop.set()
        await asyncio.gather(*writers)
        found = (await table.scan(["id"]).to_table())["id"].to_pylist()
        assert len(found) == len(set(found))
        assert set(acknowledged) <= set(found)
        assert set(found) <= set(acknowledged) | set(unknown)
        assert len(acknowledged) > 50


async def test_a_scan_goes_on_at_the_last_replica_that_is_left(tmp_path: Path) -> None:
    """Two of three nodes are killed in the middle: nobody can be elected, and the prepared snapshot needs no leader."""
    rows = 150_000
    async with (
        Cluster(tmp_path, masters=1, nodes=3) as cluster,
        AsyncClient(cluster.master_addresses) as client,
    ):
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        data = pa.table({"id": np.arange(rows), "name": [f"{i:0120}" for i in range(rows)]})
        await table.write_arrow(data)
        plan = table.scan(["id", "name"], ordered=True).plan
        plan = replace(plan, spec=replace(plan.spec, batch_rows=2_000))
        await table.reads.prepare(plan)
        (tablet,) = plan.tablets
        assert tablet.tablet_id in plan.prepared
        await table.delete({"id": 149_999})  # later than the snapshot
        scan = TabletScan(client._flight, plan, tablet, 60.0, lambda: None)

        def read(batches: Iterator[pa.RecordBatch | None], most: int) -> list[int]:
            return [
                n for batch in islice(batches, most) if batch is not None for n in batch["id"].to_pylist()
            ]

        batches = iter(scan)
        found = await asyncio.to_thread(read, batches, 3)
        assert found == list(range(6_000))
        leader = cluster.member(tablet.target().node_id)
        cluster.kill(leader)
        cluster.kill(next(node for node in cluster.nodes if node is not leader))
        found += await asyncio.to_thread(read, batches, rows)
        assert found == list(range(rows))
