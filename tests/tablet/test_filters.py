"""Predicates: "in" and "=" mean the same of one value, and whatever is asked for twice is there twice."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from stele.model.block import RowOp
from stele.model.predicate import Predicate, ScanSpec
from stele.tablet.store import TabletStore
from tests.tablet.twin import SCHEMA, Row, block_of, flush, new_store, rows_of, write_entry

VALUES = [0.0, -0.0, 1.5, -1.5, math.nan, math.inf, -math.inf, None]
IDS = {c.name: int(c.id) for c in SCHEMA.columns}


def filled(directory: Path) -> TabletStore:
    store = new_store(directory)
    rows: list[Row] = [{"k": "k", "n": n, "v": "v", "w": 100 - n, "d": d} for n, d in enumerate(VALUES)]
    store.apply(write_entry(1, block_of(rows, RowOp.UPSERT)))
    return store


def found(store: TabletStore, op: str, value: Any) -> set[int]:
    with store.view() as view:
        return {r["n"] for r in rows_of(view.scan(ScanSpec(predicates=(Predicate(IDS["d"], op, value),))))}


@pytest.mark.parametrize("flushed", [False, True])
def test_in_is_equality_with_one_of_them(tmp_path: Path, flushed: bool) -> None:
    """Arrow looks values up by their bits: 0.0 did not find -0.0, and NaN found NaN."""
    store = filled(tmp_path / "t")
    assert not flushed or flush(store)
    numbers = [v for v in VALUES if v is not None]
    for count in range(3):
        for wanted in itertools.combinations(numbers, count):
            assert found(store, "in", wanted) == set().union(*(found(store, "=", v) for v in wanted))
    assert found(store, "in", (0.0,)) == {0, 1} and found(store, "in", (math.nan,)) == set()


@pytest.mark.parametrize("columns", [("n", "n", "w"), ("w", "n", "n"), ("w", "w")])
def test_a_column_asked_for_twice_is_still_compared(tmp_path: Path, columns: tuple[str, ...]) -> None:
    """By its name it was not found, and the last column was compared in its place."""
    store = filled(tmp_path / "t")
    spec = ScanSpec(tuple(IDS[name] for name in columns), (Predicate(IDS["n"], "<", 3),))
    with store.view() as view:
        batches = list(view.scan(spec))
    assert sum(b.num_rows for b in batches) == 3
    assert all(b.schema.names == list(columns) for b in batches)
