"""Scans of a part of the keys: every pair of bounds, wherever the rows stand."""

from __future__ import annotations

import itertools
from pathlib import Path

import pyarrow as pa
import pytest

from stele.model.block import RowOp
from stele.model.keys import encode_keys
from stele.model.predicate import ScanSpec
from stele.tablet.store import StoreOptions, TabletStore
from tests.tablet.twin import SCHEMA, block_of, flush, new_store, rows_of, write_entry

KEYS = range(6)


def _encoded(n: int) -> bytes:
    key = pa.record_batch({"k": ["k"], "n": pa.array([n], SCHEMA.by_name["n"].arrow)})
    found: bytes = encode_keys(key, SCHEMA)[0].as_py()
    return found


def _put(store: TabletStore, index: int, keys: range) -> None:
    rows = [{"k": "k", "n": n, "v": None, "w": index, "d": None} for n in keys]
    store.apply(write_entry(index, block_of(rows, RowOp.UPSERT)))


LAYERS = {
    "memory": [],
    "file": [KEYS],
    "files beside each other": [KEYS[:3], KEYS[3:]],
    "files that touch": [KEYS[:4], KEYS[3:]],
    "file under two": [KEYS, KEYS[1:3], KEYS[4:]],
}


@pytest.mark.parametrize("where", LAYERS)
def test_a_range_of_keys_has_its_rows_and_no_others(tmp_path: Path, where: str) -> None:
    store = new_store(tmp_path / "t", StoreOptions(history_us=1 << 50))
    for index, keys in enumerate(LAYERS[where], start=1):
        _put(store, index, keys)
        flush(store)
    if where == "memory":
        _put(store, 1, KEYS)
    bounds = [(n, _encoded(n)) for n in KEYS]
    with store.view() as view:
        for (low, lower), (high, upper) in itertools.product([(-1, b""), *bounds], [(99, b""), *bounds]):
            wanted = [n for n in KEYS if low <= n < high]
            for ordered in (True, False):
                spec = ScanSpec(lower_key=lower, upper_key=upper, ordered=ordered)
                assert sorted(row["n"] for row in rows_of(view.scan(spec))) == wanted, (low, high)
            if lower:
                after = ScanSpec(upper_key=upper, resume_after=lower)
                assert [row["n"] for row in rows_of(view.scan(after))] == [n for n in wanted if n > low]
    store.close()
