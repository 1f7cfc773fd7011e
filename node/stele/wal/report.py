"""What the log reports to its owner, as values. Imports only the model.

Invariant: every message says what is damaged, where, and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stele.model.ids import OpId, ReplicaId, StreamKey


@dataclass(frozen=True, slots=True)
class StreamState:
    """A stream as recovery found it. `tombstoned`: its replica was removed, but term, vote and last OpId stay
    for ever."""

    term: int
    voted_for: ReplicaId | None
    start: OpId
    last: OpId
    tombstoned: bool


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What `Log.open` found.

    `failed`: streams whose records cannot be trusted, each with the reason. Their replicas are FAILED and are
    copied from their peers. `damages`: every damaged place. A stream whose CREATE record was lost there is
    unknown here; its replica, whose superblock names it, is FAILED too.

    `warnings`: what was cut from a torn tail, in bytes and OpIds. `rewritten_bytes`: bytes after the last
    synced offset that were written again. `found`: the place where the log ended on disk (see
    `stele.wal.state.place`); 0 if it was new or too damaged to tell.
    """

    streams: Mapping[StreamKey, StreamState]
    failed: Mapping[StreamKey, str]
    damages: tuple[str, ...]
    warnings: tuple[str, ...]
    segments: int
    bytes_read: int
    rewritten_bytes: int
    found: int


@dataclass(frozen=True, slots=True)
class Collected:
    """The result of a collection. `starts`: the new starts of streams whose first entries went.

    `dropped`: (stream, name, index) of each anchor that was dropped because it held too much, or because
    space was short. The replica that needed the entries must be copied instead."""

    segments: int
    starts: Mapping[StreamKey, OpId]
    dropped: tuple[tuple[StreamKey, str, int], ...]


@dataclass(frozen=True, slots=True)
class Pin:
    """An unflushed store that keeps segments from collection, so it should be flushed. `bytes`: the length of the log
    from the segment of its first unflushed entry on."""

    key: StreamKey
    index: int
    bytes: int


@dataclass(slots=True)
class LogStats:
    """Counters since open. Bytes and numbers only rise; `last_sync_seconds` and `worst_sync_seconds` are
    durations.

    `loop_batches`: batches that the event loop's thread wrote. `slow_writes`: those that held the loop too
    long.
    """

    records: int = 0
    groups: int = 0
    batches: int = 0
    bytes_written: int = 0
    syncs: int = 0
    markers: int = 0
    loop_batches: int = 0
    slow_writes: int = 0
    segments_prepared: int = 0
    segments_recycled: int = 0
    segments_collected: int = 0
    overruns: int = 0
    throttled: int = 0
    refused_disk_full: int = 0
    last_sync_seconds: float = 0.0
    worst_sync_seconds: float = 0.0
