"""Reads entries back from closed and open segments, in any thread. Called by stream.py.

Invariant: every entry that it returns was checked against its group's checksum.
"""

from __future__ import annotations

from pathlib import Path

from stele.model.entry import Entry, entry_kind_of
from stele.model.errors import Corrupt
from stele.wal.files import File, Files
from stele.wal.format import (
    GROUP_HEADER_BYTES,
    Kind,
    body_is_whole,
    decode_group_header,
    decode_records,
    group_body,
)
from stele.wal.sectors import read_or_corrupt


def read_group(file: File, path: Path, segment_id: int, offset: int) -> tuple[bytes, int]:
    """(body, number of records) of the group at `offset`.

    Raises:
        Corrupt: the bytes are damaged, or the disk cannot read a sector.
    """
    head = read_or_corrupt(file, GROUP_HEADER_BYTES, offset, str(path))
    header = decode_group_header(head, 0, offset, segment_id)
    if header is None:
        raise Corrupt(f"{path}: the group at {offset} is lost; the disk changed its bytes")
    data = head + read_or_corrupt(file, header.stored_bytes, offset + GROUP_HEADER_BYTES, str(path))
    if not body_is_whole(header, data, 0):
        raise Corrupt(f"{path}: the group at {offset} is damaged; the disk changed its bytes")
    return group_body(header, data, 0), header.record_count


def entries_of(body: bytes, count: int, raw: tuple[bytes, int], first: int, last: int) -> list[Entry]:
    """A stream's entries from `first` to `last` in a group's body. Of two with the same index, the later one
    counts."""
    found: dict[int, Entry] = {}
    tablet, replica = raw
    for r in decode_records(body, count):
        if r.kind == Kind.ENTRY and r.replica == replica and first <= r.b <= last and r.tablet == tablet:
            found[r.b] = Entry(r.a, r.b, entry_kind_of(r.detail, r.a, r.b), r.c, r.blob)
    return [found[i] for i in range(first, last + 1) if i in found]


class GroupReader:
    """Reads groups. Keeps the last group and its open file, because neighbouring entries often share them."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._file: File | None = None
        self._path: Path | None = None
        self._at: tuple[Path, int] | None = None
        self._group: tuple[bytes, int] = (b"", 0)

    def group(self, path: Path, segment_id: int, offset: int) -> tuple[bytes, int]:
        """See `read_group`."""
        if self._at != (path, offset):
            if self._file is None or self._path != path:
                self.close()
                self._file, self._path = self._files.open(path), path
            self._group = read_group(self._file, path, segment_id, offset)
            self._at = (path, offset)
        return self._group

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._at = None
