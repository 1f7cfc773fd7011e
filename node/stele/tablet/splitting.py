"""Where to cut a tablet so that its parts have about the same bytes. Reads footers only; called by store.py.

Rows in memory are not counted. Invariant: the keys ascend without repeats, and their number and bytes are
bounded. The lowest key of the tablet is not among them.
"""

from __future__ import annotations

from collections.abc import Sequence

from stele.tablet.colfile import ColumnFile

SPLITS_MAX = 1_000
_KEYS_BYTES_MAX = 1 << 20


def split_keys(files: Sequence[ColumnFile], part_bytes: int) -> list[bytes]:
    """Return the keys at which parts of about `part_bytes` bytes of these files begin. Bytes are counted as if nothing
    were encoded. A part has at least one whole group of rows."""
    groups = sorted(
        (key, file.plain_bytes * about[0] // max(1, file.rows))
        for file in files
        for key, about in zip(file.first_keys, file.groups)
    )
    total = sum(size for _, size in groups)
    wanted = max(part_bytes, total // SPLITS_MAX + 1)
    found: list[bytes] = []
    before = 0  # bytes since the last cut
    last = groups[0][0] if groups else b""
    for key, size in groups:
        if before >= wanted and key > last:
            found.append(key)
            last, before = key, 0
        before += size
    while sum(map(len, found)) > _KEYS_BYTES_MAX:
        found = found[1::2]
    return found
