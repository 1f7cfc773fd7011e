"""However little each of a client's or peer's frames says: the loop gets its turns, and what was charged comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from stele.rpc.budget import ByteBudget
from stele.rpc.client_stream import REQUESTS_PER_TURN
from stele.rpc.connection import FramedConnection, connect
from stele.rpc.frames import LENGTH_BYTES, frame
from stele.rpc.inbound import BULK_PER_TURN
from stele.rpc.proto import common_pb2, tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub
from tests.rpc.serving import NODE, serving
from tests.rpc.test_peers import pair

FRAMES = 10_000
EMPTY_FRAME = bytes(LENGTH_BYTES)


def many(count: int) -> bytes:
    small = [tserver_pb2.ClientRequest(request_id=n) for n in range(1, count + 1)]
    return frame(
        tserver_pb2.ClientRequest(many=tserver_pb2.ClientRequests(requests=small)).SerializeToString()
    )


async def turns_until(true: Callable[[], bool]) -> int:
    turns = 0
    async with asyncio.timeout(60):
        while not true():
            turns += 1
            await asyncio.sleep(0)
    return turns


@pytest.mark.parametrize("raw", [EMPTY_FRAME * FRAMES, many(4_000)])
async def test_what_a_client_sends_at_once_is_begun_in_turns(raw: bytes) -> None:
    """1.6 MB of tiny requests held the loop for seconds, with every other client and all heartbeats."""
    answered: list[int] = []
    count = FRAMES if raw[:LENGTH_BYTES] == EMPTY_FRAME else 4_000
    budget = ByteBudget()

    async def answer(request: tserver_pb2.ClientRequest) -> tserver_pb2.ClientResponse:
        answered.append(request.request_id)
        return tserver_pb2.ClientResponse(kv=tserver_pb2.KvResponse())

    async with serving(answer, budget=budget) as (address, pool):
        hello = common_pb2.OpenStreamRequest(hello=pool.identity.hello(NODE))
        place = await pool.unary(address, TabletServerServiceStub, "OpenClientStream", hello, timeout_s=60)
        stream = await connect(address, place.port, place.key)
        stream.send(raw)
        assert await turns_until(lambda: len(answered) == count) >= count // REQUESTS_PER_TURN
        if count == 4_000:
            assert answered == list(range(1, 4_001))
        stream.close()
        await turns_until(lambda: budget.used_bytes == 0)


async def test_a_client_that_leaves_amid_a_frame_leaves_no_charge() -> None:
    begun = 0
    budget = ByteBudget()
    stream: FramedConnection | None = None

    async def answer(request: tserver_pb2.ClientRequest) -> tserver_pb2.ClientResponse:
        nonlocal begun
        begun += 1
        assert stream is not None
        stream.close()  # an answer that cannot be sent tells the node
        return tserver_pb2.ClientResponse(kv=tserver_pb2.KvResponse())

    async with serving(answer, budget=budget) as (address, pool):
        hello = common_pb2.OpenStreamRequest(hello=pool.identity.hello(NODE))
        place = await pool.unary(address, TabletServerServiceStub, "OpenClientStream", hello, timeout_s=60)
        stream = await connect(address, place.port, place.key)
        stream.send(many(4_000) * 5)
        await turns_until(lambda: begun > 0)
        await turns_until(lambda: budget.used_bytes == 0)
        assert begun < 20_000


async def test_frames_of_a_peer_without_a_message_are_taken_in_turns_too() -> None:
    async with pair() as (first, second):
        assert second.inbound is not None
        heard = 0

        def count(node_id: str) -> None:
            nonlocal heard
            heard += 1

        second.transport.on_heard = count
        hello = first.identity.hello(second.identity.node_id, channel="bulk")
        answer = second.inbound.introduce(common_pb2.OpenStreamRequest(hello=hello))
        stream = await connect("127.0.0.1:1", answer.port, answer.key)
        stream.send(EMPTY_FRAME * FRAMES)
        assert await turns_until(lambda: heard == FRAMES) >= FRAMES // BULK_PER_TURN
        stream.close()
        await stream.closed()
