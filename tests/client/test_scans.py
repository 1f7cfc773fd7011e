"""Scans: one snapshot, every row once, whichever replicas it took."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stele.client import AsyncClient, AsyncTable, Client, key_order, tablet_scan
from stele.model.errors import Closed, Code, NotLeader, Rejected, Retryable, SteleError, error_for
from stele.model.ids import ClusterId, new_id
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from stele.rpc.identity import Identity
from tests.client.small import SmallCluster, small_cluster
from tests.tablet.twin import flush

SCHEMA = Schema.make(
    [("day", "date"), ("id", "int64"), ("name", "string", True), ("v", "double", True)], ["day", "id"]
)
FOUR = PartitionSchema((HashPartition((0, 1), 4),))
ONE = PartitionSchema()
ROWS = 40_000


def rows() -> pa.Table:
    number = np.arange(ROWS)
    return pa.table(
        {
            "day": pa.array(number % 10, pa.int32()).cast(pa.date32()),
            "id": number,
            "name": [None if n % 7 == 0 else f"name {n}" for n in number.tolist()],
            "v": number / 2,
        }
    )


async def test_projection_predicates_ranges_limit_and_order(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, FOUR)
        await table.write_arrow(rows())
        assert (await table.scan().to_table()).num_rows == ROWS
        found = await table.scan(["id"], [("v", ">=", 100.0), ("name", "is_null")]).to_table()
        assert sorted(found["id"].to_pylist()) == [n for n in range(200, ROWS) if n % 7 == 0]
        assert found.schema.names == ["id"]
        ordered = await table.scan(["id", "day"], ordered=True, lower={"day": 3}, upper=[4]).to_table()
        assert ordered["id"].to_pylist() == [n for n in range(ROWS) if n % 10 == 3]
        for limit in (ROWS * 3 // 8, ROWS + 1, 10**30):  # of one tablet and a half, of more than there are
            assert (await table.scan(limit=limit).to_table()).num_rows == min(limit, ROWS)
            assert sum([b.num_rows async for b in table.scan(limit=limit).batches()]) == min(limit, ROWS)
        few = await table.scan(limit=17).to_table()
        assert few.num_rows == 17
        assert sum([b.num_rows async for b in table.scan(limit=17).batches()]) == 17
        first = await table.scan(["id"], ordered=True, limit=3).to_table()
        assert first["id"].to_pylist() == [0, 10, 20]
        frame = await table.scan(["id", "v"]).to_pandas()
        assert float(frame["v"].sum()) == float((np.arange(ROWS) / 2).sum())
        with pytest.raises(Rejected, match="colour"):
            table.scan(["colour"])
        with pytest.raises(Rejected):
            table.scan(predicates=[("v", ">", "much")])


async def test_a_snapshot_does_not_change_and_sees_what_this_client_wrote(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, FOUR)
        await table.write_arrow(rows())
        then = client.now()
        scanner = table.scan(["id"])
        await table.put({"day": "2020-01-01", "id": -1} | {"day": rows()["day"][0].as_py()})
        assert await table.scan(snapshot=then).count() == ROWS
        assert (await scanner.to_table()).num_rows == ROWS
        assert await table.scan().count() == ROWS + 1


async def test_a_snapshot_of_0_is_one_and_the_same_for_all_tablets(tmp_path: Path) -> None:
    """A node takes 0 in a ticket as its tablet's latest; the timestamp of a write that sent nothing is 0."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, FOUR)
        await table.write_arrow(rows())
        nothing = await table.write_arrow(rows().slice(0, 0))
        assert nothing.timestamp == 0
        for snapshot in (nothing.timestamp, np.int64(0), None):
            before = client.now()
            assert await table.scan(snapshot=snapshot).count() == ROWS
            asked = [node.snapshots.popleft() for node in cluster.nodes for _ in range(len(node.snapshots))]
            assert len(asked) == 4
            assert len(set(asked)) == 1
            assert asked[0] >= before > 0


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


async def test_an_empty_string_is_a_key_like_others(tmp_path: Path) -> None:
    """Encoded it has no bytes, which elsewhere stand for "no bound" and "nothing read yet"."""
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", Schema.make([("k", "string"), ("v", "int64")], ["k"]), ONE)
        await table.write_arrow(pa.table({"k": ["", "a", "b"], "v": [1, 2, 3]}))
        assert (await table.scan(upper=[""]).to_table()).num_rows == 0
        assert (await table.scan(lower=[""]).to_table()).num_rows == 3
        assert (await table.scan(upper=["a"]).to_table()).column("k").to_pylist() == [""]


async def test_a_bound_by_the_first_of_two_strings_may_hold_any_character(tmp_path: Path) -> None:
    """Where more follows, a string is encoded with its zero characters and its end marked."""
    async with small_cluster(tmp_path) as (_, client):
        schema = Schema.make([("a", "string"), ("b", "string")], ["a", "b"])
        table = await client.create_table("t", schema, ONE)
        keys = ["", "a", "a\0", "a\0b", "a\1", "b"]
        await table.write_arrow(pa.table({"a": keys, "b": keys}))
        for n, key in enumerate(keys):
            assert (await table.scan(lower=key, ordered=True).to_table())["a"].to_pylist() == keys[n:]
            assert (await table.scan(upper=key, ordered=True).to_table())["a"].to_pylist() == keys[:n]


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
        assert f"tablet {tablet.tablet_id}: no replica could be read for 4.0 s" in told
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
        connection = client._flight.get(address)
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
        assert client._flight.get(address) is connection
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


async def test_a_scan_that_is_left_early_ends_everywhere(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, FOUR)
        await table.write_arrow(rows())
        batches = table.scan().batches()
        assert (await anext(batches)).num_rows > 0
        await batches.aclose()
        assert await table.scan().count() == ROWS


async def test_scans_that_are_read_slowly_hold_up_no_others(tmp_path: Path) -> None:
    """Each kept four of a client's eight threads while its reader took nothing; scans within scans waited for ever."""
    async with small_cluster(tmp_path) as (cluster, client):
        hashed = PartitionSchema((HashPartition((0,), 6),))
        table = await client.create_table("t", Schema.make([("k", "int64")], ["k"]), hashed)
        for number in range(6):
            await table.write_arrow(pa.table({"k": range(100 * number, 100 * number + 100)}))
            for tablet in cluster.tablets_of("t"):
                flush(tablet.store)  # a file each, so a batch each: more than a reader lets wait
        slow = [table.scan().batches() for _ in range(3)]
        given = [(await anext(scan)).num_rows for scan in slow]
        await asyncio.sleep(0.3)
        async with asyncio.timeout(60):
            assert await table.scan().count() == 600
            for scan, rows in zip(slow, given):
                assert rows + sum([batch.num_rows async for batch in scan]) == 600
            left = table.scan().batches()
            await anext(left)
            await left.aclose()
        async with asyncio.timeout(60):
            while any(thread.name.startswith("stele-batches") for thread in threading.enumerate()):
                await asyncio.sleep(0.05)


async def test_a_scan_by_batches_that_waits_for_its_reader_ends_with_its_client(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        hashed = PartitionSchema((HashPartition((0, 1), 16),))
        table = await client.create_table("t", SCHEMA, hashed)
        await table.write_arrow(rows())
        batches = table.scan().batches()
        await anext(batches)
        await asyncio.sleep(0.3)
        await client.close()
        with pytest.raises(Closed):
            async with asyncio.timeout(60):
                async for _ in batches:
                    pass


async def test_a_refusal_is_not_tried_elsewhere(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA, FOUR)
        await table.put({"day": rows()["day"][0].as_py(), "id": 1})
        for code in (Code.SNAPSHOT_TOO_OLD, Code.CLOCK_AHEAD, Code.SCHEMA_MISMATCH):
            scans = sum(node.scans for node in cluster.nodes)
            for node in cluster.nodes:
                node.flight_fault.clear()
                node.flight_fault.extend([lambda n, code=code: error_for(code, "gone")] * 4)
            with pytest.raises(SteleError) as caught:
                await table.scan().to_table()
            assert caught.value.code is code
            assert sum(node.scans for node in cluster.nodes) <= scans + 4


async def test_the_blocking_client_does_the_same(tmp_path: Path) -> None:
    def use(address: str) -> None:
        with Client([address]) as client:
            table = client.create_table("t", SCHEMA, FOUR)
            assert table.write_arrow(rows()).rows_written == ROWS
            assert table.get({"day": rows()["day"][3].as_py(), "id": 3}, ["v"]) == {"v": 1.5}
            assert table.scan(["v"]).to_table().num_rows == ROWS
            assert sum(batch.num_rows for batch in table.scan(["v"]).batches()) == ROWS
            with table.new_session() as session:
                session.delete({"day": rows()["day"][3].as_py(), "id": 3})
            assert table.scan().count() == ROWS - 1
            assert len(table.scan(limit=5).to_pandas()) == 5
            with pytest.raises(Rejected):
                client.open_table("nothing")

    async with small_cluster(tmp_path) as (cluster, _):
        await asyncio.to_thread(use, cluster.master_address)


async def test_the_blocking_client_copies_a_table_as_it_reads_it(tmp_path: Path) -> None:
    """The batches were waited for on the thread that was to read them: neither call ended, nor did close()."""

    def copy(address: str) -> None:
        with Client([address]) as client:
            old, new = client.create_table("old", SCHEMA, FOUR), client.create_table("new", SCHEMA, FOUR)
            old.write_arrow(rows())
            seen: list[int] = []
            assert new.write_arrow(old.scan().batches(), on_rows=seen.append).rows_written == ROWS
            assert sum(seen) == ROWS and new.scan().count() == ROWS
            result = new.write_arrow(old.scan().batches(), "insert", raise_row_errors=False)
            assert len(result.row_errors) == ROWS

    async with small_cluster(tmp_path) as (cluster, _), asyncio.timeout(60):
        await asyncio.to_thread(copy, cluster.master_address)


async def test_a_blocking_call_on_the_clients_own_thread_is_refused(tmp_path: Path) -> None:
    def use(address: str) -> None:
        with Client([address]) as client:
            table = client.create_table("t", SCHEMA, ONE)
            refused: list[Rejected] = []

            def look(_: int) -> None:
                for call in (lambda: table.scan().count(), client.close):
                    with pytest.raises(Rejected, match="its own thread") as caught:
                        call()
                    refused.append(caught.value)

            table.write_arrow(rows().slice(0, 5), on_rows=look)
            assert len(refused) == 2
            batches = table.scan().batches()
            next(batches)
            client.run(_end(batches))  # as the garbage collector may, wherever it runs
            with pytest.raises(SystemExit, match=r"^5$"):
                table.write_arrow(rows().slice(0, 5), on_rows=sys.exit)
            assert table.scan().count() == 5

    async def _end(batches: Iterator[pa.RecordBatch]) -> None:
        batches.close()  # type: ignore[attr-defined]

    async with small_cluster(tmp_path) as (cluster, _), asyncio.timeout(60):
        await asyncio.to_thread(use, cluster.master_address)


@pytest.mark.parametrize("columns", [["id", "id"], ["v", "id", "v"], ["name", "name"]])
@pytest.mark.parametrize("ordered", [False, True])
async def test_a_column_asked_for_twice_is_there_twice(
    tmp_path: Path, columns: list[str], ordered: bool
) -> None:
    """As a table without order it was; in batches, or in order, it was a missing key column or a KeyError."""
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, FOUR)
        await table.write_arrow(rows().slice(0, 50))
        scanner = table.scan(columns, ordered=ordered)
        found = await scanner.to_table()
        assert found.schema.names == columns and found.num_rows == 50
        assert found.column(0).equals(rows()[columns[0]].take(_by_key(50))) or not ordered
        batches = [batch async for batch in scanner.batches()]
        assert {tuple(b.schema.names) for b in batches} == {tuple(columns)}
        assert sum(b.num_rows for b in batches) == 50


def _by_key(count: int) -> list[int]:
    return sorted(range(count), key=lambda n: (n % 10, n))


@pytest.mark.parametrize("columns", [None, ["name", "v", "name"]], ids=["all", "twice"])
async def test_more_of_a_column_than_an_array_holds_is_put_in_order_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: list[str] | None
) -> None:
    """Arrow refused to join more than 2 GiB of it, of which this test holds a small part."""
    monkeypatch.setattr(key_order, "_TAKE_BYTES_MAX", 20_000)
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, FOUR)
        await table.write_arrow(rows())
        in_order = rows().take(_by_key(ROWS)).cast(SCHEMA.to_arrow())
        scanner = table.scan(columns, ordered=True)
        found = await scanner.to_table()
        assert found.equals(in_order if columns is None else in_order.select(columns))
        names = found.column("name" if columns is None else 0)
        assert names.num_chunks > 10 and all(chunk.nbytes < 40_000 for chunk in names.chunks)
        batches = [batch async for batch in scanner.batches()]
        assert pa.Table.from_batches(batches).equals(found)
        assert (await table.scan(ordered=True, limit=9).to_table()).equals(in_order.slice(0, 9))


@pytest.mark.parametrize("whole", [True, False])
async def test_a_scan_of_a_table_that_was_deleted_says_so_at_once(tmp_path: Path, whole: bool) -> None:
    """Its replicas say only that they are gone, and would be asked in turn until the scan's time is over."""
    async with small_cluster(tmp_path) as (cluster, client), AsyncClient([cluster.master_address]) as other:
        await client.create_table("t", SCHEMA, FOUR)
        table = await other.open_table("t")
        await client.delete_table("t")
        for tablet in cluster.tablets.values():
            tablet.store.close()
        cluster.tablets.clear()
        for _ in range(2):  # asked once more, it is known
            with pytest.raises(Rejected, match=r"^NOT_FOUND: no table") as caught:
                async with asyncio.timeout(60):
                    scanner = table.scan(timeout_s=600)
                    if whole:
                        await scanner.to_table()
                    else:
                        async for _ in scanner.batches():
                            pass
            assert caught.value.code is Code.NOT_FOUND


async def test_a_date_that_python_has_no_value_for_is_told_by_its_column(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, ONE)
        await table.put({"day": 3_000_000, "id": 1})
        with pytest.raises(Rejected, match=r"columns day: .*date_as_object=False"):
            await table.scan().to_pandas()
        frame = (await table.scan().to_table()).to_pandas(date_as_object=False)
        assert str(frame["day"][0]).startswith("10183-09-21")
