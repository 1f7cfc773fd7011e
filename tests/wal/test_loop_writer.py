"""Small batches written by the event loop's thread: who writes when, in which order callbacks come, what a failure does.

On simulated files, loop and background sync: nothing is concurrent but where a log's own thread is the subject.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stele.model.errors import Corrupt
from stele.model.ids import ReplicaId
from stele.wal import Log, SyncMode, loop_writer
from stele.wal.append_queue import Writer
from tests.wal.simfs import SimFiles
from tests.wal.support import (
    DIRECTORY,
    LARGE,
    NODE,
    ROOMY,
    SMALL,
    Appends,
    LoopSide,
    key,
    loaded,
    open_still,
    run_all,
    settle,
    still,
    stream_of,
    until,
)

# --- one batch


def test_a_small_batch_is_written_at_the_end_of_the_turn_and_told_after_its_sync() -> None:
    files, log, side = still()
    append = Appends(log)
    append()
    append()
    assert log.shared.append_queue.writer is Writer.NOBODY and not side.sync.begun
    writes, syncs = len(files.write_calls), files.syncs
    side.loop.turn()
    assert len(files.write_calls) == writes + 1
    assert log.shared.append_queue.writer is Writer.KERNEL
    assert files.syncs == syncs and append.done == []
    side.sync.tell()  # in vain
    assert log.shared.append_queue.writer is Writer.KERNEL and append.done == []
    side.end()
    assert append.done == [1, 2]
    assert log.shared.append_queue.writer is Writer.NOBODY
    assert files.syncs == syncs + 1
    assert len(files.write_calls) == writes + 2  # and the marker
    assert log.synced_place > 0 and log.stats.loop_batches == 1
    assert [e.index for e in log.stream(key()).read_entries(1, 1 << 20)] == [1, 2]


def test_what_comes_during_a_sync_is_one_batch_with_what_the_callbacks_append() -> None:
    _, log, side = still()
    append = Appends(log)
    append(then=lambda: [append(), None][1])  # type: ignore[func-returns-value]
    side.loop.turn()
    append()
    markers = log.stats.markers
    side.end()
    assert append.done == [1]
    assert log.stats.markers == markers  # the queue is not empty
    side.loop.turn()
    assert side.sync.begun == 2
    side.end()
    assert append.done == [1, 2, 3]
    assert log.stats.markers == markers + 1


def test_hard_state_is_written_by_the_loop_too() -> None:
    files, log, side = still()
    done: list[int] = []
    log.stream(key()).append_vote(3, ReplicaId(2), lambda: done.append(1))
    side.run()
    assert done == [1] and log.stats.loop_batches == 1
    assert loaded(open_still(files.crash(random.Random(1))).stream(key())).hard_state.voted_for == 2


# --- what goes to the thread


@pytest.mark.parametrize("why", ["large", "many", "checkpoint", "no room", "groups"])
def test_what_is_not_small_and_plain_goes_to_the_thread(why: str) -> None:
    options = replace(ROOMY, group_bytes_max=64) if why == "groups" else ROOMY
    _, log, side = still(options)
    append = Appends(log)
    if why == "large":
        append(LARGE)
    elif why == "many":
        for _ in range(9):
            append(b"x" * (loop_writer.LOOP_BYTES_MAX // 8))
    elif why == "no room":
        append(b"x" * (ROOMY.segment_bytes - (8 << 10)))
        log.turn()
        append(b"x" * (8 << 10))
    elif why == "groups":
        append(b"x" * (ROOMY.segment_bytes - (16 << 10)))
        log.turn()
        for _ in range(
            100
        ):  # 8 KiB of records would fit in one group, not with a header for each two of them
            append(b"x" * 24)
    else:
        append()
        log.shared.append_queue.for_thread = True
    side.loop.run()
    assert log.shared.append_queue.writer is Writer.THREAD
    assert side.sync.begun == 0
    log.turn()
    assert append.done == list(range(1, len(append.done) + 1))
    assert log.shared.append_queue.writer is Writer.NOBODY and not log.shared.append_queue.for_thread


def test_a_batch_by_the_loop_never_closes_a_segment_nor_leaves_its_prepared_part() -> None:
    files, log, side = still(SMALL)
    append = Appends(log)
    for _ in range(200):
        append(b"x" * 300)
        side.loop.turn()
        if log.shared.append_queue.writer is Writer.THREAD:
            log.turn()
        side.run()
        active = log._appender.active  # type: ignore[union-attr]
        assert active.room >= 0
    assert append.done == list(range(1, 201))
    assert len(log.shared.segments) > 3 and log.stats.overruns == 0
    assert log.stats.loop_batches > 150
    log.close()
    assert len(loaded(open_still(files).stream(key())).entries) == 200


@pytest.mark.parametrize("mode", [SyncMode.INTERVAL, SyncMode.NEVER])
def test_other_sync_modes_need_no_background_sync(mode: SyncMode) -> None:
    _, log, side = still(replace(ROOMY, sync=mode))
    assert side.sync.closed
    append = Appends(log)
    append()
    side.loop.run()
    assert log.shared.append_queue.writer is Writer.THREAD
    log.turn()
    assert append.done == [1]


# --- failures


@pytest.mark.parametrize("what", ["write", "sync", "marker"])
def test_a_failure_in_the_loop_is_final(what: str) -> None:
    files = SimFiles()
    told: list[Exception] = []
    log = Log.open(DIRECTORY, ROOMY, NODE, run_all, files=files, on_failure=told.append, threads=False)
    stream_of(log)
    log.turn()
    side = LoopSide(log)
    append = Appends(log)
    if what == "write":
        files.write_error = True
    append()
    side.loop.turn()
    if what != "write":
        append()
    if what == "sync":
        files.sync_error = True
    elif what == "marker":
        side.end()  # the second waits: no marker
        side.loop.turn()
        files.write_error = True
    if side.sync.under_way:
        side.end()
    files.sync_error = files.write_error = False
    assert isinstance(log.failed, Corrupt) and told == [log.failed]
    assert append.done == ([1, 2] if what == "marker" else [])
    with pytest.raises(Corrupt, match="IO_ERROR"):
        append()
    writes = len(files.write_calls)
    side.run()
    side.sync.tell()
    log.turn()
    log.close()
    assert len(files.write_calls) == writes and side.sync.closed
    assert append.done == ([1, 2] if what == "marker" else [])


def test_a_failure_in_the_loop_ends_the_thread() -> None:
    files = SimFiles()
    log = Log.open(DIRECTORY, ROOMY, NODE, run_all, files=files)
    stream_of(log)
    settle(log)
    side = LoopSide(log)
    append = Appends(log)
    until(lambda: log.shared.append_queue.writer is Writer.NOBODY)
    append()
    side.loop.turn()
    files.sync_error = True
    side.end()
    assert log.failed is not None
    log.close()
    assert append.done == [] and side.sync.closed


def test_power_that_goes_between_begin_and_end_takes_what_was_not_acknowledged() -> None:
    for seed in range(20):
        files, log, side = still()
        append = Appends(log)
        append()
        side.run()
        append()
        side.loop.turn()
        assert side.sync.under_way and append.done == [1]
        after = files.crash(random.Random(seed))
        log.close()
        found = loaded(open_still(after).stream(key())).entries
        assert [e.index for e in found] in ([1], [1, 2])
