"""The queue, and whose hands the appender is in. Owned by base.py, guarded by its lock: every method is called with it held.

The active segment, the chain of groups and what is staged belong to whoever is the writer, and to nobody else.
Does no I/O. Invariant: the writer changes only as `PASSES` says; who is not the writer does not touch the appender; where
something is queued and nobody is the writer, somebody has been told.
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
"""Of the queue, for each record beside its payload."""
Done = Callable[[], None]


class Checkpoint:
    """Asks the appender what the streams' states are at a place of the log. Filled when `ready` is set."""

    __slots__ = ("position", "ready", "saved")

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.saved: tuple[Saved, ...] = ()
        self.position: Position | None = None


class Again(tuple[Entry, ...]):
    """Entries that stood in the log before: of those that are in memory the cache has heard."""

    __slots__ = ()


Item = tuple[State | None, Sequence[Entry] | None, Record | Checkpoint | None, Done | None]
"""(stream, entries, record, done): entries or one record; without a stream a checkpoint or a bare callback."""


class SmallBatchWriter(Protocol):
    """Who writes small batches in the event loop's thread."""

    def takes(self) -> bool:
        """Whether all that is queued may be written there. Called with the lock held, by who may take the writer."""

    def begin(self, items: list[Item]) -> None:
        """Write a batch and begin its sync. The loop's thread is the writer."""

    def settle(self) -> list[Done]:
        """End the batch that was begun, in the appender's thread: wait for its sync, or do it. Its callbacks."""


class Writer(IntEnum):
    """Who may write."""

    NOBODY = 0
    """Nothing is under way. Whoever has work, and the log's lock, may take it."""
    THREAD = 1
    """The appender's thread, or the caller of `Log.turn`."""
    LOOP = 2
    """The event loop's thread, within one of its callbacks."""
    KERNEL = 3
    """A sync that the loop began is under way. Who takes the writer next must take its result first."""


PASSES = frozenset(
    (
        # Woken: a large batch, another thread's append, a sync that is due, the end.
        (Writer.NOBODY, Writer.THREAD),
        # A small batch, or the marker.
        (Writer.NOBODY, Writer.LOOP),
        # The queue is empty, or what is left is given to the loop.
        (Writer.THREAD, Writer.NOBODY),
        # The marker is written.
        (Writer.LOOP, Writer.NOBODY),
        # The sync has begun.
        (Writer.LOOP, Writer.KERNEL),
        # The sync could not be begun; or the log is closing.
        (Writer.LOOP, Writer.THREAD),
        # The loop was told of its end, and took the result.
        (Writer.KERNEL, Writer.NOBODY),
        # The log is closing: the loop may never run again, or took the result.
        (Writer.KERNEL, Writer.THREAD),
    )
)


class AppendQueue:
    """Between those who append, the appender's thread and the event loop."""

    def __init__(self, lock: threading.Lock) -> None:
        self.items: list[Item] = []
        self.queued_bytes = 0
        self.for_thread = False
        """Whether something is queued that the event loop must not do: a checkpoint looks at every stream."""
        self.writer = Writer.NOBODY
        self.closing = False
        self.wake = threading.Condition(lock)
        """The appender's thread waits here, and nobody else."""
        self._lock = lock
        self._loop: Loop | None = None
        self._loop_writer: SmallBatchWriter | None = None
        self._owner = 0
        self._deferred = False

    def attach(self, loop: Loop, inline: SmallBatchWriter | None) -> None:
        """Appends of this thread, which is the loop's, wait for the end of the loop's turn."""
        self._loop, self._loop_writer, self._owner = loop, inline, threading.get_ident()

    def push(self, item: Item, size: int) -> None:
        """Put something behind all else; tell who will write it."""
        self.items.append(item)
        self.queued_bytes += size
        if self.writer is Writer.NOBODY and not self._deferred:
            if self._loop is not None and threading.get_ident() == self._owner:
                self._deferred = True
                self._loop.call_soon(self._end_of_turn)
            else:
                self._wake_thread()

    def take(self) -> list[Item]:
        """All that is queued, for the writer."""
        items, self.items = self.items, []
        self.queued_bytes = 0
        self.for_thread = False
        return items

    def pass_writer(self, old: Writer, new: Writer) -> None:
        """The appender changes hands.

        Raises:
            InvariantViolation: it is not in the hands of `old`, or must not go from them to `new`.
        """
        if self.writer is not old or (old, new) not in PASSES:
            ensure(False, f"log: the writer, {self.writer!r}, is passed from {old!r} to {new!r}")
        self.writer = new
        if old is not Writer.NOBODY and (new is Writer.THREAD or self.closing):
            self.wake.notify()

    def loop_rests(self, old: Writer) -> None:
        """The loop has done all that was to be done, and took the kernel's result: nothing of its own is under way."""
        if self.closing:
            self.pass_writer(old, Writer.THREAD)
            return
        self.pass_writer(old, Writer.NOBODY)
        if self.items and not self._deferred:
            # Not at once: the callbacks that run now append too, and one sync serves all.
            assert self._loop is not None
            self._deferred = True
            self._loop.call_soon(self._end_of_turn)

    def give_to_loop(self) -> bool:
        """The appender's thread, which is the writer, lets the loop go on if what is queued is small. Whether it did."""
        if self._loop_writer is None or self._loop is None or self.closing or not self._loop_writer.takes():
            return False
        try:
            # Behind what was dispatched: so callbacks keep their order.
            self._loop.call_soon_threadsafe(self._end_of_turn)
        except RuntimeError:  # the loop has closed
            return False
        self._deferred = True
        self.pass_writer(Writer.THREAD, Writer.NOBODY)
        return True

    def _end_of_turn(self) -> None:
        """In the loop's thread, without the lock."""
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
