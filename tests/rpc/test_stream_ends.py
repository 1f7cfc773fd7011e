"""The client's half of a stream, over real sockets: each request ends once, and says whether it may have been done."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvloop

from stele.client.streams import GivenUp, NotSent, Streams
from stele.model.errors import Closed, Code, Retryable
from stele.rpc.channels import ChannelPool
from stele.rpc.frames import frame
from stele.rpc.identity import Identity
from stele.rpc.proto import tserver_pb2
from tests.rpc.serving import NODE, asking, serving


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
