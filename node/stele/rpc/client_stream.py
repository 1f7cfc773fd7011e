"""What clients send: the server's half of ClientStream. The node gives one coroutine that answers a request.

Invariant: a request is charged before it is decoded and until it is answered; past the budget it is answered
THROTTLED with only its numbers read. Answers leave in the order in which they are ready.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from stele import metrics
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.rpc.budget import ByteBudget, Charge
from stele.rpc.errors import abort_with, as_stele_error, error_to_pb
from stele.rpc.frames import client_responses
from stele.rpc.identity import Identity, PeerBook, caller_from_hello, check
from stele.rpc.logging import OncePer
from stele.rpc.proto import tserver_pb2
from stele.rpc.server import source_of

log = structlog.get_logger("stele.rpc.client_stream")

SERVICE = "stele.v1.TabletServerService"
METHOD = "ClientStream"
_HELLO_TIMEOUT_S = 5.0

Answer = Callable[[tserver_pb2.ClientRequest], Awaitable[tserver_pb2.ClientResponse]]
"""Answers one request: sets `write`, `read` or `kv`, or raises a SteleError. `request_id` is filled in here."""


class ClientStreams:
    """Takes in the streams that clients open. Requests of one stream are answered concurrently."""

    def __init__(self, identity: Identity, book: PeerBook, budget: ByteBudget, answer: Answer) -> None:
        self._identity = identity
        self._book = book
        self._budget = budget
        self._answer = answer
        self._may_log = OncePer()

    def handlers(self) -> dict[str, Any]:
        """For `make_server(streams=...)`."""
        return {f"/{SERVICE}/{METHOD}": grpc.stream_stream_rpc_method_handler(self._serve)}

    async def _serve(self, request_iterator: Any, context: Any) -> None:
        try:
            await self._greet(context)
            await _Stream(self._budget, self._answer, context, self._may_log).run()
        except Exception as exc:
            if isinstance(exc, grpc.aio.AbortError):
                raise
            error = as_stele_error(exc, where=METHOD)
            source = source_of(context)
            if isinstance(error, Rejected) and self._may_log(source, error.code):
                log.warning("client stream refused", source=source, error=str(error))
            await abort_with(context, error)

    async def _greet(self, context: Any) -> None:
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                raw = await context.read()
        except TimeoutError:
            raise Retryable("no hello came", code=Code.TIMED_OUT) from None
        if raw is grpc.aio.EOF:
            raise SteleError("the stream ended before its hello", code=Code.UNAVAILABLE)
        request = _decode(raw)
        if request.WhichOneof("body") != "hello":
            raise Rejected("a client's stream begins with a hello")
        check(self._identity, self._book, caller_from_hello(request.hello))
        answer = tserver_pb2.ClientResponse(request_id=request.request_id, hello=self._identity.hello())
        await context.write(answer.SerializeToString())


class _Stream:
    """One client's stream after its hello."""

    def __init__(self, budget: ByteBudget, answer: Answer, context: Any, may_log: OncePer) -> None:
        self._budget = budget
        self._answer = answer
        self._context = context
        self._may_log = may_log
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._ended = False

    async def run(self) -> None:
        """Until the client closes the stream; then what it still waits for is given up, not undone."""
        writer = asyncio.create_task(self._write())
        try:
            while True:
                raw = await self._context.read()
                if raw is grpc.aio.EOF:
                    break
                self._take(raw)
            if self._tasks:
                await asyncio.wait(self._tasks)
            self._ended = True
            self._wake.set()
            await writer
        finally:
            writer.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(writer, *self._tasks, return_exceptions=True)

    def _take(self, raw: bytes) -> None:
        try:
            charge = self._budget.charge(len(raw))
        except Retryable as exc:
            for request_id in request_ids_of(raw):
                self._put(tserver_pb2.ClientResponse(request_id=request_id, error=error_to_pb(exc)))
            return
        try:
            request = _decode(raw)
        except Rejected:
            charge.release()
            raise
        if request.WhichOneof("body") == "many":
            shares = charge.split(len(request.many.requests))
            for each, share in zip(request.many.requests, shares):
                self._start(each, share)
        else:
            self._start(request, charge)

    def _start(self, request: tserver_pb2.ClientRequest, charge: Charge) -> None:
        task = asyncio.get_running_loop().create_task(self._respond(request, charge))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _respond(self, request: tserver_pb2.ClientRequest, charge: Charge) -> None:
        kind = request.WhichOneof("body") or "none"
        try:
            response = await self._answer(request)
            metrics.client_requests.cell(kind, "OK")[0] += 1
        except Exception as exc:  # noqa: BLE001 - the border, as above
            error = as_stele_error(exc, where=f"{METHOD}.{kind}")
            metrics.client_requests.cell(kind, error.code.name)[0] += 1
            if error.code is Code.TOO_LARGE and self._may_log(source_of(self._context), error.code):
                log.warning("request refused", source=source_of(self._context), error=str(error))
            response = tserver_pb2.ClientResponse(error=error_to_pb(error))
        finally:
            charge.release()
        response.request_id = request.request_id
        self._put(response)

    def _put(self, response: tserver_pb2.ClientResponse) -> None:
        self._ready.append(response.SerializeToString())
        self._wake.set()

    async def _write(self) -> None:
        while True:
            self._wake.clear()
            while self._ready:
                await self._context.write(client_responses(self._ready))
            if self._ended:
                return
            await self._wake.wait()


def request_ids_of(raw: bytes) -> list[int]:
    """The request_id of each request in an encoded ClientRequest, without decoding what they carry.

    Reads what our own client writes (`stele.rpc.frames`); of anything else, nothing.
    """
    if raw[:1] != _MANY_TAG:
        request_id, _ = _varint(raw, 1) if raw[:1] == _ID_TAG else (0, 0)
        return [request_id] if request_id else []
    found = []
    _, at = _varint(raw, 1)
    while at and raw[at : at + 1] == _REQUEST_TAG:
        size, start = _varint(raw, at + 1)
        if not start or raw[start : start + 1] != _ID_TAG:
            break
        found.append(_varint(raw, start + 1)[0])
        at = start + size
    return found


_ID_TAG, _REQUEST_TAG, _MANY_TAG = b"\x08", b"\x0a", b"\x32"


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """(value, where it ends) of a varint; (0, 0) if there is none."""
    value = 0
    for position, byte in enumerate(raw[at : at + 10]):
        value |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return value, at + position + 1
    return 0, 0


def _decode(raw: bytes) -> tserver_pb2.ClientRequest:
    try:
        return tserver_pb2.ClientRequest.FromString(raw)
    except DecodeError:
        raise Rejected(f"{len(raw)} bytes that are no client request") from None
