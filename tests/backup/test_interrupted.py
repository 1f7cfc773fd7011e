"""A backup that is killed, or stopped by a fault, goes on when it is run again; a restore leaves nothing half done."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import stele
from stele import backup
from stele.backup import creating, row_files
from stele.backup.finding import State
from stele.backup.folder import Folder
from stele.backup.manifest import PLAN, Manifest
from stele.backup.unfinished import Unfinished
from stele.client import AsyncClient
from stele.model.errors import Code, Corrupt, Rejected, Retryable
from stele.model.partition import HashPartition, PartitionSchema
from tests.backup.conftest import There
from tests.backup.faults import faulty
from tests.backup.tables import NUMBERS, data_files, numbered, rows
from tests.tserver.local import LocalCluster

KILLED = """
import os, signal, sys
import stele
from stele import backup
from stele.backup import creating, row_files

masters, folder, table, after = sys.argv[1:5]
creating.FILE_BYTES, creating.BATCH_ROWS, row_files._GROUP_ROWS = 1, 500, 500

def look(now):
    if now.rows >= int(after):
        os.kill(os.getpid(), signal.SIGKILL)

with stele.connect(masters) as client:
    backup.create(client, folder, table, parallel=1, on_progress=look)
"""


def killed(there: There, folder: Path | str, table: str, after_rows: int) -> None:
    """A process that backs a table up in files of 500 rows, and is killed once it has read so many."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, there.masters, str(folder), table, str(after_rows)], check=False
    )
    assert done.returncode == -signal.SIGKILL


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file for each 500 rows."""
    monkeypatch.setattr(creating, "FILE_BYTES", 1)
    monkeypatch.setattr(creating, "BATCH_ROWS", 500)
    monkeypatch.setattr(row_files, "_GROUP_ROWS", 500)


def states(folder: Path) -> list[State]:
    return [b.state for b in backup.list_backups(folder)]


def test_one_that_is_killed_goes_on_behind_its_last_whole_file(there: There, tmp_path: Path) -> None:
    client = there.client
    table = numbered(client, "t", 4_000, buckets=2)
    before = rows(table)
    killed(there, tmp_path, "t", 1_000)
    assert states(tmp_path) == [State.UNFINISHED]
    with pytest.raises(Rejected, match="has no complete backup"):
        backup.restore(client, tmp_path)
    (unfinished,) = backup.list_backups(tmp_path)
    records = len(list((tmp_path / unfinished.backup_id / "unfinished").iterdir()))
    assert records >= 1
    there_already = {p.name: p.stat().st_mtime_ns for p in data_files(tmp_path, unfinished.backup_id)}
    table.write_arrow(pa.table({"id": np.arange(2_000)}), "delete")  # later than the backup's moment
    notes, progress = list[str](), list[backup.Progress]()
    made = backup.create(client, tmp_path, "t", on_note=notes.append, on_progress=progress.append)
    assert notes == [f"going on with backup {unfinished.backup_id}, as of {made.time}"]
    assert made.backup_id == unfinished.backup_id and made.rows == 4_000
    holds = (f"backup-{made.backup_id}",)
    last = dataclasses.replace(progress[-1], rows_expected=0)
    assert last == backup.Progress("t", 4_000, 2, 2, made.file_bytes, holds)
    now = {p.name: p.stat().st_mtime_ns for p in data_files(tmp_path, made.backup_id)}
    again = {name for name, at in there_already.items() if now.get(name) == at}
    assert len(again) == records  # these were kept; a part without a record was not
    assert states(tmp_path) == [State.COMPLETE]
    report = backup.verify(tmp_path)
    assert (report.faults, report.strays) == ([], [])
    backup.restore(client, tmp_path, tables={"t": "new"})
    assert rows(client.open_table("new")) == before


def test_progress_moves_within_one_tablet(
    there: There, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(creating, "BATCH_ROWS", 500)
    monkeypatch.setattr(row_files, "_GROUP_ROWS", 500)
    numbered(there.client, "t", 4_000, buckets=1)
    told = list[backup.Progress]()
    made = backup.create(there.client, tmp_path, "t", on_progress=told.append)
    under_way = [now for now in told if not now.tablets_done and 0 < now.rows < 4_000]
    assert len(under_way) >= 4 and {now.rows_expected for now in told} == {4_000}
    assert sorted({now.bytes for now in under_way}) == [now.bytes for now in under_way if now.bytes]
    assert (told[-1].rows, told[-1].tablets_done, told[-1].bytes) == (4_000, 1, made.file_bytes)


def test_what_was_damaged_since_is_written_again(there: There, tmp_path: Path) -> None:
    client = there.client
    table = numbered(client, "t", 3_000, buckets=2)
    killed(there, tmp_path, "t", 2_000)
    (unfinished,) = backup.list_backups(tmp_path)
    first, *others = data_files(tmp_path, unfinished.backup_id)
    first.write_bytes(first.read_bytes()[:-7])
    others[0].unlink()
    records = sorted((tmp_path / unfinished.backup_id / "unfinished").iterdir())
    records[-1].write_text("{")
    made = backup.create(client, tmp_path, "t")
    assert made.backup_id == unfinished.backup_id
    assert backup.verify(tmp_path).faults == []
    backup.restore(client, tmp_path, tables={"t": "new"})
    assert rows(client.open_table("new")) == rows(table)


def test_files_of_several_runs_are_joined_without_a_gap_and_without_a_repetition(
    there: There, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in the middle is damaged, and the next run, cut short too, writes it anew with another end. The files behind
    it, of the first run, no longer follow."""
    client = there.client
    table = numbered(client, "t", 6_000, buckets=2)
    killed(there, tmp_path, "t", 3_000)
    (unfinished,) = backup.list_backups(tmp_path)
    first, second, third, *_ = sorted((tmp_path / unfinished.backup_id / "unfinished").iterdir())
    assert first.stem.rpartition("-")[0] == third.stem.rpartition("-")[0]  # all of one tablet
    (damaged,) = [p for p in data_files(tmp_path, unfinished.backup_id) if p.name.startswith(second.stem)]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    before = second.read_bytes()

    class Cut(Exception):
        pass

    def cut(now: backup.Progress) -> None:
        if second.read_bytes() != before:
            raise Cut

    monkeypatch.setattr(creating, "FILE_BYTES", 1)
    monkeypatch.setattr(creating, "BATCH_ROWS", 170)
    monkeypatch.setattr(row_files, "_GROUP_ROWS", 170)
    with pytest.raises(Cut):
        backup.create(client, tmp_path, "t", parallel=1, on_progress=cut)
    made = backup.create(client, tmp_path, "t")
    assert (made.backup_id, made.rows) == (unfinished.backup_id, 6_000)
    report = backup.compare(client, tmp_path)
    assert (report.faults, report.differences) == ([], [])
    backup.restore(client, tmp_path, tables={"t": "new"})
    assert rows(client.open_table("new")) == rows(table)


def test_anew_and_changed_tables_begin_anew_and_say_so(there: There, tmp_path: Path) -> None:
    client = there.client
    table = numbered(client, "t", 3_000, buckets=2)
    numbered(client, "u", 10)

    def unfinished() -> str:
        killed(there, tmp_path, "t", 1_000)
        return backup.list_backups(tmp_path)[0].backup_id

    def create(**options: object) -> str:
        notes.clear()
        return backup.create(client, tmp_path, "t", on_note=notes.append, **options).backup_id

    notes = list[str]()
    old = unfinished()
    assert create(anew=True) != old
    assert notes == [f"removing the unfinished backup {old}: the caller asked to begin anew"]
    old = unfinished()
    assert create(at=client.now()) != old
    assert "it has the rows of another moment" in notes[0]
    old = unfinished()
    table.alter(add=[("n", "int32", True)])
    assert create() != old
    assert notes == [f"removing the unfinished backup {old}: table t was changed since"]
    old = unfinished()
    backup.create(client, tmp_path, ["t", "u"], on_note=notes.append)  # of other tables: both stay
    assert old in [b.backup_id for b in backup.list_backups(tmp_path) if b.state is State.UNFINISHED]


def test_what_a_kill_before_the_plan_leaves_goes_with_the_next_backup(there: There, tmp_path: Path) -> None:
    """It stayed in the folder until somebody pruned, and the deletion of the backup that followed left it there."""
    client = there.client
    numbered(client, "t", 100)
    folder, copied = tmp_path / "b", "20200101T000000Z-00000000"
    no_plan = KILLED.replace("with stele", "from stele.backup.folder import Folder\n"
                             "Folder.put = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\nwith stele")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", no_plan, there.masters, str(folder), "t", "0"], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [b.state for b in backup.list_backups(folder)] == [State.REMAINS]
    (folder / copied / "0-t").mkdir(parents=True)
    (folder / copied / "0-t" / "rows.parquet").write_bytes(b"a copy under way, whose manifest comes last")
    made = backup.create(client, folder, "t")
    assert [b.backup_id for b in backup.list_backups(folder)] == [made.backup_id, copied]


def test_one_whose_moment_is_gone_begins_anew_and_says_so(there: There, tmp_path: Path) -> None:
    client = there.client
    numbered(client, "t", 100)
    made = backup.create(client, tmp_path, "t")
    raw = (tmp_path / made.backup_id / "manifest.json").read_bytes()
    whole = Manifest.of(raw, "m", made.backup_id)
    old = dataclasses.replace(
        whole,
        backup_id="19700101T000000Z-00000000",
        snapshot=1 << 52,
        finished=None,
        tables=tuple(
            dataclasses.replace(t, tablets=tuple(dataclasses.replace(each, files=()) for each in t.tablets))
            for t in whole.tables
        ),
    )
    Unfinished(Folder.at(tmp_path), old, "0").begin()
    notes = list[str]()
    again = backup.create(client, tmp_path, "t", on_note=notes.append)
    assert again.rows == 100 and again.snapshot > made.snapshot
    assert [note.split(" ")[0] for note in notes] == ["going", "beginning"]
    assert states(tmp_path) == [State.COMPLETE] * 2


def test_a_full_disk_is_told_and_the_backup_goes_on_once_there_is_room(
    there: There, tmp_path: Path, small_files: None
) -> None:
    client = there.client
    table = numbered(client, "t", 4_000, buckets=2)
    place, faults = faulty(tmp_path / "f")
    whole = backup.create(client, place, "t")
    for left in range(2_000, whole.file_bytes, whole.file_bytes // 5):
        target, faults = faulty(tmp_path / str(left))
        faults.bytes_left = left
        with pytest.raises(Retryable, match="No space left on device; free space there") as full:
            backup.create(client, target, "t")
        assert full.value.code is Code.DISK_FULL
        assert states(target.root) in ([State.UNFINISHED], [State.REMAINS], [])
        faults.bytes_left = 1 << 40
        assert backup.create(client, target, "t").rows == 4_000
        report = backup.verify(target)
        assert (report.faults, report.strays) == ([], [])
    backup.restore(client, target, tables={"t": "new"})
    assert rows(client.open_table("new")) == rows(table)


def test_a_full_disk_at_the_manifest_leaves_no_backup(there: There, tmp_path: Path) -> None:
    """At every write of a backup in turn."""
    client = there.client
    numbered(client, "t", 20, buckets=2)
    place, faults = faulty(tmp_path / "f")
    backup.create(client, place, "t")
    used = (1 << 40) - faults.bytes_left
    for left in range(0, used - 500, used // 25):  # some bytes differ from run to run
        target, faults = faulty(tmp_path / str(left))
        faults.bytes_left = left
        with pytest.raises(Retryable):
            backup.create(client, target, "t")
        assert State.COMPLETE not in states(target.root)


def test_a_damaged_backup_restores_nothing(there: There, tmp_path: Path) -> None:
    client = there.client
    numbered(client, "t", 4_000)
    numbered(client, "u", 10)
    made = backup.create(client, tmp_path, ["u", "t"])
    path = data_files(tmp_path, made.backup_id)[-1]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Corrupt, match=path.name):
        backup.restore(client, tmp_path, tables={"t": "t2", "u": "u2"})
    assert sorted(info.name for info in client.list_tables()) == ["t", "u"]


RESTORE_KILLED = """
import os, signal, sys
import stele
from stele import backup

def look(table, rows):
    os.kill(os.getpid(), signal.SIGKILL)

with stele.connect(sys.argv[1]) as client:
    backup.restore(client, sys.argv[2], tables={"t": "new"}, on_rows=look)
"""


def test_a_restore_that_is_killed_goes_on_with_the_table_it_left(there: There, tmp_path: Path) -> None:
    client = there.client
    table = numbered(client, "t", 20_000)
    backup.create(client, tmp_path, "t")
    done = subprocess.run([sys.executable, "-c", RESTORE_KILLED, there.masters, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = [info.name for info in client.list_tables() if info.name != "t"]
    assert left.startswith("new.restoring-")
    with pytest.raises(Rejected, match=f"stele table delete {left}"):
        backup.restore(client, tmp_path, tables={"t": "new"}, partitioning=[])
    notes = list[str]()
    backup.restore(client, tmp_path, tables={"t": "new"}, on_note=notes.append)
    assert notes == [f"going on with table {left}, which is left from a restore that did not end"]
    assert rows(client.open_table("new")) == rows(table)
    assert sorted(info.name for info in client.list_tables()) == ["new", "t"]


def test_a_name_that_is_taken_meanwhile_is_not_taken_over(there: There, tmp_path: Path) -> None:
    client = there.client
    numbered(client, "t", 1_000)
    backup.create(client, tmp_path, "t")

    def take(name: str, count: int) -> None:
        with stele.connect(there.masters) as other:
            if "new" not in {info.name for info in other.list_tables()}:
                other.create_table("new", NUMBERS)

    with pytest.raises(Rejected, match="all rows are restored, but") as refused:
        backup.restore(client, tmp_path, tables={"t": "new"}, on_rows=take)
    assert refused.value.code is Code.ALREADY_PRESENT
    assert client.open_table("new").scan().count() == 0
    (left,) = [info.name for info in client.list_tables() if info.name not in ("t", "new")]
    assert client.open_table(left).scan().count() == 1_000


async def test_a_node_that_is_stopped_in_the_middle(tmp_path: Path) -> None:
    """Of a backup, and of a restore from it."""
    cluster = await LocalCluster(tmp_path, nodes=4).start()
    try:
        async with cluster.client() as client:
            table = await client.create_table(
                "t", NUMBERS, PartitionSchema((HashPartition((0,), 8, 0),), None)
            )
            await table.write_arrow(pa.table({"id": np.arange(40_000)}))
            loop, stopping = asyncio.get_running_loop(), list[Future[None]]()

            def stop(name: str) -> None:
                if not stopping:
                    stopping.append(asyncio.run_coroutine_threadsafe(cluster.stop(name), loop))

            made = await backup.create_async(
                client, tmp_path / "b", "t", on_progress=lambda now: stop("node-1") if now.rows else None
            )
            assert stopping and made.rows == 40_000
            await asyncio.wrap_future(stopping[0])
            await cluster.launch("node-1")
            stopping.clear()
            await backup.restore_async(
                client, tmp_path / "b", tables={"t": "new"}, on_rows=lambda name, count: stop("node-2")
            )
            assert stopping
            report = await backup.compare_async(client, tmp_path / "b", tables={"t": "new"})
            assert (report.faults, report.differences) == ([], [])
    finally:
        await cluster.close()


async def test_one_that_is_cancelled_ends_and_can_be_continued(tmp_path: Path, small_files: None) -> None:
    """Its threads have ended when the call has, and no half file is left."""
    cluster = await LocalCluster(tmp_path).start()
    try:
        async with cluster.client() as client:
            await _cancel_and_continue(client, tmp_path / "b")
    finally:
        await cluster.close()


async def _cancel_and_continue(client: AsyncClient, folder: Path) -> None:
    table = await client.create_table("t", NUMBERS)
    await table.write_arrow(pa.table({"id": np.arange(300_000)}))
    loop, reached = asyncio.get_running_loop(), asyncio.Event()

    def look(now: backup.Progress) -> None:
        if now.rows:
            loop.call_soon_threadsafe(reached.set)

    task = asyncio.create_task(backup.create_async(client, folder, "t", on_progress=look))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (left,) = await asyncio.to_thread(backup.list_backups, folder)
    assert left.state is State.UNFINISHED and (folder / left.backup_id / PLAN).exists()
    files = {p.name for p in data_files(folder, left.backup_id)}
    records = {p.stem for p in (folder / left.backup_id / "unfinished").iterdir()}
    assert {name.rpartition("-")[0] for name in files} == records
    assert list((folder / "writers").iterdir()) == []
    made = await backup.create_async(client, folder, "t")
    assert (made.backup_id, made.rows) == (left.backup_id, 300_000)
    assert (await asyncio.to_thread(backup.verify, folder)).faults == []
