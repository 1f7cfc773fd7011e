"""Tickets, and the Flight server in front of a provider."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import replace
from threading import Event, Thread

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from stele.model.errors import Code, NotLeader, Rejected, Retryable, SteleError
from stele.model.ids import new_id
from stele.model.predicate import Predicate, ScanSpec
from stele.model.schema import Schema
from stele.rpc import flight_client
from stele.rpc.copy_frames import frame_from_batch, frame_to_batch
from stele.rpc.flight import FlightServer, from_flight_error
from stele.rpc.flight_client import FlightConnections, FlightStream
from stele.rpc.flight_plan import Endpoint, Planned
from stele.rpc.ticket import CopyTicket, ScanCommand, Ticket, decode_ticket
from tests.harness import histograms

CLUSTER, TABLET = new_id(), new_id()
FRAME = 1 << 20
CONTENT = os.urandom(5 * FRAME + 17)
NO_RANGE = CopyTicket(CLUSTER, "s", "f", 0, 0, CLUSTER, 1, CLUSTER, 1).encode()
SCHEMA = Schema.make([("id", "int64"), ("at", "timestamp")], ["id"])


class Provider:
    """Gives three batches of rows, or a piece of a file; or fails."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.fail_at = -1
        self.closed = 0

    def plan(self, command: ScanCommand) -> Planned:
        ticket = Ticket(CLUSTER, TABLET, command.snapshot, 1, ScanSpec().to_json(SCHEMA))
        return Planned(SCHEMA.to_arrow(), [Endpoint(ticket, ("127.0.0.1:1", "127.0.0.1:2"))])

    def scan(self, ticket: Ticket) -> tuple[pa.Schema, Iterable[pa.RecordBatch]]:
        if self.error is not None and self.fail_at < 0:
            raise self.error
        return pa.schema([("id", pa.int64())]), self._batches()

    def fetch(self, ticket: CopyTicket) -> Iterator[pa.RecordBatch]:
        if self.error is not None and self.fail_at < 0:
            raise self.error
        return self._frames(ticket)

    def _frames(self, ticket: CopyTicket) -> Iterator[pa.RecordBatch]:
        try:
            for number, at in enumerate(range(ticket.offset, ticket.offset + ticket.length, FRAME)):
                if number == self.fail_at and self.error is not None:
                    raise self.error
                data = CONTENT[at : min(at + FRAME, ticket.offset + ticket.length)]
                yield frame_to_batch(at, data, google_crc32c.value(data))
        finally:
            self.closed += 1

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            for number in range(3):
                if number == self.fail_at and self.error is not None:
                    raise self.error
                yield pa.record_batch([[number] * 10], names=["id"])
        finally:
            self.closed += 1


@pytest.fixture
def served() -> Iterator[tuple[Provider, fl.FlightClient]]:
    provider = Provider()
    server = FlightServer("127.0.0.1", 0, CLUSTER, provider, provider, scans_max=2, copies_max=2)
    client = fl.connect(f"grpc+tcp://127.0.0.1:{server.port}")
    try:
        yield provider, client
    finally:
        client.close()
        server.close()


def ticket(cluster: str = CLUSTER) -> fl.Ticket:
    return fl.Ticket(Ticket(cluster, TABLET, 7, 1, ScanSpec().to_json(SCHEMA)).encode())


def copy_ticket(offset: int, length: int, cluster: str = CLUSTER) -> CopyTicket:
    return CopyTicket(cluster, "s", "f", offset, length, new_id(), 3, new_id(), 1)


def failed(client: fl.FlightClient, wanted: fl.Ticket) -> SteleError:
    with pytest.raises(fl.FlightError) as caught:
        client.do_get(wanted).read_all()
    return from_flight_error(caught.value, where="there")


def test_tickets_come_back_as_they_were() -> None:
    spec = ScanSpec((1, 0), (Predicate(0, "in", (1, 2)), Predicate(1, "is_null")), b"a", b"b", 5, True, b"r")
    made = Ticket(CLUSTER, TABLET, 1 << 60, 3, spec.to_json(SCHEMA), 100, new_id())
    back = decode_ticket(made.encode())
    assert isinstance(back, Ticket)
    assert back.spec(SCHEMA) == spec
    assert (back.snapshot, back.schema_version, back.wait_ms) == (1 << 60, 3, 100)
    assert back.fork_id == made.fork_id and back.incarnation == 0
    assert b"incarnation" not in made.encode(), "as earlier releases write it"
    assert decode_ticket(replace(made, incarnation=4).encode()) == replace(back, incarnation=4)
    copy = copy_ticket(5, 6)
    assert decode_ticket(copy.encode()) == copy
    command = ScanCommand(table="t", columns=("a",), snapshot=9)
    assert ScanCommand.decode(command.encode()) == command


@pytest.mark.parametrize("raw", [b"", b"\x03{}", b"{}", b"hello"])
def test_unknown_versions_are_refused(raw: bytes) -> None:
    for decode in (decode_ticket, ScanCommand.decode):
        with pytest.raises(Rejected) as caught:
            decode(raw)
        assert caught.value.code is Code.UNSUPPORTED_VERSION


def test_version_2_is_for_tickets_of_changes_alone() -> None:
    with pytest.raises(Rejected, match="version 2 is unknown; this program reads 1:"):
        ScanCommand.decode(b"\x02" + ScanCommand(table="t").encode()[1:])
    with pytest.raises(Rejected, match="only for them"):
        decode_ticket(b"\x02" + copy_ticket(5, 6).encode()[1:])


@pytest.mark.parametrize(
    "raw",
    [
        b"\x01",
        b"\x01[]",
        b"\x01{}",
        b'\x01{"tablet": 1}',
        b'\x01{"tablet": "x"}',
        b'\x01{"session": "s"}',
        NO_RANGE,
    ],
)
def test_what_is_no_ticket_is_refused(raw: bytes) -> None:
    with pytest.raises(Rejected) as caught:
        decode_ticket(raw)
    assert caught.value.code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("raw", [b"\x01", b"\x01[]", b"\x01{}", b'\x01{"table": "t", "tablet": "x"}'])
def test_what_is_no_command_is_refused(raw: bytes) -> None:
    with pytest.raises(Rejected) as caught:
        ScanCommand.decode(raw)
    assert caught.value.code is Code.INVALID_ARGUMENT


def test_rows_and_endpoints(served: tuple[Provider, fl.FlightClient]) -> None:
    provider, client = served
    for _ in range(5):  # places are given back
        assert client.do_get(ticket()).read_all().num_rows == 30
    assert provider.closed == 5
    info = client.get_flight_info(fl.FlightDescriptor.for_command(ScanCommand(table="t").encode()))
    assert [str(location.uri.decode()) for location in info.endpoints[0].locations] == [
        "grpc+tcp://127.0.0.1:1",
        "grpc+tcp://127.0.0.1:2",
    ]


def test_errors_before_and_between_batches(served: tuple[Provider, fl.FlightClient]) -> None:
    provider, client = served
    assert failed(client, ticket(new_id())).code is Code.WRONG_CLUSTER
    assert failed(client, fl.Ticket(b"garbage")).code is Code.UNSUPPORTED_VERSION
    other = Ticket(CLUSTER, TABLET, 7, 1, ScanSpec().to_json(SCHEMA), fork_id=new_id())
    assert failed(client, fl.Ticket(other.encode())).code is Code.WRONG_CLUSTER
    hint = new_id()
    provider.error = NotLeader("elsewhere", leader_hint=hint)
    for fail_at in (-1, 0, 2):
        provider.fail_at = fail_at
        error = failed(client, ticket())
        assert isinstance(error, NotLeader)
        assert error.leader_hint == hint
    provider.error = KeyError("the secret inside")
    error = failed(client, ticket())
    assert error.code is Code.INTERNAL
    assert "secret" not in str(error)


def test_too_many_scans_are_sent_elsewhere(served: tuple[Provider, fl.FlightClient]) -> None:
    provider, client = served

    def endless() -> Iterator[pa.RecordBatch]:
        while True:
            yield pa.record_batch([list(range(50_000))], names=["id"])

    provider._batches = endless  # type: ignore[method-assign]
    readers = [client.do_get(ticket()) for _ in range(2)]
    for reader in readers:
        reader.read_chunk()
    assert failed(client, ticket()).code is Code.THROTTLED
    for reader in readers:
        reader.cancel()


def test_a_port_in_use_is_one_line_that_says_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(Rejected, match="--flight-port"):
            FlightServer("127.0.0.1", taken.getsockname()[1], CLUSTER, Provider(), Provider())


def received(client_of: FlightConnections, port: int, ticket: CopyTicket) -> bytes:
    data = b""
    for batch in FlightStream(client_of, f"127.0.0.1:{port}", ticket.encode(), Event()):
        offset, part, crc = frame_from_batch(batch)
        assert offset == ticket.offset + len(data) and google_crc32c.value(part) == crc
        data += part.to_pybytes()
    return data


def test_pieces_of_files_arrive_as_they_are() -> None:
    provider, connections = Provider(), FlightConnections()
    server = FlightServer("127.0.0.1", 0, CLUSTER, provider, provider)
    try:
        for offset, length in ((0, len(CONTENT)), (17, FRAME), (len(CONTENT) - 1, 1)):
            found = received(connections, server.port, copy_ticket(offset, length))
            assert found == CONTENT[offset : offset + length]
        with pytest.raises(Rejected) as stranger:
            received(connections, server.port, copy_ticket(0, 5, new_id()))
        assert stranger.value.code is Code.WRONG_CLUSTER
        provider.error = Rejected("no such session", code=Code.NOT_FOUND)
        for provider.fail_at in (-1, 0, 2):
            with pytest.raises(Rejected) as gone:
                received(connections, server.port, copy_ticket(0, len(CONTENT)))
            assert gone.value.code is Code.NOT_FOUND
    finally:
        connections.close()
        server.close()
    with pytest.raises(Retryable):
        received(FlightConnections(), server.port, copy_ticket(0, 5))


def test_a_batch_with_broken_insides_reaches_no_reader() -> None:
    """Its offsets point out of it: Arrow follows them, and ends the program that reads them."""
    offsets = np.array([0, 4, 1 << 30, 12], np.int32)
    names = pa.StringArray.from_buffers(3, pa.py_buffer(offsets), pa.py_buffer(b"abcd" * 3))
    bad = pa.RecordBatch.from_arrays([names], names=["name"])
    provider, connections = Provider(), FlightConnections()
    provider.scan = lambda ticket: (bad.schema, iter([bad]))  # type: ignore[method-assign]
    server = FlightServer("127.0.0.1", 0, CLUSTER, provider, provider)
    try:
        with pytest.raises(SteleError, match="offset"):
            list(FlightStream(connections, f"127.0.0.1:{server.port}", bytes(ticket().ticket), Event()))
    finally:
        connections.close()
        server.close()


def test_copies_and_scans_have_places_of_their_own(served: tuple[Provider, fl.FlightClient]) -> None:
    provider, client = served

    def endless(ticket: CopyTicket) -> Iterator[pa.RecordBatch]:
        while True:
            yield frame_to_batch(0, CONTENT, 0)

    provider._frames = endless  # type: ignore[method-assign]
    wanted = fl.Ticket(copy_ticket(0, 5).encode())
    readers = [client.do_get(wanted) for _ in range(2)]
    for reader in readers:
        reader.read_chunk()
    assert failed(client, wanted).code is Code.THROTTLED
    assert client.do_get(ticket()).read_all().num_rows == 30
    for reader in readers:
        reader.cancel()


def test_what_is_no_frame_is_refused() -> None:
    good = frame_to_batch(7, b"abc", 9)
    offset, data, crc = frame_from_batch(good)
    assert (offset, data.to_pybytes(), crc) == (7, b"abc", 9)
    for bad in (pa.record_batch([[1]], names=["x"]), pa.RecordBatch.from_pylist([], good.schema)):
        with pytest.raises(Rejected):
            frame_from_batch(bad)


class Relay:
    """Between a client and a server. What it carried before `cut` it holds from then on: nothing passes, nothing ends, as on
    a machine that is gone and a network that forgot; connections made since are carried as ever."""

    def __init__(self, port: int) -> None:
        self._server = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._made: list[tuple[Event, socket.socket]] = []
        self._threads = [Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        for held, _ in self._made:
            held.set()

    def close(self) -> None:
        """Ends its threads, then closes what they had."""
        self._listener.shutdown(socket.SHUT_RDWR)  # else `accept` goes on waiting
        self._threads[0].join()
        self._listener.close()
        for _, end in self._made:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for _, end in self._made:
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                held = Event()
                self._made.append((held, near))
                far = socket.create_connection(("127.0.0.1", self._server))
                self._made.append((held, far))
                for ends in ((near, far), (far, near)):
                    self._threads.append(Thread(target=self._carry, args=(*ends, held), daemon=True))
                    self._threads[-1].start()

    def _carry(self, source: socket.socket, target: socket.socket, held: Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not held.is_set():
                    target.sendall(data)
            if not held.is_set():
                target.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("reading", [False, True], ids=["nobody reads", "somebody reads still"])
def test_a_connection_that_died_while_it_rested_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, reading: bool
) -> None:
    """The first scan after a pause waited 15 s, and was given up, for each such connection."""
    monkeypatch.setattr(flight_client, "REST_S", -1.0)
    provider, connections = Provider(), FlightConnections()
    server = FlightServer("127.0.0.1", 0, CLUSTER, provider, provider, scans_max=4, copies_max=4)
    relay = Relay(server.port)
    try:
        assert received(connections, relay.port, copy_ticket(0, 5)) == CONTENT[:5]
        stream = iter(FlightStream(connections, f"127.0.0.1:{relay.port}", bytes(ticket().ticket), Event()))
        if reading:
            next(stream)
        relay.cut()
        assert received(connections, relay.port, copy_ticket(5, 7)) == CONTENT[5:12]
        stream.close()
    finally:
        connections.close()
        relay.close()
        server.close()


def test_a_connection_that_something_comes_over_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_client, "REST_S", 600.0)
    provider, connections = Provider(), FlightConnections()
    server = FlightServer("127.0.0.1", 0, CLUSTER, provider, provider, scans_max=4, copies_max=4)
    address = f"127.0.0.1:{server.port}"
    try:
        first = connections.get(address)
        assert connections.get(address) is first
        stream = iter(FlightStream(connections, address, bytes(ticket().ticket), Event()))
        next(stream)
        connections._connections[address].heard = -math.inf
        next(stream)
        assert connections.get(address) is first
        connections._connections[address].heard = -math.inf
        second = connections.get(address)
        next(stream)  # of the first one, which says nothing of the second
        assert second is not first and connections.get(address) is second
        stream.close()
    finally:
        connections.close()
        server.close()


def test_what_a_scan_takes_is_counted_and_copies_are_not(
    served: tuple[Provider, fl.FlightClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the first batch it is a scan, later ones are pages, as is the look that finds no more. What the reader takes
    is not counted."""
    provider, client = served
    name = "stele_client_request_seconds"
    kinds = [("plan", "ok"), ("scan", "ok"), ("page", "ok"), ("scan", "retry"), ("page", "retry")]

    def counts() -> list[float]:
        return [histograms.here(name, *labels).count for labels in kinds]

    def since(before: list[float]) -> list[float]:
        return [now - then for now, then in zip(counts(), before)]

    before = counts()
    client.get_flight_info(fl.FlightDescriptor.for_command(ScanCommand(table="t").encode()))
    assert client.do_get(ticket()).read_all().num_rows == 30
    assert client.do_get(fl.Ticket(copy_ticket(0, FRAME).encode())).read_all().num_rows
    assert since(before) == [1, 1, 3, 0, 0]
    provider.error = Retryable("later", code=Code.THROTTLED)
    assert failed(client, ticket()).code is Code.THROTTLED
    assert failed(client, fl.Ticket(copy_ticket(0, FRAME).encode())).code is Code.THROTTLED
    provider.fail_at = 0
    assert failed(client, ticket()).code is Code.THROTTLED
    provider.fail_at = 2
    assert failed(client, ticket()).code is Code.THROTTLED
    assert since(before) == [1, 2, 4, 2, 1]

    slow, times = Event(), histograms.here(name, "scan", "ok")
    provider.error = None

    def late(told: Ticket) -> tuple[pa.Schema, Iterable[pa.RecordBatch]]:
        slow.wait(0.3)
        return pa.schema([("id", pa.int64())]), [pa.record_batch([[1]], names=["id"])]

    monkeypatch.setattr(provider, "scan", late)
    client.do_get(ticket()).read_all()
    assert histograms.here(name, "scan", "ok").since(times).over(0.25) == 1
