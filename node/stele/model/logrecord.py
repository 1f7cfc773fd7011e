"""The records that a replica's log returns when it is loaded. Shared by `stele.raft` and `stele.wal`.

Imports only entries, configurations and ids. Invariant: records are immutable values in the order of the log.
"""

from __future__ import annotations

from dataclasses import dataclass

from stele.model.config import Configuration
from stele.model.entry import Entry
from stele.model.ids import OpId, ReplicaId


@dataclass(frozen=True, slots=True)
class TermRecord:
    """The term was raised, without a vote in it yet."""

    term: int


@dataclass(frozen=True, slots=True)
class VoteRecord:
    """A vote was given in this term, which it also raises."""

    term: int
    voted_for: ReplicaId


@dataclass(frozen=True, slots=True)
class PromoteRecord:
    """An administrator forced `leader` to be the leader of `term`."""

    term: int
    leader: ReplicaId


@dataclass(frozen=True, slots=True)
class EntryRecord:
    """An entry. It voids all earlier ones at or above its index."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """The log starts after `opid`, with `config` in force there. It comes before all entries."""

    opid: OpId
    config: Configuration


@dataclass(frozen=True, slots=True)
class SkippedRecord:
    """Entries that the log has but does not return, because the store holds them. They begin at the log's start.

    `terms`: the OpId of the last entry of each term, in order. `configs`: (index, configuration) for each
    skipped entry with a configuration.
    """

    terms: tuple[OpId, ...]
    configs: tuple[tuple[int, Configuration], ...]


NOTHING_SKIPPED = SkippedRecord((), ())


LogRecord = TermRecord | VoteRecord | PromoteRecord | EntryRecord | SnapshotRecord | SkippedRecord
