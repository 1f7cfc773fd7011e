"""What is put in order for scans of rows in memory is shared by them: by those that begin together, and by those that
begin one after the other while rows are written."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from stele.model import keys
from stele.model.block import RowOp
from stele.model.errors import Code, Retryable
from stele.model.ids import HybridTime
from stele.model.predicate import ScanSpec
from stele.tablet import memtable, order
from stele.tablet.store import TabletStore
from tests.tablet.twin import SCHEMA, Row, block_of, flush, new_store, rows_in, rows_of, write_entry

ORDERED = ScanSpec(ordered=True)
READERS = 8
_COUNT = 4_096


def _rows(first: int, count: int, w: int = 1) -> list[Row]:
    return [{"k": "k", "n": n, "v": f"v{n}", "w": w, "d": None} for n in range(first, first + count)]


def _filled(path: Path) -> TabletStore:
    store = new_store(path)
    mixed = random.Random(1).sample(_rows(0, _COUNT), _COUNT)
    store.apply(write_entry(1, block_of(mixed, RowOp.UPSERT)))
    return store


def _copies(batches: Sequence[pa.RecordBatch]) -> int:
    """In how many places rows of these batches lie."""
    return len({batch.column("n").buffers()[1].address for batch in batches})


def test_readers_that_start_together_share_one_sort(tmp_path: Path) -> None:
    store = _filled(tmp_path / "t")
    together = threading.Barrier(READERS)
    given: list[pa.RecordBatch] = []

    def read() -> None:
        with store.view() as view:
            together.wait()
            given.extend(view.scan(ORDERED))

    readers = [threading.Thread(target=read) for _ in range(READERS)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert sum(batch.num_rows for batch in given) == READERS * _COUNT
    assert _copies(given) == 1


@pytest.mark.parametrize("count", [1, 60], ids=["puts", "blocks"])
def test_scans_between_writes_share_what_was_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(order, "GROUP_ROWS", 64)
    store = _filled(tmp_path / "t")
    scans: list[Iterator[pa.RecordBatch]] = []
    first: list[pa.RecordBatch] = []
    for index in range(2, 18):
        scans.append(store.view().scan(ORDERED))
        first.append(next(scans[-1]))
        store.apply(write_entry(index, block_of(_rows(_COUNT - count, count, index), RowOp.UPSERT)))
    assert _copies(first) == 1
    for index, (batch, scan) in enumerate(zip(first, scans), 1):
        found = rows_of([batch, *scan])
        assert [row["n"] for row in found] == list(range(_COUNT))
        assert {row["w"] for row in found[-count:]} == {index}


def test_rows_are_put_in_order_a_bounded_number_of_times(tmp_path: Path) -> None:
    store = _filled(tmp_path / "t")
    seen: dict[tuple[int, int], int] = {}
    for index in range(2, 130):
        (memory,) = store.view()._memory
        parts = memory.sorted_rows()
        assert sum(part.run.rows for part in parts) == memory.rows == parts[0].end
        assert all(
            older.run.rows > 2 * newer.end - 2 * newer.start for newer, older in itertools.pairwise(parts)
        )
        seen.update({(part.start, part.end): part.run.rows for part in parts})
        store.apply(write_entry(index, block_of(_rows(32 * index, 64, index), RowOp.UPSERT)))
    assert sum(seen.values()) < 8 * (_COUNT + 64 * 128)


@pytest.mark.parametrize("seed", range(2))
def test_a_view_gives_its_rows_whichever_view_was_read_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """What was put in order for a later view serves an earlier one, too."""
    monkeypatch.setattr(order, "GROUP_ROWS", 5)
    chance = random.Random(seed)
    store = new_store(tmp_path / "t")
    there: dict[int, Row] = {}
    views = []
    for index in range(1, 40):
        numbers = chance.sample(range(200), chance.choice([1, 7, 40]))
        if index % 4 == 0:
            store.apply(
                write_entry(index, block_of([{"k": "k", "n": n} for n in numbers], RowOp.DELETE_IGNORE))
            )
            there = {n: row for n, row in there.items() if n not in numbers}
        else:
            rows = [row for n in numbers for row in _rows(n, 1, index)]
            store.apply(write_entry(index, block_of(rows, RowOp.UPSERT)))
            there = {**there, **{row["n"]: row for row in rows}}
        ahead = HybridTime(2 * store.view().snapshot)  # of what is applied, as no caller should ask
        views.append((store.view(chance.choice([None, ahead])), there))
    lower, upper = (keys.encode_tuple(("k", n), (pa.string(), pa.int32())) for n in (50, 150))
    for view, expected in chance.sample(views, len(views)):
        in_order = [expected[n] for n in sorted(expected)]
        assert rows_in(view) == in_order
        part = rows_of(view.scan(ScanSpec(lower_key=lower, upper_key=upper)))
        assert part == [row for row in in_order if 50 <= row["n"] < 150]


def test_a_slow_scan_holds_of_flushed_memory_what_was_put_in_order_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It held the rows as they were applied, too, with their keys and indexes: twice as much for blocks, more for puts."""
    monkeypatch.setattr(order, "GROUP_ROWS", 64)
    store = _filled(tmp_path / "t")
    view = store.view()
    table = weakref.ref(store._contents.state.active)
    scan = view.scan(ORDERED, last=True)
    first = next(scan)
    flush(store)
    gc.collect()
    assert table() is None
    assert [row["n"] for row in rows_of([first, *scan])] == list(range(_COUNT))


def test_rows_that_are_too_many_to_be_put_in_order_hold_up_nobody() -> None:
    """They share one value here, which Arrow would have to write down once for each."""
    batch = pa.RecordBatch.from_pylist([dict(_rows(0, 1)[0], v="x" * (8 << 20))], SCHEMA.to_arrow())
    table = memtable.MemTable(SCHEMA)
    table.append(batch, 1, None, 0, None)
    before = table.view()
    (part,) = before.sorted_rows()
    for time in range(2, 300):
        table.append(batch, time, None, 0, None)
    for _ in range(2):
        with pytest.raises(Retryable) as caught:
            table.view().sorted_rows()
        assert caught.value.code is Code.NOT_READY
        assert before.sorted_rows() == [part]
