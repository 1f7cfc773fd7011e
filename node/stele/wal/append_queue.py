"""The queue of appends, and which thread may write. Owned by base.py; call every method with the log's lock
held.

The active segment, the chain of groups and what is staged belong to the current writer alone. Does no I/O.
Invariant: the writer changes only as `PASSES` allows; only the writer touches the appender. If something is
queued and nobody is the writer, the event loop has been asked to call `_end_of_turn`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol

from stele.model.entry import Entry
from stele.model.errors import ensure
from stele.wal.files import Loop
from stele.wal.format import Record
from stele.wal.metadata import Position
from stele.wal.state import Saved, State

RECORD_COST_BYTES = 56
"""Bytes that each record counts in the queue beside its payload."""
Done = Callable[[], None]


class Checkpoint:
    """Asks the appender for all streams' states at one place of the log. Filled when `ready` is set."""

    __slots__ = ("position", "ready", "saved")

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.saved: tuple[Saved, ...] = ()
        self.position: Position | None = None


class Written:
    """Asks the writer to run `done` once all that was queued before is written to the file, before its sync."""

    __slots__ = ("done",)

    def __init__(self, done: Done) -> None:
        self.done = done


class Rewritten:
    """Marks entries that are written to the log a second time. The cache already counts those that are in
    memory."""

    __slots__ = ()


REWRITTEN = Rewritten()


Item = tuple[
    State | None, Sequence[Entry] | None, Record | Checkpoint | Written | Rewritten | None, Done | None
]
"""(stream, entries, record, done). With a stream: its entries, or one record. Entries may be marked REWRITTEN.
Without a stream: a Checkpoint, a Written, or just the callback `done`."""


class SmallBatchWriter(Protocol):
    """Writes small batches in the event loop's thread."""

    def takes(self) -> bool:
        """Whether the loop's thread may write all that is queued. Call with the lock held, when nobody is the
        writer."""

    def begin(self, items: list[Item]) -> None:
        """Write a batch and begin its sync. The writer is the loop's thread."""

    def settle(self) -> list[Done]:
        """End the batch that was begun: wait for its sync, or sync it if none is under way. Called in the
        appender's thread.

        Returns the batch's callbacks."""


class Writer(IntEnum):
    """Who may write now."""

    NOBODY = 0
    """Nothing is under way. Whoever has work and holds the log's lock may become the writer."""
    THREAD = 1
    """The appender's thread, or the caller of `Log.turn`."""
    LOOP = 2
    """The event loop's thread, within one of its callbacks."""
    KERNEL = 3
    """A sync that the loop began is under way. The next writer must take its result first."""


PASSES = frozenset(
    (
        # The thread was woken: a large batch, an append by another thread, a sync that is due, or the close.
        (Writer.NOBODY, Writer.THREAD),
        # There is a small batch, or a marker is to be written.
        (Writer.NOBODY, Writer.LOOP),
        # The queue is empty, or the loop takes over the rest.
        (Writer.THREAD, Writer.NOBODY),
        # The marker is written.
        (Writer.LOOP, Writer.NOBODY),
        # The sync has begun.
        (Writer.LOOP, Writer.KERNEL),
        # The sync could not begin, or the log is closing.
        (Writer.LOOP, Writer.THREAD),
        # The loop heard that the sync ended, and took its result.
        (Writer.KERNEL, Writer.NOBODY),
        # The log is closing: the loop may never run again, or it already took the result.
        (Writer.KERNEL, Writer.THREAD),
    )
)


class AppendQueue:
    """The queue between the callers, the appender's thread and the event loop."""

    def __init__(self, lock: threading.Lock) -> None:
        self.items: list[Item] = []
        self.queued_bytes = 0
        self.for_thread = False
        """Whether a checkpoint is queued. The event loop may not take it, because it looks at every stream."""
        self.writer = Writer.NOBODY
        self.closing = False
        self.wake = threading.Condition(lock)
        """Only the appender's thread waits here."""
        self._lock = lock
        self._loop: Loop | None = None
        self._loop_writer: SmallBatchWriter | None = None
        self._owner = 0
        self._deferred = False

    def attach(self, loop: Loop, inline: SmallBatchWriter | None) -> None:
        """Serve the loop of the calling thread: write the appends of this thread at the end of each turn."""
        self._loop, self._loop_writer, self._owner = loop, inline, threading.get_ident()

    def push(self, item: Item, size: int) -> None:
        """Queue an item and wake whoever will write it."""
        self.items.append(item)
        self.queued_bytes += size
        if self.writer is Writer.NOBODY and not self._deferred:
            if self._loop is not None and threading.get_ident() == self._owner:
                self._deferred = True
                self._loop.call_soon(self._end_of_turn)
            else:
                self._wake_thread()

    def take(self) -> list[Item]:
        """Take all that is queued. Only for the writer."""
        items, self.items = self.items, []
        self.queued_bytes = 0
        self.for_thread = False
        return items

    def pass_writer(self, old: Writer, new: Writer) -> None:
        """Change the writer from `old` to `new`.

        Raises:
            InvariantViolation: `old` is not the writer, or `PASSES` does not allow this change.
        """
        if self.writer is not old or (old, new) not in PASSES:
            ensure(False, f"log: the writer is {self.writer!r}, it cannot go from {old!r} to {new!r}")
        self.writer = new
        if old is not Writer.NOBODY and (new is Writer.THREAD or self.closing):
            self.wake.notify()

    def loop_rests(self, old: Writer) -> None:
        """Let the loop stop being the writer: it has nothing left to write, and has taken its sync's result."""
        if self.closing:
            self.pass_writer(old, Writer.THREAD)
            return
        self.pass_writer(old, Writer.NOBODY)
        if self.items and not self._deferred:
            # Not at once: the callbacks that run now append too. So one sync serves all of them.
            assert self._loop is not None
            self._deferred = True
            self._loop.call_soon(self._end_of_turn)

    def give_to_loop(self) -> bool:
        """Let the appender's thread stop being the writer, if the loop may write all that is queued. Returns
        whether it stopped."""
        if self._loop_writer is None or self._loop is None or self.closing or not self._loop_writer.takes():
            return False
        try:
            # Scheduled after what was dispatched, so that callbacks keep their order.
            self._loop.call_soon_threadsafe(self._end_of_turn)
        except RuntimeError:  # the loop has closed
            return False
        self._deferred = True
        self.pass_writer(Writer.THREAD, Writer.NOBODY)
        return True

    def _end_of_turn(self) -> None:
        """Let the loop write what is queued, or wake the thread for it. Called by the loop, which does not hold
        the lock."""
        with self._lock:
            self._deferred = False
            if not self.items or self.writer is not Writer.NOBODY:
                return
            if self._loop_writer is None or self.closing or not self._loop_writer.takes():
                self._wake_thread()
                return
            self.pass_writer(Writer.NOBODY, Writer.LOOP)
            items = self.take()
        self._loop_writer.begin(items)

    def _wake_thread(self) -> None:
        self.pass_writer(Writer.NOBODY, Writer.THREAD)
        self.wake.notify()
