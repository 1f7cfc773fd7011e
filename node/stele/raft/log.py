"""The core's view of its own log: the last entries up to a bound in bytes, the terms of all, the
configurations in it.

Used by the core only. It writes nothing: `take_persist` says what the owner must write. The owner reads older
entries back when a slow peer needs them. Entries that the store held at the start are never in memory.

Invariants: handed_index <= durable_index <= written_index <= issued_index <= last_index; the tail holds everything above
handed_index; indexes are contiguous from start.index + 1.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from stele.model.config import Configuration, decode_configuration
from stele.model.entry import ENTRY_COST_BYTES, Entry, EntryKind
from stele.model.errors import ensure
from stele.model.ids import OpId
from stele.model.logrecord import NOTHING_SKIPPED, SkippedRecord
from stele.raft.messages import ENTRY_MESSAGE_BYTES


class LogView:
    """The log of one replica, as far as memory holds it."""

    def __init__(
        self,
        start: OpId,
        config: Configuration,
        entries: Iterable[Entry],
        commit_index: int,
        tail_bytes_max: int,
        skipped: SkippedRecord = NOTHING_SKIPPED,
    ) -> None:
        self.start = start
        self.tail_bytes_max = tail_bytes_max
        self.last_index = start.index
        self.last_term = start.term
        self.issued_index = start.index
        self.durable_index = start.index
        self.written_index = start.index
        """The last index that survives the end of the process, as the owner last reported."""
        self.handed_index = start.index
        self.unhanded_bytes = 0
        """Bytes of entries that are not handed out yet. A leader's flow control bounds it."""
        self._tail: list[Entry] = []
        self._tail_first = start.index + 1
        self._tail_bytes = 0
        self._span_terms: list[int] = [start.term]
        self._span_firsts: list[int] = [start.index]
        self._configs: list[tuple[int, Configuration]] = [(start.index, config)]
        self.config_index, self.config = self._configs[-1]
        """The active configuration: the last in the log, committed or not.

        `config_index`: the index of its entry, or the log's start.
        """
        self.dirty = False
        """Whether there is anything to write."""
        self._truncate_from: int | None = None
        self._in_flight: list[tuple[int, int]] = []  # (persist id, last index it covers); few
        self._skip(skipped)
        for entry in entries:
            self.append(entry)
        ensure(
            start.index <= commit_index <= self.last_index,
            f"log: commit index {commit_index} lies outside of {start} to {self.last_index}",
        )
        ensure(
            self.handed_index <= commit_index,
            f"log: entries up to {self.handed_index} were skipped, and only {commit_index} is committed",
        )
        self.issued_index = self.written_index = self.durable_index = self.last_index
        self.dirty = False
        self.hand_out(commit_index)

    # Reading

    @property
    def last_opid(self) -> OpId:
        """OpId of the last entry, or the start."""
        return OpId(self.last_term, self.last_index)

    @property
    def tail_first(self) -> int:
        """Index of the first entry still in memory."""
        return self._tail_first

    def config_at(self, index: int) -> Configuration:
        """The configuration in force at `index`."""
        for at, config in reversed(self._configs):
            if at <= index:
                return config
        return self._configs[0][1]

    def term_at(self, index: int) -> int | None:
        """Term of the entry at `index`; None below the start and past the end."""
        if index == self.last_index:
            return self.last_term
        if index > self.last_index or index < self.start.index:
            return None
        if index >= self._tail_first:
            return self._tail[index - self._tail_first].term
        return self._span_terms[bisect_right(self._span_firsts, index) - 1]

    def opid_at(self, index: int) -> OpId:
        """OpId of the entry at `index`, which must be known."""
        if index == self.last_index:
            return OpId(self.last_term, index)
        term = self.term_at(index)
        if term is None:
            ensure(False, f"log: index {index} is outside of {self.start} to {self.last_opid}")
        return OpId(term or 0, index)

    def covered_by(self, last_logged: OpId) -> bool:
        """Whether a log that ends at `last_logged` is at least as up to date as this one (Raft §5.4.1)."""
        return last_logged >= self.last_opid

    def first_of_term(self, index: int) -> int:
        """Return the first index with the same term as the entry at `index`; at the lowest the log's start."""
        return self._span_firsts[bisect_right(self._span_firsts, index) - 1]

    def last_of_term(self, term: int, at_most: int) -> int | None:
        """The last index of `term` up to `at_most`, or None."""
        for at in range(len(self._span_terms) - 1, -1, -1):
            if self._span_terms[at] == term and self._span_firsts[at] <= at_most:
                following = (
                    self._span_firsts[at + 1] - 1 if at + 1 < len(self._span_firsts) else self.last_index
                )
                return min(following, at_most)
            if self._span_terms[at] < term:
                return None
        return None

    def entries_from(self, first_index: int, bytes_max: int, last_index: int) -> tuple[Entry, ...]:
        """Entries from `first_index` to `last_index`, at most `bytes_max` bytes but at least one entry.

        All are in memory.
        """
        offset = first_index - self._tail_first
        if offset < 0:
            ensure(False, f"log: entry {first_index} is below the tail, which begins at {self._tail_first}")
        size = 0
        batch: list[Entry] = []
        for at in range(offset, last_index + 1 - self._tail_first):
            entry = self._tail[at]
            size += len(entry.payload) + ENTRY_MESSAGE_BYTES
            if size > bytes_max and batch:
                break
            batch.append(entry)
        return tuple(batch)

    @property
    def newest_timestamp(self) -> int:
        """The hybrid time of the newest entry in memory that has one; 0 if there is none."""
        return next((e.timestamp for e in reversed(self._tail) if e.timestamp), 0)

    def tail(self) -> tuple[Entry, ...]:
        """All entries in memory, for checks."""
        return tuple(self._tail)

    # Writing

    def append(self, entry: Entry) -> Configuration | None:
        """Add the next entry. Returns its configuration if it is a CONFIG."""
        if entry.index != self.last_index + 1 or entry.term < self.last_term:
            ensure(False, f"log: entry {entry.opid} cannot follow {self.last_opid}")
        size = len(entry.payload) + ENTRY_COST_BYTES
        self._tail.append(entry)
        self._tail_bytes += size
        self.unhanded_bytes += size
        if entry.term != self.last_term:
            self._span_terms.append(entry.term)
            self._span_firsts.append(entry.index)
            self.last_term = entry.term
        self.last_index = entry.index
        self.dirty = True
        if entry.kind is EntryKind.CONFIG:
            config = decode_configuration(entry.payload)
            self._configs.append((entry.index, config))
            self.config_index, self.config = self._configs[-1]
            return config
        return None

    def _skip(self, skipped: SkippedRecord) -> None:
        """Note entries that are in the log and were handed out, without holding them in memory."""
        for last in skipped.terms:
            if last.index <= self.last_index or last.term < self.last_term:
                ensure(False, f"log: entries up to {last} cannot follow {self.last_opid}")
            if last.term != self.last_term:
                self._span_terms.append(last.term)
                self._span_firsts.append(self.last_index + 1)
            self.last_index, self.last_term = last.index, last.term
        self._configs += skipped.configs
        self.config_index, self.config = self._configs[-1]
        self.handed_index = self.last_index
        self._tail_first = self.last_index + 1

    def truncate(self, from_index: int) -> tuple[Entry, ...]:
        """Drop the entries from `from_index` on, and return them.

        All entries must have been issued (`take_persist`).
        """
        ensure(
            self.handed_index < from_index and self.issued_index == self.last_index,
            f"log: dropping from {from_index} on would drop entries handed out up to {self.handed_index}",
        )
        self.dirty = True
        dropped = tuple(self._tail[from_index - self._tail_first :])
        del self._tail[from_index - self._tail_first :]
        size = sum(e.size_bytes for e in dropped)
        self._tail_bytes -= size
        self.unhanded_bytes -= size
        while self._span_firsts[-1] >= from_index:
            del self._span_firsts[-1], self._span_terms[-1]
        while self._configs[-1][0] >= from_index:
            del self._configs[-1]
        self.config_index, self.config = self._configs[-1]
        self.last_index = from_index - 1
        self.last_term = self._span_terms[-1]
        self.issued_index = self.last_index
        self.durable_index = min(self.durable_index, self.last_index)
        self.written_index = min(self.written_index, self.last_index)
        self._in_flight = [(pid, min(last, self.last_index)) for pid, last in self._in_flight]
        self._truncate_from = (
            from_index if self._truncate_from is None else min(self._truncate_from, from_index)
        )
        return dropped

    def take_persist(self, persist_id: int) -> tuple[int | None, tuple[Entry, ...]]:
        """What must be written now: where to truncate, and entries.

        They are durable after `persisted(persist_id)`.
        """
        entries = tuple(self._tail[self.issued_index + 1 - self._tail_first :])
        truncate_from, self._truncate_from = self._truncate_from, None
        self.issued_index = self.last_index
        self.dirty = False
        self._in_flight.append((persist_id, self.last_index))
        return truncate_from, entries

    def persisted(self, persist_id: int) -> bool:
        """Note that everything up to this Persist is durable.

        Returns whether the durable part of the log grew.
        """
        before = self.durable_index
        while self._in_flight and self._in_flight[0][0] <= persist_id:
            self.durable_index = self._in_flight.pop(0)[1]
        if self.durable_index > self.written_index:
            self.written_index = self.durable_index
        return self.durable_index > before

    def written(self, persist_id: int) -> None:
        """Note that everything up to this Persist is in the log's file."""
        for issued, last in self._in_flight:
            if issued <= persist_id and last > self.written_index:
                self.written_index = last

    def hand_out(self, up_to: int) -> tuple[Entry, ...]:
        """Hand out the entries up to `up_to`; returns those not handed out before.

        Old ones may leave memory.
        """
        if up_to <= self.handed_index:
            return ()
        entries = tuple(self._tail[self.handed_index + 1 - self._tail_first : up_to + 1 - self._tail_first])
        self.handed_index = up_to
        for entry in entries:
            self.unhanded_bytes -= len(entry.payload) + ENTRY_COST_BYTES
        if self._tail_bytes > self.tail_bytes_max:
            self._evict()
        return entries

    def compact(self, opid: OpId) -> None:
        """Forget the log up to `opid`, which must have been handed out."""
        if opid.index <= self.start.index:
            return
        ensure(
            opid.index <= self.handed_index and self.term_at(opid.index) == opid.term,
            f"log: {opid} is not a committed entry of this log, which ends at {self.last_opid}",
        )
        base = self.config_at(opid.index)
        self._configs = [(opid.index, base), *((at, c) for at, c in self._configs if at > opid.index)]
        self.config_index, self.config = self._configs[-1]
        keep = bisect_right(self._span_firsts, opid.index) - 1
        del self._span_firsts[:keep], self._span_terms[:keep]
        self._span_firsts[0] = opid.index
        self.start = opid
        if self._tail_first <= opid.index:
            self._drop_front(opid.index + 1 - self._tail_first)

    def _evict(self) -> None:
        # Evict down to three quarters. So the list is moved once per quarter, and not for each entry.
        target = self.tail_bytes_max * 3 // 4
        count = 0
        size = self._tail_bytes
        handed = self.handed_index + 1 - self._tail_first
        while count < handed and size > target:
            size -= self._tail[count].size_bytes
            count += 1
        self._drop_front(count)

    def _drop_front(self, count: int) -> None:
        self._tail_bytes -= sum(e.size_bytes for e in self._tail[:count])
        del self._tail[:count]
        self._tail_first += count
