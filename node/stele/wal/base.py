"""State that all parts of the log share: its table of streams and segments, its queue, its space, its
failure.

Filled by recovery; log.py owns it and hands it to the parts. Starts no thread and writes no records. Invariant:
`lock` guards streams, segments and queue; no I/O happens while it is held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import structlog

from stele.model.errors import Code, Corrupt, InvariantViolation, Retryable, SteleError
from stele.model.ids import NodeId, OpId, StreamKey
from stele.wal.append_queue import AppendQueue, Done, Writer
from stele.wal.cache import EntryCache
from stele.wal.files import Files
from stele.wal.options import LogOptions
from stele.wal.pool import Pool
from stele.wal.quarantine import Quarantine
from stele.wal.report import LogStats, RecoveryReport
from stele.wal.segment import ActiveSegment, Ready, Segment
from stele.wal.state import State

ANCHOR_SHARE = 4
"""One anchor may hold at most this fraction (one over the number) of the volume."""
Dispatch = Callable[[list[Done]], None]
_log = structlog.get_logger("stele.wal")


class SharedLog:
    """What all parts of one log share.

    `dispatch` receives the callbacks of one sync. `wake_keeper` asks for the next segment to be prepared. If
    it is None, a segment is made when it is needed."""

    recovery: RecoveryReport

    def __init__(
        self, directory: Path, options: LogOptions, node_id: NodeId, dispatch: Dispatch, files: Files
    ) -> None:
        self.directory = directory
        self.options = options
        self.node_id = node_id
        self.files = files
        self.dispatch = dispatch
        self.wake_keeper: Callable[[], None] | None = None
        self.on_failure: Callable[[Exception], None] | None = None
        self.stats = LogStats()
        self.failed: Exception | None = None
        self.low_space = False
        self.no_space = False
        self.free_bytes = 0
        self.free_files: int | None = None
        self.anchor_bytes_max = options.anchor_bytes_max
        self.pool = Pool(files, directory, options, node_id)
        self.quarantine = Quarantine(files, directory)
        # guarded by `lock`
        self.lock = threading.Lock()
        self.append_queue = AppendQueue(self.lock)
        self.states: dict[StreamKey, State] = {}
        self.segments: dict[int, Segment] = {}
        self.active_sequence = 0
        self.active_length = 0
        self.first_sequence = 1
        self.collected_id = 0
        self.untold_starts: dict[
            StreamKey, OpId
        ] = {}  # raised by a collection that then failed; used by collections only
        self.cache = EntryCache(options.cache_bytes_max)
        self._next: Ready | None = None
        self._next_sequence = 0

    @property
    def under_way(self) -> tuple[int, int] | None:
        """None if nothing is queued, being written or being synced.

        Otherwise (batches, syncs) ended so far: the same answer twice means that the disk made no progress in
        between. Never waits.
        """
        if self.append_queue.writer is Writer.NOBODY and not self.append_queue.items:
            return None
        return self.stats.batches, self.stats.syncs

    # --- the queue (call with `lock` held)

    def admit(self, size: int) -> None:
        """Refuse entries while the queue is full, or while all free space is reserved for hard state."""
        append_queue = self.append_queue
        if self.failed is not None or append_queue.closing:
            self.admit_control()
        if append_queue.queued_bytes + size > self.options.queue_bytes_max and append_queue.items:
            self.stats.throttled += 1
            raise Retryable(
                f"log: {append_queue.queued_bytes} bytes wait to be written; "
                f"the limit is {self.options.queue_bytes_max}; try again",
                code=Code.THROTTLED,
            )
        if self.no_space:
            self._refuse_entries()

    def admit_again(self) -> None:
        """As `admit`, but do not refuse because of a full queue. For entries that are written again so that old
        segments can be removed."""
        self.admit_control()
        if self.no_space:
            self._refuse_entries()

    def _refuse_entries(self) -> None:
        self.stats.refused_disk_full += 1
        raise Retryable(
            f"log {self.directory}: less than {self.options.low_space_bytes // 2} bytes, or "
            f"{self.options.low_space_files // 2} inodes, are free; drop tables or grow the volume",
            code=Code.DISK_FULL,
        )

    def admit_control(self) -> None:
        """Refuse everything after a failure or a close."""
        if self.failed is not None:
            raise Corrupt(
                f"log {self.directory} has failed: {self.failed}; restart the node", code=Code.IO_ERROR
            ) from self.failed
        if self.append_queue.closing:
            raise Retryable(f"log {self.directory} is closed", code=Code.NOT_READY)

    # --- segments

    def pin_segment(self, sequence: int) -> Segment:
        """Mark a segment as being read; call with `lock` held."""
        segment = self.segments.get(sequence)
        if segment is None:
            raise InvariantViolation(
                f"log {self.directory}: segment {sequence} was collected while an entry in it is still needed"
            )
        segment.readers += 1
        return segment

    def unpin_segment(self, segment: Segment) -> None:
        """End a read of the segment."""
        with self.lock:
            segment.readers -= 1

    def wanted_sequence(self) -> int | None:
        """The sequence number of the segment to prepare; None if one is ready."""
        with self.lock:
            return None if self._next is not None or self.append_queue.closing else self._next_sequence

    def offer_next(self, ready: Ready) -> None:
        """Hand over the next segment, which is ready for use."""
        with self.lock:
            self._next = ready

    def take_prepared(self) -> Ready | None:
        """The segment that was prepared and not taken yet, which the caller now owns; None if there is none."""
        with self.lock:
            ready, self._next = self._next, None
        return ready

    def continue_in(self, sequence: int) -> None:
        """Continue appends in this segment, after recovery."""
        self.active_sequence = sequence
        self._next_sequence = sequence + 1

    def take_next(self, sequence: int) -> Ready | None:
        """The segment after `sequence` if it is ready, else None. Without a keeper it is made now."""
        with self.lock:
            ready, self._next = self._next, None
            if ready is not None:
                # Set first: the keeper must never prepare a segment that is in use.
                self._next_sequence = sequence + 2
        if ready is None and self.wake_keeper is None:
            try:
                ready = self.pool.make(sequence + 1)
            except OSError as exc:
                _log.warning(
                    "cannot prepare the next segment; appends continue in the full one", error=str(exc)
                )
        return ready

    def segment_opened(self, ready: Ready, before: ActiveSegment) -> None:
        """Note that the appender has closed `before` and continues in `ready`."""
        with self.lock:
            old = self.segments.get(before.sequence)
            if old is not None:
                old.length = before.offset
            header = ready.header
            self.segments[header.sequence] = Segment(header.sequence, ready.path, header.segment_id, 0)
            self.active_sequence = header.sequence
            self._next_sequence = header.sequence + 1
            self.active_length = 0
        if self.wake_keeper is not None:
            self.wake_keeper()

    # --- space and failure

    def refresh_space(self) -> None:
        """Read the free space of the volume."""
        free = self.free_bytes = self.files.free_bytes(self.directory)
        files = self.free_files = self.files.free_files(self.directory)
        share = self.files.total_bytes(self.directory) // ANCHOR_SHARE
        self.anchor_bytes_max = min(self.options.anchor_bytes_max, share)
        bytes_kept, files_kept = self.options.low_space_bytes, self.options.low_space_files
        self.low_space = free < bytes_kept or (files is not None and files < files_kept)
        # A Raft core cannot take an entry back: one that is refused here delays the votes behind it. So the
        # owner gets the signal to stop writes long before. A new leader's first entry, which reads wait for,
        # must not need space.
        self.no_space = free < bytes_kept // 2 or (files is not None and files < files_kept // 2)

    def fail(self, error: Exception) -> None:
        """Fail the log for good, because a write or a sync failed. Nothing more is ever acknowledged."""
        with self.lock:
            if self.failed is not None:
                return
            self.failed = error
            self.append_queue.take()
            self.append_queue.wake.notify()
        log = _log.error if isinstance(error, SteleError) else _log.exception
        log(
            "the log failed and acknowledges nothing more; restart the node",
            directory=str(self.directory),
            error=str(error),
        )
        if self.on_failure is not None:
            callback = self.on_failure
            self.dispatch([lambda: callback(error)])
