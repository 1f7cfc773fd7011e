"""Ranges that are added and dropped, through clients that know of it and clients that do not: nodes as they run,
in one event loop."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

import stele
from stele.cli.range_text import bounds_for, parse_ranges
from stele.client import AsyncClient, AsyncTable
from stele.model.errors import Code, Rejected, Retryable
from stele.model.keys import encode_tuple
from stele.model.schema import Schema
from tests.client.commands import runner
from tests.consensus.cluster import wait_until
from tests.tserver.local import LocalCluster, master_of

SCHEMA = Schema.make([("n", "int64"), ("k", "int64"), ("text", "string", True)], ["n", "k"])
RANGED = stele.range("n", ranges=[(0, 10), (10, 20)])


async def made(client: AsyncClient, *parts: object) -> AsyncTable:
    table = await client.create_table("t", SCHEMA, list(parts) or [stele.hash("k", buckets=2), RANGED])
    for n in range(20):
        await table.put({"n": n, "k": n})
    return table


async def ns(table: AsyncTable) -> list[int]:
    return sorted((await table.scan(["n"]).to_table()).column("n").to_pylist())


async def test_a_row_outside_all_ranges_is_refused_alone(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        table = await made(client)
        with pytest.raises(Rejected, match="no range of the table covers this row") as caught:
            await table.put({"n": 20, "k": 0})
        assert caught.value.code is Code.NOT_FOUND
        results = await asyncio.gather(
            *(table.put({"n": n, "k": 1}) for n in range(18, 23)), return_exceptions=True
        )
        assert [isinstance(r, Rejected) for r in results] == [False, False, True, True, True]
        assert await table.get((25, 0)) is None
        result = await table.write_arrow(
            pa.table({"n": [5, -1, 6, 99], "k": [5, 0, 6, 0]}), raise_row_errors=False
        )
        assert result.rows_written == 2
        assert [(e.row, e.code) for e in result.row_errors] == [(1, Code.NOT_FOUND), (3, Code.NOT_FOUND)]
        session = table.new_session()
        await session.upsert({"n": 7, "k": 7})
        await session.upsert({"n": 70, "k": 7})
        with pytest.raises(stele.RowErrors) as errors:
            await session.flush()
        assert [(e.row, e.code) for e in errors.value.errors] == [(1, Code.NOT_FOUND)]
        assert set(await ns(table)) == set(range(20))


async def test_an_added_range_and_clients_that_do_not_know_it(cluster: LocalCluster) -> None:
    async with cluster.client() as client, cluster.client() as other:
        table = await made(client)
        old = await other.open_table("t")
        session = old.new_session()
        await table.alter(add_ranges=[(20, 30), (None, 0)])
        await table.put({"n": 25, "k": 0})
        # The old one finds what was written, also by a scan and a point read.
        assert await ns(old) == [*range(20), 25]
        other_old = await other.open_table("t")
        await table.alter(add_ranges=[(30, None)])
        await table.put({"n": 35, "k": 0})
        assert (await other_old.get((35, 0)) or {})["n"] == 35
        await session.upsert({"n": 26, "k": 0})
        await session.flush()
        await old.put({"n": -5, "k": 0})
        await old.write_arrow(pa.table({"n": [40], "k": [1]}))
        assert await ns(table) == [-5, *range(20), 25, 26, 35, 40]
        info = await client.describe("t")
        assert info.partitioning[-1] == stele.range("n", split_at=[0, 10, 20, 30])
        assert info.tablets == info.tablets_running == 10


async def test_a_dropped_range_takes_its_rows_with_it(cluster: LocalCluster) -> None:
    async with cluster.client() as client, cluster.client() as other:
        table = await made(client)
        old, written = await other.open_table("t"), await other.open_table("t")
        await old.put({"n": 5, "k": 5})
        session = written.new_session()
        await table.alter(drop_ranges=[(0, 10)])
        assert await ns(table) == await ns(old) == list(range(10, 20))
        assert await table.get((5, 5)) is None and await written.get((5, 5)) is None
        for each in (table, old):
            with pytest.raises(Rejected, match="no range") as caught:
                await each.put({"n": 5, "k": 5})
            assert caught.value.code is Code.NOT_FOUND
        await session.upsert({"n": 5, "k": 5})
        await session.upsert({"n": 15, "k": 5})
        with pytest.raises(stele.RowErrors) as errors:
            await session.flush()
        assert [e.row for e in errors.value.errors] == [0]
        # Made anew it is empty, whoever looks; also one that knows the first one only.
        late = await other.open_table("t")
        await table.alter(add_ranges=[(0, 10)])
        await table.alter(drop_ranges=[(0, 10)])
        await table.alter(add_ranges=[(0, 5), (5, 10)])
        await late.put({"n": 7, "k": 0})
        assert await ns(late) == sorted([7, *range(10, 20), 15])
        assert await ns(old) == sorted([7, *range(10, 20), 15])


async def test_a_range_that_another_program_made_anew_is_not_dropped_by_a_drop_that_waits(
    cluster: LocalCluster,
) -> None:
    """A drop asks again until all nodes have deleted the replicas, and one of them is away."""
    async with cluster.client() as client, cluster.client() as other:
        table = await client.create_table("t", SCHEMA, RANGED, replication_factor=1)
        await table.put({"n": 5, "k": 5})
        (holder,) = table.locations.tablets[0].replicas
        name = next(name for name, node_id in cluster.ids.items() if node_id == holder.node_id)
        await cluster.stop(name)
        drop = asyncio.create_task(table.alter(drop_ranges=[(0, 10)], timeout_s=15))
        again = await other.open_table("t")
        while again.partition_schema.ranges == 2:
            await again.refresh()
        master = master_of(cluster.running["master"])
        await wait_until(
            lambda: master.lead is not None and not master.lead.is_alive(master.catalog.nodes[holder.node_id])
        )
        await again.alter(add_ranges=[(0, 10)], timeout_s=10)  # whose node has nothing to delete for it
        for comment in "abcd":  # after these the masters no longer remember the drop
            await again.alter(comment=comment)
        await again.put({"n": 6, "k": 6})
        with pytest.raises(Retryable) as caught:
            await drop
        assert caught.value.code is Code.UNKNOWN_OUTCOME
        assert await again.get((6, 6)) == {"n": 6, "k": 6, "text": None}


async def test_changes_that_are_refused_change_nothing(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        table = await made(client)
        with pytest.raises(Rejected, match="overlaps"):
            await table.alter(add_ranges=[(15, 25)], drop_ranges=[(0, 10)])
        with pytest.raises(Rejected, match=r"there is no range 0\.\.5; there is 0\.\.10"):
            await table.alter(drop_ranges=[(0, 5)])
        with pytest.raises(Rejected, match="no range would be left"):
            await table.alter(drop_ranges=[(0, 10), (10, 20)])
        with pytest.raises(Rejected, match="bound 'x'"):
            await table.alter(add_ranges=[("x", 25)])
        assert await ns(table) == list(range(20))
        hashed = await client.create_table("h", SCHEMA, stele.hash("k", buckets=2))
        with pytest.raises(Rejected, match="no range partitions"):
            await hashed.alter(add_ranges=[(0, 5)])


async def test_ranges_and_columns_in_one_change(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        table = await made(client)
        await table.alter(add=[("stars", "int8", False, "3")], add_ranges=[(20, 30)], drop_ranges=[(0, 10)])
        await table.put({"n": 25, "k": 0})
        rows = (await table.scan(["n", "stars"], ordered=True).to_table()).to_pylist()
        assert rows == [{"n": n, "stars": 3} for n in [*range(10, 20), 25]]


async def test_ranges_come_and_go_under_writers_that_learn_of_it_by_themselves(cluster: LocalCluster) -> None:
    """No acknowledged row of a range that stayed is lost, and each row that is refused is one of no range."""
    async with cluster.client() as client, cluster.client() as other:
        table = await made(client)
        old = await other.open_table("t")
        acked: set[int] = set()
        ended = asyncio.Event()

        async def write(low: int) -> None:
            k = 1000
            while not ended.is_set():
                k += 1
                try:
                    await old.put({"n": low, "k": k})
                except Rejected as exc:
                    assert exc.code is Code.NOT_FOUND and low != 15
                except Retryable as exc:
                    assert exc.code is Code.UNKNOWN_OUTCOME or low != 15, exc
                else:
                    if low == 15:
                        acked.add(k)
                await asyncio.sleep(0.002)

        writers = [asyncio.create_task(write(low)) for low in (5, 15, 25)]
        for _ in range(3):
            await table.alter(add_ranges=[(20, 30)], drop_ranges=[(0, 10)])
            await asyncio.sleep(0.2)
            await table.alter(add_ranges=[(0, 10)], drop_ranges=[(20, 30)])
            await asyncio.sleep(0.2)
        ended.set()
        await asyncio.gather(*writers)
        found = (await old.scan(["n", "k"], ["n = 15"]).to_table()).column("k").to_pylist()
        assert acked and acked <= set(found)
        assert all(n < 20 for n in await ns(old))


async def test_a_scan_whose_range_is_dropped_while_it_reads_says_so_or_goes_on(cluster: LocalCluster) -> None:
    async with cluster.client() as client, cluster.client() as other:
        table = await made(client)
        scan = (await other.open_table("t")).scan(["n"])
        await table.alter(drop_ranges=[(10, 20)])
        with suppress(Rejected):
            assert sorted((await scan.to_table()).column("n").to_pylist()) == list(range(10))
        assert await scan.count() == 10


async def test_the_command_line(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with cluster.client() as client:
        run = runner(cluster, monkeypatch)
        file = tmp_path / "days.yaml"
        file.write_text(
            "columns: [{name: day, type: date}]\nprimaryKey: [day]\n"
            "partitioning: {range: {columns: [day], ranges: [{from: '2024-01-01', to: '2024-02-01'}]}}\n"
        )
        assert (await run("table", "create", str(file)))[0] == 0
        code, out, err = await run("table", "alter", "days", "--add-range", "2024-02-01..2024-03-01")
        assert (code, out, err) == (0, "altered table days: schema version 1, 1 column, 2 ranges\n", "")
        old = ("--drop-range", "2024-01-01..2024-02-01")
        code, _, err = await run("table", "alter", "days", *old)
        assert code == 2 and "add --yes to drop range 2024-01-01..2024-02-01 of days" in err
        assert (await run("table", "alter", "days", *old, "--add-range", "2024-04-01..", "--yes"))[0] == 0
        code, out, _ = await run("table", "describe", "days")
        assert 'range of day: "2024-02-01".."2024-03-01", "2024-04-01"..' in out
        code, out, _ = await run("table", "describe", "days", "--json")
        ranges = json.loads(out)["partitioning"]["range"]
        assert ranges == {
            "columns": ["day"],
            "ranges": [{"from": ["2024-02-01"], "to": ["2024-03-01"]}, {"from": ["2024-04-01"]}],
        }
        copy = tmp_path / "copy.json"
        copy.write_text(out)
        assert (await run("table", "create", str(copy), "--name", "copy"))[0] == 0
        assert (await client.describe("copy")).partitioning == (await client.describe("days")).partitioning
        for arguments, why in (
            (("--add-range", "2024-05-01"), "expected FROM..TO"),
            (("--add-range", ".."), "expected FROM..TO"),
            (("--add-range", "x..y"), "x..y"),
            (("--add-range", "2024-05-01..2024-06-01"), "overlaps"),
        ):
            code, _, err = await run("table", "alter", "days", *arguments)
            assert code != 0 and why in err, err


def test_ends_of_ranges_as_they_are_typed() -> None:
    texts = ["1..2", "..x", '["a..b",1]..["c",2]', '"a..b"..', "a.b..c"]
    assert parse_ranges("--add-range", texts) == [
        ("1", "2"),
        ("", "x"),
        ('["a..b",1]', '["c",2]'),
        ('"a..b"', ""),
        ("a.b", "c"),
    ]
    schema = Schema.make([("s", "string"), ("n", "int64")], ["s", "n"])
    ((start, end),) = bounds_for(schema, [0, 1], "--add-range", [('["a",1]', "")])
    assert end is None and bytes.fromhex(start["encoded"]) == encode_tuple(
        ["a", 1], [pa.string(), pa.int64()]
    )
    ((start, end),) = bounds_for(schema, [0], "--add-range", [("12", '"a..b"')])
    assert [bytes.fromhex(each["encoded"]) for each in (start, end)] == [
        encode_tuple([text], [pa.string()]) for text in ("12", "a..b")
    ]
