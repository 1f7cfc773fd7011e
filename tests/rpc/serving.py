"""A node's ports whose answers a test gives, and requests to it. Used by tests of streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from stele.model.errors import Code, Rejected
from stele.model.ids import ClusterId, NodeId, new_id
from stele.rpc.budget import ByteBudget
from stele.rpc.channels import ChannelPool
from stele.rpc.client_stream import ClientStreams, Sink
from stele.rpc.identity import Identity, PeerBook
from stele.rpc.listener import StreamListener
from stele.rpc.proto import common_pb2, tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import (
    TabletServerServiceServicer,
    add_TabletServerServiceServicer_to_server,
)
from stele.rpc.server import bind, make_server

NODE = NodeId("a" * 32)
Answer = Callable[[tserver_pb2.ClientRequest], Awaitable[tserver_pb2.ClientResponse]]


class Service(TabletServerServiceServicer):
    """`called` hears of each unary call; it gets no answer."""

    def __init__(self, streams: ClientStreams, called: Callable[[], None]) -> None:
        self._streams = streams
        self._called = called

    async def OpenClientStream(self, request: common_pb2.OpenStreamRequest, context: Any) -> Any:
        return self._streams.introduce(request)

    async def GetNodeStatus(self, request: tserver_pb2.GetNodeStatusRequest, context: Any) -> Any:
        self._called()
        await asyncio.sleep(600)


class Answering:
    """A node's answers: `answer` says what, and each write waits for a future of `writes`, whose result is its timestamp."""

    def __init__(self, answer: Answer) -> None:
        self.answer: Any = answer
        self.writes: dict[int, asyncio.Future[int]] = {}

    async def watch(self, request: tserver_pb2.KvWatchRequest, sink: Sink) -> tserver_pb2.KvWatchResponse:
        raise Rejected("nothing is watched here")

    def begin_write(self, request: tserver_pb2.WriteRequest) -> asyncio.Future[int]:
        if request.block == b"bad":
            raise Rejected("no")
        return self.writes.setdefault(request.sequence, asyncio.get_running_loop().create_future())

    def end_write(self, outcome: int) -> tserver_pb2.WriteResponse:
        if not outcome:
            raise Rejected("it was refused", code=Code.SCHEMA_MISMATCH)
        return tserver_pb2.WriteResponse(timestamp=outcome)


@asynccontextmanager
async def serving(
    answer: Answer | Answering, called: Callable[[], None] = lambda: None, budget: ByteBudget | None = None
) -> AsyncIterator[tuple[str, ChannelPool]]:
    """(address, pool) of a node that answers clients' requests so."""
    identity = Identity(ClusterId(new_id()), NODE, 1)
    listener = StreamListener()
    await listener.listen("127.0.0.1", 0)
    answers = answer if isinstance(answer, Answering) else Answering(answer)
    streams = ClientStreams(identity, PeerBook(), budget or ByteBudget(), listener, answers)
    server: grpc.aio.Server = make_server(identity, PeerBook(), ByteBudget())
    add_TabletServerServiceServicer_to_server(Service(streams, called), server)
    port = await bind(server, "127.0.0.1:0")
    await server.start()
    pool = ChannelPool(Identity())
    try:
        yield f"127.0.0.1:{port}", pool
    finally:
        await pool.close()
        await listener.close()
        await server.stop(0)


def asking(key: bytes) -> tserver_pb2.ClientRequest:
    return tserver_pb2.ClientRequest(kv=tserver_pb2.KvRequest(key=key))


def writing(sequence: int, block: bytes = b"", deadline_ms: int = 0) -> tserver_pb2.ClientRequest:
    write = tserver_pb2.WriteRequest(sequence=sequence, block=block, deadline_ms=deadline_ms)
    return tserver_pb2.ClientRequest(write=write)
