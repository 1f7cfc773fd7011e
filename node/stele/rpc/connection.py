"""Frames over TCP: four bytes of length, big-endian, then the bytes. What streams of nodes and of clients run on.

What a gRPC stream costs a small frame, four system calls and a thread's wake-up at each end, costs one here; who may
speak is settled over gRPC before (OpenPeerStream, OpenClientStream). Owns one connection; knows nothing of what frames
hold. Invariant: frames come out whole and in the order in which they were sent; memory for what came in and is not yet a
frame stays below two frames and what one read brings, and is told to `arriving` as it comes in.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
from collections.abc import Callable
from typing import cast

from stele.model.errors import Code, Rejected, Retryable
from stele.rpc.arriving import Arriving
from stele.rpc.channels import KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS, MESSAGE_BYTES_MAX
from stele.rpc.frames import LENGTH_BYTES, frame
from stele.rpc.resolve import resolve_one, split_address

_FRAME_BYTES_MAX = MESSAGE_BYTES_MAX + 1_024
_UNSENT_BYTES_HIGH = 1 << 20
_PING = 0xFFFFFFFF
_PONG = 0xFFFFFFFE
"""Lengths that no frame has: is anybody there, and yes."""


class FrameReader:
    """Cuts a stream of bytes into frames. `pinged`: a ping was among them since this was last set to False. `held`: bytes
    of a frame that is not whole yet."""

    __slots__ = ("_need", "_parts", "held", "pinged")

    def __init__(self) -> None:
        self.pinged = False
        self.held = 0
        self._parts: list[bytes] = []
        self._need = LENGTH_BYTES

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that end in `data`.

        Raises:
            Rejected: TOO_LARGE for a length above the limit, as garbage has it; the stream is of no use any more.
        """
        if not self._parts:
            if int.from_bytes(data[:LENGTH_BYTES], "big") == len(data) - LENGTH_BYTES:
                return [data[LENGTH_BYTES:]]  # most often one read brings one frame
        else:
            self._parts.append(data)
            self.held += len(data)
            if self.held < self._need:
                return []
            data = b"".join(self._parts)
            self._parts.clear()
        frames = []
        at, end = 0, len(data)
        need = LENGTH_BYTES
        while end - at >= LENGTH_BYTES:
            size = int.from_bytes(data[at : at + LENGTH_BYTES], "big")
            if size > _FRAME_BYTES_MAX:
                self._control(size)
                at += LENGTH_BYTES
                continue
            need = LENGTH_BYTES + size
            if end - at < need:
                break
            frames.append(data[at + LENGTH_BYTES : at + need])
            at += need
            need = LENGTH_BYTES
        if at < end:
            self._parts.append(data[at:])
        self.held = end - at
        self._need = need
        return frames

    def _control(self, size: int) -> None:
        if size == _PING:
            self.pinged = True
        elif size != _PONG:
            raise Rejected(
                f"a frame of {size} bytes, at most {_FRAME_BYTES_MAX} may be: what sends this is none of ours",
                code=Code.TOO_LARGE,
            )


class FramedConnection(asyncio.Protocol):
    """One TCP connection, made by `connect` or taken in by a StreamListener.

    `on_frames(frames)` gets what came in. While `full`, more than enough waits to be sent: `on_full(True)` is called
    then, `on_full(False)` once there is room again. `lost` is done once the connection has ended, with what ended it.
    `arriving`: who counts what was received of a frame that is not whole yet.
    """

    def __init__(self) -> None:
        self.full = False
        self.source = ""
        self.arriving: Arriving | None = None
        self.on_frames: Callable[[list[bytes]], None] = lambda frames: None
        self.on_full: Callable[[bool], None] = lambda full: None
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[Exception | None] = self._loop.create_future()
        self._closed = asyncio.Event()
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self.reads = True
        self._held_back = False
        self._held_bytes = 0
        self._heard = self._ticked = 0.0
        self._written = self._acknowledged = 0
        self._pinged_at = 0  # where in the bytes written the ping ends that was not answered yet
        self._timer: asyncio.TimerHandle | None = None

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It stands."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.set_write_buffer_limits(high=_UNSENT_BYTES_HIGH)
        peer = transport.get_extra_info("peername")
        self.source = str(peer[0]) if peer else ""
        _notice_silence(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        """Bytes have come in."""
        self._heard = self._loop.time()
        self._pinged_at = 0
        try:
            frames = self._reader.feed(data)
            if self._reader.held != self._held_bytes:
                self._holds(self._reader.held)
            if self._reader.pinged:
                self._reader.pinged = False
                self.send(_PONG.to_bytes(LENGTH_BYTES, "big"))
            if frames:
                self.on_frames(frames)
        except Exception as exc:  # noqa: BLE001 - whatever it was, this connection is of no use any more
            self.close(exc)

    def _holds(self, size: int) -> None:
        self._held_bytes = size
        if self.arriving is not None:
            self.arriving.holds(self, size)

    def pause_writing(self) -> None:
        """More than enough waits to be sent."""
        self.full = True
        self.on_full(True)

    def resume_writing(self) -> None:
        """There is room again."""
        self.full = False
        self.on_full(False)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        if self._timer is not None:
            self._timer.cancel()
        if not self.lost.done():
            self.lost.set_result(exc)
        self._closed.set()
        self._reader = FrameReader()  # its owner and it hold each other until the collector runs
        self._holds(0)

    # --- for its owner

    @property
    def stands(self) -> bool:
        """Whether what is sent may arrive. It ends a turn of the loop or two before `lost` tells of it."""
        return self._transport is not None and not self._transport.is_closing() and not self.lost.done()

    def send(self, framed: bytes) -> None:
        """Send a frame that begins with its length already (see `stele.rpc.frames`). Nothing, once it has ended."""
        transport = self._transport
        if transport is not None and not transport.is_closing() and not self.lost.done():
            self._written += len(framed)
            transport.write(framed)

    def read(self, on: bool) -> None:
        """Take in nothing for a while, or go on."""
        self._read(on, self._held_back)

    def hold_back(self, on: bool) -> None:
        """As `read(not on)`, for who counts what is under way: it goes on once both want it."""
        self._read(self.reads, on)

    def _read(self, reads: bool, held_back: bool) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        before = self.reads and not self._held_back
        self.reads, self._held_back = reads, held_back
        after = reads and not held_back
        if after and not before:
            transport.resume_reading()
        elif before and not after:
            transport.pause_reading()

    def watch(self) -> None:
        """End the connection once its other end is silent, though asked: a process that is stopped keeps its
        connections, and its kernel answers for it."""
        self._heard = self._ticked = self._loop.time()
        assert self._transport is not None
        _end_when_unacknowledged(self._transport.get_extra_info("socket"))
        self._timer = self._loop.call_later(KEEPALIVE_TIME_MS / 1_000, self._tick)

    def _tick(self) -> None:
        every_s = KEEPALIVE_TIME_MS / 1_000
        now = self._loop.time()
        if now - self._ticked > 1.5 * every_s:
            self._heard = now  # it is we who did not listen
        self._ticked = now
        acknowledged = self._written - self._unacknowledged()
        if self._acknowledged < acknowledged < self._pinged_at:
            self._heard = now  # a slow network, and the ping still behind what it carries
        self._acknowledged = acknowledged
        silent_s = now - self._heard
        if silent_s > every_s + KEEPALIVE_TIMEOUT_MS / 1_000:
            self.close(Retryable(f"{self.source} has been silent for {silent_s:.1f} s"))
            return
        if silent_s >= 0.9 * every_s and not self._pinged_at:
            self.send(_PING.to_bytes(LENGTH_BYTES, "big"))
            self._pinged_at = self._written
        self._timer = self._loop.call_later(every_s, self._tick)

    def _unacknowledged(self) -> int:
        """Bytes written that the other end's kernel has not acknowledged."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return 0
        in_kernel = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return transport.get_write_buffer_size() + int.from_bytes(in_kernel, sys.byteorder)

    def close(self, why: Exception | None = None) -> None:
        """End it at once; what was not sent is lost."""
        if self._timer is not None:
            self._timer.cancel()
        if not self.lost.done():
            self.lost.set_result(why)
        if self._transport is not None:
            self._transport.abort()

    async def closed(self) -> None:
        """Returns once its socket is closed: a turn of the loop after `close`."""
        if self._transport is not None:
            await self._closed.wait()


async def connect(address: str, port: int, key: bytes) -> FramedConnection:
    """Connect to a port of the host that `address` (HOST:PORT) names, and begin with the key. It is under watch.

    Raises:
        Retryable: UNAVAILABLE if that cannot be.
    """
    host, _ = split_address(await resolve_one(address))
    loop = asyncio.get_running_loop()
    try:
        _, connection = await loop.create_connection(FramedConnection, host, port)
    except OSError as exc:
        raise Retryable(
            f"{address} gave its port {port} for a stream, which cannot be reached: {exc}"
        ) from exc
    connection.watch()
    connection.send(frame(key))
    return connection


def _notice_silence(sock: socket.socket) -> None:
    """A connection at rest is probed, so that a machine that is switched off is noticed (where the system can)."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", -(-KEEPALIVE_TIME_MS // 1_000)),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", 2),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _end_when_unacknowledged(sock: socket.socket) -> None:
    """Bytes that nobody takes end the connection. Not at the other end: a client may be busy with what it was sent."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS)
