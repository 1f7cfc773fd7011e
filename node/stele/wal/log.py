"""The node's log: how it is opened, attached, asked for streams, collected and closed. The package's front door.

Threads: callers (any), the appender (writes and syncs), the event loop's (small batches), the keeper (prepares segments).
What they share is base.py, and guarded by one lock. Invariant: the order in which calls took the lock is the
order on disk; only who is the writer (append_queue.py) touches the appender.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from stele.model.config import Configuration, encode_configuration
from stele.model.errors import Code, Corrupt, Rejected
from stele.model.ids import NodeId, OpId, StreamKey
from stele.wal.append_queue import RECORD_COST_BYTES, Checkpoint, Done
from stele.wal.appender import Appender
from stele.wal.base import Dispatch, LogBase
from stele.wal.collect import bytes_from_each, collect
from stele.wal.files import BackgroundSync, Files, Loop, OsFiles
from stele.wal.format import Kind, Record
from stele.wal.keeper import Keeper
from stele.wal.loop_writer import LoopWriter
from stele.wal.metadata import Metadata, write_metadata
from stele.wal.options import LogOptions, SyncMode
from stele.wal.recovery import recover
from stele.wal.report import Collected, Pin
from stele.wal.state import State
from stele.wal.stream import StreamLog

_log = structlog.get_logger("stele.wal")


class Log(LogBase):
    """One log. Made by `Log.open`; every method may be called from any thread."""

    def __init__(
        self, directory: Path, options: LogOptions, node_id: NodeId, dispatch: Dispatch, files: Files
    ) -> None:
        super().__init__(directory, options, node_id, dispatch, files)
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
        """Recover the log in `directory`, or begin one. Blocks; what it read is durable when it returns.

        `dispatch` gets the callbacks of one sync, in the appender's thread (see `attach`). `on_failure` is dispatched once if a
        write or sync fails. Without `threads` the log writes only within `turn`, `collect` and `close`: for owners
        that drive time themselves.

        Raises:
            Rejected: bad options; UNSUPPORTED_VERSION; WRONG_NODE, the files belong to another node.
            Corrupt: damage that no single stream can be blamed for.
            OSError: the disk.
        """
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
            log.wake_keeper = log._keeper.wake
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
        log's, small batches are written by the loop's thread itself (see `stele.wal.loop_writer`), which then runs their
        callbacks without `dispatch`. Only in sync mode `always`: in the others little waits for a sync. `clock`: seconds
        that only rise, to see how long the loop was held.
        """
        assert self._appender is not None
        if background is not None and self.options.sync is SyncMode.ALWAYS:
            self._loop_writer = LoopWriter(self, self._appender, loop, background, clock)
        elif background is not None:
            background.close()
        with self.lock:
            self.append_queue.attach(loop, self._loop_writer)

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
            self.append_queue.push((state, None, record, done), RECORD_COST_BYTES + len(blob))
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
            self.append_queue.push((None, None, None, done), 0)

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
                at = None if state.needs_nothing else state.extents.find(state.flushed + 1)
                if at is not None:
                    found.append((state.key, state.flushed + 1, held_from[state.extents[at].sequence]))
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
            return collect(self, self.checkpoint)

    def close(self) -> None:
        """Write and sync what is queued, close the segment, write the metadata. Blocks. Never raises for a failed log."""
        with self.lock:
            if self.append_queue.closing:
                return
            self.append_queue.closing = True
            self.append_queue.wake.notify()
        if self._keeper is not None:
            self._keeper.stop()
        assert self._appender is not None
        self._appender.join()
        if self._loop_writer is not None:
            self._loop_writer.close()
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

    def _push_record(self, state: State, kind: Kind, done: Done | None) -> None:
        self.append_queue.push(
            (state, None, Record(kind, 0, *state.raw, 0, 0, 0, b""), done), RECORD_COST_BYTES
        )

    def _state(self, key: StreamKey) -> State:
        state = self.states.get(key)
        if state is None:
            raise Rejected(f"log stream {key} is not here", code=Code.NOT_FOUND)
        return state

    def checkpoint(self) -> Checkpoint:
        """The streams' states at a synced place of the log. Blocks.

        Raises:
            Corrupt: the log has failed.
        """
        checkpoint = Checkpoint()
        with self.lock:
            self.admit_control()
            self.append_queue.push((None, None, checkpoint, None), 0)
            self.append_queue.for_thread = True
        if not self._threads:
            self.turn()
        while not checkpoint.ready.wait(0.05):
            if self.failed is not None:
                raise Corrupt(
                    f"log {self.directory} has failed: {self.failed}", code=Code.IO_ERROR
                ) from self.failed
        return checkpoint
