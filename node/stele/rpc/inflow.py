"""Ends Flight connections that send more than commands and tickets need. Made by `FlightServer`; one thread.

pyarrow has no limit for messages: it holds each one whole, several times over, before it calls our code. So
this asks the kernel how much arrived on each connection (TCP_INFO), and finds the sockets among the process's
own. If the system cannot tell, nothing is watched.

A look at 500 connections takes about 2 ms, so there is one every LOOK_S. A large message takes memory while
it arrives: if the process has grown by GREW_BYTES since the last look, the next one is at once.

Invariant: a connection may send ALLOWED_BYTES at once and then RATE_BYTES a second. It may also send a sixteenth of what
was sent to it; its acknowledgements take far less. What arrives between two looks is not bounded.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

ALLOWED_BYTES = 4 << 20
RATE_BYTES = 1 << 20
LOOK_S = 1.0
GREW_S = 0.05
"""Seconds between two looks at the process's memory."""
GREW_BYTES = 16 << 20
_ACKED_AND_RECEIVED = struct.Struct("=QQ")
_ACKED_AT = 120
"""Offsets of tcpi_bytes_acked and tcpi_bytes_received in the kernel's struct tcp_info."""
_DESCRIPTORS = "/proc/self/fd"
_MEMORY = "/proc/self/statm"
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


class _Flow:
    __slots__ = ("acked", "allowed", "received")

    def __init__(self) -> None:
        self.received = self.acked = 0
        self.allowed = float(ALLOWED_BYTES)

    def passed(self, seconds: float, acked: int, received: int) -> bool:
        """Whether the connection has sent no more than allowed."""
        brought = received - self.received - (acked - self.acked) // 16
        self.received, self.acked = received, acked
        self.allowed = min(self.allowed + RATE_BYTES * seconds, ALLOWED_BYTES) - max(0, brought)
        return self.allowed >= 0


class Looks:
    """Decides when to look at the connections."""

    def __init__(self, now_s: float, resident_bytes: int) -> None:
        self._looked_s = now_s
        self._resident_bytes = resident_bytes

    def due(self, now_s: float, resident_bytes: int) -> float:
        """Seconds since the last look if another is due now; else 0."""
        passed_s = now_s - self._looked_s
        self._resident_bytes = min(self._resident_bytes, resident_bytes)
        if passed_s < LOOK_S and resident_bytes - self._resident_bytes < GREW_BYTES:
            return 0.0
        self._looked_s, self._resident_bytes = now_s, resident_bytes
        return passed_s


class InflowWatch:
    """Watches the connections to one port of this process. Calls `ended(host)` for each that was ended."""

    def __init__(self, port: int, ended: Callable[[str], None]) -> None:
        self._port = port
        self._ended = ended
        self._flows: dict[
            tuple[int, int], _Flow | None
        ] = {}  # by descriptor and inode; None: not one of these connections
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if os.path.isdir(_DESCRIPTORS) and hasattr(socket, "TCP_INFO"):
            self._statm = os.open(_MEMORY, os.O_RDONLY | os.O_CLOEXEC)
            self._look(0.0)
            self._thread = threading.Thread(target=self._run, name="stele-flight-inflow", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            os.close(self._statm)

    def _run(self) -> None:
        looks = Looks(time.monotonic(), _resident_bytes(self._statm))
        while not self._closed.wait(GREW_S):
            seconds = looks.due(time.monotonic(), _resident_bytes(self._statm))
            if seconds:
                self._look(seconds)

    def _look(self, seconds: float) -> None:
        try:
            names = os.listdir(_DESCRIPTORS)
        except OSError:  # no file descriptor is left
            return
        before, self._flows = self._flows, {}
        for name in names:
            fd = int(name)
            with suppress(OSError):
                found = os.fstat(fd)
                if not stat.S_ISSOCK(found.st_mode):
                    continue
                key = fd, found.st_ino
                if key in before:
                    flow = before[key]
                else:
                    flow = self._met(fd)
                self._flows[key] = flow
                if flow is not None:
                    self._judge(fd, flow, seconds)

    def _met(self, fd: int) -> _Flow | None:
        with socket.socket(fileno=os.dup(fd)) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
                return None
            if sock.getsockname()[1] != self._port:
                return None
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return None
            return _Flow()

    def _judge(self, fd: int, flow: _Flow, seconds: float) -> None:
        with socket.socket(fileno=os.dup(fd)) as sock:
            size = _ACKED_AT + _ACKED_AND_RECEIVED.size
            told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
            if len(told) < size or flow.passed(seconds, *_ACKED_AND_RECEIVED.unpack_from(told, _ACKED_AT)):
                return
            if sock.getsockname()[1] == self._port:  # the descriptor may belong to another socket by now
                host = str(sock.getpeername()[0])
                sock.shutdown(socket.SHUT_RDWR)
                self._ended(host)


def _resident_bytes(statm: int) -> int:
    """The process's memory, from its open statm file: there may be no descriptor left to open another."""
    return int(os.pread(statm, 256, 0).split()[1]) * _PAGE_BYTES
