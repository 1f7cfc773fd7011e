"""Frames over TCP between two nodes: four bytes of length, big-endian, then the bytes. Used by peers.py and inbound.py.

What gRPC's streams cost a small frame, four system calls and a thread's wake-up at each end, costs one here; who may
speak is settled over gRPC before (OpenPeerStream). Owns one connection; knows nothing of what frames hold. Invariant:
frames come out whole and in the order in which they were sent; memory for what came in stays below two frames.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from stele.model.errors import Code, Rejected
from stele.rpc.channels import KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS, MESSAGE_BYTES_MAX

LENGTH_BYTES = 4
_FRAME_BYTES_MAX = MESSAGE_BYTES_MAX + 1_024
_UNSENT_BYTES_HIGH = 1 << 20
_PROBES = 2


class FrameReader:
    """Cuts a stream of bytes into frames."""

    __slots__ = ("_have", "_need", "_parts")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._have = 0
        self._need = LENGTH_BYTES

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that end in `data`.

        Raises:
            Rejected: TOO_LARGE for a length above the limit, as garbage has it; the stream is of no use any more.
        """
        if self._parts:
            self._parts.append(data)
            self._have += len(data)
            if self._have < self._need:
                return []
            data = b"".join(self._parts)
            self._parts.clear()
        frames = []
        at, end = 0, len(data)
        need = LENGTH_BYTES
        while end - at >= LENGTH_BYTES:
            size = int.from_bytes(data[at : at + LENGTH_BYTES], "big")
            if size > _FRAME_BYTES_MAX:
                raise Rejected(
                    f"a frame of {size} bytes, at most {_FRAME_BYTES_MAX} may be: that is no peer",
                    code=Code.TOO_LARGE,
                )
            need = LENGTH_BYTES + size
            if end - at < need:
                break
            frames.append(data[at + LENGTH_BYTES : at + need])
            at += need
            need = LENGTH_BYTES
        if at < end:
            self._parts.append(data[at:])
        self._have = end - at
        self._need = need
        return frames


class FramedConnection(asyncio.Protocol):
    """One TCP connection. `on_frames(frames)` gets what came in, `on_room()` is called when `full` has ended.

    `lost` is done once the connection has ended, with what ended it, or None.
    """

    def __init__(
        self,
        on_frames: Callable[[FramedConnection, list[bytes]], None],
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        self.full = False
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.source = ""
        self.on_frames = on_frames
        self._on_room = on_room
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.set_write_buffer_limits(high=_UNSENT_BYTES_HIGH)
        peer = transport.get_extra_info("peername")
        self.source = str(peer[0]) if peer else ""
        _notice_silence(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        """As asyncio.Protocol."""
        try:
            frames = self._reader.feed(data)
            if frames:
                self.on_frames(self, frames)
        except Exception as exc:  # noqa: BLE001 - whatever it was, this connection is of no use any more
            self.close(exc)

    def pause_writing(self) -> None:
        """As asyncio.Protocol."""
        self.full = True

    def resume_writing(self) -> None:
        """As asyncio.Protocol."""
        self.full = False
        self._on_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio.Protocol."""
        if not self.lost.done():
            self.lost.set_result(exc)

    def send(self, frame: bytes) -> None:
        """Send a frame that begins with its length already (see `stele.rpc.frames`)."""
        if self._transport is not None:
            self._transport.write(frame)

    def pause_reading(self) -> None:
        """Take in nothing for a while."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on taking in."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self, why: Exception | None = None) -> None:
        """End it at once; what was not sent is lost."""
        if not self.lost.done():
            self.lost.set_result(why)
        if self._transport is not None:
            self._transport.abort()


def _notice_silence(sock: socket.socket) -> None:
    """A peer that is switched off is noticed as soon as over gRPC (see channels.py): bytes that nobody acknowledges end
    the connection, and a connection at rest is probed."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, -(-KEEPALIVE_TIME_MS // 1_000))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS)
