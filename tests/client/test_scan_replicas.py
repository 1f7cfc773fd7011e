"""Scans and the replicas that serve them: one that breaks off, moves, is full or gone. Every row comes once."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from stele.client import AsyncClient, AsyncTable, tablet_scan
from stele.model.errors import Code, NotLeader, Rejected, Retryable, SteleError, error_for
from stele.model.ids import ClusterId, new_id
from stele.model.incarnation import raised
from stele.model.partition import PartitionSchema
from stele.model.schema import Schema
from stele.rpc.identity import Identity
from tests.client.small import SmallCluster, small_cluster
from tests.client.test_scans import FOUR, ONE, ROWS, SCHEMA, rows
from tests.tablet.twin import flush


@pytest.mark.parametrize("whole", [True, False])
async def test_a_scan_goes_on_at_another_replica(tmp_path: Path, whole: bool) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, FOUR)
        await table.write_arrow(rows())
        for node in cluster.nodes[:2]:
            for at in (1, 0):
                node.flight_fault.append(
                    lambda n, at=at: Retryable("moved", code=Code.UNAVAILABLE) if n == at else None
                )
        scanner = table.scan(["name", "v"])
        if whole:
            found = await scanner.to_table()
        else:
            found = pa.Table.from_batches([batch async for batch in scanner.batches()])
        assert found.num_rows == ROWS
        assert sorted(found["v"].to_pylist()) == [n / 2 for n in range(ROWS)]


async def table_of_files(cluster: SmallCluster, client: AsyncClient) -> AsyncTable:
    """With 300 rows in three files, so three batches."""
    table = await client.create_table("t", Schema.make([("k", "int64")], ["k"]), ONE)
    for first in (0, 100, 200):
        await table.write_arrow(pa.table({"k": range(first, first + 100)}))
        flush(cluster.tablets_of("t")[0].store)
    return table


async def test_a_scan_without_order_that_breaks_off_gives_each_row_once(tmp_path: Path) -> None:
    """It begins anew: nobody knows which rows another replica gives first."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await table_of_files(cluster, client)
        for node in cluster.nodes:
            node.flight_fault.append(lambda n: Retryable("moved", code=Code.UNAVAILABLE) if n == 1 else None)
        found = await table.scan().to_table()
        assert sorted(found["k"].to_pylist()) == list(range(300))
        assert sum(node.scans for node in cluster.nodes) == 4
        for node in cluster.nodes:
            node.flight_fault.append(lambda n: Retryable("moved", code=Code.UNAVAILABLE) if n == 1 else None)
        found = pa.Table.from_batches([batch async for batch in table.scan().batches()])
        assert sorted(found["k"].to_pylist()) == list(range(300))


async def test_a_scan_that_breaks_off_gives_no_more_rows_than_its_limit(tmp_path: Path) -> None:
    """Who resumes has some of them already."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await table_of_files(cluster, client)
        for node in cluster.nodes:
            node.flight_fault.append(lambda n: Retryable("moved", code=Code.UNAVAILABLE) if n == 1 else None)
        plan = table.scan(ordered=True, limit=150).plan
        one = tablet_scan.TabletScan(client._flight, plan, plan.tablets[0], 10.0, lambda: None)
        found = await asyncio.to_thread(
            lambda: [batch["k"].to_pylist() for batch in one if batch is not None]
        )
        assert sum(node.scans for node in cluster.nodes) == 2, "it broke off"
        assert [k for keys in found for k in keys] == list(range(150))


@pytest.mark.parametrize("before", [0, raised(0)], ids=["first", "recovered before"])
async def test_a_scan_mixes_no_rows_of_two_histories(tmp_path: Path, before: int) -> None:
    """The tablet lost its majority, and was recovered while it was scanned. A client of an earlier view asks for any."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await table_of_files(cluster, client)
        (tablet,) = cluster.tablets_of("t")
        tablet.incarnation = before

        def recovered(number: int) -> SteleError | None:
            if number != 1:
                return None
            tablet.incarnation = raised(before)
            return Retryable("gone", code=Code.UNAVAILABLE)

        def armed() -> None:
            tablet.incarnation = before
            for node in cluster.nodes:
                node.flight_fault.clear()
                node.flight_fault.append(recovered)

        armed()
        with pytest.raises(
            Rejected, match=r"was recovered as incarnation .* while it was scanned at"
        ) as caught:
            await table.scan(ordered=True).to_table()
        assert caught.value.code is Code.SNAPSHOT_TOO_OLD
        armed()
        with pytest.raises(Rejected):
            async for _ in table.scan().batches():
                pass
        armed()
        found = await table.scan().to_table()
        assert sorted(found["k"].to_pylist()) == list(range(300)), "without order it began anew"
        assert not found.schema.metadata
        async for batch in table.scan().batches():
            assert not batch.schema.metadata


async def test_a_scan_that_gives_rows_may_take_longer_than_its_timeout(tmp_path: Path) -> None:
    """Which counts from the last of them, also where its replica breaks off then."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await table_of_files(cluster, client)

        def slow(number: int) -> Retryable | None:
            if number == 1:
                time.sleep(5.0)
            return Retryable("moved", code=Code.UNAVAILABLE) if number == 2 else None

        cluster.nodes[0].flight_fault.append(slow)
        assert (await table.scan(ordered=True, timeout_s=4.0).to_table())["k"].to_pylist() == list(range(300))
        assert sum(node.scans for node in cluster.nodes) == 2


async def test_a_scan_goes_on_behind_an_empty_key(tmp_path: Path) -> None:
    """It began anew, and gave that row twice."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", Schema.make([("k", "string"), ("v", "int64")], ["k"]), ONE)
        store = cluster.tablets_of("t")[0].store
        for keys in ([""], ["a", "b"]):  # a file each, so a batch each
            await table.write_arrow(pa.table({"k": keys, "v": [0] * len(keys)}))
            flush(store)
        for node in cluster.nodes:
            node.flight_fault.append(lambda n: Retryable("moved", code=Code.UNAVAILABLE) if n == 1 else None)
        found = await table.scan(["k"], ordered=True).to_table()
        assert found["k"].to_pylist() == ["", "a", "b"]


async def test_a_replica_whose_port_is_closed_is_passed_over(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, FOUR)
        await table.write_arrow(rows())
        await cluster.nodes[0].stop()
        assert await table.scan().count() == ROWS


async def test_an_address_that_another_cluster_has_by_now_is_passed_over(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, FOUR)
        await table.write_arrow(rows())
        for node in cluster.nodes[:2]:
            assert node.flight is not None
            node.flight._server._identity = Identity(ClusterId(new_id()))
        assert await table.scan().count() == ROWS
        assert cluster.nodes[2].flight is not None
        cluster.nodes[2].flight._server._identity = Identity(ClusterId(new_id()))
        with pytest.raises(Rejected, match="this is cluster") as caught:
            await table.scan(timeout_s=3.0).count()
        assert caught.value.code is Code.WRONG_CLUSTER


async def test_where_no_replica_can_be_read_it_is_said_what_each_answered(tmp_path: Path) -> None:
    """Not only by the last one asked, which may be down beside one that tells what is wrong."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, PartitionSchema())
        (tablet,) = cluster.tablets.values()
        assert cluster.nodes[0].flight is not None
        for node in cluster.nodes[1:]:
            await node.stop()
        cluster.nodes[0].flight_fault.extend([lambda n: Retryable("no leader", code=Code.NOT_LEADER)] * 1_000)
        await table.put({"day": rows()["day"][0].as_py(), "id": 1})
        with pytest.raises(Retryable) as caught:
            await table.scan(timeout_s=4.0).to_table()
        told = str(caught.value)
        assert f"tablet {tablet.tablet_id[:8]}: no replica could be read for 4.0 s" in told
        assert f"127.0.0.1:{cluster.nodes[0].flight.port} (no leader)" in told
        assert told.count("refused") == 2, told


@pytest.mark.parametrize("whole", [True, False])
async def test_replicas_that_listen_elsewhere_now_are_found(tmp_path: Path, whole: bool) -> None:
    """A client that only scans outlives every pod it knew, as in a rolling upgrade."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, FOUR)
        await table.write_arrow(rows())
        for node in cluster.nodes:
            await node.move()
        scanner = table.scan(["id"])
        if whole:
            assert await scanner.count() == ROWS
        else:
            assert sum([batch.num_rows async for batch in scanner.batches()]) == ROWS


async def test_masters_are_not_asked_for_what_a_replica_answered(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, FOUR)
        await table.put({"day": rows()["day"][0].as_py(), "id": 1})
        before = cluster.located
        cluster.nodes[0].flight_fault.extend([lambda n: Retryable("full", code=Code.THROTTLED)] * 4)
        assert await table.scan().count() == 1
        assert cluster.located == before


async def test_a_scan_waits_for_a_place_where_too_many_run(tmp_path: Path) -> None:
    """A node that says so is alive: longer than the timeout, seldom, and on the connection that stands."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        await table.put({"day": rows()["day"][0].as_py(), "id": 1})
        (place,) = table.locations.tablets
        assert await table.scan().count() == 1
        address = place.target().flight_address
        connection = client._flight.connections.get(address)
        until = 0.0
        full, follower = Retryable("full", code=Code.THROTTLED), NotLeader("not the leader")

        def places(number: int) -> Retryable | None:
            return full if time.monotonic() < until else None

        leader, *others = cluster.nodes
        leader.flight_fault.extend([places] * 1_000)
        for node in others:
            node.flight_fault.extend([lambda number: follower] * 1_000)
        # Where the machine stands still so long, no answer comes in that time.
        for timeout_s in (1.0, 4.0, 16.0):
            before, until = leader.scans, time.monotonic() + 2.5 * timeout_s
            with suppress(Retryable):
                assert await table.scan(timeout_s=timeout_s).count() == 1
                break
        else:
            raise AssertionError("it was given up")
        assert time.monotonic() > until and leader.scans - before <= 15 * timeout_s
        assert client._flight.connections.get(address) is connection
        assert place.target().flight_address == address  # writers ask it as before


async def test_a_scan_that_never_gets_a_place_is_given_up(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        await table.put({"day": rows()["day"][0].as_py(), "id": 1})
        for node in cluster.nodes:
            node.flight_fault.extend([lambda number: Retryable("full", code=Code.THROTTLED)] * 1_000)
        with pytest.raises(Retryable, match=r"no replica could be read for 2\.0 s: .*full") as caught:
            async with asyncio.timeout(60):
                await table.scan(timeout_s=0.2).count()
        assert caught.value.code is Code.THROTTLED


async def test_history_that_one_replica_dropped_is_read_from_another(tmp_path: Path) -> None:
    """Only if all that answer have dropped it the rows are gone. That is told at once, and writers keep their leader."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await table_of_files(cluster, client)
        (place,) = table.locations.tablets
        leader = place.target()
        assert {r.node_id for r in place.replicas} == {n.identity.node_id for n in cluster.nodes}
        for code in (Code.SNAPSHOT_TOO_OLD, Code.CURSOR_LOST):

            def dropped(number: int, code: Code = code) -> SteleError:
                return error_for(code, "gone")

            node = next(n for n in cluster.nodes if n.identity.node_id == leader.node_id)
            node.flight_fault.append(dropped)
            found = await table.scan().to_table()
            assert sorted(found["k"].to_pylist()) == list(range(300)) and not node.flight_fault
            assert place.target() == leader
            for other in cluster.nodes:
                fault = dropped if other is node else lambda number: Retryable("off", code=Code.UNAVAILABLE)
                other.flight_fault.append(fault)
            with pytest.raises(SteleError, match="gone") as caught:
                await table.scan(timeout_s=60.0).to_table()
            assert caught.value.code is code


async def test_a_refusal_is_not_tried_elsewhere(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, FOUR)
        await table.put({"day": rows()["day"][0].as_py(), "id": 1})
        for code in (Code.CLOCK_AHEAD, Code.SCHEMA_MISMATCH):
            scans = sum(node.scans for node in cluster.nodes)
            for node in cluster.nodes:
                node.flight_fault.clear()
                node.flight_fault.extend([lambda n, code=code: error_for(code, "gone")] * 8)
            with pytest.raises(SteleError) as caught:
                await table.scan().to_table()
            assert caught.value.code is code
            # The schema may have changed, so such a scan is planned again once.
            plans = 2 if code is Code.SCHEMA_MISMATCH else 1
            assert sum(node.scans for node in cluster.nodes) <= scans + 4 * plans
