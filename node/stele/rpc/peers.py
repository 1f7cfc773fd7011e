"""Messages between replicas: per peer node one outbound stream for control and one for bulk, dialled when wanted.

Called by stele.consensus on the event loop. A message that cannot be sent is lost, which the algorithm tolerates; what
is sent on one channel arrives in order. Invariant: memory held for a peer is bounded, and control never waits behind
bulk, because each channel has a connection of its own.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from stele import metrics
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.model.ids import NodeId
from stele.rpc.channels import MESSAGE_BYTES_MAX, dial
from stele.rpc.errors import from_rpc_error
from stele.rpc.frames import peer_frame
from stele.rpc.identity import Identity, PeerBook, caller_from_hello, check
from stele.rpc.proto import consensus_pb2

log = structlog.get_logger("stele.rpc.peers")

SERVICE = "stele.v1.ConsensusService"
METHOD = "PeerStream"
CONTROL, BULK = "control", "bulk"

OnMessage = Callable[[NodeId, consensus_pb2.ConsensusMessage], None]


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Bounds and waits of a link to one peer."""

    control_messages_max: int = 4_096
    bulk_bytes_max: int = 64 << 20
    hello_timeout_s: float = 1.5
    backoff_first_s: float = 0.05
    backoff_max_s: float = 1.0
    heartbeat_delay_s: float = 0.015
    """So long a mere heartbeat waits for company: many tablets' heartbeats to a node leave as one frame."""


class PeerTransport:
    """All links of this node. `resolve_address(node_id)` gives the last known HOST:PORT of a node, "" if none."""

    def __init__(
        self,
        identity: Identity,
        resolve_address: Callable[[NodeId], str],
        on_message: OnMessage,
        on_disconnect: Callable[[NodeId], None] = lambda node_id: None,
        *,
        book: PeerBook,
        options: PeerOptions | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.identity = identity
        self.book = book
        self.on_message = on_message
        self.on_disconnect = on_disconnect
        self.options = options or PeerOptions()
        self.rng = rng or random.Random()
        self._resolve_address = resolve_address
        self._links: dict[tuple[NodeId, str], _Link] = {}

    def send(self, node_id: NodeId, message: consensus_pb2.ConsensusMessage, *, bulk: bool = False) -> bool:
        """Queue a message; all that one turn of the loop queues for a peer leaves together. Never blocks.

        False if it was dropped: no connection, a full queue, or a message above the limit.
        """
        channel = BULK if bulk else CONTROL
        link = self._links.get((node_id, channel))
        if link is None:
            link = self._links[node_id, channel] = _Link(self, node_id, channel)
        update = message.update if message.WhichOneof("body") == "update" else None
        heartbeat = update is not None and not update.entries and not update.read_context
        if link.put(message.SerializeToString(), may_wait=heartbeat):
            return True
        metrics.peer_dropped.labels(channel).inc()
        return False

    def connected(self, node_id: NodeId) -> bool:
        """Whether the control stream to this node stands."""
        link = self._links.get((node_id, CONTROL))
        return link is not None and link.established

    def address_of(self, node_id: NodeId) -> str:
        """Where to dial a node: what it said last itself, else what the owner knows."""
        return self.book.address(node_id) or self._resolve_address(node_id)

    async def forget(self, node_id: NodeId) -> None:
        """Close the links to a node that is no longer a peer of any replica here."""
        for channel in (CONTROL, BULK):
            link = self._links.pop((node_id, channel), None)
            if link is not None:
                await link.close()

    async def close(self) -> None:
        """Close all links. Queued messages are lost."""
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links))


class _Link:
    """One outbound stream: a queue, and a task that dials, sends, and dials again."""

    def __init__(self, transport: PeerTransport, node_id: NodeId, channel: str) -> None:
        self.established = False
        self._transport = transport
        self._node_id = node_id
        self._channel = channel
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._wanted = asyncio.Event()
        self._resting = False
        self._timer: asyncio.TimerHandle | None = None
        self._frames = metrics.peer_frames.cell(channel, "sent")
        self._bytes = metrics.peer_bytes.cell(channel, "sent")
        self._log = log.bind(peer=node_id, channel=channel)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def put(self, raw: bytes, *, may_wait: bool) -> bool:
        """Queue one encoded message, unless the peer is known not to answer just now."""
        if self._resting or len(raw) + 64 > MESSAGE_BYTES_MAX:
            return False
        options = self._transport.options
        if self._channel == BULK:
            if self._queued_bytes and self._queued_bytes + len(raw) > options.bulk_bytes_max:
                return False
        elif len(self._queue) >= options.control_messages_max:
            self._queued_bytes -= len(self._queue.popleft())  # the oldest says least
            metrics.peer_dropped.labels(self._channel).inc()
        self._queue.append(raw)
        self._queued_bytes += len(raw)
        if not may_wait:
            self._wanted.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(options.heartbeat_delay_s, self._waited)
        return True

    def _waited(self) -> None:
        self._timer = None
        if self._queue:
            self._wanted.set()

    async def close(self) -> None:
        """End the stream and its task."""
        if self._timer is not None:
            self._timer.cancel()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        options = self._transport.options
        backoff_s = options.backoff_first_s
        while True:
            await self._wanted.wait()
            was_established = False
            try:
                await self._session()
            except SteleError as exc:
                self._log.info("no stream to peer", error=str(exc), address=self._address())
            except Exception:  # noqa: BLE001 - whatever it was, a link that ends for good parts two nodes
                self._log.exception("stream to peer failed; it is dialled again")
            was_established, self.established = self.established, False
            self._clear()
            if was_established:
                backoff_s = options.backoff_first_s
                if self._channel == CONTROL:
                    self._transport.on_disconnect(self._node_id)
            self._resting = True
            await asyncio.sleep(backoff_s * (0.5 + self._transport.rng.random()))
            self._resting = False
            backoff_s = min(backoff_s * 2, options.backoff_max_s)

    async def _session(self) -> None:
        """One connection, from dialling to its end. Raises what ended it."""
        address = self._address()
        if not address:
            raise Retryable("no address of this node is known yet")
        channel = await dial(address)
        try:
            call: Any = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
            await self._greet(call)
            self.established = True
            self._log.info("stream to peer stands", address=address)
            reader = asyncio.ensure_future(_until_end(call))
            writer = asyncio.ensure_future(self._write(call))
            try:
                done, _ = await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                reader.cancel()
                writer.cancel()
                await asyncio.gather(reader, writer, return_exceptions=True)
                call.cancel()
        except (grpc.RpcError, asyncio.InvalidStateError) as exc:
            raise from_rpc_error(exc, where=address) from exc
        except TimeoutError:
            raise Retryable(f"{address} did not say hello in time") from None
        finally:
            await channel.close()

    async def _greet(self, call: Any) -> None:
        transport = self._transport
        identity = transport.identity
        hello = identity.hello(self._node_id, transport.book.incarnation(self._node_id), self._channel)
        async with asyncio.timeout(transport.options.hello_timeout_s):
            await call.write(consensus_pb2.PeerFrame(hello=hello).SerializeToString())
            raw = await call.read()
        if raw is grpc.aio.EOF:
            raise Retryable("the stream ended before it said hello")
        answer = caller_from_hello(_decode(raw).hello)
        check(identity, transport.book, answer)
        if answer.from_node != self._node_id:
            raise Rejected(
                f"dialled node {self._node_id}, {answer.from_node or 'nobody'} answered", code=Code.WRONG_NODE
            )

    async def _write(self, call: Any) -> None:
        while True:
            if not self._queue:
                self._wanted.clear()
                await self._wanted.wait()
            frame = peer_frame(self._queue)
            self._queued_bytes = max(0, self._queued_bytes - len(frame)) if self._queue else 0
            self._frames[0] += 1
            self._bytes[0] += len(frame)
            await call.write(frame)

    def _clear(self) -> None:
        self._queue.clear()
        self._queued_bytes = 0
        self._wanted.clear()

    def _address(self) -> str:
        return self._transport.address_of(self._node_id)


async def _until_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass
    code = await call.code()
    raise Retryable(f"the peer ended the stream: {code.name} {await call.details() or ''}".rstrip())


def _decode(raw: bytes) -> consensus_pb2.PeerFrame:
    try:
        return consensus_pb2.PeerFrame.FromString(raw)
    except DecodeError:
        raise Rejected(f"{len(raw)} bytes that are no frame between peers") from None
