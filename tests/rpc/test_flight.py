"""Tickets, and the Flight server in front of a provider."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.flight as fl
import pytest

from stele.model.errors import Code, NotLeader, Rejected, SteleError
from stele.model.ids import new_id
from stele.model.predicate import Predicate, ScanSpec
from stele.model.schema import Schema
from stele.rpc.flight import Endpoint, FlightServer, from_flight_error
from stele.rpc.ticket import ScanCommand, Ticket

CLUSTER, TABLET = new_id(), new_id()
SCHEMA = Schema.make([("id", "int64"), ("at", "timestamp")], ["id"])


class Provider:
    """Gives three batches, or fails."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.fail_at = -1
        self.closed = 0

    def plan(self, command: ScanCommand) -> tuple[pa.Schema, list[Endpoint]]:
        ticket = Ticket(CLUSTER, TABLET, command.snapshot, 1, ScanSpec().to_json(SCHEMA))
        return SCHEMA.to_arrow(), [Endpoint(ticket, ("127.0.0.1:1", "127.0.0.1:2"))]

    def scan(self, ticket: Ticket) -> tuple[pa.Schema, Iterable[pa.RecordBatch]]:
        if self.error is not None and self.fail_at < 0:
            raise self.error
        return pa.schema([("id", pa.int64())]), self._batches()

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
    server = FlightServer("127.0.0.1", 0, CLUSTER, provider, scans_max=2)
    client = fl.connect(f"grpc+tcp://127.0.0.1:{server.port}")
    try:
        yield provider, client
    finally:
        client.close()
        server.close()


def ticket(cluster: str = CLUSTER) -> fl.Ticket:
    return fl.Ticket(Ticket(cluster, TABLET, 7, 1, ScanSpec().to_json(SCHEMA)).encode())


def failed(client: fl.FlightClient, wanted: fl.Ticket) -> SteleError:
    with pytest.raises(fl.FlightError) as caught:
        client.do_get(wanted).read_all()
    return from_flight_error(caught.value, where="there")


def test_tickets_come_back_as_they_were() -> None:
    spec = ScanSpec((1, 0), (Predicate(0, "in", (1, 2)), Predicate(1, "is_null")), b"a", b"b", 5, True, b"r")
    made = Ticket(CLUSTER, TABLET, 1 << 60, 3, spec.to_json(SCHEMA), 100)
    back = Ticket.decode(made.encode())
    assert back.spec(SCHEMA) == spec
    assert (back.snapshot, back.schema_version, back.wait_ms) == (1 << 60, 3, 100)
    command = ScanCommand(table="t", columns=("a",), snapshot=9)
    assert ScanCommand.decode(command.encode()) == command


@pytest.mark.parametrize("raw", [b"", b"\x02{}", b"{}", b"hello"])
def test_unknown_versions_are_refused(raw: bytes) -> None:
    for decode in (Ticket.decode, ScanCommand.decode):
        with pytest.raises(Rejected) as caught:
            decode(raw)
        assert caught.value.code is Code.UNSUPPORTED_VERSION


@pytest.mark.parametrize("raw", [b"\x01", b"\x01[]", b"\x01{}", b'\x01{"tablet": 1}', b'\x01{"tablet": "x"}'])
def test_what_is_no_ticket_is_refused(raw: bytes) -> None:
    with pytest.raises(Rejected) as caught:
        Ticket.decode(raw)
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
            FlightServer("127.0.0.1", taken.getsockname()[1], CLUSTER, Provider())
