"""A file system in memory that records every call which changes something. Speaks the kernel's FUSE protocol itself.

The recorded program mounts it for itself alone (`mount`), in a mount namespace of its own, so that nothing stays mounted when
it ends. Invariant: an operation is recorded before the kernel hears that it is done.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import shutil
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.power.disk import Names, Operation, Resize, Sync, Tree, Write

DEVICE = "/dev/fuse"
_FOR_EVER_S = 3600
_IN = struct.Struct("<IIQQIIII")  # length, opcode, unique, inode, uid, gid, pid, padding
_OUT = struct.Struct("<IiQ")
_ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
_REQUEST_BYTES = 1 << 20
_WRITE_BYTES = 1 << 19
_KEEP_SIZE = 1
_SIZE_IS_SET = 1 << 3
_ASYNC_READ, _BIG_WRITES, _MAX_PAGES = 1 << 0, 1 << 5, 1 << 22
_CLONE_NEWNS = 0x20000
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18


def unavailable() -> str:
    """Why nothing can be recorded here; "" if it can."""
    if os.geteuid() != 0:
        return "recording file calls needs root"
    try:
        os.close(os.open(DEVICE, os.O_RDWR))
    except OSError as exc:
        return f"recording file calls needs {DEVICE}: {exc.strerror}"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--mount", "true"]).returncode != 0:
        return "recording file calls needs mount namespaces, which are not permitted here"
    return ""


def mount(fd: int, where: Path) -> None:
    """Mount what serves `fd` for this process and its children. It is closed here: when the server is gone, so is the file
    system, and nobody waits for it."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int, what: str) -> None:
        if result:
            raise OSError(ctypes.get_errno(), what)

    check(libc.unshare(_CLONE_NEWNS), "unshare")
    check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "making mounts private")
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,default_permissions"
    check(libc.mount(b"recorder", bytes(where), b"fuse", 0, options.encode()), "mounting")
    os.close(fd)


def _text(data: memoryview) -> str:
    return bytes(data).split(b"\0")[0].decode()


class Recorder:
    """Serves one mount. `tree`: what is there at first. `operations`: what was done, in order."""

    def __init__(self, tree: Tree) -> None:
        self.operations: list[Operation] = []
        found = tree.copy()
        self._names, self._files = found.names, found.files
        self._links = Counter(inode for names in self._names.values() for inode in names.values())
        self._last = max((*self._names, *self._files))
        self._calls: dict[int, Callable[[int, memoryview], bytes]] = {
            1: self._lookup,
            3: self._attributes,
            4: self._set_attributes,
            8: lambda at, data: self._entry(self._make(at, _text(data[16:]), is_directory=False)),
            9: lambda at, data: self._entry(self._make(at, _text(data[8:]), is_directory=True)),
            10: self._remove,
            11: self._remove,
            12: lambda at, data: self._rename(at, data, 8),
            13: self._link,
            14: lambda at, data: struct.pack("<QII", 0, 2, 0),
            15: self._read,
            16: self._write,
            17: lambda at, data: struct.pack(
                "<QQQQQIIII24x", 1 << 24, 1 << 23, 1 << 23, 1 << 20, 1 << 19, 4096, 255, 4096, 0
            ),
            18: lambda at, data: b"",  # release
            20: self._sync,
            25: lambda at, data: b"",  # flush
            26: self._init,
            27: lambda at, data: struct.pack("<QII", 0, 0, 0),
            28: self._read_directory,
            29: lambda at, data: b"",  # release of a directory
            30: self._sync,
            35: lambda at, data: (
                self._entry(self._make(at, _text(data[16:]), is_directory=False))
                + struct.pack("<QII", 0, 2, 0)
            ),
            43: self._allocate,
            45: self._rename_with_flags,
        }

    def serve(self, fd: int, ended: Callable[[], bool]) -> None:
        """Answer the kernel until `ended()`, which is asked now and then."""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while not ended():
            if not poll.poll(50):
                continue
            try:
                request = os.read(fd, _REQUEST_BYTES)
            except OSError as exc:
                if exc.errno == errno.ENODEV:
                    return
                if exc.errno == errno.EPERM:  # not mounted yet
                    time.sleep(0.02)
                    continue
                if exc.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue
                raise
            self._answer(fd, request)

    def _answer(self, fd: int, request: bytes) -> None:
        length, opcode, unique, inode, *_ = _IN.unpack_from(request)
        if opcode in (2, 36, 42):  # forget, interrupt: nobody waits
            return
        error, answer = 0, b""
        try:
            call = self._calls.get(opcode)
            if call is None:
                raise OSError(errno.ENOSYS, str(opcode))
            answer = call(inode, memoryview(request)[_IN.size : length])
        except OSError as exc:
            error = -(exc.errno or errno.EIO)
        try:
            os.write(fd, _OUT.pack(_OUT.size + len(answer), error, unique) + answer)
        except OSError as exc:
            if exc.errno != errno.ENOENT:  # the asker is gone
                raise

    def _init(self, at: int, data: memoryview) -> bytes:
        _, _, read_ahead, flags = struct.unpack_from("<IIII", data)
        taken = flags & (_ASYNC_READ | _BIG_WRITES | _MAX_PAGES)
        return struct.pack("<IIIIHHIIHH32x", 7, 31, read_ahead, taken, 64, 48, _WRITE_BYTES, 1, 128, 0)

    # --- names

    def _record(self, change: Names) -> None:
        self.operations.append(change)
        for (directory, name), inode in change.changes:
            old = self._names[directory].pop(name, None)
            if old is not None:
                self._links[old] -= 1
            if inode is not None:
                self._names[directory][name] = inode
                self._links[inode] += 1

    def _child(self, at: int, name: str) -> int:
        if name not in self._names[at]:
            raise OSError(errno.ENOENT, name)
        return self._names[at][name]

    def _free(self, at: int, name: str) -> None:
        if name in self._names[at]:
            raise OSError(errno.EEXIST, name)

    def _make(self, at: int, name: str, *, is_directory: bool) -> int:
        self._free(at, name)
        inode = self._last = self._last + 1
        if is_directory:
            self._names[inode] = {}
        else:
            self._files[inode] = bytearray()
        self._record(Names(time.monotonic(), (((at, name), inode),), inode, is_directory))
        return inode

    def _lookup(self, at: int, data: memoryview) -> bytes:
        return self._entry(self._child(at, _text(data)))

    def _remove(self, at: int, data: memoryview) -> bytes:
        name = _text(data)
        if self._names.get(self._child(at, name)):
            raise OSError(errno.ENOTEMPTY, name)
        self._record(Names(time.monotonic(), (((at, name), None),)))
        return b""

    def _rename(self, at: int, data: memoryview, skip: int) -> bytes:
        (to,) = struct.unpack_from("<Q", data)
        source = _text(data[skip:])
        target = _text(data[skip + len(source.encode()) + 1 :])
        inode, old = self._child(at, source), self._names[to].get(target)
        if old == inode:
            return b""
        if old is not None and self._names.get(old):
            raise OSError(errno.ENOTEMPTY, target)
        self._record(Names(time.monotonic(), (((at, source), None), ((to, target), inode))))
        return b""

    def _rename_with_flags(self, at: int, data: memoryview) -> bytes:
        if struct.unpack_from("<I", data, 8)[0]:
            raise OSError(errno.EINVAL, "flags")
        return self._rename(at, data, 16)

    def _link(self, at: int, data: memoryview) -> bytes:
        (inode,) = struct.unpack_from("<Q", data)
        name = _text(data[8:])
        self._free(at, name)
        self._record(Names(time.monotonic(), (((at, name), inode),)))
        return self._entry(inode)

    def _read_directory(self, at: int, data: memoryview) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", data)
        answer = b""
        for number, (name, inode) in enumerate(list(self._names[at].items())[offset:], offset + 1):
            raw = name.encode()
            kind = 4 if inode in self._names else 8
            entry = struct.pack("<QQII", inode, number, len(raw), kind) + raw
            entry += bytes(-len(entry) % 8)
            if len(answer) + len(entry) > size:
                break
            answer += entry
        return answer

    # --- bytes

    def _packed(self, inode: int) -> bytes:
        is_directory = inode in self._names
        size = 4096 if is_directory else len(self._files[inode])
        mode = 0o040755 if is_directory else 0o100644
        links = 2 if is_directory else self._links[inode]
        blocks = (size + 511) // 512
        return _ATTRIBUTES.pack(inode, size, blocks, 0, 0, 0, 0, 0, 0, mode, links, 0, 0, 0, 4096, 0)

    def _entry(self, inode: int) -> bytes:
        return struct.pack("<QQQQII", inode, 0, _FOR_EVER_S, _FOR_EVER_S, 0, 0) + self._packed(inode)

    def _attributes(self, inode: int, data: memoryview) -> bytes:
        return struct.pack("<QII", _FOR_EVER_S, 0, 0) + self._packed(inode)

    def _set_attributes(self, inode: int, data: memoryview) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", data)
        if valid & _SIZE_IS_SET:
            self.operations.append(Resize(time.monotonic(), inode, size, shrinks=True))
            file = self._files[inode]
            del file[size:]
            file.extend(bytes(size - len(file)))
        return self._attributes(inode, data)

    def _allocate(self, inode: int, data: memoryview) -> bytes:
        _, offset, length, mode = struct.unpack_from("<QQQI", data)
        if mode & ~_KEEP_SIZE:
            raise OSError(errno.EOPNOTSUPP, "mode")
        if not mode:
            self.operations.append(Resize(time.monotonic(), inode, offset + length, shrinks=False))
            file = self._files[inode]
            file.extend(bytes(max(0, offset + length - len(file))))
        return b""

    def _read(self, inode: int, data: memoryview) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", data)
        return bytes(memoryview(self._files[inode])[offset : offset + size])

    def _write(self, inode: int, data: memoryview) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", data)
        written, file = bytes(data[40 : 40 + size]), self._files[inode]
        self.operations.append(Write(time.monotonic(), inode, offset, written))
        file.extend(bytes(max(0, offset - len(file))))
        file[offset : offset + size] = written
        return struct.pack("<II", size, 0)

    def _sync(self, inode: int, data: memoryview) -> bytes:
        self.operations.append(Sync(time.monotonic(), inode))
        return b""
