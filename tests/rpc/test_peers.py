"""Messages between two transports, and who is refused."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from stele.model import bounds
from stele.model.errors import Code, Rejected
from stele.model.ids import ClusterId, NodeId, new_id
from stele.rpc.budget import ByteBudget
from stele.rpc.channels import ChannelPool
from stele.rpc.client_stream import request_ids_of
from stele.rpc.connection import FramedConnection, FrameReader
from stele.rpc.frames import REQUESTS_MAX, client_requests, client_responses, frame, peer_frame
from stele.rpc.identity import Identity, PeerBook
from stele.rpc.inbound import MESSAGES_PER_TURN, PeerInbound
from stele.rpc.listener import StreamListener
from stele.rpc.peers import BULK, CONTROL, PeerOptions, PeerTransport, _Link
from stele.rpc.proto import common_pb2, consensus_pb2, tserver_pb2
from stele.rpc.proto.consensus_pb2_grpc import (
    ConsensusServiceServicer,
    add_ConsensusServiceServicer_to_server,
)
from stele.rpc.server import bind, make_server

CLUSTER = ClusterId(new_id())
OPTIONS = PeerOptions(dial_timeout_s=60.0, backoff_first_s=0.01, backoff_max_s=0.05)
"""What waits for a link that is not made in time is lost."""


class Introductions(ConsensusServiceServicer):
    """The one call of the service that peers need to meet."""

    def __init__(self, inbound: PeerInbound) -> None:
        self._inbound = inbound

    async def OpenPeerStream(self, request: common_pb2.OpenStreamRequest, context: Any) -> Any:
        return self._inbound.introduce(request)


@dataclass
class Node:
    """A transport with its server, and what it got."""

    identity: Identity
    addresses: dict[str, str]
    server: grpc.aio.Server | None = None
    got: list[tuple[str, consensus_pb2.ConsensusMessage]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    back: list[str] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)
    inbound: PeerInbound | None = None
    listener: StreamListener | None = None

    address: str = ""

    def __post_init__(self) -> None:
        self.book = PeerBook()
        self.pool = ChannelPool(self.identity)
        self.transport = PeerTransport(
            self.pool,
            lambda node_id: self.addresses.get(node_id, ""),
            lambda sender, message: self.got.append((sender, message)),
            self.lost.append,
            on_reconnect=self.back.append,
            on_heard=self.heard.append,
            book=self.book,
            own_address=lambda: self.address,
            options=OPTIONS,
        )

    async def listen(self, address: str = "127.0.0.1:0") -> None:
        budget = ByteBudget()
        self.listener = StreamListener()
        self.inbound = PeerInbound(self.transport, budget, self.listener)
        self.server = make_server(self.identity, self.book, budget)
        add_ConsensusServiceServicer_to_server(Introductions(self.inbound), self.server)
        port = await bind(self.server, address)
        self.address = self.addresses[self.identity.node_id] = f"127.0.0.1:{port}"
        await self.listener.listen("127.0.0.1", 0)
        await self.server.start()

    async def close(self) -> None:
        await self.transport.close()
        await self.pool.close()
        if self.listener is not None:
            await self.listener.close()
        if self.server is not None:
            await self.server.stop(0)


@asynccontextmanager
async def pair(
    second_cluster: str = CLUSTER, forks: tuple[str | None, str | None] = (None, None)
) -> AsyncIterator[tuple[Node, Node]]:
    addresses: dict[str, str] = {}
    first = Node(Identity(CLUSTER, NodeId(new_id()), 1, forks[0]), addresses)
    second = Node(Identity(ClusterId(second_cluster), NodeId(new_id()), 1, forks[1]), addresses)
    await first.listen()
    await second.listen()
    try:
        yield first, second
    finally:
        await first.close()
        await second.close()


def message(number: int, size_bytes: int = 0) -> consensus_pb2.ConsensusMessage:
    update = consensus_pb2.UpdateConsensusRequest(term=number)
    if size_bytes:
        update.entries.add(term=1, index=number, payload=b"x" * size_bytes)
    return consensus_pb2.ConsensusMessage(tablet_id=b"t" * 16, update=update)


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def test_messages_arrive_in_order_and_large_ones_whole() -> None:
    async with pair() as (first, second):
        for number in range(1_000):
            assert first.transport.send(second.identity.node_id, message(number).SerializeToString())
        for number in range(4):
            assert first.transport.send(
                second.identity.node_id, message(number, 8 << 20).SerializeToString(), bulk=True
            )
        await until(lambda: len(second.got) == 1_004)
        control = [m.update.term for _, m in second.got if not m.update.entries]
        assert control == list(range(1_000))
        bulk = [m.update for _, m in second.got if m.update.entries]
        assert [u.term for u in bulk] == [0, 1, 2, 3]
        assert all(len(u.entries[0].payload) == 8 << 20 for u in bulk)
        assert {sender for sender, _ in second.got} == set(second.heard) == {first.identity.node_id}
        assert len(second.heard) < 1_004  # once a frame
        assert second.book.address(first.identity.node_id) == first.address


async def test_a_peer_that_restarts_elsewhere_is_found_again_and_its_loss_is_told() -> None:
    async with pair() as (first, second):
        first.transport.send(second.identity.node_id, message(1).SerializeToString())
        await until(lambda: second.got)
        await second.close()
        await until(lambda: first.lost)
        assert first.lost[0] == second.identity.node_id
        await is_back(first, second)
        assert first.transport.connected(second.identity.node_id)


@pytest.mark.parametrize("order", [(CONTROL, BULK), (BULK, CONTROL)], ids="-".join)
async def test_a_nodes_loss_is_told_once_more_after_the_last_that_it_sent(order: tuple[str, str]) -> None:
    """A killed leader's last entries, read from the bulk stream after its followers had missed it, said that it led. They
    waited for it a second time."""
    async with pair() as (first, second):
        to_first, of_second = first.identity.node_id, second.identity.node_id
        for bulk in (False, True):
            second.transport.send(to_first, message(1).SerializeToString(), bulk=bulk)
        await until(lambda: len(first.got) == 2)
        assert first.inbound is not None
        streams = first.inbound._streams
        told = []
        for channel in order:
            streams[of_second, channel]._connection.close()
            await until(lambda channel=channel: (of_second, channel) not in streams)
            told.append(list(first.lost))
        assert told[1] == [of_second] * (2 if order[0] == CONTROL else 1) and len(told[0]) == len(told[1]) - 1


async def test_a_bulk_stream_alone_that_ends_is_no_loss() -> None:
    """The control stream stands again: what the other one brought last is no reason to miss a leader."""
    async with pair() as (first, second):
        to_first, of_second = first.identity.node_id, second.identity.node_id
        assert first.inbound is not None
        streams = first.inbound._streams
        for number, bulk in enumerate((False, True), 1):
            second.transport.send(to_first, message(1).SerializeToString(), bulk=bulk)
            await until(lambda number=number: len(first.got) == number)
        streams[of_second, CONTROL]._connection.close()
        await until(lambda: first.lost)
        told = len(first.lost)

        def stands_again() -> bool:
            second.transport.send(to_first, message(1).SerializeToString())
            return len(first.got) > 2

        await until(stands_again)
        streams[of_second, BULK]._connection.close()
        await until(lambda: (of_second, BULK) not in streams)
        assert len(first.lost) == told


async def test_that_a_node_is_connected_again_is_told() -> None:
    """Leaders probe a lost peer seldom. Its node may be back long before the next probe."""
    async with pair() as (first, second):
        first.transport.send(second.identity.node_id, message(1).SerializeToString())
        await until(lambda: second.got)
        assert not first.back
        await second.close()
        await until(lambda: first.lost)
        await is_back(first, second)
        await until(lambda: first.back)
        assert first.back == [second.identity.node_id] and first.transport.connected(first.back[0])


async def test_a_peer_that_is_gone_leaves_no_link_behind() -> None:
    """Links to nodes that were replaced stayed, a task each, for as long as the node ran."""
    async with pair() as (first, second):
        first.transport.options = replace(OPTIONS, forget_s=0.1)
        links = first.transport._links
        for bulk in (False, True):
            first.transport.send(second.identity.node_id, message(1).SerializeToString(), bulk=bulk)
        await until(lambda: len(second.got) == 2)
        await asyncio.sleep(0.2)
        assert len(links) == 2  # those that stand
        tasks = [link._task for link in links.values()]
        await second.close()
        await until(lambda: not links)
        await until(lambda: all(task.done() for task in tasks))
        await is_back(first, second)


async def is_back(sender: Node, node: Node) -> None:
    """The node, which was closed, is started again; on return it has heard the sender."""
    node.identity = node.pool.identity = replace(node.identity, incarnation=2)
    node.got.clear()
    await node.listen()
    sender.book.observe(node.identity.node_id, 2, node.address)

    def sent_until_heard() -> bool:
        sender.transport.send(node.identity.node_id, message(2).SerializeToString())
        return bool(node.got)

    await until(sent_until_heard)


async def refused(sender: Node, to: str) -> str:
    """Why a message makes no stream to a peer."""
    with structlog.testing.capture_logs() as lines:
        sender.transport.send(NodeId(to), message(1).SerializeToString())
        await until(
            lambda: any(
                line["event"] == "cannot open a stream to a peer; it will be dialled again" for line in lines
            )
        )
    return next(
        str(line["error"])
        for line in lines
        if line["event"] == "cannot open a stream to a peer; it will be dialled again"
    )


async def test_a_peer_that_stays_away_is_told_of_once_in_a_while() -> None:
    """Each second, for each peer and channel, it filled the log."""
    async with pair() as (first, second):
        await second.close()
        dialled = 0
        dial = _Link._dial

        async def counted(link: _Link) -> FramedConnection:
            nonlocal dialled
            dialled += 1
            return await dial(link)

        with structlog.testing.capture_logs() as lines, pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Link, "_dial", counted)
            while dialled < 10:
                first.transport.send(second.identity.node_id, message(1).SerializeToString())
                await asyncio.sleep(0.01)
        kinds = [
            line["error"].split(":")[0]
            for line in lines
            if line["event"] == "cannot open a stream to a peer; it will be dialled again"
        ]
        assert kinds and len(kinds) == len(set(kinds))  # a slow machine times out as well


async def test_a_peer_of_another_cluster_gets_nothing() -> None:
    async with pair(second_cluster=new_id()) as (first, second):
        assert "WRONG_CLUSTER" in await refused(first, second.identity.node_id)
        assert not second.got
        assert not first.transport.connected(second.identity.node_id)


@pytest.mark.parametrize("here", [True, False])
async def test_a_peer_of_another_copy_of_the_volumes_gets_nothing(here: bool) -> None:
    forks = (new_id(), None) if here else (None, new_id())
    async with pair(forks=forks) as (first, second):
        assert "two copies of a cluster never speak" in await refused(first, second.identity.node_id)
        assert not second.got and not second.book.incarnation(first.identity.node_id)


async def test_introductions_in_many_names_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "PEERS_HEARD_MAX", 4)
    async with pair() as (_, second):
        assert second.inbound is not None
        for _ in range(20):
            hello = Identity(CLUSTER, NodeId(new_id()), 1).hello(second.identity.node_id, channel="control")
            second.inbound.introduce(common_pb2.OpenStreamRequest(hello=hello))
        assert len(second.inbound._keys) == 4


async def test_another_node_at_the_address_gets_nothing() -> None:
    async with pair() as (first, second):
        wanted = NodeId(new_id())
        first.addresses[wanted] = second.address
        assert "the address now belongs to another node" in await refused(first, wanted)
        assert not second.got


async def test_an_older_incarnation_is_refused() -> None:
    async with pair() as (first, second):
        second.book.observe(first.identity.node_id, 7, "")
        assert "STALE_INCARNATION" in await refused(first, second.identity.node_id)
        assert not second.got


async def test_queues_to_a_silent_peer_stay_bounded() -> None:
    node = Node(Identity(CLUSTER, NodeId(new_id()), 1), {"0" * 32: "127.0.0.1:1"})
    try:
        other = NodeId("0" * 32)
        node.transport.options = PeerOptions(control_messages_max=10, bulk_bytes_max=100_000)
        assert all(node.transport.send(other, message(n).SerializeToString()) for n in range(1_000))
        kept = node.transport._links[other, "control"]._queue
        terms = [consensus_pb2.ConsensusMessage.FromString(raw).update.term for raw in kept]
        assert terms == list(range(990, 1_000)), "the oldest went"
        accepted = sum(
            node.transport.send(other, message(n, 30_000).SerializeToString(), bulk=True) for n in range(100)
        )
        assert accepted == 3
        assert not node.transport.send(other, message(1, 17 << 20).SerializeToString(), bulk=True)
    finally:
        await node.close()


async def test_a_port_in_use_is_one_line_that_says_what_to_do() -> None:
    async with pair() as (_, second):
        third = Node(Identity(CLUSTER, NodeId(new_id()), 1), {})
        with pytest.raises(Rejected, match="in use") as caught:
            await third.listen(second.address)
        assert caught.value.code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("sizes", [[0], [1, 127, 128, 300], [70_000, 5], [2 << 20, 1, 2], [1, 2 << 20]])
def test_frames_are_what_protobuf_would_write(sizes: list[int]) -> None:
    messages = [message(n, size) for n, size in enumerate(sizes)]
    queue = deque(m.SerializeToString() for m in messages)
    read: list[consensus_pb2.ConsensusMessage] = []
    while queue:
        (raw,) = FrameReader().feed(peer_frame(queue))
        read.extend(consensus_pb2.PeerFrame.FromString(raw).messages)
    assert read == messages
    requests = [
        tserver_pb2.ClientRequest(request_id=n + 1, kv=tserver_pb2.KvRequest(key=b"k" * size))
        for n, size in enumerate(sizes)
    ]
    queue = deque(r.SerializeToString() for r in requests)
    got: list[tserver_pb2.ClientRequest] = []
    while queue:
        (raw,) = FrameReader().feed(client_requests(queue))
        one = tserver_pb2.ClientRequest.FromString(raw)
        several = list(one.many.requests) if one.HasField("many") else [one]
        assert request_ids_of(raw) == [r.request_id for r in several]
        got.extend(several)
    assert got == requests
    responses = [tserver_pb2.ClientResponse(request_id=n + 1) for n in range(3)]
    queue = deque(r.SerializeToString() for r in responses)
    (raw,) = FrameReader().feed(client_responses(queue))
    assert list(tserver_pb2.ClientResponse.FromString(raw).many.responses) == responses


def test_a_frame_has_no_more_requests_than_a_node_takes() -> None:
    """One more, and it would end the stream, with all that was asked over it."""
    queue = deque([tserver_pb2.ClientRequest(request_id=1).SerializeToString()] * (REQUESTS_MAX + 1))
    (raw,) = FrameReader().feed(client_requests(queue))
    assert len(tserver_pb2.ClientRequest.FromString(raw).many.requests) == REQUESTS_MAX
    assert len(queue) == 1


@given(st.lists(st.binary(max_size=300), max_size=20), st.integers(1, 700))
def test_frames_come_out_whole_however_the_bytes_come_in(bodies: list[bytes], step: int) -> None:
    reader, raw = FrameReader(), b"".join(frame(body) for body in bodies)
    assert [f for at in range(0, len(raw), step) for f in reader.feed(raw[at : at + step])] == bodies


def test_a_length_above_the_limit_is_no_frame() -> None:
    with pytest.raises(Rejected, match="at most") as caught:
        FrameReader().feed(b"GET / HTTP/1.1\r\n\r\n")
    assert caught.value.code is Code.TOO_LARGE


async def test_a_key_is_good_once_and_for_its_owner() -> None:
    async with pair() as (first, second):
        assert second.inbound is not None
        hello = first.identity.hello(second.identity.node_id, channel="control")
        answer = second.inbound.introduce(common_pb2.OpenStreamRequest(hello=hello))
        for heard in (True, False):
            reader, writer = await asyncio.open_connection("127.0.0.1", answer.port)
            queue = deque([message(1).SerializeToString()])
            writer.write(frame(answer.key) + peer_frame(queue))
            async with asyncio.timeout(60):
                if heard:
                    await until(lambda: second.got)
                    assert second.got.pop()[0] == first.identity.node_id
                else:
                    assert not await reader.read()  # closed, and nothing was handed on
            writer.close()
        assert not second.got


async def test_the_newest_stream_of_a_peer_is_heard_and_the_older_one_ended() -> None:
    async with pair() as (first, second):
        assert second.inbound is not None
        hello = first.identity.hello(second.identity.node_id, channel="bulk")
        ends = []
        for number in (1, 2):
            answer = second.inbound.introduce(common_pb2.OpenStreamRequest(hello=hello))
            reader, writer = await asyncio.open_connection("127.0.0.1", answer.port)
            ends.append((reader, writer))
            writer.write(frame(answer.key) + peer_frame(deque([message(number).SerializeToString()])))
            await until(lambda number=number: len(second.got) == number)
        async with asyncio.timeout(60):
            assert not await ends[0][0].read()
        assert not second.lost  # bulk: that a node is gone is told by its control stream
        for _, writer in ends:
            writer.close()


async def test_many_messages_in_one_frame_let_the_loop_go_on_and_keep_their_order() -> None:
    async with pair() as (first, second):
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while len(second.got) < 5_000:
                turns += bool(second.got)
                await asyncio.sleep(0)

        counting = asyncio.create_task(count_turns())
        first.transport.options = replace(OPTIONS, control_messages_max=10_000)
        for number in range(5_000):
            assert first.transport.send(second.identity.node_id, message(number).SerializeToString())
        await until(lambda: len(second.got) == 5_000)
        await counting
        assert [m.update.term for _, m in second.got] == list(range(5_000))
        assert turns >= 5_000 // MESSAGES_PER_TURN


def test_numbers_of_requests_in_garbage() -> None:
    for raw in (
        b"",
        b"\xff" * 20,
        b"\x08" + b"\xff" * 20,
        b"\x32",
        b"\x32\x05\x0a",
        b"\x32\x05\x0a\x02\x10\x01",
    ):
        assert request_ids_of(raw) == []
