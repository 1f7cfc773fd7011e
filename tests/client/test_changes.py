"""Changes of a table by the client: what was written between two times, deletes too, whichever replicas it took."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from stele.client import AsyncClient, AsyncTable, Client
from stele.model.clock import from_physical_us, physical_us
from stele.model.errors import Code, Rejected, Retryable
from stele.model.partition import PartitionSchema
from stele.model.predicate import Changes, ScanSpec
from stele.model.schema import Schema
from stele.rpc.ticket import CHANGES_VERSION, Ticket, decode_ticket
from tests.client.commands import runner
from tests.client.small import small_cluster
from tests.tserver.local import HASHED, SCHEMA, LocalCluster, fill, machines_of

ONE = PartitionSchema()
WORDS = Schema.make([("k", "int64"), ("n", "int32"), ("v", "string", True)], ["k", "n"])


async def listed(table: AsyncTable, after: int, *, every: bool = False) -> list[tuple[int, str | None, str]]:
    """Changes as (id, name, op), by id."""
    found = (await table.changes(after, every=every).to_table()).to_pylist()
    return sorted([(row["id"], row["name"], row["_op"]) for row in found], key=lambda row: row[0])


async def test_a_reader_follows_a_table_from_snapshot_to_snapshot(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, HASHED)
        await fill(client, 10)
        start = table.scan()
        assert await start.count() == 10
        copy = {row["id"]: row["name"] async for row in start}
        after = start.snapshot
        for turn in range(3):
            await table.put({"id": 1, "name": f"first {turn}"})
            await table.put({"id": 1, "name": f"second {turn}"})
            await table.put({"id": 100 + turn, "name": "new"})
            await table.delete({"id": 2 + turn})
            scan = table.changes(after)
            read = [row async for row in scan]
            assert len(read) == 3 and all(after < row["_ts"] <= scan.snapshot for row in read)
            for row in read:
                if row["_op"] == "delete":
                    assert row["name"] is None
                    del copy[row["id"]]
                else:
                    copy[row["id"]] = row["name"]
            after = scan.snapshot
        there = {row["id"]: row["name"] async for row in table.scan(snapshot=after)}
        assert copy == there
        assert await table.changes(after).count() == 0
        every = await listed(table, start.snapshot, every=True)
        assert [row for row in every if row[0] == 1] == [
            (1, f"{which} {turn}", "upsert") for turn in range(3) for which in ("first", "second")
        ]
        assert await table.changes(start.snapshot, every=True).count() == 12


async def test_a_replica_that_goes_away_in_the_middle_costs_no_change(cluster: LocalCluster) -> None:
    """The leader stops while changes are read; another replica goes on behind the last row."""
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA)
        after = client.now()
        await table.put({"id": 0, "name": "before"})
        scan = table.changes(after, every=True)
        for turn in range(2):
            rows = pa.table({"id": range(50_000), "name": [f"{turn}"] * 50_000})
            await table.write_arrow(rows)
        scan = table.changes(after, every=True)
        (place,) = scan.plan.tablets
        await machines_of(cluster, place.tablet_id)
        found, stopped = [], False
        async for batch in scan.batches():
            found += [(row["id"], row["name"]) for row in batch.to_pylist()]
            if not stopped:
                stopped = True
                leader = place.target().node_id
                await cluster.stop(next(name for name, node_id in cluster.ids.items() if node_id == leader))
        expected = [(i, f"{turn}") for i in range(50_000) for turn in range(2)]
        assert found == [(0, "before"), *expected]


@pytest.mark.parametrize("every", [True, False])
async def test_a_scan_of_changes_goes_on_at_another_replica(tmp_path: Path, every: bool) -> None:
    """It breaks off after each batch in turn, also between the versions of one key."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", WORDS, ONE)
        after = client.now()
        for turn in range(5):
            rows = {"k": [1] * 30, "n": range(30), "v": [f"{turn}.{n}" for n in range(30)]}
            await table.write_arrow(pa.table(rows))
        scan = table.changes(after, columns=["v"], every=every)
        spec = scan.plan.spec
        object.__setattr__(spec, "batch_rows", 7)
        for node in cluster.nodes:
            node.flight_fault.extend(
                [lambda n: Retryable("moved", code=Code.UNAVAILABLE) if n == 1 else None] * 4
            )
        found = pa.Table.from_batches([batch async for batch in scan.batches()])
        assert sum(node.scans for node in cluster.nodes) > 4, "it broke off"
        turns = range(5) if every else [4]
        assert found.schema.names == ["k", "n", "v", "_op", "_ts"]
        assert found["v"].to_pylist() == [f"{turn}.{n}" for n in range(30) for turn in turns]


async def test_changes_that_history_lost(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, history_s=60)
        await fill(client, 5)
        past = from_physical_us(physical_us(client.now()) - 120_000_000)
        with pytest.raises(Rejected, match="longer history") as caught:
            await table.changes(past).to_table()
        assert caught.value.code is Code.CURSOR_LOST
        await table.alter(history_s=3_600)
        assert len(await listed(table, past)) == 5


async def test_what_is_asked_wrongly_is_refused_before_any_node_is_asked(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        schema = Schema.make([("id", "int64"), ("_op", "string", True)], ["id"])
        table = await client.create_table("t", schema)
        now = client.now()
        for wrong in (0, None, "yesterday", -1):
            with pytest.raises(Rejected, match="after"):
                table.changes(wrong)  # type: ignore[arg-type]
        with pytest.raises(Rejected, match="the earlier time first"):
            table.changes(now, now - 1)
        for columns in (["nope"], []):
            with pytest.raises(Rejected, match="expected columns of table t"):
                table.changes(now, columns=columns)
        with pytest.raises(Rejected, match="column _op has the name of a column that a scan of changes adds"):
            table.changes(now)
        moment = datetime.now(UTC)
        assert await table.changes(moment, columns=["id"]).count() == 0


def test_a_program_that_does_not_know_changes_does_not_answer_with_a_scan() -> None:
    """Its tickets have version 1; what it does not know in them it would leave out."""
    spec = ScanSpec(changes=Changes(1)).to_json(SCHEMA)
    ticket = Ticket("c" * 32, "a" * 32, 5, 1, spec)
    raw = ticket.encode()
    read = decode_ticket(raw)
    assert raw[0] == CHANGES_VERSION == 2 and isinstance(read, Ticket)
    assert read.spec(SCHEMA).changes == Changes(1)
    assert Ticket("c" * 32, "a" * 32, 5, 1, ScanSpec().to_json(SCHEMA)).encode()[0] == 1
    with pytest.raises(Rejected, match="only for them"):
        decode_ticket(b"\x01" + raw[1:])
    plain = {**json.loads(raw[1:]), "scan": json.loads(ScanSpec().to_json(SCHEMA))}
    with pytest.raises(Rejected, match="only for them"):
        decode_ticket(b"\x02" + json.dumps(plain).encode())
    with pytest.raises(Rejected, match="gives no resume keys"):
        decode_ticket(replace(ticket, resumable=True).encode())
    with pytest.raises(Rejected, match="version 3 is unknown; this program reads 1 to 2"):
        decode_ticket(b"\x03" + raw[1:])


def test_the_blocking_client(tmp_path: Path) -> None:
    import asyncio

    async def begin() -> None:
        async with small_cluster(tmp_path) as (cluster, _):
            await asyncio.to_thread(work, cluster.master_address)

    def work(master: str) -> None:
        with Client([master]) as client:
            table = client.create_table("t", WORDS, ONE)
            before = table.scan().snapshot
            table.put({"k": 1, "n": 1, "v": "x"})
            table.delete({"k": 1, "n": 1})
            scan = table.changes(before, every=True)
            assert [(row["v"], row["_op"]) for row in scan] == [("x", "upsert"), (None, "delete")]
            assert scan.snapshot > before
            assert table.changes(before, scan.snapshot).to_table().num_rows == 1

    asyncio.run(begin())


async def test_a_column_that_was_added_meanwhile(cluster: LocalCluster) -> None:
    """An old table object goes on by column ids; a new one has the column, also in changes made before it."""
    async with cluster.client() as client, AsyncClient([cluster.master_address]) as other:
        table = await client.create_table("t", SCHEMA)
        old = await other.open_table("t")
        after = client.now()
        await table.put({"id": 1, "name": "a"})
        await table.alter(add=[("gate", "string", True)])
        await table.put({"id": 2, "name": "b", "gate": "B4"})
        await table.delete({"id": 1})
        rows = (await old.changes(after).to_table()).select(["id", "name", "_op"]).to_pylist()
        assert rows == [{"id": 1, "name": None, "_op": "delete"}, {"id": 2, "name": "b", "_op": "upsert"}]
        rows = (await table.changes(after).to_table()).select(["id", "gate"]).to_pylist()
        assert rows == [{"id": 1, "gate": None}, {"id": 2, "gate": "B4"}]


async def test_the_command(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = runner(cluster, monkeypatch)
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA)
        since = str(client.now())
        await table.put({"id": 1, "name": "a"})
        await table.put({"id": 1, "name": "b"})
        await table.delete({"id": 1})
    code, out, err = await run("table", "scan", "t", "--since", since, "--format", "json")
    assert code == 0, err
    (row,) = [json.loads(line) for line in out.splitlines()]
    assert (row["id"], row["name"], row["_op"]) == (1, None, "delete")
    following = err.split("up to ")[1].split(";")[0]
    code, out, err = await run("table", "scan", "t", "--since", since, "--every", "--columns", "id")
    assert code == 0 and [line.split()[:2] for line in out.splitlines()[1:]] == [
        ["1", "upsert"],
        ["1", "upsert"],
        ["1", "delete"],
    ], err
    code, out, err = await run("table", "scan", "t", "--since", following, "--count")
    assert (code, out) == (0, "0\n"), err
    file = tmp_path / "changes.parquet"
    code, out, err = await run("table", "scan", "t", "--since", since, "-o", str(file))
    assert code == 0 and file.exists(), err
    code, _, err = await run("table", "scan", "t", "--since", since, "--where", "id = 1")
    assert code == 2 and "leave out --where" in err
    code, _, err = await run("table", "scan", "t", "--every")
    assert code == 2 and "--every needs --since" in err
    code, _, err = await run("table", "scan", "t", "--since", "soon")
    assert code != 0 and "--since soon: expected" in err
    code, _, err = await run("table", "scan", "t", "--since", "1")
    assert code != 0 and "CURSOR_LOST" in err
