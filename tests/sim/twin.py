"""A simple model of one stream of a log: the calls on it, and how many of them were reported durable.

Stands between a replica and its StreamLog, passes every call on, and changes nothing. Invariant: `durable` is
the result of all calls whose `done` came. After a crash the stream must hold that, or that and a prefix of
the later calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from stele.model.entry import Entry
from stele.model.errors import ensure
from stele.model.ids import OPID_NONE, OpId, ReplicaId
from stele.raft.effects import HardState
from stele.raft.ports import Done, LoadedLog

if TYPE_CHECKING:
    from stele.wal import StreamLog


class Image:
    """The content of a stream after some number of calls."""

    __slots__ = ("entries", "hard", "start")

    def __init__(self, start: OpId = OPID_NONE) -> None:
        self.hard = HardState(0, None)
        self.start = start
        self.entries: list[Entry] = []

    def copy(self) -> Image:
        other = Image(self.start)
        other.hard, other.entries = self.hard, list(self.entries)
        return other

    def raise_term(self, term: int, voted_for: ReplicaId | None) -> None:
        if term > self.hard.term or (term == self.hard.term and voted_for is not None):
            self.hard = HardState(term, voted_for)

    def cut(self, from_index: int) -> None:
        del self.entries[max(from_index - self.start.index - 1, 0) :]

    def put(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self.cut(entry.index)
            self.entries.append(entry)

    def opid_at(self, index: int) -> OpId | None:
        """The entry at `index`, or the start; None if neither is there."""
        at = index - self.start.index - 1
        if at == -1:
            return self.start
        return self.entries[at].opid if 0 <= at < len(self.entries) else None

    @property
    def last(self) -> OpId:
        """The last entry, or the start."""
        return self.entries[-1].opid if self.entries else self.start

    def shows(self, loaded: LoadedLog) -> bool:
        """Whether a stream that loaded this holds the same. It may begin later, where entries were
        collected."""
        start = loaded.start
        if loaded.hard_state != self.hard or self.opid_at(start.index) != start:
            return False
        return list(loaded.entries) == self.entries[start.index - self.start.index :]

    def __str__(self) -> str:
        return f"term {self.hard.term}, vote {self.hard.voted_for}, {self.start} to {self.last}"


class Twin:
    """The twin of one stream, over all lives of its node."""

    def __init__(self, start: OpId) -> None:
        self.durable = Image(start)
        self._pending: deque[tuple[int, Callable[[Image], None]]] = deque()
        self._asked = 0
        self._written = 0
        self.calls = 0

    def pushed(self, change: Callable[[Image], None]) -> None:
        """A call was accepted; it takes effect after all earlier ones."""
        self._asked += 1
        self._pending.append((self._asked, change))
        self.calls += 1

    def done(self, number: int) -> None:
        """The log reports that this call, and all before it, survive power loss."""
        ensure(bool(self._pending) and self._pending[0][0] <= number, f"the log reports call {number} twice")
        while self._pending and self._pending[0][0] <= number:
            self._pending.popleft()[1](self.durable)

    def written(self, number: int) -> None:
        """The log reports that this call, and all before it, survive the end of the process."""
        self._written = max(self._written, number)

    @property
    def asked(self) -> int:
        """How many calls were accepted."""
        return self._asked

    def begins_later(self, start: OpId) -> None:
        """The log has dropped entries that are flushed."""
        image = self.durable
        if start.index > image.start.index and image.opid_at(start.index) == start:
            image.entries = image.entries[start.index - image.start.index :]
            image.start = start

    def compare(self, what: str, loaded: LoadedLog, *, power_lost: bool = True) -> list[OpId]:
        """A start found this content. Returns the entries that were in the log before, and that the power loss took.

        Raises:
            InvariantViolation: it is neither what was durable, nor that and a prefix of the calls under way. Or it lacks a call
                that was reported as written, and only the process had ended.
        """
        image = self.durable.copy()
        calls = list(self._pending)
        self._pending.clear()
        before = image.copy()
        for _, change in calls:
            change(before)
        for number, change in calls:
            if image.shows(loaded) and (power_lost or number > self._written):
                break
            change(image)
        ensure(
            image.shows(loaded),
            f"{what} begins with term {loaded.hard_state.term}, vote {loaded.hard_state.voted_for}, "
            f"{loaded.start} to "
            f"{loaded.last}; durable was {self.durable}, with {len(calls)} calls under way, written up to {self._written}",
        )
        self.durable = image
        self.begins_later(loaded.start)
        kept = {entry.opid for entry in image.entries}
        return [entry.opid for entry in before.entries if entry.opid not in kept]


class WatchedStream:
    """A StreamLog that reports each call to its twin. `voted`: called when a vote has become durable."""

    def __init__(self, inner: StreamLog, twin: Twin, voted: Callable[[ReplicaId], None]) -> None:
        self._inner = inner
        self._twin = twin
        self._voted = voted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _call(
        self,
        call: Callable[..., None],
        arguments: tuple[Any, ...],
        change: Callable[[Image], None],
        done: Done | None,
    ) -> None:
        twin = self._twin
        number = twin.asked + 1

        def told() -> None:
            twin.done(number)
            if done is not None:
                done()

        call(*arguments, told)
        twin.pushed(change)

    def append_term(self, term: int, done: Done | None = None) -> None:
        self._call(self._inner.append_term, (term,), lambda image: image.raise_term(term, None), done)

    def append_vote(self, term: int, voted_for: ReplicaId, done: Done | None = None) -> None:
        def told() -> None:
            self._voted(voted_for)
            if done is not None:
                done()

        self._call(
            self._inner.append_vote, (term, voted_for), lambda image: image.raise_term(term, voted_for), told
        )

    def append_promote(self, term: int, leader: ReplicaId, done: Done | None = None) -> None:
        self._call(
            self._inner.append_promote, (term, leader), lambda image: image.raise_term(term, leader), done
        )

    def append_entries(self, entries: tuple[Entry, ...], done: Done | None = None) -> None:
        self._call(self._inner.append_entries, (entries,), lambda image: image.put(entries), done)

    def when_written(self, done: Done) -> None:
        twin = self._twin
        number = twin.asked

        def told() -> None:
            twin.written(number)
            done()

        self._inner.when_written(told)

    def pop_entries(self, from_index: int, done: Done | None = None) -> None:
        self._call(self._inner.pop_entries, (from_index,), lambda image: image.cut(from_index), done)
