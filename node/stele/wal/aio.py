"""Syncs by the kernel's AIO (io_submit, IOCB_CMD_FDSYNC): implements `BackgroundSync` of files.py. Made by
node.py.

One short system call begins a sync. When the sync ends, an eventfd that the event loop watches becomes readable.
So no thread has to wake up or wait for the interpreter lock. Owns its AIO context and its eventfd, but no file. A
container's seccomp profile or an unusual kernel may refuse AIO, so `kernel_sync` tries a real sync before it
returns a KernelSync.

Invariant: at most one sync is under way, and its result is taken once. Source: io_submit(2), io_getevents(2);
FDSYNC needs Linux 4.18.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import select
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import structlog

from stele.model.errors import ensure
from stele.wal.files import File, Loop, OsFile

_log = structlog.get_logger("stele.wal")

_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""System call numbers of io_setup, io_destroy, io_getevents and io_submit, by machine. The kernel never
changes them."""
SWITCH = "STELE_KERNEL_AIO"
"""Environment variable. The value "off" turns kernel AIO off, for a kernel or sandbox where it does not
work."""
_OFF = frozenset(("off", "0", "no", "false"))
_FDSYNC = 3
_RESFD = 1
_RING_MAGIC = 0xA10A10A1
_PROBE_S = 10.0


class _Control(ctypes.Structure):
    """`struct iocb` of a little-endian machine. FDSYNC requires all other fields to be zero."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_int32),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("fd", ctypes.c_uint32),
        ("buffer", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("result_fd", ctypes.c_uint32),
    )


class _Event(ctypes.Structure):
    """`struct io_event`."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("control", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("result_2", ctypes.c_int64),
    )


class _Ring(ctypes.Structure):
    """The kernel's `struct aio_ring`, which lies at the address that io_setup(2) returns as the context. The
    kernel moves `tail`; the reader moves `head`."""

    _fields_ = (
        ("id", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("head", ctypes.c_uint32),
        ("tail", ctypes.c_uint32),
        ("magic", ctypes.c_uint32),
        ("compatible", ctypes.c_uint32),
        ("incompatible", ctypes.c_uint32),
        ("header_bytes", ctypes.c_uint32),
    )


class KernelSync:
    """Implements stele.wal.files.BackgroundSync for files of the operating system.

    Reads results from the ring that the kernel maps into memory, without a system call (as fio does).

    The constructor raises:
        OSError: this machine or kernel has no AIO, refuses it, or has a ring of an unknown format.
    """

    def __init__(self) -> None:
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None or sys.platform != "linux" or sys.maxsize < 1 << 32:
            raise OSError(errno.ENOSYS, f"kernel AIO is not supported on {sys.platform} {platform.machine()}")
        self._setup, self._destroy, self._get_events, self._submit = numbers
        # CDLL releases the interpreter lock: needed for calls that wait. PyDLL keeps it: right for calls of a
        # microsecond or two, because getting the lock back may take 5 ms.
        self._waiting = ctypes.CDLL(None, use_errno=True).syscall
        self._short = ctypes.PyDLL(None, use_errno=True).syscall
        self._waiting.restype = self._short.restype = ctypes.c_long
        self._context = ctypes.c_ulong(0)
        self._loop: Loop | None = None
        self._owner = 0
        self._on_end: Callable[[], None] | None = None
        self._closed = False
        self._ring_lock = threading.Lock()
        if self._waiting(self._setup, ctypes.c_long(1), ctypes.byref(self._context)) != 0:
            raise _error("io_setup")
        try:
            self._ring = _Ring.from_address(self._context.value)
            if self._ring.magic != _RING_MAGIC or self._ring.incompatible:
                raise OSError(errno.ENOSYS, "the kernel's AIO ring has an unknown format")
            self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:
            self._waiting(self._destroy, self._context)
            raise
        at = self._context.value + self._ring.header_bytes
        self._results = (_Event * self._ring.count).from_address(at)
        # Made once, because each call passes the same addresses.
        self._control = _Control(opcode=_FDSYNC, flags=_RESFD, result_fd=self._eventfd)
        self._controls = (ctypes.POINTER(_Control) * 1)(ctypes.pointer(self._control))
        self._event = _Event()
        self._submit_arguments = (
            ctypes.c_long(self._submit),
            self._context,
            ctypes.c_long(1),
            self._controls,
        )
        self._event_arguments = (ctypes.c_long(1), ctypes.c_long(1), ctypes.byref(self._event), None)

    def begin(self, file: File) -> None:
        """See BackgroundSync."""
        ensure(isinstance(file, OsFile), "kernel AIO can sync only an OsFile")
        self._control.fd = file.descriptor  # type: ignore[attr-defined]
        if self._short(*self._submit_arguments) != 1:
            raise _error("io_submit")

    def ended(self) -> bool:
        """See BackgroundSync."""
        with self._ring_lock:  # `close` unmaps the ring
            ensure(not self._closed, "kernel AIO is used after it was closed")
            ring = self._ring
            head = ring.head
            if head == ring.tail:
                return False
            result = self._results[head].result
            ring.head = (head + 1) % ring.count
        return _ended(result)

    def wait(self) -> None:
        """See BackgroundSync."""
        while True:
            count = self._waiting(self._get_events, self._context, *self._event_arguments)
            if count == 1:
                _ended(self._event.result)
                return
            if count < 0 and ctypes.get_errno() != errno.EINTR:
                raise _error("io_getevents")

    def watch(self, loop: Loop, on_end: Callable[[], None]) -> None:
        """See BackgroundSync."""
        self._loop, self._on_end, self._owner = loop, on_end, threading.get_ident()
        loop.add_reader(self._eventfd, self._readable)

    def readable_within(self, seconds: float) -> bool:
        """Whether the eventfd becomes readable within `seconds`. If so, empty it. Blocks; only for the trial sync."""
        if not select.select([self._eventfd], [], [], seconds)[0]:
            return False
        os.eventfd_read(self._eventfd)
        return True

    def close(self) -> None:
        """See BackgroundSync. Destroys the context at once; the loop's thread closes the eventfd that it
        watches."""
        with self._ring_lock:
            if self._closed:
                return
            self._closed = True
        self._waiting(self._destroy, self._context)
        if self._loop is not None and self._owner != threading.get_ident():
            # Do not close a descriptor that the loop still watches: it would then watch the next file of that
            # number.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._release)
                return
        self._release()

    def _release(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # a closed loop watches nothing
                self._loop.remove_reader(self._eventfd)
        os.close(self._eventfd)

    def _readable(self) -> None:
        # Always empty it, even if another thread took the result; otherwise it stays readable and the loop
        # spins. The kernel writes a result before it signals, so the result is in the ring by now.
        try:
            os.eventfd_read(self._eventfd)
        except BlockingIOError:
            return
        if self._on_end is not None and not self._closed:
            self._on_end()


def _ended(result: int) -> bool:
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return True


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def kernel_sync(directory: Path) -> KernelSync | None:
    """Return a KernelSync if a trial sync of a file in `directory` works. Otherwise return None, and print why.

    The environment variable STELE_KERNEL_AIO=off also gives None. Blocks."""
    if os.environ.get(SWITCH, "").lower() in _OFF:
        _refused(directory, f"{SWITCH} is off")
        return None
    try:
        sync = KernelSync()
    except OSError as exc:
        _refused(directory, str(exc))
        return None
    try:
        with tempfile.TemporaryFile(dir=directory) as unnamed:
            unnamed.write(b"stele")
            unnamed.flush()
            sync.begin(OsFile(unnamed.fileno()))
            if not sync.readable_within(_PROBE_S):
                # Not closed: closing would wait for a sync that may never end.
                _refused(directory, f"a trial sync did not end within {_PROBE_S:.0f} s")
                return None
            if not sync.ended():
                raise OSError(errno.EIO, "the eventfd signalled a sync that has not ended")
    except OSError as exc:
        sync.close()
        _refused(directory, str(exc))
        return None
    return sync


def _refused(directory: Path, why: str) -> None:
    _log.info("kernel AIO is not used: the log's thread does every sync", directory=str(directory), why=why)
