"""Searching sorted keys, whatever their lengths."""

from __future__ import annotations

import bisect
import tracemalloc

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from stele.tablet.runs import lower_bound


@given(st.lists(st.binary(max_size=9)), st.lists(st.binary(max_size=9)), st.booleans())
def test_keys_are_found_where_bisect_finds_them(
    haystack: list[bytes], needles: list[bytes], long: bool
) -> None:
    if long:
        haystack, needles = [k + bytes(200) for k in haystack], [*needles, *(k + bytes(200) for k in needles)]
    haystack.sort()
    found = lower_bound(pa.array(haystack, pa.binary()), pa.array(needles, pa.binary()))
    assert found.tolist() == [bisect.bisect_left(haystack, needle) for needle in needles]


def test_one_long_key_among_many_costs_its_own_bytes() -> None:
    """A group of a column file has 32,768 keys; with one of 8,000 bytes among them an update took 500 MB."""
    haystack = [*(b"key %06d" % n for n in range(10_000)), b"x" * 8_000]
    tracemalloc.start()
    found = lower_bound(pa.array(haystack, pa.binary()), pa.array(haystack[::100], pa.binary()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.tolist() == list(range(10_001))[::100]
    assert peak < 8 << 20
