"""The node's log: the table of streams and segments, the queue, collection. The package's front door.

Threads: callers (any), the appender (writes and syncs), the event loop's (small batches), the keeper (prepares segments).
One lock guards all that is in memory; no I/O happens under it. Invariant: the order in which calls took the lock is the
order on disk; only who is the writer (handover.py) touches the appender.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from stele.model.config import Configuration, encode_configuration
from stele.model.errors import Code, Corrupt, InvariantViolation, Rejected, Retryable, SteleError
from stele.model.ids import NodeId, OpId, StreamKey
from stele.wal.appender import Appender, Checkpoint
from stele.wal.aside import Aside
from stele.wal.cache import EntryCache
from stele.wal.collect import bytes_from_each, collect
from stele.wal.files import BackgroundSync, Files, Loop, OsFiles
from stele.wal.format import Kind, Record
from stele.wal.handover import Handover, Writer
from stele.wal.inline import Inline
from stele.wal.keeper import Keeper, Pool, make_next
from stele.wal.metadata import Metadata, write_metadata
from stele.wal.options import LogOptions, SyncMode
from stele.wal.report import Collected, LogStats, Pin, RecoveryReport
from stele.wal.segment import ActiveSegment, Ready, Segment
from stele.wal.state import State
from stele.wal.stream import RECORD_COST_BYTES, StreamLog

ANCHOR_SHARE = 4
"""An anchor holds no larger part of the volume than one of so many."""
Done = Callable[[], None]
Dispatch = Callable[[list[Done]], None]
_log = structlog.get_logger("stele.wal")


class Log:
    """One log. Made by `Log.open`; every method may be called from any thread.

    `directory`, `options`, `files`, `node_id` and what begins below "for the other modules" is read by this package.
    """

    recovery: RecoveryReport

    def __init__(
        self, directory: Path, options: LogOptions, node_id: NodeId, dispatch: Dispatch, files: Files
    ) -> None:
        self.directory = directory
        self.options = options
        self.node_id = node_id
        self.files = files
        self.dispatch = dispatch
        self.stats = LogStats()
        self.failed: Exception | None = None
        self.low_space = False
        self.no_space = False
        self.free_bytes = 0
        self.free_files: int | None = None
        self.anchor_bytes_max = options.anchor_bytes_max
        self.on_failure: Callable[[Exception], None] | None = None
        # for the other modules, guarded by `lock`
        self.lock = threading.Lock()
        self.handover = Handover(self.lock)
        self.states: dict[StreamKey, State] = {}
        self.segments: dict[int, Segment] = {}
        self.active_length = 0
        self.first_sequence = 1
        self.collected_id = 0
        self.cache = EntryCache(options.cache_bytes_max)
        self.pool = Pool(files, directory, options)
        self.aside = Aside(files, directory)
        self.active_sequence = 0
        self._next: Ready | None = None
        self._next_sequence = 0
        self._appender: Appender | None = None
        self._keeper: Keeper | None = None
        self._inline: Inline | None = None
        self._collecting = threading.Lock()
        self._threads = True

    @classmethod
    def open(
        cls,
        directory: Path,
        options: LogOptions,
        node_id: NodeId,
        dispatch: Dispatch,
        *,
        files: Files | None = None,
        on_failure: Callable[[Exception], None] | None = None,
        threads: bool = True,
    ) -> Log:
        """Recover the log in `directory`, or begin one. Blocks; what it read is durable when it returns.

        `dispatch` gets the callbacks of one sync, in the appender's thread (see `attach`). `on_failure` is dispatched once if a
        write or sync fails. Without `threads` the log writes only within `turn`, `collect` and `close`: for owners
        that drive time themselves.

        Raises:
            Rejected: bad options; UNSUPPORTED_VERSION; WRONG_NODE, the files belong to another node.
            Corrupt: damage that no single stream can be blamed for.
            OSError: the disk.
        """
        from stele.wal.recovery import recover

        options.check()
        log = cls(directory, options, node_id, dispatch, files if files is not None else OsFiles())
        log.on_failure = on_failure
        active, chain = recover(log)
        log.refresh_space()
        log.active_sequence = active.sequence
        log._next_sequence = active.sequence + 1
        log._threads = threads
        log._appender = Appender(log, active, chain)
        if threads:
            log._appender.start()
        if threads and options.prepare:
            log._keeper = Keeper(log)
            log._keeper.start()
        return log

    def attach(
        self,
        loop: Loop,
        background: BackgroundSync | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve this thread's event loop; call it there, once. `dispatch` must run its callbacks there in their order.

        What one turn of the loop appends is then written and synced together, however many streams it belongs to,
        and the appender does not fight the loop for the interpreter meanwhile. With `background`, which becomes the
        log's, small batches are written by the loop's thread itself (see `stele.wal.inline`), which then runs their
        callbacks without `dispatch`. Only in sync mode `always`: in the others little waits for a sync. `clock`: seconds
        that only rise, to see how long the loop was held.
        """
        assert self._appender is not None
        if background is not None and self.options.sync is SyncMode.ALWAYS:
            self._inline = Inline(self, self._appender, loop, background, clock)
        elif background is not None:
            background.close()
        with self.lock:
            self.handover.attach(loop, self._inline)

    # --- streams

    def create_stream(
        self, key: StreamKey, start: OpId, config: Configuration, done: Done | None = None
    ) -> StreamLog:
        """A new stream whose entries begin after `start`, with `config` in force there.

        One that is there and never held an entry or a vote is made anew: a copy that crashed begins again.

        Raises:
            Rejected: ALREADY_PRESENT, also for a tombstone: a replica_id is never used again.
        """
        with self.lock:
            old = self.states.get(key)
            if old is not None and (old.tombstoned or not old.untouched):
                what = "was removed" if old.tombstoned else "is there already"
                raise Rejected(
                    f"log stream {key} {what}; a replica_id is used once", code=Code.ALREADY_PRESENT
                )
            self.admit_control()
            blob = encode_configuration(config)
            state = State(key, start, blob, self.active_sequence)
            self.states[key] = state
            record = Record(Kind.CREATE, 0, *state.raw, start.term, start.index, 0, blob)
            self.handover.push((state, None, record, done), RECORD_COST_BYTES + len(blob))
            return StreamLog(self, state)

    def stream(self, key: StreamKey) -> StreamLog:
        """The stream of that name, tombstones included.

        Raises:
            Rejected: NOT_FOUND.
        """
        state = self.states.get(key)
        if state is None:
            raise Rejected(f"log stream {key} is not here; create it first", code=Code.NOT_FOUND)
        return StreamLog(self, state)

    def tombstone(self, key: StreamKey, done: Done | None = None) -> None:
        """The replica was removed: entries go, term, vote and last OpId stay for ever. Nothing if it is one already."""
        with self.lock:
            state = self._state(key)
            self.admit_control()
            if state.failed is not None:
                state.damaged, state.failed = True, None
            state.bury()
            self._push_record(state, Kind.TOMBSTONE, done)

    def forget(self, key: StreamKey, done: Done | None = None) -> None:
        """The tablet is DELETED: nothing of the stream stays. Its name must never be used again."""
        with self.lock:
            state = self._state(key)
            self.admit_control()
            state.bury()
            state.failed = "the stream was deleted"
            del self.states[key]
            self._push_record(state, Kind.FORGET, done)

    def sync(self, done: Done) -> None:
        """Call `done` once everything appended so far survives power loss, whatever the sync mode."""
        with self.lock:
            self.admit_control()
            self.handover.push((None, None, None, done), 0)

    def turn(self) -> None:
        """Write, sync and dispatch what is queued; only for a log opened without threads."""
        assert self._appender is not None
        self._appender.turn()

    # --- space

    @property
    def synced_place(self) -> int:
        """A place (see `stele.wal.state.place`) up to which the log survives power loss; it only rises. The next open
        finds the log's end there or behind (`recovery.found`), unless the directory was replaced by an older copy."""
        assert self._appender is not None
        return self._appender.synced_place

    @property
    def under_way(self) -> tuple[int, int] | None:
        """Something is queued, being written or being synced: how many batches and syncs ended before. None: nothing is.
        As long as the same is told again, the disk has not moved. Never waits."""
        if self.handover.writer is Writer.NOBODY and not self.handover.queue:
            return None
        return self.stats.batches, self.stats.syncs

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of all segments, prepared ones not counted."""
        with self.lock:
            return sum(s.length for s in self.segments.values()) + self.active_length

    def pins(self) -> list[Pin]:
        """Unflushed stores that hold closed segments, the one that holds most first."""
        with self.lock:
            found = []
            active = self.active_length
            held_from = bytes_from_each(self)
            for state in self.states.values():
                at = None if state.needs_nothing else state.runs.find(state.flushed + 1)
                if at is not None:
                    found.append((state.key, state.flushed + 1, held_from[state.runs[at].sequence]))
        pins = [Pin(key, index, held + active) for key, index, held in found if held]
        return sorted(pins, key=lambda p: (-p.bytes, p.key))

    def collect(self) -> Collected:
        """Remove whole closed segments that nobody needs. Blocks: call it in a thread.

        One that would not go, as where no descriptor is left, counts on, and goes the next time.

        Raises:
            Corrupt: the log has failed.
            OSError: the metadata could not be written, or what was set aside before could not be removed; the rest is as it was.
        """
        with self._collecting:
            return collect(self)

    def close(self) -> None:
        """Write and sync what is queued, close the segment, write the metadata. Blocks. Never raises for a failed log."""
        with self.lock:
            if self.handover.closing:
                return
            self.handover.closing = True
            self.handover.wake.notify()
        if self._keeper is not None:
            self._keeper.stop()
        assert self._appender is not None
        self._appender.join()
        if self._inline is not None:
            self._inline.close()
        with self.lock:
            ready, self._next = self._next, None
        if ready is not None:
            ready.file.close()
        if self.failed is not None:
            return
        try:
            # A collection under way ends first: what is written here must not name segments that it removes then.
            with self._collecting:
                saved = tuple(s.saved() for s in self.states.values())
                position = self._appender.active.position
                write_metadata(
                    self.files,
                    self.directory,
                    Metadata(self.node_id, self.first_sequence, self.collected_id, position, saved),
                )
        except OSError as exc:
            _log.warning("metadata not written at close; the log has it all", error=str(exc))

    # --- for the other modules: the queue (call with `lock` held)

    def admit(self, size: int) -> None:
        """Refuse entries while the queue is full, or where there is no space left but for hard state."""
        if self.failed is not None or self.handover.closing:
            self.admit_control()
        if self.handover.queued_bytes + size > self.options.queue_bytes_max and self.handover.queue:
            self.stats.throttled += 1
            raise Retryable(
                f"log: {self.handover.queued_bytes} bytes wait to be written, at most {self.options.queue_bytes_max} may; "
                "try again",
                code=Code.THROTTLED,
            )
        if self.no_space:
            self.stats.refused_disk_full += 1
            raise Retryable(
                f"log {self.directory}: less than {self.options.low_space_bytes // 2} bytes, or "
                f"{self.options.low_space_files // 2} inodes, are free; drop tables or grow the volume",
                code=Code.DISK_FULL,
            )

    def admit_control(self) -> None:
        """Refuse everything after a failure or the end."""
        if self.failed is not None:
            raise Corrupt(
                f"log {self.directory} has failed: {self.failed}; restart the node", code=Code.IO_ERROR
            ) from self.failed
        if self.handover.closing:
            raise Retryable(f"log {self.directory} is closed", code=Code.NOT_READY)

    def _push_record(self, state: State, kind: Kind, done: Done | None) -> None:
        self.handover.push((state, None, Record(kind, 0, *state.raw, 0, 0, 0, b""), done), RECORD_COST_BYTES)

    def _state(self, key: StreamKey) -> State:
        state = self.states.get(key)
        if state is None:
            raise Rejected(f"log stream {key} is not here", code=Code.NOT_FOUND)
        return state

    # --- for the other modules: segments

    def new_segment_id(self) -> int:
        """Random, never 0."""
        return secrets.randbits(63) + 1

    def pin_segment(self, sequence: int) -> Segment:
        """A segment that is about to be read; call with `lock` held."""
        segment = self.segments.get(sequence)
        if segment is None:
            raise InvariantViolation(
                f"log {self.directory}: segment {sequence} is read after it was collected"
            )
        segment.readers += 1
        return segment

    def unpin_segment(self, segment: Segment) -> None:
        """The reader is done with it."""
        with self.lock:
            segment.readers -= 1

    def wanted_sequence(self) -> int | None:
        """The sequence of the segment to prepare, None if one is ready."""
        with self.lock:
            return None if self._next is not None or self.handover.closing else self._next_sequence

    def offer_next(self, ready: Ready) -> None:
        """The next segment is in place."""
        with self.lock:
            self._next = ready

    def take_next(self, sequence: int) -> Ready | None:
        """The segment after `sequence`, if it is ready; without a keeper it is made now."""
        with self.lock:
            ready, self._next = self._next, None
            if ready is not None:
                self._next_sequence = sequence + 2  # at once: the keeper must never prepare what is in use
        if ready is None and self._keeper is None:
            try:
                ready = make_next(self, sequence + 1)
            except OSError as exc:
                _log.warning("segment not prepared; appends overrun the last one", error=str(exc))
        return ready

    def segment_opened(self, ready: Ready, before: ActiveSegment) -> None:
        """The appender goes on in `ready`; `before` is closed."""
        with self.lock:
            old = self.segments.get(before.sequence)
            if old is not None:
                old.length = before.offset
            header = ready.header
            self.segments[header.sequence] = Segment(header.sequence, ready.path, header.segment_id, 0)
            self.active_sequence = header.sequence
            self._next_sequence = header.sequence + 1
            self.active_length = 0
        if self._keeper is not None:
            self._keeper.wake()

    def refresh_space(self) -> None:
        """Look at the free space."""
        free = self.free_bytes = self.files.free_bytes(self.directory)
        files = self.free_files = self.files.free_files(self.directory)
        share = self.files.total_bytes(self.directory) // ANCHOR_SHARE
        self.anchor_bytes_max = min(self.options.anchor_bytes_max, share)
        bytes_kept, files_kept = self.options.low_space_bytes, self.options.low_space_files
        self.low_space = free < bytes_kept or (files is not None and files < files_kept)
        # A core cannot take an entry back: one that is refused here holds up its votes behind it. So who takes writes is
        # told long before, and a new leader's first entry, which reads wait for, does not need a disk with space.
        self.no_space = free < bytes_kept // 2 or (files is not None and files < files_kept // 2)

    def checkpoint(self) -> Checkpoint:
        """The streams' states at a synced place of the log. Blocks.

        Raises:
            Corrupt: the log has failed.
        """
        checkpoint = Checkpoint()
        with self.lock:
            self.admit_control()
            self.handover.push((None, None, checkpoint, None), 0)
            self.handover.for_thread = True
        if not self._threads:
            self.turn()
        while not checkpoint.ready.wait(0.05):
            if self.failed is not None:
                raise Corrupt(
                    f"log {self.directory} has failed: {self.failed}", code=Code.IO_ERROR
                ) from self.failed
        return checkpoint

    def fail(self, error: Exception) -> None:
        """A write or a sync failed: final. Nothing that was not acknowledged ever will be."""
        with self.lock:
            if self.failed is not None:
                return
            self.failed = error
            self.handover.take()
            self.handover.wake.notify()
        log = _log.error if isinstance(error, SteleError) else _log.exception
        log("log failed; nothing more is acknowledged", directory=str(self.directory), error=str(error))
        if self.on_failure is not None:
            callback = self.on_failure
            self.dispatch([lambda: callback(error)])
