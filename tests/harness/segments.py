"""The segments of the log of nodes that tests start: 4 MiB, the smallest that a flag may ask for. Imported by
tests/tserver/local.py; template.py, which sees no tests, does the same by itself.

A start makes two segments, full of zeros. With the 64 MiB of production a cluster of four nodes writes 560 MB, in each of some
thousand tests. A test that asks for another length than production's gets it.
"""

from __future__ import annotations

from typing import Any

from stele.tserver import opening
from stele.wal.options import LogOptions

SEGMENT_BYTES = 4 << 20


def _small(*, segment_bytes: int, **more: Any) -> LogOptions:
    asked = segment_bytes != LogOptions().segment_bytes
    return LogOptions(segment_bytes=segment_bytes if asked else SEGMENT_BYTES, **more)


def use_small_segments() -> None:
    """Nodes that this process opens from now on have small segments."""
    opening.LogOptions = _small  # type: ignore[misc, assignment]
