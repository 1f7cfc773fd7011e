"""Whose turn it is to write the log, the event loop's or the thread's: how they hand over, and how a log closes meanwhile.

On simulated files, loop and background sync; threads are real where the log's own thread is the subject.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from stele.model.errors import InvariantViolation
from stele.wal import Log, loop_writer
from stele.wal.append_queue import Writer
from tests.wal.simfs import SimFiles
from tests.wal.support import (
    DIRECTORY,
    LARGE,
    NODE,
    ROOMY,
    Appends,
    LoopSide,
    entry,
    key,
    loaded,
    open_still,
    run_all,
    settle,
    still,
    stream_of,
    until,
)

# --- handing over


def thread_writes_for(pause_s: float, log: Log, side: LoopSide, append: Appends) -> None:
    """The second entry is the thread's to write, and the loop's the third, which comes that much later."""
    append()
    side.loop.run()
    assert log.shared.append_queue.writer is Writer.THREAD
    log.turn()
    assert append.done == [1, 2]
    side.now += pause_s
    append()
    side.run()
    assert append.done == [1, 2, 3] and log.stats.loop_batches == 2


def test_after_a_slow_write_the_thread_writes_for_a_while() -> None:
    _, log, side = still()
    append = Appends(log)
    file = log._appender.active.file  # type: ignore[union-attr]
    write = file.write

    def slow(buffers: Sequence[bytes], offset: int) -> None:
        file.write = write  # type: ignore[method-assign]
        side.now += 2 * loop_writer.SLOW_WRITE_S
        write(buffers, offset)

    file.write = slow  # type: ignore[method-assign]
    append()
    side.run()
    assert append.done == [1] and log.stats.slow_writes == 1
    thread_writes_for(2 * loop_writer.SLOW_WRITE_S * loop_writer.PAUSE_PER_WRITE, log, side, append)


def test_after_a_slow_sync_the_thread_writes_for_a_while() -> None:
    """A disk that takes that long would let the next write wait as well, and the loop with it."""
    _, log, side = still()
    append = Appends(log)
    append()
    side.loop.turn()
    side.now += 2 * loop_writer.SLOW_SYNC_S
    side.run()
    assert append.done == [1]
    thread_writes_for(2 * loop_writer.SLOW_SYNC_S * loop_writer.PAUSE_PER_SYNC, log, side, append)


def test_a_sync_that_cannot_be_begun_is_done_by_the_thread() -> None:
    files, log, side = still()
    append = Appends(log)
    side.sync.refuses = True
    append()
    side.loop.run()
    assert log.shared.append_queue.writer is Writer.THREAD and append.done == []
    append()
    log.turn()
    assert append.done == [1, 2] and log.failed is None
    append()
    side.loop.run()
    assert log.shared.append_queue.writer is Writer.THREAD  # it was not tried again
    log.turn()
    log.close()
    assert len(loaded(open_still(files.crash(random.Random(1))).stream(key())).entries) == 3


def test_the_writer_changes_only_as_the_table_says() -> None:
    _, log, _ = still()
    with pytest.raises(InvariantViolation):
        log.shared.append_queue.pass_writer(Writer.LOOP, Writer.NOBODY)
    with pytest.raises(InvariantViolation):
        log.shared.append_queue.pass_writer(Writer.NOBODY, Writer.KERNEL)
    assert log.shared.append_queue.writer is Writer.NOBODY


# --- the end


def test_close_waits_for_the_sync_under_way_without_a_loop() -> None:
    files, log, side = still()
    append = Appends(log)
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
    until(lambda: log.shared.append_queue.writer is Writer.NOBODY)
    side = LoopSide(log)
    append = Appends(log)
    append()
    side.loop.turn()
    assert log.shared.append_queue.writer is Writer.KERNEL
    append()
    log.close()
    assert append.done == [1, 2] and side.sync.closed
    assert len(loaded(open_still(files.crash(random.Random(1))).stream(key())).entries) == 2


def test_a_log_that_closes_while_the_loop_writes_needs_the_loop_no_more() -> None:
    files = SimFiles()
    log = Log.open(DIRECTORY, ROOMY, NODE, run_all, files=files)
    stream_of(log)
    settle(log)
    until(lambda: log.shared.append_queue.writer is Writer.NOBODY)
    side = LoopSide(log)
    append = Appends(log)
    closing = threading.Thread(target=log.close)
    file = log._appender.active.file  # type: ignore[union-attr]
    write = file.write

    def slow(buffers: Sequence[bytes], offset: int) -> None:
        file.write = write  # type: ignore[method-assign]
        closing.start()
        until(lambda: log.shared.append_queue.closing)
        time.sleep(0.05)  # the log's thread looks, and must wait
        assert log.shared.append_queue.writer is Writer.LOOP
        write(buffers, offset)

    append()
    file.write = slow  # type: ignore[method-assign]
    side.loop.turn()
    closing.join(60)
    assert not closing.is_alive()
    assert append.done == [1] and side.sync.closed


def test_a_sync_that_fails_while_the_log_closes_acknowledges_nothing() -> None:
    files, log, side = still()
    append = Appends(log)
    append()
    side.loop.turn()
    files.sync_error = True
    log.close()
    assert append.done == [] and log.failed is not None and side.sync.closed


def test_a_callback_may_close_the_log() -> None:
    files, log, side = still()
    append = Appends(log)
    append(then=log.close)
    append()
    side.run()
    assert append.done == [1, 2] and side.sync.closed
    assert len(loaded(open_still(files).stream(key())).entries) == 2


def test_a_callback_that_raises_stops_neither_the_log_nor_the_others() -> None:
    _, log, side = still()
    append = Appends(log)

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


class _WithThread:
    """A log with a thread, whose dispatch goes to the loop, and a loop that the test turns."""

    def __init__(self) -> None:
        self.files = SimFiles()
        self.log = Log.open(DIRECTORY, ROOMY, NODE, self._dispatch, files=self.files)
        stream_of(self.log)
        self.side = LoopSide(self.log)
        self.side.settle()
        until(lambda: self.log.shared.append_queue.writer is Writer.NOBODY)
        self.append = Appends(self.log)

    def _dispatch(self, callbacks: list[Callable[[], None]]) -> None:
        self.side.loop.call_soon_threadsafe(lambda: run_all(callbacks))

    def until_done(self, index: int) -> None:
        def done() -> bool:
            self.side.run()
            return index in self.append.done

        until(done)


def test_a_burst_goes_from_the_loop_to_the_thread_and_back() -> None:
    w = _WithThread()
    for round_ in range(20):
        until(lambda: w.log.shared.append_queue.writer is Writer.NOBODY)
        before = w.log.stats.loop_batches
        w.append()
        w.side.loop.turn()
        assert w.log.shared.append_queue.writer is Writer.KERNEL
        w.append(LARGE)
        w.side.end()
        w.until_done(w.append())
        w.until_done(w.append())
        assert w.log.stats.loop_batches > before
        assert w.log.stats.batches > w.log.stats.loop_batches + round_
    assert w.append.done == sorted(w.append.done)
    w.log.close()
    assert len(loaded(open_still(w.files).stream(key())).entries) == 80


def test_a_busy_thread_gives_small_batches_back_to_the_loop() -> None:
    w = _WithThread()
    gate = threading.Event()
    active = w.log._appender.active  # type: ignore[union-attr]
    write = active.file.write

    def slow(buffers: Sequence[bytes], offset: int) -> None:
        assert gate.wait(60)
        write(buffers, offset)

    w.append(LARGE)
    active.file.write = slow  # type: ignore[method-assign]
    w.side.loop.turn()
    until(lambda: not w.log.shared.append_queue.items)  # the thread has it
    w.append()  # waits behind it
    gate.set()
    active.file.write = write  # type: ignore[method-assign]
    until(lambda: w.log.shared.append_queue.writer is Writer.NOBODY)
    assert len(w.log.shared.append_queue.items) == 1 and w.append.done == []
    w.side.loop.turn()  # first the thread's callbacks, then the small batch
    assert w.append.done == [1] and w.log.shared.append_queue.writer is Writer.KERNEL
    w.side.end()
    assert w.append.done == [1, 2]
    w.log.close()


def test_a_closed_loop_leaves_everything_to_the_thread() -> None:
    w = _WithThread()
    w.side.loop.closed = True
    w.log.shared.dispatch = run_all
    other = threading.Thread(target=lambda: [w.append(LARGE), w.append()])
    other.start()
    other.join()
    until(lambda: w.append.done == [1, 2])
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

    until(all_done)
    for n in (2, 3):
        assert [i for m, i in order if m == n] == list(range(1, 201))
    assert w.log.failed is None and w.log.stats.loop_batches > 0
    w.log.close()
    again = open_still(w.files)
    assert all(len(loaded(again.stream(key(n))).entries) == 200 for n in streams)
