"""Searching sorted keys, whatever their lengths; choosing among versions, however many bytes they are."""

from __future__ import annotations

import bisect
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stele.tablet import sorted_runs
from stele.tablet.sorted_runs import Kept, Run, SortedKeys, lower_bound, visible


@given(st.lists(st.binary(max_size=9)), st.lists(st.binary(max_size=9)), st.booleans())
def test_keys_are_found_where_bisect_finds_them(
    haystack: list[bytes], needles: list[bytes], long: bool
) -> None:
    if long:
        haystack, needles = [k + bytes(200) for k in haystack], [*needles, *(k + bytes(200) for k in needles)]
    haystack.sort()
    found = lower_bound(pa.array(haystack, pa.binary()), pa.array(needles, pa.binary()))
    assert found.tolist() == [bisect.bisect_left(haystack, needle) for needle in needles]


@given(
    st.sets(st.one_of(st.binary(max_size=3), st.binary(min_size=2, max_size=2))),
    st.lists(st.binary(max_size=3)),
    st.integers(0, 3),
)
def test_a_key_is_found_only_where_it_is(stored: set[bytes], wanted: list[bytes], length: int) -> None:
    """Cells of numpy ignore zeros at their ends, so a key of another length is not compared with them."""
    keys = sorted(key for key in stored if not length or len(key) == length)
    found = SortedKeys(pa.array(keys, pa.binary()))
    for each in ([*wanted, *keys], [key for key in wanted if len(key) == length], keys[1::2]):
        places = [keys.index(key) if key in keys else -1 for key in each]
        assert found.find_all(pa.array(each, pa.binary())).tolist() == places
        assert [found.find(key) for key in each] == places


@pytest.mark.parametrize("other", [b"a", b"a\0\0"])
def test_a_key_that_only_zeros_part_from_another_is_no_other_key(other: bytes) -> None:
    found = SortedKeys(pa.array([b"a\0", b"b\0"], pa.binary()))
    assert found.find(other) == -1 and found.find_all(pa.array([other], pa.binary())).tolist() == [-1]


def test_one_long_key_among_many_costs_its_own_bytes() -> None:
    """A group of a column file has 32,768 keys; with one of 8,000 bytes among them an update took 500 MB."""
    haystack = [*(b"key %06d" % n for n in range(10_000)), b"x" * 8_000]
    tracemalloc.start()
    found = lower_bound(pa.array(haystack, pa.binary()), pa.array(haystack[::100], pa.binary()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.tolist() == list(range(10_001))[::100]
    assert peak < 8 << 20


TEXT_BYTES = 16 << 20


def _versions(newest: int, count: int) -> Run:
    """Versions of one key with a text of 16 MiB in each; zeros that nobody reads take no memory."""
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(TEXT_BYTES)
    texts = np.zeros(count * TEXT_BYTES, np.uint8)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(texts)]
    batch = pa.record_batch([pa.Array.from_buffers(pa.string(), count, buffers)], names=["v"])
    times = np.arange(newest, newest - count, -1).astype(np.uint64)
    return Run(batch, pa.array([b"k"] * count, pa.binary()), times, None)


def test_versions_of_more_than_an_array_holds_are_read_and_merged() -> None:
    """They were joined before one was chosen: no ordered scan and no merge succeeded any more, on any replica."""
    both = [_versions(140, 70), _versions(70, 70)]
    assert visible(both, 1000).num_rows == 1
    dropped = Kept(both, 1000, bottom=True)
    assert [dropped.run(rows).times.tolist() for layer in dropped.layers for rows in layer] == [[140]]
    kept = Kept(both, 0, bottom=True)
    assert [[len(rows) for rows in layer] for layer in kept.layers] == [[32], [32], [32], [32], [12]]
    assert kept.run(kept.layers[-1][0][:1]).times.tolist() == [12]


def test_what_a_merge_keeps_is_cut_by_keys_and_then_by_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_runs, "RUN_BYTES_MAX", 30)
    keys = [b"a", b"b", b"b", b"b", b"c", b"d"]
    batch = pa.record_batch(
        [pa.array(["x" * 9] * len(keys))], names=["v"]
    )  # 10 bytes each, as they are counted
    run = Run(batch, pa.array(keys, pa.binary()), np.array([9, 9, 8, 7, 9, 9], np.uint64), None)
    kept = Kept([run.slice(0, 3), run.slice(3, 3)], 0, bottom=True)
    assert [[rows.tolist() for rows in layer] for layer in kept.layers] == [[[0], [1, 2, 3], [4, 5]]]
    monkeypatch.setattr(sorted_runs, "RUN_BYTES_MAX", 20)
    kept = Kept([run.slice(0, 3), run.slice(3, 3)], 0, bottom=True)
    assert [[rows.tolist() for rows in layer] for layer in kept.layers] == [[[0], [1, 2], [4, 5]], [[3]]]


def test_what_a_flush_writes_is_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows as they were applied; of one key there may be more in a run than of several."""
    monkeypatch.setattr(sorted_runs, "RUN_BYTES_MAX", 30)
    keys = [b"b", b"d", b"b", b"a", b"b", b"c"]
    batch = pa.record_batch([pa.array([f"{n:9}" for n in range(len(keys))])], names=["v"])
    run = Run(batch, pa.array(keys, pa.binary()), np.arange(6, dtype=np.uint64), None)
    kept = Kept([run.slice(0, 2), run.slice(2, 4)], 0, bottom=True, as_applied=True, run_bytes=20)
    assert [[rows.tolist() for rows in layer] for layer in kept.layers] == [[[3], [4, 2, 0], [5, 1]]]
    assert kept.run(kept.layers[0][1]).batch.to_pydict() == {"v": [f"{n:9}" for n in (4, 2, 0)]}
