"""Disk that deleted and overwritten rows took: it comes back once nobody may read them, and no store is merged in vain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stele.model.block import RowOp, encode_block
from stele.model.clock import from_physical_us, utc
from stele.model.errors import Code, Rejected
from stele.model.schema import Schema
from stele.tablet import reclaim
from stele.tablet.colfile import ColumnFile
from stele.tablet.colformat import FileMeta
from stele.tablet.compaction import run_job
from stele.tablet.reclaim import Judgement, due, judge, worth
from stele.tablet.store import StoreOptions, TabletStore
from tests.tablet.twin import START_US, flush, write_entry

SCHEMA = Schema.make([("id", "int64"), ("text", "string", True)], ["id"])
HOUR_US = 3_600_000_000
ROWS = 24_000
MIB = 1 << 20


class Tablet:
    """A store whose time is the test's, and what its node does for it."""

    def __init__(self, home: Path) -> None:
        self.now_us = START_US
        self.options = StoreOptions(wall_us=lambda: self.now_us, steady_us=lambda: self.now_us)
        self.store = TabletStore.create(home, SCHEMA, self.options)
        self.rng = np.random.default_rng(1)
        self.judged = 0

    def write(self, ids: Sequence[int] | np.ndarray, *, delete: bool = False) -> None:
        """Rows of 300 bytes that no disk packs."""
        columns = [pa.array(ids, pa.int64())]
        if not delete:
            columns.append(pa.array([self.rng.bytes(150).hex() for _ in ids]))
        names = [int(c.id) for c in SCHEMA.columns[: len(columns)]]
        batch = pa.RecordBatch.from_arrays(columns, schema=SCHEMA.to_arrow(names))
        block = encode_block(RowOp.DELETE if delete else RowOp.UPSERT, names, batch, 1)
        index = self.store.applied.index + 1
        self.store.apply(write_entry(index, block, at_us=self.now_us, plain=False))
        flush(self.store)

    def rest(self, hours: float = 1.0) -> None:
        """Time passes, and the node looks after the store. How many merges there were is no matter here."""
        self.now_us += int(hours * HOUR_US)
        while True:
            job = self.store.plan_compaction()
            if job is None and self.store.reclaim_due:
                self.judged += 1
                self.store.judge_dead()
            job = job or self.store.plan_reclaim()
            if job is None:
                return
            self.store.install_compaction(run_job(job))

    @property
    def rows(self) -> int:
        with self.store.view() as view:
            return sum(batch.num_rows for batch in view.scan())


@pytest.fixture
def tablet(tmp_path: Path) -> Tablet:
    made = Tablet(tmp_path / "t")
    made.write(np.arange(ROWS))
    made.rest()
    assert made.store.bytes_on_disk > 7 * MIB and made.judged == 0
    return made


@pytest.mark.parametrize("then", ["rests", "trickles"])
def test_the_space_of_deleted_rows_comes_back(tablet: Tablet, then: str) -> None:
    """A file of deletes is small beside the rows it hides, so no merge by sizes took both; and the mark never passed the
    newest write, which these deletes are."""
    tablet.write(np.arange(ROWS), delete=True)
    tablet.rest(0.2)
    assert tablet.store.bytes_on_disk > 7 * MIB  # somebody may read them still
    for _ in range(3):
        if then == "trickles":
            tablet.write([5])
        tablet.rest()
    assert tablet.store.bytes_on_disk < MIB
    assert tablet.rows == (then == "trickles")


@pytest.mark.parametrize("at_once", [True, False], ids=["within the history", "hours apart"])
def test_the_space_of_overwritten_rows_comes_back(tablet: Tablet, at_once: bool) -> None:
    for _ in range(3):
        tablet.write(np.arange(ROWS))
        if not at_once:
            tablet.rest(0.0)
            tablet.now_us += HOUR_US
    tablet.rest(0.0)
    tablet.rest()
    assert tablet.store.bytes_on_disk < 9 * MIB and tablet.rows == ROWS


def test_a_store_that_would_free_little_is_left_alone(tablet: Tablet) -> None:
    """New rows are looked at once they could have killed a good share, and then not again until there are as many more."""
    tablet.write(np.arange(3_000), delete=True)
    tablet.rest()
    assert (tablet.judged, len(tablet.store.files)) == (0, 2)
    tablet.write(np.arange(ROWS, 2 * ROWS))
    for _ in range(5):
        tablet.rest()
    assert (tablet.judged, len(tablet.store.files)) == (1, 3)


def test_a_store_at_rest_ends_its_history_and_serves_the_present_for_ever(tablet: Tablet) -> None:
    """Snapshots since the newest write all show the same rows: no time makes one of them too old."""
    before = tablet.now_us
    tablet.now_us += 1_000_000
    tablet.write(np.arange(10), delete=True)
    written = tablet.now_us
    for minutes, readable in ((14, True), (16, False), (10_000, False)):
        tablet.now_us = written + minutes * 60_000_000
        for snapshot_us in (written, written + 1, tablet.now_us):
            tablet.store.view(from_physical_us(snapshot_us)).close()
        if readable:
            tablet.store.view(from_physical_us(before)).close()
        else:
            with pytest.raises(Rejected) as caught:
                tablet.store.view(from_physical_us(before))
            assert caught.value.code is Code.SNAPSHOT_TOO_OLD
            mark = tablet.store.history_mark
            assert caught.value.args[0] == (
                f"snapshot {from_physical_us(before)} is {utc(before)}, below the history mark {mark}, which is "
                f"{utc(written)}; old versions of rows are kept for 15 min; read at a newer snapshot"
            )
    assert tablet.store.history_mark == from_physical_us(written)


@pytest.mark.parametrize("years", [10, -10])
def test_a_wrong_wall_clock_ends_no_history(tmp_path: Path, years: int) -> None:
    """Of what has passed since the newest write only a clock that nobody sets may tell."""
    wall_us = START_US + years * 365 * 24 * HOUR_US
    options = StoreOptions(wall_us=lambda: wall_us, steady_us=lambda: 7)
    tablet = Tablet(tmp_path / "t")
    tablet.store.close()
    tablet.store = TabletStore.open(tmp_path / "t", options)
    tablet.write([1])
    first = tablet.now_us
    tablet.now_us += 1_000_000
    tablet.write([1])
    tablet.store.view(from_physical_us(first)).close()


def test_a_restart_makes_history_no_shorter(tablet: Tablet, tmp_path: Path) -> None:
    """How long it had rested is not known any more: it counts from anew, and what was dropped stays so."""
    before = tablet.now_us
    tablet.now_us += 1_000_000
    tablet.write([1])
    tablet.now_us += HOUR_US
    tablet.store.close()
    tablet.store = TabletStore.open(tmp_path / "t", tablet.options)
    tablet.store.view(from_physical_us(before)).close()
    tablet.now_us += HOUR_US
    with pytest.raises(Rejected, match="below the history mark"):
        tablet.store.view(from_physical_us(before))


def test_what_is_judged_is_what_a_merge_frees(tablet: Tablet) -> None:
    """Rows gone in one stretch, all over, and twice: the share told is near the bytes that a merge of all gives back."""
    for ids in (np.arange(0, ROWS, 3), np.arange(ROWS // 2, ROWS // 2 + 4_000)):
        tablet.write(ids)
        tablet.now_us += HOUR_US
    tablet.write(np.arange(ROWS // 4), delete=True)
    tablet.now_us += HOUR_US
    store, size = tablet.store, tablet.store.bytes_on_disk
    found = judge(store._contents.state.files, store.history_mark)
    store._merges.judged = replace(found, share=1.0)
    job = store.plan_reclaim()
    assert job is not None
    store.install_compaction(run_job(job))
    assert abs(found.share - (1 - store.bytes_on_disk / size)) < 0.02


def test_of_many_row_groups_some_are_looked_at(tablet: Tablet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stele.tablet.colwriter.GROUP_ROWS", 100)
    tablet.write(np.arange(ROWS))
    tablet.now_us += HOUR_US
    looked: list[int] = []
    keys = ColumnFile.keys

    def counted(file: ColumnFile, group: int) -> pa.BinaryArray:
        looked.append(group)
        return keys(file, group)

    monkeypatch.setattr(ColumnFile, "keys", counted)
    found = judge(tablet.store._contents.state.files, tablet.store.history_mark)
    assert len(looked) <= 2 * reclaim._RANGES and 0.45 < found.share < 0.55
    tablet.write(np.arange(0, ROWS, 4))  # what these hide may still be read: they are looked at again
    found = judge(tablet.store._contents.state.files, tablet.store.history_mark)
    assert len(found.names) == 2 and 0.4 < found.share < 0.48


def _file(name: str, size: int, *, rows: int = 100, deletes: int = 0, newest: int = 5) -> FileMeta:
    return FileMeta(name, size, 0, rows, deletes, True, 1, newest)


def test_when_a_store_is_looked_at_and_when_merged() -> None:
    base, gone = _file("base", 8 * MIB), _file("gone", MIB, rows=60, deletes=60)
    assert due([gone, base], 5, Judgement())
    assert due([replace(gone, rows=20, deletes=20), base], 5, Judgement())  # they go themselves, too
    assert not due([gone, base], 4, Judgement())  # somebody may still read what is deleted
    assert not due([replace(gone, size=1), replace(base, size=MIB)], 5, Judgement())
    assert not due([base], 5, Judgement())
    assert not due([gone, base], 5, Judgement(frozenset(["gone", "base"]), 0.2))
    assert not due([gone, base], 5, Judgement(frozenset(["gone", "base"]), 0.5))  # known, if there is room
    few = _file("few", 1, rows=5)
    assert not due([few, base], 5, Judgement(frozenset(["base"]), 0.1))
    assert due([few, base], 5, Judgement(frozenset(["base"]), 0.24))
    half = Judgement(frozenset(["gone", "base"]), 0.5)
    assert worth([few, gone, base], half, None)
    assert not worth([few, base], half, None)  # one of them was merged meanwhile
    assert not worth([gone, base], replace(half, share=0.2), None)
    assert worth([gone, base], half, 7 * MIB) and not worth([gone, base], half, 6 * MIB)


def test_a_look_that_finds_no_file_wholly_history_merges_nothing(tablet: Tablet) -> None:
    """The mark may fall between the question whether to look and the look. Such a judgement was worth a merge of all
    again and again, since nothing asks for another one."""
    seen = Judgement(frozenset(), 0.9)
    assert not worth([_file("a", 8 * MIB)], seen, None)
