"""Small batches: the event loop's own thread writes them, and the sync runs in the background. Made by
`Log.attach`.

Waking a thread for each small batch costs more than the batch does. Touches the appender only while the
writer is LOOP. Must not block the loop: anything that is not small goes to the appender's thread.

Invariant: a batch's callbacks run in the loop's thread, in the order of the appends, after its sync
succeeded. They run after those of every earlier batch: a batch begins here only in a turn of the loop after
the thread's last dispatch.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from stele.wal.append_queue import Done, Item, Writer
from stele.wal.appender import Appender, call_all
from stele.wal.base import SharedLog
from stele.wal.files import BackgroundSync, Loop
from stele.wal.format import GROUP_ALIGN, GROUP_HEADER_BYTES

LOOP_BYTES_MAX = 64 << 10
"""The most bytes that the loop's thread packs and copies at once. That takes well below a millisecond; a
callback may hold the loop for 5 ms."""
SLOW_WRITE_S = 0.005
"""A write to the page cache that takes longer than this had to wait for the disk: for dirty pages, a read or
the journal."""
PAUSE_PER_WRITE = 100
"""After a slow write the thread takes over for this many times the write's duration. So a disk that blocks
writers holds the loop for at most a hundredth of the time."""

SLOW_SYNC_S = 0.1
"""A sync whose end reaches the loop later than this means an overloaded disk or a loop that was blocked. In
both cases the loop should not write."""
PAUSE_PER_SYNC = 10
_PAUSE_MAX_S = 30.0
"""After a slow sync the thread takes over for this many times the sync's duration, at most half a minute."""

_MARKER_BYTES = GROUP_HEADER_BYTES
_GROUP_COST_BYTES = GROUP_HEADER_BYTES + GROUP_ALIGN
_log = structlog.get_logger("stele.wal")


class LoopWriter:
    """The loop's side of the appender. Implements SmallBatchWriter."""

    def __init__(
        self,
        log: SharedLog,
        appender: Appender,
        loop: Loop,
        background: BackgroundSync,
        clock: Callable[[], float],
    ) -> None:
        self._log = log
        self._appender = appender
        self._background = background
        self._clock = clock
        self._dones: list[Done] = []
        self._begun = 0.0
        self._under_way = False
        self._not_before = 0.0
        background.watch(loop, self._sync_ended)

    # --- in the loop's thread

    def takes(self) -> bool:
        """Whether the loop may write all that is queued. Call with the log's lock held, when nobody is the
        writer."""
        append_queue = self._log.append_queue
        size = append_queue.queued_bytes
        if size > LOOP_BYTES_MAX or append_queue.for_thread:
            return False
        if self._not_before and self._clock() < self._not_before:
            return False
        groups = size // self._log.options.group_bytes_max + 1
        # Inside the prepared part fdatasync is enough, and no segment is opened or closed.
        return size + groups * _GROUP_COST_BYTES + _MARKER_BYTES <= self._appender.active.room

    def begin(self, items: list[Item]) -> None:
        """Write a batch and begin its sync. The writer is the loop's thread."""
        written = self._appender.guard(self._begin, items)
        if written:
            call_all(written)

    def _begin(self, items: list[Item]) -> list[Done]:
        """Write a batch and begin its sync. Returns the callbacks that waited for the batch to be written."""
        appender, stats = self._appender, self._log.stats
        begin = self._clock()
        appender.write(items)
        stats.loop_batches += 1
        written = appender.take_written()
        self._dones = [done for _, _, _, done in items if done is not None]
        self._begun = self._clock()
        took = self._begun - begin
        if took > SLOW_WRITE_S:
            self._not_before = self._begun + took * PAUSE_PER_WRITE
            stats.slow_writes += 1
        appender.unsettled = self
        try:
            self._background.begin(appender.active.file)
        except OSError as exc:
            # No sync began, so none failed. The thread does this one and all that follow.
            _log.warning(
                "the kernel refused a background sync; the log's thread does every sync from now on",
                error=str(exc),
            )
            self._not_before = float("inf")
            with self._log.lock:
                self._log.append_queue.pass_writer(Writer.LOOP, Writer.THREAD)
        else:
            self._under_way = True
            with self._log.lock:
                self._log.append_queue.pass_writer(Writer.LOOP, Writer.KERNEL)
        return written

    def _sync_ended(self) -> None:
        """Called by the loop: the background sync may have ended."""
        dones = self._appender.guard(self._take)
        if dones is None:
            return
        # Nobody is the writer now, so a callback may close the log or raise.
        call_all(dones)
        self._appender.guard(self._mark)

    def _take(self) -> list[Done] | None:
        """The callbacks of the batch whose sync has ended. Holds the lock throughout, so that no other writer
        starts."""
        log, append_queue = self._log, self._log.append_queue
        with log.lock:
            # Not with the kernel: the appender's thread took the batch, because the log is closing.
            if append_queue.writer is not Writer.KERNEL or not self._background.ended():
                return None
            self._appender.active.was_synced()
            dones = self._settled()
            self._appender.index_written()
            append_queue.loop_rests(Writer.KERNEL)
        return dones

    def _mark(self) -> None:
        """Write the SYNCED marker, unless another group follows at once, whose header says the same."""
        log, append_queue = self._log, self._log.append_queue
        with log.lock:
            if append_queue.items or append_queue.closing or append_queue.writer is not Writer.NOBODY:
                return
            append_queue.pass_writer(Writer.NOBODY, Writer.LOOP)
        self._appender.mark_synced()
        with log.lock:
            append_queue.loop_rests(Writer.LOOP)

    # --- called by the current writer

    def settle(self) -> list[Done]:
        """See SmallBatchWriter: runs in the appender's thread."""
        if self._under_way:
            self._background.wait()
            self._appender.active.was_synced()
        else:
            self._begun = self._clock()
            self._appender.active.sync()
        dones = self._settled()
        self._appender.update_index()
        return dones

    def _settled(self) -> list[Done]:
        self._under_way = False
        self._appender.unsettled = None
        now = self._clock()
        took = now - self._begun
        if took > SLOW_SYNC_S:
            self._not_before = max(self._not_before, now + min(took * PAUSE_PER_SYNC, _PAUSE_MAX_S))
        self._appender.synced(took)
        dones, self._dones = self._dones, []
        return dones

    def close(self) -> None:
        """Close the background sync. Nothing may be under way."""
        self._background.close()
