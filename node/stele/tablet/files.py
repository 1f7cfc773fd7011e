"""File operations of the stores. Each is a point where power may fail. Only this file changes a directory for
them.

Tests pass a port that stops between any two operations. Invariant: `write_new` returns after the bytes are on
disk; `replace` returns after the directory with the new name is on disk too. `read_at` and `sum_at`
report a disk error as an OSError. An access through a map would raise SIGBUS, which ends the process with every
replica in it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import google_crc32c
import numpy as np

from stele.model.errors import Code, Corrupt, Retryable, SteleError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_MEANS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_PIECE_BYTES = 256 << 10


def translate(exc: OSError, what: str) -> SteleError:
    """The Stele error for an operating system error.

    DISK_FULL (retryable); no file descriptor or memory now (retryable); else IO_ERROR."""
    if exc.errno in NO_SPACE:
        return Retryable(f"{what}: the disk is full; free space or grow the volume", code=Code.DISK_FULL)
    if exc.errno in NO_MEANS:  # not a disk fault, so copying the replica would not help
        return Retryable(f"{what}: {exc.strerror}; try again, or raise this limit of the node")
    return Corrupt(f"{what}: {exc.strerror or exc}; the disk failed", code=Code.IO_ERROR)


class Files:
    """The operating system's file operations."""

    def write_new(self, path: Path, parts: Iterable[bytes | memoryview]) -> int:
        """Write a new file and sync it. Overwrites a leftover of that name. Returns the size in bytes.

        Raises:
            Retryable: DISK_FULL; nothing is left behind.
            Corrupt: IO_ERROR.
        """
        size = 0
        try:
            with open(path, "wb", buffering=0) as file:
                for part in parts:
                    view = memoryview(part).cast("B")
                    size += len(view)
                    while view:
                        view = view[file.write(view) or 0 :]
                os.fdatasync(file.fileno())
        except OSError as exc:
            path.unlink(missing_ok=True)
            raise translate(exc, f"writing {path.name}") from exc
        return size

    def replace(self, source: Path, target: Path) -> None:
        """Rename `source` to `target` atomically, and sync the directory.

        Raises:
            Retryable: DISK_FULL.
            Corrupt: IO_ERROR.
        """
        try:
            os.replace(source, target)
        except OSError as exc:
            raise translate(exc, f"replacing {target.name}") from exc
        self.sync_directory(target.parent)

    def sync_directory(self, directory: Path) -> None:
        """On return the names in `directory` survive power loss.

        Raises:
            Corrupt: IO_ERROR.
        """
        try:
            handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as exc:
            raise translate(exc, f"syncing {directory.name}") from exc

    def remove(self, path: Path) -> None:
        """Unlink a file; it may be gone already. Whoever has it open can still read it."""
        path.unlink(missing_ok=True)

    def link(self, source: Path, target: Path) -> None:
        """Make a hard link.

        Raises:
            Retryable: DISK_FULL.
            Corrupt: IO_ERROR.
        """
        try:
            os.link(source, target)
        except OSError as exc:
            raise translate(exc, f"linking {target.name}") from exc


FILES = Files()


def read_at(fd: int, offset: int, length: int) -> bytes:
    """`length` bytes from `offset` on, or as many as the file has. Blocks. Raises OSError."""
    pieces = []
    while length > 0 and (piece := os.pread(fd, length, offset)):
        pieces.append(piece)
        offset, length = offset + len(piece), length - len(piece)
    return b"".join(pieces)


def sum_at(fd: int, offset: int, length: int) -> int:
    """CRC-32C of `length` bytes from `offset` on, or of as many as the file has. Blocks. Raises OSError."""
    # Reuse one buffer for all pieces: fresh pages for each would cost more than the checksum. It is not kept
    # per thread, because gRPC's threads are destroyed after each call.
    buffer = np.empty(min(length, _PIECE_BYTES), np.uint8)
    view, crc, end = buffer.data, 0, offset + length
    while offset < end and (size := os.preadv(fd, [view[: end - offset]], offset)):
        crc = google_crc32c.extend(crc, buffer[:size])
        offset += size
    return int(crc)
