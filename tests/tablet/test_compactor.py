"""The worker process: merges, dies, goes idle, meets damage."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pyarrow as pa
import pytest

from stele.model.block import RowOp
from stele.model.errors import Code, Corrupt, Retryable
from stele.tablet import compaction, worker
from stele.tablet.compaction import CompactionJob
from stele.tablet.compactor import Compactor
from stele.tablet.files import Files
from stele.tablet.store import TabletStore
from tests.tablet.twin import FOREVER, Row, Twin, all_rows, flush, new_store


def _rows(start: int) -> list[Row]:
    return [{"k": "k", "n": n, "v": f"v{start}", "w": start, "d": None} for n in range(start, start + 50)]


def _store(home: Path, twin: Twin) -> TabletStore:
    store = new_store(home / "t")
    for start in (0, 20, 40):
        store.apply(twin.write(_rows(start), RowOp.UPSERT)[0])
        flush(store)
    return store


async def test_a_worker_merges_goes_idle_and_comes_back(tmp_path: Path) -> None:
    twin = Twin()
    store = _store(tmp_path, twin)
    compactor = Compactor(idle_s=0.05)
    try:
        for _ in range(2):
            job = store.plan_compaction(full=True)
            assert job is not None
            assert store.plan_compaction(full=True) is None  # one at a time
            store.install_compaction(await compactor.run(job))
            assert len(store.files) == 1
            store.apply(twin.write(_rows(60), RowOp.UPSERT)[0])
            flush(store)
            while compactor.running:  # it has been idle for long enough
                await asyncio.sleep(0.01)
        again = TabletStore.open(tmp_path / "t", FOREVER)
        assert all_rows(again) == twin.at(store.last_timestamp)
    finally:
        await compactor.close()
    assert not compactor.running


async def test_a_worker_gives_way_to_whoever_serves(tmp_path: Path) -> None:
    store = _store(tmp_path, Twin())
    compactor = Compactor()
    try:
        job = store.plan_compaction(full=True)
        assert job is not None
        store.install_compaction(await compactor.run(job))
        assert compactor._process is not None
        own = os.getpriority(os.PRIO_PROCESS, 0)
        threads = [int(t.name) for t in Path(f"/proc/{compactor._process.pid}/task").iterdir()]
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {min(own + 10, 19)}
    finally:
        await compactor.close()


async def test_a_worker_that_dies_harms_nothing(tmp_path: Path) -> None:
    store = _store(tmp_path, Twin())
    before = store.files
    compactor = Compactor(python="/bin/false")
    job = store.plan_compaction(full=True)
    assert job is not None
    with pytest.raises(Retryable):
        await compactor.run(job)
    store.abandon_compaction(job)
    assert store.files == before
    assert store.plan_compaction(full=True) is not None
    await compactor.close()


async def test_a_worker_that_cannot_be_started_fails_its_job_alone(tmp_path: Path) -> None:
    """No memory or no descriptor for a moment: the job was never given up, and its store never merged again."""
    store = _store(tmp_path, Twin())
    job = store.plan_compaction(full=True)
    assert job is not None
    with pytest.raises(Retryable, match="could not start"):
        await Compactor(python=str(tmp_path / "no-python")).run(job)
    store.abandon_compaction(job)
    again = store.plan_compaction(full=True)
    assert again is not None
    compactor = Compactor()
    try:
        store.install_compaction(await compactor.run(again))
    finally:
        await compactor.close()
    assert len(store.files) == 1


async def test_an_answer_that_nobody_took_is_not_the_next_jobs(tmp_path: Path) -> None:
    """The files of one merge would take the place of those that another one read."""
    stores = [_store(tmp_path / name, Twin()) for name in ("given up", "next")]
    compactor = Compactor()
    try:
        given_up = stores[0].plan_compaction(full=True)
        assert given_up is not None
        running = asyncio.create_task(compactor.run(given_up))
        while not compactor.running:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        job = stores[1].plan_compaction(full=True)
        assert job is not None
        result = await compactor.run(job)
        assert all(file.name.startswith(job.output) for file in result.files)
        stores[1].install_compaction(result)
        assert len(stores[1].files) == 1
    finally:
        await compactor.close()


def test_merged_files_have_their_names_on_the_disk_before_the_manifest_lists_them(tmp_path: Path) -> None:
    """Once: the worker synced the directory, and who puts the files in use did so again."""
    store = _store(tmp_path, Twin())
    job = store.plan_compaction(full=True)
    assert job is not None
    done: list[str] = []

    class Telling(Files):
        def sync_directory(self, directory: Path) -> None:
            done.append("names are synced")
            super().sync_directory(directory)

        def replace(self, source: Path, target: Path) -> None:
            done.append(f"{target.name} is replaced")
            super().replace(source, target)

    files = Telling()
    store._contents.files = files
    store.install_compaction(compaction.run_job(job, files))
    assert done == ["names are synced", "MANIFEST is replaced", "names are synced"]


def test_a_merge_whose_end_failed_may_be_planned_again(tmp_path: Path) -> None:
    """Whatever it met: only of errors that were foreseen its store heard that it was over."""
    store = _store(tmp_path, Twin())
    job = store.plan_compaction(full=True)
    assert job is not None
    result = compaction.run_job(job)
    before, path = store.files, tmp_path / "t"

    class Lacking(Files):
        def sync_directory(self, directory: Path) -> None:
            raise MemoryError

    store._contents.files, files = Lacking(), store._contents.files
    with pytest.raises(MemoryError):
        store.install_compaction(result)
    store._contents.files = files
    assert store.files == before and {p.name for p in path.glob("rows-*")} == set(before)
    again = store.plan_compaction(full=True)
    assert again is not None
    store.install_compaction(compaction.run_job(again))
    assert len(store.files) == 1


def test_a_merge_for_which_there_was_no_room_is_planned_once_there_is(tmp_path: Path) -> None:
    """A store is not looked at again while its files are the same: but for this, which another store's end may give."""
    twin = Twin()
    store = _store(tmp_path, twin)
    assert store.plan_compaction() is None and store.plan_compaction() is None
    store.apply(twin.write(_rows(60), RowOp.UPSERT)[0])
    flush(store)
    assert store.plan_compaction(room_bytes=0) is None
    job = store.plan_compaction(room_bytes=1 << 20)
    assert job is not None and job.inputs == tuple(store.files)
    store.install_compaction(compaction.run_job(job))
    assert store.plan_compaction() is None and store.plan_compaction(full=True) is None


async def test_a_worker_that_meets_damage_says_so(tmp_path: Path) -> None:
    store = _store(tmp_path, Twin())
    path = tmp_path / "t" / store.files[0]
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.unlink()
    path.write_bytes(data)
    job = store.plan_compaction(full=True)
    assert job is not None
    compactor = Compactor(idle_s=0.2)
    try:
        with pytest.raises(Corrupt):
            await compactor.run(job)
    finally:
        await compactor.close()


def test_a_merge_that_arrow_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker died of it, and only its own output knew why."""

    def run_job(_: CompactionJob) -> None:
        raise pa.ArrowInvalid("offset overflow while concatenating arrays")

    monkeypatch.setattr(compaction, "run_job", run_job)
    job = CompactionJob("d", ("rows-1",), "rows-2", 0, True, "{}", 2)
    answer = json.loads(worker._answer(job.to_json()))
    assert answer["code"] == Code.UNAVAILABLE and "offset overflow" in answer["message"]
