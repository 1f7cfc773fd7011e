"""Small batches written by the event loop's thread: who writes when, in which order callbacks come, what a failure does.

On simulated files, loop and background sync: nothing is concurrent but where a log's own thread is the subject.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest

from stele.model.errors import Corrupt, InvariantViolation
from stele.model.ids import ReplicaId
from stele.wal import Log, LogOptions, SyncMode, inline
from stele.wal.handover import Writer
from tests.wal.simfs import SimFiles
from tests.wal.support import (
    DIRECTORY,
    NODE,
    SMALL,
    LoopSide,
    entry,
    key,
    loaded,
    open_still,
    run_all,
    settle,
    stream_of,
)

ROOMY = replace(SMALL, segment_bytes=1 << 20)
LARGE = b"x" * (inline.INLINE_BYTES_MAX + 1)


def _still(options: LogOptions = ROOMY) -> tuple[SimFiles, Log, LoopSide]:
    """A log without a thread of its own, settled, with a loop."""
    files = SimFiles()
    log = open_still(files, options)
    stream_of(log)
    log.turn()
    return files, log, LoopSide(log)


class _Appends:
    """Appends numbered entries to a log's stream, and notes whose callbacks came."""

    def __init__(self, log: Log) -> None:
        self.stream = log.stream(key())
        self.done: list[int] = []

    def __call__(self, payload: bytes = b"", then: Callable[[], None] = lambda: None) -> int:
        index = self.stream.last_opid.index + 1

        def done() -> None:
            self.done.append(index)
            then()

        self.stream.append_entries((entry(1, index, payload),), done)
        return index


# --- one batch


def test_a_small_batch_is_written_at_the_end_of_the_turn_and_told_after_its_sync() -> None:
    files, log, side = _still()
    append = _Appends(log)
    append()
    append()
    assert log.handover.writer is Writer.NOBODY and not side.sync.begun
    writes, syncs = len(files.write_calls), files.syncs
    side.loop.turn()
    assert len(files.write_calls) == writes + 1
    assert log.handover.writer is Writer.KERNEL
    assert files.syncs == syncs and append.done == []
    side.sync.tell()  # in vain
    assert log.handover.writer is Writer.KERNEL and append.done == []
    side.end()
    assert append.done == [1, 2]
    assert log.handover.writer is Writer.NOBODY
    assert files.syncs == syncs + 1
    assert len(files.write_calls) == writes + 2  # and the marker
    assert log.synced_place > 0 and log.stats.inline_batches == 1
    assert [e.index for e in log.stream(key()).read_entries(1, 1 << 20)] == [1, 2]


def test_what_comes_during_a_sync_is_one_batch_with_what_the_callbacks_append() -> None:
    _, log, side = _still()
    append = _Appends(log)
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
    files, log, side = _still()
    done: list[int] = []
    log.stream(key()).append_vote(3, ReplicaId(2), lambda: done.append(1))
    side.run()
    assert done == [1] and log.stats.inline_batches == 1
    assert loaded(open_still(files.crash(random.Random(1))).stream(key())).hard_state.voted_for == 2


# --- what goes to the thread


@pytest.mark.parametrize("why", ["large", "many", "checkpoint", "no room", "groups"])
def test_what_is_not_small_and_plain_goes_to_the_thread(why: str) -> None:
    options = replace(ROOMY, group_bytes_max=64) if why == "groups" else ROOMY
    _, log, side = _still(options)
    append = _Appends(log)
    if why == "large":
        append(LARGE)
    elif why == "many":
        for _ in range(9):
            append(b"x" * (inline.INLINE_BYTES_MAX // 8))
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
        log.handover.for_thread = True
    side.loop.run()
    assert log.handover.writer is Writer.THREAD
    assert side.sync.begun == 0
    log.turn()
    assert append.done == list(range(1, len(append.done) + 1))
    assert log.handover.writer is Writer.NOBODY and not log.handover.for_thread


def test_a_batch_by_the_loop_never_closes_a_segment_nor_leaves_its_prepared_part() -> None:
    files, log, side = _still(SMALL)
    append = _Appends(log)
    for _ in range(200):
        append(b"x" * 300)
        side.loop.turn()
        if log.handover.writer is Writer.THREAD:
            log.turn()
        side.run()
        active = log._appender.active  # type: ignore[union-attr]
        assert active.room >= 0
    assert append.done == list(range(1, 201))
    assert len(log.segments) > 3 and log.stats.overruns == 0
    assert log.stats.inline_batches > 150
    log.close()
    assert len(loaded(open_still(files).stream(key())).entries) == 200


@pytest.mark.parametrize("mode", [SyncMode.INTERVAL, SyncMode.NEVER])
def test_other_sync_modes_need_no_background_sync(mode: SyncMode) -> None:
    _, log, side = _still(replace(ROOMY, sync=mode))
    assert side.sync.closed
    append = _Appends(log)
    append()
    side.loop.run()
    assert log.handover.writer is Writer.THREAD
    log.turn()
    assert append.done == [1]


def test_after_a_slow_write_the_thread_writes_for_a_while() -> None:
    _, log, side = _still()
    append = _Appends(log)
    file = log._appender.active.file  # type: ignore[union-attr]
    write = file.write

    def slow(buffers: Sequence[bytes], offset: int) -> None:
        file.write = write  # type: ignore[method-assign]
        side.now += 2 * inline.SLOW_WRITE_S
        write(buffers, offset)

    file.write = slow  # type: ignore[method-assign]
    append()
    side.run()
    assert append.done == [1] and log.stats.slow_writes == 1
    append()
    side.loop.run()
    assert log.handover.writer is Writer.THREAD
    log.turn()
    assert append.done == [1, 2]
    side.now += 2 * inline.SLOW_WRITE_S * inline.PAUSE_PER_WRITE
    append()
    side.run()
    assert append.done == [1, 2, 3] and log.stats.inline_batches == 2


def test_a_sync_that_cannot_be_begun_is_done_by_the_thread() -> None:
    files, log, side = _still()
    append = _Appends(log)
    side.sync.refuses = True
    append()
    side.loop.run()
    assert log.handover.writer is Writer.THREAD and append.done == []
    append()
    log.turn()
    assert append.done == [1, 2] and log.failed is None
    append()
    side.loop.run()
    assert log.handover.writer is Writer.THREAD  # it was not tried again
    log.turn()
    log.close()
    assert len(loaded(open_still(files.crash(random.Random(1))).stream(key())).entries) == 3


def test_the_writer_changes_only_as_the_table_says() -> None:
    _, log, _ = _still()
    with pytest.raises(InvariantViolation):
        log.handover.pass_writer(Writer.LOOP, Writer.NOBODY)
    with pytest.raises(InvariantViolation):
        log.handover.pass_writer(Writer.NOBODY, Writer.KERNEL)
    assert log.handover.writer is Writer.NOBODY


# --- failures


@pytest.mark.parametrize("what", ["write", "sync", "marker"])
def test_a_failure_in_the_loop_is_final(what: str) -> None:
    files = SimFiles()
    told: list[Exception] = []
    log = Log.open(DIRECTORY, ROOMY, NODE, run_all, files=files, on_failure=told.append, threads=False)
    stream_of(log)
    log.turn()
    side = LoopSide(log)
    append = _Appends(log)
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
    append = _Appends(log)
    _until(lambda: log.handover.writer is Writer.NOBODY)
    append()
    side.loop.turn()
    files.sync_error = True
    side.end()
    assert log.failed is not None
    log.close()
    assert append.done == [] and side.sync.closed


def test_power_that_goes_between_begin_and_end_takes_what_was_not_acknowledged() -> None:
    for seed in range(20):
        files, log, side = _still()
        append = _Appends(log)
        append()
        side.run()
        append()
        side.loop.turn()
        assert side.sync.under_way and append.done == [1]
        after = files.crash(random.Random(seed))
        log.close()
        found = loaded(open_still(after).stream(key())).entries
        assert [e.index for e in found] in ([1], [1, 2])


# --- the end


def test_close_waits_for_the_sync_under_way_without_a_loop() -> None:
    files, log, side = _still()
    append = _Appends(log)
    append()
    side.loop.turn()
    append()
    log.close()
    assert append.done == [1, 2] and side.sync.closed
    side.loop.run()
    side.sync.tell()
    assert append.done == [1, 2]
    assert len(loaded(open_still(files.crash(random.Random(1))).stream(key())).entries) == 2


def test_the_thread_takes_a_sync_under_way_when_the_log_closes() -> None:
    files = SimFiles()
    log = Log.open(DIRECTORY, ROOMY, NODE, run_all, files=files)
    stream_of(log)
    settle(log)
    _until(lambda: log.handover.writer is Writer.NOBODY)
    side = LoopSide(log)
    append = _Appends(log)
    append()
    side.loop.turn()
    assert log.handover.writer is Writer.KERNEL
    append()
    log.close()
    assert append.done == [1, 2] and side.sync.closed
    assert len(loaded(open_still(files.crash(random.Random(1))).stream(key())).entries) == 2


def test_a_log_that_closes_while_the_loop_writes_needs_the_loop_no_more() -> None:
    files = SimFiles()
    log = Log.open(DIRECTORY, ROOMY, NODE, run_all, files=files)
    stream_of(log)
    settle(log)
    _until(lambda: log.handover.writer is Writer.NOBODY)
    side = LoopSide(log)
    append = _Appends(log)
    closing = threading.Thread(target=log.close)
    file = log._appender.active.file  # type: ignore[union-attr]
    write = file.write

    def slow(buffers: Sequence[bytes], offset: int) -> None:
        file.write = write  # type: ignore[method-assign]
        closing.start()
        _until(lambda: log.handover.closing)
        time.sleep(0.05)  # the log's thread looks, and must wait
        assert log.handover.writer is Writer.LOOP
        write(buffers, offset)

    append()
    file.write = slow  # type: ignore[method-assign]
    side.loop.turn()
    closing.join(10)
    assert not closing.is_alive()
    assert append.done == [1] and side.sync.closed


def test_a_sync_that_fails_while_the_log_closes_acknowledges_nothing() -> None:
    files, log, side = _still()
    append = _Appends(log)
    append()
    side.loop.turn()
    files.sync_error = True
    log.close()
    assert append.done == [] and log.failed is not None and side.sync.closed


def test_a_callback_may_close_the_log() -> None:
    files, log, side = _still()
    append = _Appends(log)
    append(then=log.close)
    append()
    side.run()
    assert append.done == [1, 2] and side.sync.closed
    assert len(loaded(open_still(files).stream(key())).entries) == 2


def test_a_callback_that_raises_stops_neither_the_log_nor_the_others() -> None:
    _, log, side = _still()
    append = _Appends(log)

    def bad() -> None:
        raise ValueError("not the log's fault")

    append(then=bad)
    append()
    side.run()
    assert append.done == [1, 2]
    append()
    side.run()
    assert append.done == [1, 2, 3] and log.failed is None


# --- the thread and the loop by turns


def _until(what: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if what():
            return
        time.sleep(0.001)
    raise AssertionError("it does not come")


class _WithThread:
    """A log with a thread, whose dispatch goes to the loop, and a loop that the test turns."""

    def __init__(self) -> None:
        self.files = SimFiles()
        self.log = Log.open(DIRECTORY, ROOMY, NODE, self._dispatch, files=self.files)
        stream_of(self.log)
        self.side = LoopSide(self.log)
        self.side.settle()
        _until(lambda: self.log.handover.writer is Writer.NOBODY)
        self.append = _Appends(self.log)

    def _dispatch(self, callbacks: list[Callable[[], None]]) -> None:
        self.side.loop.call_soon_threadsafe(lambda: run_all(callbacks))

    def until_done(self, index: int) -> None:
        def done() -> bool:
            self.side.run()
            return index in self.append.done

        _until(done)


def test_a_burst_goes_from_the_loop_to_the_thread_and_back() -> None:
    w = _WithThread()
    for round_ in range(20):
        _until(lambda: w.log.handover.writer is Writer.NOBODY)
        before = w.log.stats.inline_batches
        w.append()
        w.side.loop.turn()
        assert w.log.handover.writer is Writer.KERNEL
        w.append(LARGE)
        w.side.end()
        w.until_done(w.append())
        w.until_done(w.append())
        assert w.log.stats.inline_batches > before
        assert w.log.stats.batches > w.log.stats.inline_batches + round_
    assert w.append.done == sorted(w.append.done)
    w.log.close()
    assert len(loaded(open_still(w.files).stream(key())).entries) == 80


def test_a_busy_thread_gives_small_batches_back_to_the_loop() -> None:
    w = _WithThread()
    gate = threading.Event()
    active = w.log._appender.active  # type: ignore[union-attr]
    write = active.file.write

    def slow(buffers: Sequence[bytes], offset: int) -> None:
        assert gate.wait(10)
        write(buffers, offset)

    w.append(LARGE)
    active.file.write = slow  # type: ignore[method-assign]
    w.side.loop.turn()
    _until(lambda: not w.log.handover.queue)  # the thread has it
    w.append()  # waits behind it
    gate.set()
    active.file.write = write  # type: ignore[method-assign]
    _until(lambda: w.log.handover.writer is Writer.NOBODY)
    assert len(w.log.handover.queue) == 1 and w.append.done == []
    w.side.loop.turn()  # first the thread's callbacks, then the small batch
    assert w.append.done == [1] and w.log.handover.writer is Writer.KERNEL
    w.side.end()
    assert w.append.done == [1, 2]
    w.log.close()


def test_a_closed_loop_leaves_everything_to_the_thread() -> None:
    w = _WithThread()
    w.side.loop.closed = True
    w.log.dispatch = run_all
    other = threading.Thread(target=lambda: [w.append(LARGE), w.append()])
    other.start()
    other.join()
    _until(lambda: w.append.done == [1, 2])
    w.log.close()


def test_appends_of_other_threads_are_in_order_with_those_of_the_loop() -> None:
    w = _WithThread()
    order: list[tuple[int, int]] = []
    streams = {n: stream_of(w.log, key(n)) for n in (2, 3)}
    w.side.settle()

    def work(n: int) -> None:
        for index in range(1, 201):
            payload = LARGE if index % 50 == 0 else b"x" * 100
            streams[n].append_entries((entry(1, index, payload),), partial(order.append, (n, index)))
            if index % 10 == 0:
                time.sleep(0.001)

    other = threading.Thread(target=work, args=(2,))
    other.start()
    for index in range(1, 201):
        payload = LARGE if index % 40 == 0 else b"x" * 100
        streams[3].append_entries((entry(1, index, payload),), lambda index=index: order.append((3, index)))  # type: ignore[misc]
        if index % 5 == 0:
            w.side.run()
    other.join()

    def all_done() -> bool:
        w.side.run()
        return len(order) == 400

    _until(all_done)
    for n in (2, 3):
        assert [i for m, i in order if m == n] == list(range(1, 201))
    assert w.log.failed is None and w.log.stats.inline_batches > 0
    w.log.close()
    again = open_still(w.files)
    assert all(len(loaded(again.stream(key(n))).entries) == 200 for n in streams)
