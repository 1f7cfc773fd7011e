"""Updates of few columns of rows that have many: in memory, frozen, in files, with defaults; and what they keep in memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from stele.model.block import RowOp
from stele.model.schema import Schema
from stele.tablet.store import StoreOptions, TabletStore
from tests.tablet import twin
from tests.tablet.test_memory import put
from tests.tablet.twin import block_of, new_store

WIDE = Schema.make(
    [
        ("k", "int64"),
        *((f"d{n}", "double", True) for n in range(60)),
        *((f"n{n}", "int32", False, "7") for n in range(60)),
        *((f"s{n}", "string", True) for n in range(60)),
    ],
    ["k"],
)
DOUBLES = Schema.make([("k", "int64"), *((f"c{n}", "double", True) for n in range(200))], ["k"])
BLANK = {c.name: 7 if c.name.startswith("n") else None for c in WIDE.columns}


def rows_of(store: TabletStore) -> dict[int, dict[str, Any]]:
    with store.view() as view:
        return {row["k"]: row for row in twin.rows_of(view.scan())}


@pytest.mark.parametrize("seed", range(6))
def test_updates_change_what_they_name_and_nothing_else(tmp_path: Path, seed: int) -> None:
    """Also blocks of several rows, with few columns and with more than a few, wherever the row is."""
    chosen = random.Random(seed)
    store = new_store(tmp_path / "t", StoreOptions(flush_bytes=1 << 40), WIDE)
    expected: dict[int, dict[str, Any]] = {}
    job = None
    for step in range(120):
        names = chosen.sample([c.name for c in WIDE.columns[1:]], chosen.choice((1, 1, 2, 12, 40)))
        values = {name: {"d": step * 0.5, "n": step, "s": f"v{step}"}[name[0]] for name in names}
        new = not expected or chosen.random() < 0.3
        keys = (
            chosen.sample(range(40), 3)
            if new
            else chosen.sample(sorted(expected), min(len(expected), chosen.randint(1, 3)))
        )
        op = (
            chosen.choice((RowOp.UPSERT, RowOp.INSERT_IGNORE))
            if new
            else chosen.choice((RowOp.UPDATE, RowOp.UPDATE_IGNORE))
        )
        put(store, block_of([{"k": key, **values} for key in keys], op, WIDE))
        for key in keys:
            if op is RowOp.UPSERT or (op is RowOp.INSERT_IGNORE and key not in expected):
                expected[key] = {**BLANK, "k": key, **values}
            elif op is not RowOp.INSERT_IGNORE:
                expected[key] |= values
        if chosen.random() < 0.1:
            if job is None:
                job = store.begin_flush()  # rows that are frozen stay so for some steps
            else:
                job.write()
                store.finish_flush(job)
                job = None
        if chosen.random() < 0.05 and expected:
            gone = chosen.choice(sorted(expected))
            put(store, block_of([{"k": gone}], RowOp.DELETE, WIDE))
            del expected[gone]
    assert rows_of(store) == expected


def test_a_row_that_is_updated_keeps_no_frozen_table_in_memory(tmp_path: Path) -> None:
    store = new_store(tmp_path / "t", StoreOptions(flush_bytes=1 << 40), DOUBLES)
    put(
        store,
        block_of(
            [{"k": n} | {f"c{m}": 0.5 for m in range(200)} for n in range(1_000)], RowOp.UPSERT, DOUBLES
        ),
    )
    assert store.begin_flush() is not None
    put(store, block_of([{"k": 5, "c7": 1.5}], RowOp.UPDATE, DOUBLES))
    [chunk] = store._contents.state.active.chunks
    assert chunk.batch.get_total_buffer_size() < 50_000 < 1_000 * 200 * 8
    put(store, block_of([{"k": 5, "c8": 2.5}], RowOp.UPDATE, DOUBLES))
    row = rows_of(store)[5]
    assert (row["c7"], row["c8"], row["c9"]) == (1.5, 2.5, 0.5)


def test_rows_of_a_fixed_length_are_counted_as_they_are(tmp_path: Path) -> None:
    store = new_store(tmp_path / "t", StoreOptions(), DOUBLES)
    rows = [{"k": n} | {f"c{m}": 0.5 for m in range(200)} for n in range(64)]
    put(store, block_of(rows, RowOp.UPSERT, DOUBLES))
    put(store, block_of(rows[:5], RowOp.INSERT_IGNORE, DOUBLES))
    for chunk in store._contents.state.active.chunks:
        assert chunk.batch.nbytes <= chunk.nbytes <= 1.02 * chunk.batch.nbytes + 200
