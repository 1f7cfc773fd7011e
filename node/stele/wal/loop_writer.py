"""Small batches, written by the event loop's own thread and synced in the background. Made by `Log.attach`.

A thread that wakes for each small batch costs more than the batch: the wake, the lock, the fight for the interpreter.
Touches the appender only while the writer is LOOP. Must not block the loop: what is not small goes to the thread.

Invariant: a batch's callbacks run in the loop's thread, in the order of the appends, after its sync has ended well, and
after those of every batch before it: a batch begins here only in a turn of the loop behind the thread's last dispatch.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from stele.wal.append_queue import Done, Item, Writer
from stele.wal.appender import Appender, call_all
from stele.wal.base import LogBase
from stele.wal.files import BackgroundSync, Loop
from stele.wal.format import GROUP_ALIGN, GROUP_HEADER_BYTES

LOOP_BYTES_MAX = 64 << 10
"""Most bytes that the loop's thread packs and copies at once: well below a millisecond, where 5 ms is all that a callback
may hold the loop."""
SLOW_WRITE_S = 0.005
"""A write into the page cache that takes longer waited for the disk: for dirty pages, for a read, for the journal."""
PAUSE_PER_WRITE = 100
"""After a slow write the thread does everything for that many times as long as the write took: a disk that lets writers
wait holds the loop for a hundredth of the time at most."""

SLOW_SYNC_S = 0.1
"""A sync that takes longer, until the loop hears of its end, tells of a disk that has more to do than it can, and whose
next write is likely to be a slow one; or of a loop that stood still, which is better off without writes as well."""
PAUSE_PER_SYNC = 10
_PAUSE_MAX_S = 30.0
"""After a slow sync the thread does everything for that many times as long as the sync took, up to half a minute."""

_MARKER_BYTES = GROUP_HEADER_BYTES
_GROUP_COST_BYTES = GROUP_HEADER_BYTES + GROUP_ALIGN
_log = structlog.get_logger("stele.wal")


class LoopWriter:
    """The loop's side of the appender: SmallBatchWriter."""

    def __init__(
        self,
        log: LogBase,
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
        background.watch(loop, self._told)

    # --- in the loop's thread

    def takes(self) -> bool:
        """Whether all that is queued may be written here. Call with the log's lock held, by who may take the writer."""
        append_queue = self._log.append_queue
        size = append_queue.queued_bytes
        if size > LOOP_BYTES_MAX or append_queue.for_thread:
            return False
        if self._not_before and self._clock() < self._not_before:
            return False
        groups = size // self._log.options.group_bytes_max + 1
        # Inside the prepared part fdatasync is enough, and no segment is closed or opened.
        return size + groups * _GROUP_COST_BYTES + _MARKER_BYTES <= self._appender.active.room

    def begin(self, items: list[Item]) -> None:
        """Write a batch and begin its sync. The loop's thread is the writer."""
        self._appender.guard(self._begin, items)

    def _begin(self, items: list[Item]) -> None:
        appender, stats = self._appender, self._log.stats
        begin = self._clock()
        appender.write(items)
        stats.loop_batches += 1
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
            # No sync has begun, so none has failed: the thread does it, this one and all that follow.
            _log.warning("syncs go through the log's thread from now on", error=str(exc))
            self._not_before = float("inf")
            with self._log.lock:
                self._log.append_queue.pass_writer(Writer.LOOP, Writer.THREAD)
        else:
            self._under_way = True
            with self._log.lock:
                self._log.append_queue.pass_writer(Writer.LOOP, Writer.KERNEL)

    def _told(self) -> None:
        """The background sync may have ended."""
        dones = self._appender.guard(self._take)
        if dones is None:
            return
        # Nobody is the writer by now: a callback may do what it likes, close the log or raise.
        call_all(dones)
        self._appender.guard(self._mark)

    def _take(self) -> list[Done] | None:
        """The callbacks of the batch whose sync has ended. The lock is held for all of it: nobody else takes the writer."""
        log, append_queue = self._log, self._log.append_queue
        with log.lock:
            # Not in the kernel's hands: the thread has taken it, as the log is closing.
            if append_queue.writer is not Writer.KERNEL or not self._background.ended():
                return None
            self._appender.active.was_synced()
            dones = self._settled()
            self._appender.index_written()
            append_queue.loop_rests(Writer.KERNEL)
        return dones

    def _mark(self) -> None:
        """Write the marker, unless the next group, which says the same, is to follow at once."""
        log, append_queue = self._log, self._log.append_queue
        with log.lock:
            if append_queue.items or append_queue.closing or append_queue.writer is not Writer.NOBODY:
                return
            append_queue.pass_writer(Writer.NOBODY, Writer.LOOP)
        self._appender.mark_synced()
        with log.lock:
            append_queue.loop_rests(Writer.LOOP)

    # --- whoever is the writer

    def settle(self) -> list[Done]:
        """End the batch that the loop began, in the appender's thread: wait for its sync, or do it. Its callbacks."""
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
        """Give the background sync back. Nothing is under way any more."""
        self._background.close()
