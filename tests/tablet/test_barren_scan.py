"""Scans that find nothing for long still say that they work: whoever waits gives up those that are silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from stele.model.block import RowOp
from stele.model.ids import HybridTime
from stele.model.predicate import Predicate, ScanSpec
from stele.tablet import view
from tests.tablet.twin import block_of, flush, new_store, write_entry


@pytest.mark.parametrize("limit", [None, 3])
def test_empty_batches_come_where_no_row_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    monkeypatch.setattr(view, "_SIGN_OF_LIFE", 2)
    store = new_store(tmp_path / "t")
    for index in range(1, 7):  # six files, side by side in key order
        rows = [{"k": f"k{index}", "n": i, "v": "x", "w": int(index == 6), "d": None} for i in range(5)]
        store.apply(write_entry(index, block_of(rows, RowOp.UPSERT)))
        assert flush(store)
    column = next(c for c in store.schema.columns if c.name == "w")
    wanted = ScanSpec((int(column.id),), (Predicate(int(column.id), "!=", 0),), limit=limit)
    with store.view() as found:
        batches = [b.num_rows for b in found.scan(wanted)]
        assert sum(batches) == (3 if limit else 5) and batches.count(0) == 2
        assert found.checksum().rows == 30
    store.close()


@pytest.mark.parametrize("ordered", [False, True], ids=["free", "ordered"])
@pytest.mark.parametrize("what", ["deleted", "later"])
def test_empty_batches_come_where_no_row_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, ordered: bool
) -> None:
    """Rows that are deleted, or newer than the snapshot, were passed over in silence."""
    monkeypatch.setattr(view, "_SIGN_OF_LIFE", 2)
    store = new_store(tmp_path / "t")
    rows = [[{"k": f"k{n}", "n": i, "v": "x", "w": 1, "d": None} for i in range(5)] for n in range(24)]
    for index, of_file in enumerate(rows, 1):  # as many files, side by side in key order
        store.apply(write_entry(index, block_of(of_file, RowOp.UPSERT)))
        assert flush(store)
    snapshot = None
    if what == "later":
        snapshot = HybridTime(write_entry(1, b"").timestamp - 1)
    else:
        for index, of_file in enumerate(rows, 25):
            keys = [{"k": row["k"], "n": row["n"]} for row in of_file]
            store.apply(write_entry(index, block_of(keys, RowOp.DELETE)))
            assert flush(store)
    with store.view(snapshot) as found:
        batches = [b.num_rows for b in found.scan(ScanSpec(ordered=ordered))]
    assert len(batches) >= 12 and not any(batches)
    store.close()
