"""Settings of a log. Imports nothing of ours.

Invariant: values are checked once, here, and all faults are reported together.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from stele.model.errors import Rejected

HEADER_BYTES = 4096
"""Bytes of a segment's header. It has a page of its own, which is not rewritten while the segment is in
use."""


class SyncMode(Enum):
    """When entries count as durable. Hard state is synced in every mode."""

    ALWAYS = "always"
    INTERVAL = "interval"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Sizes in bytes, times in milliseconds.

    `segment_bytes`: length of a prepared segment. `queue_bytes_max`: bytes that are appended but not yet
    written; more is refused as THROTTLED. `group_bytes_max`: a batch is cut into groups of about this size.
    `append_bytes_max`: the largest append; after a crash an append is whole or absent.

    `cache_bytes_max`: recent entries of all streams that are kept in memory. `compression`: None, "lz4" or
    "zstd".

    `low_space_bytes`: with less free space, `Log.low_space` asks the owner to accept no more writes. What it
    accepted already, and what leaders write by themselves, is still appended. Below half of it, entries are
    refused with DISK_FULL; only hard state is still appended. `low_space_files`: the same for free inodes.

    `anchor_bytes_max`: an anchor that holds more of the log than this, or than a quarter of the volume, is
    dropped and reported. `prepare`: whether a background thread prepares segments. `pool_segments_max`:
    collected segments that are kept for reuse; they take at most a sixteenth of the volume.
    """

    segment_bytes: int = 64 << 20
    queue_bytes_max: int = 64 << 20
    group_bytes_max: int = 1 << 20
    append_bytes_max: int = 256 << 20
    cache_bytes_max: int = 32 << 20
    compression: str | None = None
    sync: SyncMode = SyncMode.ALWAYS
    sync_interval_ms: int = 100
    low_space_bytes: int = 256 << 20
    low_space_files: int = 256
    anchor_bytes_max: int = 1 << 30
    prepare: bool = True
    pool_segments_max: int = 4
    keeper_interval_ms: int = 1000

    def check(self) -> None:
        """Raises Rejected with all faults."""
        faults = []
        if self.segment_bytes < HEADER_BYTES * 2:
            faults.append(f"segment_bytes is {self.segment_bytes}, expected {HEADER_BYTES * 2} or more")
        if not 0 < self.append_bytes_max < 1 << 30:
            faults.append(f"append_bytes_max is {self.append_bytes_max}, expected 1 to {(1 << 30) - 1}")
        if not 0 < self.group_bytes_max < 1 << 30:
            faults.append(f"group_bytes_max is {self.group_bytes_max}, expected 1 to {(1 << 30) - 1}")
        if self.compression not in (None, "lz4", "zstd"):
            faults.append(f"compression is {self.compression!r}, expected None, 'lz4' or 'zstd'")
        for name in (
            "queue_bytes_max",
            "cache_bytes_max",
            "low_space_bytes",
            "low_space_files",
            "anchor_bytes_max",
            "pool_segments_max",
        ):
            if getattr(self, name) < 0:
                faults.append(f"{name} is {getattr(self, name)}, expected 0 or more")
        for name in ("sync_interval_ms", "keeper_interval_ms"):
            if getattr(self, name) <= 0:
                faults.append(f"{name} is {getattr(self, name)}, expected more than 0")
        if faults:
            raise Rejected("log options: " + "; ".join(faults))
