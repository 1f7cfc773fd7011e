"""What a replica's log gives back when it is loaded: the records as `stele.raft` and `stele.wal` share them.

Imports only entries, configurations and ids. Invariant: records are values; their order is the log's.
"""

from __future__ import annotations

from dataclasses import dataclass

from stele.model.config import Configuration
from stele.model.entry import Entry
from stele.model.ids import OpId, ReplicaId


@dataclass(frozen=True, slots=True)
class TermRecord:
    """The term was raised; no vote in it yet."""

    term: int


@dataclass(frozen=True, slots=True)
class VoteRecord:
    """A vote was given in this term (which it also raises)."""

    term: int
    voted_for: ReplicaId


@dataclass(frozen=True, slots=True)
class PromoteRecord:
    """An administrator made `leader` the leader of `term`, by force."""

    term: int
    leader: ReplicaId


@dataclass(frozen=True, slots=True)
class EntryRecord:
    """An entry; it voids all earlier ones at or above its index."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """The log starts after `opid`, with `config` in force there; comes before all entries."""

    opid: OpId
    config: Configuration


@dataclass(frozen=True, slots=True)
class SkippedRecord:
    """Entries that the log has and does not give, as the store holds them; the first follows the log's start.

    `terms`: the last entry of each run of one term, in order. `configs`: the configurations among them, with their index.
    """

    terms: tuple[OpId, ...]
    configs: tuple[tuple[int, Configuration], ...]


NOTHING_SKIPPED = SkippedRecord((), ())


LogRecord = TermRecord | VoteRecord | PromoteRecord | EntryRecord | SnapshotRecord | SkippedRecord
