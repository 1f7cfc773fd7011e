"""Commands and tickets of Flight are small: a connection that brings far more is ended, and the others are served."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import grpc
import pyarrow.flight as fl
import pytest

from stele.rpc.flight import FlightServer
from stele.rpc.inflow import ALLOWED_BYTES, GREW_BYTES, RATE_BYTES, InflowWatch, Looks, _Flow
from tests.rpc.test_flight import CLUSTER, Provider, ticket

GET_FLIGHT_INFO = "/arrow.flight.protocol.FlightService/GetFlightInfo"
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.enable_retries", 0)]


@pytest.fixture
def port() -> Iterator[int]:
    provider = Provider()
    server = FlightServer("127.0.0.1", 0, CLUSTER, provider, provider)
    try:
        yield server.port
    finally:
        server.close()


def test_a_message_of_many_megabytes_ends_its_connection(port: int) -> None:
    """Two of 200 MB took 2.4 GiB, and held writes for 8 s."""
    client = fl.connect(f"grpc+tcp://127.0.0.1:{port}")
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        call = channel.unary_unary(GET_FLIGHT_INFO)
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\x12" + bytes(96 << 20), timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
    assert client.do_get(ticket()).read_all().num_rows
    client.close()


def test_a_command_of_a_megabyte_is_taken(port: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        call = channel.unary_unary(GET_FLIGHT_INFO)
        for _ in range(3):
            with pytest.raises(grpc.RpcError) as caught:
                call(b"\x12" + bytes(1 << 20), timeout=60)  # no command, but it is read
            assert caught.value.code() is not grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]


def test_what_acknowledges_a_scan_is_no_inflow() -> None:
    flow = _Flow()
    gib = 1 << 30
    assert all(flow.passed(1.0, n * gib, n * (gib >> 5)) for n in range(1, 50))
    assert flow.passed(0.0, 49 * gib, 49 * (gib >> 5) + ALLOWED_BYTES)
    assert flow.passed(2.0, 49 * gib, 49 * (gib >> 5) + ALLOWED_BYTES + 2 * RATE_BYTES)
    assert not flow.passed(0.0, 49 * gib, 49 * (gib >> 5) + ALLOWED_BYTES + 2 * RATE_BYTES + 1)


def test_connections_are_looked_at_seldom_unless_memory_grows() -> None:
    """Each look asks the kernel for every descriptor, 20 times a second whatever came in."""
    looks, start = Looks(0.0, 100 << 20), 100 << 20
    quiet = [looks.due(n * 0.05, start) for n in range(1, 101)]
    assert sum(map(bool, quiet)) in (4, 5) and abs(sum(quiet) - 5.0) <= 1.0
    looks = Looks(0.0, start)
    assert not looks.due(0.05, start + GREW_BYTES - 1)
    assert looks.due(0.10, start + GREW_BYTES) == 0.10
    assert not looks.due(0.15, start + GREW_BYTES), "it is compared with what was at the last look"
    assert not looks.due(0.20, start), "what was given back"
    assert looks.due(0.25, start + GREW_BYTES), "is not there for others to take unseen"


def test_a_process_without_descriptors_is_watched_on(port: int) -> None:
    """Its list of descriptors cannot be opened then, and the watch ended for good."""
    watch = InflowWatch(port, lambda host: None)
    watch.close()
    client = fl.connect(f"grpc+tcp://127.0.0.1:{port}")
    client.do_get(ticket()).read_all()
    watch._look(0.05)
    before = dict(watch._flows)
    assert any(before.values())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        watch._look(0.05)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert watch._flows == before
    client.close()
