"""Probes, metrics and identity over HTTP/1.1, on asyncio alone: aiohttp would cost a node 10 MB.

Made by the node. Answers GET and HEAD, one request per connection. Invariants: every connection is closed
within seconds, at most 8 KiB of it are read, and the event loop keeps running. A probe is answered despite
many other connections. When all places are taken, a new connection replaces the oldest one of the host that
has the most. Those that have not sent a request go first. So a probe needs no port of its own: only as many
hosts as there are places could crowd it out.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest

from stele.model.errors import Rejected
from stele.rpc.logging import OncePer

log = structlog.get_logger("stele.rpc.http")

# Here, because only servers import this: programs that import the client have metrics of their own.
disable_created_metrics()  # type: ignore[no-untyped-call]

HEAD_BYTES_MAX = 8_192
REQUEST_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 256
_BACKLOG = 1_024
_ACCEPTED_MAX = 32
"""Connections that are accepted in one turn of the loop. What they sent is read in the next ones, before
CONNECTIONS_MAX more can arrive."""
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class Reply:
    """A route's answer."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Route = Callable[[], Awaitable[Reply]]


class Health(Protocol):
    """What a process knows of its health. A question returns "" for yes, else the reason. No method waits."""

    def live(self) -> str:
        """Whether the event loop runs. Never depends on quorum or peers."""
        ...

    def started(self) -> str:
        """Whether the log is replayed."""
        ...

    def ready(self) -> str:
        """Whether the process serves and has caught up."""
        ...

    def identity(self) -> Mapping[str, Any]:
        """Cluster, node, incarnation, format id and addresses, for /identity as JSON."""
        ...


def standard_routes(
    health: Health, registry: CollectorRegistry, set_gauges: Callable[[], None] = lambda: None
) -> dict[str, Route]:
    """/livez, /startupz, /readyz, /identity and /metrics. `set_gauges()` is called before metrics are read."""

    def probe(ask: Callable[[], str]) -> Route:
        async def route() -> Reply:
            why = ask()
            return Reply(503, f"{why}\n".encode()) if why else Reply(200, b"ok\n")

        return route

    async def identity() -> Reply:
        return Reply(200, json.dumps(dict(health.identity())).encode() + b"\n", "application/json")

    return {
        "/livez": probe(health.live),
        "/startupz": probe(health.started),
        "/readyz": probe(health.ready),
        "/identity": identity,
        "/metrics": metrics_route(registry, set_gauges),
    }


def metrics_route(registry: CollectorRegistry, set_gauges: Callable[[], None] = lambda: None) -> Route:
    """/metrics: the content of `registry` in Prometheus' text format, without the creation times
    (`_created`).

    Requests that arrive while it is being made get the same text."""
    under_way: asyncio.Task[bytes] | None = None

    async def metrics() -> Reply:
        nonlocal under_way
        if under_way is None or under_way.done():
            set_gauges()
            under_way = asyncio.ensure_future(asyncio.to_thread(generate_latest, registry))
        body = await asyncio.shield(under_way)
        return Reply(200, body, "text/plain; version=0.0.4; charset=utf-8")

    return metrics


class HttpServer:
    """Serves `routes` until closed. `option`: the command-line option for the port, named in messages."""

    def __init__(self, routes: Mapping[str, Route], *, option: str = "--http-port") -> None:
        self._routes, self._option = routes, option
        self._server: asyncio.Server | None = None
        # Their hosts; oldest first. Connections in `_asking` have not sent a whole request yet.
        self._asking: dict[asyncio.StreamWriter, str] = {}
        self._answering: dict[asyncio.StreamWriter, str] = {}
        self._once = OncePer()

    async def start(self, host: str, port: int) -> int:
        """Listen; port 0 picks one. Returns the port.

        Raises:
            Rejected: INVALID_ARGUMENT: the port is in use, or the address is not this machine's.
        """
        try:
            self._server = await asyncio.start_server(
                self._serve, host, port, limit=HEAD_BYTES_MAX, backlog=_ACCEPTED_MAX
            )
            for (
                listening
            ) in self._server.sockets:  # asyncio has one number for what waits and what it accepts
                with listening.dup() as same:
                    same.listen(_BACKLOG)
        except OSError as exc:
            raise Rejected(
                f"cannot listen for HTTP at {host}:{port}: {exc.strerror or exc}; stop what uses the port or choose "
                f"another with {self._option}"
            ) from exc
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source = str((writer.get_extra_info("peername") or ("unknown",))[0])
        self._make_room()
        self._asking[writer] = source
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await self._answer(reader, writer, source)
        except (OSError, TimeoutError, EOFError, asyncio.LimitOverrunError, ValueError) as exc:
            error = str(exc) or type(exc).__name__
            self._once.tell(
                log.info, "http connection dropped", source, "dropped", source=source, error=error
            )
            writer.transport.abort()  # `close` would wait until the client has read the answer
        finally:
            self._asking.pop(writer, None)
            self._answering.pop(writer, None)
            writer.close()

    def _make_room(self) -> None:
        if len(self._asking) + len(self._answering) >= CONNECTIONS_MAX:
            places = self._asking or self._answering
            ((most, _),) = Counter(places.values()).most_common(1)
            oldest = next(writer for writer, host in places.items() if host == most)
            del places[oldest]
            oldest.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: str) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if self._asking.pop(writer, None) is not None:
            self._answering[writer] = source
        line = head.split(b"\r\n", 1)[0].decode("ascii", "replace").split(" ")
        if len(line) != 3 or not line[2].startswith("HTTP/1."):
            reply = Reply(400, b"this port speaks HTTP/1.1\n")
            first_line = " ".join(line)[:80]
            self._once.tell(log.warning, "not HTTP", source, "not HTTP", source=source, first_line=first_line)
        elif line[0] not in ("GET", "HEAD"):
            reply = Reply(405, b"only GET and HEAD\n")
        else:
            reply = await self._route(line[1].split("?", 1)[0])
        writer.write(
            f"HTTP/1.1 {reply.status} {_REASONS[reply.status]}\r\nContent-Type: {reply.content_type}\r\n"
            f"Content-Length: {len(reply.body)}\r\nConnection: close\r\n\r\n".encode()
        )
        if line[0] != "HEAD":
            writer.write(reply.body)
        await writer.drain()

    async def _route(self, path: str) -> Reply:
        route = self._routes.get(path)
        if route is None:
            return Reply(404, f"no such page; the pages are {', '.join(sorted(self._routes))}\n".encode())
        try:
            return await route()
        except Exception as exc:  # noqa: BLE001 - it is logged, and other requests are still served
            self._once.tell(log.error, "http route failed", path, "failed", path=path, exc_info=exc)
            return Reply(500, b"the page failed; the log says why\n")
