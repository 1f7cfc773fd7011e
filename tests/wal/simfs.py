"""A file system in memory that forgets what was not synced. Stands at the log's file port.

A crash keeps, of what was written since the last sync, any 512-byte sectors it likes, and of the renames and removals
in a directory any prefix. `data_sync` is as strict as its contract: it does not make a new length durable. A sync in the
background makes nothing durable before its end.
"""

from __future__ import annotations

import errno
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from stele.wal.files import File, Loop

SECTOR = 512


class PowerOff(OSError):
    """The machine is off."""


class _Inode:
    def __init__(self) -> None:
        self.data = bytearray()
        self.durable = bytearray()
        self.dirty: list[tuple[int, int]] = []
        self.names = 0
        self.unreadable: set[int] = set()

    def touches_unreadable(self, begin: int, end: int) -> bool:
        return any(begin < (s + 1) * SECTOR and s * SECTOR < end for s in self.unreadable)

    def crashed(self, rng: random.Random) -> _Inode:
        new = _Inode()
        data = bytearray(self.durable)
        if self.dirty or len(self.data) != len(self.durable):
            if rng.random() < 0.5:  # the length may or may not have reached the disk
                data = data[: len(self.data)].ljust(len(self.data), b"\0")
            for begin, end in self.dirty:
                for at in range(begin - begin % SECTOR, end, SECTOR):
                    lo, hi = max(at, begin), min(at + SECTOR, end, len(data), len(self.data))
                    if lo < hi and rng.random() < 0.5:
                        data[lo:hi] = self.data[lo:hi]
        new.data, new.durable = data, bytearray(data)
        new.unreadable = set(self.unreadable)
        return new


class SimFiles:
    """Implements stele.wal.files.Files. `fail_after`: that many operations from now on the power goes."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._names: dict[Path, _Inode] = {}
        self._durable_names: dict[Path, _Inode] = {}
        self._steps: list[dict[Path, _Inode]] = []
        self.off = False
        self.fail_after: int | None = None
        self.total = self.free = 1 << 40
        self.free_inodes: int | None = None
        self.sync_error = False
        self.write_error = False
        self.operations = 0
        self.syncs = 0
        self.write_calls: list[list[int]] = []

    def step(self) -> None:
        self.operations += 1
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after < 0:
                self.off = True
        if self.off:
            raise PowerOff("power is off")

    def crash(self, rng: random.Random) -> SimFiles:
        """What the next boot finds."""
        with self._lock:
            self.off = True
            new = type(self)()
            names = self._durable_names
            if self._steps:
                keep = rng.randint(0, len(self._steps))
                if keep:
                    names = self._steps[keep - 1]
            inodes: dict[int, _Inode] = {}
            for path, inode in names.items():
                if id(inode) not in inodes:
                    inodes[id(inode)] = inode.crashed(rng)
                new._names[path] = inodes[id(inode)]
            new._durable_names = dict(new._names)
            return new

    def copy(self) -> SimFiles:
        """The same files, all durable: for damaging them."""
        with self._lock:
            new = SimFiles()
            for path, inode in self._names.items():
                other = _Inode()
                other.data, other.durable = bytearray(inode.data), bytearray(inode.data)
                other.unreadable = set(inode.unreadable)
                new._names[path] = other
            new._durable_names = dict(new._names)
            return new

    def content(self, path: Path) -> bytearray:
        """The bytes of a file, to look at or to damage."""
        return self._names[path].data

    def copies(self, path: Path) -> tuple[bytearray, bytearray]:
        """A file's bytes as the page cache and as the disk has them, to damage both."""
        inode = self._names[path]
        return inode.data, inode.durable

    def set_content(self, path: Path, data: bytes) -> None:
        """Replace a file's bytes, durably."""
        inode = self._names.setdefault(path, _Inode())
        inode.data, inode.durable, inode.dirty = bytearray(data), bytearray(data), []
        self._durable_names = dict(self._names)

    def spoil(self, path: Path, sector: int) -> None:
        """From now on the disk cannot read that sector of a file. Writing all of it anew mends it, as disks do."""
        self._names[path].unreadable.add(sector)

    def paths(self) -> list[Path]:
        """All files."""
        return sorted(self._names)

    def _renamed(self) -> None:
        self._steps.append(dict(self._names))

    # --- the port

    def create(self, path: Path) -> SimFile:
        with self._lock:
            self.step()
            inode = _Inode()
            self._names[path] = inode
            self._renamed()
            return SimFile(self, inode)

    def open(self, path: Path) -> SimFile:
        with self._lock:
            self.step()
            if path not in self._names:
                raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
            return SimFile(self, self._names[path])

    def rename(self, old: Path, new: Path) -> None:
        with self._lock:
            self.step()
            self._names[new] = self._names.pop(old)
            self._renamed()

    def unlink(self, path: Path) -> None:
        with self._lock:
            self.step()
            self.free += len(self._names.pop(path).data)
            self._renamed()

    def names(self, directory: Path) -> list[str]:
        with self._lock:
            self.step()
            return sorted(p.name for p in self._names if p.parent == directory)

    def make_directory(self, directory: Path) -> None:
        self.step()

    def sync_directory(self, directory: Path) -> None:
        with self._lock:
            self.step()
            self.syncs += 1
            self._durable_names = dict(self._names)
            self._steps = []

    def free_bytes(self, directory: Path) -> int:
        return self.free

    def total_bytes(self, directory: Path) -> int:
        return self.total

    def free_files(self, directory: Path) -> int | None:
        return self.free_inodes


class SimFile:
    def __init__(self, files: SimFiles, inode: _Inode) -> None:
        self._files = files
        self._inode = inode

    def write(self, buffers: Sequence[bytes], offset: int) -> None:
        with self._files._lock:
            self._files.step()
            if self._files.write_error:
                raise OSError(errno.EIO, "input/output error")
            data = b"".join(buffers)
            self._files.write_calls.append([len(b) for b in buffers])
            inode = self._inode
            end = offset + len(data)
            inode.unreadable -= set(range(-(-offset // SECTOR), end // SECTOR))
            if inode.touches_unreadable(offset, end):
                raise OSError(
                    errno.EIO, "input/output error"
                )  # what is left of the sector has to be read first
            grown = max(0, offset + len(data) - len(inode.data))
            if grown > self._files.free:
                raise OSError(errno.ENOSPC, "no space left on device")
            self._files.free -= grown
            if offset > len(inode.data):
                inode.data.extend(b"\0" * (offset - len(inode.data)))
            inode.data[offset : offset + len(data)] = data
            inode.dirty.append((offset, offset + len(data)))

    def read(self, length: int, offset: int) -> bytes:
        with self._files._lock:
            self._files.step()
            if self._inode.touches_unreadable(offset, min(offset + length, len(self._inode.data))):
                raise OSError(errno.EIO, "input/output error")
            return bytes(self._inode.data[offset : offset + length])

    def data_sync(self) -> None:
        with self._files._lock:
            self._sync_step()
            inode = self._inode
            known = len(inode.durable)
            inode.durable[:] = inode.data[:known].ljust(known, b"\0")
            inode.dirty = [(max(a, known), b) for a, b in inode.dirty if b > known]

    def full_sync(self) -> None:
        with self._files._lock:
            self._sync_step()
            self._inode.durable = bytearray(self._inode.data)
            self._inode.dirty = []

    def _sync_step(self) -> None:
        self._files.step()
        self._files.syncs += 1
        if self._files.sync_error:
            raise OSError(errno.EIO, "input/output error")

    def truncate(self, length: int) -> None:
        with self._files._lock:
            self._files.step()
            inode = self._inode
            inode.data[length:] = b""
            inode.unreadable = {s for s in inode.unreadable if s * SECTOR < length}
            inode.data.extend(b"\0" * (length - len(inode.data)))

    def length(self) -> int:
        return len(self._inode.data)

    def links(self) -> int:
        return 1

    def close(self) -> None:
        return None


class SimLoop:
    """Implements stele.wal.files.Loop: what waits runs when the test says so."""

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], object]] = deque()
        self.closed = False

    def call_soon(self, callback: Callable[[], object], /) -> None:
        self.waiting.append(callback)

    def call_soon_threadsafe(self, callback: Callable[[], object], /) -> None:
        if self.closed:
            raise RuntimeError("the loop is closed")
        self.waiting.append(callback)

    def add_reader(self, fd: int, callback: Callable[[], object], /) -> None:
        raise NotImplementedError("a simulated loop has no descriptors")

    def remove_reader(self, fd: int, /) -> None:
        raise NotImplementedError("a simulated loop has no descriptors")

    def turn(self) -> None:
        """Run what waits now; what that adds waits for the next turn."""
        for _ in range(len(self.waiting)):
            self.waiting.popleft()()

    def run(self) -> None:
        """Turns until nothing waits."""
        while self.waiting:
            self.turn()


class SimSync:
    """Implements stele.wal.files.BackgroundSync: a sync takes effect at its end, which comes when the test says so."""

    def __init__(self) -> None:
        self._file: File | None = None
        self._error: OSError | None = None
        self._ended = False
        self._on_end: Callable[[], None] | None = None
        self.refuses = False
        self.begun = 0
        self.closed = False

    @property
    def under_way(self) -> bool:
        return self._file is not None and not self._ended

    def end(self) -> None:
        """The system ends the sync; the loop is not yet told."""
        assert self._file is not None and not self._ended
        self._ended = True
        try:
            self._file.data_sync()
        except OSError as exc:
            self._error = exc

    def tell(self) -> None:
        """The loop sees it, as it may see it in vain."""
        if self._on_end is not None and not self.closed:
            self._on_end()

    # --- the port

    def begin(self, file: File) -> None:
        assert self._file is None and not self.closed
        if self.refuses:
            raise OSError(errno.EAGAIN, "no resources")
        self._file, self._ended, self._error = file, False, None
        self.begun += 1

    def ended(self) -> bool:
        assert self._file is not None and not self.closed
        if not self._ended:
            return False
        self._file, error = None, self._error
        if error is not None:
            raise error
        return True

    def wait(self) -> None:
        if not self._ended:
            self.end()
        assert self.ended()

    def watch(self, loop: Loop, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    def close(self) -> None:
        assert self._file is None
        self.closed = True
