"""Masks of live rows are kept as bits, a bounded number of them for all tablets, and make no difference to what is read."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from stele.model.block import RowOp
from stele.tablet import colwriter
from stele.tablet.masks import MaskCache
from stele.tablet.store import TabletStore
from tests.tablet.twin import (
    FOREVER,
    Row,
    Twin,
    block_of,
    flush,
    new_store,
    rows_in,
    write_entry,
)


def _row(n: int, w: int) -> Row:
    return {"k": "k", "n": n, "v": f"v{n}", "w": w, "d": None}


def _overlapping(home: Path, cache: MaskCache, rows: int = 100) -> TabletStore:
    """Two files of the same keys, of which the older one has rows that are wanted, too."""
    store = new_store(home, replace(FOREVER, masks=cache))
    store.apply(write_entry(1, block_of([_row(n, 1) for n in range(rows)], RowOp.UPSERT)))
    flush(store)
    store.apply(write_entry(2, block_of([_row(n, 2) for n in range(0, rows, 2)], RowOp.UPSERT)))
    flush(store)
    return store


def _masks(store: TabletStore) -> object:
    return store._live.of(store._contents.state.files)


def test_a_mask_takes_a_bit_a_row(tmp_path: Path) -> None:
    """It took a byte, and each tablet kept its own for ever."""
    cache = MaskCache(1 << 20)
    store = _overlapping(tmp_path / "t", cache, 4_000)
    with store.view() as view:
        assert sum(batch.num_rows for batch in view.scan()) == 4_000
    assert 4_000 // 8 <= cache.bytes < 4_000 // 4
    newer, older = store._live.of(store._contents.state.files)
    assert newer == [None] and older[0] is not None and older[0].to_pylist() == [False, True] * 2_000
    store.close()
    assert cache.bytes == 0


def test_those_last_asked_for_are_kept_whosever_they_are(tmp_path: Path) -> None:
    """All stores have files of the same names."""
    cache = MaskCache(1 << 20)
    stores = [_overlapping(tmp_path / str(number), cache) for number in range(4)]
    assert len({tuple(store.files) for store in stores}) == 1
    first = _masks(stores[0])
    size = cache.bytes
    cache = MaskCache(3 * size)
    for store in stores:
        store.close()
    stores = [_overlapping(tmp_path / f"again {number}", cache) for number in range(4)]
    first, second, _ = [_masks(store) for store in stores[:3]]
    assert _masks(stores[0]) is first and cache.bytes == 3 * size
    _masks(stores[3])
    assert cache.bytes == 3 * size
    assert _masks(stores[0]) is first
    again = _masks(stores[1])
    assert again is not second and again == second
    stores[0].close()
    assert cache.bytes == 2 * size
    assert _masks(stores[1]) is again


def test_what_is_larger_than_all_may_be_is_not_kept_and_drives_nothing_out(tmp_path: Path) -> None:
    cache = MaskCache(1_000)
    small = _overlapping(tmp_path / "small", cache)
    kept = _masks(small)
    large = _overlapping(tmp_path / "large", cache, 10_000)
    with large.view() as view:
        assert len(rows_in(view)) == 10_000
    assert _masks(small) is kept and 0 < cache.bytes <= 1_000


def test_of_a_tablet_that_is_written_to_only_the_last_are_kept(tmp_path: Path) -> None:
    """Those of before a write, or a merge, are never asked for again, and drove out other tablets'."""
    cache = MaskCache(1 << 20)
    quiet, busy = (_overlapping(tmp_path / name, cache) for name in ("quiet", "busy"))
    kept = _masks(quiet)
    sizes = []
    for number in range(3, 30):
        busy.apply(write_entry(number, block_of([_row(number, number)], RowOp.UPSERT)))
        with busy.view() as view:
            assert len(rows_in(view)) == 100
        sizes.append(cache.bytes)
    assert max(sizes) < 3 * sizes[0] and _masks(quiet) is kept
    flush(busy)
    with busy.view() as view:
        rows_in(view)
    busy.close()
    quiet.close()
    assert cache.bytes == 0


@pytest.mark.parametrize("bytes_max", [0, 500, 1 << 20])
@pytest.mark.parametrize("seed", range(2))
def test_scans_give_the_same_rows_whatever_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, bytes_max: int
) -> None:
    """Files of many small groups, in several clusters, with deletes, and rows in memory."""
    monkeypatch.setattr(colwriter, "GROUP_ROWS", 4)
    rng = random.Random(seed)
    twin, cache = Twin(), MaskCache(bytes_max)
    store = new_store(tmp_path / "t", replace(FOREVER, masks=cache))
    for _ in range(16):
        first = rng.randrange(80)
        chosen = rng.sample(range(first, first + 20), rng.randrange(1, 20))
        op = RowOp.UPSERT if rng.random() < 0.8 else RowOp.DELETE_IGNORE
        store.apply(twin.write([_row(n, len(twin.entries)) for n in chosen], op)[0])
        if rng.random() < 0.4:
            flush(store)
        with store.view() as view:
            assert rows_in(view) == twin.at(store.last_timestamp)
            assert rows_in(view) == twin.at(store.last_timestamp)
        assert cache.bytes <= bytes_max
    store.close()
    assert cache.bytes == 0
