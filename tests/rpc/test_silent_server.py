"""Flight servers that fall silent: nobody waits for them for long, and nobody turns to them at once again."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from threading import Event

import pyarrow as pa
import pytest

from stele.model.errors import Code, Retryable
from stele.rpc import flight_client
from stele.rpc.flight import FlightServer
from stele.rpc.flight_client import FlightConnections, FlightStream
from tests.rpc.test_flight import CLUSTER, Provider, ticket


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlightConnections]:
    """Connections whose streams may be silent for half a second."""
    monkeypatch.setattr(flight_client, "STALL_TIMEOUT_S", 0.5)
    found = FlightConnections()
    try:
        yield found
    finally:
        found.close()


def reading(connections: FlightConnections, port: int) -> Iterator[pa.RecordBatch]:
    return iter(FlightStream(connections, f"127.0.0.1:{port}", bytes(ticket().ticket), Event()))


def test_who_takes_connections_and_never_answers_is_given_up(connections: FlightConnections) -> None:
    """As a process does that is stopped: its kernel accepts."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(Retryable, match=r"has sent nothing for 0\.5 s") as ended:
            next(reading(connections, port))
        assert ended.value.code is Code.TIMED_OUT
        with pytest.raises(Retryable, match="did not answer a moment ago"):
            next(reading(connections, port))


class Stops(Provider):
    """Gives one batch, and the next one when it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = Event()

    def _batches(self) -> Iterator[pa.RecordBatch]:
        for batch in super()._batches():
            yield batch
            self.go_on.wait(20)


def test_who_stops_in_the_middle_is_given_up(connections: FlightConnections) -> None:
    provider = Stops()
    server = FlightServer("127.0.0.1", 0, CLUSTER, provider, provider)
    try:
        stream = reading(connections, server.port)
        assert next(stream).num_rows == 10
        with pytest.raises(Retryable, match=r"has sent nothing for 0\.5 s") as ended:
            next(stream)
        assert ended.value.code is Code.TIMED_OUT
    finally:
        provider.go_on.set()
        server.close()
