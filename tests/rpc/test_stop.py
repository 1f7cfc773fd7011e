"""A server that stops: it serves nothing from then on, however slow the machine is."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from stele.model.errors import Code, SteleError
from stele.model.ids import ClusterId, NodeId, new_id
from stele.rpc import server as rpc_server
from stele.rpc.budget import ByteBudget
from stele.rpc.channels import ChannelPool
from stele.rpc.identity import Identity, PeerBook
from stele.rpc.proto import master_pb2
from stele.rpc.proto.master_pb2_grpc import (
    MasterServiceServicer,
    MasterServiceStub,
    add_MasterServiceServicer_to_server,
)

GRACE_S = 0.2
STANDS_STILL_S = 2.5  # it was an internal error to need 2 s more than the grace


class Waits(MasterServiceServicer):
    """Answers no call, and notes what becomes of it."""

    def __init__(self) -> None:
        self.came = asyncio.Event()
        self.ended = asyncio.Event()

    async def GetTable(self, request: Any, context: Any) -> Any:
        self.came.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()


async def test_a_process_that_stood_still_while_it_stopped_has_stopped_all_the_same() -> None:
    identity = Identity(ClusterId(new_id()), NodeId(new_id()), 1)
    server, service, pool = (
        rpc_server.make_server(identity, PeerBook(), ByteBudget()),
        Waits(),
        ChannelPool(Identity()),
    )
    add_MasterServiceServicer_to_server(service, server)
    address = f"127.0.0.1:{await rpc_server.bind(server, '127.0.0.1:0')}"
    await server.start()

    async def ask() -> SteleError:
        with pytest.raises(SteleError) as caught:
            request = master_pb2.GetTableRequest(name="t")
            await pool.unary(address, MasterServiceStub, "GetTable", request, timeout_s=60.0)
        return caught.value

    async with asyncio.timeout(60):
        asked = asyncio.ensure_future(ask())
        await service.came.wait()
        stopping = asyncio.ensure_future(rpc_server.stop(server, GRACE_S))
        await asyncio.sleep(0)
        time.sleep(STANDS_STILL_S)  # noqa: ASYNC251 - the loop stands still
        await stopping
        await service.ended.wait()
        assert (await asked).code in (Code.UNAVAILABLE, Code.TIMED_OUT, Code.UNKNOWN_OUTCOME)
        assert (await ask()).code is Code.UNAVAILABLE
    await pool.close()
