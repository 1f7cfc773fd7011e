"""Strangers at a node's ports, on real processes: refused, logged once, nothing harmed."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from stele.client import AsyncClient
from stele.client.admin import list_replicas, node_status
from stele.client.streams import Streams
from stele.model.errors import Code, SteleError
from stele.model.ids import ClusterId, NodeId, new_id
from stele.model.schema import Schema
from stele.rpc.channels import ChannelPool
from stele.rpc.frames import frame
from stele.rpc.identity import Identity
from stele.rpc.proto import common_pb2, tserver_pb2
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub
from stele.rpc.ticket import Ticket
from tests.harness import Cluster
from tests.harness.processes import FLIGHT_PORT, HTTP_PORT, NODE_PORT, STREAM_PORT, Member

SCHEMA = Schema.make([("id", "int64"), ("s", "string", True)], ["id"])


async def code_of(call: Any) -> Code:
    with pytest.raises(SteleError) as caught:
        await call
    return caught.value.code


def throw_garbage(host: str) -> None:
    for port in (NODE_PORT, FLIGHT_PORT, STREAM_PORT, HTTP_PORT):
        for garbage in (
            b"garbage\r\n\r\n",
            b"\xff" + os.urandom(4_095),
            frame(os.urandom(16)),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(99),
        ):
            with socket.create_connection((host, port), 5) as stranger:
                stranger.settimeout(0.05)
                try:
                    stranger.sendall(garbage)
                    stranger.recv(100)
                except OSError:
                    pass


async def foreign_streams(address: str, node_id: str) -> None:
    """A client and a peer of another cluster, a peer without a name, and a client that sends what is no request."""
    foreign = ChannelPool(Identity(ClusterId(new_id())))
    streams = Streams(foreign)
    try:
        request = tserver_pb2.ClientRequest(read=tserver_pb2.ReadRequest())
        assert await code_of(streams.to(node_id, address).ask(request, timeout_s=60)) is Code.WRONG_CLUSTER
    finally:
        await streams.close()
        await foreign.close()
    peer = Identity(ClusterId(new_id()), NodeId(new_id()), 1)
    pool = ChannelPool(Identity())
    for hello, code in (
        (peer.hello(node_id, channel="control"), Code.WRONG_CLUSTER),
        (Identity().hello(node_id, channel="control"), Code.INVALID_ARGUMENT),
    ):
        request = common_pb2.OpenStreamRequest(hello=hello)
        assert await code_of(pool.unary(address, ConsensusServiceStub, "OpenPeerStream", request)) is code
    request = common_pb2.OpenStreamRequest(hello=Identity().hello(node_id))
    for garbage in (frame(b"\xff\xff"), b"\xfe" * 8):
        opened = await pool.unary(address, TabletServerServiceStub, "OpenClientStream", request)
        reader, writer = await asyncio.open_connection(address.partition(":")[0], opened.port)
        writer.write(frame(opened.key) + garbage)
        async with asyncio.timeout(60):
            assert not await reader.read()
        writer.close()
    await pool.close()
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            unknown: Any = channel.unary_unary("/stele.v1.MasterService/ListTables")
            await unknown(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def foreign_tickets(member: Member) -> None:
    with fl.connect(f"grpc+tcp://{member.flight_address}") as client:
        other = Ticket(new_id(), new_id(), 1, 1, "{}").encode()
        asks: tuple[tuple[Callable[[], Any], str], ...] = (
            (lambda: client.do_get(fl.Ticket(other)).read_all(), "this is cluster"),
            (lambda: client.do_get(fl.Ticket(b"junk")).read_all(), "is unknown; this program reads"),
            (lambda: list(client.list_flights()), "only GetFlightInfo and DoGet"),
        )
        for ask, words in asks:
            with pytest.raises(fl.FlightError, match=words):
                ask()


async def too_large(client: AsyncClient, address: str) -> None:
    table = await client.open_table("t")
    for size in (9 << 20, 17 << 20):  # above what a write may be, and above what a message may be
        row = {"id": 1, "s": "x" * size}
        assert await code_of(table.put(row)) is Code.TOO_LARGE
        three = pa.Table.from_pylist([{"id": 0, "s": "y"}, row, {"id": 0, "s": "z"}])
        together = [table.put({"id": i, "s": "x" * (1 << 20)}) for i in range(20)]
        assert all(await asyncio.gather(*together, table.put({"id": 99})))
        result = await table.write_arrow(three, raise_row_errors=False)
        assert [(e.row, e.code) for e in result.row_errors] == [(1, Code.TOO_LARGE)]
        assert result.rows_written == 2
    async with grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        call: Any = channel.unary_unary("/stele.v1.TabletServerService/GetNodeStatus")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(bytes(17 << 20), metadata=Identity().metadata())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def a_node_given_as_master(node: Member, master: Member) -> None:
    async with AsyncClient([node.address], first_contact_s=8.0) as client:
        with pytest.raises(SteleError, match="masters and nodes serve different requests"):
            await client.list_tables()
    async with AsyncClient([node.address, master.address]) as client:
        assert len(await client.list_tables()) == 1


async def test_strangers_are_refused_logged_once_and_harm_nothing(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path / "c", masters=1, nodes=1) as cluster,
        AsyncClient(cluster.master_addresses) as client,
    ):
        table = await client.create_table("t", SCHEMA, replication_factor=1)
        await table.put({"id": 0})
        node = cluster.nodes[0]
        begun = time.monotonic()
        for _ in range(2):
            throw_garbage(node.host)
            await foreign_streams(node.address, node.node_id)
            foreign_tickets(node)
            pool = ChannelPool(Identity(ClusterId(new_id())))
            assert await code_of(list_replicas(pool, node.address)) is Code.WRONG_CLUSTER
            await pool.close()
        await too_large(client, node.address)
        await a_node_given_as_master(node, cluster.masters[0])

        minutes = (time.monotonic() - begun) // 60  # a slow machine takes more than one, and each is told of
        told = Counter(
            (line["event"], line.get("error", "").partition(":")[0])
            for line in cluster.log_lines(node)
            if "source" in line and line["level"] == "warning"
        )
        assert told.keys() == {
            ("not HTTP", ""),
            ("request refused", "WRONG_CLUSTER"),
            ("request refused", "UNSUPPORTED_VERSION"),
            ("request refused", "INVALID_ARGUMENT"),
            ("stream refused", "TOO_LARGE"),
            ("stream refused", "INVALID_ARGUMENT"),
            ("flight refused", "WRONG_CLUSTER"),
            ("flight refused", "UNSUPPORTED_VERSION"),
        }
        assert max(told.values()) <= 1 + minutes, told
        assert (await node_status(client.pool, node.address)).replicas == 1
        assert await table.scan().count() == 21 and await table.get(0) is not None
