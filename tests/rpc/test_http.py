"""Probes over plain HTTP, and what else may arrive on their port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from stele import metrics
from stele.model.errors import Rejected
from stele.rpc import http
from stele.rpc.http import HttpServer, Reply, standard_routes


class Healthy:
    """A process that says what the test tells it to say."""

    def __init__(self) -> None:
        self.why = ""

    def live(self) -> str:
        return ""

    def started(self) -> str:
        return ""

    def ready(self) -> str:
        return self.why

    def identity(self) -> Mapping[str, Any]:
        return {"node": "n"}


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Healthy, int]]:
    health = Healthy()
    server = HttpServer(standard_routes(health, metrics.REGISTRY))
    port = await server.start("127.0.0.1", 0)
    try:
        yield health, port
    finally:
        await server.close()


async def talk(port: int, raw: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(raw)
        return await asyncio.wait_for(reader.read(), 60)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def get(port: int, path: str) -> tuple[int, bytes]:
    head, _, body = (await talk(port, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())).partition(
        b"\r\n\r\n"
    )
    return int(head.split(b" ")[1]), body


async def test_probes_identity_and_metrics() -> None:
    async with served() as (health, port):
        assert await get(port, "/livez") == (200, b"ok\n")
        assert await get(port, "/readyz?verbose") == (200, b"ok\n")
        health.why = "replaying the log"
        assert await get(port, "/readyz") == (503, b"replaying the log\n")
        assert json.loads((await get(port, "/identity"))[1]) == {"node": "n"}
        assert b"stele_budget_used_bytes" in (await get(port, "/metrics"))[1]
        assert (await get(port, "/"))[0] == 404
        assert (await talk(port, b"HEAD /livez HTTP/1.1\r\n\r\n")).endswith(b"\r\n\r\n")
        assert b" 405 " in await talk(port, b"POST /livez HTTP/1.1\r\n\r\n")


async def test_garbage_harms_nothing() -> None:
    async with served() as (_, port):
        assert b" 400 " in await talk(port, b"\x16\x03\x01 hello\r\n\r\n")
        await talk(port, b"x" * 20_000)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        assert (await get(port, "/livez"))[0] == 200


async def test_a_probe_is_answered_however_many_connections_are_idle() -> None:
    """300 of them left every /livez without an answer, and the kubelet started the pod anew."""
    async with served() as (_, port), AsyncExitStack() as idle:
        for number in range(300):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            idle.callback(writer.close)
            if number % 2:
                writer.write(b"GET /livez HTTP/1.1\r\n")  # and no more
        assert await get(port, "/livez") == (200, b"ok\n")


async def test_at_the_bound_the_oldest_connection_makes_room_for_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "CONNECTIONS_MAX", 8)
    monkeypatch.setattr(http, "REQUEST_TIMEOUT_S", 600.0)

    async def ended(reader: asyncio.StreamReader) -> bytes:
        with contextlib.suppress(ConnectionError):
            return await reader.read()
        return b""

    async with served() as (_, port), AsyncExitStack() as idle:
        readers = []
        for _ in range(12):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            idle.callback(writer.close)
            readers.append(reader)
        assert await get(port, "/livez") == (200, b"ok\n")
        async with asyncio.timeout(20):
            assert [await ended(reader) for reader in readers[:5]] == [b""] * 5
        assert not any(reader.at_eof() or reader.exception() for reader in readers[5:])


async def test_a_host_with_many_connections_takes_no_place_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oldest connection was replaced, also the kubelet's, whose request had not come whole."""
    monkeypatch.setattr(http, "REQUEST_TIMEOUT_S", 60.0)
    async with served() as (_, port), AsyncExitStack() as idle:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        idle.callback(writer.close)
        writer.write(b"GET /livez HTTP/1.1\r\n")
        for path in ("/metrics", "/livez") * 300:
            _, other = await asyncio.open_connection("127.0.0.1", port)
            idle.callback(other.close)
            other.write(f"GET {path} HTTP/1.1\r\n".encode())
        writer.write(b"Host: x\r\n\r\n")
        async with asyncio.timeout(60):
            assert (await reader.read()).endswith(b"ok\n")


async def test_a_probe_is_read_before_those_behind_it_crowd_it_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1,000 were accepted in one turn of the loop, and the probe among the first was replaced unread."""
    monkeypatch.setattr(http, "REQUEST_TIMEOUT_S", 60.0)
    async with served() as (_, port), AsyncExitStack() as idle:
        probes = []
        for number in range(600):
            sock = idle.enter_context(socket.create_connection(("127.0.0.1", port), 60))
            if number % 150 == 0:
                sock.sendall(b"GET /livez HTTP/1.1\r\n\r\n")
                sock.setblocking(False)
                probes.append(sock)
        for probe in probes:
            async with asyncio.timeout(60):
                assert b"200 OK" in await asyncio.get_running_loop().sock_recv(probe, 4_096)


async def test_who_has_asked_is_answered_though_others_that_ask_nothing_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As /metrics of many tablets, which takes a while: those that have sent no request make room first."""
    monkeypatch.setattr(http, "CONNECTIONS_MAX", 8)
    monkeypatch.setattr(http, "REQUEST_TIMEOUT_S", 60.0)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> Reply:
        begun.set()
        await go_on.wait()
        return Reply(200, b"at last")

    server = HttpServer({**standard_routes(Healthy(), metrics.REGISTRY), "/slow": slow})
    port = await server.start("127.0.0.1", 0)
    try:
        async with AsyncExitStack() as idle:
            asked = asyncio.ensure_future(get(port, "/slow"))
            await begun.wait()
            for _ in range(12):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                idle.callback(writer.close)
            assert await get(port, "/livez") == (200, b"ok\n")
            go_on.set()
            assert await asked == (200, b"at last")
    finally:
        await server.close()


async def test_a_probe_is_answered_however_many_answers_are_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "CONNECTIONS_MAX", 8)
    body = b"x" * (32 << 20)

    async def large() -> Reply:
        return Reply(200, body)

    server = HttpServer({**standard_routes(Healthy(), metrics.REGISTRY), "/large": large})
    port = await server.start("127.0.0.1", 0)
    try:
        async with AsyncExitStack() as stack:
            for _ in range(12):
                stalled = socket.socket()
                stack.callback(stalled.close)
                stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
                stalled.setblocking(False)
                await asyncio.get_running_loop().sock_connect(stalled, ("127.0.0.1", port))
                stalled.send(b"GET /large HTTP/1.1\r\n\r\n")
            assert await get(port, "/livez") == (200, b"ok\n")
    finally:
        await server.close()


async def test_an_answer_that_nobody_takes_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system has no room for would stay in memory, with its connection, as long as the other end likes."""
    monkeypatch.setattr(http, "REQUEST_TIMEOUT_S", 0.2)

    asked = asyncio.Event()

    async def large() -> Reply:
        asked.set()
        return Reply(200, b"x" * (32 << 20))

    server = HttpServer({"/large": large})
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /large HTTP/1.1\r\n\r\n")
    await asked.wait()
    await asyncio.sleep(1.0)
    came = 0
    async with asyncio.timeout(60):
        while chunk := await reader.read(1 << 20):
            came += len(chunk)
    assert came < 32 << 20
    writer.close()
    await server.close()


async def test_a_port_in_use_is_one_line_that_says_what_to_do() -> None:
    async with served() as (health, port):
        with pytest.raises(Rejected, match="--http-port"):
            await HttpServer(standard_routes(health, metrics.REGISTRY)).start("127.0.0.1", port)
        with pytest.raises(Rejected, match="--metrics-port"):
            await HttpServer({}, option="--metrics-port").start("127.0.0.1", port)
