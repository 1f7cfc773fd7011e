"""The server's half of the streams between nodes. Made by the node beside its PeerTransport.

Checks the Hello (OpenPeerStream) and passes every message on, in order, on the event loop. Invariant: for
each peer and channel only the newest stream is read; an older one is ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

from google.protobuf.message import DecodeError

from stele import metrics
from stele.model import bounds
from stele.model.errors import Rejected
from stele.model.ids import NodeId
from stele.rpc.arriving import Arriving
from stele.rpc.budget import ByteBudget
from stele.rpc.connection import FramedConnection
from stele.rpc.identity import caller_from_hello, check
from stele.rpc.listener import StreamListener
from stele.rpc.parts import refuse_parts
from stele.rpc.peers import BULK, CONTROL, PeerTransport
from stele.rpc.proto import common_pb2, consensus_pb2

MESSAGES_PER_TURN, BULK_PER_TURN = 1_024, 256
"""After this many messages of a control or a bulk stream, the loop gets a turn. With 128, the control messages of a thousand
busy tablets waited for more than a second, and their elections failed."""


class PeerInbound:
    """Accepts the streams that other nodes open. Shares identity, book and callbacks with the outbound
    half."""

    def __init__(self, transport: PeerTransport, budget: ByteBudget, listener: StreamListener) -> None:
        self._transport = transport
        self._budget = budget
        self._listener = listener
        self._arriving = Arriving(budget.reserve_bytes)
        self._streams: dict[tuple[NodeId, str], _Stream] = {}
        self._keys: dict[tuple[NodeId, str], bytes] = {}  # the newest key of each peer and channel

    def introduce(self, request: common_pb2.OpenStreamRequest) -> common_pb2.OpenStreamResponse:
        """Answer a peer that wants to open a stream: who we are, the port, and the key to begin with.

        Raises:
            Rejected: another cluster or node, an earlier start, an unknown channel.
            Retryable: no stream can be accepted now.
        """
        identity = self._transport.identity
        caller = caller_from_hello(request.hello)
        check(identity, self._transport.book, caller)
        if not caller.from_node or caller.channel not in (CONTROL, BULK):
            raise Rejected(
                f"the hello names no node, or the unknown channel {caller.channel[:20]!r}; upgrade the older side"
            )
        node_id, channel = NodeId(caller.from_node), caller.channel
        self._listener.forget(self._keys.pop((node_id, channel), b""))
        key = self._listener.expect(lambda connection: self._begin(connection, node_id, channel), peer=True)
        self._keys[node_id, channel] = key
        if len(self._keys) > bounds.PEERS_HEARD_MAX:  # drop keys of peers that no longer connect
            del self._keys[next(iter(self._keys))]
        hello = identity.hello(
            caller.from_node, caller.from_incarnation, address=self._transport.own_address()
        )
        return common_pb2.OpenStreamResponse(hello=hello, port=self._listener.port, key=key)

    def _begin(self, connection: FramedConnection, node_id: NodeId, channel: str) -> None:
        earlier = self._streams.pop((node_id, channel), None)
        if earlier is not None:
            earlier.end()
        stream = _Stream(self._transport, self._budget, connection, node_id, channel)
        self._streams[node_id, channel] = stream
        connection.arriving = self._arriving
        connection.on_frames = stream.take
        connection.lost.add_done_callback(lambda _: self._lost(stream))

    def _lost(self, stream: _Stream) -> None:
        stream.end()
        if self._streams.get((stream.node_id, stream.channel)) is stream:
            del self._streams[stream.node_id, stream.channel]
            # After the control stream the bulk stream may pass on more: a leader's last entries say that it leads.
            if (stream.node_id, CONTROL) not in self._streams:
                self._transport.on_disconnect(stream.node_id)


class _Stream:
    """What one peer sends on one channel: a bounded number of messages per turn of the loop, in order."""

    def __init__(
        self,
        transport: PeerTransport,
        budget: ByteBudget,
        connection: FramedConnection,
        node_id: NodeId,
        channel: str,
    ) -> None:
        self.node_id = node_id
        self.channel = channel
        self._transport = transport
        self._budget = budget
        self._connection = connection
        self._frames: deque[bytes] = deque()
        self._messages: Iterator[consensus_pb2.ConsensusMessage] | None = None
        self._charged_bytes = 0  # for the frame whose messages are being passed on
        self._resting = False
        self._ended = False
        self._per_turn = MESSAGES_PER_TURN if channel == CONTROL else BULK_PER_TURN
        self._count = metrics.peer_frames.cell(channel, "received")
        self._bytes = metrics.peer_bytes.cell(channel, "received")

    def take(self, frames: list[bytes]) -> None:
        """Frames have arrived."""
        self._frames.extend(frames)
        if not self._resting:
            self._work()

    def end(self) -> None:
        """End the connection. Messages not passed on are lost."""
        self._ended = True
        self._frames.clear()
        self._messages = None
        self._budget.give_back(self._charged_bytes)
        self._charged_bytes = 0
        self._connection.close()

    def _work(self) -> None:
        on_message, node_id, budget = self._transport.on_message, self.node_id, self._budget
        handed = opened = 0
        while not self._ended:
            if self._messages is None:
                if not self._frames:
                    return
                raw = self._frames.popleft()
                size = len(raw)
                self._count[0] += 1
                self._bytes[0] += size
                charged = min(size, budget.reserve_bytes)
                budget.take(charged, control=True)
                self._charged_bytes = charged
                refuse_parts(raw, consensus_pb2.PeerFrame.DESCRIPTOR)
                try:
                    self._messages = iter(consensus_pb2.PeerFrame.FromString(raw).messages)
                except DecodeError:
                    raise Rejected(
                        f"the frame of {size} bytes is not a frame between peers; the sender is not a Stele node"
                    ) from None
                self._transport.on_heard(node_id)
                opened += 1  # a frame without messages is work too
            for message in self._messages:
                on_message(node_id, message)
                handed += 1
                if self._ended:
                    return
                if handed == self._per_turn:
                    self._rest()
                    return
            self._messages = None
            budget.give_back(self._charged_bytes)
            self._charged_bytes = 0
            if opened >= self._per_turn and self._frames:
                self._rest()
                return

    def _rest(self) -> None:
        self._resting = True
        self._connection.read(False)
        asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._resting = False
        if self._ended:
            return
        try:
            self._work()
        except Exception as exc:  # noqa: BLE001 - whatever it was, this connection cannot be used any more
            self._connection.close(exc)
        if not self._resting:
            self._connection.read(True)
