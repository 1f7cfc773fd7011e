"""Ends connections of Flight that bring more than commands and tickets take. Made by `FlightServer`; one thread.

pyarrow sets no limit to a message, and offers none: it holds each one whole, several times over, before anybody is asked. So the
kernel is asked what came in over each connection (TCP_INFO), and the sockets are found among this process's own. Where the
system does not tell, nothing is watched.

Invariant: over a connection come ALLOWED_BYTES at once, and then RATE_BYTES each second, beside a sixteenth of what was
sent over it, which is far more than its acknowledgements take; and what comes between two looks.
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
LOOK_S = 0.05
_ACKED_AND_RECEIVED = struct.Struct("=QQ")
_ACKED_AT = 120
"""Where tcpi_bytes_acked and tcpi_bytes_received stand in the kernel's struct tcp_info."""
_DESCRIPTORS = "/proc/self/fd"


class _Flow:
    __slots__ = ("acked", "allowed", "received")

    def __init__(self) -> None:
        self.received = self.acked = 0
        self.allowed = float(ALLOWED_BYTES)

    def passed(self, seconds: float, acked: int, received: int) -> bool:
        """Whether it has brought no more than it may."""
        brought = received - self.received - (acked - self.acked) // 16
        self.received, self.acked = received, acked
        self.allowed = min(self.allowed + RATE_BYTES * seconds, ALLOWED_BYTES) - max(0, brought)
        return self.allowed >= 0


class InflowWatch:
    """Of the connections to one port of this process; `ended(host)` is told of each that was ended."""

    def __init__(self, port: int, ended: Callable[[str], None]) -> None:
        self._port = port
        self._ended = ended
        self._flows: dict[tuple[int, int], _Flow | None] = {}  # by descriptor and inode; None: another socket
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if os.path.isdir(_DESCRIPTORS) and hasattr(socket, "TCP_INFO"):
            self._look(0.0)
            self._thread = threading.Thread(target=self._run, name="stele-flight-inflow", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        looked_s = time.monotonic()
        while not self._closed.wait(LOOK_S):
            now_s = time.monotonic()
            self._look(now_s - looked_s)
            looked_s = now_s

    def _look(self, seconds: float) -> None:
        try:
            names = os.listdir(_DESCRIPTORS)
        except OSError:  # this process has no descriptor left
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
            if sock.getsockname()[1] == self._port:  # the descriptor may be another socket's by now
                host = str(sock.getpeername()[0])
                sock.shutdown(socket.SHUT_RDWR)
                self._ended(host)
