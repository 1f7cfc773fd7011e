"""The port for streams: a connection begins with a key that this node gave out before.

Made by the node; `PeerInbound` and `ClientStreams` give out the keys. Invariant: a key is good once, and only for
seconds. A connection without one is refused within those seconds.
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
"""The owner of a connection: sets what happens with its frames."""


class StreamListener:
    """Listens once `listen` was called; `port` is then known."""

    def __init__(self) -> None:
        self.port = 0
        self._server: asyncio.Server | None = None
        self._keys: dict[bytes, tuple[Take, float]] = {}  # (owner, good until)
        self._strangers: dict[
            FramedConnection, asyncio.TimerHandle
        ] = {}  # connections that have not shown a key yet
        self._taken: set[FramedConnection] = set()
        self._closed = False
        self._once = OncePer()

    async def listen(self, host: str, port: int) -> None:
        """Accept connections; port 0 picks one.

        Raises:
            Rejected: INVALID_ARGUMENT: the address is not one of this machine, or the port is in use.
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
        """End all connections, and accept no more, for good."""
        self._closed = True
        self._keys.clear()
        if self._server is not None:
            self._server.close()
        connections = [*self._strangers, *self._taken]
        for connection in connections:
            connection.close()
        await asyncio.gather(*(connection.closed() for connection in connections))
        if self._server is not None:
            # Last, because from Python 3.12 on it waits for all connections too.
            await self._server.wait_closed()

    def expect(self, take: Take, *, peer: bool = False) -> bytes:
        """Return a key for a stream that is about to be opened. Some keys are reserved for peers.

        Raises:
            Retryable: NOT_READY before `listen` and after `close`; THROTTLED if too many keys are unused.
        """
        if not self.port or self._closed:
            raise Retryable("this node does not accept streams now; try again", code=Code.NOT_READY)
        now = asyncio.get_running_loop().time()
        self._keys = {key: of for key, of in self._keys.items() if of[1] > now}
        if len(self._keys) >= (_KEYS_MAX if peer else _KEYS_MAX - _KEYS_FOR_PEERS):
            raise Retryable("too many streams are being opened; try again", code=Code.THROTTLED)
        key = secrets.token_bytes(KEY_BYTES)
        self._keys[key] = take, now + _KEY_TIMEOUT_S
        return key

    def forget(self, key: bytes) -> None:
        """Make a key invalid."""
        self._keys.pop(key, None)

    # --- the life of a connection

    def came(self, connection: FramedConnection) -> None:
        """Record a new connection, which has sent nothing yet."""
        if self._closed:  # the kernel accepted it before
            connection.close()
            return
        connection.lost.add_done_callback(lambda lost: self._gone(connection, lost.result()))
        if len(self._strangers) >= _STRANGERS_MAX:  # a connection with a key shows it at once
            oldest = next(iter(self._strangers))
            self._strangers.pop(oldest).cancel()
            oldest.close(Rejected("too many connections have shown no key"))
        late = Rejected("no key came in time")
        timer = asyncio.get_running_loop().call_later(_KEY_TIMEOUT_S, connection.close, late)
        self._strangers[connection] = timer

    def show(self, connection: FramedConnection, key: bytes) -> None:
        """Check the key that a connection has sent.

        Raises:
            Rejected: this node did not give it out, or too long ago.
        """
        timer = self._strangers.pop(connection, None)
        if timer is not None:
            timer.cancel()
        found = self._keys.pop(key, None)
        if found is None or found[1] <= asyncio.get_running_loop().time():
            raise Rejected(
                "the connection did not begin with a key that this node gave out; open the stream over gRPC first"
            )
        self._taken.add(connection)
        found[0](connection)

    def _gone(self, connection: FramedConnection, error: Exception | None) -> None:
        self._taken.discard(connection)
        timer = self._strangers.pop(connection, None)
        if timer is not None:
            timer.cancel()
        if error is not None:
            self._tell(connection, error)
            # The connection holds this error, the error its frames, and a frame the connection: break the
            # cycle.
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
            event = "a stream ended because of a bug"
            self._once.tell(log.error, event, source, type(error), source=source, exc_info=error)


class _Stranger(asyncio.Protocol):
    """A connection from outside that has not shown a key yet. After that, bytes go to its FramedConnection
    directly."""

    def __init__(self, listener: StreamListener) -> None:
        self._listener = listener
        self._connection = FramedConnection()
        self._transport: asyncio.BaseTransport
        self._head = b""  # the bytes received so far

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
            self._connection.close(
                Rejected(
                    "the connection did not begin with a key that this node gave out; open the stream over gRPC first"
                )
            )
        elif len(head) >= size:
            try:
                self._listener.show(self._connection, head[LENGTH_BYTES:size])
            except Rejected as exc:
                self._connection.close(exc)
                return
            self._transport.set_protocol(self._connection)
            self._connection.data_received(head[size:])


def _listening(address: str, port: int) -> socket.socket:
    """A listening socket, made as gRPC does it: the IPv6 wildcard also accepts IPv4."""
    if ":" not in address:
        return socket.create_server((address, port), backlog=_BACKLOG)
    both = address == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(
        (address, port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=both
    )
