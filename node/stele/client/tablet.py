"""Requests to one tablet. Numbers its writes, so that each is applied once. One TabletClient per tablet and
client.

Invariant: a write keeps its client id, sequence and digest, however often it is sent (see attempts.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from stele.client.attempts import Asking, Way
from stele.client.durability import ASKED, Durability
from stele.client.locations import Locations, ReplicaPlace, TabletPlace
from stele.client.nearby import address
from stele.client.reshaping import reshaped
from stele.client.sequencer import Sequencer
from stele.client.streams import Response, Streams, Watching, settle
from stele.model.block import version_told
from stele.model.clock import from_physical_us, physical_us
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.model.ids import HybridTime
from stele.model.job import Attempt
from stele.model.writeop import HEADER_BYTES_MAX, WRITE_BYTES_MAX, digest
from stele.rpc.proto import tserver_pb2

_T = TypeVar("_T")
_READS = (
    tserver_pb2.KV_READ,
    tserver_pb2.KV_LIST,
    tserver_pb2.KV_LEASE_KEEP,
    tserver_pb2.KV_LEASES,
)
"""Operations on a key space that change nothing in its log."""

FAR_US = 60_000_000
"""A timestamp further ahead of this machine's clock than this is not used for reads of other tables."""


def is_far(timestamp: int) -> bool:
    """Whether a timestamp is more than FAR_US ahead of this machine's clock."""
    return physical_us(timestamp) > time.time_ns() // 1_000 + FAR_US


class Observed:
    """The highest hybrid time that any answer carried. Later reads must not be below it.

    A client has one. Each table has its own, which passes on to the client's (`of`) what it saw. A timestamp
    FAR_US or more ahead of this machine's clock stays with its table. It comes from a leader whose clock was
    wrong, and other tables cannot be read at that time.
    """

    __slots__ = ("__weakref__", "_of", "_timestamp")

    def __init__(self, of: Observed | None = None) -> None:
        self._of = of
        self._timestamp = 0

    @property
    def timestamp(self) -> int:
        """The highest hybrid time that this table or its client has seen."""
        return self._timestamp if self._of is None else max(self._timestamp, self._of.timestamp)

    def saw(self, timestamp: int) -> None:
        """Record a hybrid time."""
        if timestamp > self._timestamp:
            self._timestamp = timestamp
        of = self._of
        if of is not None and timestamp > of._timestamp and not is_far(timestamp):
            of.saw(timestamp)

    def now(self) -> HybridTime:
        """Return a hybrid time at or above all recorded ones, and not below the wall clock."""
        return HybridTime(max(int(from_physical_us(time.time_ns() // 1_000)), self.timestamp))


class TabletClient:
    """The tablet of one partition of an open table."""

    def __init__(
        self, place: TabletPlace, locations: Locations, streams: Streams, observed: Observed
    ) -> None:
        self.place = place
        self._streams = streams
        self._observed = observed
        self._way = Way(place, locations, streams)
        self._latest = Sequencer()
        self.seen = 0
        """The hybrid time of the newest write that this client has written to the tablet, or has seen there."""

    def ensure_open(self) -> None:
        """Raises Closed if the client was closed, or is being closed."""
        self._streams.ensure_open()

    async def write(
        self,
        block: bytes,
        *,
        timeout_s: float,
        attempt: Attempt | None = None,
        durability: Durability = Durability.SYNCED,
    ) -> tserver_pb2.WriteResponse:
        """Write a block exactly once, whatever happens on the way. `attempt`: as part of a job. `durability`: what is enough.

        Raises:
            Rejected: the whole block is refused.
            Retryable: UNKNOWN_OUTCOME: it may have been written. NO_QUORUM and other codes: it was not.
            Closed: the client was closed before anything was written.
        """
        future: asyncio.Future[tserver_pb2.WriteResponse | BaseException] = (
            asyncio.get_running_loop().create_future()
        )
        return await _end_of(
            future, self.start_write(block, timeout_s, partial(settle, future), attempt, durability)
        )

    def start_write(
        self,
        block: bytes,
        timeout_s: float,
        ended: Callable[[tserver_pb2.WriteResponse | BaseException], None],
        attempt: Attempt | None = None,
        durability: Durability = Durability.SYNCED,
    ) -> Writing:
        """As `write`, without waiting. `ended` is called once, after this returned, with the answer or the
        error of `write`.

        `ended` must not raise.

        Raises:
            Rejected: TOO_LARGE: no leader accepts so much; nothing was sent.
        """
        return Writing(self, block, timeout_s, ended, attempt, durability)

    async def without_dropped(self, block: bytes, timeout_s: float) -> bytes:
        """Return the block without the columns that were dropped since it was made, by the masters' present
        answer.

        Raises:
            Rejected: SCHEMA_MISMATCH: rows have values for them. NOT_FOUND: the table is gone.
            Retryable: NO_QUORUM: no master answered within `timeout_s`; nothing was done.
        """
        locations, deadline = self._way.locations, time.monotonic() + timeout_s
        while True:
            try:
                await locations.refresh(timeout_s=max(0.0, deadline - time.monotonic()))
                break
            except Retryable as exc:
                if time.monotonic() >= deadline:
                    raise Retryable(
                        f"the table's columns have changed, and no master said how within {timeout_s:.1f} s: "
                        f"{exc.args[0]}; nothing was done",
                        code=Code.NO_QUORUM,
                    ) from exc
        locations.outdated = True
        made_with = locations.schemas.get(version_told(block))
        if made_with is None or locations.newest_schema is None:
            raise Rejected("the schema has changed; open the table again", code=Code.SCHEMA_MISMATCH)
        return reshaped(block, made_with, locations.newest_schema)

    def start_block(
        self,
        block: bytes,
        timeout_s: float,
        ended: Callable[[tserver_pb2.WriteResponse | BaseException], None],
        attempt: Attempt | None,
        durability: Durability,
    ) -> Asking:
        """As `start_write`, but the block is sent as it is, also if columns have changed."""
        if HEADER_BYTES_MAX + len(block) > WRITE_BYTES_MAX:
            raise Rejected(
                f"the write has {HEADER_BYTES_MAX + len(block)} bytes; at most {WRITE_BYTES_MAX} are allowed; "
                "send smaller ones",
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
            if answer.timestamp > self.seen:
                self.seen = answer.timestamp
            ended(answer)

        try:
            request = tserver_pb2.ClientRequest()
            write = request.write
            write.client_id = client_id
            write.sequence = sequence
            write.first_attempt_us = made_us
            write.digest = digest(block)
            write.block = block
            if durability is not Durability.SYNCED:
                write.durability = ASKED[durability]
            if attempt is not None:
                write.attempt.job, write.attempt.made_us = attempt.job, attempt.made_us
                write.attempt.part, write.attempt.number = attempt.part, attempt.number
            return self._start(request, timeout_s, told, sequencer)
        except BaseException:
            sequencer.finish(sequence)
            raise

    async def read(self, request: tserver_pb2.ReadRequest, *, timeout_s: float) -> tserver_pb2.ReadResponse:
        """Read rows by key at the leader. Raises SteleError; TIMED_OUT or NO_QUORUM if no answer came in
        time."""
        return (await self.ask_leader(tserver_pb2.ClientRequest(read=request), timeout_s)).read

    async def ask_leader(self, request: tserver_pb2.ClientRequest, timeout_s: float) -> Response:
        """Read rows or keys at the leader. Raises what `read` raises."""
        return self._saw(await self._ask(request, timeout_s))

    async def ask_at(
        self, replica: ReplicaPlace, request: tserver_pb2.ClientRequest, *, timeout_s: float
    ) -> Response:
        """Read rows or keys at one replica, with one attempt. Raises SteleError."""
        address(request, self.place, timeout_s)
        stream = self._streams.to(replica.node_id, replica.address)
        return self._saw(await stream.ask(request, timeout_s=timeout_s))

    def _saw(self, response: Response) -> Response:
        answer = response.kv if response.HasField("kv") else response.read
        self.seen = max(self.seen, answer.newest)
        if response.HasField("read"):
            self._observed.saw(response.read.snapshot)
        return response

    def refresh_soon(self) -> None:
        """As `Locations.refresh_soon`."""
        self._way.locations.refresh_soon()

    async def kv(self, request: tserver_pb2.KvRequest, *, timeout_s: float) -> tserver_pb2.KvResponse:
        """Do an operation on a key space. Raises what `write` and `read` raise."""
        if request.op in _READS:
            return (await self.ask_leader(tserver_pb2.ClientRequest(kv=request), timeout_s)).kv
        sequencer = self._sequencer()
        request.client_id, request.first_attempt_us, request.sequence = sequencer.begin()
        try:
            answer = await self._ask(tserver_pb2.ClientRequest(kv=request), timeout_s, sequencer)
        finally:
            sequencer.finish(request.sequence)
        sequencer.known = True
        return self._saw(answer).kv

    async def watch(
        self, request: tserver_pb2.KvWatchRequest, *, timeout_s: float
    ) -> tserver_pb2.KvWatchResponse:
        """Begin to watch keys. Afterwards `request` has the number of the last attempt. Raises what `read` raises."""
        asked = tserver_pb2.ClientRequest(watch=request)  # a copy
        try:
            return (await self._ask(asked, timeout_s)).watch
        finally:
            request.number = asked.watch.number

    def add_watch(self, watch: Watching) -> int:
        """As `Streams.add_watch`."""
        return self._streams.add_watch(watch)

    def remove_watch(self, number: int) -> None:
        """As `Streams.remove_watch`."""
        self._streams.remove_watch(number)

    def in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """As `Streams.in_background`."""
        return self._streams.in_background(work)

    @property
    def cluster_version(self) -> int:
        """The cluster version, as the masters said last."""
        return self._way.locations.cluster_version

    def _sequencer(self) -> Sequencer:
        """The sequencer for the next write."""
        if self._latest.forgotten:
            self._latest = Sequencer()
        return self._latest

    async def _ask(
        self, request: tserver_pb2.ClientRequest, timeout_s: float, sequencer: Sequencer | None = None
    ) -> Response:
        """Send a request, again and again where it may help, until an answer, a refusal or the deadline.

        `sequencer`: for a write, the one that gave it its number.
        """
        future: asyncio.Future[Response | BaseException] = asyncio.get_running_loop().create_future()
        return await _end_of(future, self._start(request, timeout_s, partial(settle, future), sequencer))

    def _start(
        self,
        request: tserver_pb2.ClientRequest,
        timeout_s: float,
        ended: Callable[[Response | BaseException], None],
        sequencer: Sequencer | None,
    ) -> Asking:
        """Start any request to this tablet."""
        return Asking(self._way, request, timeout_s, ended, sequencer)


class Writing:
    """One write: its block, and if columns were dropped meanwhile, the block without them."""

    __slots__ = ("_asking", "_attempt", "_block", "_deadline", "_durability", "_ended", "_tablet", "_task")

    def __init__(
        self,
        tablet: TabletClient,
        block: bytes,
        timeout_s: float,
        ended: Callable[[tserver_pb2.WriteResponse | BaseException], None],
        attempt: Attempt | None,
        durability: Durability,
    ) -> None:
        self._durability = durability
        self._tablet = tablet
        self._block = block
        self._attempt = attempt
        self._deadline = time.monotonic() + timeout_s
        self._ended = ended
        self._task: asyncio.Task[bytes] | None = None
        self._asking: Asking | None = tablet.start_block(block, timeout_s, self._told, attempt, durability)

    def cancel(self) -> None:
        """Stop, unless it has ended."""
        if self._task is not None:
            self._task.cancel()
        elif self._asking is not None:
            self._asking.cancel()

    def _told(self, end: tserver_pb2.WriteResponse | BaseException) -> None:
        self._asking = None  # it holds this method
        rest_s = self._deadline - time.monotonic()
        if isinstance(end, SteleError) and end.code is Code.SCHEMA_MISMATCH and rest_s > 0:
            making = self._tablet.without_dropped(self._block, rest_s)
            self._task = asyncio.get_running_loop().create_task(making)
            self._task.add_done_callback(self._made)
        else:
            self._ended(end)

    def _made(self, task: asyncio.Task[bytes]) -> None:
        """Send the block that was made again without the dropped columns. It is another write, with a number
        of its own."""
        self._task = None
        if task.cancelled():
            self._ended(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self._ended(error)
        else:
            rest_s = max(0.001, self._deadline - time.monotonic())
            try:
                self._asking = self._tablet.start_block(
                    task.result(), rest_s, self._ended, self._attempt, self._durability
                )
            except SteleError as exc:
                self._ended(exc)


async def _end_of(future: asyncio.Future[_T | BaseException], asking: Asking | Writing) -> _T:
    """Wait for the end of a request in `future`: return its answer, or raise its error. Cancels `asking` if cancelled."""
    try:
        end = await future
    except asyncio.CancelledError:
        asking.cancel()
        raise
    finally:
        del future, asking  # the end may be an error whose traceback holds this frame, and so the block
    if not isinstance(end, BaseException):
        return end
    try:
        raise end
    finally:
        del end
