"""Reads entries of closed and open segments back, from any thread. Called by stream.py.

Invariant: what it gives was checked against its group's checksum; it never gives an entry that is void.
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
        Corrupt: other bytes than were written, or a sector that cannot be read.
    """
    head = read_or_corrupt(file, GROUP_HEADER_BYTES, offset, str(path))
    header = decode_group_header(head, 0, offset, segment_id)
    if header is None:
        raise Corrupt(f"{path}: no group at {offset} where one was written; the disk lost or changed it")
    data = head + read_or_corrupt(file, header.stored_bytes, offset + GROUP_HEADER_BYTES, str(path))
    if not body_is_whole(header, data, 0):
        raise Corrupt(f"{path}: the group at {offset} is damaged; the disk changed it")
    return group_body(header, data, 0), header.record_count


def entries_of(body: bytes, count: int, raw: tuple[bytes, int], first: int, last: int) -> list[Entry]:
    """A stream's entries from `first` to `last` in a group; of two with one index the later holds."""
    found: dict[int, Entry] = {}
    tablet, replica = raw
    for r in decode_records(body, count):
        if r.kind == Kind.ENTRY and r.replica == replica and first <= r.b <= last and r.tablet == tablet:
            found[r.b] = Entry(r.a, r.b, entry_kind_of(r.detail, r.a, r.b), r.c, r.blob)
    return [found[i] for i in range(first, last + 1) if i in found]


class GroupReader:
    """Reads groups, keeping the last one and its file open: neighbours often stand in one group."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._file: File | None = None
        self._path: Path | None = None
        self._at: tuple[Path, int] | None = None
        self._group: tuple[bytes, int] = (b"", 0)

    def group(self, path: Path, segment_id: int, offset: int) -> tuple[bytes, int]:
        """As `read_group`."""
        if self._at != (path, offset):
            if self._file is None or self._path != path:
                self.close()
                self._file, self._path = self._files.open(path), path
            self._group = read_group(self._file, path, segment_id, offset)
            self._at = (path, offset)
        return self._group

    def close(self) -> None:
        """Give the file back."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._at = None
