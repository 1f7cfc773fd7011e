"""The node's log: open it, attach it to a loop, get streams from it, collect and close it. The package's
front door.

Threads: callers (any), the appender (writes and syncs), the event loop's (small batches), the keeper
(prepares segments). They share base.py's SharedLog, which one lock guards. Invariant: the order in which calls took the
lock is the order on disk; only the current writer (append_queue.py) touches the appender.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from stele.model.config import Configuration, encode_configuration
from stele.model.errors import Code, Corrupt, Rejected
from stele.model.ids import NodeId, OpId, StreamKey
from stele.wal.append_queue import RECORD_COST_BYTES, Checkpoint, Done
from stele.wal.appender import Appender
from stele.wal.base import Dispatch, SharedLog
from stele.wal.collect import bytes_from_each, collect
from stele.wal.files import BackgroundSync, Files, Loop, OsFiles
from stele.wal.format import Kind, Record
from stele.wal.keeper import Keeper
from stele.wal.loop_writer import LoopWriter
from stele.wal.metadata import Metadata, write_metadata
from stele.wal.options import LogOptions, SyncMode
from stele.wal.recovery import recover
from stele.wal.report import Collected, LogStats, Pin, RecoveryReport
from stele.wal.state import State
from stele.wal.stream import StreamLog

_log = structlog.get_logger("stele.wal")


class Log:
    """A node's log. Made by `Log.open`; every method may be called from any thread.

    `shared`: what all parts of the log share. Its owner reads the properties below; tests look inside."""

    def __init__(self, shared: SharedLog) -> None:
        self.shared = shared
        self._appender: Appender | None = None
        self._keeper: Keeper | None = None
        self._loop_writer: LoopWriter | None = None
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
        """Recover the log in `directory`, or create one. Blocks. All that it has read is durable when it
        returns.

        `dispatch` receives the callbacks of one sync, in the appender's thread (see `attach`). `on_failure`
        is dispatched once, if a write or sync fails. Without `threads` the log writes only within `turn`,
        `collect` and `close`: for owners that control time themselves, such as a simulator.

        Raises:
            Rejected: bad options; UNSUPPORTED_VERSION; WRONG_NODE, the files belong to another node.
            Corrupt: damage that concerns more than single streams.
            OSError: the disk failed.
        """
        options.check()
        shared = SharedLog(directory, options, node_id, dispatch, files if files is not None else OsFiles())
        shared.on_failure = on_failure
        active, chain = recover(shared)
        shared.refresh_space()
        shared.continue_in(active.sequence)
        log = cls(shared)
        log._threads = threads
        log._appender = Appender(shared, active, chain)
        if threads:
            log._appender.start()
        if threads and options.prepare:
            log._keeper = Keeper(shared)
            shared.wake_keeper = log._keeper.wake
            log._keeper.start()
        return log

    def attach(
        self,
        loop: Loop,
        background: BackgroundSync | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve the event loop of the calling thread. Call once. `dispatch` must run callbacks there in their
        order.

        What one turn of the loop appends is then written and synced together, for all streams. The appender's
        thread does not compete for the interpreter meanwhile. With `background`, which the log then owns, the
        loop's thread writes small batches itself and runs their callbacks without `dispatch` (see
        `stele.wal.loop_writer`). This applies only to sync mode `always`. `clock`: monotonic seconds, to see
        how long a write held the loop.
        """
        assert self._appender is not None
        if background is not None and self.shared.options.sync is SyncMode.ALWAYS:
            self._loop_writer = LoopWriter(self.shared, self._appender, loop, background, clock)
        elif background is not None:
            background.close()
        with self.shared.lock:
            self.shared.append_queue.attach(loop, self._loop_writer)

    # --- what its owner reads

    @property
    def directory(self) -> Path:
        """Where the log is."""
        return self.shared.directory

    @property
    def options(self) -> LogOptions:
        """Its settings."""
        return self.shared.options

    @property
    def recovery(self) -> RecoveryReport:
        """What `open` found."""
        return self.shared.recovery

    @property
    def stats(self) -> LogStats:
        """Counters since the log was opened."""
        return self.shared.stats

    @property
    def failed(self) -> Exception | None:
        """The error after which nothing more is acknowledged; None while there is none."""
        return self.shared.failed

    @property
    def under_way(self) -> tuple[int, int] | None:
        """See SharedLog.under_way."""
        return self.shared.under_way

    @property
    def low_space(self) -> bool:
        """Whether the volume has so little space that the owner must accept no more writes."""
        return self.shared.low_space

    @property
    def free_files(self) -> int | None:
        """How many more files the volume could hold when it was last looked at; None if only bytes limit it."""
        return self.shared.free_files

    @property
    def anchor_bytes_max(self) -> int:
        """How much of the log one anchor may hold, on a volume of this size."""
        return self.shared.anchor_bytes_max

    def room_bytes(self) -> int:
        """How many more bytes fit on the volume without using the space that is reserved for the log. Blocks."""
        shared = self.shared
        return max(0, shared.files.free_bytes(shared.directory) - shared.options.low_space_bytes)

    def refresh_space(self) -> None:
        """Read the free space of the volume."""
        self.shared.refresh_space()

    # --- streams

    def create_stream(
        self, key: StreamKey, start: OpId, config: Configuration, done: Done | None = None
    ) -> StreamLog:
        """Create a stream whose entries begin after `start`, with `config` in force there.

        A stream that exists but never held an entry or a vote is created again. So a copy that crashed can be
        repeated.

        Raises:
            Rejected: ALREADY_PRESENT, also for a tombstone, because a replica_id is never used again.
        """
        with self.shared.lock:
            old = self.shared.states.get(key)
            if old is not None and (old.tombstoned or not old.untouched):
                what = "was removed" if old.tombstoned else "exists already"
                raise Rejected(f"log stream {key} {what}; use a new replica_id", code=Code.ALREADY_PRESENT)
            self.shared.admit_control()
            blob = encode_configuration(config)
            state = State(key, start, blob, self.shared.active_sequence)
            self.shared.states[key] = state
            record = Record(Kind.CREATE, 0, *state.raw, start.term, start.index, 0, blob)
            self.shared.append_queue.push((state, None, record, done), RECORD_COST_BYTES + len(blob))
            return StreamLog(self.shared, state)

    def stream(self, key: StreamKey) -> StreamLog:
        """The stream with that key. Includes tombstones.

        Raises:
            Rejected: NOT_FOUND.
        """
        state = self.shared.states.get(key)
        if state is None:
            raise Rejected(f"log stream {key} does not exist; create it first", code=Code.NOT_FOUND)
        return StreamLog(self.shared, state)

    def tombstone(self, key: StreamKey, done: Done | None = None) -> None:
        """Mark the replica as removed. Its entries go; term, vote and last OpId stay for ever. May be
        repeated."""
        with self.shared.lock:
            state = self._state(key)
            self.shared.admit_control()
            if state.failed is not None:
                state.damaged, state.failed = True, None
            state.bury()
            self._push_record(state, Kind.TOMBSTONE, done)

    def forget(self, key: StreamKey, done: Done | None = None) -> None:
        """Remove the whole stream, because its tablet is DELETED. Its key must never be used again."""
        with self.shared.lock:
            state = self._state(key)
            self.shared.admit_control()
            state.bury()
            state.failed = "the stream was deleted"
            del self.shared.states[key]
            self._push_record(state, Kind.FORGET, done)

    def sync(self, done: Done) -> None:
        """Call `done` once everything appended so far survives power loss. Holds in every sync mode."""
        with self.shared.lock:
            self.shared.admit_control()
            self.shared.append_queue.push((None, None, None, done), 0)

    def turn(self) -> None:
        """Write, sync and dispatch what is queued. Only for a log opened without threads."""
        assert self._appender is not None
        self._appender.turn()

    # --- space

    @property
    def synced_place(self) -> int:
        """The place (see `stele.wal.state.place`) up to which the log survives power loss. It only rises.

        The next open finds the log's end there or later (`recovery.found`). An earlier end means that the
        directory was replaced by an older copy."""
        assert self._appender is not None
        return self._appender.synced_place

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of all segments, without prepared ones."""
        with self.shared.lock:
            return sum(s.length for s in self.shared.segments.values()) + self.shared.active_length

    def pins(self, of: Iterable[StreamKey] | None = None, *, above_bytes: int = 0) -> list[Pin]:
        """Return the unflushed stores that keep at least one closed segment from collection.

        Each keeps more than `above_bytes` of the log. The one that keeps most comes first. `of`: the streams to
        look at; None: all.
        """
        with self.shared.lock:
            found = []
            active = self.shared.active_length
            held_from = bytes_from_each(self.shared)
            if active + max(held_from.values(), default=0) <= above_bytes:
                return []
            for key in self.shared.states if of is None else of:
                state = self.shared.states.get(key)
                if state is None or state.needs_nothing:
                    continue
                at = state.extents.find(state.flushed + 1)
                if at is not None:
                    found.append((state.key, state.flushed + 1, held_from[state.extents[at].sequence]))
        pins = [
            Pin(key, index, held + active)
            for key, index, held in found
            if held and held + active > above_bytes
        ]
        return sorted(pins, key=lambda p: (-p.bytes, p.key))

    def collect(self) -> Collected:
        """Remove closed segments that nobody needs. Blocks: call it in a thread.

        A file that cannot be removed now (no file descriptor is left, for example) is tried again the next
        time.

        Raises:
            Corrupt: the log has failed.
            OSError: the metadata could not be written, or a segment set aside could not be removed. No other
                segment was removed.
        """
        with self._collecting:
            return collect(self.shared, self.checkpoint)

    def close(self) -> None:
        """Write and sync the queue, close the segment, write the metadata. Blocks. Never raises for a failed
        log."""
        with self.shared.lock:
            if self.shared.append_queue.closing:
                return
            self.shared.append_queue.closing = True
            self.shared.append_queue.wake.notify()
        if self._keeper is not None:
            self._keeper.stop()
        assert self._appender is not None
        self._appender.join()
        if self._loop_writer is not None:
            self._loop_writer.close()
        ready = self.shared.take_prepared()
        if ready is not None:
            ready.file.close()
        if self.shared.failed is not None:
            return
        try:
            # Wait for a collection under way: this metadata must not name segments that the collection then
            # removes.
            with self._collecting:
                saved = tuple(s.saved() for s in self.shared.states.values())
                position = self._appender.active.position
                write_metadata(
                    self.shared.files,
                    self.shared.directory,
                    Metadata(
                        self.shared.node_id,
                        self.shared.first_sequence,
                        self.shared.collected_id,
                        position,
                        saved,
                    ),
                )
        except OSError as exc:
            _log.warning("cannot write the metadata at close; the log itself is complete", error=str(exc))

    def _push_record(self, state: State, kind: Kind, done: Done | None) -> None:
        self.shared.append_queue.push(
            (state, None, Record(kind, 0, *state.raw, 0, 0, 0, b""), done), RECORD_COST_BYTES
        )

    def _state(self, key: StreamKey) -> State:
        state = self.shared.states.get(key)
        if state is None:
            raise Rejected(f"log stream {key} does not exist; create it first", code=Code.NOT_FOUND)
        return state

    def checkpoint(self) -> Checkpoint:
        """The streams' states at a synced place of the log. Blocks.

        Raises:
            Corrupt: the log has failed.
        """
        checkpoint = Checkpoint()
        with self.shared.lock:
            self.shared.admit_control()
            self.shared.append_queue.push((None, None, checkpoint, None), 0)
            self.shared.append_queue.for_thread = True
        if not self._threads:
            self.turn()
        while not checkpoint.ready.wait(0.05):
            if self.shared.failed is not None:
                raise Corrupt(
                    f"log {self.shared.directory} has failed: {self.shared.failed}; restart the node",
                    code=Code.IO_ERROR,
                ) from self.shared.failed
        return checkpoint
