"""Readers that live, keep their connection, and take nothing: their places are others' after a while."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.flight as fl
import pytest

from stele.client.locations import ReplicaPlace, TabletPlace
from stele.client.tablet_scan import FlightPool, ScanPlan, TabletScan
from stele.model.errors import Code, Retryable
from stele.model.ids import new_id
from stele.model.keys import encode_tuple
from stele.model.predicate import ScanSpec
from stele.model.schema import Schema
from stele.rpc.flight import FlightServer, from_flight_error
from stele.rpc.ticket import CopyTicket, Ticket
from tests.rpc.test_flight import CLUSTER, TABLET, Provider, copy_ticket, ticket

KEYED = Schema.make([("id", "int64")], ["id"])
STALL_S = 1.0
ROWS = 100_000


class Endless(Provider):
    """Gives more than sockets and windows hold."""

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            number = 0
            while True:
                yield pa.record_batch([pa.array(range(number, number + ROWS), pa.int64())], names=["id"])
                number += ROWS
        finally:
            self.closed += 1

    def _frames(self, ticket: CopyTicket) -> Iterator[pa.RecordBatch]:
        while True:
            yield from super()._frames(ticket)


@pytest.fixture
def served() -> Iterator[tuple[Endless, fl.FlightClient]]:
    provider = Endless()
    server = FlightServer(
        "127.0.0.1", 0, CLUSTER, provider, provider, scans_max=2, copies_max=2, stalled_s=STALL_S
    )
    client = fl.connect(f"grpc+tcp://127.0.0.1:{server.port}")
    try:
        yield provider, client
    finally:
        client.close()
        server.close()


def until_ended(provider: Endless) -> None:
    """Wait until the node has ended a scan."""
    give_up = time.monotonic() + 60
    while not provider.closed:
        assert time.monotonic() < give_up
        time.sleep(0.05)


def until_served(client: fl.FlightClient, wanted: fl.Ticket) -> fl.FlightStreamReader:
    give_up = time.monotonic() + 60
    while True:
        try:
            reader = client.do_get(wanted)
            reader.read_chunk()
            return reader
        except fl.FlightError as exc:
            if from_flight_error(exc, where="there").code is not Code.THROTTLED or time.monotonic() > give_up:
                raise
            time.sleep(0.1)


@pytest.mark.parametrize("kind", ["scan", "copy"])
def test_a_reader_that_takes_nothing_gives_its_place_to_others(
    served: tuple[Endless, fl.FlightClient], kind: str
) -> None:
    """Some stuck Spark tasks held the places of a node, and nobody could scan it any more."""
    _, client = served
    wanted = ticket() if kind == "scan" else fl.Ticket(copy_ticket(0, 1 << 22).encode())
    stuck = [client.do_get(wanted) for _ in range(2)]
    for reader in stuck:
        reader.read_chunk()
    until_served(client, wanted).cancel()
    for reader in stuck:
        reader.cancel()


def test_it_is_told_that_it_was_ended_and_lost_no_row_before(served: tuple[Endless, fl.FlightClient]) -> None:
    """An end without an error would look as if there were no more rows."""
    provider, client = served
    reader = client.do_get(ticket())
    reader.read_chunk()
    until_ended(provider)
    expected = ROWS
    with pytest.raises(fl.FlightError) as caught:
        while True:
            column = reader.read_chunk().data.column(0)
            assert column[0].as_py() == expected
            expected += ROWS
    error = from_flight_error(caught.value, where="there")
    assert isinstance(error, Retryable) and error.code is Code.TIMED_OUT
    assert "took nothing" in str(error)


def test_a_reader_that_left_gives_its_place_back_at_once() -> None:
    provider = Endless()
    server = FlightServer("127.0.0.1", 0, CLUSTER, provider, provider, scans_max=1)
    client = fl.connect(f"grpc+tcp://127.0.0.1:{server.port}")
    try:
        for _ in range(3):
            until_served(client, ticket()).cancel()
    finally:
        client.close()
        server.close()


def test_a_slow_reader_is_no_stuck_one(served: tuple[Endless, fl.FlightClient]) -> None:
    provider, client = served
    for _ in range(10):
        provider.closed, stood_still = 0, False
        reader = client.do_get(ticket())
        begun = taken = time.monotonic()
        number = 0
        while taken - begun < 4 * STALL_S and not provider.closed:
            assert reader.read_chunk().data.column(0)[0].as_py() == number
            number += ROWS
            time.sleep(STALL_S / 5)
            before, taken = taken, time.monotonic()
            stood_still |= taken - before > STALL_S / 2
        if not (provider.closed and stood_still):
            break  # else this machine was the one that stood still, for so long that the reader was a stuck one
    assert not provider.closed
    reader.cancel()


def test_a_stuck_reader_does_not_hold_up_the_end_of_the_server() -> None:
    provider = Endless()
    server = FlightServer("127.0.0.1", 0, CLUSTER, provider, provider)
    client = fl.connect(f"grpc+tcp://127.0.0.1:{server.port}")
    reader = client.do_get(ticket())
    reader.read_chunk()
    time.sleep(0.5)
    ending = threading.Thread(target=server.close, daemon=True)
    ending.start()
    ending.join(60)
    held = ending.is_alive()
    reader.cancel()
    ending.join(60)
    assert not held


class Ordered(Endless):
    """4,000,000 rows in key order, from a lower bound on, as a node gives them."""

    LAST = 4_000_000

    def __init__(self) -> None:
        super().__init__()
        self.scans = 0

    def scan(self, ticket: Ticket) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        self.scans += 1
        bound = ticket.spec(KEYED).lower_key
        first = bisect.bisect_left(range(self.LAST), bound, key=lambda n: encode_tuple([n], [pa.int64()]))
        return KEYED.to_arrow(), self._from(first)

    def _from(self, first: int) -> Iterator[pa.RecordBatch]:
        try:
            for at in range(first, self.LAST, ROWS):
                ids = pa.array(range(at, min(at + ROWS, self.LAST)), pa.int64())
                yield pa.record_batch([ids], schema=KEYED.to_arrow())
        finally:
            self.closed += 1


def test_a_client_that_goes_on_gets_every_row_once() -> None:
    provider = Ordered()
    server = FlightServer("127.0.0.1", 0, CLUSTER, provider, provider, stalled_s=STALL_S)
    pool = FlightPool()
    node = ReplicaPlace(new_id(), "", f"127.0.0.1:{server.port}")
    tablet = TabletPlace(TABLET, 0, (node,))
    plan = ScanPlan(CLUSTER, KEYED, ScanSpec(ordered=True), 7, (tablet,))
    expected = 0
    try:
        for batch in TabletScan(pool, plan, tablet, 60.0, lambda: None):
            assert batch is not None and batch.column(0)[0].as_py() == expected
            if not expected:
                until_ended(provider)
            expected += batch.num_rows
        assert expected == Ordered.LAST
        assert (
            provider.scans > 1
        )  # one goes on behind the other, more where this machine lets the client wait
    finally:
        pool.close()
        server.close()
