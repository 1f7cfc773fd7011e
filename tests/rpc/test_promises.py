"""Promises that one line of the rpc layer keeps, each asked for by itself: budgets, and keys of streams."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from stele.model.errors import Code, InvariantViolation, Rejected, Retryable
from stele.model.ids import ClusterId, NodeId
from stele.rpc import listener as listening
from stele.rpc.budget import REQUEST_BYTES, ByteBudget
from stele.rpc.client_stream import _Stream as ClientStream
from stele.rpc.identity import Identity, PeerBook
from stele.rpc.inbound import BULK_PER_TURN, MESSAGES_PER_TURN, PeerInbound
from stele.rpc.listener import StreamListener
from stele.rpc.logging import OncePer
from stele.rpc.peers import BULK, CONTROL
from stele.rpc.proto import consensus_pb2, master_pb2, tserver_pb2
from stele.rpc.server import Guard


def test_incomplete_messages_of_clients_count_and_peers_get_through() -> None:
    budget = ByteBudget(100, 20)
    budget.arrives(60)
    budget.take(15)
    with pytest.raises(Retryable) as full:
        budget.take(10)
    assert full.value.code is Code.THROTTLED
    budget.take(10, control=True)
    budget.arrives(-60)
    budget.take(10)


def test_bytes_that_nobody_took_are_not_given_back() -> None:
    budget = ByteBudget(100, 20)
    charge = budget.charge(10)
    charge.release()
    charge.release()
    with pytest.raises(InvariantViolation, match="more than was taken"):
        budget.give_back(1)


class Connection:
    """A connection from outside; who closed it, and why."""

    source = "somewhere"

    full = False

    def __init__(self) -> None:
        self.lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.ended: list[Exception | None] = []
        self.reading: list[bool] = []
        self.sent: list[Any] = []

    def read(self, may: bool) -> None:
        self.reading.append(may)

    def send(self, data: Any) -> None:
        self.sent.append(data)

    def close(self, error: Exception | None = None) -> None:
        self.ended.append(error)
        if not self.lost.done():
            self.lost.set_result(None)

    async def closed(self) -> None:
        await self.lost


def listener() -> StreamListener:
    made = StreamListener()
    made.port = 1
    return made


def ignore(connection: Any) -> None: ...


async def test_a_key_is_good_once_and_for_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    one = listener()
    key = one.expect(ignore)
    one.show(Connection(), key)  # type: ignore[arg-type]
    with pytest.raises(Rejected, match="did not begin with a key"):
        one.show(Connection(), key)  # type: ignore[arg-type]
    monkeypatch.setattr(listening, "_KEY_TIMEOUT_S", 0.0)
    key = one.expect(ignore)
    with pytest.raises(Rejected, match="did not begin with a key"):
        one.show(Connection(), key)  # type: ignore[arg-type]


async def test_keys_are_left_for_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_KEYS_MAX", 4)
    monkeypatch.setattr(listening, "_KEYS_FOR_PEERS", 2)
    one = listener()
    for peer in (False, False, True, True):
        one.expect(ignore, peer=peer)
        assert len(one._keys) <= 4
    for peer in (False, True):
        with pytest.raises(Retryable) as full:
            one.expect(ignore, peer=peer)
        assert full.value.code is Code.THROTTLED
    other = listener()
    for _ in range(2):
        other.expect(ignore)
    with pytest.raises(Retryable):
        other.expect(ignore)
    other.expect(ignore, peer=True)


async def test_a_connection_that_shows_no_key_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_KEY_TIMEOUT_S", 0.01)
    connection = Connection()
    listener().came(connection)  # type: ignore[arg-type]
    async with asyncio.timeout(5):
        await connection.closed()
    assert "no key came in time" in str(connection.ended[0])


async def test_connections_that_have_shown_no_key_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_STRANGERS_MAX", 2)
    one = listener()
    connections = [Connection() for _ in range(3)]
    for connection in connections:
        one.came(connection)  # type: ignore[arg-type]
    assert [bool(c.ended) for c in connections] == [True, False, False]
    await one.close()


async def test_nothing_is_accepted_after_a_close() -> None:
    one = listener()
    await one.close()
    connection = Connection()
    one.came(connection)  # type: ignore[arg-type]
    assert connection.ended == [None]


# Answers to a client that does not read


def answering(budget: ByteBudget) -> tuple[Any, Any]:
    """A client's stream, whose connection is full, and the connection."""
    connection = Connection()
    stream = ClientStream(budget, SimpleNamespace(), connection, OncePer())  # type: ignore[arg-type]
    connection.full = True
    return stream, connection


def large(**body: Any) -> tserver_pb2.ClientResponse:
    assert tserver_pb2.ClientResponse(**body).ByteSize() > REQUEST_BYTES
    return tserver_pb2.ClientResponse(request_id=1, **body)


WRITTEN = tserver_pb2.WriteResponse(
    row_errors=[tserver_pb2.RowErrorPB(row=n, code=21, message="x" * 100) for n in range(20)]
)
READ = tserver_pb2.KvResponse(pairs=[tserver_pb2.KvPairPB(value=b"x" * 2_000)])


async def test_a_write_whose_outcome_has_no_room_is_never_told_as_not_done() -> None:
    budget = ByteBudget(10_000, 0)
    budget.take(9_999)
    stream, _ = answering(budget)
    stream._put(large(write=WRITTEN))
    stream._put(large(kv=READ))
    told = [tserver_pb2.ClientResponse.FromString(raw).error.code for raw in stream._ready]
    assert told == [int(Code.UNKNOWN_OUTCOME), int(Code.THROTTLED)]


async def test_answers_that_a_client_does_not_read_are_charged_until_it_does() -> None:
    budget = ByteBudget(10_000, 0)
    stream, connection = answering(budget)
    answer = large(kv=READ)
    stream._put(answer)
    assert budget.used_bytes == answer.ByteSize()
    connection.full = False
    connection.on_full(False)
    assert connection.sent and budget.used_bytes == 0
    connection.full = True
    stream._put(answer)
    connection.close()
    await asyncio.sleep(0)
    assert budget.used_bytes == 0


async def test_a_client_that_does_not_read_is_not_read() -> None:
    _, connection = answering(ByteBudget(10_000, 0))
    connection.on_full(True)
    connection.on_full(False)
    assert connection.reading == [False, True]


# Streams of peers


class Transport:
    """What a node is told of its peers."""

    def __init__(self) -> None:
        self.messages: list[int] = []
        self.gone: list[str] = []

    def on_message(self, node_id: str, message: Any) -> None:
        self.messages.append(1)

    def on_heard(self, node_id: str) -> None: ...

    def on_disconnect(self, node_id: str) -> None:
        self.gone.append(node_id)


PEER = NodeId("b" * 32)


def inbound(budget: ByteBudget) -> tuple[Transport, PeerInbound]:
    transport = Transport()
    return transport, PeerInbound(transport, budget, listener())  # type: ignore[arg-type]


@pytest.mark.parametrize(("channel", "per_turn"), [(CONTROL, MESSAGES_PER_TURN), (BULK, BULK_PER_TURN)])
async def test_a_stream_of_a_peer_gives_the_loop_a_turn_and_all_bytes_back(
    channel: str, per_turn: int
) -> None:
    budget = ByteBudget(100_000, 50_000)
    transport, streams = inbound(budget)
    connection = Connection()
    streams._begin(connection, PEER, channel)  # type: ignore[arg-type]
    count = 3 * per_turn
    raw = consensus_pb2.PeerFrame(messages=[consensus_pb2.ConsensusMessage()] * count).SerializeToString()
    connection.on_frames([raw])  # type: ignore[attr-defined]
    assert len(transport.messages) == per_turn
    assert connection.reading == [False] and budget.used_bytes == len(raw)
    await asyncio.sleep(0)
    assert len(transport.messages) == 2 * per_turn
    connection.close()
    await asyncio.sleep(0.01)
    assert budget.used_bytes == 0 and transport.gone == [PEER]


async def test_the_end_of_an_older_stream_is_no_lost_peer() -> None:
    transport, streams = inbound(ByteBudget(100_000, 50_000))
    older, newer = Connection(), Connection()
    for connection in (older, newer):
        streams._begin(connection, PEER, CONTROL)  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    assert older.ended and not newer.ended and transport.gone == []
    newer.close()
    await asyncio.sleep(0.01)
    assert transport.gone == [PEER]


def test_no_request_with_a_field_beyond_its_bound_gets_to_a_service() -> None:
    identity = Identity(ClusterId("c" * 32), NodeId("a" * 32), 1)
    guard = Guard(identity, PeerBook(), ByteBudget())
    handler = SimpleNamespace(request_deserializer=master_pb2.RegisterNodeRequest.FromString)
    for length, may in ((253, True), (254, False)):
        raw = master_pb2.RegisterNodeRequest(name="n" * length).SerializeToString()
        if may:
            assert guard._decode(handler, "RegisterNode", raw).name == "n" * length
        else:
            with pytest.raises(Rejected, match="at most 253 are allowed"):
                guard._decode(handler, "RegisterNode", raw)
