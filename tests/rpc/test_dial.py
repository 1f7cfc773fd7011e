"""Dials: names that the resolver is slow to tell, and channels that nobody uses."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import grpc
import pytest

from stele.model.errors import Closed, Code, Retryable
from stele.model.ids import ClusterId, NodeId, new_id
from stele.rpc import channels
from stele.rpc.channels import ChannelPool
from stele.rpc.identity import Identity
from stele.rpc.proto import master_pb2
from stele.rpc.proto.master_pb2_grpc import MasterServiceStub
from tests.rpc.test_masters import Group, Member


class SlowResolver:
    """It tells where `slow.test` is once `told` is set. `asked` counts the lookups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told = threading.Event()
        self.asked = 0
        real = socket.getaddrinfo

        def lookup(host: Any, *arguments: Any, **options: Any) -> Any:
            if host != "slow.test":
                return real(host, *arguments, **options)
            self.asked += 1
            assert self.told.wait(60)
            return real("127.0.0.1", *arguments, **options)

        monkeypatch.setattr(socket, "getaddrinfo", lookup)


async def test_the_time_of_a_call_covers_the_lookup_and_a_name_is_looked_up_once_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolver = SlowResolver(monkeypatch)
    member = Member(Group())
    await member.start()
    pool = ChannelPool(Identity(ClusterId(member.group.cluster_id), NodeId(new_id()), 1))
    address = f"slow.test:{member.address.rpartition(':')[2]}"
    request = master_pb2.ListMastersRequest()
    try:
        for _ in range(5):
            with pytest.raises(Retryable, match="name lookup did not end") as caught:
                await pool.unary(address, MasterServiceStub, "ListMasters", request, timeout_s=0.05)
            assert caught.value.code is Code.TIMED_OUT
        while not resolver.asked:  # its thread may begin late
            await asyncio.sleep(0.01)
        resolver.told.set()
        answer = await pool.unary(address, MasterServiceStub, "ListMasters", request, timeout_s=60)
        assert [m.address for m in answer.masters] == [member.address] and resolver.asked == 1
    finally:
        resolver.told.set()
        await pool.close()
        await member.stop()


async def test_a_pool_that_is_closed_waits_for_no_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = SlowResolver(monkeypatch)
    pool = ChannelPool(Identity(ClusterId(new_id()), NodeId(new_id()), 1))
    request = master_pb2.ListMastersRequest()
    try:
        with pytest.raises(Retryable):
            await pool.unary("slow.test:1", MasterServiceStub, "ListMasters", request, timeout_s=0.05)
        await pool.close()  # the lookup is told of nothing before it ends
        assert not resolver.told.is_set()
        with pytest.raises(Closed):
            await pool.unary("slow.test:1", MasterServiceStub, "ListMasters", request)
    finally:
        resolver.told.set()


async def test_a_channel_without_calls_is_disconnected_and_connects_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of two nodes opens a stream with one call. The server then asked the connection every second whether it lives."""
    soon = tuple((n, 1_000 if v == channels.UNUSED_MS else v) for n, v in channels.CHANNEL_OPTIONS)
    monkeypatch.setattr(channels, "CHANNEL_OPTIONS", soon)
    member = Member(Group())
    await member.start()
    channel = await channels.dial(member.address)
    identity = Identity(ClusterId(member.group.cluster_id), NodeId(new_id()), 1)

    async def call() -> Any:
        stub, request = MasterServiceStub(channel), master_pb2.ListMastersRequest()
        return await stub.ListMasters(request, metadata=identity.metadata("", 0), timeout=60)

    try:
        await call()
        async with asyncio.timeout(60):
            while channel.get_state() is not grpc.ChannelConnectivity.IDLE:
                await asyncio.sleep(0.2)
        assert [m.address for m in (await call()).masters] == [member.address]
    finally:
        await channel.close()
        await member.stop()
