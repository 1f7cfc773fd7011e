"""The few file operations that the log needs, as ports, and their real implementation. Imports nothing of
ours.

A test's implementation decides what a crash loses. Invariant: bytes survive power loss only after a sync of
their file; names survive only after a sync of their directory.
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
        """On return all bytes written below the length of the last `full_sync` survive power loss (fdatasync)."""

    def full_sync(self) -> None:
        """On return all bytes and the length survive power loss (fsync)."""

    def truncate(self, length: int) -> None:
        """Set the length; new bytes are zero."""

    def length(self) -> int:
        """Bytes in the file."""

    def links(self) -> int:
        """How many names the file has."""

    def close(self) -> None:
        """Close the file. Does not sync."""


class Files(Protocol):
    """The file system operations that the log needs."""

    def create(self, path: Path) -> File:
        """Create an empty file. An existing file of that name is emptied."""

    def open(self, path: Path) -> File:
        """Open an existing file for reading and writing. Raises FileNotFoundError."""

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file. Replaces a file that has the new name."""

    def unlink(self, path: Path) -> None:
        """Remove a name."""

    def names(self, directory: Path) -> list[str]:
        """The names in a directory, sorted."""

    def make_directory(self, directory: Path) -> None:
        """Create a directory and its missing parents, and sync the new names."""

    def sync_directory(self, directory: Path) -> None:
        """On return the names in a directory survive power loss."""

    def free_bytes(self, directory: Path) -> int:
        """Bytes that are free on the volume."""

    def total_bytes(self, directory: Path) -> int:
        """The size of the volume in bytes."""

    def free_files(self, directory: Path) -> int | None:
        """How many more files and directories the volume can hold; None if only the free bytes limit it."""


class Loop(Protocol):
    """What the log needs of an event loop. The loops of asyncio and uvloop provide it."""

    def call_soon(self, callback: Callable[[], object], /) -> object:
        """Run `callback` in a later turn of the loop, after all waiting callbacks. Only in the loop's thread."""

    def call_soon_threadsafe(self, callback: Callable[[], object], /) -> object:
        """As `call_soon`, from any thread. Raises RuntimeError once the loop is closed."""

    def add_reader(self, fd: int, callback: Callable[[], object], /) -> object:
        """Run `callback` whenever the descriptor is readable."""

    def remove_reader(self, fd: int, /) -> object:
        """Stop watching the descriptor."""


class BackgroundSync(Protocol):
    """Starts a sync and reports its end. One sync is under way at a time. Calls never overlap, except
    `close`.

    After `begin`, the caller keeps the file open and does not write to it until `ended` or `wait` reported
    the end.
    """

    def begin(self, file: File) -> None:
        """Begin a `data_sync` of all that was written to `file`; returns at once.

        Raises:
            OSError: the sync could not be begun. Nothing is under way. This does not mean that the file is bad.
        """

    def ended(self) -> bool:
        """Whether the sync under way has ended; does not wait. True promises what a return of `data_sync` does.

        Raises:
            OSError: the sync ended with an error.
        """

    def wait(self) -> None:
        """Block until the sync under way has ended, even if no loop runs. Raises what `ended` raises."""

    def watch(self, loop: Loop, on_end: Callable[[], None]) -> None:
        """Run `on_end` in the loop's thread after each sync has ended; it may also run when none has. Call in
        the loop's thread."""

    def close(self) -> None:
        """Stop watching and free the system's resources. From any thread, even if the loop no longer runs."""


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
        """See File."""
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
        """See File."""
        data = os.pread(self._fd, length, offset)
        while 0 < len(data) < length:
            more = os.pread(self._fd, length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def data_sync(self) -> None:
        """See File."""
        os.fdatasync(self._fd)

    def full_sync(self) -> None:
        """See File."""
        os.fsync(self._fd)

    def truncate(self, length: int) -> None:
        """See File."""
        os.ftruncate(self._fd, length)

    def length(self) -> int:
        """See File."""
        return os.fstat(self._fd).st_size

    def links(self) -> int:
        """See File."""
        return os.fstat(self._fd).st_nlink

    def close(self) -> None:
        """See File."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _rest(buffers: Sequence[bytes | memoryview], written: int) -> list[bytes | memoryview]:
    """The part of `buffers` that a short write of `written` bytes left."""
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
        """See Files."""
        return OsFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644))

    def open(self, path: Path) -> File:
        """See Files."""
        return OsFile(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def rename(self, old: Path, new: Path) -> None:
        """See Files."""
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        """See Files."""
        os.unlink(path)

    def names(self, directory: Path) -> list[str]:
        """See Files."""
        return sorted(os.listdir(directory))

    def make_directory(self, directory: Path) -> None:
        """See Files."""
        missing = []
        at = directory
        while not at.exists():
            missing.append(at)
            at = at.parent
        for new in reversed(missing):
            new.mkdir(exist_ok=True)
            self.sync_directory(new.parent)

    def sync_directory(self, directory: Path) -> None:
        """See Files."""
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free_bytes(self, directory: Path) -> int:
        """See Files."""
        stat = os.statvfs(directory)
        return stat.f_bavail * stat.f_frsize

    def total_bytes(self, directory: Path) -> int:
        """See Files."""
        stat = os.statvfs(directory)
        return stat.f_blocks * stat.f_frsize

    def free_files(self, directory: Path) -> int | None:
        """See Files."""
        stat = os.statvfs(directory)
        # Btrfs, for example, has no inode table and reports 0 of 0.
        return stat.f_favail if stat.f_files else None
