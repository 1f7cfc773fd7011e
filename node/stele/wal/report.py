"""What the log tells its owner, as values. Imports only the model.

Invariant: every sentence says what is damaged, where, and what heals it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stele.model.ids import OpId, ReplicaId, StreamKey


@dataclass(frozen=True, slots=True)
class StreamState:
    """A stream as recovery found it. `tombstoned`: its replica was removed; term, vote and last OpId stay for ever."""

    term: int
    voted_for: ReplicaId | None
    start: OpId
    last: OpId
    tombstoned: bool


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What `Log.open` found.

    `failed`: streams whose records cannot be trusted, each with a sentence; their replicas are FAILED and healed from
    their peers. `damages`: every damaged place; a stream whose creation stood there is not known here at all, and its
    replica, whose superblock names it, is FAILED too. `warnings`: what was cut from a torn tail, in bytes and OpIds.
    `rewritten_bytes`: what was read behind the last offset known to be synced, and written anew. `found`: the place
    where the log ended as it lay there (see `stele.wal.state.place`); 0 if it was new, or too damaged to tell.
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
    """What a collection did. `starts`: streams whose log now begins after that OpId. `dropped`: (stream, name, index)
    of anchors that held more of the log than they may, or than there was space for: whoever set them must be copied instead."""

    segments: int
    starts: Mapping[StreamKey, OpId]
    dropped: tuple[tuple[StreamKey, str, int], ...]


@dataclass(frozen=True, slots=True)
class Pin:
    """An unflushed store that keeps segments from being collected: flush it. `bytes`: log from its first entry on."""

    key: StreamKey
    index: int
    bytes: int


@dataclass(slots=True)
class LogStats:
    """Counters since open; bytes and numbers rise, `last_sync_seconds` and `worst_sync_seconds` are durations.

    `loop_batches`: batches that the event loop's thread wrote. `slow_writes`: those that held the loop too long.
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
