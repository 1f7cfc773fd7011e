"""Calls to a name that the resolver is slow to tell."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from stele.model.errors import Closed, Code, Retryable
from stele.model.ids import ClusterId, NodeId, new_id
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
