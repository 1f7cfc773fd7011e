"""Dropping and recalling by the client and by commands: nodes as they run, in one event loop."""

from __future__ import annotations

import json

import pytest

from stele.model.errors import Code, Rejected
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import master_pb2
from tests.client.commands import runner
from tests.tserver.local import HASHED, SCHEMA, LocalCluster, count, fill


async def test_a_table_and_a_key_space_are_dropped_and_recalled(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, HASHED)
        await fill(client, 20)
        space = await client.create_keyspace("k")
        await space.replace(b"a", b"1")
        gone = await client.drop_table("t", keep_s=3_600)
        kept = await client.drop_table("k")
        assert 3_500 < gone.left_s <= 3_600 and kept.left_s > 23 * 3_600
        assert [(t.name, t.kind, t.tablets) for t in await client.dropped_tables()] == [
            ("k", "keyspace", 1),
            ("t", "table", 4),
        ]
        assert await client.list_tables() == []
        for use in (
            table.put({"id": 1, "name": "x"}),
            table.get(1),
            space.read(b"a"),
            space.replace(b"a", b"2"),
        ):
            with pytest.raises(Rejected, match="was dropped"):
                await use
        again = await client.create_table("t", SCHEMA)
        with pytest.raises(Rejected) as caught:
            await client.recall_table("t")
        assert caught.value.code is Code.ALREADY_PRESENT
        assert (await client.recall_table("t", new_name="before")).name == "before"
        assert await count(client, "before") == 20 and await again.scan().count() == 0
        await client.recall_table("k")
        assert await (await client.keyspace("k")).read(b"a") == b"1"
        assert await client.dropped_tables() == []
        with pytest.raises(Rejected, match=r"no dropped table t; dropped_tables\(\) shows"):
            await client.recall_table("t")


async def test_several_dropped_tables_of_one_name_and_one_that_is_deleted(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        ids = []
        for _ in range(2):
            await client.create_keyspace("k")
            ids.append((await client.drop_table("k")).table_id)
        with pytest.raises(Rejected, match="2 dropped tables are called k; name one by its id") as caught:
            await client.recall_table("k")
        assert all(i[:8] in str(caught.value) for i in ids)
        with pytest.raises(Rejected, match="no table k"):
            await client.delete_table("k")  # by its name alone it is not deleted
        await client.delete_table(ids[0][:8])
        assert [t.table_id for t in await client.dropped_tables()] == ids[1:]
        assert (await client.recall_table(ids[1][:8])).table_id == ids[1]
        with pytest.raises(Rejected) as refused:
            await client.recall_table(ids[0])
        assert refused.value.code is Code.NOT_FOUND


async def test_a_table_that_took_the_name_meanwhile_is_not_deleted(cluster: LocalCluster) -> None:
    """Between the question to a user and the answer, another table may get the name."""
    async with cluster.client() as client:
        await client.create_keyspace("k")
        meant = (await client.drop_table("k")).table_id
        await client.create_keyspace("k")
        (other,) = [t.table_id for t in await client.list_tables()]
        with pytest.raises(
            Rejected, match=f"k now names table {other[:8]}, not {meant[:8]}; nothing was"
        ) as caught:
            await client.delete_table("k", table_id=meant)
        assert caught.value.code is Code.NOT_FOUND
        assert [t.table_id for t in await client.list_tables()] == [other]
        await client.delete_table("k", table_id=other)
        assert await client.list_tables() == []


async def test_a_recalled_table_is_used_at_once(cluster: LocalCluster) -> None:
    """Also where nodes do not know yet that they may serve it: clients try again."""
    async with cluster.client() as client:
        await client.create_table("t", SCHEMA, HASHED)
        await fill(client, 20)
        gone = await client.drop_table("t")
        request = master_pb2.RecallTableRequest(table_id=id_to_pb(gone.table_id))
        await client.masters.call("RecallTable", request)
        assert await count(client) == 20
        await client.drop_table("t")
        await client.masters.call("RecallTable", request)
        await fill(client, 30)
        assert await count(client) == 30


async def test_the_commands(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runner(cluster, monkeypatch)
    async with cluster.client() as client:
        await client.create_table("t", SCHEMA)
        await fill(client, 5)
    code, out, err = await run("table", "drop", "t", "--keep", "2h")
    assert code == 0 and "dropped t; for " in out and "`stele table recall " in out, err
    code, out, _ = await run("table", "list", "--dropped", "--json")
    (gone,) = json.loads(out)
    assert (gone["name"], gone["tablets"], gone["replicationFactor"]) == ("t", 1, 3)
    assert 7_000 < gone["leftSeconds"] <= 7_200
    code, out, _ = await run("table", "list", "--dropped")
    assert code == 0 and gone["id"][:8] in out and ("  2 h " in out or "1 h 59 min" in out)
    code, out, _ = await run("table", "list", "--json")
    assert json.loads(out) == []
    code, out, err = await run("ksck")
    assert code == 0, out + err  # its tablets are looked after, and healthy
    code, _, err = await run("table", "recall", "other")
    assert code == 2 and "`stele table list --dropped` shows those" in err
    code, out, err = await run("table", "recall", "t", "--as", "back")
    assert (code, out) == (0, "recalled back\n"), err
    async with cluster.client() as client:
        assert await count(client, "back") == 5
    code, out, _ = await run("cluster", "keep-dropped")
    assert out == "dropped tables can be recalled for 1 d\n"
    code, out, _ = await run("cluster", "keep-dropped", "3d")
    assert out == "dropped tables can be recalled for 3 d; it was 1 d\n"
    assert (await run("cluster", "keep-dropped", "400d"))[0] == 2
    code, _, err = await run("table", "drop", "back", "--now", "--keep", "1h")
    assert code == 2 and "exclude each other" in err
    code, _, err = await run("table", "drop", "back", "--now")
    assert code == 2 and "add --yes" in err
    assert (await run("table", "drop", "back", "--now", "--yes"))[:2] == (0, "deleted back\n")
    assert json.loads((await run("table", "list", "--dropped", "--json"))[1]) == []
