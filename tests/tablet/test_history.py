"""What flushes and merges may drop: three keys, written, deleted and read in the past at random, against the twin."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from stele.consensus.timestamps import encode_ceiling
from stele.model.block import RowOp
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, Rejected
from stele.model.ids import HybridTime
from stele.tablet import sorted_runs
from stele.tablet.compaction import CompactionJob, run_job
from stele.tablet.keyspace import KeySpace
from stele.tablet.store import StoreOptions, TabletStore
from stele.tablet.view import View, key_array
from tests.tablet.twin import (
    SCHEMA,
    START_US,
    Twin,
    block_of,
    flush,
    new_store,
    rows_in,
    rows_of,
    write_entry,
)

STEPS = 60


class Story:
    """One store with little history, its twin, and what is under way."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.directory = directory
        self.steady_us = 0
        history_us = self.rng.choice([0, 1, 4, 1 << 50])
        self.options = StoreOptions(history_us=history_us, steady_us=lambda: self.steady_us)
        self.twin = Twin()
        self.store = new_store(directory, self.options)
        self.merge: CompactionJob | None = None
        self.views: list[tuple[View, int]] = []

    def write(self) -> None:
        op = self.rng.choice([RowOp.UPSERT, RowOp.UPSERT, RowOp.DELETE_IGNORE, RowOp.DELETE])
        rows = [
            {"k": "k", "n": self.rng.randrange(3), "v": None, "w": len(self.twin.entries), "d": None}
            for _ in range(self.rng.randint(1, 2))
        ]
        self.store.apply(self.twin.write(rows, op)[0])

    def flush(self) -> None:
        flush(self.store)

    def rest(self) -> None:
        """Time passes in which nothing is written."""
        self.steady_us += self.rng.randrange(6)

    def merge_begins(self) -> None:
        """Of all files, of those that are worth it, or of the newest four."""
        if self.merge is None:
            newest = sum(file.merge_bytes for file in self.store._contents.state.manifest.files[:4])
            full, room = self.rng.choice([(True, None), (False, None), (True, newest), (True, newest)])
            self.merge = self.store.plan_compaction(full=full, room_bytes=room)

    def merge_ends(self) -> None:
        if self.merge is not None:
            self.store.install_compaction(run_job(self.merge))
            self.merge = None

    def look_back(self) -> None:
        snapshot = self.store.last_timestamp - (self.rng.randrange(6) << 12)
        try:
            self.views.append((self.store.view(HybridTime(snapshot)), snapshot))
        except Rejected as exc:
            assert exc.code is Code.SNAPSHOT_TOO_OLD and snapshot < self.store.history_mark

    def restart(self) -> None:
        self.merge = None
        self.store.close()
        self.store = TabletStore.open(self.directory, self.options)
        self.twin.replay(self.store)

    def check(self) -> None:
        self.views.append((self.store.view(), self.store.last_timestamp))
        for view, snapshot in self.views:
            assert rows_in(view) == self.twin.at(snapshot)
        if len(self.views) > 4:
            self.views.pop(self.rng.randrange(4))[0].close()

    def tell(self) -> None:
        chosen = [self.write] * 8 + [self.flush] * 6 + [self.look_back] * 3
        chosen += [self.merge_begins, self.merge_ends, self.check, self.restart, self.rest]
        for _ in range(STEPS):
            self.rng.choice(chosen)()
        self.check()
        for view, _ in self.views:
            view.close()


@pytest.mark.parametrize("seed", range(16))
def test_what_somebody_may_still_read_is_kept_and_what_is_deleted_stays_so(tmp_path: Path, seed: int) -> None:
    Story(tmp_path / "t", seed).tell()


@pytest.mark.parametrize("seed", range(16))
def test_a_merge_into_several_files_loses_nothing(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a key has more versions than a run may hold, the older ones go into a file of their own."""
    monkeypatch.setattr(sorted_runs, "RUN_BYTES_MAX", 60)
    monkeypatch.setattr(sorted_runs, "_FEW_BYTES", 0)
    story = Story(tmp_path / "t", seed)
    story.tell()
    story.views = []
    if story.options.history_us == 1 << 50:
        flush(story.store)
        story.merge_ends()
        story.merge = story.store.plan_compaction(full=True)
        assert story.merge is not None
        result = run_job(story.merge)
        assert len(result.files) > 1
        story.store.abandon_compaction(story.merge)
        assert not list(story.directory.glob(f"{story.merge.output}*"))
        story.merge = story.store.plan_compaction(full=True)
        story.merge_ends()
        story.check()


def test_a_merge_of_the_newest_files_keeps_the_deletes_that_older_ones_need(tmp_path: Path) -> None:
    twin, store = Twin(), new_store(tmp_path / "t", StoreOptions(history_us=0))
    for n, op in (
        (1, RowOp.UPSERT),
        (1, RowOp.DELETE),
        (2, RowOp.UPSERT),
        (3, RowOp.UPSERT),
        (4, RowOp.UPSERT),
    ):
        store.apply(twin.write([{"k": "k", "n": n, "v": None, "w": n, "d": None}], op)[0])
        flush(store)
    newest = sum(file.merge_bytes for file in store._contents.state.manifest.files[:4])
    job = store.plan_compaction(full=True, room_bytes=newest)
    assert job is not None and len(job.inputs) == 4
    store.install_compaction(run_job(job))
    assert len(store.files) == 2
    with store.view() as view:
        assert rows_in(view) == twin.at(store.last_timestamp)
    job = store.plan_compaction(full=True)
    assert job is not None
    store.install_compaction(run_job(job))
    assert (len(store.files), store.rows_estimate) == (1, 3)
    with store.view() as view:
        assert rows_in(view) == twin.at(store.last_timestamp)


def test_a_merge_that_leaves_as_many_files_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of one key are of one size: they were merged again and again, as long as history lasts."""
    monkeypatch.setattr(sorted_runs, "RUN_BYTES_MAX", 60)
    store = new_store(tmp_path / "t", StoreOptions(history_us=1 << 50))
    for index in range(1, 17):
        store.apply(write_entry(index, _row(index)))
        flush(store)
    merges = 0
    while (job := store.plan_compaction()) is not None and merges < 10:
        store.install_compaction(run_job(job))
        merges += 1
    assert merges < 10 and len(store.files) >= 4
    store.apply(write_entry(17, _row(17)))
    flush(store)
    assert store.plan_compaction() is not None
    store.close()


@pytest.mark.parametrize("how", ["flush", "merge"])
def test_what_was_dropped_is_not_read_once_history_is_longer(tmp_path: Path, how: str) -> None:
    """The mark stands in the manifest: no setting and no clock brings back what lies below it."""
    short, long = StoreOptions(history_us=0), StoreOptions(history_us=1 << 50)
    store = new_store(tmp_path / "t", short if how == "flush" else long)
    first = store.apply(write_entry(1, _row(1))).timestamp
    if how == "merge":
        flush(store)
    store.apply(write_entry(2, _row(2)))
    flush(store)
    if how == "merge":
        assert len(rows_in(store.view(first))) == 1
        store.close()
        store = TabletStore.open(tmp_path / "t", short)
        job = store.plan_compaction(full=True)
        assert job is not None
        store.install_compaction(run_job(job))
    store.close()
    store = TabletStore.open(tmp_path / "t", long)
    with pytest.raises(Rejected, match="below the history mark"):
        store.view(first)
    store.close()


@pytest.mark.parametrize("last", ["flush", "merge"])
def test_what_began_earlier_and_ends_later_does_not_lower_the_mark(tmp_path: Path, last: str) -> None:
    """What the other one dropped would be missing from snapshots that are taken for whole."""
    short, long = StoreOptions(history_us=0), StoreOptions(history_us=1 << 50)
    store = new_store(tmp_path / "t", short)
    for index in (1, 2):
        store.apply(write_entry(index, _row(index)))
        flush(store)
    store.apply(write_entry(3, _row(3)))
    if last == "flush":
        job = store.begin_flush()
        assert job is not None
        store.apply(write_entry(4, _row(4)))
        merge = store.plan_compaction(full=True)
        assert merge is not None
        store.install_compaction(run_job(merge))
        mark = merge.history_mark
        job.write()
        store.finish_flush(job)
    else:
        merge = store.plan_compaction(full=True)
        assert merge is not None
        store.apply(write_entry(4, _row(4)))
        mark = store.history_mark
        flush(store)
        store.install_compaction(run_job(merge))
    assert [row["w"] for row in rows_in(store.view())] == [4]
    store.close()
    again = TabletStore.open(tmp_path / "t", long)
    assert again.history_mark == mark
    with pytest.raises(Rejected, match="below the history mark"):
        again.view(HybridTime(mark - 1))
    again.close()


@pytest.mark.parametrize("ordinary", [True, False], ids=["table", "key space"])
def test_a_flush_keeps_the_ceiling(tmp_path: Path, ordinary: bool) -> None:
    """The log may be gone below it: the next leader would give out timestamps that were served already."""
    store = new_store(tmp_path / "t") if ordinary else KeySpace.create(tmp_path / "t")
    ceiling = (START_US + 7_000_000) << 12
    store.apply(Entry(1, 1, EntryKind.CEILING, 0, encode_ceiling(ceiling)))
    job = store.begin_flush()
    assert job is not None
    job.write()
    store.finish_flush(job)
    store.close()
    again = TabletStore.open(tmp_path / "t", StoreOptions()) if ordinary else KeySpace.open(tmp_path / "t")
    assert again.max_ceiling == ceiling
    again.close()


def test_one_file_is_read_as_of_a_time_between_its_rows(tmp_path: Path) -> None:
    """Keys that stand there once each, by scans and by their keys: at a row's own time it is there."""
    store = new_store(tmp_path / "t", StoreOptions(history_us=1 << 50))
    times = [store.apply(write_entry(n, _row(n, key=n))).timestamp for n in (1, 2, 3)]
    flush(store)
    for count, at in ((0, times[0] - 1), *enumerate(times, start=1)):
        with store.view(HybridTime(at)) as view:
            wanted = list(range(1, count + 1))
            assert sorted(row["n"] for row in rows_of(view.scan())) == wanted
            keys = pa.record_batch({"k": ["k"] * 3, "n": pa.array([1, 2, 3], SCHEMA.by_name["n"].arrow)})
            assert view.get(key_array(keys, SCHEMA))[0].column("n").to_pylist() == wanted
    store.close()


def _row(w: int, key: int = 1) -> bytes:
    return block_of([{"k": "k", "n": key, "v": None, "w": w, "d": None}], RowOp.UPSERT)
