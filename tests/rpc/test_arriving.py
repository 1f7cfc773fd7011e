"""Messages that are not whole yet: they take bounded memory, and hold nobody else up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from stele.client.streams import Streams
from stele.model.errors import Code
from stele.rpc import arriving
from stele.rpc.arriving import Arriving
from stele.rpc.budget import ByteBudget
from stele.rpc.channels import MESSAGE_BYTES_MAX, ChannelPool
from stele.rpc.connection import FramedConnection, connect
from stele.rpc.frames import LENGTH_BYTES, frame
from stele.rpc.proto import common_pb2, tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub
from tests.rpc.serving import NODE, Answering, asking, serving, writing


class Source:
    """A connection that says what was done to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reads = True
        self.held_back = False
        self.closed = ""

    def hold_back(self, on: bool) -> None:
        self.held_back = on

    def close(self, why: Exception | None = None) -> None:
        self.closed = str(why)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(arriving, "_now_s", lambda: now[0])
    return now


async def look(held: Arriving, clock: list[float], seconds: float) -> None:
    """Time passes, and is looked at as the timer does."""
    for _ in range(int(seconds / 0.25)):
        clock[0] += 0.25
        held._look()


async def test_past_the_bound_one_frame_goes_on_and_the_others_wait_in_their_order(
    clock: list[float],
) -> None:
    counted = [0]

    def count(delta: int) -> None:
        counted[0] += delta

    held = Arriving(1 << 20, count)
    first, second, third, little = (Source(name) for name in ("first", "second", "third", "little"))
    held.holds(first, 800_000)
    held.holds(second, 400_000)
    assert second.held_back and not first.held_back
    held.holds(first, 15 << 20)
    held.holds(little, 60_000)  # as heartbeats are
    held.holds(third, 100_000)
    assert (first.held_back, little.held_back, third.held_back) == (False, False, True)
    assert counted[0] == held.bytes == (15 << 20) + 560_000
    held.holds(first, 0)
    assert not second.held_back and not third.held_back
    held.holds(second, 0)
    held.holds(third, 0)
    held.holds(little, 0)
    assert held.bytes == counted[0] == 0 and not held._frames


async def test_what_stands_still_is_closed_sooner_while_others_wait(clock: list[float]) -> None:
    held = Arriving(1 << 20)
    still, waiting = Source("still"), Source("waiting")
    held.holds(still, 2 << 20)
    await look(held, clock, arriving.STILL_S - 1)
    assert not still.closed
    held.holds(waiting, 1 << 18)
    await look(held, clock, 0.5)
    assert "arrived too slowly" in still.closed and not waiting.held_back and not waiting.closed
    await look(held, clock, arriving.STILL_S)
    assert waiting.closed
    held = Arriving(1 << 20)
    slow, waiting = Source("slow"), Source("waiting")
    held.holds(slow, 2 << 20)
    held.holds(waiting, 1 << 18)
    for more in range(1, 12):
        if not slow.closed:
            held.holds(slow, (2 << 20) + more)
        await look(held, clock, 0.25)
    assert slow.closed and not waiting.closed


async def test_a_large_message_over_a_slow_link_arrives_though_others_wait(clock: list[float]) -> None:
    """It was closed after 2 s, each time that it was sent again."""
    held = Arriving(1 << 20)
    slow = Source("slow")
    held.holds(slow, size := 2 << 20)
    done = 0
    while size < MESSAGE_BYTES_MAX:
        quick = Source("quick")
        held.holds(quick, 1 << 18)  # whoever waits has its turn after 2 s
        assert quick.held_back
        for _ in range(9):
            if not slow.held_back:
                held.holds(slow, size := size + 50_000)
            await look(held, clock, 0.25)
        assert slow.held_back and not quick.held_back
        held.holds(quick, 0)
        assert not slow.held_back and not slow.closed and not quick.closed
        done += 1
    assert done > 20
    held.holds(slow, 0)
    assert not held.bytes and not held._frames


async def test_slow_messages_take_turns_and_bounded_memory(clock: list[float]) -> None:
    held = Arriving(1 << 20)
    sizes = {Source(f"slow {n}"): 0 for n in range(60)}
    most = 0
    for _ in range(40):
        for source in sizes:
            if not source.held_back and not source.closed:
                sizes[source] += 200_000
                held.holds(source, sizes[source])
            if source.closed:
                held.holds(source, 0)
            most = max(most, held.bytes)
        await look(held, clock, 0.25)
    assert sum(size > 400_000 for size in sizes.values()) > 3, "they had turns"
    assert most <= held.close_bytes
    for _ in range(800):
        for source in sizes:
            if not source.held_back and not source.closed:
                sizes[source] += 200_000
                held.holds(source, 0 if sizes[source] >= MESSAGE_BYTES_MAX else sizes[source])
                most = max(most, held.bytes)
        await look(held, clock, 0.25)
    assert most <= held.close_bytes
    assert any(not source.closed and sizes[source] >= MESSAGE_BYTES_MAX for source in sizes)


async def test_a_loop_that_stood_still_itself_closes_nobody(clock: list[float]) -> None:
    held = Arriving(1 << 20)
    first, waiting = Source("first"), Source("waiting")
    held.holds(first, 2 << 20)
    held.holds(waiting, 1 << 18)
    clock[0] += 20
    held._look()
    assert not first.closed


async def test_a_frame_whose_owner_does_not_read_is_not_closed_for_that(clock: list[float]) -> None:
    held = Arriving(1 << 20)
    first = Source("first")
    first.reads = False
    held.holds(first, 2 << 20)
    await look(held, clock, 2 * arriving.STILL_S)
    assert not first.closed


async def test_connections_without_end_are_closed(clock: list[float]) -> None:
    held = Arriving(1 << 20)
    sources = [Source(str(n)) for n in range(200)]
    for source in sources:
        held.holds(source, 256 << 10)
        if source.closed:
            held.holds(source, 0)
    assert held.bytes <= held.close_bytes
    assert any(source.closed for source in sources)


@pytest.fixture
async def crowd(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(arriving, "_LOOK_S", 0.02)
    monkeypatch.setattr(arriving, "TURN_STILL_S", 0.05)
    yield


async def test_streams_that_hold_most_of_a_frame_take_bounded_memory_and_stop_nobody(crowd: None) -> None:
    """48 of them, each with 15 of 16 MB: 720 MiB beside the budget, for as long as they liked."""

    async def answer(request: tserver_pb2.ClientRequest) -> tserver_pb2.ClientResponse:
        return tserver_pb2.ClientResponse(kv=tserver_pb2.KvResponse())

    budget = ByteBudget(32 << 20, 8 << 20)
    most = 0

    async def send(address: str, pool: ChannelPool, stack: AsyncExitStack) -> None:
        nonlocal most
        hello = common_pb2.OpenStreamRequest(hello=pool.identity.hello(NODE))
        place = await pool.unary(address, TabletServerServiceStub, "OpenClientStream", hello, timeout_s=60)
        sock = stack.enter_context(socket.socket())
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", place.port))
        await loop.sock_sendall(sock, frame(place.key) + MESSAGE_BYTES_MAX.to_bytes(LENGTH_BYTES, "big"))
        chunk = bytes(1 << 20)
        try:
            for _ in range(15):
                await loop.sock_sendall(sock, chunk)
                most = max(most, budget.arriving_bytes)
        except ConnectionError:
            pass

    async with serving(answer, budget=budget) as (address, pool), AsyncExitStack() as stack:
        sending = [asyncio.ensure_future(send(address, pool, stack)) for _ in range(48)]
        streams = Streams(pool)
        stream = streams.to(NODE, address)
        async with asyncio.timeout(60):
            for _ in range(20):
                await stream.ask(asking(b"little"), timeout_s=60)
            await stream.ask(asking(bytes(4 << 20)), timeout_s=60)
            await asyncio.gather(*sending)
        assert 0 < most <= (8 << 20) + MESSAGE_BYTES_MAX + 48 * (256 << 10)
        await streams.close()


async def test_answers_that_a_client_does_not_take_are_charged() -> None:
    """64 reads of 4 MiB by a client that takes none: 256 MiB that no budget knew of."""
    asked = 0

    async def answer(request: tserver_pb2.ClientRequest) -> tserver_pb2.ClientResponse:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.01 * asked)
        value = tserver_pb2.KvPairPB(value=bytes(4 << 20))
        return tserver_pb2.ClientResponse(kv=tserver_pb2.KvResponse(pairs=[value]))

    budget = ByteBudget(32 << 20, 8 << 20)
    async with serving(answer, budget=budget) as (address, pool), asyncio.timeout(60):
        hello = common_pb2.OpenStreamRequest(hello=pool.identity.hello(NODE))
        place = await pool.unary(address, TabletServerServiceStub, "OpenClientStream", hello, timeout_s=60)
        connection = await connect(address, place.port, place.key)
        answers: list[tserver_pb2.ClientResponse] = []

        def take(frames: list[bytes]) -> None:
            for raw in frames:
                response = tserver_pb2.ClientResponse.FromString(raw)
                many = response.WhichOneof("body") == "many"
                answers.extend(response.many.responses if many else [response])

        connection.on_frames = take
        connection.read(False)
        for number in range(1, 65):
            request = asking(b"k")
            request.request_id = number
            connection.send(frame(request.SerializeToString()))
        used = 0
        while asked < 64 or used != budget.used_bytes:
            used = budget.used_bytes
            await asyncio.sleep(0.1)
        assert 4 << 20 <= used <= 24 << 20
        connection.read(True)
        while len(answers) < 64:
            await asyncio.sleep(0.01)
        assert {each.request_id for each in answers} == set(range(1, 65))
        throttled = [each for each in answers if each.HasField("error")]
        assert throttled and all(each.error.code == Code.THROTTLED for each in throttled)
        while budget.used_bytes:
            await asyncio.sleep(0.01)
        connection.close()


async def test_the_outcome_of_what_was_done_is_not_a_refusal_for_want_of_room() -> None:
    """THROTTLED says that nothing was done. It took the place of answers as small as itself while a client took none."""
    asked = 0

    async def answer(request: tserver_pb2.ClientRequest) -> tserver_pb2.ClientResponse:
        nonlocal asked
        asked += 1
        number = asked
        await asyncio.sleep(0.01 * number)
        if number == 9:  # those before it have filled the connection; now there is no room at all
            budget.take(budget.limit_bytes - budget.used_bytes, control=True)
        value = tserver_pb2.KvPairPB(value=bytes(4 << 20) if number < 9 else b"done")
        return tserver_pb2.ClientResponse(kv=tserver_pb2.KvResponse(pairs=[value]))

    budget = ByteBudget(32 << 20, 8 << 20)
    async with serving(answer, budget=budget) as (address, pool), asyncio.timeout(60):
        hello = common_pb2.OpenStreamRequest(hello=pool.identity.hello(NODE))
        place = await pool.unary(address, TabletServerServiceStub, "OpenClientStream", hello, timeout_s=60)
        connection = await connect(address, place.port, place.key)
        answers = unread(connection)
        for number in range(1, 13):
            request = asking(b"k")
            request.request_id = number
            connection.send(frame(request.SerializeToString()))
        await asyncio.sleep(0)
        while asked < 12:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # all have been answered
        connection.read(True)
        while len(answers) < 12:
            await asyncio.sleep(0.01)
        assert all(answers[number].kv.pairs[0].value == b"done" for number in range(9, 13))
        connection.close()


def unread(connection: FramedConnection) -> dict[int, tserver_pb2.ClientResponse]:
    """The answers of a connection by request id, filled once it is read."""
    answers: dict[int, tserver_pb2.ClientResponse] = {}

    def take(frames: list[bytes]) -> None:
        for raw in frames:
            response = tserver_pb2.ClientResponse.FromString(raw)
            many = response.WhichOneof("body") == "many"
            answers.update((r.request_id, r) for r in (response.many.responses if many else [response]))

    connection.on_frames = take
    connection.read(False)
    return answers


class Refused(Answering):
    """Each write ends with the reasons of many refused rows."""

    def end_write(self, outcome: int) -> tserver_pb2.WriteResponse:
        reasons = [
            tserver_pb2.RowErrorPB(row=n, code=int(Code.ALREADY_PRESENT), message="why " * 20)
            for n in range(100)
        ]
        return tserver_pb2.WriteResponse(timestamp=outcome, row_errors=reasons)


async def test_a_write_whose_outcome_there_is_no_room_for_may_have_been_done() -> None:
    """THROTTLED says that nothing was done: its client would write the rows again under another number."""
    asked = 0

    async def answer(request: tserver_pb2.ClientRequest) -> tserver_pb2.ClientResponse:
        nonlocal asked
        asked += 1
        value = tserver_pb2.KvPairPB(value=bytes(4 << 20))
        return tserver_pb2.ClientResponse(kv=tserver_pb2.KvResponse(pairs=[value]))

    budget, node = ByteBudget(64 << 20, 8 << 20), Refused(answer)
    async with serving(node, budget=budget) as (address, pool), asyncio.timeout(60):
        hello = common_pb2.OpenStreamRequest(hello=pool.identity.hello(NODE))
        place = await pool.unary(address, TabletServerServiceStub, "OpenClientStream", hello, timeout_s=60)
        connection = await connect(address, place.port, place.key)
        answers = unread(connection)
        write = writing(1, b"", 60_000)
        write.request_id = 99
        connection.send(frame(write.SerializeToString()))
        for number in range(1, 9):  # they fill the connection
            request = asking(b"k")
            request.request_id = number
            connection.send(frame(request.SerializeToString()))
        while asked < 8 or not node.writes:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        budget.take(budget.limit_bytes - budget.used_bytes, control=True)
        node.writes[1].set_result(77)
        await asyncio.sleep(0.2)
        connection.read(True)
        while 99 not in answers:
            await asyncio.sleep(0.01)
        assert answers[99].error.code == Code.UNKNOWN_OUTCOME
        assert "send the write again with the same client id" in answers[99].error.message
        connection.close()
