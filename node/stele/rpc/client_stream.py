"""The server's half of clients' streams. An `Answers` says how the node answers a request.

Most requests are writes, and each waits for one thing only. So they are begun as their frame arrives and are
answered from a future, without a task, a wait or a timer each. A task with a coroutine answers every other
request.

Invariant: a request is charged before it is decoded and until it is answered, with a minimum for small ones.
Past the budget it is answered THROTTLED, and only its request id is read. Answers leave in the order in which
they are ready. If a client does not read them, its stream is not read either, and the waiting answers are
charged too. One turn of the loop begins REQUESTS_PER_TURN requests and frames of a stream at most.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import structlog
from google.protobuf.message import DecodeError

from stele import metrics
from stele.model.errors import Code, Rejected, Retryable, SteleError, let_go, no_outcome
from stele.rpc.arriving import Arriving
from stele.rpc.budget import REQUEST_BYTES, ByteBudget
from stele.rpc.channels import MESSAGE_BYTES_MAX
from stele.rpc.connection import FramedConnection
from stele.rpc.errors import as_stele_error, error_to_pb, outcome_of
from stele.rpc.frames import REQUESTS_MAX, client_responses
from stele.rpc.identity import Identity, PeerBook, caller_from_hello, check
from stele.rpc.listener import StreamListener
from stele.rpc.logging import OncePer
from stele.rpc.parts import refuse_parts
from stele.rpc.proto import common_pb2, tserver_pb2

log = structlog.get_logger("stele.rpc.client_stream")

REQUESTS_PER_TURN = 256
"""After this many requests and frames of one stream, the loop gets a turn."""
WRITE_DEADLINE_MS = 10_000
"""How long a write waits for its outcome if its client does not say."""
PUSHED_BYTES_MAX = 1 << 20
"""A stream is full while this many bytes of pushed messages wait to be sent."""
_KV_KINDS = {
    tserver_pb2.KV_READ: "kv_read",
    tserver_pb2.KV_LIST: "kv_read",
    tserver_pb2.KV_LEASE_KEEP: "kv_lease",
    tserver_pb2.KV_LEASES: "kv_lease",
}
"""Kinds of requests to key spaces, as the time that they take is told. Every other operation is a kv_write."""
_LOOK_AGAIN_S = 0.02
"""The least time between two checks for writes past their deadline. Callers may hear of it this much late."""


class Answers(Protocol):
    """How a node answers requests. Every method may raise a SteleError, which is sent to the client."""

    def begin_write(self, request: tserver_pb2.WriteRequest) -> asyncio.Future[Any]:
        """Propose a block. The future belongs to this write and the replica; a caller that leaves cancels
        nothing."""

    def end_write(self, outcome: Any) -> tserver_pb2.WriteResponse:
        """The answer for a write's outcome."""

    def answer(self, request: tserver_pb2.ClientRequest) -> Coroutine[Any, Any, tserver_pb2.ClientResponse]:
        """Answer any other request by setting `read` or `kv`. The stream fills in `request_id`."""

    def watch(
        self, request: tserver_pb2.KvWatchRequest, sink: Sink
    ) -> Coroutine[Any, Any, tserver_pb2.KvWatchResponse]:
        """Begin to push changes of keys to the client, or stop. What is pushed leaves after the answer."""


class Sink(Protocol):
    """A client's stream, for messages that answer no request. Whoever pushes them waits while the stream is
    full."""

    @property
    def full(self) -> bool:
        """Whether too many pushed bytes still wait to be sent."""

    @property
    def ended(self) -> bool:
        """Whether the stream has ended."""

    def push(self, response: bytes) -> bool:
        """Send an encoded ClientResponse. Returns False, and sends nothing, if the node has no memory for it now."""


class _Write(NamedTuple):
    """A write without an outcome yet."""

    request_id: int
    charged_bytes: int
    deadline_ms: int
    due_s: float
    """When the deadline passes, by the loop's clock."""
    came_s: float
    """When it came, by the clock of durations. That of uvloop's loops counts whole milliseconds."""


class ClientStreams:
    """Accepts the streams that clients open. Requests of one stream are answered concurrently."""

    def __init__(
        self,
        identity: Identity,
        book: PeerBook,
        budget: ByteBudget,
        listener: StreamListener,
        answers: Answers,
    ) -> None:
        self._identity = identity
        self._book = book
        self._budget = budget
        self._listener = listener
        self._answers = answers
        self._arriving = Arriving(budget.limit_bytes // 4, budget.arrives)
        self._once = OncePer()

    def introduce(self, request: common_pb2.OpenStreamRequest) -> common_pb2.OpenStreamResponse:
        """Answer a client that wants to open a stream: who we are, the port, and the key to begin with.

        Raises:
            Rejected: another cluster or node.
            Retryable: no stream can be accepted now.
        """
        check(self._identity, self._book, caller_from_hello(request.hello))
        key = self._listener.expect(self._begin)
        return common_pb2.OpenStreamResponse(hello=self._identity.hello(), port=self._listener.port, key=key)

    def _begin(self, connection: FramedConnection) -> None:
        connection.arriving = self._arriving
        _Stream(self._budget, self._answers, connection, self._once)


class _Stream:
    """One client's stream. When it ends, its requests are abandoned, but not undone."""

    def __init__(
        self, budget: ByteBudget, answers: Answers, connection: FramedConnection, once: OncePer
    ) -> None:
        self._budget = budget
        self._answers = answers
        self._connection = connection
        self._once = once
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writes: dict[asyncio.Future[Any], _Write] = {}
        self._look_s = math.inf  # when to look for writes past their deadline
        self._timer: asyncio.TimerHandle | None = None
        self._frames: deque[bytes] = deque()
        self._requests: Iterator[tserver_pb2.ClientRequest] | None = None  # of the frame that is being begun
        self._open_bytes = 0  # charged for those of them that are not begun
        self._share = self._rest = 0
        self._resting = False
        self._written_count = metrics.client_requests.cell("write", "OK")
        self._written_times = metrics.client_request_seconds.cell("write", "ok")
        self._ready: deque[bytes] = deque()
        self._ready_charged = 0  # bytes of answers and pushed messages that the client does not read yet
        self._pushed_bytes = 0  # of pushed messages in `_ready`
        self._flushing = False
        connection.on_frames = self._take_all
        connection.on_full = self._full
        connection.lost.add_done_callback(self._lost)

    def _lost(self, _: object) -> None:
        for task in self._tasks:
            task.cancel()
        self._frames.clear()
        self._requests = None
        self._budget.give_back(self._open_bytes)
        self._open_bytes = 0
        writes, self._writes = self._writes, {}
        for write in writes.values():
            self._budget.give_back(write.charged_bytes)
        self._ready.clear()
        self._give_back_ready()
        if self._timer is not None:
            self._timer.cancel()

    def _full(self, full: bool) -> None:
        self._connection.read(not full and not self._resting)
        if not full:
            self._flush()

    def _take_all(self, frames: list[bytes]) -> None:
        self._frames.extend(frames)
        if not self._resting:
            self._work()

    def _work(self) -> None:
        begun = 0
        while not self._connection.lost.done():
            if self._requests is None:
                if not self._frames:
                    return
                begun += 1
                self._requests = self._open(self._frames.popleft())
            for request in self._requests or ():
                charged = self._share + self._rest
                self._rest = 0
                self._open_bytes -= charged
                if request.WhichOneof("body") == "write":
                    self._begin_write(request, charged)
                else:
                    task = self._loop.create_task(self._respond(request, charged))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                begun += 1
                if begun >= REQUESTS_PER_TURN:
                    self._pause()
                    return
            self._requests = None
            if begun >= REQUESTS_PER_TURN and self._frames:
                self._pause()
                return

    def _pause(self) -> None:
        self._resting = True
        self._connection.read(False)
        self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._resting = False
        try:
            self._work()
        except Exception as exc:  # noqa: BLE001 - whatever it was, this connection cannot be used any more
            self._connection.close(exc)
        if not self._resting:
            self._connection.read(not self._connection.full)

    def _open(self, raw: bytes) -> Iterator[tserver_pb2.ClientRequest] | None:
        """Charge a frame to the budget, and decode it. None: it has no request, or the budget had no room, and its
        requests were answered so."""
        charged = len(raw) + REQUEST_BYTES
        try:
            self._budget.take(charged)
        except Retryable as exc:
            self._put_off(raw, exc)
            return None
        try:
            requests = _decode(raw)
            if len(requests) > 1:
                more = REQUEST_BYTES * (len(requests) - 1)
                self._budget.take(more)
                charged += more
        except Retryable as exc:
            self._budget.give_back(charged)
            self._put_off(raw, exc)
            return None
        except Rejected:
            self._budget.give_back(charged)
            raise
        if not requests:
            self._budget.give_back(charged)
            return None
        self._open_bytes = charged
        self._share, self._rest = divmod(charged, len(requests))
        return iter(requests)

    def _put_off(self, raw: bytes, exc: Retryable) -> None:
        for request_id in request_ids_of(raw):
            self._put(tserver_pb2.ClientResponse(request_id=request_id, error=error_to_pb(exc)))

    async def _respond(self, request: tserver_pb2.ClientRequest, charged_bytes: int) -> None:
        came_s = time.perf_counter()
        kind = request.WhichOneof("body") or "none"
        timed = _KV_KINDS.get(request.kv.op, "kv_write") if kind == "kv" else kind
        try:
            if kind == "watch":
                watch = await self._answers.watch(request.watch, self)
                response = tserver_pb2.ClientResponse(watch=watch)
            else:
                response = await self._answers.answer(request)
            response.request_id = request.request_id
            metrics.client_requests.cell(kind, "OK")[0] += 1
            metrics.client_request_seconds.cell(timed, "ok").add(time.perf_counter() - came_s)
        except Exception as exc:  # noqa: BLE001 - the border: foreign errors are logged and sent as INTERNAL
            response = self._error(request.request_id, kind, exc, came_s, timed)
        finally:
            self._budget.give_back(charged_bytes)
        self._put(response)

    def _error(
        self, request_id: int, kind: str, exc: Exception, came_s: float, timed: str
    ) -> tserver_pb2.ClientResponse:
        error = as_stele_error(exc, where=f"client stream, {kind}")
        metrics.client_requests.cell(kind, error.code.name)[0] += 1
        times = metrics.client_request_seconds.cell(timed, outcome_of(error))
        times.add(time.perf_counter() - came_s)
        if error.code is Code.TOO_LARGE:
            source = self._connection.source
            self._once.tell(
                log.warning, "request refused", source, error.code, source=source, error=str(error)
            )
        return tserver_pb2.ClientResponse(request_id=request_id, error=error_to_pb(error))

    # --- writes

    def _begin_write(self, request: tserver_pb2.ClientRequest, charged_bytes: int) -> None:
        request_id, body = request.request_id, request.write
        came_s = time.perf_counter()
        try:
            future = self._answers.begin_write(body)
        except Exception as exc:  # noqa: BLE001 - the border, as above
            self._budget.give_back(charged_bytes)
            self._put(self._error(request_id, "write", exc, came_s, "write"))
            return
        deadline_ms = body.deadline_ms or WRITE_DEADLINE_MS
        due_s = self._loop.time() + deadline_ms / 1000
        self._writes[future] = _Write(request_id, charged_bytes, deadline_ms, due_s, came_s)
        future.add_done_callback(self._end_write)
        if due_s < self._look_s:
            self._look_at(due_s)

    def _end_write(self, future: asyncio.Future[Any]) -> None:
        write = self._writes.pop(future, None)
        if write is None:  # abandoned
            return
        self._budget.give_back(write.charged_bytes)
        try:
            written = self._answers.end_write(future.result())
            response = tserver_pb2.ClientResponse(request_id=write.request_id, write=written)
            self._written_count[0] += 1
            self._written_times.add(time.perf_counter() - write.came_s)
        except Exception as exc:  # noqa: BLE001 - the border, as above
            response = self._error(write.request_id, "write", exc, write.came_s, "write")
        self._put(response)

    def _look_at(self, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._look_s = when_s
        self._timer = self._loop.call_at(when_s, self._give_up_late_writes)

    def _give_up_late_writes(self) -> None:
        """Answer the writes that are past their deadline. One timer serves all, because this is rare."""
        now_s = self._loop.time()
        for future, write in [(f, w) for f, w in self._writes.items() if w.due_s <= now_s]:
            del self._writes[future]
            self._budget.give_back(write.charged_bytes)
            late = no_outcome(write.deadline_ms)
            self._put(self._error(write.request_id, "write", late, write.came_s, "write"))
        self._look_s = math.inf
        if self._writes:
            next_s = min(write.due_s for write in self._writes.values())
            self._look_at(max(next_s, now_s + _LOOK_AGAIN_S))

    # --- Sink

    @property
    def full(self) -> bool:
        """Whether too many pushed bytes still wait to be sent."""
        return self._connection.full or self._pushed_bytes >= PUSHED_BYTES_MAX

    @property
    def ended(self) -> bool:
        """Whether the stream has ended."""
        return self._connection.lost.done()

    def push(self, response: bytes) -> bool:
        """Send an encoded ClientResponse. It is charged until the client has read enough. Returns False if the budget is
        used up."""
        if not self.ended:
            try:
                self._budget.take(len(response))
            except Retryable as exc:
                let_go(exc)
                return False
            self._ready_charged += len(response)
            self._pushed_bytes += len(response)
            self._send(response)
        return True

    # --- answers

    def _put(self, response: tserver_pb2.ClientResponse) -> None:
        raw = response.SerializeToString()
        if len(raw) > MESSAGE_BYTES_MAX:
            error = Rejected(
                f"the answer has {len(raw)} bytes; at most {MESSAGE_BYTES_MAX} are allowed; ask for less at "
                f"once",
                code=Code.TOO_LARGE,
            )
            small = tserver_pb2.ClientResponse(request_id=response.request_id, error=error_to_pb(error))
            raw = small.SerializeToString()
        elif self._connection.full:
            if self._connection.lost.done():
                return
            raw = self._kept(response, raw)
        self._send(raw)

    def _send(self, raw: bytes) -> None:
        self._ready.append(raw)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _kept(self, response: tserver_pb2.ClientResponse, raw: bytes) -> bytes:
        """Prepare an answer for a client that does not read now. A large answer is charged, or replaced by a
        small error.

        A write never gets THROTTLED here, because that would say that nothing was done."""
        if len(raw) <= REQUEST_BYTES:
            return raw
        try:
            self._budget.take(len(raw))
        except Retryable as exc:
            error: SteleError = exc
            if response.HasField("write"):
                error = Retryable(
                    "there is no room for the outcome; send the write again with the same client id and "
                    "sequence",
                    code=Code.UNKNOWN_OUTCOME,
                )
            error_pb = error_to_pb(error)
            return tserver_pb2.ClientResponse(
                request_id=response.request_id, error=error_pb
            ).SerializeToString()
        self._ready_charged += len(raw)
        return raw

    def _give_back_ready(self) -> None:
        charged, self._ready_charged = self._ready_charged, 0
        self._budget.give_back(charged)

    def _flush(self) -> None:
        self._flushing = False
        while self._ready and not self._connection.full:
            self._connection.send(client_responses(self._ready))
        if not self._ready and not self._connection.full:
            self._pushed_bytes = 0
            if self._ready_charged:
                self._give_back_ready()


def request_ids_of(raw: bytes) -> list[int]:
    """The request_id of each request in an encoded ClientRequest, without decoding the rest.

    Reads what our own client writes (`stele.rpc.frames`). From other bytes it returns none, or at most
    plausible ones.
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
    """(value, offset behind it) of a varint; (0, 0) if there is none."""
    value = 0
    for position, byte in enumerate(raw[at : at + 10]):
        value |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return value, at + position + 1
    return 0, 0


def _decode(raw: bytes) -> Sequence[tserver_pb2.ClientRequest]:
    """The requests in a frame."""
    refuse_parts(raw, tserver_pb2.ClientRequest.DESCRIPTOR)
    try:
        request = tserver_pb2.ClientRequest.FromString(raw)
    except DecodeError:
        raise Rejected(
            f"the frame of {len(raw)} bytes is not a client request; the sender is not a Stele client"
        ) from None
    if not request.HasField("many"):
        return (request,)
    requests = request.many.requests
    if len(requests) > REQUESTS_MAX:
        raise Rejected(
            f"the frame has {len(requests)} requests; at most {REQUESTS_MAX} are allowed; send several frames",
            code=Code.TOO_LARGE,
        )
    return requests
