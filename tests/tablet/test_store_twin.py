"""Random blocks, flushes, merges, restarts: the store against its dumb twin, at every timestamp there was."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stele.model import keys
from stele.model.block import RowOp
from stele.model.entry import Entry
from stele.model.errors import Code, Rejected
from stele.model.ids import HybridTime
from stele.model.predicate import Predicate, ScanSpec
from stele.tablet.compaction import CompactionJob, CompactionResult, run_job
from stele.tablet.machine import FlushJob, WouldBlock
from stele.tablet.store import StoreOptions, TabletStore
from stele.tablet.view import View
from tests.tablet.twin import (
    SCHEMA,
    START_US,
    Row,
    Twin,
    all_rows,
    block_of,
    codes,
    compact,
    flush,
    new_store,
    rows_in,
    rows_of,
    write_entry,
)

TEXT = st.sampled_from(["", "\x00", "a", "a\x00", "a\x00b", "a\x01", "ab", "b", "ü", "x" * 130, "x" * 131])
KEYS = st.tuples(TEXT, st.one_of(st.integers(-2, 3), st.sampled_from([-(2**31), 2**31 - 1])))
VALUES = st.one_of(st.none(), st.sampled_from(["x", "y", ""]))
PARTS = (("v", "w", "d"), ("v",), ("w",), ("v", "w", "d"), ())


@st.composite
def blocks(draw: Any) -> tuple[list[Row], RowOp | list[RowOp]]:
    """A block: one op or one per row; whole rows, or for updates and deletes some columns."""
    big = draw(st.integers(0, 3)) == 0
    many = draw(st.lists(KEYS, min_size=33 if big else 1, max_size=60 if big else 6))
    one = draw(st.sampled_from([*RowOp, None]))
    ops = one or draw(st.lists(st.sampled_from(list(RowOp)), min_size=len(many), max_size=len(many)))
    names = draw(st.sampled_from(PARTS)) if draw(st.booleans()) else PARTS[0]
    seed = draw(st.integers(0, 1000))
    rows = []
    for at, (k, n) in enumerate(many):
        whole = {"v": None if (seed + at) % 3 == 0 else f"v{seed}.{at}", "w": seed * at, "d": seed / (at + 1)}
        rows.append({"k": k, "n": n, **{name: whole[name] for name in names}})
    return rows, ops


class StoreMachine(RuleBasedStateMachine):
    """Every rule keeps the store and the twin equal."""

    @initialize(history_us=st.sampled_from([0, 0, 3, 1 << 50]))
    def begin(self, history_us: int) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="stele-twin-"))
        self.steady_us = 0
        self.options = StoreOptions(history_us=history_us, steady_us=lambda: self.steady_us)
        self.store = new_store(self.home / "t", self.options)
        self.twin = Twin()
        self.job: FlushJob | None = None
        self.merge: CompactionJob | None = None
        self.merged: CompactionResult | None = None
        self.views: list[tuple[View, int]] = []
        self.snapshots: list[int] = []

    def teardown(self) -> None:
        self.close_views()
        shutil.rmtree(self.home, ignore_errors=True)

    @rule(block=blocks())
    def write(self, block: tuple[list[Row], Any]) -> None:
        entry, errors = self.twin.write(*block)
        outcome = self.store.apply(entry)
        assert codes(outcome) == errors
        self.snapshots.append(entry.timestamp)

    @rule(us=st.integers(1, 4))
    def rest(self, us: int) -> None:
        """Time passes in which nothing is written."""
        self.steady_us += us

    @rule()
    def flush_whole(self) -> None:
        self.flush_end()
        flush(self.store)
        assert self.store.flushed == self.store.applied

    @rule()
    def flush_begin(self) -> None:
        """Begin, and let other rules run before the end."""
        if self.job is None:
            self.job = self.store.begin_flush()

    @rule()
    def flush_written(self) -> None:
        """Readers may see the file before the owner has heard of it."""
        if self.job is not None:
            self.job.write()

    @rule()
    def flush_end(self) -> None:
        if self.job is not None:
            self.job.write()
            self.store.finish_flush(self.job)
            self.job = None

    @rule(full=st.booleans())
    def merge_begin(self, full: bool) -> None:
        """Begin, and let other rules run before the end."""
        if self.merge is None:
            self.merge = self.store.plan_compaction(full=full)

    @rule()
    def merge_run(self) -> None:
        if self.merge is not None and self.merged is None:
            self.merged = run_job(self.merge)

    @rule(fails=st.integers(0, 4))
    def merge_end(self, fails: int) -> None:
        if self.merge is not None and not fails:
            self.store.abandon_compaction(self.merge)
        elif self.merge is not None:
            self.store.install_compaction(self.merged or run_job(self.merge))
        self.merge = self.merged = None

    @rule()
    def restart(self) -> None:
        """Nothing in memory outlives it; the log has everything after `flushed`."""
        self.job = self.merge = self.merged = None
        self.store.close()
        self.store = TabletStore.open(self.home / "t", self.options)
        self.twin.replay(self.store)

    def view(self, snapshot: int) -> View | None:
        """None where history at that time may be gone."""
        try:
            return self.store.view(HybridTime(snapshot))
        except Rejected as exc:
            assert exc.code is Code.SNAPSHOT_TOO_OLD and snapshot < self.store.history_mark
            return None

    @rule(data=st.data(), kept=st.booleans())
    def scan_the_past(self, data: Any, kept: bool) -> None:
        if not self.snapshots:
            return
        snapshot = data.draw(st.sampled_from(self.snapshots)) - data.draw(st.integers(0, 1))
        view = self.view(snapshot)
        if view is None:
            return
        assert rows_in(view) == self.twin.at(snapshot)
        if kept:
            self.views.append((view, snapshot))
        else:
            view.close()

    @rule()
    def scan_again(self) -> None:
        """What was open before flushes, merges and restarts shows what it showed then."""
        for view, snapshot in self.views:
            assert rows_in(view) == self.twin.at(snapshot)

    @rule()
    def close_views(self) -> None:
        for view, _ in self.views:
            view.close()
        self.views = []

    @rule(low=KEYS, high=KEYS, limit=st.one_of(st.none(), st.integers(0, 5)), batch_rows=st.integers(1, 9))
    def scan_a_range(
        self, low: tuple[str, int], high: tuple[str, int], limit: int | None, batch_rows: int
    ) -> None:
        now = self.store.last_timestamp
        lower, upper = (keys.encode_tuple(key, (pa.string(), pa.int32())) for key in (low, high))
        spec = ScanSpec(
            (3, 0),
            (Predicate(2, "is_not_null"), Predicate(1, ">=", 0)),
            lower,
            upper,
            limit,
            True,
            batch_rows=batch_rows,
        )
        wanted = [
            {"w": r["w"], "k": r["k"]}
            for r in self.twin.at(now)
            if (low[0].encode(), low[1]) <= (r["k"].encode(), r["n"]) < (high[0].encode(), high[1])
            and r["v"] is not None
            and r["n"] >= 0
        ]
        with self.store.view() as view:
            batches = list(view.scan(spec))
        assert rows_of(batches) == wanted[:limit]
        assert all(0 < b.num_rows <= batch_rows for b in batches)

    @rule(few=st.lists(KEYS, max_size=5), times=st.sampled_from([1, 1, 2, 40]), data=st.data())
    def get(self, few: list[tuple[str, int]], times: int, data: Any) -> None:
        """Few keys are looked for one by one, many together."""
        wanted = few * times
        snapshot = data.draw(st.sampled_from(self.snapshots)) if self.snapshots else self.store.last_timestamp
        encoded = pa.array([keys.encode_tuple(k, (pa.string(), pa.int32())) for k in wanted], pa.binary())
        view = self.view(snapshot)
        if view is None:
            return
        brief: tuple[pa.RecordBatch, list[int]] | None = None
        with view:
            with suppress(WouldBlock):
                brief = view.get(encoded, (1, 4), brief=True)
            found, places = view.get(encoded, (1, 4))
            assert brief is None or (brief[0].equals(found) and brief[1] == places)
        there = {(r["k"], r["n"]): {"n": r["n"], "d": r["d"]} for r in self.twin.at(snapshot)}
        assert sorted(places) == [at for at, key in enumerate(wanted) if key in there]
        assert found.to_pylist() == [there[wanted[at]] for at in places]
        assert [wanted[at] for at in places] == sorted(wanted[at] for at in places)

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "store"):
            assert all_rows(self.store) == self.twin.at(self.store.last_timestamp)


StoreMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStoreMachine = StoreMachine.TestCase


def test_plain_blocks_that_wait_undecoded_are_what_decoded_ones_are(tmp_path: Path) -> None:
    """The same entries marked plain and not; some are read, updated, flushed or restarted while others wait."""
    stores = [new_store(tmp_path / "plain"), new_store(tmp_path / "each")]
    rng = np.random.default_rng(11)
    for index in range(1, 400):
        n = int(rng.integers(0, 60))
        if index % 29 == 0:  # a checked write must find what waits
            block = block_of([{"k": "a", "n": n, "w": -index}], RowOp.UPDATE)
        else:
            rows = [
                {"k": "a", "n": n + at, "v": f"{index}", "w": index, "d": float(at)}
                for at in range(1 + n % 9)
            ]
            block = block_of(rows, RowOp.UPSERT)
        plain, each = write_entry(index, block), write_entry(index, block, plain=False)
        assert (plain.payload == each.payload) == (index % 29 == 0)
        assert stores[0].apply(plain) == stores[1].apply(each)
        if index % 113 == 0:
            assert [flush(store) for store in stores] == [True, True]
        if index % 37 == 0:
            assert all_rows(stores[0]) == all_rows(stores[1])
    assert stores[0].rows_estimate == stores[1].rows_estimate
    assert all_rows(stores[0], plain.timestamp - (100 << 12)) == all_rows(
        stores[1], plain.timestamp - (100 << 12)
    )
    assert stores[0].exactly_once_checksum() == stores[1].exactly_once_checksum()


def test_ten_times_more_data_than_the_memory_budget(tmp_path: Path) -> None:
    """Memory stays within its budget (and one block), history is dropped, and all rows are right at the end."""
    options = StoreOptions(flush_bytes=256 << 10, history_us=1, steady_us=lambda: 0)
    store = TabletStore.create(tmp_path / "t", SCHEMA, options)
    rng = np.random.default_rng(5)
    newest: dict[int, tuple[int, int] | None] = {}
    log: list[Entry] = []
    index = written = 0
    while written < 10 * options.flush_bytes:
        index += 1
        numbers = rng.integers(0, 4000, 512).tolist()
        rows = [
            {"k": f"key-{n % 97}", "n": n, "v": "v" * 40, "w": index, "d": float(at)}
            for at, n in enumerate(numbers)
        ]
        op = RowOp.DELETE_IGNORE if index % 7 == 0 else RowOp.UPSERT
        log.append(write_entry(index, block_of(rows, op)))
        written += len(log[-1].payload)
        assert not store.apply(log[-1]).row_errors
        newest.update({n: None if op is RowOp.DELETE_IGNORE else (index, at) for at, n in enumerate(numbers)})
        if store.should_flush():
            flush(store)
            compact(store, full=False)
        assert store.memory_bytes < 2 * options.flush_bytes
        if index % 25 == 0:
            store.close()
            store = TabletStore.open(tmp_path / "t", options)
            for entry in log[store.flushed.index :]:
                store.apply(entry)
    last = block_of([{"k": "last", "n": -1, "v": None, "w": 0, "d": 0.0}], RowOp.UPSERT)
    store.apply(write_entry(index + 1, last, at_us=START_US + 1_000_000))
    newest[-1] = (0, 0)
    flush(store)
    compact(store)
    with store.view() as view:
        found = {row["n"]: (row["w"], int(row["d"])) for row in rows_of(view.scan())}
    assert found == {n: at for n, at in newest.items() if at is not None}
    assert len(store.files) == 1
    assert store.rows_estimate == len(found)  # history and deletes below the mark are gone
