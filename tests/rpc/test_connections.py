"""Framed connections over TCP: slow lines, silent ends, a process that stood still, strangers, addresses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import pytest
import uvloop

from stele.model.errors import Rejected, Retryable
from stele.rpc import connection as connections
from stele.rpc import listener as listeners
from stele.rpc.connection import FramedConnection, connect
from stele.rpc.frames import LENGTH_BYTES, frame
from stele.rpc.listener import KEY_BYTES, StreamListener


async def _paced(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int, rate: int, pauses: list[float]
) -> None:
    """A slow line: what comes from the left goes on at `rate` bytes per second, what comes back at once. At its end `pauses` has
    the longest time from one piece to the next, in seconds."""
    loop = asyncio.get_running_loop()
    taken, longest = loop.time(), 0.0
    right, left_out = await asyncio.open_connection("127.0.0.1", port)

    async def back() -> None:
        while data := await right.read(65_536):
            writer.write(data)

    backward = asyncio.ensure_future(back())
    try:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(rate // 20):
                left_out.write(data)
                await left_out.drain()
                await asyncio.sleep(0.05)
                taken, longest = loop.time(), max(longest, loop.time() - taken)
    finally:
        pauses.append(max(longest, loop.time() - taken))
        backward.cancel()
        left_out.close()
        writer.close()


async def test_a_large_frame_on_a_slow_line_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEEPALIVE_TIME_MS", 400)
    monkeypatch.setattr(connections, "KEEPALIVE_TIMEOUT_MS", 800)
    listener, got, pauses = StreamListener(), asyncio.Event(), list[float]()
    await listener.listen("127.0.0.1", 0)

    def take(taken: FramedConnection) -> None:
        taken.on_frames = lambda frames: got.set() if frames else None

    line = await asyncio.start_server(
        lambda r, w: _paced(r, w, listener.port, 4 << 20, pauses), "127.0.0.1", 0, limit=65_536
    )
    try:
        line.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        port = line.sockets[0].getsockname()[1]
        for _ in range(10):
            made = await connect("127.0.0.1:1", port, listener.expect(take))
            # Three seconds of the line, more than twice what a silent end is given.
            made.send(frame(bytes(12 << 20)))
            async with asyncio.timeout(60):
                while not (got.is_set() or (made.lost.done() and pauses)):
                    await asyncio.sleep(0.01)
            if got.is_set() or pauses.pop() < 0.5:
                break  # else it is the line that stood still, with all of this machine
        assert got.is_set() and not made.lost.done()
        made.close()
        await made.closed()
    finally:
        line.close()
        await line.wait_closed()
        await listener.close()
        await asyncio.sleep(0.1)


async def test_a_silent_end_is_noticed_though_it_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process that is stopped: its kernel acknowledges, and nothing comes back."""
    monkeypatch.setattr(connections, "KEEPALIVE_TIME_MS", 100)
    monkeypatch.setattr(connections, "KEEPALIVE_TIMEOUT_MS", 200)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        made = await connect("127.0.0.1:1", mute.getsockname()[1], b"k" * KEY_BYTES)
        async with asyncio.timeout(60):
            while not made.lost.done():
                made.send(frame(b"a small request"))
                await asyncio.sleep(0.02)
        assert "silent" in str(made.lost.result())
        await made.closed()


async def test_a_connection_at_rest_stands_also_where_its_process_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pings are answered, and another follows an answer alone; who did not listen cannot say that nothing came."""
    monkeypatch.setattr(connections, "KEEPALIVE_TIME_MS", 50)
    monkeypatch.setattr(connections, "KEEPALIVE_TIMEOUT_MS", 100)
    listener = StreamListener()
    await listener.listen("127.0.0.1", 0)
    made = await connect("127.0.0.1:1", listener.port, listener.expect(lambda taken: None))
    for stands_still_s in (0.3, 0.0):
        pings = made._written
        async with asyncio.timeout(60):
            while made._written < pings + 2 * LENGTH_BYTES:
                assert not made.lost.done(), made.lost.result()
                await asyncio.sleep(0.01)
        time.sleep(stands_still_s)  # noqa: ASYNC251 - all of this process does
    made.close()
    await made.closed()
    await listener.close()


async def test_who_says_what_no_key_is_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_KEY_TIMEOUT_S", 600.0)
    listener = StreamListener()
    await listener.listen("127.0.0.1", 0)
    try:
        for said in (
            b"\x00\x10\x00\x00" + bytes(100),
            b"\x00\x00\x00\x10" + bytes(KEY_BYTES),
            b"\x00\x00\x01",
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            writer.write(said)
            async with asyncio.timeout(60):  # not only once the time for a key is over
                assert not await reader.read()
            writer.close()
    finally:
        await listener.close()


async def test_the_wildcard_of_ipv6_takes_ipv4_too() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    listener = StreamListener()
    try:
        await listener.listen("::", 0)
    except Rejected:
        pytest.skip("no IPv6 here")
    try:
        for host in ("127.0.0.1", "::1"):
            _, writer = await asyncio.open_connection(host, listener.port)
            writer.close()
            await writer.wait_closed()
    finally:
        await listener.close()


def test_a_listener_that_has_closed_takes_in_nobody() -> None:
    """Not even who came in the turns of the loop just before, with a good key; on uvloop, as nodes are."""

    async def close_after(turns: int) -> None:
        listener = StreamListener()
        await listener.listen("127.0.0.1", 0)
        taken: list[FramedConnection] = []
        key = listener.expect(taken.append)
        with socket.create_connection(("127.0.0.1", listener.port)) as sock:
            sock.sendall(frame(key))
            for _ in range(turns):
                await asyncio.sleep(0)
            async with asyncio.timeout(60):
                await listener.close()
            before = len(taken)
            await asyncio.sleep(0.02)
            assert len(taken) == before and not any(connection.stands for connection in taken)
        with pytest.raises(Retryable, match="does not accept streams"):
            listener.expect(taken.append)

    for turns in range(6):
        uvloop.run(close_after(turns))
