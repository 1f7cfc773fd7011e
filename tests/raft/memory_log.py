"""A log that forgets what was not synced. Stands at the log port; the contract suite holds it to that.

Invariant: `durable` is the fold of a prefix of all operations; a crash keeps it and a drawn number of those after it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import zip_longest

from stele.model.config import Configuration, decode_configuration
from stele.model.entry import Entry, EntryKind
from stele.model.ids import OPID_NONE, OpId, ReplicaId
from stele.raft.ports import (
    Done,
    EntryRecord,
    LogRecord,
    PromoteRecord,
    SkippedRecord,
    SnapshotRecord,
    TermRecord,
    VoteRecord,
)


class _Image:
    """What a log holds after some number of operations."""

    __slots__ = ("config", "entries", "hard", "start")

    def __init__(self) -> None:
        self.hard: TermRecord | VoteRecord | PromoteRecord = TermRecord(0)
        self.start: OpId = OPID_NONE
        self.config: Configuration | None = None
        self.entries: list[Entry] = []

    def copy(self) -> _Image:
        other = _Image()
        other.hard, other.start, other.config = self.hard, self.start, self.config
        other.entries = list(self.entries)
        return other

    def cut(self, from_index: int) -> None:
        del self.entries[max(from_index - self.start.index - 1, 0) :]

    def put(self, entry: Entry) -> None:
        self.cut(entry.index)
        self.entries.append(entry)

    def snapshot(self, opid: OpId, config: Configuration) -> None:
        if self.config is not None and opid.index <= self.start.index:
            return
        at = opid.index - self.start.index - 1
        meets = 0 <= at < len(self.entries) and self.entries[at].term == opid.term
        self.entries = self.entries[at + 1 :] if meets else []
        self.start, self.config = opid, config


_Operation = Callable[[_Image], None]


class MemoryLog:
    """One replica's log, in memory."""

    def __init__(self) -> None:
        self._durable = _Image()
        self._pending: list[tuple[_Operation, Done | None]] = []
        self.synced = 0
        """How many operations are durable."""

    # The port

    def append_term(self, term: int, done: Done | None = None) -> None:
        self._push(lambda image: setattr(image, "hard", TermRecord(term)), done)

    def append_vote(self, term: int, voted_for: ReplicaId, done: Done | None = None) -> None:
        self._push(lambda image: setattr(image, "hard", VoteRecord(term, voted_for)), done)

    def append_promote(self, term: int, leader: ReplicaId, done: Done | None = None) -> None:
        self._push(lambda image: setattr(image, "hard", PromoteRecord(term, leader)), done)

    def append_entries(self, entries: tuple[Entry, ...], done: Done | None = None) -> None:
        for at, entry in enumerate(entries):
            last = at == len(entries) - 1
            self._push(lambda image, entry=entry: image.put(entry), done if last else None)  # type: ignore[misc]

    def pop_entries(self, from_index: int, done: Done | None = None) -> None:
        self._push(lambda image: image.cut(from_index), done)

    def when_written(self, done: Done) -> None:
        self._push(lambda image: None, done)  # it writes and syncs at once

    def begin_snapshot(self, opid: OpId, done: Done | None = None) -> None:
        self._push(lambda image: None, done)

    def end_snapshot(self, opid: OpId, config: Configuration, done: Done | None = None) -> None:
        self._push(lambda image: image.snapshot(opid, config), done)

    def load(self, above: int = 0) -> Iterator[LogRecord]:
        image = self._current()
        if image.config is not None:
            yield SnapshotRecord(image.start, image.config)
        yield image.hard
        skipped = [entry for entry in image.entries if entry.index <= above]
        if skipped:
            yield SkippedRecord(
                tuple(
                    one.opid
                    for one, after in zip_longest(skipped, skipped[1:])
                    if after is None or after.term != one.term
                ),
                tuple(
                    (e.index, decode_configuration(e.payload)) for e in skipped if e.kind is EntryKind.CONFIG
                ),
            )
        for entry in image.entries[len(skipped) :]:
            yield EntryRecord(entry)

    # The disk

    @property
    def pending(self) -> int:
        """How many operations wait to be synced."""
        return len(self._pending)

    @property
    def hard(self) -> TermRecord | VoteRecord | PromoteRecord:
        """The durable hard state."""
        return self._durable.hard

    @property
    def start(self) -> OpId:
        """Where the durable log begins."""
        return self._durable.start

    def entry(self, index: int) -> Entry | None:
        """The durable entry at `index`."""
        at = index - self._durable.start.index - 1
        return self._durable.entries[at] if 0 <= at < len(self._durable.entries) else None

    def sync(self, count: int) -> None:
        """The first `count` pending operations are durable now."""
        ready, self._pending = self._pending[:count], self._pending[count:]
        for operation, _ in ready:
            operation(self._durable)
        self.synced += len(ready)
        for _, done in ready:
            if done is not None:
                done()

    def crash(self, rng: random.Random) -> None:
        """Lose what was not synced, but for a drawn number of operations that reached the disk all the same."""
        kept = rng.randint(0, len(self._pending)) if rng.random() < 0.5 else 0
        for operation, _ in self._pending[:kept]:
            operation(self._durable)
        self._pending = []

    def _push(self, operation: _Operation, done: Done | None) -> None:
        self._pending.append((operation, done))

    def _current(self) -> _Image:
        image = self._durable.copy()
        for operation, _ in self._pending:
            operation(image)
        return image
