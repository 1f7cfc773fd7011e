"""`python -m tests.rpc.receiver`: a node's ports for unary calls, clients' streams and Flight, in a process of its own.

So the memory of what arrives is told from that of whoever sends it. Prints one line of JSON with its ports, and serves until
its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from stele.model.ids import NodeId, new_id
from stele.rpc.budget import ByteBudget
from stele.rpc.client_stream import ClientStreams
from stele.rpc.flight import FlightServer
from stele.rpc.identity import Identity, PeerBook
from stele.rpc.listener import StreamListener
from stele.rpc.proto import tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import add_TabletServerServiceServicer_to_server
from stele.rpc.server import bind, make_server
from tests.rpc.serving import Answering, Service
from tests.rpc.test_flight import CLUSTER, Provider

NODE = NodeId("a" * 32)


async def _answer(request: tserver_pb2.ClientRequest) -> tserver_pb2.ClientResponse:
    return tserver_pb2.ClientResponse(kv=tserver_pb2.KvResponse())


async def _ended() -> None:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    await reader.read()


async def main() -> None:
    identity: Any = Identity(CLUSTER, NODE, 1)
    budget, listener, provider = ByteBudget(), StreamListener(), Provider()
    await listener.listen("127.0.0.1", 0)
    streams = ClientStreams(identity, PeerBook(), budget, listener, Answering(_answer))
    server = make_server(identity, PeerBook(), budget)
    add_TabletServerServiceServicer_to_server(Service(streams, lambda: None), server)
    port = await bind(server, "127.0.0.1:0")
    await server.start()
    flight = FlightServer("127.0.0.1", 0, CLUSTER, provider, provider)
    told = {"cluster": CLUSTER, "tablet": new_id(), "unary": port, "flight": flight.port}
    print(json.dumps(told), flush=True)
    await _ended()
    await asyncio.to_thread(flight.close)
    await listener.close()
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main())
