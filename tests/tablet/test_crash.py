"""Power loss at every file operation of flush, merge and checkpoint, with any of the names lost that no sync of their
directory has seen: old or new, never in between; and full disks."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, combinations
from pathlib import Path

import pytest

from stele.model.block import RowOp
from stele.model.errors import Code, Corrupt, Retryable
from stele.model.ids import OpId
from stele.model.predicate import ScanSpec
from stele.tablet.compaction import run_job
from stele.tablet.files import Files, translate
from stele.tablet.keyspace import KeySpace
from stele.tablet.store import StoreOptions, TabletStore
from tests.tablet.test_keyspace import replace_entry
from tests.tablet.twin import SCHEMA, Row, Twin, all_rows, compact, flush, rows_of


class PowerLoss(Exception):
    """The machine stops here."""


class Stops(Files):
    """Stops before the operation number `at`; a write stops after `torn` of its bytes instead. `unsynced`: the names that
    changed since the last sync of their directory, and what they named then."""

    def __init__(self, at: int, torn: float = 0.0) -> None:
        self.left = at
        self.torn = torn
        self.done = 0
        self.unsynced: dict[Path, bytes | None] = {}

    def _step(self, *names: Path) -> None:
        self.done += 1
        self.left -= 1
        if self.left == 0:
            raise PowerLoss
        self._change(*names)

    def _change(self, *names: Path) -> None:
        for path in names:
            self.unsynced.setdefault(path, path.read_bytes() if path.exists() else None)

    def write_new(self, path: Path, parts: Iterable[bytes | memoryview]) -> int:
        whole = b"".join(bytes(p) for p in parts)
        self._change(path)
        try:
            self._step()
        except PowerLoss:
            path.write_bytes(whole[: int(len(whole) * self.torn)])
            raise
        return super().write_new(path, [whole])

    def replace(self, source: Path, target: Path) -> None:
        self._step(source, target)
        super().replace(source, target)

    def sync_directory(self, directory: Path) -> None:
        self._step()
        super().sync_directory(directory)
        self.unsynced = {path: was for path, was in self.unsynced.items() if path.parent != directory}

    def remove(self, path: Path) -> None:
        self._step(path)
        super().remove(path)

    def link(self, source: Path, target: Path) -> None:
        self._step(target)
        super().link(source, target)

    def crashes(self, directory: Path, crashed: Path) -> Iterator[list[str]]:
        """What the next start may find of `directory`, one after the other, in `crashed`; the names that were lost."""
        changed = {path.name: was for path, was in self.unsynced.items() if path.parent == directory}
        for lost in chain.from_iterable(combinations(changed, count) for count in range(len(changed) + 1)):
            shutil.copytree(directory, crashed)
            for name in lost:
                (crashed / name).unlink(missing_ok=True)
                if (was := changed[name]) is not None:
                    (crashed / name).write_bytes(was)
            yield list(lost)
            shutil.rmtree(crashed)


def _rows(start: int, count: int) -> list[Row]:
    return [{"k": "k", "n": n, "v": f"v{start}", "w": start, "d": None} for n in range(start, start + count)]


def _life(home: Path, twin: Twin, files: Files) -> None:
    """A store's life with two flushes, a merge and a checkpoint; entries reach the twin's log before the store."""
    options = StoreOptions(history_us=1 << 50, files=files)
    store = TabletStore.open(home / "t", options)
    for start in (0, 3):
        entry, _ = twin.write(_rows(start, 5), RowOp.UPSERT)
        store.apply(entry)
        flush(store)
    entry, _ = twin.write([{"k": "k", "n": 1}], RowOp.DELETE)
    store.apply(entry)
    flush(store)
    job = store.plan_compaction(full=True)
    assert job is not None
    store.install_compaction(run_job(job, files))
    entry, _ = twin.write(_rows(20, 2), RowOp.INSERT)
    store.apply(entry)
    store.checkpoint(home / "copy")


def _operations(home: Path) -> int:
    TabletStore.create(home / "t", SCHEMA)
    counting = Stops(0)
    _life(home, Twin(), counting)
    return counting.done


def test_power_loss_at_every_step_leaves_old_or_new(tmp_path: Path) -> None:
    total = _operations(tmp_path / "count")
    assert total > 15
    for at in range(1, total + 1):
        home = tmp_path / "life"
        TabletStore.create(home / "t", SCHEMA)
        twin, files = Twin(), Stops(at, torn=0.6)
        with pytest.raises(PowerLoss):
            _life(home, twin, files)
        for lost in files.crashes(home / "t", tmp_path / "crashed"):
            _goes_on(tmp_path / "crashed", twin, f"operation {at}, lost {lost}")
        shutil.rmtree(home)


def _goes_on(directory: Path, twin: Twin, state: str) -> None:
    for _ in range(2):  # as the crash left it, then flushed, merged and opened once more
        try:
            store = TabletStore.open(directory, StoreOptions(history_us=1 << 50))
        except Corrupt as exc:
            raise AssertionError(state) from exc
        listed = {"MANIFEST", *store.files, *(p.name for p in directory.glob("once-*"))}
        assert {p.name for p in directory.iterdir()} == listed
        twin.replay(store)
        assert all_rows(store) == twin.at(store.last_timestamp), state
        flush(store)
        compact(store)


class Full(Files):
    """A disk that is full while `full` says so, at the operation it names."""

    def __init__(self) -> None:
        self.full = ""

    def _refuse(self, name: str) -> None:
        if self.full == name:
            raise translate(OSError(errno.ENOSPC, "No space left on device"), name)

    def write_new(self, path: Path, parts: Iterable[bytes | memoryview]) -> int:
        self._refuse("write")
        if path.name.startswith("rows"):
            self._refuse("rows")
        if path.name.startswith("MANIFEST"):
            self._refuse("manifest")
        return super().write_new(path, parts)

    def replace(self, source: Path, target: Path) -> None:
        self._refuse("replace")
        super().replace(source, target)


@pytest.mark.parametrize("where", ["write", "manifest", "replace"])
def test_a_full_disk_fails_the_flush_and_the_store_serves_on(tmp_path: Path, where: str) -> None:
    files, twin = Full(), Twin()
    store = TabletStore.create(tmp_path / "t", SCHEMA, StoreOptions(files=files))
    store.apply(twin.write(_rows(0, 5), RowOp.INSERT)[0])
    files.full = where
    job = store.begin_flush()
    assert job is not None
    with pytest.raises(Retryable) as caught:
        job.write()
    assert caught.value.code is Code.DISK_FULL
    store.apply(twin.write(_rows(3, 5), RowOp.UPSERT)[0])
    assert store.flushed.index == 0
    assert store.should_flush()
    assert all_rows(store) == twin.at(store.last_timestamp)
    files.full = ""
    assert flush(store)
    assert store.flushed.index == 1  # the same rows; what came later waits for the next one
    assert flush(store)
    reopened = TabletStore.open(tmp_path / "t")
    assert all_rows(reopened) == twin.at(store.last_timestamp)


@pytest.mark.parametrize("where", ["write", "replace"])
def test_a_flush_of_a_key_space_that_fails_is_due_again_at_once(tmp_path: Path, where: str) -> None:
    """It was not, however much came, before the age of two minutes: meanwhile it held the log."""
    files = Full()
    store = KeySpace.create(tmp_path / "k", files=files, flush_bytes=1)
    store.apply(replace_entry(1, b"a", b"1"))
    job = store.begin_flush()
    assert job is not None
    store.apply(replace_entry(2, b"b", b"2"))
    assert not store.should_flush(), "one is under way"
    files.full = where
    with pytest.raises(Retryable):
        job.write()
    assert store.should_flush() and store.flushed == OpId(0, 0)
    found = store.checkpoint(tmp_path / "copy")
    assert found.opid == KeySpace.open(tmp_path / "copy").applied == OpId(0, 0)
    files.full = ""
    again = store.begin_flush()
    assert again is not None
    again.write()
    store.finish_flush(again)
    assert not store.should_flush() and store.flushed == OpId(1, 2)
    assert KeySpace.open(tmp_path / "k").list() == [(b"a", b"1"), (b"b", b"2")]


@pytest.mark.parametrize("where", ["rows", "manifest", "replace"])
def test_a_flush_that_fails_again_and_again_fills_no_disk(tmp_path: Path, where: str) -> None:
    """It is tried twice a second for as long as the disk is full; what it wrote so far must not stay."""
    files, twin = Full(), Twin()
    store = TabletStore.create(tmp_path / "t", SCHEMA, StoreOptions(files=files))
    store.apply(twin.write(_rows(0, 5), RowOp.INSERT)[0])
    before = sorted(p.name for p in (tmp_path / "t").iterdir())
    files.full = where
    for _ in range(3):
        job = store.begin_flush()
        assert job is not None
        with pytest.raises(Retryable):
            job.write()
        left = {p.name for p in (tmp_path / "t").iterdir()} - {"MANIFEST.tmp"}
        assert sorted(left) == before
    files.full = ""
    assert flush(store)
    store.close()
    reopened = TabletStore.open(tmp_path / "t")
    assert all_rows(reopened) == twin.at(reopened.last_timestamp)


class NoDescriptor(Files):
    """None is left, while `lacking`, for the directory in which a file has just got its name."""

    lacking = False

    def replace(self, source: Path, target: Path) -> None:
        super().replace(source, target)
        if self.lacking:
            raise translate(OSError(errno.EMFILE, "Too many open files"), f"syncing {target.parent.name}")


@pytest.mark.parametrize("how", ["flush", "merge"])
def test_what_fails_after_the_manifest_has_its_name_takes_nothing_away(tmp_path: Path, how: str) -> None:
    """That one counts from then on, for the next start at the latest: the files that it lists must stay."""
    files, twin = NoDescriptor(), Twin()
    store = TabletStore.create(tmp_path / "t", SCHEMA, StoreOptions(files=files))
    for start in (0, 3, 6):
        store.apply(twin.write(_rows(start, 5), RowOp.UPSERT)[0])
        if how == "merge" or start < 6:
            flush(store)
    job = store.begin_flush() if how == "flush" else None
    merge = store.plan_compaction(full=True) if how == "merge" else None
    files.lacking = True
    with pytest.raises(Retryable, match="Too many open files"):
        if merge is not None:
            store.install_compaction(run_job(merge))
        else:
            assert job is not None
            job.write()
    files.lacking = False
    shutil.copytree(tmp_path / "t", tmp_path / "next start")
    started = TabletStore.open(tmp_path / "next start")
    assert (started.applied, len(started.files)) == (store.applied, 1 if how == "merge" else 3)
    for one in (started, store):
        one.verify()
        assert all_rows(one) == twin.at(store.last_timestamp)
    store.apply(twin.write(_rows(9, 5), RowOp.UPSERT)[0])
    while flush(store):
        pass
    assert compact(store)
    store.close()
    assert all_rows(TabletStore.open(tmp_path / "t")) == twin.at(store.last_timestamp)


def test_a_full_disk_fails_the_merge_and_the_files_stand(tmp_path: Path) -> None:
    files, twin = Full(), Twin()
    store = TabletStore.create(tmp_path / "t", SCHEMA, StoreOptions(files=files))
    for start in (0, 3, 6):
        store.apply(twin.write(_rows(start, 5), RowOp.UPSERT)[0])
        flush(store)
    before = store.files
    job = store.plan_compaction(full=True)
    assert job is not None
    result = run_job(job)
    files.full = "manifest"
    with pytest.raises(Retryable):
        store.install_compaction(result)
    assert store.files == before
    assert not (tmp_path / "t" / job.output).exists()
    files.full = ""
    assert compact(store)
    assert all_rows(store) == twin.at(store.last_timestamp)


def test_an_open_view_outlives_the_merge_of_its_files(tmp_path: Path) -> None:
    twin = Twin()
    store = TabletStore.create(tmp_path / "t", SCHEMA)
    for start in (0, 3, 6):
        store.apply(twin.write(_rows(start, 5), RowOp.UPSERT)[0])
        flush(store)
    view = store.view()
    wanted = twin.at(store.last_timestamp)
    names = store.files
    compact(store)
    assert not any((tmp_path / "t" / name).exists() for name in names)
    store.apply(twin.write([{"k": "k", "n": 0}], RowOp.DELETE)[0])
    store.close()
    assert rows_of(view.scan(ScanSpec(ordered=True))) == wanted
    view.close()
    assert rows_of(view.scan()) == []


Damage = Callable[[bytes, int], bytes]


def _flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]


def _cut(data: bytes, at: int) -> bytes:
    return data[:at]


def _store_with_everything(home: Path) -> Twin:
    twin = Twin()
    store = TabletStore.create(home / "t", SCHEMA, StoreOptions(history_us=1 << 50))
    store.apply(twin.write(_rows(0, 40), RowOp.UPSERT)[0])
    store.apply(twin.write([{"k": "k", "n": 1}], RowOp.DELETE)[0])
    flush(store)
    store.apply(twin.write(_rows(50, 4), RowOp.INSERT)[0])
    flush(store)
    return twin


@pytest.mark.parametrize("damage", [_flip, _cut])
def test_no_damaged_byte_goes_unseen(tmp_path: Path, damage: Damage) -> None:
    """Whatever byte of whatever file is flipped, or wherever it is cut: Corrupt, never wrong rows."""
    _store_with_everything(tmp_path)
    for path in sorted((tmp_path / "t").iterdir()):
        good = path.read_bytes()
        for at in range(0, len(good), 11 if len(good) > 1000 else 1):
            path.unlink()
            path.write_bytes(damage(good, at))
            with pytest.raises(Corrupt):
                store = TabletStore.open(tmp_path / "t")
                with store.view() as view:
                    list(view.scan())
                store.verify()
        path.unlink()
        path.write_bytes(good)


def test_a_missing_file_is_corrupt(tmp_path: Path) -> None:
    _store_with_everything(tmp_path)
    next((tmp_path / "t").glob("rows-*")).unlink()
    with pytest.raises(Corrupt):
        TabletStore.open(tmp_path / "t")


def test_a_checkpoint_opens_as_a_store_and_keeps_its_files(tmp_path: Path) -> None:
    twin = _store_with_everything(tmp_path)
    store = TabletStore.open(tmp_path / "t")
    found = store.checkpoint(tmp_path / "copy")
    compact(store)
    assert {p.name for p in (tmp_path / "copy").iterdir()} == set(found.files)
    copy = TabletStore.open(tmp_path / "copy")
    assert copy.applied == found.opid == store.applied
    assert all_rows(copy) == twin.at(store.last_timestamp)


class Links(Stops):
    """Looks, when a file is linked, whether somebody else might put another one in its place."""

    machine: TabletStore | KeySpace

    def link(self, source: Path, target: Path) -> None:
        machine = self.machine
        lock = machine._file_lock if isinstance(machine, KeySpace) else machine._contents.manifest_lock
        assert lock.locked()
        super().link(source, target)


@pytest.mark.parametrize("table", [True, False], ids=["table", "key space"])
def test_a_checkpoint_is_of_one_moment_and_survives_power_loss(tmp_path: Path, table: bool) -> None:
    files = Links(0)
    if table:
        _store_with_everything(tmp_path)
        files.machine = TabletStore.open(tmp_path / "t", StoreOptions(files=files))
    else:
        files.machine = KeySpace.create(tmp_path / "t", files=files)
    found = files.machine.checkpoint(tmp_path / "copy")
    assert found.files and not [path for path in files.unsynced if path.parent == tmp_path / "copy"]


def test_a_key_space_survives_power_loss_at_every_step(tmp_path: Path) -> None:
    for at in range(1, 4):
        KeySpace.create(tmp_path / "k")
        files = Stops(at + 1, torn=0.5)
        store = KeySpace.open(tmp_path / "k", files=files)
        store.apply(replace_entry(1, b"a", b"1"))
        job = store.begin_flush()
        assert job is not None
        with pytest.raises(PowerLoss):
            job.write()
        for _ in files.crashes(tmp_path / "k", tmp_path / "crashed"):
            again = KeySpace.open(tmp_path / "crashed")
            assert again.read(b"a") == (b"1" if again.applied.index else None)
        shutil.rmtree(tmp_path / "k")
