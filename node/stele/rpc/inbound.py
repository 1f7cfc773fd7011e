"""What peers send: the server's half of PeerStream. Made by the node beside its PeerTransport.

Checks the Hello, then hands every message on, in order, on the event loop. Invariant: of one peer and channel only the
newest stream is heard; an older one that lingers is ended.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from stele import metrics
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.model.ids import NodeId
from stele.rpc.budget import ByteBudget
from stele.rpc.errors import abort_with, as_stele_error
from stele.rpc.identity import caller_from_hello, check
from stele.rpc.logging import OncePer
from stele.rpc.peers import BULK, CONTROL, METHOD, SERVICE, PeerTransport
from stele.rpc.proto import consensus_pb2
from stele.rpc.server import source_of

log = structlog.get_logger("stele.rpc.peers")

MESSAGES_PER_TURN = 128
"""After so many messages of one frame the loop gets a turn."""
_HELLO_TIMEOUT_S = 5.0


class PeerInbound:
    """Takes in the streams that other nodes open. Shares identity, book and callbacks with the outbound half."""

    def __init__(self, transport: PeerTransport, budget: ByteBudget) -> None:
        self._transport = transport
        self._budget = budget
        self._streams: dict[tuple[str, str], asyncio.Task[Any]] = {}
        self._may_log = OncePer()

    def handlers(self) -> dict[str, Any]:
        """For `make_server(streams=...)`."""
        return {f"/{SERVICE}/{METHOD}": grpc.stream_stream_rpc_method_handler(self._serve)}

    async def _serve(self, request_iterator: Any, context: Any) -> None:
        try:
            await self._serve_stream(context)
        except Exception as exc:
            if isinstance(exc, grpc.aio.AbortError):
                raise
            error = as_stele_error(exc, where=METHOD)
            source = source_of(context)
            if isinstance(error, Rejected) and self._may_log(source, error.code):
                log.warning("peer stream refused", source=source, error=str(error))
            await abort_with(context, error)

    async def _serve_stream(self, context: Any) -> None:
        node_id, channel = await self._greet(context)
        task = asyncio.current_task()
        assert task is not None
        key = (node_id, channel)
        earlier = self._streams.get(key)
        if earlier is not None:
            earlier.cancel()
        self._streams[key] = task
        frames = metrics.peer_frames.cell(channel, "received")
        size = metrics.peer_bytes.cell(channel, "received")
        try:
            while True:
                raw = await context.read()
                if raw is grpc.aio.EOF:
                    return
                frames[0] += 1
                size[0] += len(raw)
                await self._take(node_id, raw)
        finally:
            if self._streams.get(key) is task:
                del self._streams[key]
                if channel == CONTROL:
                    self._transport.on_disconnect(node_id)

    async def _greet(self, context: Any) -> tuple[NodeId, str]:
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                raw = await context.read()
        except TimeoutError:
            raise Retryable("no hello came", code=Code.TIMED_OUT) from None
        frame = _decode(raw)
        if not frame.HasField("hello"):
            raise Rejected("a stream between peers begins with a hello")
        identity = self._transport.identity
        caller = caller_from_hello(frame.hello)
        check(identity, self._transport.book, caller)
        if not caller.from_node or caller.channel not in (CONTROL, BULK):
            raise Rejected(f"hello without a node, or with the unknown channel {caller.channel[:20]!r}")
        answer = consensus_pb2.PeerFrame(hello=identity.hello(caller.from_node, caller.from_incarnation))
        await context.write(answer.SerializeToString())
        return NodeId(caller.from_node), caller.channel

    async def _take(self, node_id: NodeId, raw: bytes) -> None:
        with self._budget.charge(min(len(raw), self._budget.reserve_bytes), control=True):
            messages = _decode(raw).messages
            for number, message in enumerate(messages, 1):
                self._transport.on_message(node_id, message)
                if number % MESSAGES_PER_TURN == 0:
                    await asyncio.sleep(0)


def _decode(raw: Any) -> consensus_pb2.PeerFrame:
    if raw is grpc.aio.EOF:
        raise SteleError("the stream ended before its hello", code=Code.UNAVAILABLE)
    try:
        return consensus_pb2.PeerFrame.FromString(raw)
    except DecodeError:
        raise Rejected(f"{len(raw)} bytes that are no frame between peers") from None
