"""Reads files in which the disk cannot read single sectors. Called by recovery, metadata and dump.

For a lost sector, one disk answers with an error and another with wrong bytes. Both are damage of that range
only. Invariant: a byte that could not be read is always marked as such.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from stele.model.errors import Corrupt
from stele.wal.files import File

PAGE_BYTES = 4096
"""The page cache reads whole pages, so one bad sector makes its whole page unreadable."""
UNREADABLE_BYTES_MAX = 64 * PAGE_BYTES
"""The most unreadable bytes per file. A disk that loses more does not just have bad sectors: it is gone or
failing."""

_SOME_BYTES = 1 << 20
_BAD_SECTOR = frozenset({errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EBADMSG, errno.EUCLEAN})


def is_bad_sector(error: OSError) -> bool:
    """Whether the error says that the disk lost bytes. Other errors are not damage."""
    return error.errno in _BAD_SECTOR


@dataclass(frozen=True, slots=True)
class Content:
    """A file's bytes, with zeros where they could not be read.

    `unreadable`: those ranges as [begin, end), rising and disjoint."""

    data: bytes
    unreadable: tuple[tuple[int, int], ...] = ()

    def lost(self, begin: int, end: int) -> bool:
        """Whether a byte in [begin, end) could not be read."""
        return any(a < end and begin < b for a, b in self.unreadable)


def read_content(file: File) -> Content:
    """Read a whole file.

    Raises:
        OSError: another error than a bad sector, or more than `UNREADABLE_BYTES_MAX` bytes that cannot be
            read.
    """
    length = file.length()
    try:
        return Content(file.read(length, 0))
    except OSError as exc:
        if not is_bad_sector(exc):
            raise
    return _read_around(file, length)


def _read_around(file: File, length: int) -> Content:
    data = bytearray(length)
    unreadable: list[tuple[int, int]] = []
    lost_bytes = 0
    for some in range(0, length, _SOME_BYTES):
        some_end = min(some + _SOME_BYTES, length)
        if _read_into(data, file, some, some_end) is None:
            continue
        for page in range(some, some_end, PAGE_BYTES):
            page_end = min(page + PAGE_BYTES, length)
            error = _read_into(data, file, page, page_end)
            if error is None:
                continue
            lost_bytes += page_end - page
            if lost_bytes > UNREADABLE_BYTES_MAX:
                raise error
            if unreadable and unreadable[-1][1] == page:
                unreadable[-1] = (unreadable[-1][0], page_end)
            else:
                unreadable.append((page, page_end))
    return Content(bytes(data), tuple(unreadable))


def _read_into(data: bytearray, file: File, begin: int, end: int) -> OSError | None:
    """Read a range into `data`. Returns the error of a bad sector in it, or None."""
    try:
        data[begin:end] = file.read(end - begin, begin)
    except OSError as exc:
        if not is_bad_sector(exc):
            raise
        return exc
    return None


def read_or_corrupt(file: File, length: int, offset: int, what: str) -> bytes:
    """See File.read.

    Raises:
        Corrupt: the disk cannot read the bytes.
    """
    try:
        return file.read(length, offset)
    except OSError as exc:
        if not is_bad_sector(exc):
            raise
        raise Corrupt(f"{what}: the disk cannot read {length} bytes at {offset}: {exc.strerror}") from exc
