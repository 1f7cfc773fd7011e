"""Scans that find nothing for long still say that they work: whoever waits gives up those that are silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from stele.model.block import RowOp
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
        rows = [{"k": f"k{index}", "n": i, "v": "x", "w": index, "d": None} for i in range(5)]
        store.apply(write_entry(index, block_of(rows, RowOp.UPSERT)))
        assert flush(store)
    column = next(c for c in store.schema.columns if c.name == "w")
    wanted = ScanSpec((int(column.id),), (Predicate(int(column.id), ">", 5),), limit=limit)
    with store.view() as found:
        batches = [b.num_rows for b in found.scan(wanted)]
        assert sum(batches) == (3 if limit else 5) and batches.count(0) == 2
        assert found.checksum().rows == 30
    store.close()
