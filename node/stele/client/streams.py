"""The client's half of ClientStream: one stream to each node, requests matched with answers by number.

Used by the writers and readers of tablets. Invariant: every request ends exactly once: with an answer, with `NotSent`
(it certainly never left this process), or with UNAVAILABLE or TIMED_OUT (the node may have it).
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import Any

import grpc

from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.model.ids import ClusterId
from stele.rpc.channels import MESSAGE_BYTES_MAX, dial
from stele.rpc.errors import error_from_pb, from_rpc_error
from stele.rpc.frames import client_requests
from stele.rpc.identity import Identity, caller_from_hello
from stele.rpc.proto import tserver_pb2

METHOD = "/stele.v1.TabletServerService/ClientStream"
_HELLO_TIMEOUT_S = 1.5
_REST_S = 0.05

Response = tserver_pb2.ClientResponse


class NotSent(Retryable):
    """There is no connection to this node: the request never left, so it was certainly not done."""


class Streams:
    """Streams by node id and address. One per client."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._streams: dict[tuple[str, str], NodeStream] = {}

    def to(self, node_id: str, address: str) -> NodeStream:
        """The stream to a node, dialled at the first request."""
        stream = self._streams.get((node_id, address))
        if stream is None:
            stream = self._streams[node_id, address] = NodeStream(self._identity, node_id, address)
        return stream

    async def close(self) -> None:
        """End all streams; what waits for an answer gets UNAVAILABLE."""
        streams, self._streams = list(self._streams.values()), {}
        await asyncio.gather(*(stream.close() for stream in streams))


class NodeStream:
    """One node. Dials when something is asked, again when something is asked after it broke."""

    def __init__(self, identity: Identity, node_id: str, address: str) -> None:
        self._identity = identity
        self._node_id = node_id
        self._address = address
        self._next_id = 1
        self._queue: deque[tuple[int, bytes]] = deque()
        self._waiting: dict[int, asyncio.Future[Response]] = {}
        self._sent: set[int] = set()
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def ask(self, request: tserver_pb2.ClientRequest, *, timeout_s: float) -> Response:
        """Send a request (its request_id is filled in here) and wait for its answer.

        Raises:
            NotSent: no connection to the node.
            SteleError: what the node answered; UNAVAILABLE if the stream broke; TIMED_OUT after `timeout_s`.
        """
        request_id = self._next_id
        self._next_id += 1
        request.request_id = request_id
        raw = request.SerializeToString()
        if len(raw) > MESSAGE_BYTES_MAX:
            raise Rejected(f"a request of {len(raw)} bytes; at most {MESSAGE_BYTES_MAX}", code=Code.TOO_LARGE)
        future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        self._queue.append((request_id, raw))
        self._wanted.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
        timer = asyncio.get_running_loop().call_later(timeout_s, self._timed_out, request_id, timeout_s)
        try:
            response = await future
        finally:
            timer.cancel()
            self._waiting.pop(request_id, None)
            self._sent.discard(request_id)
        if response.HasField("error"):
            raise error_from_pb(response.error)
        return response

    async def close(self) -> None:
        """End the stream."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _timed_out(self, request_id: int, timeout_s: float) -> None:
        future = self._waiting.get(request_id)
        if future is None or future.done():
            return
        message = f"{self._address} did not answer within {timeout_s:.1f} s"
        if request_id in self._sent:
            future.set_exception(Retryable(message, code=Code.TIMED_OUT))
        else:
            self._queue = deque(item for item in self._queue if item[0] != request_id)
            future.set_exception(NotSent(message))

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
        channel = await dial(self._address)
        try:
            call: Any = channel.stream_stream(METHOD)()
            await self._greet(call)
            reader = asyncio.ensure_future(self._read(call))
            writer = asyncio.ensure_future(self._write(call))
            try:
                done, _ = await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                reader.cancel()
                writer.cancel()
                await asyncio.gather(reader, writer, return_exceptions=True)
                call.cancel()
        except (grpc.RpcError, asyncio.InvalidStateError) as exc:
            raise from_rpc_error(exc, where=self._address) from exc
        except TimeoutError:
            raise Retryable(f"{self._address} did not say hello within {_HELLO_TIMEOUT_S} s") from None
        finally:
            await channel.close()

    async def _greet(self, call: Any) -> None:
        hello = tserver_pb2.ClientRequest(hello=self._identity.hello(self._node_id))
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            await call.write(hello.SerializeToString())
            raw = await call.read()
        if raw is grpc.aio.EOF:
            raise await _end_of(call, self._address)
        server = caller_from_hello(Response.FromString(raw).hello)
        if not self._identity.cluster_id:
            self._identity.cluster_id = ClusterId(server.cluster_id)

    async def _read(self, call: Any) -> None:
        while True:
            raw = await call.read()
            if raw is grpc.aio.EOF:
                raise await _end_of(call, self._address)
            response = Response.FromString(raw)
            for each in response.many.responses if response.WhichOneof("body") == "many" else (response,):
                future = self._waiting.get(each.request_id)
                if future is not None and not future.done():
                    future.set_result(each)

    async def _write(self, call: Any) -> None:
        while True:
            while self._queue:
                ready: deque[bytes] = deque()
                while self._queue:
                    request_id, raw = self._queue.popleft()
                    if request_id in self._waiting:
                        self._sent.add(request_id)
                        ready.append(raw)
                while ready:
                    await call.write(client_requests(ready))
            self._wanted.clear()
            await self._wanted.wait()

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


async def _end_of(call: Any, address: str) -> SteleError:
    """Why the node ended the stream."""
    trailing = grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )
    if trailing.code() is grpc.StatusCode.OK:
        return Retryable(f"{address} ended the stream")
    return from_rpc_error(trailing, where=address)
