"""The gRPC server of a node or master: limits, keepalive, and the guard in front of every servicer.

Servicers just raise `SteleError`. Invariant: no unary request is read before its caller was checked and it
has a place (`RequestPlaces`). Only requests of Flight clients without our metadata have no caller to check.
No request is decoded before its bytes were charged. No answer has a traceback.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError, Message

from stele import metrics
from stele.model.errors import Code, Rejected, Retryable
from stele.rpc.budget import REQUEST_BYTES, ByteBudget, Charge
from stele.rpc.channels import KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS, MESSAGE_BYTES_MAX
from stele.rpc.errors import abort_with, as_stele_error, outcome_of
from stele.rpc.fair import source_of
from stele.rpc.fields import refuse_beyond_bounds
from stele.rpc.flight_service import METHODS as OF_FLIGHT
from stele.rpc.identity import (
    CLUSTER_KEY,
    FORK_KEY,
    FROM_NODE_KEY,
    PROTOCOL_KEY,
    Identity,
    PeerBook,
    caller_from_metadata,
    check,
)
from stele.rpc.logging import OncePer
from stele.rpc.parts import bytes_of_parts
from stele.rpc.requests import RequestPlaces
from stele.rpc.resolve import resolve_one, split_address

log = structlog.get_logger("stele.rpc")

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Below the clients' keepalive time; otherwise the server would drop clients for pinging too often.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 4),
    ("grpc.http2.max_ping_strikes", 0),
    # A port in use must be an error, not be shared.
    ("grpc.so_reuseport", 0),
    ("grpc.max_metadata_size", 16 << 10),
    # Limits of unread data: 64 KiB of a call, and this many calls of a connection.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_concurrent_streams", 256),
)

_JUDGE_STARTS = frozenset({"/stele.v1.MasterService/TSHeartbeat"})
"""Methods that judge by themselves whether their caller is an earlier start."""
_CANNOT_LISTEN = {
    errno.EADDRINUSE: ("the port is in use", "stop what uses it or choose another"),
    errno.EADDRNOTAVAIL: ("the address is not this machine's", "use one that is, or 0.0.0.0"),
    errno.EACCES: ("this user may not use the port", "choose one above 1023"),
}


class Guard(grpc.aio.ServerInterceptor):
    """Checks identity, charges the budget, decodes, and turns a servicer's errors into statuses."""

    def __init__(self, identity: Identity, book: PeerBook, budget: ByteBudget) -> None:
        self._identity = identity
        self._book = book
        self._budget = budget
        self._once = OncePer()
        # A quarter of the clients' part, and of the nodes' reserve, is for requests that are being read.
        clients_bytes = budget.limit_bytes - budget.reserve_bytes
        self._of_clients = RequestPlaces(_places(clients_bytes))
        self._of_nodes = RequestPlaces(_places(budget.reserve_bytes))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """See grpc.aio.ServerInterceptor: the servicer's handler behind this guard."""
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            return grpc.stream_stream_rpc_method_handler(self._unknown(method))
        metadata = handler_call_details.invocation_metadata
        # Served as a stream of one request, which the caller cannot tell: so this code decides when to read
        # it.
        return grpc.stream_unary_rpc_method_handler(
            self._unary(handler, method, metadata), None, handler.response_serializer
        )

    def _unary(self, handler: Any, method: str, metadata: Any) -> Callable[[Any, Any], Awaitable[Any]]:
        async def call(_: Any, context: Any) -> Any:
            raw = b""
            came_s = time.perf_counter()
            source = source_of(context.peer())  # read now: gRPC forgets it once it has ended the call
            try:
                control = self._admit(method, metadata)
                places = self._of_nodes if control else self._of_clients
                came: Any = await places.receive(source, context.read)
                if came is grpc.aio.EOF:
                    raise Rejected(f"{method[:100]}: the call has no request")
                raw, came = came, None
                with self._budget.charge(len(raw) + REQUEST_BYTES, control=control) as charge:
                    await self._charge_parts(charge, handler, raw, control)
                    response = await handler.unary_unary(self._decode(handler, method, raw), context)
                context.set_trailing_metadata(
                    ((CLUSTER_KEY, self._identity.cluster_id), (FORK_KEY, self._identity.fork_id or ""))
                )
                metrics.rpc_requests.labels(method, "OK").inc()
                metrics.rpc_request_seconds.cell(method, "ok").add(time.perf_counter() - came_s)
                return response
            except Exception as exc:  # noqa: BLE001 - the border: foreign errors are logged and sent as INTERNAL
                raw = b""  # the error holds this frame until the garbage collector runs
                await self._refuse(context, method, source[0], exc, came_s)

        return call

    def _unknown(self, method: str) -> Callable[[Any, Any], Awaitable[None]]:
        async def call(request_iterator: Any, context: Any) -> None:
            came_s = time.perf_counter()
            error = Rejected(
                f"{method[:100]} is not served here; if a Stele program asked, check the port: masters and nodes serve different requests",
                code=Code.UNSUPPORTED_VERSION,
            )
            await self._refuse(context, "unknown", source_of(context.peer())[0], error, came_s)

        return call

    def _admit(self, method: str, metadata: Any) -> bool:
        if method.startswith(OF_FLIGHT) and all(key != PROTOCOL_KEY for key, _ in metadata):
            return False  # any Flight client
        caller = caller_from_metadata(metadata)
        check(self._identity, self._book, caller, earlier_too=method in _JUDGE_STARTS)
        return any(key == FROM_NODE_KEY for key, _ in metadata)

    async def _charge_parts(self, charge: Charge, handler: Any, raw: bytes, control: bool) -> None:
        kind = getattr(handler.request_deserializer, "__self__", None)
        descriptor = getattr(kind, "DESCRIPTOR", None)  # Flight's own kinds have none, and no parts
        size = await bytes_of_parts(raw, descriptor) if descriptor is not None else 0
        if size:
            self._budget.take(size, control=control)
            charge.size_bytes += size

    def _decode(self, handler: Any, method: str, raw: bytes) -> Any:
        try:
            request = handler.request_deserializer(raw)
        except DecodeError as exc:
            raise Rejected(f"{method}: the {len(raw)} bytes are not a request of this method") from exc
        if isinstance(request, Message):  # Flight's own are bounded where they are read
            refuse_beyond_bounds(request)
        return request

    async def _refuse(
        self, context: Any, method: str, source: str, exc: BaseException, came_s: float
    ) -> None:
        if isinstance(exc, grpc.aio.AbortError):
            raise exc
        error = as_stele_error(exc, where=method)
        metrics.rpc_requests.labels(method, error.code.name).inc()
        metrics.rpc_request_seconds.cell(method, outcome_of(error)).add(time.perf_counter() - came_s)
        if isinstance(error, Rejected):
            self._once.tell(
                log.warning,
                "request refused",
                source,
                error.code,
                method=method,
                source=source,
                error=str(error),
            )
        await abort_with(context, error)


def _places(size_bytes: int) -> int:
    return max(2, size_bytes // 4 // MESSAGE_BYTES_MAX)


def make_server(identity: Identity, book: PeerBook, budget: ByteBudget) -> grpc.aio.Server:
    """A server without services or ports yet. Add generated servicers with their `add_..._to_server`."""
    metrics.budget_used_bytes.set_function(lambda: budget.used_bytes)
    return grpc.aio.server(interceptors=(Guard(identity, book, budget),), options=SERVER_OPTIONS)


async def check_free(address: str, flag: str) -> None:
    """Check that this process can listen at `address` (HOST:PORT), which `flag` gave. Binds and releases it.

    Raises:
        Rejected: INVALID_ARGUMENT with the reason and what to do.
    """
    try:
        host, port = split_address(await resolve_one(address))
    except Retryable as exc:
        raise Rejected(
            f"{flag} {address}: the name does not resolve; use an address of this machine"
        ) from exc
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # gRPC sets it too
        try:
            probe.bind((host, port))
        except OSError as exc:
            why, remedy = _CANNOT_LISTEN.get(exc.errno or 0, (str(exc.strerror), "choose another"))
            raise Rejected(f"{flag}: cannot listen at {address}: {why}; {remedy}") from exc


async def bind(server: grpc.aio.Server, address: str) -> int:
    """Listen at `address` (HOST:PORT); port 0 picks one. Returns the port. Call before `server.start()`.

    Raises:
        Rejected: INVALID_ARGUMENT: the address is not one of this machine, or the port is in use.
    """
    _, wanted = split_address(address)
    resolved = await resolve_one(address)
    try:
        port = server.add_insecure_port(resolved)
    except RuntimeError:
        port = 0
    if port == 0:
        raise Rejected(
            f"cannot listen at {address}: port {wanted} is in use, or the address is not this machine's; "
            "stop what uses it or choose another with --listen"
        )
    return port


async def stop(server: grpc.aio.Server, grace_s: float) -> None:
    """Refuse new calls, give those in progress `grace_s` seconds, then cut them off. Nothing is served on
    return.

    This may take long on a stalled machine, so the process's owner must bound it.
    """
    await server.stop(grace_s)
