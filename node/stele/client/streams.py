"""The client's half of its streams: one to each node, requests matched with answers by number.

Used by the writers and readers of tablets. Invariant: every request ends exactly once: with an answer, with `NotSent`
(it certainly never left this process), or with UNAVAILABLE or TIMED_OUT (the node may have it).
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable

from stele.client.leader_search import LeaderSearch
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.rpc.channels import MESSAGE_BYTES_MAX, ChannelPool
from stele.rpc.connection import FramedConnection, connect
from stele.rpc.errors import error_from_pb
from stele.rpc.frames import client_requests
from stele.rpc.proto import common_pb2, tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub

_DIAL_TIMEOUT_S = 1.5
_REST_S = 0.05
SLOW_FIRST_S, SLOW_AGAIN_S = 0.4, 0.1
"""How long a request may go unanswered before whoever asked is told, and how often it is told again."""

Slow = Callable[[int], None]
"""Called with the number of a request that is unanswered for long; see `NodeStream.give_up`."""
Response = tserver_pb2.ClientResponse


class NotSent(Retryable):
    """There is no connection to this node: the request never left, so it was certainly not done."""


class Streams:
    """Streams by node id and address. One per client."""

    def __init__(self, pool: ChannelPool) -> None:
        self._pool = pool
        self._streams: dict[tuple[str, str], NodeStream] = {}
        self.leader_search = LeaderSearch(pool)

    def to(self, node_id: str, address: str) -> NodeStream:
        """The stream to a node, dialled at the first request."""
        stream = self._streams.get((node_id, address))
        if stream is None:
            stream = self._streams[node_id, address] = NodeStream(self._pool, node_id, address)
        return stream

    async def close(self) -> None:
        """End all streams; what waits for an answer gets UNAVAILABLE."""
        await self.leader_search.close()
        streams, self._streams = list(self._streams.values()), {}
        await asyncio.gather(*(stream.close() for stream in streams))


class NodeStream:
    """One node. Dials when something is asked, again when something is asked after it broke."""

    def __init__(self, pool: ChannelPool, node_id: str, address: str) -> None:
        self._pool = pool
        self._node_id = node_id
        self._address = address
        self._next_id = 1
        self._queue: deque[tuple[int, bytes]] = deque()
        self._waiting: dict[int, asyncio.Future[Response]] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._sent: set[int] = set()
        self._connection: FramedConnection | None = None
        self._flushing = False
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    async def ask(
        self, request: tserver_pb2.ClientRequest, *, timeout_s: float, slow: Slow | None = None
    ) -> Response:
        """Send a request (its request_id is filled in here) and wait for its answer; `slow` hears if that takes long.

        Raises:
            NotSent: no connection to the node, or `close` was called.
            SteleError: what the node answered; UNAVAILABLE if the stream broke; TIMED_OUT after `timeout_s`.
        """
        if self._closed:
            raise NotSent(f"{self._address}: the client was closed")
        request_id = self._next_id
        self._next_id += 1
        request.request_id = request_id
        raw = request.SerializeToString()
        if len(raw) > MESSAGE_BYTES_MAX:
            raise Rejected(f"a request of {len(raw)} bytes; at most {MESSAGE_BYTES_MAX}", code=Code.TOO_LARGE)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Response] = loop.create_future()
        self._waiting[request_id] = future
        self._queue.append((request_id, raw))
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run())
        elif not self._flushing and self._connection is not None:
            self._flushing = True
            loop.call_soon(self._flush)
        deadline = loop.time() + timeout_s
        first = timeout_s if slow is None else SLOW_FIRST_S
        self._wait(request_id, first, deadline, timeout_s, slow)
        try:
            response = await future
        finally:
            self._timers.pop(request_id).cancel()
            self._waiting.pop(request_id, None)
            self._sent.discard(request_id)
        if response.HasField("error"):
            raise error_from_pb(response.error)
        return response

    async def close(self) -> None:
        """End the stream; nothing can be asked any more."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail(Retryable(f"{self._address}: the client was closed"))

    def give_up(self, request_id: int, why: str) -> None:
        """End a request that waits: TIMED_OUT, or NotSent if it never left."""
        future = self._waiting.get(request_id)
        if future is None or future.done():
            return
        if request_id in self._sent:
            future.set_exception(Retryable(f"{self._address} {why}", code=Code.TIMED_OUT))
        else:
            self._queue = deque(item for item in self._queue if item[0] != request_id)
            future.set_exception(NotSent(f"{self._address} {why}"))

    def _wait(
        self, request_id: int, at_most_s: float, deadline: float, timeout_s: float, slow: Slow | None
    ) -> None:
        loop = asyncio.get_running_loop()
        rest_s = min(at_most_s, deadline - loop.time())
        self._timers[request_id] = loop.call_later(
            rest_s, self._waited, request_id, deadline, timeout_s, slow
        )

    def _waited(self, request_id: int, deadline: float, timeout_s: float, slow: Slow | None) -> None:
        if slow is None or asyncio.get_running_loop().time() >= deadline:
            self.give_up(request_id, f"did not answer within {timeout_s:.1f} s")
            return
        self._wait(request_id, SLOW_AGAIN_S, deadline, timeout_s, slow)
        slow(request_id)

    async def _run(self) -> None:
        """One connection, from dialling to its end; then whoever waits is told."""
        error: SteleError = Retryable(f"{self._address}: the client was closed")
        try:
            await self._session()
        except SteleError as exc:
            error = exc
        finally:
            self._fail(error)
        # Whoever asks again at once would only meet the same refusal.
        await asyncio.sleep(_REST_S * (0.5 + random.random()))
        if self._queue:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _session(self) -> None:
        try:
            async with asyncio.timeout(_DIAL_TIMEOUT_S):
                connection = await self._dial()
        except TimeoutError:
            raise Retryable(f"{self._address} did not open a stream within {_DIAL_TIMEOUT_S} s") from None
        connection.on_frames = self._answered
        connection.on_full = self._full
        self._connection = connection
        try:
            self._flush()
            why = await asyncio.shield(connection.lost)
        finally:
            self._connection = None
            connection.close()
            await connection.closed()
        # Whatever ended it: what was sent may have been done.
        raise Retryable(f"{self._address} ended the stream{f': {why}' if why else ''}") from why

    async def _dial(self) -> FramedConnection:
        """Introduce ourselves over gRPC, then connect where the node says."""
        request = common_pb2.OpenStreamRequest(hello=self._pool.identity.hello(self._node_id))
        answer = await self._pool.unary(
            self._address, TabletServerServiceStub, "OpenClientStream", request, timeout_s=_DIAL_TIMEOUT_S
        )
        return await connect(self._address, answer.port, answer.key)

    def _answered(self, frames: list[bytes]) -> None:
        for raw in frames:
            response = Response.FromString(raw)
            for each in response.many.responses if response.WhichOneof("body") == "many" else (response,):
                future = self._waiting.get(each.request_id)
                if future is not None and not future.done():
                    future.set_result(each)

    def _full(self, full: bool) -> None:
        if not full:
            self._flush()

    def _flush(self) -> None:
        self._flushing = False
        connection = self._connection
        if connection is None or connection.full or not connection.stands:
            return
        ready: deque[bytes] = deque()
        while self._queue:
            request_id, raw = self._queue.popleft()
            if request_id in self._waiting:
                self._sent.add(request_id)
                ready.append(raw)
        while ready:
            connection.send(client_requests(ready))

    def _fail(self, error: SteleError) -> None:
        queued = {request_id for request_id, _ in self._queue}
        self._queue.clear()
        for request_id, future in list(self._waiting.items()):
            if future.done():
                continue
            if request_id in queued and request_id not in self._sent:
                future.set_exception(NotSent(str(error.args[0]), code=error.code))
            else:
                future.set_exception(error)
