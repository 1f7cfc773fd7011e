"""Settings of a log. Imports nothing of ours.

Invariant: values are checked once, here, and all faults are told together.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from stele.model.errors import Rejected

HEADER_BYTES = 4096
"""Length of a segment's header: a page of its own, never written again once the segment is in use."""


class SyncMode(Enum):
    """When entries count as durable. Hard state is synced in every mode."""

    ALWAYS = "always"
    INTERVAL = "interval"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Sizes in bytes, times in milliseconds.

    `segment_bytes`: length of a prepared segment. `queue_bytes_max`: appended and not yet written; past it entries are
    THROTTLED. `group_bytes_max`: a batch is cut into groups of about that. `append_bytes_max`: the largest append, which
    is whole or absent after a crash.
    `cache_bytes_max`: recent entries of all streams kept in memory. `compression`: None, "lz4" or "zstd".
    `low_space_bytes`: with less free space than this, `Log.low_space` asks the owner to take no more writes. What it has
    taken, and what leaders say among themselves, still goes, down to half of it; from there on entries are refused with
    DISK_FULL, while hard state still goes. `low_space_files`: likewise for the files that the volume has inodes for.
    `anchor_bytes_max`: an anchor that holds more log than this, or than a quarter of the volume, is dropped and reported.
    `prepare`: whether segments are made ready in the background. `pool_segments_max`: collected segments kept for use again, in
    no more than a sixteenth of the volume.
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
        """Raises Rejected with every fault."""
        faults = []
        if self.segment_bytes < HEADER_BYTES * 2:
            faults.append(f"segment_bytes is {self.segment_bytes}, at least {HEADER_BYTES * 2} are needed")
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
