"""Views on other threads while the owner writes, flushes and merges: each sees whole entries of one moment."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pytest

from stele.model import keys
from stele.model.block import RowOp
from stele.model.clock import from_physical_us
from stele.model.errors import Code, Corrupt, Rejected
from stele.model.ids import HybridTime
from stele.model.predicate import ScanSpec
from stele.tablet.compaction import run_job
from stele.tablet.files import FILES, Files
from stele.tablet.keyspace import KeySpace
from stele.tablet.machine import StateMachine
from stele.tablet.memtable import SMALL_ROWS
from stele.tablet.store import StoreOptions, TabletStore
from tests.tablet.twin import FOREVER, SCHEMA, block_of, compact, flush, new_store, rows_of, write_entry

_ROWS = 40


def _block(n: int, count: int = _ROWS) -> bytes:
    return block_of([{"k": "k", "n": i, "v": str(n), "w": n, "d": None} for i in range(count)], RowOp.UPSERT)


@pytest.mark.parametrize("count", [_ROWS, SMALL_ROWS // 4])
def test_a_view_sees_whole_entries_while_everything_moves(tmp_path: Path, count: int) -> None:
    store = new_store(tmp_path / "t")
    store.apply(write_entry(1, _block(1, count)))
    stop = threading.Event()
    faults: list[str] = []
    seen = [0, 0]

    def read(reader: int) -> None:
        last = 0
        key = pa.array([keys.encode_tuple(("k", 3), (pa.string(), pa.int32()))], pa.binary())
        while not stop.is_set():
            with store.view() as view:
                rows = rows_of(view.scan(ScanSpec(ordered=bool(reader))))
                one = view.get(key)[0].to_pylist()
            values = {row["w"] for row in rows}
            if len(rows) != count or len(values) != 1 or min(values) < last or one[0]["w"] not in values:
                faults.append(f"reader {reader}: {len(rows)} rows of {values} after {last}, got {one}")
                return
            last = min(values)
            seen[reader] += 1

    readers = [threading.Thread(target=read, args=(n,)) for n in range(2)]
    for reader in readers:
        reader.start()
    index = 1
    while not faults and (index < 60 or min(seen) < 3):
        index += 1
        store.apply(write_entry(index, _block(index, count)))
        if index % 10 == 0:
            flush(store)
        if index % 20 == 0:
            compact(store)
    stop.set()
    for reader in readers:
        reader.join()
    assert not faults


def test_both_are_state_machines(tmp_path: Path) -> None:
    table: StateMachine = new_store(tmp_path / "t")
    space: StateMachine = KeySpace.create(tmp_path / "k")
    for machine in (table, space):
        assert machine.applied == machine.flushed
        assert machine.begin_flush() is None
        assert not machine.should_flush()
        machine.close()


def test_a_snapshot_below_the_history_mark_is_refused(tmp_path: Path) -> None:
    store = TabletStore.create(tmp_path / "t", SCHEMA, StoreOptions(history_us=3, steady_us=lambda: 0))
    for index in range(1, 9):
        store.apply(write_entry(index, _block(index)))
    mark = store.history_mark
    assert mark > 0
    with store.view(HybridTime(mark)) as view:
        assert {row["w"] for row in rows_of(view.scan())} == {5}
    with pytest.raises(Rejected) as caught:
        store.view(HybridTime(mark - 1))
    assert caught.value.code is Code.SNAPSHOT_TOO_OLD


def test_the_present_is_no_history_after_a_write_in_the_future(tmp_path: Path) -> None:
    """A leader's clock was an hour ahead: each scan at the present was refused, for as long as the clock had been wrong."""
    now_us = [1_000]
    options = StoreOptions(history_us=3, wall_us=lambda: now_us[0], steady_us=lambda: 0)
    store = TabletStore.create(tmp_path / "t", SCHEMA, options)
    future_us = 9_000
    for index, at_us in enumerate((995, 998, 1_000, future_us), 1):
        store.apply(write_entry(index, _block(index), at_us=at_us))
    flush(store)
    compact(store)
    for snapshot_us, found in ((997, {1}), (1_000, {3}), (8_999, {3}), (future_us, {4})):
        with store.view(from_physical_us(snapshot_us)) as view:
            assert {row["w"] for row in rows_of(view.scan())} == found
    with pytest.raises(Rejected) as caught:
        store.view(from_physical_us(996))
    assert caught.value.code is Code.SNAPSHOT_TOO_OLD
    now_us[0] = 5_000  # what a merge drops by now stays told, whatever the clock says next
    store.apply(write_entry(5, _block(5), at_us=future_us + 1))
    flush(store)
    compact(store)
    now_us[0] = 1_000
    with pytest.raises(Rejected) as dropped:
        store.view(from_physical_us(1_000))
    assert dropped.value.code is Code.SNAPSHOT_TOO_OLD


def test_a_key_that_is_too_long_is_an_error_of_its_row(tmp_path: Path) -> None:
    store = new_store(tmp_path / "t", FOREVER)
    for index, count in enumerate((2, 60), start=1):
        rows = [
            {"k": "x" * (9000 if n == 1 else n), "n": n, "v": None, "w": 1, "d": None} for n in range(count)
        ]
        outcome = store.apply(write_entry(index, block_of(rows, RowOp.UPSERT)))
        assert [(e.row, e.code) for e in outcome.row_errors] == [(1, Code.TOO_LARGE)]
    with store.view() as view:
        assert len(rows_of(view.scan())) == 59


def three_files(home: Path, files: Files = FILES) -> TabletStore:
    """A store of three files, one row in each but for the key that all have."""
    store = TabletStore.create(home / "t", SCHEMA, StoreOptions(files=files))
    for index in range(1, 4):
        store.apply(write_entry(index, _block(index, index)))
        flush(store)
    return store


def test_files_that_a_merge_replaces_while_they_are_verified_are_no_damage(tmp_path: Path) -> None:
    """A replica that is well became FAILED: its source of a copy had told it of damage while it merged."""
    store, merged = three_files(tmp_path), list[str]()

    def read(size: int) -> None:
        if not merged:
            assert compact(store)
            merged.extend(store.files)

    store.verify(read)
    assert list(store.files) == merged and len(merged) == 1
    path = tmp_path / "t" / merged[0]
    path.rename(path.with_suffix(".gone"))
    with pytest.raises(Corrupt, match="missing"):
        store.verify()


class MergesMeanwhile(Files):
    """While a checkpoint links its files another thread puts a merge's in their place."""

    def __init__(self) -> None:
        self.install: threading.Thread | None = None

    def link(self, source: Path, target: Path) -> None:
        if self.install is not None and not self.install.is_alive() and self.install.ident is None:
            self.install.start()
            self.install.join(0.3)  # it has to wait for the checkpoint
        super().link(source, target)


def test_a_checkpoint_links_files_of_one_moment(tmp_path: Path) -> None:
    """One that a merge had removed was missing: an error of the disk, and the replica FAILED."""
    files = MergesMeanwhile()
    store = three_files(tmp_path, files)
    job = store.plan_compaction(full=True)
    assert job is not None
    files.install = threading.Thread(target=store.install_compaction, args=(run_job(job),))
    found = store.checkpoint(tmp_path / "copy")
    files.install.join()
    assert (
        len(found.files) == 5 and len(store.files) == 1
    )  # three of rows, the exactly-once state, the manifest
    copy = TabletStore.open(tmp_path / "copy")
    with copy.view() as view:
        assert len(rows_of(view.scan())) == 3
