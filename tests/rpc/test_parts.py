"""Messages of next to nothing, millions in one: refused before they are decoded; what nodes and clients send passes."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path

import grpc
import pytest

from stele.model.errors import Code, Rejected
from stele.model.ids import new_id
from stele.rpc.budget import ByteBudget
from stele.rpc.channels import MESSAGE_BYTES_MAX
from stele.rpc.connection import connect
from stele.rpc.convert import id_to_pb
from stele.rpc.frames import frame, peer_frame
from stele.rpc.parts import DECODED_BYTES, SMALL_FRAME_BYTES, bytes_of_parts, refuse_parts
from stele.rpc.proto import common_pb2, consensus_pb2, master_pb2, tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub
from tests.rpc.serving import NODE, serving
from tests.rpc.test_guard import served
from tests.rpc.test_peers import pair

PARTS_OF_A_STATUS = 9
"""Itself, two configurations, and three peers of each."""
EMPTY = b"\x12\x00"  # an empty message in field 2
MILLIONS = EMPTY * ((MESSAGE_BYTES_MAX - 1_024) // 2)


def peak_bytes(*, anew: bool = False) -> int:
    """The most memory that this process had, since it was last asked `anew`."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in each]
    return int(line.split()[1]) * 1_024


def nested(tag: int, inner: bytes) -> bytes:
    size, varint = len(inner), bytearray()
    while size >= 0x80:
        varint.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([tag, *varint, size]) + inner


def of_peers(*messages: consensus_pb2.ConsensusMessage) -> bytes:
    return consensus_pb2.PeerFrame(messages=messages).SerializeToString()


async def test_a_call_of_millions_of_empty_parts_takes_no_memory_and_the_loop_goes_on() -> None:
    """A heartbeat of 16 MB became 1.5 GB, and the loop stood still for 1.6 s."""
    metadata = (("stele-protocol", "1"),)
    async with served() as (service, address, _):
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_unary("/stele.v1.MasterService/CreateTable")
            tag = master_pb2.CreateTableRequest.DESCRIPTOR.fields_by_name["schema"].number << 3 | 2
            columns = common_pb2.SchemaPB.DESCRIPTOR.fields_by_name["columns"].number << 3 | 2
            raw = nested(tag, bytes([columns, 0]) * ((MESSAGE_BYTES_MAX - 1_024) // 2))
            before = peak_bytes(anew=True)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(raw, metadata=metadata)
            assert "parts; send less at once" in str(caught.value.details())
            assert peak_bytes() - before < 200 << 20  # the request itself, here and there
        assert not service.requests


async def test_the_parts_of_a_request_are_charged_before_it_is_decoded() -> None:
    """A thousand requests of a few kilobytes, each held, were gigabytes."""
    metadata = (("stele-protocol", "1"),)
    budget = ByteBudget(1 << 20, 1)
    async with served(budget) as (service, address, _), grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary("/stele.v1.MasterService/CreateTable")
        tag = master_pb2.CreateTableRequest.DESCRIPTOR.fields_by_name["schema"].number << 3 | 2
        columns = common_pb2.SchemaPB.DESCRIPTOR.fields_by_name["columns"].number << 3 | 2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(nested(tag, bytes([columns, 0]) * 10_000), metadata=metadata)
        assert "there is no room for" in str(caught.value.details())
        assert budget.used_bytes == 0 and not service.requests
        budget.limit_bytes = 64 << 20
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(nested(tag, bytes([columns, 0]) * 10_000), metadata=metadata)
        assert "10000 items; at most" in str(caught.value.details())
        assert budget.used_bytes == 0, "given back"


async def test_a_clients_frame_of_millions_of_empty_parts_ends_its_stream() -> None:
    async def answer(request: tserver_pb2.ClientRequest) -> tserver_pb2.ClientResponse:
        raise AssertionError("decoded")

    many = tserver_pb2.ClientRequest.DESCRIPTOR.fields_by_name["many"].number << 3 | 2
    async with serving(answer) as (address, pool):
        hello = common_pb2.OpenStreamRequest(hello=pool.identity.hello(NODE))
        place = await pool.unary(address, TabletServerServiceStub, "OpenClientStream", hello, timeout_s=60)
        stream = await connect(address, place.port, place.key)
        before = peak_bytes(anew=True)
        stream.send(frame(nested(many, b"\x0a\x00" * (len(MILLIONS) // 2))))
        async with asyncio.timeout(60):
            await stream.lost
        assert peak_bytes() - before < 200 << 20


async def test_a_peers_frame_of_millions_of_empty_parts_ends_its_stream() -> None:
    async with pair() as (first, second):
        assert second.inbound is not None
        hello = first.identity.hello(second.identity.node_id, channel="bulk")
        answer = second.inbound.introduce(common_pb2.OpenStreamRequest(hello=hello))
        stream = await connect("127.0.0.1:1", answer.port, answer.key)
        stream.send(frame(MILLIONS))
        async with asyncio.timeout(60):
            await stream.lost
        assert not second.got


def update(entries: int, payload: bytes) -> consensus_pb2.ConsensusMessage:
    return consensus_pb2.ConsensusMessage(
        tablet_id=id_to_pb(new_id()),
        from_replica=1,
        to_replica=2,
        update=consensus_pb2.UpdateConsensusRequest(
            term=7,
            entries=[
                consensus_pb2.EntryPB(term=7, index=n, kind=1, timestamp=1 << 60, payload=payload)
                for n in range(entries)
            ],
        ),
    )


def status(number: int) -> common_pb2.ReplicaStatusPB:
    peers = [
        common_pb2.PeerPB(node_id=id_to_pb(new_id()), replica_id=n, address="10.0.0.1:7050")
        for n in (1, 2, 3)
    ]
    config = common_pb2.ConfigurationPB(opid_index=number, peers=peers)
    return common_pb2.ReplicaStatusPB(
        tablet_id=id_to_pb(new_id()), replica_id=1, committed_config=config, pending_config=config
    )


def test_what_nodes_and_clients_send_passes() -> None:
    """The smallest entries that fill a frame, a report of 20,000 replicas, the most tablets of a request, a large block."""
    small = update(20_000, b"12345678").SerializeToString()
    refuse_parts(peer_frame(deque([small] * 3))[4:], consensus_pb2.PeerFrame.DESCRIPTOR)
    report = master_pb2.TSHeartbeatRequest(tablets=[status(n) for n in range(20_000)]).SerializeToString()
    charged = asyncio.run(bytes_of_parts(report, master_pb2.TSHeartbeatRequest.DESCRIPTOR))
    assert charged == 20_000 * PARTS_OF_A_STATUS * DECODED_BYTES
    ids = consensus_pb2.GetConsensusStateRequest(tablet_ids=[bytes(16)] * 100_000)
    refuse_parts(ids.SerializeToString(), ids.DESCRIPTOR)
    write = tserver_pb2.ClientRequest(write=tserver_pb2.WriteRequest(block=bytes(8 << 20)))
    refuse_parts(write.SerializeToString(), write.DESCRIPTOR)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x08\x00" * (1 << 21),  # numbers that no field has
        nested(0x12, nested(0x2A, b"\x1a\x00" * (1 << 21))),  # empty entries of one update
        of_peers(update(1, b"x")) + nested(0x12, EMPTY * 10) + MILLIONS,
        b"\x13" * (1 << 21),  # groups that begin
    ],
)
def test_parts_and_fields_without_end_are_refused(raw: bytes) -> None:
    with pytest.raises(Rejected, match="send less at once") as caught:
        refuse_parts(raw, consensus_pb2.PeerFrame.DESCRIPTOR)
    assert caught.value.code is Code.TOO_LARGE


@pytest.mark.parametrize(
    "raw",
    [b"\xff" * (1 << 20), b"\x12\xff\xff" + bytes(0), b"\x12" + b"\xff" * 9, nested(0x12, bytes(9))[:5]],
)
def test_what_is_cut_off_or_no_message_is_left_to_the_decoder(raw: bytes) -> None:
    raw = raw + b"\xff" * (SMALL_FRAME_BYTES + 1)
    refuse_parts(raw, consensus_pb2.PeerFrame.DESCRIPTOR)


def test_a_small_message_is_not_looked_at() -> None:
    refuse_parts(EMPTY * (SMALL_FRAME_BYTES // 2), consensus_pb2.PeerFrame.DESCRIPTOR)
