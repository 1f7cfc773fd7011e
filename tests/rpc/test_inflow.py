"""Commands and tickets of Flight are small: a connection that brings far more is ended, and the others are served."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator

import grpc
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from stele.rpc.flight import FlightServer
from stele.rpc.inflow import (
    _ACKED_SHARE,
    CALL_BYTES,
    DRIFT_BYTES,
    GREW_BYTES,
    HELD_BYTES_MAX,
    Flow,
    InflowWatch,
    Looks,
    _name,
    _of_flight,
)
from stele.rpc.ticket import ScanCommand
from tests.rpc import http2
from tests.rpc.test_flight import CLUSTER, Provider, copy_ticket, ticket

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
    flow = Flow()
    gib, mib = 1 << 30, 1 << 20
    for n in range(1, 50):
        flow.passed(1.0, n * gib, n * (gib >> 8), 0)
        assert not flow.held
    flow.passed(0.0, 49 * gib, 49 * (gib >> 8) + mib, 0)
    assert flow.held == mib


def test_what_is_held_is_what_came_and_was_not_complete() -> None:
    flow = Flow()
    flow.passed(1.0, 0, 100_000, 0)
    assert flow.held == 100_000 - DRIFT_BYTES
    flow.passed(0.0, 0, 300_000, 250_000)
    assert flow.held == 50_000 - DRIFT_BYTES
    flow.passed(0.0, 0, 300_000, 1 << 20)  # never less than nothing: it is no credit for what comes later
    assert flow.held == 0
    flow.passed(0.0, 0, 400_000, 0)
    assert flow.held == 100_000
    slow = Flow()
    for second in range(1, 101):  # a message that grows by 100 kB a second was held whole, however large
        slow.passed(1.0, 0, second * 100_000, 0)
    assert slow.held > HELD_BYTES_MAX


def test_a_peer_has_one_name_however_it_is_written() -> None:
    assert _of_flight("ipv4:127.0.0.1:41234") == _name("127.0.0.1", 41234) == _name("::ffff:127.0.0.1", 41234)
    assert _of_flight("ipv6:%5B::1%5D:41234") == _of_flight("ipv6:[::1]:41234") == _name("::1", 41234)
    assert _of_flight("ipv6:%5Bfe80::1%25eth0%5D:1") == _name("fe80::1%eth0", 1)
    assert _of_flight("unix:/tmp/x") == _of_flight("") == ""


def test_a_slow_message_ends_its_connection_though_others_of_it_are_answered(port: int) -> None:
    """One that grew by less than a megabyte a second was held whole, to 2 GiB."""
    with socket.create_connection(("127.0.0.1", port), 60) as sock:
        sock.sendall(http2.opening(GET_FLIGHT_INFO, 64 << 20))
        sock.settimeout(0.02)
        sent, deadline = 0, time.monotonic() + 60
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < deadline and sent < 32 << 20:
                sock.sendall(http2.data(16_000))
                sent += 16_000
                with contextlib.suppress(TimeoutError):
                    if not sock.recv(1 << 16):
                        break
        assert sent < 2 * HELD_BYTES_MAX


def test_a_sender_that_is_ended_need_not_wait_for_its_system(port: int) -> None:
    """Its connection was closed in order. With a full window gRPC's client then waited until its system gave up: 102 or 204 s."""
    with socket.create_connection(("127.0.0.1", port), 60) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(http2.opening(GET_FLIGHT_INFO, 64 << 20))
            for _ in range(5 * HELD_BYTES_MAX // 4 // 16_000):
                sock.sendall(http2.data(16_000))
                time.sleep(0.002)  # all of it is read, and the end comes later
            while sock.recv(1 << 16):
                pass
        gone = select.poll()
        gone.register(sock, 0)  # a reset is told in any case
        assert gone.poll(10_000)


def test_small_commands_without_end_do_not_end_their_connection(port: int) -> None:
    client = fl.connect(f"grpc+tcp://127.0.0.1:{port}")
    command = fl.FlightDescriptor.for_command(ScanCommand("t", where="x" * 60_000).encode())
    for _ in range(HELD_BYTES_MAX * 2 // 60_000):
        client.get_flight_info(command)
    large = fl.Ticket(ticket().ticket + b" " * (1 << 20))
    for _ in range(HELD_BYTES_MAX * 2 // (1 << 20)):
        client.do_get(large).read_all()
    client.close()


def _noted(function: Callable[[int], int], given: list[int]) -> Callable[[int], int]:
    def noted(fd: int) -> int:
        given.append(fd)
        return function(fd)

    return noted


class Trickle(Provider):
    """Its scan has a great many tiny batches."""

    def _batches(self) -> Iterator[pa.RecordBatch]:
        batch = pa.record_batch([[1] * 10], names=["id"])
        return iter([batch] * 5_000)


@pytest.mark.parametrize("provider", [Provider(), Trickle()], ids=lambda p: type(p).__name__)
def test_a_reader_sends_far_less_than_it_reads(provider: Provider) -> None:
    """What is allowed for acknowledgements holds for real readers, of large batches and of tiny ones."""
    server = FlightServer("127.0.0.1", 0, CLUSTER, provider, provider)
    watch = InflowWatch(server.port, lambda host: None)
    watch.close()
    with fl.connect(f"grpc+tcp://127.0.0.1:{server.port}") as client:
        client.do_get(ticket()).read_all()
        watch._look(0.0)
        (flow,) = (flow for flow in watch._flows.values() if flow is not None)
        received, acked = flow._received, flow._acked
        for _ in range(10):
            client.do_get(ticket()).read_all()
        client.do_get(fl.Ticket(copy_ticket(0, 5 << 20).encode())).read_all()
        watch._look(0.0)
        received, acked = flow._received - received, flow._acked - acked
        print(f"{received} bytes for {acked}")
        assert received - 11 * CALL_BYTES < acked // _ACKED_SHARE
    server.close()


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


def test_a_look_duplicates_no_descriptor(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that gRPC closes while a duplicate is open stays in gRPC's epoll, which then tells of one that is gone."""
    watch = InflowWatch(port, lambda host: None)
    watch.close()
    with fl.connect(f"grpc+tcp://127.0.0.1:{port}") as client:
        client.do_get(ticket()).read_all()
        duplicated: list[int] = []
        monkeypatch.setattr(os, "dup", _noted(os.dup, duplicated))
        watch._look(0.05)
        monkeypatch.undo()
        assert any(flow is not None for flow in watch._flows.values()) and not duplicated
        assert client.do_get(ticket()).read_all().num_rows, "the descriptor that was looked at is still open"


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
