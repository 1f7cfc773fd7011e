"""Messages between replicas: for each peer node one outbound stream for control and one for bulk, dialled
when needed.

Called by stele.consensus on the event loop. A stream is opened over gRPC, where both nodes say who they are
(OpenPeerStream), and uses its own TCP connection. A message that cannot be sent is dropped, which Raft
tolerates. Messages of one channel arrive in order. Invariant: the memory for a peer is bounded, and control
never waits behind bulk. A link that is not connected and not used is removed.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from stele import metrics
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.model.ids import NodeId
from stele.rpc.channels import MESSAGE_BYTES_MAX, ChannelPool
from stele.rpc.connection import FramedConnection, connect
from stele.rpc.frames import peer_frame
from stele.rpc.identity import Identity, PeerBook, caller_from_hello, check
from stele.rpc.logging import OncePer
from stele.rpc.proto import common_pb2, consensus_pb2
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub

log = structlog.get_logger("stele.rpc.peers")

CONTROL, BULK = "control", "bulk"

OnMessage = Callable[[NodeId, consensus_pb2.ConsensusMessage], None]


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Bounds and waiting times of a link to one peer."""

    control_messages_max: int = 4_096
    bulk_bytes_max: int = 64 << 20
    dial_timeout_s: float = 1.5
    backoff_first_s: float = 0.05
    backoff_max_s: float = 1.0
    heartbeat_delay_s: float = 0.015
    """A message that is only a heartbeat waits this long for others, so that many tablets' heartbeats to a
    node leave in one frame."""
    forget_s: float = 60.0
    """An unconnected link is kept this long while nothing is sent on it: its node may be gone for good."""


class PeerTransport:
    """All links of this node. `resolve_address(node_id)` gives a node's last known HOST:PORT, "" if there is
    none. `own_address()` gives this node's, which peers are told.

    `on_disconnect(node_id)` is called when the control stream to or from a node has ended, so messages on their way are
    lost. It is called again once all that came on the bulk stream from there was passed on. `on_reconnect(node_id)` is
    called when the control stream to a node stands again, after it had ended or could not be opened. `on_heard` is
    called for each frame that arrives, before `on_message` is called for its messages."""

    def __init__(
        self,
        pool: ChannelPool,
        resolve_address: Callable[[NodeId], str],
        on_message: OnMessage,
        on_disconnect: Callable[[NodeId], None] = lambda node_id: None,
        *,
        on_reconnect: Callable[[NodeId], None] = lambda node_id: None,
        on_heard: Callable[[NodeId], None] = lambda node_id: None,
        book: PeerBook,
        own_address: Callable[[], str] = lambda: "",
        options: PeerOptions | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.pool = pool
        self.book = book
        self.on_message = on_message
        self.on_disconnect = on_disconnect
        self.on_reconnect = on_reconnect
        self.on_heard = on_heard
        self.own_address = own_address
        self.options = options or PeerOptions()
        self.rng = rng or random.Random()
        self._resolve_address = resolve_address
        self._links: dict[tuple[NodeId, str], _Link] = {}

    @property
    def identity(self) -> Identity:
        """The identity of this process."""
        return self.pool.identity

    def send(self, node_id: NodeId, raw: bytes, *, bulk: bool = False, may_wait: bool = False) -> bool:
        """Queue an encoded ConsensusMessage. Never blocks. What one turn of the loop queues for a peer leaves
        together.

        `may_wait`: it is a mere heartbeat. Returns False if the message was dropped. Then the peer could not
        be reached just before, the bulk queue is full, or the message is above the limit. A full control
        queue drops its oldest message instead.
        """
        channel = BULK if bulk else CONTROL
        link = self._links.get((node_id, channel))
        if link is None:
            link = self._links[node_id, channel] = _Link(self, node_id, channel, self._links)
        if link.put(raw, may_wait):
            return True
        metrics.peer_dropped.labels(channel).inc()
        return False

    def takes(self, node_id: NodeId, *, bulk: bool) -> bool:
        """Whether `send` would queue a message now. False for a while after the peer could not be reached."""
        link = self._links.get((node_id, BULK if bulk else CONTROL))
        return link is None or not link.resting

    def connected(self, node_id: NodeId) -> bool:
        """Whether the control stream to this node is connected."""
        link = self._links.get((node_id, CONTROL))
        return link is not None and link.established

    def address_of(self, node_id: NodeId) -> str:
        """Return where to dial a node: the address that the node said last, else the one that the owner
        knows."""
        return self.book.address(node_id) or self._resolve_address(node_id)

    async def close(self) -> None:
        """Close all links. Queued messages are lost."""
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links))


class _Link:
    """One outbound stream: a queue, and a task that dials and redials. Messages leave at the end of a
    turn."""

    def __init__(
        self,
        transport: PeerTransport,
        node_id: NodeId,
        channel: str,
        links: dict[tuple[NodeId, str], _Link],
    ) -> None:
        self._transport = transport
        self._links = links
        self._node_id = node_id
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._connection: FramedConnection | None = None
        self._wanted = asyncio.Event()
        self._flushing = False
        self._resting = False
        self._timer: asyncio.TimerHandle | None = None
        self._frames = metrics.peer_frames.cell(channel, "sent")
        self._bytes = metrics.peer_bytes.cell(channel, "sent")
        self._log = log.bind(peer=node_id, channel=channel)
        self._once = OncePer()
        self._task = self._loop.create_task(self._run())

    @property
    def established(self) -> bool:
        """Whether the stream is connected."""
        return self._connection is not None

    @property
    def resting(self) -> bool:
        """Whether this stream pauses before it dials again. Meanwhile it drops messages that are to be sent."""
        return self._resting

    def put(self, raw: bytes, may_wait: bool) -> bool:
        """Queue one encoded message, unless the peer is known to be unreachable now."""
        if self._resting or len(raw) + 64 > MESSAGE_BYTES_MAX:
            return False
        options = self._transport.options
        if self._channel == BULK:
            if self._queued_bytes and self._queued_bytes + len(raw) > options.bulk_bytes_max:
                return False
        elif len(self._queue) >= options.control_messages_max:
            self._queued_bytes -= len(self._queue.popleft())  # the oldest message is the least useful
            metrics.peer_dropped.labels(self._channel).inc()
        self._queue.append(raw)
        self._queued_bytes += len(raw)
        if self._flushing:
            return True  # it leaves with what this turn queued before
        if not may_wait:
            self._wake()
        elif self._timer is None:
            self._timer = self._loop.call_later(options.heartbeat_delay_s, self._waited)
        return True

    def _waited(self) -> None:
        self._timer = None
        if self._queue:
            self._wake()

    def _wake(self) -> None:
        if self._connection is None:
            self._wanted.set()
        elif not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        connection = self._connection
        while connection is not None and self._queue and not connection.full:
            raw = peer_frame(self._queue)
            self._queued_bytes = max(0, self._queued_bytes - len(raw)) if self._queue else 0
            self._frames[0] += 1
            self._bytes[0] += len(raw)
            connection.send(raw)

    async def close(self) -> None:
        """End the stream and its task."""
        if self._timer is not None:
            self._timer.cancel()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        options = self._transport.options
        backoff_s = options.backoff_first_s
        lost = False
        while await self._is_wanted():
            stood_at = 0.0
            try:
                connection = await self._dial()
                stood_at = self._loop.time()
                if lost and self._channel == CONTROL:
                    self._loop.call_soon(self._transport.on_reconnect, self._node_id)
                await self._until_lost(connection)
            except SteleError as exc:
                self._once.tell(
                    self._log.info,
                    "cannot open a stream to a peer; it will be dialled again",
                    "it stood" if stood_at else "",
                    exc.code,
                    error=str(exc),
                    address=self._address(),
                )
            except Exception:  # noqa: BLE001 - a link must never end for good, or two nodes lose contact
                self._log.exception("a stream to a peer failed because of a bug; it will be dialled again")
            self._clear()
            lost = True
            if stood_at and self._channel == CONTROL:
                self._transport.on_disconnect(self._node_id)
            if stood_at and self._loop.time() - stood_at > options.backoff_max_s:
                backoff_s = options.backoff_first_s
            self._resting = True
            await asyncio.sleep(backoff_s * (0.5 + self._transport.rng.random()))
            self._resting = False
            backoff_s = min(backoff_s * 2, options.backoff_max_s)

    async def _is_wanted(self) -> bool:
        """Wait until there is something to send. False: nothing came for long, so the link is removed."""
        try:
            async with asyncio.timeout(self._transport.options.forget_s):
                await self._wanted.wait()
        except TimeoutError:
            if not self._queue:
                self._links.pop((self._node_id, self._channel), None)
                return False
        return True

    async def _dial(self) -> FramedConnection:
        """Introduce this node over gRPC, then connect to the port that the peer names."""
        address = self._address()
        if not address:
            raise Retryable("the node's address is not known yet")
        try:
            async with asyncio.timeout(self._transport.options.dial_timeout_s):
                answer = await self._introduce(address)
                connection = await connect(address, answer.port, answer.key)
        except TimeoutError:
            raise Retryable(f"{address} did not open a stream in time") from None
        connection.on_frames = _nothing_comes_back
        connection.on_full = self._room
        self._log.info("connected a stream to a peer", address=address)
        return connection

    def _room(self, full: bool) -> None:
        if not full:
            self._wake()

    async def _introduce(self, address: str) -> common_pb2.OpenStreamResponse:
        transport = self._transport
        incarnation = transport.book.incarnation(self._node_id)
        hello = transport.identity.hello(self._node_id, incarnation, self._channel, transport.own_address())
        answer: common_pb2.OpenStreamResponse = await transport.pool.unary(
            address,
            ConsensusServiceStub,
            "OpenPeerStream",
            common_pb2.OpenStreamRequest(hello=hello),
            timeout_s=transport.options.dial_timeout_s,
        )
        caller = caller_from_hello(answer.hello)
        check(transport.identity, transport.book, caller)
        if caller.from_node != self._node_id:
            raise Rejected(
                f"dialled node {self._node_id[:8]}, but {caller.from_node[:8] or 'nobody'} answered",
                code=Code.WRONG_NODE,
            )
        return answer

    async def _until_lost(self, connection: FramedConnection) -> None:
        """Send messages until the connection has ended. Raises what ended it."""
        self._connection = connection
        try:
            self._flush()
            why = await asyncio.shield(connection.lost)
        finally:
            self._connection = None
            connection.close()
            await connection.closed()
        if isinstance(why, SteleError):
            raise why
        raise Retryable(f"the connection ended: {why or 'closed by the peer'}")

    def _clear(self) -> None:
        self._queue.clear()
        self._queued_bytes = 0
        self._wanted.clear()

    def _address(self) -> str:
        return self._transport.address_of(self._node_id)


def _nothing_comes_back(frames: list[bytes]) -> None:
    raise Rejected(
        f"a peer sent {len(frames)} frames on a stream that only this node may send on; the stream is closed"
    )
