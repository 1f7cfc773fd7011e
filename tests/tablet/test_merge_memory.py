"""A merge takes as much memory for a large tablet as for a small one, and makes the same file as if it had plenty."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stele.model.block import RowOp, encode_block
from stele.model.hashing import hash_binary
from stele.model.schema import Schema
from stele.tablet import bloom, spool
from stele.tablet.colfile import ColumnFile
from stele.tablet.colformat import PART_BLOOM
from stele.tablet.compaction import run_job
from stele.tablet.compactor import Compactor
from stele.tablet.spool import HashSpool
from stele.tablet.store import TabletStore
from tests.tablet.twin import FOREVER, flush, new_store, write_entry

NUMBERED = Schema.make([("k", "int64"), ("v", "int64")], ["k"])


def _dumb_filter(hashes: spool.U64) -> bytes:
    """All at once, as it was: eight bytes a key for its hash, as much again to join them, ten for bits."""
    blocks = bloom.block_count(len(hashes))
    bits = np.zeros((blocks, 8, 32), bool)
    of_block = ((hashes >> np.uint64(32)) * np.uint64(blocks) >> np.uint64(32)).astype(np.int64)
    low = hashes.astype(np.uint32)
    for word, salt in enumerate(bloom._SALTS):
        bits[of_block, word, (low * salt) >> np.uint32(27)] = True
    return np.packbits(bits.reshape(-1), bitorder="little").tobytes()


def _hashes(count: int) -> spool.U64:
    return np.random.default_rng(count).integers(0, 1 << 64, count, np.uint64)


@pytest.mark.parametrize("buffer_rows", [1, 100, 1 << 20])
@pytest.mark.parametrize("range_rows", [1, 300, 1 << 20])
@pytest.mark.parametrize("count", [0, 1, 25, 26, 5_000])
def test_a_filter_made_in_ranges_is_the_one_made_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer_rows: int, range_rows: int, count: int
) -> None:
    monkeypatch.setattr(spool, "BUFFER_ROWS", buffer_rows)
    monkeypatch.setattr(spool, "_RANGE_ROWS_MAX", range_rows)
    hashes = _hashes(count)
    with HashSpool(tmp_path) as held:
        for start in range(0, count, 70):
            held.add(hashes[start : start + 70])
        assert held.rows == count
        assert b"".join(bloom.build(held.rows, held.ranges())) == _dumb_filter(hashes)
        assert not list(tmp_path.iterdir())  # a crash leaves nothing


def test_hashes_that_are_not_spread_evenly_are_all_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "BUFFER_ROWS", 64)
    hashes = np.concatenate((np.zeros(100, np.uint64), np.full(100, (1 << 64) - 1, np.uint64), _hashes(7)))
    with HashSpool(tmp_path) as held:
        held.add(hashes)
        assert b"".join(bloom.build(held.rows, held.ranges())) == _dumb_filter(hashes)


def test_hashes_of_many_keys_take_a_bounded_amount(tmp_path: Path) -> None:
    """100 million rows took 2.8 GB: the worker was killed, and began again every 30 s."""
    peaks = []
    for count in (4 << 20, 8 << 20):
        tracemalloc.start()
        with HashSpool(tmp_path) as held:
            for part in range(count >> 18):
                held.add(np.random.default_rng(part).integers(0, 1 << 64, 1 << 18, np.uint64))
            size = sum(len(piece) for piece in bloom.build(held.rows, held.ranges()))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert size == bloom.block_count(count) * 32
    assert peaks[1] < peaks[0] + (1 << 20)
    assert peaks[1] < 64 << 20


def _store(home: Path, rows: int, files: int = 2) -> TabletStore:
    """Files of every so many keys, in no order."""
    store = new_store(home, FOREVER, NUMBERED)
    for number in range(files):
        keys = np.random.default_rng(number).permutation(rows // files) * files + number
        batch = pa.RecordBatch.from_arrays([pa.array(keys), pa.array(keys * 3)], schema=NUMBERED.to_arrow())
        store.apply(write_entry(number + 1, encode_block(RowOp.UPSERT, [0, 1], batch, 1), plain=True))
        flush(store)
    return store


def _merge_peak(home: Path, rows: int) -> int:
    """Bytes that Python and numpy hold at most in a merge of so many rows."""
    job = _store(home, rows).plan_compaction(full=True)
    assert job is not None
    gc.collect()
    tracemalloc.start()
    result = run_job(job)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(meta.rows for meta in result.files) == rows
    return peak


def test_a_merge_of_more_rows_takes_no_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "BUFFER_ROWS", 1 << 16)
    monkeypatch.setattr(spool, "_RANGE_ROWS_MAX", 1 << 16)
    small, large = _merge_peak(tmp_path / "small", 400_000), _merge_peak(tmp_path / "large", 1_000_000)
    assert large < small + (2 << 20)  # 28 bytes a row were 16 MiB


async def test_the_worker_makes_the_file_that_a_merge_with_plenty_makes(tmp_path: Path) -> None:
    rows = 2_400_000  # more than two buffers of hashes
    store = _store(tmp_path / "t", rows, files=3)
    job = store.plan_compaction(full=True)
    assert job is not None
    compactor = Compactor()
    try:
        result = await compactor.run(job)
    finally:
        await compactor.close()
    [meta] = result.files
    file = ColumnFile(store.directory / meta.name, meta)
    file.verify()
    hashes = np.concatenate([hash_binary(file.keys(group)) for group in range(len(file.groups))])
    filter_of_file = file._part(PART_BLOOM, 0)
    assert filter_of_file is not None and filter_of_file.tobytes() == _dumb_filter(hashes)
    values = pa.concat_arrays([file.column(group, NUMBERED.columns[1]) for group in range(len(file.groups))])
    assert np.array_equal(values.to_numpy(), np.arange(rows) * 3)
    store.install_compaction(result)
    assert sorted(p.name for p in store.directory.iterdir() if p.name.startswith("rows-")) == [meta.name]
