"""The node's half of a client's stream, over real sockets: bounds, charges, and how requests end there; unary calls, too."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stele.client.streams import NotSent, Streams
from stele.model.errors import Code, Rejected, Retryable
from stele.rpc.budget import ByteBudget
from stele.rpc.channels import MESSAGE_BYTES_MAX
from stele.rpc.connection import FramedConnection, connect
from stele.rpc.frames import frame
from stele.rpc.proto import common_pb2, tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub
from tests.rpc.serving import NODE, Answering, asking, serving, writing


async def test_an_answer_or_a_request_that_is_too_large_fails_its_own_request_alone() -> None:
    async def answer(request: tserver_pb2.ClientRequest) -> tserver_pb2.ClientResponse:
        value = b"x" * (MESSAGE_BYTES_MAX if request.kv.key == b"much" else 10)
        if request.kv.key == b"slow":
            await asyncio.sleep(0.2)
        return tserver_pb2.ClientResponse(
            kv=tserver_pb2.KvResponse(pairs=[tserver_pb2.KvPairPB(value=value)])
        )

    async with serving(answer) as (address, pool):
        streams = Streams(pool)
        stream = streams.to(NODE, address)
        slow = asyncio.ensure_future(stream.ask(asking(b"slow"), timeout_s=60))
        with pytest.raises(Rejected) as caught:
            await stream.ask(asking(b"much"), timeout_s=60)
        assert caught.value.code is Code.TOO_LARGE
        with pytest.raises(Rejected, match="the request has") as caught:
            await stream.ask(asking(bytes(MESSAGE_BYTES_MAX)), timeout_s=60)
        assert caught.value.code is Code.TOO_LARGE
        assert (await slow).kv.pairs[0].value == b"x" * 10
        await streams.close()


async def test_requests_of_next_to_no_bytes_are_bounded_too() -> None:
    """A megabyte of them is half a million; and what waits is held by a budget, however little each one says."""
    waiting = 0

    async def answer(request: tserver_pb2.ClientRequest) -> tserver_pb2.ClientResponse:
        nonlocal waiting
        waiting += 1
        await asyncio.sleep(600)
        return tserver_pb2.ClientResponse()

    async with serving(answer) as (address, pool):
        hello = common_pb2.OpenStreamRequest(hello=pool.identity.hello(NODE))

        async def opened() -> FramedConnection:
            place = await pool.unary(
                address, TabletServerServiceStub, "OpenClientStream", hello, timeout_s=60
            )
            return await connect(address, place.port, place.key)

        def frame_of(count: int) -> bytes:
            small = [tserver_pb2.ClientRequest(request_id=1)] * count
            many = tserver_pb2.ClientRequests(requests=small)
            return frame(tserver_pb2.ClientRequest(many=many).SerializeToString())

        greedy = await opened()
        greedy.send(frame_of(100_000))
        async with asyncio.timeout(60):
            await greedy.lost
        assert not waiting
        patient = await opened()
        refused = 0

        def count(frames: list[bytes]) -> None:
            nonlocal refused
            for raw in frames:
                answers = tserver_pb2.ClientResponse.FromString(raw).many.responses
                refused += sum(each.error.code == Code.THROTTLED for each in answers)

        patient.on_frames = count
        for _ in range(50):
            patient.send(frame_of(4_000))
        async with asyncio.timeout(200):
            while waiting + refused < 200_000:  # half a minute on a busy machine
                await asyncio.sleep(0.01)
        assert waiting <= 100_000
        patient.close()


async def test_what_requests_were_charged_is_given_back_however_they_end() -> None:
    """Answered, refused, put off, left by their client, or no requests at all."""
    budget = ByteBudget(20_000, 1)

    async def answer(request: tserver_pb2.ClientRequest) -> tserver_pb2.ClientResponse:
        if request.kv.key == b"slow":
            await asyncio.sleep(600)
        if request.kv.key == b"bad":
            raise Rejected("no")
        return tserver_pb2.ClientResponse(kv=tserver_pb2.KvResponse())

    async with serving(answer, budget=budget) as (address, pool), asyncio.timeout(60):
        streams = Streams(pool)
        stream = streams.to(NODE, address)
        await stream.ask(asking(b"k"), timeout_s=60)
        with pytest.raises(Rejected):
            await stream.ask(asking(b"bad"), timeout_s=60)
        assert not budget.used_bytes
        slow = asyncio.ensure_future(stream.ask(asking(b"slow"), timeout_s=60))
        while not budget.used_bytes:
            await asyncio.sleep(0.01)
        charged = budget.used_bytes
        many = (stream.ask(asking(b"k"), timeout_s=60) for _ in range(30))  # one frame, which alone would fit
        ends = await asyncio.gather(*many, return_exceptions=True)
        assert {end.code for end in ends if isinstance(end, Retryable)} == {Code.THROTTLED}
        assert len(ends) == 30 and budget.used_bytes == charged
        assert stream._connection is not None
        stream._connection.send(frame(b"no request"))
        with pytest.raises(Retryable):
            await slow
        while budget.used_bytes:
            await asyncio.sleep(0.01)
        await streams.close()


async def test_writes_end_with_their_outcome_their_deadline_or_their_client_and_are_charged_until_then() -> (
    None
):
    budget = ByteBudget()
    node = Answering(lambda request: asyncio.sleep(600))
    async with serving(node, budget=budget) as (address, pool), asyncio.timeout(60):
        streams = Streams(pool)
        stream = streams.to(NODE, address)

        def ask(sequence: int, block: bytes = b"", deadline_ms: int = 0) -> asyncio.Future[Any]:
            return asyncio.ensure_future(stream.ask(writing(sequence, block, deadline_ms), timeout_s=60))

        done, refused, failed = ask(1), ask(2), ask(3)
        with pytest.raises(Rejected, match="no"):
            await ask(4, b"bad")
        assert set(node.writes) == {1, 2, 3} and budget.used_bytes >= 3 * 1_024
        node.writes[3].set_exception(Retryable("lost", code=Code.UNKNOWN_OUTCOME))
        node.writes[2].set_result(0)
        node.writes[1].set_result(77)
        ends = await asyncio.gather(done, refused, failed, return_exceptions=True)
        assert ends[0].write.timestamp == 77
        assert [end.code for end in ends[1:]] == [Code.SCHEMA_MISMATCH, Code.UNKNOWN_OUTCOME]
        assert not budget.used_bytes

        long, short = ask(5), ask(6, deadline_ms=20)  # the later one's deadline passes first
        with pytest.raises(Retryable, match="no outcome within 20 ms") as caught:
            await short
        assert caught.value.code is Code.UNKNOWN_OUTCOME
        shorter = ask(7, deadline_ms=1)
        with pytest.raises(Retryable, match="no outcome within 1 ms"):
            await shorter
        for sequence in (6, 7):
            node.writes[sequence].set_result(1)  # nobody waits any more
        assert budget.used_bytes and not long.done()
        assert stream._connection is not None
        stream._connection.close()
        with pytest.raises(Retryable):
            await long
        while budget.used_bytes:
            await asyncio.sleep(0.01)
        assert not node.writes[5].cancelled()
        node.writes[5].set_result(1)
        await asyncio.sleep(0)
        assert not budget.used_bytes
        await streams.close()


async def test_an_answer_that_is_none_ends_the_stream_and_every_request_on_it() -> None:
    """Its request is told with the others that nobody knows what became of it."""

    async def answer(request: tserver_pb2.ClientRequest) -> tserver_pb2.ClientResponse:
        if request.kv.key == b"slow":
            await asyncio.sleep(600)
        error = common_pb2.ErrorPB(code=int(Code.NOT_LEADER), message="elsewhere", leader_hint=b"odd")
        return tserver_pb2.ClientResponse(error=error)

    async with serving(answer) as (address, pool), asyncio.timeout(60):
        streams = Streams(pool)
        stream = streams.to(NODE, address)
        asked = (stream.ask(asking(key), timeout_s=600) for key in (b"slow", b"odd"))
        for end in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(end, Retryable) and end.code is Code.UNAVAILABLE, end
            assert not isinstance(end, NotSent)
        await streams.close()


async def test_a_channel_that_is_dropped_under_a_call_is_an_error_and_no_cancellation() -> None:
    begun = 0

    def called() -> None:
        nonlocal begun
        begun += 1

    async def until_begun(calls: int) -> None:
        async with asyncio.timeout(60):
            while begun < calls:
                await asyncio.sleep(0.01)

    async with serving(lambda request: asyncio.sleep(600), called) as (address, pool):
        request = tserver_pb2.GetNodeStatusRequest()
        calls = [
            asyncio.ensure_future(
                pool.unary(address, TabletServerServiceStub, "GetNodeStatus", request, timeout_s=60)
            )
            for _ in range(3)
        ]
        await until_begun(3)
        pool.drop(address)
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(r) for r in results] == [Retryable] * 3
        assert all(isinstance(r, Retryable) and r.code is Code.UNAVAILABLE for r in results)
        mine = asyncio.ensure_future(
            pool.unary(address, TabletServerServiceStub, "GetNodeStatus", request, timeout_s=60)
        )
        await until_begun(4)
        mine.cancel()
        with pytest.raises(asyncio.CancelledError):
            await mine
