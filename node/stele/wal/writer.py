"""Whose hands the appender's state is in: a value that log.py keeps under its lock. Imports only the model.

The active segment, the chain of groups and what is staged belong to whoever is the writer, and to nobody else.
Invariant: the writer changes only as `PASSES` says; who is not the writer does not touch the appender.
"""

from __future__ import annotations

from enum import IntEnum


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
        (
            Writer.NOBODY,
            Writer.THREAD,
        ),  # woken: a large batch, another thread's append, a sync that is due, the end
        (Writer.NOBODY, Writer.LOOP),  # a small batch, or the marker
        (Writer.THREAD, Writer.NOBODY),  # the queue is empty
        (Writer.LOOP, Writer.NOBODY),  # all is synced
        (Writer.LOOP, Writer.KERNEL),  # the sync has begun
        (Writer.LOOP, Writer.THREAD),  # the sync could not be begun; or the log is closing
        (Writer.KERNEL, Writer.LOOP),  # the loop was told of its end
        (Writer.KERNEL, Writer.THREAD),  # the log is closing, and the loop may never run again
    )
)
