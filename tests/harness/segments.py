"""The segments of the log of nodes that tests start: 8 MiB, as many bytes as the largest write. Imported by tests/tserver/local.py;
template.py, which sees no tests, does the same by itself.

A start makes two segments, full of zeros. With the 64 MiB of production a cluster of four nodes wrote 560 MB and took 0.3 s
of a processor for it, in each of some thousand tests.
"""

from __future__ import annotations

from functools import partial

from stele.tserver import opening
from stele.wal.options import LogOptions

SEGMENT_BYTES = 8 << 20


def use_small_segments() -> None:
    """Nodes that this process opens from now on have small segments."""
    opening.LogOptions = partial(LogOptions, segment_bytes=SEGMENT_BYTES)  # type: ignore[misc, assignment]
