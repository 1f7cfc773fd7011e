"""The port at which a node takes in streams: connections that begin with a key which this node gave out before.

Made by the node; `PeerInbound` and `ClientStreams` give out the keys. Invariant: a key is good once and for seconds;
who has none is refused, and kept no longer than those seconds.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

import structlog

from stele.model.errors import Code, Rejected, Retryable
from stele.rpc.connection import FramedConnection
from stele.rpc.logging import OncePer

log = structlog.get_logger("stele.rpc.streams")

KEY_BYTES = 16
_KEY_TIMEOUT_S = 5.0
_KEYS_MAX = 4_096
_STRANGERS_MAX = 1_024

Take = Callable[[FramedConnection], None]
"""Whose connection it is: sets what happens with its frames."""


class StreamListener:
    """Listens once `listen` was called; `port` says where."""

    def __init__(self) -> None:
        self.port = 0
        self._server: asyncio.Server | None = None
        self._keys: dict[bytes, tuple[Take, float]] = {}  # for whom, good until
        self._strangers: dict[FramedConnection, asyncio.TimerHandle] = {}  # connections without a key so far
        self._taken: set[FramedConnection] = set()
        self._may_log = OncePer()

    async def listen(self, host: str, port: int) -> None:
        """Take in connections; port 0 picks one.

        Raises:
            Rejected: INVALID_ARGUMENT if the address is not one of this machine or the port is in use.
        """
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: _Stranger(self), host, port)
        except OSError as exc:
            raise Rejected(
                f"cannot listen for streams at {host}:{port}: the port is in use, or the address is not this "
                "machine's; stop what uses it or choose another with --stream-port"
            ) from exc
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Hear nobody any more."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        connections = [*self._strangers, *self._taken]
        for connection in connections:
            connection.close()
        await asyncio.gather(*(connection.closed() for connection in connections))

    def expect(self, take: Take) -> bytes:
        """A key for a stream that is about to be opened.

        Raises:
            Retryable: NOT_READY before `listen`, THROTTLED if too many keys are out.
        """
        if not self.port:
            raise Retryable("this node does not take in streams yet; try again", code=Code.NOT_READY)
        now = asyncio.get_running_loop().time()
        self._keys = {key: of for key, of in self._keys.items() if of[1] > now}
        if len(self._keys) >= _KEYS_MAX:
            raise Retryable("too many streams are being opened; try again", code=Code.THROTTLED)
        key = secrets.token_bytes(KEY_BYTES)
        self._keys[key] = take, now + _KEY_TIMEOUT_S
        return key

    # --- a connection's life

    def came(self, connection: FramedConnection) -> None:
        """It has said nothing yet."""
        if len(self._strangers) >= _STRANGERS_MAX:
            connection.close(Rejected("too many connections without a key"))
            return
        connection.on_frames = lambda frames: self._first_frames(connection, frames)
        connection.lost.add_done_callback(lambda lost: self._gone(connection, lost.result()))
        late = Rejected("no key came in time")
        timer = asyncio.get_running_loop().call_later(_KEY_TIMEOUT_S, connection.close, late)
        self._strangers[connection] = timer

    def _first_frames(self, connection: FramedConnection, frames: list[bytes]) -> None:
        """The key, and perhaps more behind it."""
        self._strangers.pop(connection).cancel()
        found = self._keys.pop(frames[0], None)
        if found is None or found[1] <= asyncio.get_running_loop().time():
            connection.close(Rejected("its first frame is no key that this node gave out"))
            return
        self._taken.add(connection)
        found[0](connection)
        connection.on_frames(frames[1:])

    def _gone(self, connection: FramedConnection, error: Exception | None) -> None:
        self._taken.discard(connection)
        timer = self._strangers.pop(connection, None)
        if timer is not None:
            timer.cancel()
        if isinstance(error, Rejected):
            if self._may_log(connection.source, error.code):
                log.warning("stream refused", source=connection.source, error=str(error))
        elif error is not None and not isinstance(error, OSError):
            log.info("stream ended", source=connection.source, error=str(error), exc_info=error)


class _Stranger(FramedConnection):
    """A connection from outside."""

    def __init__(self, listener: StreamListener) -> None:
        super().__init__()
        self._listener = listener

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._listener.came(self)
