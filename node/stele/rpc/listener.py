"""The port at which a node takes in streams: connections that begin with a key which this node gave out before.

Made by the node; `PeerInbound` and `ClientStreams` give out the keys. Invariant: a key is good once and for seconds;
who has none is refused, and kept no longer than those seconds.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable

import structlog

from stele.model.errors import Code, Rejected, Retryable, SteleError, let_go
from stele.rpc.connection import FramedConnection
from stele.rpc.frames import LENGTH_BYTES
from stele.rpc.logging import OncePer
from stele.rpc.resolve import join_address, resolve_one, split_address

log = structlog.get_logger("stele.rpc.streams")

KEY_BYTES = 16
_BACKLOG = 128
_KEY_TIMEOUT_S = 5.0
_KEYS_MAX = 4_096
_KEYS_FOR_PEERS = 1_024
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
        self._closed = False
        self._once = OncePer()

    async def listen(self, host: str, port: int) -> None:
        """Take in connections; port 0 picks one.

        Raises:
            Rejected: INVALID_ARGUMENT if the address is not one of this machine or the port is in use.
        """
        address, _ = split_address(await resolve_one(join_address(host, port)))
        try:
            sock = _listening(address, port)
        except OSError as exc:
            raise Rejected(
                f"cannot listen for streams at {host}:{port}: the port is in use, or the address is not this "
                "machine's; stop what uses it or choose another with --stream-port"
            ) from exc
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Stranger(self), sock=sock)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Hear nobody any more, for good."""
        self._closed = True
        self._keys.clear()
        if self._server is not None:
            self._server.close()
        connections = [*self._strangers, *self._taken]
        for connection in connections:
            connection.close()
        await asyncio.gather(*(connection.closed() for connection in connections))
        if self._server is not None:
            await self._server.wait_closed()  # last: from Python 3.12 on it waits for all connections too

    def expect(self, take: Take, *, peer: bool = False) -> bytes:
        """A key for a stream that is about to be opened; some are kept back for peers.

        Raises:
            Retryable: NOT_READY before `listen` and after `close`, THROTTLED if too many keys are out.
        """
        if not self.port or self._closed:
            raise Retryable("this node does not take in streams now; try again", code=Code.NOT_READY)
        now = asyncio.get_running_loop().time()
        self._keys = {key: of for key, of in self._keys.items() if of[1] > now}
        if len(self._keys) >= (_KEYS_MAX if peer else _KEYS_MAX - _KEYS_FOR_PEERS):
            raise Retryable("too many streams are being opened; try again", code=Code.THROTTLED)
        key = secrets.token_bytes(KEY_BYTES)
        self._keys[key] = take, now + _KEY_TIMEOUT_S
        return key

    def forget(self, key: bytes) -> None:
        """A key that was given out is good no more."""
        self._keys.pop(key, None)

    # --- a connection's life

    def came(self, connection: FramedConnection) -> None:
        """It has said nothing yet."""
        if self._closed:  # the kernel had taken it in before
            connection.close()
            return
        connection.lost.add_done_callback(lambda lost: self._gone(connection, lost.result()))
        if len(self._strangers) >= _STRANGERS_MAX:  # who has a key shows it at once
            oldest = next(iter(self._strangers))
            self._strangers.pop(oldest).cancel()
            oldest.close(Rejected("too many connections without a key"))
        late = Rejected("no key came in time")
        timer = asyncio.get_running_loop().call_later(_KEY_TIMEOUT_S, connection.close, late)
        self._strangers[connection] = timer

    def show(self, connection: FramedConnection, key: bytes) -> None:
        """It has shown what should be a key.

        Raises:
            Rejected: it is none.
        """
        timer = self._strangers.pop(connection, None)
        if timer is not None:
            timer.cancel()
        found = self._keys.pop(key, None)
        if found is None or found[1] <= asyncio.get_running_loop().time():
            raise Rejected("it did not begin with a key that this node gave out")
        self._taken.add(connection)
        found[0](connection)

    def _gone(self, connection: FramedConnection, error: Exception | None) -> None:
        self._taken.discard(connection)
        timer = self._strangers.pop(connection, None)
        if timer is not None:
            timer.cancel()
        if error is not None:
            self._tell(connection, error)
            # The connection holds it, and its frames the connection, with the frame that came last.
            let_go(error)

    def _tell(self, connection: FramedConnection, error: Exception) -> None:
        if isinstance(error, OSError):
            return
        source = connection.source
        if isinstance(error, Rejected):
            self._once.tell(
                log.warning, "stream refused", source, error.code, source=source, error=str(error)
            )
        elif isinstance(error, SteleError):
            self._once.tell(log.info, "stream ended", source, error.code, source=source, error=str(error))
        else:
            event = "stream ended by a fault of ours"
            self._once.tell(log.error, event, source, type(error), source=source, exc_info=error)


class _Stranger(asyncio.Protocol):
    """A connection from outside that has not shown a key yet; then what comes in goes to the connection directly."""

    def __init__(self, listener: StreamListener) -> None:
        self._listener = listener
        self._connection = FramedConnection()
        self._transport: asyncio.BaseTransport
        self._head = b""  # what it has said so far

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._connection.connection_made(transport)
        self._listener.came(self._connection)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        head = self._head = self._head + data
        prefix = KEY_BYTES.to_bytes(LENGTH_BYTES, "big")
        size = LENGTH_BYTES + KEY_BYTES
        if head[:LENGTH_BYTES] != prefix[: len(head)]:
            self._connection.close(Rejected("it did not begin with a key that this node gave out"))
        elif len(head) >= size:
            try:
                self._listener.show(self._connection, head[LENGTH_BYTES:size])
            except Rejected as exc:
                self._connection.close(exc)
                return
            self._transport.set_protocol(self._connection)
            self._connection.data_received(head[size:])


def _listening(address: str, port: int) -> socket.socket:
    """As gRPC does it: the wildcard of IPv6 takes IPv4 too."""
    if ":" not in address:
        return socket.create_server((address, port), backlog=_BACKLOG)
    both = address == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(
        (address, port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=both
    )
