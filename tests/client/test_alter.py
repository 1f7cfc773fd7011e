"""Tables that are altered, through the client and the command line: nodes as they run, in one event loop."""

from __future__ import annotations

import asyncio
import json
import math

import pyarrow as pa
import pytest

from stele.client import AsyncClient, AsyncTable
from stele.model.errors import Code, Rejected, Retryable
from stele.model.schema import Schema
from tests.client.commands import runner
from tests.tserver.local import HASHED, LocalCluster

SCHEMA = Schema.make([("id", "int64"), ("name", "string", True), ("n", "int32", False, "7")], ["id"])
_PACE_S = 0.005
"""Between the rows of one writer: without it four writers take all that the machine has, for as long as changes last."""


async def made(client: AsyncClient) -> AsyncTable:
    table = await client.create_table("t", SCHEMA, HASHED)
    for number in range(10):
        await table.put({"id": number, "name": f"n{number}"})
    return table


async def rows(table: AsyncTable, *columns: str) -> list[dict[str, object]]:
    return (await table.scan(columns or None, ordered=True).to_table()).to_pylist()


async def test_an_added_column_and_a_client_that_does_not_know_it(cluster: LocalCluster) -> None:
    async with cluster.client() as client, cluster.client() as other:
        table = await made(client)
        old = await other.open_table("t")
        await table.alter(add=[("gate", "string", True), ("stops", "int8", False, "3")])
        assert table.schema.version == 2
        assert await table.get(1) == {"id": 1, "name": "n1", "n": 7, "gate": None, "stops": 3}
        # The old one goes on by column ids, in all it does.
        await old.put({"id": 1, "name": "old"})
        await old.update({"id": 2, "n": 8})
        await old.write_arrow(pa.table({"id": [3], "name": ["bulk"]}), "upsert")
        async with old.new_session() as session:
            await session.upsert({"id": 4, "name": "session"})
        with pytest.raises(Rejected) as caught:
            await old.insert({"id": 5})
        assert caught.value.code is Code.ALREADY_PRESENT
        found = await rows(old)  # it may have learned of the columns, as where a node was slow
        assert list(found[0]) == [column.name for column in old.schema.columns]
        assert [row["name"] for row in found[1:5]] == ["old", "n2", "bulk", "session"]
        new = {row["id"]: row for row in await rows(table)}
        assert new[1] == {"id": 1, "name": "old", "n": 7, "gate": None, "stops": 3}
        assert new[2] == {"id": 2, "name": "n2", "n": 8, "gate": None, "stops": 3}
        assert new[3]["name"] == "bulk" and new[4]["name"] == "session"
        # It learns of the column when a row has it.
        await old.put({"id": 6, "gate": "A", "stops": 1})
        assert old.schema.version == 2
        assert await table.get(6) == {"id": 6, "name": None, "n": 7, "gate": "A", "stops": 1}


async def test_whether_a_column_is_unknown_is_left_open_while_no_master_answers(
    cluster: LocalCluster,
) -> None:
    async with cluster.client() as client:
        table = await made(client)
        with pytest.raises(Rejected, match="colour"):
            await table.put({"id": 1, "colour": "red"})
        table._rows._sought_at = -math.inf  # as a second later
        await cluster.stop("master")
        for _ in range(2):  # the second one asks nobody, and is told the same
            with pytest.raises(
                Retryable, match=r"colour.*Somebody may have added such a column.*no master answers"
            ):
                await table.put({"id": 1, "colour": "red"})
        await table.put({"id": 1, "name": "known"})


async def test_a_changed_default_counts_for_later_rows(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        table = await made(client)
        await table.alter(add=[("stops", "int8", False, "3")])
        await table.alter(defaults={"stops": "4", "n": None})
        assert (await table.get(1, ["stops"])) == {"stops": 3}
        await table.put({"id": 100, "n": 1})
        assert (await table.get(100, ["stops"])) == {"stops": 4}
        with pytest.raises(Rejected, match="column n is missing and has no default"):
            await table.put({"id": 101})


async def test_a_dropped_column_and_a_client_that_does_not_know_it(cluster: LocalCluster) -> None:
    """As in Kudu a write that gives it a value is refused; whole rows that leave it out go on."""
    async with cluster.client() as client, cluster.client() as other:
        table = await made(client)
        old = await other.open_table("t")
        session = old.new_session()
        await table.alter(drop=["name"])
        assert list((await table.get(1)) or {}) == ["id", "n"]
        await old.put({"id": 1, "n": 1})
        assert old.schema.version == 2, "it was told"
        await session.upsert({"id": 2, "n": 2})
        assert (await session.flush()).rows_written == 1
        assert [row["n"] for row in await rows(table)][:4] == [7, 1, 2, 7]
        with pytest.raises(Rejected, match="column name is unknown"):
            await old.put({"id": 3, "name": "x"})


async def test_a_value_for_a_dropped_column_is_refused(cluster: LocalCluster) -> None:
    async with cluster.client() as client, cluster.client() as other:
        table = await made(client)
        old = await other.open_table("t")
        await table.alter(drop=["name"])
        for write in (
            old.put({"id": 3, "name": "x"}),
            old.write_arrow(pa.table({"id": [3], "name": ["x"]}), "upsert"),
        ):
            with pytest.raises(Rejected, match="name") as caught:
                await write
            assert caught.value.code in (Code.SCHEMA_MISMATCH, Code.INVALID_ARGUMENT)
        assert (await table.get(3)) == {"id": 3, "n": 7}


async def test_rows_beside_one_that_is_refused_are_written(cluster: LocalCluster) -> None:
    """They share blocks, and the node refuses a block as a whole."""
    async with cluster.client() as client, cluster.client() as other:
        table = await made(client)
        old = await other.open_table("t")
        await table.alter(drop=["name"])
        puts = [old.put({"id": n, "n": n} | ({"name": "x"} if n % 5 == 0 else {})) for n in range(20, 60)]
        ends = await asyncio.gather(*puts, return_exceptions=True)
        refused = [n for n, end in zip(range(20, 60), ends) if isinstance(end, BaseException)]
        assert refused == list(range(20, 60, 5))
        assert [row["id"] for row in await rows(table)] == [*range(10), *(n for n in range(20, 60) if n % 5)]


async def test_scans_of_a_client_that_does_not_know_that_a_column_was_dropped(cluster: LocalCluster) -> None:
    """All columns means those of now; a column that is named and gone is named in the error."""
    async with cluster.client() as client, cluster.client() as other, cluster.client() as third:
        table = await made(client)
        old, older = await other.open_table("t"), await third.open_table("t")
        waiting = older.scan()
        await table.alter(drop=["name"])
        with pytest.raises(Rejected, match="expected columns of table t: id, n"):
            await old.scan(["id", "name"]).to_table()
        assert (await rows(old))[1] == {"id": 1, "n": 7} and old.schema.version == 2
        assert sum([batch.num_rows async for batch in waiting.batches()]) == 10
        assert (await older.scan(predicates=[("n", "=", 7)]).count()) == 10


async def test_renamed_columns(cluster: LocalCluster) -> None:
    async with cluster.client() as client, cluster.client() as other:
        table = await made(client)
        old = await other.open_table("t")
        await table.alter(rename={"name": "title", "n": "number"})
        await old.put({"id": 1, "name": "by the old name"})
        assert await table.get(1) == {"id": 1, "title": "by the old name", "number": 7}
        assert (await rows(old))[1] == {"id": 1, "name": "by the old name", "n": 7}
        assert [row["name"] async for row in old.scan(predicates=[("name", "=", "n5")])] == ["n5"]
        await old.refresh()
        assert (await rows(old))[1] == {"id": 1, "title": "by the old name", "number": 7}


async def test_reads_at_a_snapshot_before_the_change(cluster: LocalCluster) -> None:
    """The rows of then, the columns of now."""
    async with cluster.client() as client:
        table = await made(client)
        then = client.now()
        await table.alter(add=[("stops", "int8", False, "3")], drop=["n"])
        await table.put({"id": 1, "stops": 9})
        found = (await table.scan(ordered=True, snapshot=then).to_table()).to_pylist()
        assert found[1] == {"id": 1, "name": "n1", "stops": 3}


async def test_a_renamed_table(cluster: LocalCluster) -> None:
    async with cluster.client() as client, cluster.client() as other:
        table = await made(client)
        old = await other.open_table("t")
        await table.alter(rename_to="u")
        assert table.name == "u"
        await old.put({"id": 1, "name": "still"})
        assert [info.name for info in await client.list_tables()] == ["u"]
        assert await (await client.open_table("u")).get(1, ["name"]) == {"name": "still"}


async def test_what_is_refused_changes_nothing(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        table = await made(client)
        for change, why in (
            ({}, "it changes nothing"),
            ({"drop": "id"}, "primary key"),
            ({"add": [("x", "int8")]}, "stored rows need a value"),
            ({"add": [("x",)]}, "expected \\(name, type"),
            ({"add": [("x", "int8", 1)]}, "expected True or False"),
            ({"add": [("x", "int8", True, 5)]}, "JSON text"),
            ({"rename": ["a"]}, "a mapping of column names"),
            ({"defaults": {"n": 5}}, "JSON text"),
            ({"drop": [1]}, "a list of names"),
        ):
            with pytest.raises(Rejected, match=why):
                await table.alter(**change)  # type: ignore[arg-type]
        assert (await client.describe("t")).schema == SCHEMA


async def test_replicas_that_start_again_have_the_change(cluster: LocalCluster) -> None:
    """From the log, and after a flush from the manifest."""
    async with cluster.client() as client:
        table = await made(client)
        await table.alter(add=[("stops", "int8", False, "3")])
        for name in list(cluster.running):
            if name != "master":
                await cluster.stop(name)
                await cluster.launch(name)
        await table.put({"id": 50, "name": "later", "stops": 1})
        assert await table.get(1) == {"id": 1, "name": "n1", "n": 7, "stops": 3}
        await table.alter(add=[("more", "string", False, '"x"')])
        assert (await table.get(50)) == {"id": 50, "name": "later", "n": 7, "stops": 1, "more": "x"}


async def test_the_command_line(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster.client() as client:
        await made(client)
        run = runner(cluster, monkeypatch)
        code, out, err = await run(
            *("table", "alter", "t", "--add", "gate:string?", "--add", "stops:int8", "--default", "stops=0"),
            *("--rename", "name=title", "--default", "n=8"),
        )
        assert (code, out, err) == (0, "altered table t: schema version 2, 5 columns\n", "")
        code, out, _ = await run("table", "describe", "t", "--json")
        assert [(c["name"], c.get("default")) for c in json.loads(out)["columns"]] == [
            ("id", None),
            ("title", None),
            ("n", 8),
            ("gate", None),
            ("stops", 0),
        ]
        code, _, err = await run("table", "alter", "t", "--drop", "gate")
        assert code == 2 and "add --yes" in err
        assert (await run("table", "alter", "t", "--drop", "gate", "--no-default", "n", "--yes"))[0] == 0
        assert (await run("table", "rename", "t", "u"))[:2] == (0, "renamed table t to u\n")
        for arguments, why in (
            (("u",), "nothing to change"),
            (("u", "--add", "x"), "expected NAME:TYPE"),
            (("u", "--default", "x"), "expected NAME=JSON"),
            (("u", "--rename", "a=b", "--rename", "a=c"), "a is given twice"),
            (("u", "--default", "n=1", "--no-default", "n"), "both --default and --no-default"),
            (("u", "--add", "x:int8"), "stored rows need a value"),
            (("u", "--add", "x:int33"), "column x: type 'int33' is unknown; expected one of bool, int8"),
            (("nowhere", "--add", "x:int8?"), "no table nowhere"),
        ):
            code, out, err = await run("table", "alter", *arguments)
            assert code != 0 and why in err and not out, err


async def test_writers_go_on_while_columns_come_and_go(cluster: LocalCluster) -> None:
    """Old and new clients at once; no row is lost, none is wrong."""
    async with cluster.client() as client, cluster.client() as other:
        table = await made(client)
        old = await other.open_table("t")
        stop, written = asyncio.Event(), dict[int, str]()

        async def write(into: AsyncTable, number: int) -> None:
            while not stop.is_set():
                await into.put({"id": number, "name": str(number)})
                written[number] = str(number)
                number += 4
                await asyncio.sleep(_PACE_S)

        writers = [asyncio.create_task(write((table, old)[n % 2], 1_000 + n)) for n in range(4)]
        for step in range(3):
            await table.alter(add=[(f"c{step}", "int64", False, str(step))])
            await table.alter(drop=[f"c{step - 1}"] if step else "n")
        stop.set()
        await asyncio.gather(*writers)
        found = {row["id"]: row for row in await rows(table)}
        assert {number: found[number]["name"] for number in written} == written
        assert list(found[0]) == ["id", "name", "c2"] and len(written) > 50
