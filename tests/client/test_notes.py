"""Owner, comment and history retention by the client and by commands: nodes as they run, in one event loop."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from stele.model.clock import from_physical_us, physical_us
from stele.model.errors import Code, Rejected
from stele.model.ids import HybridTime
from tests.client.commands import runner
from tests.tserver.local import HASHED, SCHEMA, LocalCluster, count, fill


async def test_a_table_is_made_with_them_and_altered_while_it_is_used(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, HASHED, owner="ops", comment="rows", history_s=60)
        assert (table.info.owner, table.info.comment, table.info.history_s) == ("ops", "rows", 60.0)
        await fill(client, 20)
        past = HybridTime(from_physical_us(physical_us(client.now()) - 120_000_000))
        with pytest.raises(Rejected) as caught:
            await table.scan(snapshot=past).count()
        assert caught.value.code is Code.SNAPSHOT_TOO_OLD and "kept for 1 min" in str(caught.value)
        writes = asyncio.create_task(fill(client, 200))
        await table.alter(history_s=7 * 86_400, owner="data", comment="")
        await writes
        assert (table.info.owner, table.info.comment, table.info.history_s) == ("data", "", 604_800.0)
        assert await table.scan(snapshot=past).count() == 0, "nothing was there then, and it is known again"
        assert await count(client) == 200
        await table.alter(history_s=0)
        assert table.schema.history_ms == 0 and (await client.describe("t")).history_s == 900.0


@pytest.mark.parametrize("history_s", [1, 59.9, -5, "1h", True, False, float("nan"), 1e12, 10**400])
async def test_bad_retentions_are_refused_before_anything_is_asked(
    cluster: LocalCluster, history_s: float
) -> None:
    async with cluster.client() as client:
        with pytest.raises(Rejected, match="history_s"):
            await client.create_table("t", SCHEMA, history_s=history_s)
        assert await client.list_tables() == []
        table = await client.create_table("t", SCHEMA)
        with pytest.raises(Rejected, match="history_s"):
            await table.alter(history_s=history_s)
        assert table.schema.version == 1


async def test_notes_that_are_no_text_are_refused(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA)
        for wrong in (7, b"ops", "\ud800"):
            with pytest.raises(Rejected, match="owner"):
                await client.create_table("u", SCHEMA, owner=wrong)  # type: ignore[arg-type]
            with pytest.raises(Rejected, match="comment"):
                await table.alter(comment=wrong)  # type: ignore[arg-type]
        with pytest.raises(Rejected, match="owner of 129 characters"):
            await table.alter(owner="x" * 129)


async def test_the_commands(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = runner(cluster, monkeypatch)
    columns = ("--column", "id:int64", "--column", "name:string?", "--key", "id")
    notes = ("--owner", "ops", "--comment", "who flies", "--history", "2h")
    code, _, err = await run("table", "create", "t", *columns, *notes)
    assert code == 0, err
    code, out, _ = await run("table", "describe", "t")
    assert "owner ops\n# who flies\n" in out
    assert "replaced and deleted rows stay readable for 2 h" in out
    code, out, err = await run("table", "alter", "t", "--history", "7d", "--no-comment")
    assert (code, out) == (0, "altered table t: schema version 2, 2 columns\n"), err
    described = json.loads((await run("table", "describe", "t", "--json"))[1])
    assert (described["owner"], described["comment"]) == ("ops", "")
    assert described["historyRetention"] == "7d"
    file = tmp_path / "t.json"
    file.write_text(json.dumps(described))
    code, _, err = await run("table", "create", str(file), "--name", "copy", "--comment", "a copy")
    assert code == 0, err
    copied = json.loads((await run("table", "describe", "copy", "--json"))[1])
    assert [copied[k] for k in ("owner", "comment", "historyRetention")] == ["ops", "a copy", "7d"]
    code, out, _ = await run("table", "alter", "t", "--history", "default", "--no-owner")
    assert code == 0
    out = (await run("table", "describe", "t"))[1]
    assert "owner" not in out and "readable for 15 min" in out
    code, _, err = await run("table", "alter", "t", "--history", "soon")
    assert code == 2 and "expected a time such as 90s, 30m, 2h or 1d" in err
    code, _, err = await run("table", "alter", "t", "--history", "30s")
    assert code == 2 and "60 to ten years" in err
    code, _, err = await run("table", "alter", "t")
    assert code == 2 and "--no-comment or --history" in err
    code, _, err = await run("table", "alter", "t", "--owner", "a", "--no-owner")
    assert code == 2 and "--owner and --no-owner exclude each other" in err
