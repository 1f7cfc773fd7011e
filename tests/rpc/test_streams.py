"""Client streams: requests and answers, what ends them, and what must not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import uvloop

from stele.client.streams import GivenUp, NotSent, Streams
from stele.model.errors import Closed, Code, Rejected, Retryable
from stele.model.ids import ClusterId, NodeId, new_id
from stele.rpc.budget import ByteBudget
from stele.rpc.channels import MESSAGE_BYTES_MAX, ChannelPool
from stele.rpc.client_stream import ClientStreams
from stele.rpc.connection import FramedConnection, connect
from stele.rpc.frames import frame
from stele.rpc.identity import Identity, PeerBook
from stele.rpc.listener import StreamListener
from stele.rpc.proto import common_pb2, tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import (
    TabletServerServiceServicer,
    TabletServerServiceStub,
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


def writing(sequence: int, block: bytes = b"", deadline_ms: int = 0) -> tserver_pb2.ClientRequest:
    write = tserver_pb2.WriteRequest(sequence=sequence, block=block, deadline_ms=deadline_ms)
    return tserver_pb2.ClientRequest(write=write)


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


async def test_a_request_that_was_sent_never_ends_as_certainly_not_done() -> None:
    """The node's end breaks in the middle with what no frame has: whatever it is, the request may have been done."""
    async with serving(lambda request: asyncio.sleep(600)) as (address, pool):
        streams = Streams(pool)
        stream = streams.to(NODE, address)
        asked = asyncio.ensure_future(stream.ask(asking(b"k"), timeout_s=60))
        while stream._connection is None or stream._queue:
            await asyncio.sleep(0.01)
        stream._connection.data_received(b"GET / HTTP/1.1\r\n")
        with pytest.raises(Retryable) as caught:
            await asked
        assert caught.value.code is Code.UNAVAILABLE and not isinstance(caught.value, NotSent)
        await streams.close()


async def test_a_request_that_was_sent_and_got_no_answer_in_time_may_have_been_done() -> None:
    """One that never left was certainly not done: only such a one may be told so."""
    came = asyncio.Event()

    async def answer(request: tserver_pb2.ClientRequest) -> tserver_pb2.ClientResponse:
        came.set()
        await asyncio.sleep(600)
        return tserver_pb2.ClientResponse()

    async with serving(answer) as (address, pool):
        streams = Streams(pool)
        stream = streams.to(NODE, address)
        with pytest.raises(Retryable) as caught:
            await stream.ask(asking(b"a"), timeout_s=1.0)
        assert came.is_set() and caught.value.code is Code.TIMED_OUT
        assert not isinstance(caught.value, NotSent)
        ends: list[Any] = []
        given_up = stream.start(asking(b"b"), 60.0, ends.append)
        came.clear()
        async with asyncio.timeout(30):
            await came.wait()
        stream.give_up(given_up, "was silent")
        assert [type(end) for end in ends] == [GivenUp]
        unsent = stream.start(asking(b"c"), 60.0, ends.append)  # it leaves in the next turn of the loop
        stream.give_up(unsent, "was silent")
        assert [type(end) for end in ends] == [GivenUp, NotSent]
        await streams.close()


async def test_each_request_ends_once_whatever_else_comes_for_it() -> None:
    """Its answer twice, after its time, after it was given up or abandoned, and the end of the stream."""
    may_answer = asyncio.Event()

    async def answer(request: tserver_pb2.ClientRequest) -> tserver_pb2.ClientResponse:
        if request.kv.key != b"answered":
            await may_answer.wait()
        return tserver_pb2.ClientResponse(kv=tserver_pb2.KvResponse())

    async with serving(answer) as (address, pool), asyncio.timeout(60):
        streams = Streams(pool)
        stream = streams.to(NODE, address)
        ends = dict[str, list[Any]]()

        def start(name: str, timeout_s: float = 60.0) -> int:
            return stream.start(asking(name.encode()), timeout_s, ends.setdefault(name, []).append)

        async def ended(name: str) -> None:
            while not ends[name]:
                await asyncio.sleep(0.01)

        answered, _, given_up, left = start("answered"), start("late", 0.3), start("given up"), start("left")
        await ended("answered")
        stream.give_up(given_up, "was silent")
        stream.abandon(left)
        await ended("late")
        assert stream._connection is not None
        again = tserver_pb2.ClientResponse(request_id=answered, kv=tserver_pb2.KvResponse())
        stream._connection.data_received(frame(again.SerializeToString()))
        may_answer.set()
        await stream.ask(asking(b"last"), timeout_s=60)  # its answer comes behind the others'
        may_answer.clear()
        start("cut off")
        while stream._queue:
            await asyncio.sleep(0.01)
        stream._connection.close()
        await ended("cut off")
        await streams.close()
        told = {name: [type(end).__name__ for end in its] for name, its in ends.items()}
        assert told == {
            "answered": ["ClientResponse"],
            "late": ["Retryable"],
            "given up": ["GivenUp"],
            "left": [],
            "cut off": ["Retryable"],
        }


async def test_what_is_asked_while_a_connection_is_full_is_sent_once_there_is_room() -> None:
    async def answer(request: tserver_pb2.ClientRequest) -> tserver_pb2.ClientResponse:
        return tserver_pb2.ClientResponse(kv=tserver_pb2.KvResponse())

    async with serving(answer) as (address, pool), asyncio.timeout(60):
        streams = Streams(pool)
        stream = streams.to(NODE, address)
        await stream.ask(asking(b"first"), timeout_s=60)
        large = [tserver_pb2.KvRequest(key=b"k", value=bytes(8 << 20)) for _ in range(4)]
        ahead = [
            asyncio.ensure_future(stream.ask(tserver_pb2.ClientRequest(kv=each), timeout_s=60))
            for each in large
        ]
        while stream._connection is None or not stream._connection.full:
            await asyncio.sleep(0)
        await stream.ask(asking(b"k"), timeout_s=60)
        await asyncio.gather(*ahead)
        assert not stream._waiting and not stream._queue  # nothing is kept of what was answered
        connection = stream._connection
        await streams.close()
        assert not connection.stands


async def test_what_is_asked_while_a_broken_stream_rests_is_sent_when_it_stands_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stele.client.streams._REST_S", 1.0)

    async def answer(request: tserver_pb2.ClientRequest) -> tserver_pb2.ClientResponse:
        if request.kv.key == b"slow":
            await asyncio.sleep(600)
        return tserver_pb2.ClientResponse(kv=tserver_pb2.KvResponse())

    async with serving(answer) as (address, pool), asyncio.timeout(60):
        streams = Streams(pool)
        stream = streams.to(NODE, address)
        slow = asyncio.ensure_future(stream.ask(asking(b"slow"), timeout_s=60))
        while stream._connection is None or stream._queue:
            await asyncio.sleep(0.01)
        stream._connection.close()
        with pytest.raises(Retryable):
            await slow
        await stream.ask(asking(b"k"), timeout_s=60)
        await streams.close()


def test_what_is_asked_when_the_connection_has_just_ended_was_certainly_not_sent() -> None:
    """Before the stream has heard of the end; on uvloop, whose transports refuse to be written to then."""

    async def ask_at_the_end() -> None:
        async with serving(lambda request: asyncio.sleep(600)) as (address, pool):
            streams = Streams(pool)
            stream = streams.to(NODE, address)
            first = asyncio.ensure_future(stream.ask(asking(b"a"), timeout_s=60))
            while stream._connection is None or stream._queue:
                await asyncio.sleep(0.01)
            transport = stream._connection._transport
            assert transport is not None
            loop = asyncio.get_running_loop()
            faults: list[dict[str, Any]] = []
            loop.set_exception_handler(lambda loop, context: faults.append(context))
            transport.abort()
            second = asyncio.ensure_future(stream.ask(asking(b"b"), timeout_s=60))
            results = await asyncio.gather(first, second, return_exceptions=True)
            assert [type(r) for r in results] == [Retryable, NotSent]
            assert not faults
            await streams.close()

    uvloop.run(ask_at_the_end())


async def test_each_request_waits_for_its_own_time_whichever_was_asked_first() -> None:
    """One timer is for all of them."""
    async with serving(lambda request: asyncio.sleep(600)) as (address, pool), asyncio.timeout(60):
        streams = Streams(pool)
        stream = streams.to(NODE, address)
        ends: list[float] = []

        async def ask(timeout_s: float) -> None:
            with pytest.raises(Retryable, match=f"did not answer within {timeout_s}") as caught:
                await stream.ask(asking(b"k"), timeout_s=timeout_s)
            assert caught.value.code is Code.TIMED_OUT
            ends.append(timeout_s)

        left = asyncio.ensure_future(stream.ask(asking(b"k"), timeout_s=90))
        await asyncio.gather(*map(ask, (0.9, 0.3, 0.6, 0.3)))
        assert ends == [0.3, 0.3, 0.6, 0.9]
        left.cancel()
        await asyncio.wait([left])
        assert not stream._waiting
        await streams.close()
        assert stream._timer is None or stream._timer.cancelled()


async def test_what_is_asked_of_a_closed_stream_ends_at_once() -> None:
    pool = ChannelPool(Identity())
    streams = Streams(pool)
    stream = streams.to(NODE, "127.0.0.1:1")
    with pytest.raises(NotSent):
        await stream.ask(asking(b"a"), timeout_s=60)
    waiting = asyncio.ensure_future(
        stream.ask(asking(b"b"), timeout_s=60)
    )  # while it rests before it dials again
    await asyncio.sleep(0)
    await streams.close()
    with pytest.raises(Retryable, match="client was closed"):
        async with asyncio.timeout(60):
            await waiting
    with pytest.raises(Closed, match="client was closed"):
        await stream.ask(asking(b"c"), timeout_s=5)
    await pool.close()


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
