"""Unary requests that are under way: few at once, by turns of their callers, and none for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from stele.model.errors import Code, Retryable
from stele.model.ids import NodeId, new_id
from stele.rpc import requests
from stele.rpc.budget import ByteBudget
from stele.rpc.fair import FairQueue, source_of
from stele.rpc.identity import Identity
from stele.rpc.requests import RequestPlaces
from tests.rpc.test_guard import CLUSTER, ask, pool_of, served


def test_sources_take_turns_and_each_ones_things_leave_in_their_order() -> None:
    queue: FairQueue[str] = FairQueue()
    for n in range(4):
        queue.push(("greedy", "one"), f"g1-{n}")
    queue.push(("greedy", "two"), "g2-0")
    queue.push(("modest", "one"), "m-0")
    queue.push(("modest", "one"), "m-1")
    assert queue.remove(("greedy", "one"), "g1-2") and not queue.remove(("greedy", "one"), "g1-2")
    assert not queue.remove(("nobody", "one"), "m-0")
    order = [queue.pop() for _ in range(len(queue))]
    assert order == ["g1-0", "m-0", "g2-0", "m-1", "g1-1", "g1-3"]
    assert not queue and not queue._sources
    with pytest.raises(IndexError):
        queue.pop()


@pytest.mark.parametrize(
    ("peer", "source"),
    [
        ("ipv4:10.0.0.7:41234", ("ipv4:10.0.0.7", "ipv4:10.0.0.7:41234")),
        ("ipv6:%5B::1%5D:41234", ("ipv6:%5B::1%5D", "ipv6:%5B::1%5D:41234")),
    ],
)
def test_a_caller_is_its_host_then_its_connection(peer: str, source: tuple[str, str]) -> None:
    assert source_of(peer) == source


@pytest.fixture
async def quick(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(requests, "YIELD_S", 0.02)
    yield


async def test_who_waits_ends_what_does_not_come(quick: None) -> None:
    places = RequestPlaces(2)

    async def never() -> bytes:
        await asyncio.sleep(600)
        return b""

    async def at_once() -> bytes:
        return b"here"

    stuck = [asyncio.ensure_future(places.receive(("a", str(n)), never)) for n in range(20)]
    async with asyncio.timeout(60):
        assert await places.receive(("b", "1"), at_once) == b"here"
        assert sum(each.done() for each in stuck) <= 3  # a turn or two, though 18 came before
        left = asyncio.ensure_future(places.receive(("c", "1"), at_once))
        await asyncio.sleep(0)
        left.cancel()
        stuck.pop().cancel()
        ends = await asyncio.gather(*stuck[:-2], return_exceptions=True)
        assert all(isinstance(end, Retryable) and end.code is Code.TIMED_OUT for end in ends)
        for each in stuck[-2:]:
            each.cancel()
        await asyncio.gather(*stuck[-2:], left, return_exceptions=True)
    assert places._free == 2 and not places._reading and not places._waiting


async def test_few_are_read_at_once_and_each_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "ARRIVES_S", 0.05)
    places, reading, most = RequestPlaces(3), 0, 0

    async def never() -> bytes:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        try:
            await asyncio.sleep(600)
        finally:
            reading -= 1
        return b""

    async with asyncio.timeout(20):
        all_of_them = (places.receive(("a", str(n)), never) for n in range(7))
        ends = await asyncio.gather(*all_of_them, return_exceptions=True)
    assert all(isinstance(end, Retryable) and end.code is Code.TIMED_OUT for end in ends)
    assert (most, reading, places._free) == (3, 0, 3)


async def test_nodes_have_places_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats and votes are not behind clients that take their time."""
    for name in ("ARRIVES_S", "YIELD_S"):
        monkeypatch.setattr(requests, name, 600.0)
    async with (
        served(ByteBudget(64 << 20, 16 << 20)) as (_, address, _),
        pool_of(Identity()) as pool,
        pool_of(Identity(CLUSTER, NodeId(new_id()), 1)) as nodes,
        grpc.aio.insecure_channel(address) as channel,
    ):
        method = channel.stream_unary("/stele.v1.MasterService/GetTable")
        calls = [method(metadata=Identity().metadata()) for _ in range(8)]
        for _ in range(100):  # until they have all places of clients
            try:
                await ask(pool, address, timeout_s=0.3)
            except Retryable as exc:
                if exc.code is Code.TIMED_OUT:
                    break
        else:
            raise AssertionError("clients are still served")
        async with asyncio.timeout(20):
            assert (await ask(nodes, address)).table.name == "t"
        for call in calls:
            call.cancel()


async def test_calls_that_send_no_request_hold_up_neither_clients_nor_nodes(quick: None) -> None:
    """Each of them, and each of 40 with 15 MB under way, was memory that no budget knew of."""
    budget = ByteBudget(64 << 20, 16 << 20)
    node = Identity(CLUSTER, NodeId(new_id()), 1)
    async with (
        served(budget) as (_, address, _),
        pool_of(Identity()) as pool,
        pool_of(node) as nodes,
        grpc.aio.insecure_channel(address) as channel,
    ):
        method = channel.stream_unary("/stele.v1.MasterService/GetTable")
        calls = [method(metadata=Identity().metadata()) for _ in range(50)]
        async with asyncio.timeout(60):
            assert (await ask(nodes, address)).table.name == "t"
            for _ in range(3):
                assert (await ask(pool, address)).table.name == "t"
            assert await calls[0].code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_call_without_a_request_is_refused() -> None:
    async with served() as (_, address, _), grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_unary("/stele.v1.MasterService/GetTable")(metadata=Identity().metadata())
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
