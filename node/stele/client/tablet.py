"""Requests to one tablet: numbers writes, so that they are applied once. One TabletClient per tablet and client.

Invariant: a write has one client id, sequence and digest, however often it is sent (see attempts.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from stele.client.attempts import Asking, Way
from stele.client.locations import Locations, TabletPlace
from stele.client.sequencer import Sequencer
from stele.client.streams import Response, Streams, settle
from stele.model.clock import from_physical_us, physical_us
from stele.model.errors import Code, Rejected
from stele.model.ids import HybridTime
from stele.model.writeop import HEADER, WRITE_BYTES_MAX, digest
from stele.rpc.proto import tserver_pb2

_T = TypeVar("_T")

FAR_US = 60_000_000
"""A timestamp further ahead of this machine's clock than this says nothing of the present of other tables."""


def is_far(timestamp: int) -> bool:
    """Whether a timestamp lies further ahead of this machine's clock than FAR_US."""
    return physical_us(timestamp) > time.time_ns() // 1_000 + FAR_US


class Observed:
    """The highest hybrid time any answer carried: what a later read must not be below.

    A client has one, and each table one `of` it, which tells it what it saw. But what lies FAR_US ahead of this machine's
    clock stays with its table: some leader's clock was wrong, and no other table could be read at that time.
    """

    __slots__ = ("__weakref__", "_of", "_timestamp")

    def __init__(self, of: Observed | None = None) -> None:
        self._of = of
        self._timestamp = 0

    @property
    def timestamp(self) -> int:
        """The highest one, of the whole client too."""
        return self._timestamp if self._of is None else max(self._timestamp, self._of.timestamp)

    def saw(self, timestamp: int) -> None:
        """Take note of a timestamp."""
        if timestamp > self._timestamp:
            self._timestamp = timestamp
        of = self._of
        if of is not None and timestamp > of._timestamp and not is_far(timestamp):
            of.saw(timestamp)

    def now(self) -> HybridTime:
        """At or above all of them, and not below the wall clock."""
        return HybridTime(max(int(from_physical_us(time.time_ns() // 1_000)), self.timestamp))


class TabletClient:
    """The tablet of one part of an open table."""

    def __init__(
        self, place: TabletPlace, locations: Locations, streams: Streams, observed: Observed
    ) -> None:
        self.place = place
        self._streams = streams
        self._observed = observed
        self._way = Way(place, locations, streams)
        self._latest = Sequencer()

    def ensure_open(self) -> None:
        """Raises Closed once the client was closed, or is being closed."""
        self._streams.ensure_open()

    async def write(self, block: bytes, *, timeout_s: float) -> tserver_pb2.WriteResponse:
        """Write a block, once, whatever happens on the way.

        Raises:
            Rejected: the block as a whole is refused.
            Retryable: NO_QUORUM and the like if it was certainly not done; UNKNOWN_OUTCOME if it may have been.
            Closed: the client was closed before anything was done.
        """
        future: asyncio.Future[tserver_pb2.WriteResponse | BaseException] = (
            asyncio.get_running_loop().create_future()
        )
        return await _end_of(future, self.start_write(block, timeout_s, partial(settle, future)))

    def start_write(
        self,
        block: bytes,
        timeout_s: float,
        ended: Callable[[tserver_pb2.WriteResponse | BaseException], None],
    ) -> Asking:
        """Like `write`. `ended` is told once, later than this returns: the answer, or what `write` would raise. It must not
        raise.

        Raises:
            Rejected: TOO_LARGE, no leader takes so much; nothing was sent.
        """
        if HEADER.size + len(block) > WRITE_BYTES_MAX:
            raise Rejected(
                f"write of {HEADER.size + len(block)} bytes; at most {WRITE_BYTES_MAX}: send smaller ones",
                code=Code.TOO_LARGE,
            )
        sequencer = self._sequencer()
        client_id, made_us, sequence = sequencer.begin()

        def told(end: Response | BaseException) -> None:
            sequencer.finish(sequence)
            if isinstance(end, BaseException):
                ended(end)
                return
            sequencer.known = True
            answer = end.write
            self._observed.saw(answer.timestamp)
            ended(answer)

        try:
            request = tserver_pb2.ClientRequest()
            write = request.write
            write.client_id = client_id
            write.sequence = sequence
            write.first_attempt_us = made_us
            write.digest = digest(block)
            write.block = block
            return self._start(request, timeout_s, told, sequencer)
        except BaseException:
            sequencer.finish(sequence)
            raise

    async def read(self, request: tserver_pb2.ReadRequest, *, timeout_s: float) -> tserver_pb2.ReadResponse:
        """Point reads. Raises SteleError; a read that got no answer in time is TIMED_OUT or NO_QUORUM."""
        response = await self._ask(tserver_pb2.ClientRequest(read=request), timeout_s)
        self._observed.saw(response.read.snapshot)
        return response.read

    async def kv(self, request: tserver_pb2.KvRequest, *, timeout_s: float) -> tserver_pb2.KvResponse:
        """A key space operation. Raises as `write` and `read` do."""
        changes = request.op not in (tserver_pb2.KV_READ, tserver_pb2.KV_LIST)
        if not changes:
            return (await self._ask(tserver_pb2.ClientRequest(kv=request), timeout_s)).kv
        sequencer = self._sequencer()
        request.client_id, request.first_attempt_us, request.sequence = sequencer.begin()
        try:
            answer = await self._ask(tserver_pb2.ClientRequest(kv=request), timeout_s, sequencer)
        finally:
            sequencer.finish(request.sequence)
        sequencer.known = True
        return answer.kv

    def _sequencer(self) -> Sequencer:
        """What numbers the next write."""
        if self._latest.forgotten:
            self._latest = Sequencer()
        return self._latest

    async def _ask(
        self, request: tserver_pb2.ClientRequest, timeout_s: float, sequencer: Sequencer | None = None
    ) -> Response:
        """Attempts until an answer, a refusal, or the deadline. `sequencer`: of a write, what numbered it."""
        future: asyncio.Future[Response | BaseException] = asyncio.get_running_loop().create_future()
        return await _end_of(future, self._start(request, timeout_s, partial(settle, future), sequencer))

    def _start(
        self,
        request: tserver_pb2.ClientRequest,
        timeout_s: float,
        ended: Callable[[Response | BaseException], None],
        sequencer: Sequencer | None,
    ) -> Asking:
        """All that this asks goes by here."""
        return Asking(self._way, request, timeout_s, ended, sequencer)


async def _end_of(future: asyncio.Future[_T | BaseException], asking: Asking) -> _T:
    """What a request ends with, as it is told to `future`."""
    try:
        end = await future
    except asyncio.CancelledError:
        asking.cancel()
        raise
    finally:
        del future, asking  # the end may be an error, whose traceback holds this frame, and that the block
    if not isinstance(end, BaseException):
        return end
    try:
        raise end
    finally:
        del end
