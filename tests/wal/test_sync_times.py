"""How long syncs take, as /metrics tells it: each that reached the disk counts once, in the bucket of its time."""

from __future__ import annotations

import time

import pytest

from tests.harness.histograms import Durations, here
from tests.wal.simfs import SimFiles
from tests.wal.support import LARGE, SMALL, Appends, fill, open_still, still, stream_of


def syncs() -> Durations:
    return here("stele_wal_sync_seconds")


def test_a_sync_in_the_background_counts_until_the_loop_hears_of_its_end() -> None:
    _, _, side = still()
    append = Appends(side.log)
    for seconds, under, over in ((0.0007, 0.0005, 0.001), (0.07, 0.05, 0.1), (3.0, 2.5, 5.0)):
        before = syncs()
        append()
        side.loop.turn()
        assert syncs().count == before.count
        side.now += seconds
        side.end()
        took = syncs().since(before)
        assert (took.count, took.over(under), took.over(over)) == (1, 1, 0)
        assert took.sum_s == pytest.approx(seconds)
        side.now += 60  # longer than a slow disk keeps the loop from writing


def test_a_sync_of_the_logs_thread_counts_in_the_bucket_of_its_time() -> None:
    _, log, _ = still()
    append = Appends(log)
    append(LARGE)
    file = log._appender.active.file  # type: ignore[union-attr]
    data_sync = file.data_sync

    def late() -> None:
        begun = time.monotonic()
        while time.monotonic() - begun < 0.06:
            pass
        data_sync()

    file.data_sync = late  # type: ignore[method-assign]
    before = syncs()
    log.turn()
    took = syncs().since(before)
    assert append.done == [1] and (took.count, took.over(0.05)) == (1, 1)


def test_each_batch_counts_one_and_the_end_of_a_segment_counts_its_own() -> None:
    log = open_still(SimFiles(), SMALL)
    stream_of(log)
    log.turn()
    before, segments = syncs(), len(log.shared.segments)
    fill(log, 40)
    closed = len(log.shared.segments) - segments
    assert closed > 1
    assert syncs().since(before).count == 40 + closed
