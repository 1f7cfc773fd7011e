"""What peers send: the server's half of the streams between nodes. Made by the node beside its PeerTransport.

Checks the Hello and gives out a key (OpenPeerStream); listens for connections that begin with such a key, and hands
every message on, in order, on the event loop. Invariant: of one peer and channel only the newest stream is heard; an
older one that lingers is ended.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Iterator

import structlog
from google.protobuf.message import DecodeError

from stele import metrics
from stele.model.errors import Rejected, Retryable
from stele.model.ids import NodeId
from stele.rpc.budget import ByteBudget, Charge
from stele.rpc.connection import FramedConnection
from stele.rpc.identity import caller_from_hello, check
from stele.rpc.logging import OncePer
from stele.rpc.peers import BULK, CONTROL, PeerTransport
from stele.rpc.proto import consensus_pb2

log = structlog.get_logger("stele.rpc.peers")

MESSAGES_PER_TURN = 128
"""After so many messages of one stream the loop gets a turn."""
KEY_BYTES = 16
_KEY_TIMEOUT_S = 5.0
_KEYS_MAX = 1_024
_STRANGERS_MAX = 256


class PeerInbound:
    """Takes in the streams that other nodes open. Shares identity, book and callbacks with the outbound half."""

    def __init__(self, transport: PeerTransport, budget: ByteBudget) -> None:
        self.port = 0
        self._transport = transport
        self._budget = budget
        self._server: asyncio.Server | None = None
        self._keys: dict[bytes, tuple[NodeId, str, float]] = {}  # whose stream, which channel, good until
        self._streams: dict[tuple[NodeId, str], _Stream] = {}
        self._strangers: dict[FramedConnection, asyncio.TimerHandle] = {}  # connections without a key so far
        self._may_log = OncePer()

    async def listen(self, host: str, port: int) -> None:
        """Take in connections; port 0 picks one, see `port`.

        Raises:
            Rejected: INVALID_ARGUMENT if the address is not one of this machine or the port is in use.
        """
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: _Greeter(self), host, port)
        except OSError as exc:
            raise Rejected(
                f"cannot listen for peers at {host}:{port}: the port is in use, or the address is not this machine's; "
                "stop what uses it or choose another with --peer-port"
            ) from exc
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Hear nobody any more."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        for connection in [*self._strangers, *(stream.connection for stream in self._streams.values())]:
            connection.close()

    def introduce(self, request: consensus_pb2.OpenPeerStreamRequest) -> consensus_pb2.OpenPeerStreamResponse:
        """A peer wants to open a stream: who we are, where to connect, and the key to begin with.

        Raises:
            Rejected: another cluster or node, an earlier start, an unknown channel.
            Retryable: NOT_READY before `listen`, THROTTLED if too many keys are out.
        """
        if not self.port:
            raise Retryable("this node does not listen for its peers yet; try again")
        identity = self._transport.identity
        caller = caller_from_hello(request.hello)
        check(identity, self._transport.book, caller)
        if not caller.from_node or caller.channel not in (CONTROL, BULK):
            raise Rejected(f"hello without a node, or with the unknown channel {caller.channel[:20]!r}")
        now = asyncio.get_running_loop().time()
        self._keys = {key: of for key, of in self._keys.items() if of[2] > now}
        if len(self._keys) >= _KEYS_MAX:
            raise Retryable("too many streams are being opened; try again")
        key = secrets.token_bytes(KEY_BYTES)
        self._keys[key] = NodeId(caller.from_node), caller.channel, now + _KEY_TIMEOUT_S
        return consensus_pb2.OpenPeerStreamResponse(
            hello=identity.hello(caller.from_node, caller.from_incarnation), port=self.port, key=key
        )

    # --- connections, by their state: a stranger, then a stream

    def came(self, connection: FramedConnection) -> None:
        """A connection that has said nothing yet."""
        if len(self._strangers) >= _STRANGERS_MAX:
            connection.close(Rejected("too many connections without a key"))
            return
        late = Rejected("no key came in time")
        timer = asyncio.get_running_loop().call_later(_KEY_TIMEOUT_S, connection.close, late)
        self._strangers[connection] = timer

    def first_frames(self, connection: FramedConnection, frames: list[bytes]) -> None:
        """The key, and perhaps messages behind it."""
        timer = self._strangers.pop(connection, None)
        if timer is not None:
            timer.cancel()
        node_id, channel, until = self._keys.pop(frames[0], (NodeId(""), "", 0.0))
        if until <= asyncio.get_running_loop().time():
            connection.close(Rejected("its first frame is no key that this node gave out"))
            return
        earlier = self._streams.get((node_id, channel))
        stream = _Stream(self, connection, node_id, channel)
        self._streams[node_id, channel] = stream
        connection.on_frames = stream.take
        if earlier is not None:
            earlier.end()
            earlier.connection.close()
        stream.take(connection, frames[1:])

    def gone(self, connection: FramedConnection, error: Exception | None) -> None:
        """A connection has ended."""
        timer = self._strangers.pop(connection, None)
        if timer is not None:
            timer.cancel()
        if isinstance(error, Rejected) and self._may_log(connection.source, error.code):
            log.warning("peer stream refused", source=connection.source, error=str(error))
        elif error is not None and not isinstance(error, (Rejected, OSError)):
            log.error("peer stream ended", source=connection.source, error=str(error), exc_info=error)
        for (node_id, channel), stream in list(self._streams.items()):
            if stream.connection is connection:
                stream.end()
                del self._streams[node_id, channel]
                if channel == CONTROL:
                    self._transport.on_disconnect(node_id)

    def charge(self, size_bytes: int) -> Charge:
        """Of the node's budget, for a frame."""
        return self._budget.charge(min(size_bytes, self._budget.reserve_bytes), control=True)

    def message(self, node_id: NodeId, message: consensus_pb2.ConsensusMessage) -> None:
        """Hand a message on."""
        self._transport.on_message(node_id, message)


class _Greeter(FramedConnection):
    """A connection from outside."""

    def __init__(self, inbound: PeerInbound) -> None:
        super().__init__(inbound.first_frames)
        self.lost.add_done_callback(lambda lost: inbound.gone(self, lost.result()))
        self._inbound = inbound

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._inbound.came(self)


class _Stream:
    """What one peer sends on one channel: a bounded number of messages per turn of the loop, in order."""

    def __init__(
        self, inbound: PeerInbound, connection: FramedConnection, node_id: NodeId, channel: str
    ) -> None:
        self.connection = connection
        self._inbound = inbound
        self._node_id = node_id
        self._frames: deque[bytes] = deque()
        self._messages: Iterator[consensus_pb2.ConsensusMessage] | None = None
        self._charge: Charge | None = None
        self._resting = False
        self._ended = False
        self._count = metrics.peer_frames.cell(channel, "received")
        self._bytes = metrics.peer_bytes.cell(channel, "received")

    def take(self, connection: FramedConnection, frames: list[bytes]) -> None:
        """Frames have come in."""
        self._frames.extend(frames)
        if not self._resting:
            self._work()

    def end(self) -> None:
        """What was not handed on is lost."""
        self._ended = True
        self._frames.clear()
        self._messages = None
        if self._charge is not None:
            self._charge.release()

    def _work(self) -> None:
        handed = 0
        while not self._ended:
            if self._messages is None:
                if not self._frames:
                    return
                self._begin(self._frames.popleft())
            assert self._messages is not None and self._charge is not None
            for message in self._messages:
                self._inbound.message(self._node_id, message)
                handed += 1
                if handed == MESSAGES_PER_TURN:
                    self._rest()
                    return
            self._messages = None
            self._charge.release()

    def _begin(self, raw: bytes) -> None:
        self._count[0] += 1
        self._bytes[0] += len(raw)
        self._charge = self._inbound.charge(len(raw))
        try:
            self._messages = iter(consensus_pb2.PeerFrame.FromString(raw).messages)
        except DecodeError:
            raise Rejected(f"{len(raw)} bytes that are no frame between peers") from None

    def _rest(self) -> None:
        self._resting = True
        self.connection.pause_reading()
        asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._resting = False
        if self._ended:
            return
        try:
            self._work()
        except Exception as exc:  # noqa: BLE001 - as where frames come in: this connection is of no use any more
            self.connection.close(exc)
        if not self._resting:
            self.connection.resume_reading()
