"""Frames over TCP: four bytes of length, big-endian, then the bytes. Streams of nodes and clients use them.

A small frame costs a gRPC stream four system calls and a thread's wake-up at each end; here it costs one
call. Before a connection is made, a gRPC call (OpenPeerStream, OpenClientStream) checks who may speak. Owns
one connection; knows nothing of what frames hold. Invariant: frames arrive whole and in the order they were
sent. The memory for an incomplete frame stays below two frames plus one read, and `arriving` counts it.
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
"""Lengths that no frame has: a ping, and its answer."""


class FrameReader:
    """Cuts a stream of bytes into frames. `held`: bytes of an incomplete frame.

    `pinged`: whether a ping was among them since this was last set to False."""

    __slots__ = ("_need", "_parts", "held", "pinged")

    def __init__(self) -> None:
        self.pinged = False
        self.held = 0
        self._parts: list[bytes] = []
        self._need = LENGTH_BYTES

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that are complete with `data`.

        Raises:
            Rejected: TOO_LARGE: a length above the limit, as in garbage. The stream cannot be used any more.
        """
        if not self._parts:
            if int.from_bytes(data[:LENGTH_BYTES], "big") == len(data) - LENGTH_BYTES:
                return [data[LENGTH_BYTES:]]  # mostly one read brings one frame
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
                f"a frame has {size} bytes; at most {_FRAME_BYTES_MAX} are allowed; the sender is not a Stele program",
                code=Code.TOO_LARGE,
            )


class FramedConnection(asyncio.Protocol):
    """One TCP connection, made by `connect` or accepted by a StreamListener.

    `on_frames(frames)` gets what arrived. `on_full(True)` is called when too much waits to be sent, and
    `on_full(False)` when there is room again; `full` says which. The future `lost` is done once the
    connection has ended, with what ended it. `arriving` counts the bytes of an incomplete frame.
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
        self._pinged_at = 0  # offset in the written bytes after the unanswered ping
        self._timer: asyncio.TimerHandle | None = None

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is established."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._transport.set_write_buffer_limits(high=_UNSENT_BYTES_HIGH)
        peer = transport.get_extra_info("peername")
        self.source = str(peer[0]) if peer else ""
        _notice_silence(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        """Bytes have arrived."""
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
        except Exception as exc:  # noqa: BLE001 - whatever it was, this connection cannot be used any more
            self.close(exc)

    def _holds(self, size: int) -> None:
        self._held_bytes = size
        if self.arriving is not None:
            self.arriving.holds(self, size)

    def pause_writing(self) -> None:
        """Too much waits to be sent."""
        self.full = True
        self.on_full(True)

    def resume_writing(self) -> None:
        """There is room again."""
        self.full = False
        self.on_full(False)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        if self._timer is not None:
            self._timer.cancel()
        if not self.lost.done():
            self.lost.set_result(exc)
        self._closed.set()
        self._reader = FrameReader()  # break the cycle with its owner, so that memory is freed at once
        self._holds(0)

    # --- for its owner

    @property
    def stands(self) -> bool:
        """Whether sent frames may arrive. Turns false a turn of the loop or two before `lost` is done."""
        return self._transport is not None and not self._transport.is_closing() and not self.lost.done()

    def send(self, framed: bytes) -> None:
        """Send a frame that already begins with its length (see `stele.rpc.frames`). Does nothing after the
        end."""
        transport = self._transport
        if transport is not None and not transport.is_closing() and not self.lost.done():
            self._written += len(framed)
            transport.write(framed)

    def read(self, on: bool) -> None:
        """Stop or resume reading, for the owner."""
        self._read(on, self._held_back)

    def hold_back(self, on: bool) -> None:
        """Stop or resume reading, for `arriving`. The connection is read only while both want it."""
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
        """From now on, end the connection if the other end does not answer a ping.

        Without this a stopped process would keep its connections, because its kernel acknowledges bytes for
        it."""
        self._heard = self._ticked = self._loop.time()
        assert self._transport is not None
        _end_when_unacknowledged(self._transport.get_extra_info("socket"))
        self._timer = self._loop.call_later(KEEPALIVE_TIME_MS / 1_000, self._tick)

    def _tick(self) -> None:
        every_s = KEEPALIVE_TIME_MS / 1_000
        now = self._loop.time()
        if now - self._ticked > 1.5 * every_s:
            self._heard = now  # this process itself was held up
        self._ticked = now
        acknowledged = self._written - self._unacknowledged()
        if self._acknowledged < acknowledged < self._pinged_at:
            self._heard = now  # the network is slow, and the ping waits behind other bytes
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
        """Written bytes that the other end's kernel has not acknowledged."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return 0
        in_kernel = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return transport.get_write_buffer_size() + int.from_bytes(in_kernel, sys.byteorder)

    def close(self, why: Exception | None = None) -> None:
        """End the connection at once. What was not sent is lost."""
        if self._timer is not None:
            self._timer.cancel()
        if not self.lost.done():
            self.lost.set_result(why)
        if self._transport is not None:
            self._transport.abort()

    async def closed(self) -> None:
        """Wait until the socket is closed: a turn of the loop after `close`."""
        if self._transport is not None:
            await self._closed.wait()


async def connect(address: str, port: int, key: bytes) -> FramedConnection:
    """Connect to a port of the host in `address` (HOST:PORT), and send the key. The connection is watched.

    Raises:
        Retryable: UNAVAILABLE: the connection failed.
    """
    host, _ = split_address(await resolve_one(address))
    loop = asyncio.get_running_loop()
    try:
        _, connection = await loop.create_connection(FramedConnection, host, port)
    except OSError as exc:
        raise Retryable(
            f"{address} offered port {port} for a stream, but it cannot be reached: {exc}"
        ) from exc
    connection.watch()
    connection.send(frame(key))
    return connection


def _notice_silence(sock: socket.socket) -> None:
    """Probe an idle connection, so that a dead machine is noticed. Only if the system supports it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", -(-KEEPALIVE_TIME_MS // 1_000)),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", 2),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _end_when_unacknowledged(sock: socket.socket) -> None:
    """Have the kernel end the connection if sent bytes stay unacknowledged. Only for the end that dialled: at
    the other end, a client may just be busy."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS)
