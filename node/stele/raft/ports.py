"""The port to a log, which the owner implements. Also turns a Persist into calls on the log, and the log's records
into a state.

`stele.wal` and the simulator implement LogPort; tests/raft/log_port_contract.py tests both. This file does no
I/O.

Invariant: after a crash a log holds a prefix of the calls made on it, and at least those whose `done` was
called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from stele.model.config import Configuration
from stele.model.entry import Entry
from stele.model.errors import ensure
from stele.model.ids import OPID_NONE, OpId, ReplicaId
from stele.model.logrecord import (
    NOTHING_SKIPPED,
    EntryRecord,
    LogRecord,
    PromoteRecord,
    SkippedRecord,
    SnapshotRecord,
    TermRecord,
    VoteRecord,
)
from stele.raft.effects import HardState, Persist

__all__ = [
    "Appends",
    "Chance",
    "Done",
    "EntryRecord",
    "LoadedLog",
    "LogPort",
    "LogRecord",
    "PromoteRecord",
    "SkippedRecord",
    "SnapshotRecord",
    "TermRecord",
    "VoteRecord",
    "fold_records",
    "persist_calls",
]

Done = Callable[[], None]


class Chance(Protocol):
    """Randomness, handed in by the owner; `random.Random` fits."""

    def randint(self, a: int, b: int, /) -> int:
        """A whole number from a to b, both included."""


class LogPort(Protocol):
    """One replica's log. Calls take effect in the order they are made.

    - `done` is called once this call and all before it survive power loss. It is called later, never from
      within the call, and in the order of the calls.
    - `load` must find what was appended once `done` was called, and may find it earlier.
    - A call that is refused raises `Retryable` (THROTTLED, DISK_FULL), and has done nothing.
    """

    def append_term(self, term: int, done: Done | None = None) -> None:
        """Record a higher term in which no vote was given yet."""

    def append_vote(self, term: int, voted_for: ReplicaId, done: Done | None = None) -> None:
        """Record a vote; raises the term to `term` if it was lower."""

    def append_promote(self, term: int, leader: ReplicaId, done: Done | None = None) -> None:
        """Record a forced promotion, which is a vote for `leader` at `term`."""

    def append_entries(self, entries: tuple[Entry, ...], done: Done | None = None) -> None:
        """Append entries with indexes that rise by one.

        If the first is at or below the end, it drops the log from there.
        """

    def pop_entries(self, from_index: int, done: Done | None = None) -> None:
        """Drop the suffix that begins at `from_index`. Nothing happens if the log ends before it."""

    def when_written(self, done: Done) -> None:
        """Call `done` once all calls so far survive the end of this process. Power loss may still take them.

        It is called later, never from within the call, and before the `done` of any call after this one."""

    def begin_snapshot(self, opid: OpId, done: Done | None = None) -> None:
        """A snapshot at `opid` is coming. `load` gives the same as before."""

    def end_snapshot(self, opid: OpId, config: Configuration, done: Done | None = None) -> None:
        """The store holds everything up to `opid`: the log starts there.

        Entries after `opid` survive if the log holds it, with the same term. Otherwise the log is emptied. An
        `opid` at or below the log's start changes nothing.
        """

    def load(self, above: int = 0) -> Iterator[LogRecord]:
        """The records in force: the snapshot if there is one, term and vote, and all entries in order of
        index.

        Records that later ones made void are left out. There may be several term records, in rising order. One
        SkippedRecord stands for all entries up to `above`, so that they take no memory. The caller guarantees that
        these are committed and durable.
        """


@dataclass(frozen=True, slots=True)
class LoadedLog:
    """The state that follows from a log's records. If the log never had a snapshot, `start` is OPID_NONE and
    `config` is None.

    The `skipped` entries come after `start` and before `entries`.
    """

    hard_state: HardState
    start: OpId
    config: Configuration | None
    entries: tuple[Entry, ...]
    skipped: SkippedRecord = NOTHING_SKIPPED

    @property
    def last(self) -> OpId:
        """The last entry, or the start."""
        return self.entries[-1].opid if self.entries else self._given_after

    def opid_at(self, index: int) -> OpId | None:
        """The entry at `index`, or the start; None where there is none."""
        at = index - self._given_after.index - 1
        if at >= 0:
            return self.entries[at].opid if at < len(self.entries) else None
        if index == self.start.index:
            return self.start
        if index < self.start.index:
            return None
        return OpId(next(last.term for last in self.skipped.terms if index <= last.index), index)

    @property
    def _given_after(self) -> OpId:
        return self.skipped.terms[-1] if self.skipped.terms else self.start


def fold_records(records: Iterable[LogRecord]) -> LoadedLog:
    """Fold a sequence of records.

    Raises:
        InvariantViolation: if entries leave a gap.
    """
    term, voted_for = 0, None
    start, config = OPID_NONE, None
    skipped = NOTHING_SKIPPED
    after = 0
    entries: list[Entry] = []
    for record in records:
        match record:
            case TermRecord(t):
                if t > term:
                    term, voted_for = t, None
            case VoteRecord(t, who) | PromoteRecord(t, who):
                if t >= term:
                    term, voted_for = t, who
            case SnapshotRecord(opid, snapshot_config):
                start, config = opid, snapshot_config
                after = opid.index
                entries = [e for e in entries if e.index > opid.index]
            case SkippedRecord():
                ensure(not entries, "log: a SkippedRecord follows entries; expected it before all entries")
                skipped = record
                after = record.terms[-1].index
            case EntryRecord(entry):
                del entries[max(entry.index - after - 1, 0) :]
                ensure(
                    entry.index == after + len(entries) + 1,
                    f"log: entry {entry.opid} after {after} and {len(entries)} entries leaves a gap",
                )
                entries.append(entry)
    return LoadedLog(HardState(term, voted_for), start, config, tuple(entries), skipped)


class Appends(Protocol):
    """The part of LogPort that a Persist needs."""

    def append_term(self, term: int, done: Done | None = None) -> None:
        """As LogPort."""

    def append_vote(self, term: int, voted_for: ReplicaId, done: Done | None = None) -> None:
        """As LogPort."""

    def append_promote(self, term: int, leader: ReplicaId, done: Done | None = None) -> None:
        """As LogPort."""

    def append_entries(self, entries: tuple[Entry, ...], done: Done | None = None) -> None:
        """As LogPort."""

    def pop_entries(self, from_index: int, done: Done | None = None) -> None:
        """As LogPort."""

    def when_written(self, done: Done) -> None:
        """As LogPort."""


def persist_calls(log: Appends, persist: Persist, done: Done | None) -> list[Callable[[], None]]:
    """Return the calls on a log that carry out a Persist, in order. The last call gets `done`.

    If the log refuses one, the calls after it must wait.
    """
    hard = persist.hard_state
    calls: list[Callable[..., None]] = []
    if hard is not None:
        if hard.voted_for is None:
            calls.append(partial(log.append_term, hard.term))
        elif hard.promoted:
            calls.append(partial(log.append_promote, hard.term, hard.voted_for))
        else:
            calls.append(partial(log.append_vote, hard.term, hard.voted_for))
    if persist.truncate_from is not None:
        calls.append(partial(log.pop_entries, persist.truncate_from))
    if persist.entries:
        calls.append(partial(log.append_entries, persist.entries))
    if calls:
        calls[-1] = partial(calls[-1], done)
    return calls
