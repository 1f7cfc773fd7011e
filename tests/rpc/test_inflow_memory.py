"""The memory of what arrives, measured on a process of its own with real sockets: bounded, whoever sends how much at once."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow.flight as fl
import pytest

from stele.model.ids import ClusterId
from stele.model.predicate import ScanSpec
from stele.rpc.channels import MESSAGE_BYTES_MAX, ChannelPool
from stele.rpc.connection import connect
from stele.rpc.frames import LENGTH_BYTES, frame
from stele.rpc.identity import Identity
from stele.rpc.proto import common_pb2
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub
from stele.rpc.ticket import Ticket
from tests.rpc import http2
from tests.rpc.receiver import NODE
from tests.rpc.test_flight import SCHEMA

GET_FLIGHT_INFO = "/arrow.flight.protocol.FlightService/GetFlightInfo"
GET_NODE_STATUS = "/stele.v1.TabletServerService/GetNodeStatus"
MIB = 1 << 20


class Receiver:
    """The process and its ports."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.rpc.receiver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.told: dict[str, Any] = json.loads(self._process.stdout.readline())
        self._before = 0

    def begin(self) -> None:
        """From now on the peak of its memory counts."""
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")
        self._before = self._status("VmRSS")

    def grew_mib(self) -> float:
        """By how much its memory has grown at most."""
        return (self._status("VmHWM") - self._before) / 1024

    def _status(self, name: str) -> int:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

    def close(self) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        return self._process.wait(60)


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close it at once. `close` waits until all is sent, and the other side may take no more."""
    writer.transport.abort()


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    running = Receiver()
    try:
        yield running
    finally:
        assert running.close() == 0


def _at_once(count: int, path: str, port: int, size_bytes: int, metadata: Any = ()) -> Counter[str]:
    """The statuses of so many calls at once, from a process of their own."""
    arguments = map(str, (port, path, count, size_bytes, json.dumps(metadata)))
    command = [sys.executable, "-m", "tests.rpc.senders", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Counter(json.loads(done.stdout))


def test_large_messages_to_flight(receiver: Receiver) -> None:
    """Two of 200 MB took 2.4 GiB. Those that stay below what one connection may hold took as much, if they were many."""
    port = receiver.told["flight"]
    receiver.begin()
    for _ in range(2):
        assert _at_once(2, GET_FLIGHT_INFO, port, 200_000_000) == {"UNAVAILABLE": 2}
    two = receiver.grew_mib()
    assert _at_once(40, GET_FLIGHT_INFO, port, 15 * MIB)["UNAVAILABLE"] > 0
    print(f"two of 200 MB: +{two:.0f} MiB; forty of 15 MiB: +{receiver.grew_mib():.0f} MiB")
    assert receiver.grew_mib() < 256
    with fl.connect(f"grpc+tcp://127.0.0.1:{port}") as client:
        cluster, tablet = receiver.told["cluster"], receiver.told["tablet"]
        ticket = Ticket(cluster, tablet, 7, 1, ScanSpec().to_json(SCHEMA)).encode()
        assert client.do_get(fl.Ticket(ticket)).read_all().num_rows == 30


def test_messages_to_flight_that_stand_still(receiver: Receiver) -> None:
    """Each connection held what it might; all together had no bound."""

    async def hold(stack: AsyncExitStack) -> bool:
        """Bring 3 MiB of a message of 64; whether the connection was left."""
        reader, writer = await asyncio.open_connection("127.0.0.1", receiver.told["flight"])
        stack.callback(_abort, writer)
        writer.write(http2.opening(GET_FLIGHT_INFO, 64 * MIB))
        try:
            for _ in range(3 * MIB // 16_000):
                writer.write(http2.data(16_000))
                await writer.drain()
                await asyncio.sleep(0.002)
            async with asyncio.timeout(5):
                while await reader.read(1 << 16):
                    pass
            return False
        except TimeoutError:
            return True
        except ConnectionError:
            return False

    async def run() -> list[bool]:
        async with AsyncExitStack() as stack:
            return await asyncio.gather(*(hold(stack) for _ in range(60)))

    receiver.begin()
    left = asyncio.run(run())
    print(f"{sum(left)} of 60 left; +{receiver.grew_mib():.0f} MiB")
    assert 0 < sum(left) <= 11
    assert receiver.grew_mib() < 160


def test_large_unary_calls(receiver: Receiver) -> None:
    """40 of 15 MB were memory that no budget knew of."""
    metadata = Identity().metadata()
    receiver.begin()
    outcome = _at_once(40, GET_NODE_STATUS, receiver.told["unary"], 15_000_000, metadata)
    print(f"{dict(outcome)}: +{receiver.grew_mib():.0f} MiB")
    assert outcome["OK"] == 0 and outcome.total() == 40
    assert receiver.grew_mib() < 256


@asynccontextmanager
async def _pool(receiver: Receiver) -> AsyncIterator[ChannelPool]:
    pool = ChannelPool(Identity(ClusterId(receiver.told["cluster"])))
    try:
        yield pool
    finally:
        await pool.close()


async def test_streams_that_hold_most_of_a_frame(receiver: Receiver) -> None:
    """48 of them, each with 15 of 16 MB: 720 MiB beside the budget, for as long as they liked."""
    address = f"127.0.0.1:{receiver.told['unary']}"
    ended = 0

    async def hold(pool: ChannelPool, stack: AsyncExitStack) -> None:
        nonlocal ended
        hello = common_pb2.OpenStreamRequest(hello=pool.identity.hello(NODE))
        place = await pool.unary(address, TabletServerServiceStub, "OpenClientStream", hello, timeout_s=60)
        _, writer = await asyncio.open_connection("127.0.0.1", place.port)
        stack.callback(_abort, writer)
        try:
            writer.write(frame(place.key) + MESSAGE_BYTES_MAX.to_bytes(LENGTH_BYTES, "big"))
            for _ in range(15):
                writer.write(bytes(MIB))
                async with asyncio.timeout(5):
                    await writer.drain()
        except (ConnectionError, TimeoutError):
            ended += 1

    async with _pool(receiver) as pool, AsyncExitStack() as stack:
        receiver.begin()
        began = time.monotonic()
        await asyncio.gather(*(hold(pool, stack) for _ in range(48)))
        print(f"{ended} of 48 ended after {time.monotonic() - began:.0f} s; +{receiver.grew_mib():.0f} MiB")
        assert receiver.grew_mib() < 192
        hello = common_pb2.OpenStreamRequest(hello=pool.identity.hello(NODE))
        place = await pool.unary(address, TabletServerServiceStub, "OpenClientStream", hello, timeout_s=60)
        (await connect(address, place.port, place.key)).close()
