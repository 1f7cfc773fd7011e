"""A backup holds the history that it reads: it ends well however short a table's own history is, and leaves no hold behind."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from stele import backup
from stele.backup import holding
from stele.backup.finding import State
from stele.client import AsyncClient
from stele.model.errors import Code, Rejected, Retryable
from tests.backup.conftest import There
from tests.backup.faults import faulty
from tests.backup.tables import numbered, rows
from tests.backup.test_interrupted import killed
from tests.consensus.cluster import WAIT_S
from tests.tserver.history import settled, without_history
from tests.tserver.local import HASHED, SCHEMA, LocalCluster

ROWS = 200


async def test_rows_that_are_replaced_meanwhile_are_in_it_though_the_table_keeps_no_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "RENEW_S", 0.1)
    cluster, notes = LocalCluster(tmp_path), list[str]()
    try:
        await cluster.start()
        loop = asyncio.get_running_loop()
        async with cluster.client() as client:
            table = await client.create_table("t", SCHEMA, HASHED)
            await table.write_arrow(pa.table({"id": range(ROWS), "name": ["before"] * ROWS}))
            await without_history(cluster, table)

            async def replace_all() -> None:
                (first,) = await table.holds()
                await asyncio.sleep(0.5)
                (renewed,) = await table.holds()
                assert renewed.expires > first.expires and renewed.since == first.since
                await table.write_arrow(pa.table({"id": range(ROWS), "name": ["later"] * ROWS}))
                await settled(cluster, table)

            busy = [True]

            def look(now: backup.Progress) -> None:
                if now.rows and busy and threading.current_thread() is not threading.main_thread():
                    busy.clear()
                    asyncio.run_coroutine_threadsafe(replace_all(), loop).result(120)

            made = await backup.create_async(
                client, tmp_path / "b", "t", parallel=1, on_progress=look, on_note=notes.append
            )
            assert (made.rows, busy, notes) == (ROWS, [], [])
            await backup.restore_async(client, tmp_path / "b", tables={"t": "again"})
            again = await client.open_table("again")
            assert set((await again.scan().to_table())["name"].to_pylist()) == {"before"}
            assert await table.holds() == [], "it is released at the end"
            with pytest.raises(Rejected) as gone:
                await table.scan(snapshot=made.snapshot).count()
            assert gone.value.code is Code.SNAPSHOT_TOO_OLD
    finally:
        await cluster.close()


async def test_a_hold_that_not_all_tablets_renewed_is_renewed_soon_after_they_are_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "RENEW_S", 0.1)
    monkeypatch.setattr(holding, "_AGAIN_S", 0.2)
    cluster, notes = LocalCluster(tmp_path), list[str]()
    try:
        await cluster.start()
        async with cluster.client() as client, AsyncClient([cluster.master_address], timeout_s=2) as brief:
            table = await client.create_table("t", SCHEMA, HASHED)
            await table.write_arrow(pa.table({"id": range(ROWS), "name": ["a"] * ROWS}))
            renewing = await brief.open_table("t")
            async with holding.HistoryHeld([renewing], "backup-x", int(client.now()), notes.append):
                away = ("node-0", "node-1")
                for name in away:
                    await cluster.stop(name)
                await asyncio.sleep(0.5)  # a try has begun that ends in vain
                monkeypatch.setattr(holding, "RENEW_S", 3_600.0)
                await asyncio.sleep(3)
                for name in away:
                    await cluster.launch(name)
                (before,) = await table.holds()
                async with asyncio.timeout(4 * WAIT_S):
                    while (await table.holds())[0].expires <= before.expires:
                        await asyncio.sleep(0.1)
            assert notes == [], "nothing was given up"
    finally:
        await cluster.close()


def test_a_hold_outlives_a_kill_and_the_next_run_releases_it(there: There, tmp_path: Path) -> None:
    client = there.client
    table = numbered(client, "t", 4_000, buckets=2)
    before = rows(table)
    killed(there, tmp_path, "t", 1_000)
    (unfinished,) = backup.list_backups(tmp_path)
    (held,) = table.holds()
    assert unfinished.manifest is not None
    assert (held.name, held.since) == (f"backup-{unfinished.backup_id}", unfinished.manifest.snapshot)
    table.write_arrow(pa.table({"id": range(4_000), "name": ["later"] * 4_000}))
    made = backup.create(client, tmp_path, "t")
    assert made.backup_id == unfinished.backup_id and table.holds() == []
    backup.restore(client, tmp_path, tables={"t": "again"})
    assert rows(client.open_table("again")) == before


def test_one_that_is_given_up_leaves_no_hold(there: There, tmp_path: Path) -> None:
    client = there.client
    table = numbered(client, "t", 500)
    folder, faults = faulty(tmp_path / "b")
    faults.bytes_left = 2_000
    with pytest.raises(Retryable) as full:
        backup.create(client, folder, "t")
    assert full.value.code is Code.DISK_FULL
    assert [hold.name[:7] for hold in table.holds()] == ["backup-"], "the same command would go on"
    notes = list[str]()
    made = backup.create(client, tmp_path / "b", "t", anew=True, on_note=notes.append)
    assert "the caller asked to begin anew" in notes[0] and made.rows == 500
    assert table.holds() == []
    early = int(client.now()) - (3_600_000_000 << 12)
    with pytest.raises(Rejected) as old:
        backup.create(client, tmp_path / "b", "t", at=early)
    assert old.value.code is Code.SNAPSHOT_TOO_OLD
    assert table.holds() == [] and [b.state for b in backup.list_backups(tmp_path / "b")] == [State.COMPLETE]
