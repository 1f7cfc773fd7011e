"""The client's half of its streams: one to each node. A number matches each request with its answer.

Used by the writers and readers of tablets. Invariant: every request ends exactly once: with an answer, with
`NotSent`, or with UNAVAILABLE or TIMED_OUT. `NotSent`: it certainly never left this process. UNAVAILABLE and
TIMED_OUT: the node may have it.
"""

from __future__ import annotations

import asyncio
import math
import random
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Protocol

from stele.client.brake import Brake
from stele.model.errors import Closed, Code, Rejected, Retryable, SteleError, let_go
from stele.rpc.channels import MESSAGE_BYTES_MAX, ChannelPool
from stele.rpc.connection import FramedConnection, connect
from stele.rpc.errors import error_from_pb
from stele.rpc.frames import client_requests
from stele.rpc.proto import common_pb2, tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub

_DIAL_TIMEOUT_S = 1.5
_REST_S = 0.05
_SEARCHES_MAX = 16
"""The most searches for leaders at once (see stele.client.leader_search)."""

_ATTEMPT_BITS = 24
"""The low bits of a watch's number count its attempts."""
_EARLY_S = 0.001
"""A timer may fire this much early, because event loops round to milliseconds."""

Response = tserver_pb2.ClientResponse
Ended = Callable[[Response | SteleError], None]
_Asked = tuple[Ended, float, float]
"""(callback, deadline by the loop's clock, length of the wait)."""


class NotSent(Retryable):
    """There is no connection to this node. The request never left, so it was certainly not done."""


class GivenUp(Retryable):
    """The caller no longer waits for this answer: TIMED_OUT, because the node may do the request."""


class Watching(Protocol):
    """A watch of keys, as its stream sees it. Neither method may raise."""

    def pushed(self, push: tserver_pb2.KvPushPB) -> bool:
        """Take what a node has pushed for one attempt of this watch. Returns whether more is wanted under the
        attempt's number."""

    def broken(self, number: int, error: SteleError) -> None:
        """The stream of this attempt has ended."""


class Streams:
    """Streams by node id and address. One per client.

    While the client is being closed (`closing`), nothing new begins, but requests in progress go on. Once it is
    closed (`closed`), requests in progress have ended, too.
    """

    def __init__(self, pool: ChannelPool) -> None:
        self.pool = pool
        self.closing = False
        self.closed = False
        self.searches = asyncio.Semaphore(_SEARCHES_MAX)
        self._streams: dict[tuple[str, str], NodeStream] = {}
        self._watches: weakref.WeakValueDictionary[int, Watching] = weakref.WeakValueDictionary()
        self._next_watch = 1
        self._background: set[asyncio.Task[None]] = set()

    def ensure_open(self) -> None:
        """Check that something new may begin. Called by every operation that users begin.

        Raises:
            Closed: the client was closed, or is being closed.
        """
        if self.closing:
            raise Closed()

    def to(self, node_id: str, address: str) -> NodeStream:
        """The stream to a node. It is dialled with the first request.

        Raises:
            Closed: after `close`.
            Rejected: the client belongs to another event loop.
        """
        if self.closed:
            raise Closed()
        self.pool.ensure_loop()
        stream = self._streams.get((node_id, address))
        if stream is None:
            stream = self._streams[node_id, address] = NodeStream(self.pool, node_id, address)
            stream.on_push = self._pushed
            stream.on_failed = self._failed
        return stream

    # --- watches

    def add_watch(self, watch: Watching) -> int:
        """Pass what nodes push for a watch on to it, until nobody refers to the watch any more. Returns the
        number of its first attempt. Later attempts count from there."""
        base, self._next_watch = self._next_watch, self._next_watch + 1
        self._watches[base] = watch
        return base << _ATTEMPT_BITS

    def remove_watch(self, number: int) -> None:
        """Pass nothing more to a watch. A node that still pushes for it is told to stop."""
        base = number >> _ATTEMPT_BITS
        self._watches.pop(base, None)
        for stream in self._streams.values():
            if (pushing := stream.watched.pop(base, None)) is not None:
                stream.stop_watch(pushing)

    def _pushed(self, stream: NodeStream, push: tserver_pb2.KvPushPB) -> None:
        watch = self._watches.get(push.number >> _ATTEMPT_BITS)
        if watch is None:
            stream.watched.pop(push.number >> _ATTEMPT_BITS, None)
            stream.stop_watch(push.number)
        elif not watch.pushed(push):
            stream.stop_watch(push.number)

    def _failed(self, numbers: Iterable[int], error: SteleError) -> None:
        for number in numbers:
            watch = self._watches.get(number >> _ATTEMPT_BITS)
            if watch is not None:
                watch.broken(number, error)

    def in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task for `work`, which is cancelled when the client is closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def close(self) -> None:
        """End all streams for good. Waiting requests get UNAVAILABLE."""
        self.closing = self.closed = True
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        streams, self._streams = list(self._streams.values()), {}
        await asyncio.gather(*(stream.close() for stream in streams))


class NodeStream:
    """The stream to one node. Dials with the first request, and again with the first one after it broke."""

    def __init__(self, pool: ChannelPool, node_id: str, address: str) -> None:
        self._pool = pool
        self._node_id = node_id
        self._address = address
        self._loop = asyncio.get_running_loop()
        self.brake = Brake()
        self.watched: dict[int, int] = {}  # by watch: its attempt that was sent here last
        self.on_push: Callable[[NodeStream, tserver_pb2.KvPushPB], None] = lambda stream, push: None
        self.on_failed: Callable[[Iterable[int], SteleError], None] = lambda numbers, error: None
        self._next_id = 1
        self._queue: deque[tuple[int, bytes]] = deque()  # by ascending number
        self._waiting: dict[int, _Asked] = {}
        self._connection: FramedConnection | None = None
        self._flushing = False
        self.closed = False
        self.cut = False
        """Its task was cancelled, for example by a loop that ends. It dials again only if the loop goes
        on."""
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._look_at = math.inf  # when the timer fires

    def start(self, request: tserver_pb2.ClientRequest, timeout_s: float, ended: Ended) -> int:
        """Send a request under a new number, which is set in the request and returned.

        `ended` is called once, after this returned, unless `abandon` is called before. It gets the answer,
        the node's error, UNAVAILABLE if the stream broke, TIMED_OUT after `timeout_s`, NotSent if the request
        never left, or GivenUp after `give_up`. It must not raise.

        Raises:
            Closed: `close` was called.
            Rejected: TOO_LARGE.
        """
        if self.closed:
            raise Closed()
        request_id = self._next_id
        self._next_id += 1
        request.request_id = request_id
        raw = request.SerializeToString()
        if len(raw) > MESSAGE_BYTES_MAX:
            raise Rejected(
                f"the request has {len(raw)} bytes; at most {MESSAGE_BYTES_MAX} are allowed; send less at once",
                code=Code.TOO_LARGE,
            )
        until = self._loop.time() + timeout_s
        self._waiting[request_id] = (ended, until, timeout_s)
        self._queue.append((request_id, raw))
        if self._task is None or self._task.done():
            if not self.cut:
                self._task = self._loop.create_task(self._run())
        elif not self._flushing and self._connection is not None:
            self._flushing = True
            self._loop.call_soon(self._flush)
        if until < self._look_at:
            self._look_by(until)
        return request_id

    async def ask(self, request: tserver_pb2.ClientRequest, *, timeout_s: float) -> Response:
        """Send a request and wait for its answer. Raises the errors that `ended` of `start` gets."""
        future: asyncio.Future[Response | SteleError] = self._loop.create_future()
        request_id = self.start(request, timeout_s, partial(settle, future))
        try:
            end = await future
        finally:
            self.abandon(request_id)
            del future  # it may hold an error whose traceback holds this frame and the request
        if not isinstance(end, SteleError):
            return end
        try:
            raise end
        finally:
            del end

    async def close(self) -> None:
        """End the stream. Nothing can be asked any more."""
        self.closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail(Retryable(f"{self._address}: the client was closed"))
        if self._timer is not None:
            self._timer.cancel()

    def abandon(self, request_id: int) -> None:
        """Forget a request whose caller left. If it is still queued, it is not sent."""
        self._waiting.pop(request_id, None)

    def watches(self, number: int) -> None:
        """Record that a request to watch is about to be sent here, under this number."""
        self.watched[number >> _ATTEMPT_BITS] = number

    def stop_watch(self, number: int) -> None:
        """Tell the node to push nothing more under this number. Nobody waits for an answer."""
        if self._connection is not None and not self.closed:
            request = tserver_pb2.ClientRequest(watch=tserver_pb2.KvWatchRequest(number=number, stop=True))
            self.start(request, _DIAL_TIMEOUT_S, lambda end: None)

    def give_up(self, request_id: int, why: str) -> None:
        """End a waiting request: with GivenUp, or with NotSent if it never left."""
        self._end(request_id, GivenUp(f"{self._address} {why}", code=Code.TIMED_OUT))

    def _look_by(self, until: float) -> None:
        """Set the one timer for all waiting requests, to the earliest deadline."""
        if self._timer is not None:
            self._timer.cancel()
        self._look_at = until
        self._timer = self._loop.call_later(until - self._loop.time(), self._look)

    def _look(self) -> None:
        """End the requests whose deadline has passed."""
        self._timer, self._look_at = None, math.inf
        now = self._loop.time() + _EARLY_S
        late = [(number, after_s) for number, (_, until, after_s) in self._waiting.items() if until <= now]
        for request_id, after_s in late:
            why = f"{self._address} did not answer within {after_s:.1f} s"
            self._end(request_id, Retryable(why, code=Code.TIMED_OUT))
        first = min((until for _, until, _ in self._waiting.values()), default=math.inf)
        if first < self._look_at:
            self._look_by(first)

    def _end(self, request_id: int, error: Retryable) -> None:
        unsent = bool(self._queue) and request_id >= self._queue[0][0]
        asked = self._waiting.pop(request_id, None)  # a queued request that no longer waits is not sent
        if asked is not None:
            asked[0](NotSent(str(error.args[0])) if unsent else error)

    async def _run(self) -> None:
        """One connection, from dialling to its end. Then the waiting requests are failed."""
        error: SteleError = Retryable(f"{self._address}: the client was closed")
        try:
            await self._session()
        except SteleError as exc:
            let_go(exc)
            error = exc
        except asyncio.CancelledError:  # by `close`, or because the loop ends
            if not self.closed:
                self.cut = True
                self._loop.call_later(_REST_S, self._mend)
            raise
        finally:
            self._fail(error)
            del error
        # A request sent again at once would only meet the same refusal.
        await asyncio.sleep(_REST_S * (0.5 + random.random()))
        self._run_again()

    def _run_again(self) -> None:
        if any(request_id in self._waiting for request_id, _ in self._queue):
            self._task = self._loop.create_task(self._run())
        else:
            self._queue.clear()

    def _mend(self) -> None:
        """Dial again after the stream's task was cancelled: the client is open, and its loop goes on."""
        self.cut = False
        self._run_again()

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
        # Whatever ended the stream, sent requests may have been done.
        raise Retryable(f"{self._address} ended the stream{f': {why}' if why else ''}") from why

    async def _dial(self) -> FramedConnection:
        """Introduce this client over gRPC, then connect to the port that the node names."""
        if not self._address:  # masters that have just started may not have heard from the node
            raise Retryable(f"the masters do not know the address of node {self._node_id[:8]} yet")
        request = common_pb2.OpenStreamRequest(hello=self._pool.identity.hello(self._node_id))
        answer = await self._pool.unary(
            self._address, TabletServerServiceStub, "OpenClientStream", request, timeout_s=_DIAL_TIMEOUT_S
        )
        return await connect(self._address, answer.port, answer.key)

    def _answered(self, frames: list[bytes]) -> None:
        for raw in frames:
            response = Response.FromString(raw)
            for each in response.many.responses if response.WhichOneof("body") == "many" else (response,):
                # Bytes that are not an answer end the stream; until then their request waits with the others.
                end = error_from_pb(each.error) if each.HasField("error") else each
                asked = self._waiting.pop(each.request_id, None)
                if asked is not None:
                    asked[0](end)
                elif each.HasField("push"):
                    self.on_push(self, each.push)

    def _full(self, full: bool) -> None:
        if not full:
            self._flush()

    def _flush(self) -> None:
        self._flushing = False
        connection = self._connection
        if connection is None or connection.full or not connection.stands:
            return
        queue, self._queue = self._queue, deque()
        ready = deque([raw for request_id, raw in queue if request_id in self._waiting])
        while ready:
            connection.send(client_requests(ready))

    def _fail(self, error: SteleError) -> None:
        unsent_from = self._queue[0][0] if self._queue else self._next_id
        unsent = error if isinstance(error, Closed) else NotSent(str(error.args[0]), code=error.code)
        self._queue.clear()
        waiting, self._waiting = self._waiting, {}
        for request_id, (ended, _, _) in waiting.items():
            ended(unsent if request_id >= unsent_from else error)
        if self.watched:
            watched, self.watched = self.watched, {}
            self.on_failed(watched.values(), error)


def settle(future: asyncio.Future[Any], end: object) -> None:
    """Set a future's result, unless it has ended because the caller was cancelled."""
    if not future.done():
        future.set_result(end)
