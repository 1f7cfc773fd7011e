"""How much of a write is done in one turn of a node's loop. Counted in rows, keys and values, not in time: all of a node's
tablets wait for a turn to end, on any machine."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stele.consensus import applier
from stele.consensus.applier import Applier
from stele.model.block import RowOp, encode_block
from stele.model.entry import Entry, EntryKind
from stele.model.schema import Schema
from stele.tablet import reclaim, writing
from stele.tablet.colfile import ColumnFile
from stele.tablet.hash_index import HashIndex
from stele.tablet.locate import StoreRows
from stele.tablet.memtable import MemTable
from stele.tablet.patches import Patches
from stele.tablet.store import TabletStore
from tests.consensus.cluster import WAIT_S
from tests.tablet.twin import FOREVER, flush, new_store, write_entry

WIDE = Schema.make([("k", "int64"), *((f"c{n}", "int64", True) for n in range(300))], ["k"])
NARROW = Schema.make([("k", "int64"), ("v", "int64", True), ("w", "int64", True)], ["k"])

KEYS, INDEXED, VALUES, READ, PLANNED, JOINED, CHANGED = (
    "keys looked up",
    "rows indexed",
    "values",
    "bytes read",
    "rows planned",
    "patched rows made whole",
    "values that patches change",
)
BOUNDS = {KEYS: 400, INDEXED: 4_096, VALUES: 256, READ: 0, PLANNED: 32, JOINED: 64, CHANGED: 1_024}
"""What is about 5 ms of a loop, at most. Numbers of their own: whoever raises a bound of the code meets them."""


class Turns:
    """What the loop's thread has done, turn by turn; a turn is one callback. What other threads do takes no turn."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.elsewhere: Counter[str] = Counter()
        self.turns = 0

    def did(self, what: str, amount: int) -> None:
        if threading.get_ident() != self._thread:
            self.elsewhere[what] += amount
            return
        self.now[what] += amount
        self.most[what] = max(self.most[what], self.now[what])

    def next(self) -> None:
        self.turns += 1
        self.now.clear()

    def forget(self) -> None:
        self.most.clear()
        self.elsewhere.clear()

    def within_bounds(self) -> bool:
        assert all(self.most[what] <= most for what, most in BOUNDS.items()), self.most
        return True


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Turns]:
    seen = Turns()

    def counted(owner: Any, name: str, what: str, amount: Callable[..., int]) -> None:
        real = getattr(owner, name)

        def run(*args: Any, **named: Any) -> Any:
            if what != VALUES:
                seen.did(what, amount(*args))
                return real(*args, **named)
            found = real(*args, **named)  # a brief look that is given up copies nothing
            seen.did(what, amount(*args))
            return found

        monkeypatch.setattr(owner, name, run)

    counted(ColumnFile, "find_one", KEYS, lambda *_: 1)
    counted(ColumnFile, "find", KEYS, lambda _, keys, hashes: len(keys))
    counted(MemTable, "newest", KEYS, lambda _, keys, hashes: len(keys))
    counted(HashIndex, "add", INDEXED, lambda _, hashes: len(hashes))
    counted(StoreRows, "fetch", VALUES, lambda rows, found: len(found.place) * len(rows.schema.columns))
    counted(Patches, "_patched", JOINED, lambda _, patches, start, chunks: sum(len(p.keys) for p in patches))
    counted(
        Patches,
        "_patched",
        CHANGED,
        lambda _, patches, start, chunks: sum(p.batch.num_rows * len(p.columns) for p in patches),
    )
    counted(writing, "complete", PLANNED, lambda block, schema: block.rows)
    counted(ColumnFile, "_compare", READ, lambda file, part, sum_of: file._parts[part][1])
    counted(ColumnFile, "__init__", READ, lambda file, path, expected=None: path.stat().st_size)
    counted(reclaim, "judge", READ, lambda files, mark: sum(file.size for file in files))
    handle_run = asyncio.Handle._run

    def run(handle: asyncio.Handle) -> None:
        seen.next()
        handle_run(handle)

    monkeypatch.setattr(asyncio.Handle, "_run", run)
    yield seen


class Applied:
    """A store, and the applier that brings entries to it in the test's loop."""

    def __init__(self, store: TabletStore) -> None:
        self.store = store
        self.failed: list[Exception] = []
        self.refused: list[int] = []
        self._work = Applier(
            slice_ms=0.0, in_thread=asyncio.to_thread, applied=self._told, failed=self.failed.append
        )
        self._work.attach(store)

    def _told(self, entry: Entry, outcome: Any) -> None:
        self.refused.append(len(outcome.row_errors))

    async def write(self, *bodies: bytes, plain: bool = False) -> None:
        first = self.store.applied.index + 1
        self._work.add(tuple(write_entry(first + n, body, plain=plain) for n, body in enumerate(bodies)))
        async with asyncio.timeout(WAIT_S):
            await self._work.wait(first + len(bodies) - 1)
        assert not self.failed


def _block(schema: Schema, op: RowOp, keys: Any, value: int, columns: int = 0) -> bytes:
    taken = schema.columns[: 1 + columns] if columns else schema.columns
    ids = [int(c.id) for c in taken]
    values = pa.array(np.full(len(keys), value), pa.int64())
    arrays = [pa.array(keys, pa.int64()), *([values] * (len(taken) - 1))]
    return encode_block(op, ids, pa.RecordBatch.from_arrays(arrays, schema=schema.to_arrow(ids)), 1)


async def test_updates_of_300_columns_are_completed_elsewhere(tmp_path: Path, turns: Turns) -> None:
    """32 rows held the loop for 423 ms: all tablets of the node stopped."""
    applied = Applied(new_store(tmp_path / "t", FOREVER, WIDE))
    await applied.write(*(_block(WIDE, RowOp.UPSERT, range(n, n + 32), 1) for n in range(0, 96, 32)))
    turns.forget()
    job = applied.store.begin_flush()
    assert job is not None
    await applied.write(_block(WIDE, RowOp.UPDATE, range(32), 1, columns=1))  # of rows that are frozen
    assert turns.within_bounds() and turns.elsewhere[VALUES] == 32 * 301
    await asyncio.to_thread(job.write)
    applied.store.finish_flush(job)
    turns.forget()
    for flushed in (False, True):
        for n in range(4):
            if flushed:
                await asyncio.to_thread(flush, applied.store)
            await applied.write(_block(WIDE, RowOp.UPDATE, range(64), n, columns=1))
            if flushed:
                await asyncio.to_thread(flush, applied.store)
            await applied.write(_block(WIDE, RowOp.UPDATE, range(32), n, columns=1))
            if flushed:
                await asyncio.to_thread(flush, applied.store)
            await applied.write(_block(WIDE, RowOp.UPDATE, [n], 2, columns=2))
    assert turns.within_bounds()
    assert turns.elsewhere[VALUES] >= (8 * 64 + 4 * 32 + 4) * 300
    assert not any(applied.refused)


async def test_updates_of_rows_in_memory_copy_none_of_them_in_a_turn(tmp_path: Path, turns: Turns) -> None:
    """They wait, and are made whole together: each by itself read and wrote 300 columns."""
    applied = Applied(new_store(tmp_path / "t", FOREVER, WIDE))
    await applied.write(*(_block(WIDE, RowOp.UPSERT, range(n, n + 32), 1) for n in range(0, 96, 32)))
    await applied.write(_block(WIDE, RowOp.UPDATE, [0], 1, columns=1))
    turns.forget()
    for n in range(300):
        await applied.write(_block(WIDE, RowOp.UPDATE, [n % 96], n, columns=1))
    assert turns.within_bounds()
    assert not turns.most[VALUES] and not turns.elsewhere[VALUES]
    assert not turns.most[JOINED] and 200 <= turns.elsewhere[JOINED] <= 300
    assert not any(applied.refused)


@pytest.mark.parametrize(("rows", "columns"), [(32, 1), (1, 150), (32, 150)])
async def test_a_reader_finds_few_patched_rows_and_values(
    tmp_path: Path, turns: Turns, rows: int, columns: int
) -> None:
    """32 rows joined 63 that waited already. 63 updates of half of the columns took a reader 20 ms."""
    applied = Applied(new_store(tmp_path / "t", FOREVER, WIDE))
    await applied.write(*(_block(WIDE, RowOp.UPSERT, range(n, n + 32), 1) for n in range(0, 96, 32)))
    turns.forget()
    for n in range(63):
        await applied.write(_block(WIDE, RowOp.UPDATE, [n], n, columns=1))
    for n in range(60 // rows):
        await applied.write(_block(WIDE, RowOp.UPDATE, range(n, n + rows), n, columns=columns))
    with applied.store.view():
        assert turns.within_bounds()
    assert turns.elsewhere[JOINED] >= 63
    assert not any(applied.refused)


async def test_lookups_behind_large_files_and_loads_take_short_turns(tmp_path: Path, turns: Turns) -> None:
    """`insert_ignore` and `update` on 20 million rows stalled the loop for seconds."""
    applied = Applied(new_store(tmp_path / "t", FOREVER, NARROW))
    for file in range(6):
        keys = range(file, 60_000, 6)
        await applied.write(_block(NARROW, RowOp.UPSERT, keys, file), plain=True)
        flush(applied.store)
    applied = Applied(TabletStore.open(tmp_path / "t", FOREVER))  # nothing of the files was read yet
    await applied.write(_block(NARROW, RowOp.UPSERT, range(60_000, 80_000), 7), plain=True)
    turns.forget()
    rng = np.random.default_rng(22)
    for op, columns in (
        (RowOp.INSERT_IGNORE, 0),
        (RowOp.INSERT, 0),
        (RowOp.UPDATE_IGNORE, 1),
        (RowOp.UPDATE, 1),
        (RowOp.DELETE_IGNORE, 1),
    ):
        for rows in (1, 8, 32, 33, 4_000):
            keys = rng.choice(90_000, rows, replace=False)
            await applied.write(_block(NARROW, op, keys, 8, columns=columns))
    assert turns.within_bounds()
    assert turns.elsewhere[KEYS] > 5 * 4_000 and turns.elsewhere[INDEXED] >= 20_000
    assert turns.elsewhere[READ] > 100_000


async def test_small_lookups_need_no_thread(tmp_path: Path, turns: Turns) -> None:
    """The bounds are no excuse: what takes a moment is done at once, with no two changes of threads for a row."""
    applied = Applied(new_store(tmp_path / "t", FOREVER, NARROW))
    await applied.write(_block(NARROW, RowOp.UPSERT, range(32), 1))
    turns.forget()
    for n in range(50):
        await applied.write(_block(NARROW, RowOp.UPDATE, [n % 32], n, columns=1))
        await applied.write(_block(NARROW, RowOp.DELETE, [n % 32], n, columns=1))
        await applied.write(_block(NARROW, RowOp.INSERT, [n % 32], n, columns=2))
    assert turns.within_bounds() and not turns.elsewhere
    assert turns.most[JOINED] > 0


async def test_a_merge_is_planned_in_a_turn_that_reads_nothing(tmp_path: Path, turns: Turns) -> None:
    store = new_store(tmp_path / "t", FOREVER, NARROW)
    applied = Applied(store)
    for file in range(8):
        await applied.write(_block(NARROW, RowOp.UPSERT, range(5_000), file), plain=True)
        await asyncio.to_thread(flush, store)
    turns.forget()
    await asyncio.sleep(0)
    due = store.reclaim_due
    job = store.plan_compaction(full=True)
    assert job is not None and len(job.inputs) == 8
    assert due is not None and turns.within_bounds() and not turns.elsewhere


async def test_a_slice_of_many_entries_ends_when_its_time_is_over(
    tmp_path: Path, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many entries were committed at once. Time is a counter here: each entry takes a millisecond."""
    done = 0

    def told(entry: Entry, outcome: Any) -> None:
        nonlocal done
        done += 1
        turns.did("entries", 1)

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return done / 1_000

    monkeypatch.setattr(applier, "time", Clock)
    store = new_store(tmp_path / "t", FOREVER, NARROW)
    work = Applier(slice_ms=4.0, in_thread=asyncio.to_thread, applied=told, failed=lambda exc: None)
    work.attach(store)
    work.add(tuple(Entry(1, index, EntryKind.NOOP, 0, b"") for index in range(1, 1_001)))
    async with asyncio.timeout(WAIT_S):
        await work.wait(1_000)
    assert done == 1_000 and turns.most["entries"] <= 5
