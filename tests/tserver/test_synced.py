"""What is replaced is whole on the disk before it has its name, and so is the name before anybody goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stele.consensus.bootstrap import STORE, create_machine
from stele.consensus.files import make_directory, remove_if_empty, remove_tree
from stele.consensus.superblock import DataState, Superblock, write_superblock
from stele.model.block import RowOp
from stele.model.ids import ClusterId, NodeId, OpId, ReplicaId, TableId, TabletId, new_id
from stele.tablet.keyspace import KeySpace
from stele.tserver.volume import format_volume, lock_directory
from stele.wal.files import OsFiles
from stele.wal.metadata import Metadata, Position, write_metadata
from tests.tablet.test_keyspace import replace_entry
from tests.tablet.twin import SCHEMA, Twin, compact, flush, new_store


class Watched:
    """The calls of this process that make bytes and names last. `faults`: what came too early or not at all."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.faults: list[str] = []
        self.named = 0
        self._synced: dict[Path, int] = {}
        self._unsynced_names: dict[Path, str] = {}
        for call in ("fsync", "fdatasync"):
            patch.setattr(os, call, self._sync(getattr(os, call)))
        for call in ("replace", "rename"):
            patch.setattr(os, call, self._name(getattr(os, call)))

    def _sync(self, call: Callable[[int], None]) -> Callable[[int], None]:
        def sync(fd: int) -> None:
            call(fd)
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            if path.is_dir():
                self._unsynced_names.pop(path, None)
            self._synced[path] = os.fstat(fd).st_size

        return sync

    def _name(self, call: Callable[..., None]) -> Callable[..., None]:
        def name(source: Path, target: Path, **more: Any) -> None:
            self.named += 1
            there = [source, *(p for p in source.parent.iterdir() if p.name.startswith(("rows-", "once-")))]
            self.faults += [
                f"{path.name} is not synced when {target.name} names it"
                for path in there
                if self._synced.get(path) != path.stat().st_size
            ]
            call(source, target, **more)
            self._unsynced_names[target.parent] = target.name

        return name

    def over(self) -> None:
        """Whoever asked for it goes on: everything lasts."""
        assert self.named and not self.faults and not self._unsynced_names


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_the_record_of_a_node(tmp_path: Path, watched: Watched) -> None:
    """An incarnation that was told and then forgotten would be given to the next start as well; fences fall."""
    cluster, node = ClusterId(new_id()), NodeId(new_id())
    volume = format_volume(tmp_path, lock_directory(tmp_path), cluster, node, "node")
    watched.over()
    volume.update(lambda record: replace(record, incarnation=7))
    watched.over()
    volume.raise_fences(OpId(9, 1), 3)
    watched.over()
    volume.close()
    assert watched.named == 3 * 2  # node.json and its copy


def test_a_superblock(tmp_path: Path, watched: Watched) -> None:
    """A tombstone that is forgotten votes again."""
    block = Superblock(
        TabletId(new_id()), ReplicaId(1), TableId(new_id()), "t", "keyspace", DataState.TOMBSTONED
    )
    write_superblock(tmp_path, block)
    watched.over()


def test_flushes_and_merges(tmp_path: Path, watched: Watched) -> None:
    """The log lets go of what is flushed."""
    store, twin = new_store(tmp_path / "t"), Twin()
    watched.over()
    for start in range(3):
        rows = [{"k": "k", "n": n, "v": "v", "w": n, "d": None} for n in range(start, start + 9)]
        store.apply(twin.write(rows, RowOp.UPSERT)[0])
        assert flush(store)
        watched.over()
    assert compact(store)
    watched.over()


@pytest.mark.parametrize("kind", ["table", "keyspace"])
def test_a_new_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A superblock that says READY shares its sync with no other name: one that is kept without the store is FAILED."""
    synced, fsync = dict[Path, list[str]](), os.fsync

    def sync(fd: int) -> None:
        fsync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_dir():
            synced[path] = os.listdir(path)

    monkeypatch.setattr(os, "fsync", sync)
    block = Superblock(
        TabletId(new_id()), ReplicaId(1), TableId(new_id()), "t", kind, DataState.READY, SCHEMA.to_json()
    )
    create_machine(block, tmp_path).close()
    assert synced[tmp_path] == [STORE]
    assert synced[tmp_path / STORE] == os.listdir(tmp_path / STORE)


def test_flushes_of_a_key_space(tmp_path: Path, watched: Watched) -> None:
    store = KeySpace.create(tmp_path / "k")
    watched.over()
    store.apply(replace_entry(1, b"a", b"1"))
    job = store.begin_flush()
    assert job is not None
    job.write()
    watched.over()


def test_the_metadata_of_the_log(tmp_path: Path, watched: Watched) -> None:
    """Segments go once it says that they are not needed."""
    write_metadata(OsFiles(), tmp_path, Metadata(NodeId(new_id()), 1, 0, Position(1, 4096), ()))
    watched.over()


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = list[str](), os.fsync

    def sync(fd: int) -> None:
        fsync(fd)
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)

    monkeypatch.setattr(os, "fsync", sync)
    make_directory(tmp_path / "a" / "b" / "c")
    assert synced == [tmp_path.name, "a", "b"]
    synced.clear()
    remove_if_empty(tmp_path / "a" / "b" / "c")
    remove_tree(tmp_path / "a")
    assert synced == ["b", tmp_path.name]
