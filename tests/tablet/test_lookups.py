"""What a write takes of its owner's thread: what is long is looked up elsewhere, and small updates are read at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stele.model import keys
from stele.model.block import RowOp, encode_block
from stele.model.errors import Corrupt, Rejected
from stele.model.ids import HybridTime
from stele.model.schema import Schema
from stele.tablet.locate import StoreRows
from stele.tablet.machine import Lookup, WouldBlock
from stele.tablet.store import TabletStore
from stele.tablet.writing import Located
from tests.tablet.twin import FOREVER, START_US, flush, new_store, rows_of, write_entry

WIDE = Schema.make([("k", "int64"), *((f"c{n}", "int64", True) for n in range(300))], ["k"])
NARROW = Schema.make([("k", "int64"), ("v", "int64", True), ("w", "int64", True)], ["k"])


def _block(schema: Schema, op: RowOp, keys: Any, value: int, columns: int = 0) -> bytes:
    """Rows with these keys and one value in `columns` columns beside it, 0 for all."""
    taken = schema.columns[: 1 + columns] if columns else schema.columns
    ids = [int(c.id) for c in taken]
    values = pa.array(np.full(len(keys), value), pa.int64())
    arrays = [pa.array(keys, pa.int64()), *([values] * (len(taken) - 1))]
    return encode_block(op, ids, pa.RecordBatch.from_arrays(arrays, schema=schema.to_arrow(ids)), 1)


def all_rows(store: TabletStore) -> list[dict[str, Any]]:
    with store.view() as view:
        return rows_of(view.scan())


def _apply(store: TabletStore, index: int, body: bytes) -> bool:
    """Apply a block as a replica does; whether it had to be looked up in a thread."""
    entry = write_entry(index, body, plain=False)
    begun = store.begin(entry)
    if not isinstance(begun, Lookup):
        return False
    assert store.applied.index == index - 1
    assert not isinstance(store.begin(entry, begun.run()), Lookup)
    assert store.applied.index == index
    return True


def test_small_updates_of_wide_rows_read_the_old_rows_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 rows of 300 columns were read and written 32 times over: that held the event loop for 423 ms."""
    store = new_store(tmp_path / "t", FOREVER, WIDE)
    _apply(store, 1, _block(WIDE, RowOp.UPSERT, range(40), 1))
    fetched: list[int] = []
    fetch = StoreRows.fetch

    def counted(self: StoreRows, located: Located) -> pa.RecordBatch:
        fetched.append(len(located.place))
        return fetch(self, located)

    monkeypatch.setattr(StoreRows, "fetch", counted)
    assert not _apply(store, 2, _block(WIDE, RowOp.UPDATE, range(32), 2, columns=1))
    assert fetched == []
    flush(store)
    assert _apply(store, 3, _block(WIDE, RowOp.UPDATE, range(8, 40), 3, columns=1))
    assert fetched[-1:] == [32] and len(fetched) <= 2  # a brief look comes before
    rows = {r["k"]: (r["c0"], r["c1"], r["c299"]) for r in all_rows(store)}
    assert rows == {k: (2 if k < 8 else 3, 1, 1) for k in range(40)}


def test_what_a_file_tells_is_read_in_a_thread_first_and_known_then(tmp_path: Path) -> None:
    store = new_store(tmp_path / "t", FOREVER, NARROW)
    _apply(store, 1, _block(NARROW, RowOp.UPSERT, range(0, 2000, 2), 1))
    flush(store)
    store = TabletStore.open(tmp_path / "t", FOREVER)
    assert _apply(store, 2, _block(NARROW, RowOp.INSERT_IGNORE, [1000], 9))  # bloom filter and keys are read
    assert not _apply(store, 3, _block(NARROW, RowOp.INSERT_IGNORE, [1002, 1004], 9))
    assert not _apply(store, 4, _block(NARROW, RowOp.INSERT, [1001], 9))
    assert _apply(store, 5, _block(NARROW, RowOp.UPDATE, [1006], 9, columns=1))  # columns are read
    assert _apply(store, 6, _block(NARROW, RowOp.INSERT_IGNORE, range(0, 2000, 10), 9))  # many rows
    changed = {r["k"]: r["v"] for r in all_rows(store) if r["v"] != 1}
    assert changed == {1001: 9, 1006: 9}


def test_rows_of_a_load_are_indexed_in_a_thread(tmp_path: Path) -> None:
    """The first insert behind a load of two million rows held the loop for a second."""
    store = new_store(tmp_path / "t", FOREVER, NARROW)
    _apply(store, 1, _block(NARROW, RowOp.UPSERT, range(10_000), 1))
    assert _apply(store, 2, _block(NARROW, RowOp.INSERT_IGNORE, [5_000], 9))
    assert not _apply(store, 3, _block(NARROW, RowOp.INSERT_IGNORE, [5_001], 9))
    assert {r["v"] for r in all_rows(store)} == {1}


def test_upserts_and_their_like_are_never_looked_up(tmp_path: Path) -> None:
    store = new_store(tmp_path / "t", FOREVER, NARROW)
    body = _block(NARROW, RowOp.UPSERT, range(10_000), 1)
    assert not isinstance(store.begin(write_entry(1, body, plain=store.check_block(body))), Lookup)


def test_damage_that_a_lookup_finds_is_told_where_the_entry_is_applied(tmp_path: Path) -> None:
    store = new_store(tmp_path / "t", FOREVER, NARROW)
    _apply(store, 1, _block(NARROW, RowOp.UPSERT, range(2000), 1))
    flush(store)
    [path] = (tmp_path / "t").glob("rows-*")
    data = bytearray(path.read_bytes())
    data[100:200] = bytes(100)
    path.write_bytes(data)
    store = TabletStore.open(tmp_path / "t", FOREVER)
    entry = write_entry(2, _block(NARROW, RowOp.INSERT_IGNORE, range(100), 9), plain=False)
    begun = store.begin(entry)
    assert isinstance(begun, Lookup)
    found = begun.run()
    with pytest.raises(Corrupt, match="damaged"):
        store.begin(entry, found)


def test_a_key_is_read_from_a_file_as_it_was_at_the_snapshot(tmp_path: Path) -> None:
    """A file has all versions of a key; also one before the first version, and one behind a delete."""
    store = new_store(tmp_path / "t", FOREVER, NARROW)
    key = pa.RecordBatch.from_arrays([pa.array([7], pa.int64())], names=["k"])
    gone = encode_block(RowOp.DELETE, [int(NARROW.columns[0].id)], key, 1)
    upserts = {n: _block(NARROW, RowOp.UPSERT, [7], n * 10) for n in (1, 2, 4)}
    for index, body in sorted({**upserts, 3: gone}.items()):
        _apply(store, index, body)
    flush(store)
    found = []
    for index in range(5):
        with store.view(HybridTime((START_US + index) << 12)) as view:
            rows, _ = view.get(keys.encode_keys(key, NARROW))
            found.append([row["v"] for row in rows.to_pylist()])
    assert found == [[], [10], [20], [], [40]]


def _brief(store: TabletStore, wanted: list[int], snapshot: int | None = None) -> list[int] | None:
    """The values of `v` by a brief look, None if it would take long."""
    key = pa.RecordBatch.from_arrays([pa.array(wanted, pa.int64())], names=["k"])
    with store.view(None if snapshot is None else HybridTime(snapshot)) as view:
        try:
            rows, _ = view.get(keys.encode_keys(key, NARROW), brief=True)
        except WouldBlock:
            return None
        assert view.get(keys.encode_keys(key, NARROW))[0].equals(rows)
    return [row["v"] for row in rows.to_pylist()]


def test_a_brief_look_reads_no_file_for_the_first_time_and_indexes_few_rows(tmp_path: Path) -> None:
    store = new_store(tmp_path / "t", FOREVER, NARROW)
    _apply(store, 1, _block(NARROW, RowOp.UPSERT, range(10_000), 1))
    assert _brief(store, [7]) is None, "ten thousand rows are not indexed"
    with store.view() as view:
        view.get(keys.encode_keys(pa.record_batch({"k": pa.array([7])}), NARROW))
    assert _brief(store, [7, 9_999, 10_000]) == [1, 1]
    _apply(store, 2, _block(NARROW, RowOp.UPSERT, [7], 2))
    assert _brief(store, [7]) == [2]
    assert _brief(store, [7], (START_US + 1) << 12) is None, "an older version may be far behind the newest"
    flush(store)
    store = TabletStore.open(tmp_path / "t", FOREVER)
    assert _brief(store, [7]) is None, "nothing of the file was read"
    with store.view() as view:
        view.get(keys.encode_keys(pa.record_batch({"k": pa.array([7])}), NARROW), [0])
    assert _brief(store, [7]) is None, "the other columns were not read"
    with store.view() as view:
        view.get(keys.encode_keys(pa.record_batch({"k": pa.array([7])}), NARROW))
    assert _brief(store, [7, 8]) == [2, 1]
    assert _brief(store, [7], (START_US + 1) << 12) is None, "the times were not read"
    with store.view(HybridTime((START_US + 1) << 12)) as view:
        view.get(keys.encode_keys(pa.record_batch({"k": pa.array([7])}), NARROW))
    assert _brief(store, [7], (START_US + 1) << 12) is None, "an older version may be far behind the newest"


@pytest.mark.parametrize("flushed", [False, True])
def test_a_brief_look_copies_no_long_values(tmp_path: Path, flushed: bool) -> None:
    schema = Schema.make([("k", "int64"), ("t", "string")], ["k"])
    key = keys.encode_keys(pa.record_batch({"k": pa.array([1])}), schema)
    for size in (2_000, 70_000):
        store = new_store(tmp_path / f"{size}", FOREVER, schema)
        rows = pa.record_batch({"k": pa.array([1]), "t": ["x" * size]}, schema=schema.to_arrow())
        _apply(store, 1, encode_block(RowOp.UPSERT, [int(c.id) for c in schema.columns], rows, 1))
        if flushed:
            flush(store)
        with store.view() as view:
            assert view.get(key)[0].num_rows == 1
            if flushed:  # a file keeps its columns apart
                assert view.get(key, [0], brief=True)[0].to_pylist() == [{"k": 1}]
            if size > 2_000:
                with pytest.raises(WouldBlock):
                    view.get(key, brief=True)
                with pytest.raises(Rejected, match="at most 60000 are allowed"):
                    view.get(key, bytes_max=60_000)
            else:
                assert view.get(key, brief=True)[0].num_rows == 1
