"""Whole files of which single sectors cannot be read. Called by recovery, metadata and dump.

A disk that has lost a sector answers a read with an error, where another one gives wrong bytes. Both are damage of that
range and of nothing else. Invariant: a byte that could not be read is never told as one that was.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from stele.model.errors import Corrupt
from stele.wal.files import File

PAGE_BYTES = 4096
"""What the page cache reads at least: an unreadable sector takes its page along."""
UNREADABLE_BYTES_MAX = 64 * PAGE_BYTES
"""Of one file. A disk that fails more is not a disk with bad sectors: it is away, or dying."""

_SOME_BYTES = 1 << 20
_BAD_SECTOR = frozenset({errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EBADMSG, errno.EUCLEAN})


def is_bad_sector(error: OSError) -> bool:
    """Whether the disk does not give the bytes back; anything else is no damage."""
    return error.errno in _BAD_SECTOR


@dataclass(frozen=True, slots=True)
class Content:
    """A file's bytes, zeros where they could not be read; `unreadable` says where: [begin, end), rising, apart."""

    data: bytes
    unreadable: tuple[tuple[int, int], ...] = ()

    def lost(self, begin: int, end: int) -> bool:
        """Whether a byte of [begin, end) could not be read."""
        return any(a < end and begin < b for a, b in self.unreadable)


def read_content(file: File) -> Content:
    """All of a file.

    Raises:
        OSError: no bad sector, or more of them than `UNREADABLE_BYTES_MAX`.
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
    """The error of a bad sector there; None where all was read."""
    try:
        data[begin:end] = file.read(end - begin, begin)
    except OSError as exc:
        if not is_bad_sector(exc):
            raise
        return exc
    return None


def read_or_corrupt(file: File, length: int, offset: int, what: str) -> bytes:
    """As File.read.

    Raises:
        Corrupt: the disk does not give the bytes back.
    """
    try:
        return file.read(length, offset)
    except OSError as exc:
        if not is_bad_sector(exc):
            raise
        raise Corrupt(f"{what}: the disk cannot read {length} bytes at {offset}: {exc.strerror}") from exc
