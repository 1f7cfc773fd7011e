"""Ends Flight connections that bring large messages. Made by `FlightServer`; one thread.

pyarrow has no limit for messages: it holds each one whole, several times over, before it calls our code. So
this asks the kernel how much arrived on each connection (TCP_INFO), and finds the sockets among the process's
own. The server says which messages were complete (`came`). What arrived and is not complete is held. If the
system cannot tell, nothing is watched.

A look at 500 connections takes about 2 ms, so there is one every LOOK_S. A large message takes memory while
it arrives: if the process has grown by GREW_BYTES since the last look, the next one follows at once.

Invariants: at a look, a connection that holds more than HELD_BYTES_MAX is ended. If all together hold more
than ALL_BYTES_MAX, those that hold most are ended. The sender of an ended connection sees a reset. A
connection may also send a small share of what was sent to it, for its acknowledgements, and DRIFT_BYTES a
second, for its pings. Between two looks a connection may bring what its sender can send in GREW_S, or
GREW_BYTES in LOOK_S. The kernel holds up to RECEIVE_BYTES of it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import unquote

HELD_BYTES_MAX = 4 << 20
ALL_BYTES_MAX = 32 << 20
CALL_BYTES = 4 << 10
"""What a call brings beside its message: its headers."""
DRIFT_BYTES = 64
RECEIVE_BYTES = 128 << 10
"""The kernel's buffer for what a connection brings; without a bound it grows to tens of megabytes."""
LOOK_S = 1.0
GREW_S = 0.05
"""Seconds between two looks at the process's memory."""
GREW_BYTES = 16 << 20
_ACKED_SHARE = 64
"""A reader of a scan may send one byte for this many that it read, to acknowledge them. Measured readers send
fewer."""
_ACKED_AND_RECEIVED = struct.Struct("=QQ")
_ACKED_AT = 120
"""Offsets of tcpi_bytes_acked and tcpi_bytes_received in the kernel's struct tcp_info."""
_CLOSES_AT_ONCE = struct.pack("ii", 1, 0)
_DESCRIPTORS = "/proc/self/fd"
_MEMORY = "/proc/self/statm"
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


class Flow:
    """The bytes of incomplete messages that one connection holds, as far as can be told."""

    __slots__ = ("_acked", "_received", "held", "peer")

    def __init__(self, peer: str = "") -> None:
        self.peer = peer
        self.held = 0
        self._received = self._acked = 0

    def passed(self, seconds: float, acked: int, received: int, came: int) -> None:
        """Update `held` from the kernel's totals of this connection.

        `acked`, `received`: bytes since it began. `came`: bytes of messages completed in the last `seconds`.
        """
        brought = received - self._received - (acked - self._acked) // _ACKED_SHARE
        self._received, self._acked = received, acked
        self.held = max(0, self.held + max(0, brought) - came - int(DRIFT_BYTES * seconds))


class Looks:
    """Decides when to look at the connections: after LOOK_S, or once the process has grown by GREW_BYTES."""

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
    """Watches the connections to one port of this process. Calls `ended(host)` for each that it ended."""

    def __init__(self, port: int, ended: Callable[[str], None]) -> None:
        self._port = port
        self._ended = ended
        self._flows: dict[
            tuple[int, int], Flow | None
        ] = {}  # by descriptor and inode; None: not one of these connections
        self._lock = threading.Lock()
        self._came: dict[str, int] = {}
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

    def came(self, peer: str, size_bytes: int) -> None:
        """Note that a message of this peer (as Flight names it) was complete, and its call has begun. Any
        thread."""
        if self._thread is not None:
            name = _of_flight(peer)
            with self._lock:
                self._came[name] = self._came.get(name, 0) + size_bytes + CALL_BYTES

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
        held: list[tuple[int, int, Flow]] = []
        with self._lock:
            came, self._came = self._came, {}
        for name in names:
            fd = int(name)
            with suppress(OSError):
                found = os.fstat(fd)
                if not stat.S_ISSOCK(found.st_mode):
                    continue
                key = fd, found.st_ino
                flow = self._flows[key] = before[key] if key in before else self._met(fd)
                if flow is not None:
                    self._count(fd, flow, seconds, came.get(flow.peer, 0))
                    held.append((flow.held, fd, flow))
        self._judge(held)

    def _met(self, fd: int) -> Flow | None:
        with _glance(fd) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
                return None
            if sock.getsockname()[1] != self._port:
                return None
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                sock.setsockopt(
                    socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES
                )  # those accepted inherit it
                return None
            return Flow(_name(*sock.getpeername()[:2]))

    def _count(self, fd: int, flow: Flow, seconds: float, came: int) -> None:
        size = _ACKED_AT + _ACKED_AND_RECEIVED.size
        with _glance(fd) as sock:
            told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
        if len(told) == size:
            acked, received = _ACKED_AND_RECEIVED.unpack_from(told, _ACKED_AT)
            flow.passed(seconds, acked, received, came)

    def _judge(self, held: list[tuple[int, int, Flow]]) -> None:
        """End the connections that hold too much, beginning with the one that holds most. `held`: (bytes, fd,
        flow)."""
        left = sum(size for size, _, _ in held)
        for size, fd, flow in sorted(held, key=lambda each: -each[0]):
            if size <= HELD_BYTES_MAX and left <= ALL_BYTES_MAX:
                return
            left -= size
            with suppress(OSError), _kept(fd) as sock:
                host, port = sock.getpeername()[:2]
                # The descriptor may belong to another socket by now.
                if sock.getsockname()[1] == self._port and _name(host, port) == flow.peer:
                    # A reset. After an orderly end a sender whose window is full may wait for minutes.
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CLOSES_AT_ONCE)
                    sock.shutdown(socket.SHUT_RDWR)
                    flow.held = 0
                    self._ended(host)


@contextmanager
def _glance(fd: int) -> Iterator[socket.socket]:
    """The socket of a descriptor, to ask it something: its owner may close it meanwhile, and the number may be another
    socket's then. It is not duplicated: a socket that its owner closed would live on in the owner's epoll."""
    sock = socket.socket(fileno=fd)
    try:
        yield sock
    finally:
        sock.detach()


@contextmanager
def _kept(fd: int) -> Iterator[socket.socket]:
    """The same socket throughout, whatever its owner does."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        yield sock


def _name(host: str, port: int) -> str:
    """One name for an address, however it is written."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return f"{address} {port}"


def _of_flight(peer: str) -> str:
    """The name of an address in gRPC's form, "ipv4:HOST:PORT" or "ipv6:%5BHOST%5D:PORT"; "" for other
    text."""
    host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    try:
        return _name(host.strip("[]"), int(port))
    except ValueError:
        return ""


def _resident_bytes(statm: int) -> int:
    """The process's memory, from its open statm file: there may be no descriptor left to open another."""
    return int(os.pread(statm, 256, 0).split()[1]) * _PAGE_BYTES
