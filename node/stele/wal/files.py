"""The few file operations that the log is made of, as a port, and the real ones. Imports nothing of ours.

Whoever implements it for tests decides what a crash loses. Invariant: nothing survives power loss before the sync that
its contract names: bytes need the file's own sync, names need their directory's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

_IOV_MAX = 1024


class File(Protocol):
    """An open file."""

    def write(self, buffers: Sequence[bytes], offset: int) -> None:
        """Write all buffers, one after the other, from `offset` on."""

    def read(self, length: int, offset: int) -> bytes:
        """At most `length` bytes from `offset` on; fewer only at the end of the file."""

    def data_sync(self) -> None:
        """On return the bytes below the length that was synced last survive power loss (fdatasync)."""

    def full_sync(self) -> None:
        """On return all bytes and the length survive power loss (fsync)."""

    def truncate(self, length: int) -> None:
        """Set the length; new bytes are zero."""

    def length(self) -> int:
        """Bytes in the file."""

    def links(self) -> int:
        """How many names the file has."""

    def close(self) -> None:
        """Give the file back; syncs nothing."""


class Files(Protocol):
    """A file system, as far as the log needs one."""

    def create(self, path: Path) -> File:
        """A new, empty file; an old one of that name is emptied."""

    def open(self, path: Path) -> File:
        """An existing file, to read and write. Raises FileNotFoundError."""

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name, over whatever had it."""

    def unlink(self, path: Path) -> None:
        """Remove a name."""

    def names(self, directory: Path) -> list[str]:
        """Names in a directory, sorted."""

    def make_directory(self, directory: Path) -> None:
        """Create a directory, and what is missing above it, and sync the new names."""

    def sync_directory(self, directory: Path) -> None:
        """On return the names in a directory survive power loss."""

    def free_bytes(self, directory: Path) -> int:
        """Bytes that may still be written on the volume."""

    def total_bytes(self, directory: Path) -> int:
        """Bytes that the volume holds, written or not."""

    def free_files(self, directory: Path) -> int | None:
        """How many files and directories may still be made on the volume; None: as many as there are bytes for."""


class Loop(Protocol):
    """What the log needs of an event loop; those of asyncio and uvloop have it."""

    def call_soon(self, callback: Callable[[], object], /) -> object:
        """Run it in a later turn of the loop, behind all that waits; only in the loop's thread."""

    def call_soon_threadsafe(self, callback: Callable[[], object], /) -> object:
        """The same, from any thread. Raises RuntimeError once the loop is closed."""

    def add_reader(self, fd: int, callback: Callable[[], object], /) -> object:
        """Run it whenever the descriptor is readable."""

    def remove_reader(self, fd: int, /) -> object:
        """Watch the descriptor no longer."""


class BackgroundSync(Protocol):
    """Start a sync, and be told when it is done. One is under way at a time; calls never overlap, but for `close`.

    Who calls `begin` keeps the file open, and writes nothing to it, until `ended` or `wait` told the end, once.
    """

    def begin(self, file: File) -> None:
        """Begin a `data_sync` of all that was written to `file`; returns at once.

        Raises:
            OSError: it could not be begun; nothing is under way, and nothing is said about the file.
        """

    def ended(self) -> bool:
        """Whether the sync under way has ended; does not wait. On True the file's contract for `data_sync` holds.

        Raises:
            OSError: the sync has ended, and failed.
        """

    def wait(self) -> None:
        """Block until the sync under way has ended, whether or not a loop runs. Errors as for `ended`."""

    def watch(self, loop: Loop, told: Callable[[], None]) -> None:
        """From now on `told` runs in the loop's thread, which calls this, after each end; it may run in vain."""

    def close(self) -> None:
        """Stop watching and give back what the system gave. From any thread, also when the loop no longer runs."""


class OsFile:
    """A file of the operating system."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def descriptor(self) -> int:
        """The file descriptor, -1 once closed."""
        return self._fd

    def write(self, buffers: Sequence[bytes], offset: int) -> None:
        """As File."""
        if len(buffers) == 1 and os.pwrite(self._fd, buffers[0], offset) == len(buffers[0]):
            return  # a small batch, and a marker
        at = 0
        while at < len(buffers):
            some: Sequence[bytes | memoryview] = buffers[at : at + _IOV_MAX]
            at += len(some)
            wanted = sum(map(len, some))
            while True:
                written = os.pwritev(self._fd, some, offset)
                offset += written
                wanted -= written
                if not wanted:
                    break
                some = _rest(some, written)

    def read(self, length: int, offset: int) -> bytes:
        """As File."""
        data = os.pread(self._fd, length, offset)
        while 0 < len(data) < length:
            more = os.pread(self._fd, length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def data_sync(self) -> None:
        """As File."""
        os.fdatasync(self._fd)

    def full_sync(self) -> None:
        """As File."""
        os.fsync(self._fd)

    def truncate(self, length: int) -> None:
        """As File."""
        os.ftruncate(self._fd, length)

    def length(self) -> int:
        """As File."""
        return os.fstat(self._fd).st_size

    def links(self) -> int:
        """As File."""
        return os.fstat(self._fd).st_nlink

    def close(self) -> None:
        """As File."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _rest(buffers: Sequence[bytes | memoryview], written: int) -> list[bytes | memoryview]:
    """What is left of `buffers` after a short write of `written` bytes."""
    left: list[bytes | memoryview] = []
    for buffer in buffers:
        if written >= len(buffer):
            written -= len(buffer)
        else:
            left.append(memoryview(buffer)[written:])
            written = 0
    return left


class OsFiles:
    """The operating system's file system."""

    def create(self, path: Path) -> File:
        """As Files."""
        return OsFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644))

    def open(self, path: Path) -> File:
        """As Files."""
        return OsFile(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def rename(self, old: Path, new: Path) -> None:
        """As Files."""
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        """As Files."""
        os.unlink(path)

    def names(self, directory: Path) -> list[str]:
        """As Files."""
        return sorted(os.listdir(directory))

    def make_directory(self, directory: Path) -> None:
        """As Files."""
        missing = []
        at = directory
        while not at.exists():
            missing.append(at)
            at = at.parent
        for new in reversed(missing):
            new.mkdir(exist_ok=True)
            self.sync_directory(new.parent)

    def sync_directory(self, directory: Path) -> None:
        """As Files."""
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free_bytes(self, directory: Path) -> int:
        """As Files."""
        stat = os.statvfs(directory)
        return stat.f_bavail * stat.f_frsize

    def total_bytes(self, directory: Path) -> int:
        """As Files."""
        stat = os.statvfs(directory)
        return stat.f_blocks * stat.f_frsize

    def free_files(self, directory: Path) -> int | None:
        """As Files."""
        stat = os.statvfs(directory)
        return (
            stat.f_favail if stat.f_files else None
        )  # btrfs, for one, has no table of inodes and tells 0 of 0
