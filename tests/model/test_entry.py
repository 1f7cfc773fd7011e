"""What entries count against budgets of memory."""

from __future__ import annotations

import tracemalloc

import pytest

from stele.model.entry import Entry, EntryKind


@pytest.mark.parametrize("payload_bytes", [0, 1, 100])
def test_an_entry_counts_at_least_what_it_takes(payload_bytes: int) -> None:
    """Of small entries four times as many were held as a budget allowed: they counted 48 bytes and their payload."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        entries = [
            Entry(7, index, EntryKind.WRITE, index << 32, bytes(payload_bytes))
            for index in range(1 << 20, (1 << 20) + 10_000)
        ]
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    counted = sum(entry.size_bytes for entry in entries)
    assert 0.98 * taken <= counted <= 1.5 * taken
