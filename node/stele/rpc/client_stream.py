"""What clients send: the server's half of their streams. The node gives one coroutine that answers a request.

Invariant: a request is charged before it is decoded and until it is answered, however small it is with what it costs to
work on; past the budget it is answered THROTTLED with only its numbers read. Answers leave in the order in which they are
ready; a client that does not take them is not listened to meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

import structlog
from google.protobuf.message import DecodeError

from stele import metrics
from stele.model.errors import Code, Rejected, Retryable
from stele.rpc.budget import ByteBudget, Charge
from stele.rpc.channels import MESSAGE_BYTES_MAX
from stele.rpc.connection import FramedConnection
from stele.rpc.errors import as_stele_error, error_to_pb
from stele.rpc.frames import REQUESTS_MAX, client_responses
from stele.rpc.identity import Identity, PeerBook, caller_from_hello, check
from stele.rpc.listener import StreamListener
from stele.rpc.logging import OncePer
from stele.rpc.proto import common_pb2, tserver_pb2

log = structlog.get_logger("stele.rpc.client_stream")

REQUEST_BYTES = 1_024
"""Charged for each request beside its bytes: what a node holds to work on one, about."""

Answer = Callable[[tserver_pb2.ClientRequest], Awaitable[tserver_pb2.ClientResponse]]
"""Answers one request: sets `write`, `read` or `kv`, or raises a SteleError. `request_id` is filled in here."""


class ClientStreams:
    """Takes in the streams that clients open. Requests of one stream are answered concurrently."""

    def __init__(
        self,
        identity: Identity,
        book: PeerBook,
        budget: ByteBudget,
        listener: StreamListener,
        answer: Answer,
    ) -> None:
        self._identity = identity
        self._book = book
        self._budget = budget
        self._listener = listener
        self._answer = answer
        self._may_log = OncePer()

    def introduce(self, request: common_pb2.OpenStreamRequest) -> common_pb2.OpenStreamResponse:
        """A client wants to open a stream: who we are, where to connect, and the key to begin with.

        Raises:
            Rejected: another cluster or node.
            Retryable: no stream can be taken in just now.
        """
        check(self._identity, self._book, caller_from_hello(request.hello))
        key = self._listener.expect(self._begin)
        return common_pb2.OpenStreamResponse(hello=self._identity.hello(), port=self._listener.port, key=key)

    def _begin(self, connection: FramedConnection) -> None:
        _Stream(self._budget, self._answer, connection, self._may_log)


class _Stream:
    """One client's stream. Once it has ended, what the client still waits for is given up, not undone."""

    def __init__(
        self, budget: ByteBudget, answer: Answer, connection: FramedConnection, may_log: OncePer
    ) -> None:
        self._budget = budget
        self._answer = answer
        self._connection = connection
        self._may_log = may_log
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: deque[bytes] = deque()
        self._flushing = False
        connection.on_frames = self._take_all
        connection.on_full = self._full
        connection.lost.add_done_callback(self._lost)

    def _lost(self, _: object) -> None:
        for task in self._tasks:
            task.cancel()

    def _full(self, full: bool) -> None:
        self._connection.read(not full)
        if not full:
            self._flush()

    def _take_all(self, frames: list[bytes]) -> None:
        for raw in frames:
            self._take(raw)

    def _take(self, raw: bytes) -> None:
        try:
            charge = self._budget.charge(len(raw) + REQUEST_BYTES)
        except Retryable as exc:
            self._put_off(raw, exc)
            return
        try:
            request = _decode(raw)
            several = request.many.requests if request.WhichOneof("body") == "many" else None
            if several is not None:
                charge.grow(REQUEST_BYTES * (len(several) - 1))
        except Retryable as exc:
            charge.release()
            self._put_off(raw, exc)
            return
        except Rejected:
            charge.release()
            raise
        if several is None:
            self._start(request, charge)
            return
        for each, share in zip(several, charge.split(len(several))):
            self._start(each, share)

    def _put_off(self, raw: bytes, exc: Retryable) -> None:
        for request_id in request_ids_of(raw):
            self._put(tserver_pb2.ClientResponse(request_id=request_id, error=error_to_pb(exc)))

    def _start(self, request: tserver_pb2.ClientRequest, charge: Charge) -> None:
        task = self._loop.create_task(self._respond(request, charge))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _respond(self, request: tserver_pb2.ClientRequest, charge: Charge) -> None:
        kind = request.WhichOneof("body") or "none"
        try:
            response = await self._answer(request)
            metrics.client_requests.cell(kind, "OK")[0] += 1
        except Exception as exc:  # noqa: BLE001 - the border: what is not ours is logged and told as INTERNAL
            error = as_stele_error(exc, where=f"client stream, {kind}")
            metrics.client_requests.cell(kind, error.code.name)[0] += 1
            if error.code is Code.TOO_LARGE and self._may_log(self._connection.source, error.code):
                log.warning("request refused", source=self._connection.source, error=str(error))
            response = tserver_pb2.ClientResponse(error=error_to_pb(error))
        finally:
            charge.release()
        response.request_id = request.request_id
        self._put(response)

    def _put(self, response: tserver_pb2.ClientResponse) -> None:
        raw = response.SerializeToString()
        if len(raw) > MESSAGE_BYTES_MAX:
            error = Rejected(
                f"an answer of {len(raw)} bytes, at most {MESSAGE_BYTES_MAX} may be; ask for less at once",
                code=Code.TOO_LARGE,
            )
            small = tserver_pb2.ClientResponse(request_id=response.request_id, error=error_to_pb(error))
            raw = small.SerializeToString()
        self._ready.append(raw)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        while self._ready and self._connection.stands and not self._connection.full:
            self._connection.send(client_responses(self._ready))


def request_ids_of(raw: bytes) -> list[int]:
    """The request_id of each request in an encoded ClientRequest, without decoding what they carry.

    Reads what our own client writes (`stele.rpc.frames`); of anything else, nothing, or no more than that could be.
    """
    if raw[:1] != _MANY_TAG:
        request_id, _ = _varint(raw, 1) if raw[:1] == _ID_TAG else (0, 0)
        return [request_id] if request_id else []
    found: list[int] = []
    _, at = _varint(raw, 1)
    while at and raw[at : at + 1] == _REQUEST_TAG and len(found) < REQUESTS_MAX:
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
        request = tserver_pb2.ClientRequest.FromString(raw)
    except DecodeError:
        raise Rejected(f"{len(raw)} bytes that are no client request") from None
    if len(request.many.requests) > REQUESTS_MAX:
        raise Rejected(
            f"a frame of {len(request.many.requests)} requests, at most {REQUESTS_MAX} may be",
            code=Code.TOO_LARGE,
        )
    return request
