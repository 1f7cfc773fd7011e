"""Requests to one tablet: finds its leader, retries, backs off, and applies once. One per tablet and client.

Invariant: every attempt of a write carries the same client id, sequence and bytes, and a write that ended without an
answer is called UNKNOWN_OUTCOME, unless no attempt can have been proposed.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from dataclasses import dataclass, field

from stele.client.leader_search import LeaderSearch
from stele.client.locations import MOVED, Locations, ReplicaPlace, TabletPlace
from stele.client.streams import GivenUp, NotSent, Streams
from stele.model.clock import from_physical_us, physical_us
from stele.model.errors import Closed, Code, NotLeader, Rejected, Retryable, SteleError, let_go
from stele.model.ids import HybridTime
from stele.model.writeop import digest
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import tserver_pb2

BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.01, 0.1
ATTEMPT_TIMEOUT_S = 2.0
"""The first attempt's; doubled with each that timed out."""
_ATTEMPT_AT_LEAST_S = 0.05
CLIENT_ID_IDLE_S = 300.0
"""Nodes forget a client id after 15 idle minutes (stele.tablet.exactly_once); ours is new long before."""
_INTERNAL_TRIES = 3

_ELSEWHERE = frozenset(
    (
        Code.NOT_LEADER,
        Code.UNAVAILABLE,
        Code.NOT_FOUND,
        Code.TABLET_DELETED,
        Code.WRONG_NODE,
        Code.WRONG_CLUSTER,
        Code.STALE_INCARNATION,
        Code.STEPPING_DOWN,
        Code.CORRUPT,
        Code.IO_ERROR,
        Code.INTERNAL,
        Code.TIMED_OUT,
        Code.NO_QUORUM,
        Code.UNKNOWN_OUTCOME,
    )
)
_SAME_AGAIN = frozenset((Code.THROTTLED, Code.NOT_READY, Code.DISK_FULL, Code.SNAPSHOT_NOT_READY))
_REFRESH = frozenset(
    (Code.NOT_FOUND, Code.TABLET_DELETED, Code.WRONG_NODE, Code.WRONG_CLUSTER, Code.STALE_INCARNATION)
)
_NOT_PROPOSED = frozenset(
    (
        Code.CHANGE_IN_PROGRESS,
        Code.SCHEMA_MISMATCH,
        Code.CLOCK_AHEAD,
        Code.TOO_LARGE,
        Code.INVALID_ARGUMENT,
        Code.UNSUPPORTED_VERSION,
        Code.DIGEST_MISMATCH,
    )
)
"""Told before proposing, also of what a leader of another release took. CHANGE_IN_PROGRESS may be an earlier attempt of the
same write, which ends soon."""
_MAYBE_DONE = frozenset(
    (Code.UNAVAILABLE, Code.TIMED_OUT, Code.UNKNOWN_OUTCOME, Code.INTERNAL, Code.IO_ERROR)
)

FAR_US = 60_000_000
"""A timestamp further ahead of this machine's clock than this says nothing of the present of other tables."""


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
        if (
            of is not None
            and timestamp > of._timestamp
            and physical_us(timestamp) <= time.time_ns() // 1_000 + FAR_US
        ):
            of.saw(timestamp)

    def now(self) -> HybridTime:
        """At or above all of them, and not below the wall clock."""
        return HybridTime(max(int(from_physical_us(time.time_ns() // 1_000)), self.timestamp))


@dataclass(slots=True)
class Sequencer:
    """Numbers the writes to one tablet under one client id, and knows which are unfinished."""

    client_id: bytes = b""
    made_us: int = 0
    known: bool = False
    """Whether the tablet has taken a write under this client id."""
    _next: int = 1
    _unfinished: dict[int, None] = field(default_factory=dict)
    _used_at: float = 0.0

    def begin(self) -> tuple[bytes, int, int]:
        """(client id, its making in µs since 1970, sequence) of a new write. `finish` it under the same id."""
        now = time.monotonic()
        if not self._unfinished and (not self.client_id or now - self._used_at > CLIENT_ID_IDLE_S):
            self.client_id, self.made_us, self._next = os.urandom(16), time.time_ns() // 1_000, 1
            self.known = False
        self._used_at = now
        sequence = self._next
        self._next += 1
        self._unfinished[sequence] = None
        return self.client_id, self.made_us, sequence

    def finish(self, sequence: int) -> None:
        """This write will not be sent again."""
        self._unfinished.pop(sequence, None)

    def lowest_unfinished(self) -> int:
        """The lowest sequence that may still be sent."""
        return next(iter(self._unfinished), self._next)


class TabletClient:
    """The tablet of one part of an open table."""

    def __init__(
        self, place: TabletPlace, locations: Locations, streams: Streams, observed: Observed
    ) -> None:
        self.place = place
        self._locations = locations
        self._streams = streams
        self._observed = observed
        self._search = LeaderSearch(place, locations, streams)
        self._sequencer = Sequencer()
        self._rng = random.Random()

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
        sequencer = self._sequencer
        client_id, made_us, sequence = sequencer.begin()
        request = tserver_pb2.WriteRequest(
            client_id=client_id,
            sequence=sequence,
            first_attempt_us=made_us,
            digest=digest(block),
            block=block,
        )
        try:
            response = await self._ask(tserver_pb2.ClientRequest(write=request), timeout_s, sequencer)
        finally:
            sequencer.finish(sequence)
        sequencer.known = True
        self._observed.saw(response.write.timestamp)
        return response.write

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
        sequencer = self._sequencer
        request.client_id, request.first_attempt_us, request.sequence = sequencer.begin()
        try:
            answer = await self._ask(tserver_pb2.ClientRequest(kv=request), timeout_s, sequencer)
        finally:
            sequencer.finish(request.sequence)
        sequencer.known = True
        return answer.kv

    async def _ask(
        self, request: tserver_pb2.ClientRequest, timeout_s: float, sequencer: Sequencer | None = None
    ) -> tserver_pb2.ClientResponse:
        """Attempts until an answer, a refusal, or the deadline. `sequencer`: of a write, what numbered it."""
        end = await self._attempts(request, timeout_s, sequencer)
        if not isinstance(end, SteleError):
            return end
        try:
            raise end
        finally:
            del end  # its traceback holds this frame, and that the block

    async def _attempts(
        self, request: tserver_pb2.ClientRequest, timeout_s: float, sequencer: Sequencer | None
    ) -> tserver_pb2.ClientResponse | SteleError:
        """The answer, or what is to be raised."""
        deadline = time.monotonic() + timeout_s
        attempt_s, backoff_s = ATTEMPT_TIMEOUT_S, BACKOFF_FIRST_S
        maybe_done, failures_inside = False, 0
        while True:
            rest_s = deadline - time.monotonic()
            this_s = max(0.001, min(attempt_s, rest_s))
            target: ReplicaPlace | None = None
            try:
                target = self.place.target()
                self._address(request, this_s, sequencer)
                stream = self._streams.to(target.node_id, target.address)
                number = self._search.begin(target, stream, request)
                try:
                    return await stream.ask(request, timeout_s=this_s)
                finally:
                    self._search.end(number)
            except Closed as exc:
                return _last_word(exc, maybe_done, timeout_s)
            except SteleError as exc:
                let_go(exc)
                error = exc
            if sequencer is not None and error.code is Code.TOO_OLD and not maybe_done:
                if self._sequencer is sequencer:
                    self._sequencer = Sequencer()  # what is under way under the old id ends under it
                if sequencer.known:
                    return Retryable(
                        f"the tablet has forgotten this client id: {error.args[0]}", code=Code.NO_QUORUM
                    )
                return Rejected(
                    f"this machine's clock is behind: client ids that it makes now are older than those that tablet "
                    f"{self.place.tablet_id} has forgotten after 15 minutes; set it right, then write again; nothing was "
                    "done",
                    code=Code.CLOCK_BEHIND,
                )
            if error.code in _NOT_PROPOSED and maybe_done:
                # This attempt was not proposed, and says nothing of those before it.
                if error.code is not Code.CHANGE_IN_PROGRESS:
                    return _last_word(error, maybe_done, timeout_s)
            elif error.code not in _ELSEWHERE and error.code not in _SAME_AGAIN:
                return error
            maybe_done |= (
                sequencer is not None and error.code in _MAYBE_DONE and not isinstance(error, NotSent)
            )
            failures_inside += error.code in (Code.INTERNAL, Code.CORRUPT, Code.IO_ERROR)
            given_up = isinstance(error, GivenUp)
            if error.code is Code.TIMED_OUT and not given_up:
                attempt_s *= 2
            if deadline - time.monotonic() <= backoff_s or failures_inside >= _INTERNAL_TRIES:
                return _last_word(error, maybe_done, timeout_s)
            at_once = given_up or await self._turn_to(target, error)
            if not at_once:
                await asyncio.sleep(backoff_s * (0.5 + self._rng.random()))
                backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)
            # An attempt without time to be answered would only blur what is known.
            if deadline - time.monotonic() < _ATTEMPT_AT_LEAST_S:
                return _last_word(error, maybe_done, timeout_s)

    def _address(
        self, request: tserver_pb2.ClientRequest, timeout_s: float, sequencer: Sequencer | None
    ) -> None:
        """What changes from attempt to attempt. The node stops waiting a little before we do, so that it can say so."""
        deadline_ms = max(1, int(timeout_s * 900))
        kind = request.WhichOneof("body")
        tablet_id = id_to_pb(self.place.tablet_id)
        lowest_unfinished = 0 if sequencer is None else sequencer.lowest_unfinished()
        if kind == "write":
            request.write.tablet_id = tablet_id
            request.write.deadline_ms = deadline_ms
            request.write.lowest_unfinished = lowest_unfinished
            request.write.tablet_incarnation = self.place.incarnation
        elif kind == "read":
            request.read.tablet_id = tablet_id
            request.read.deadline_ms = deadline_ms
        else:
            request.kv.tablet_id = tablet_id
            request.kv.deadline_ms = deadline_ms
            request.kv.lowest_unfinished = lowest_unfinished

    async def _turn_to(self, asked: ReplicaPlace | None, error: SteleError) -> bool:
        """Decide whom to ask next. True: at once, a leader was named."""
        if error.code in (*_SAME_AGAIN, Code.CHANGE_IN_PROGRESS) and asked is not None:
            return False
        if isinstance(error, NotLeader) and error.leader_hint and asked is not None:
            if error.leader_hint != asked.node_id and self.place.led_by(error.leader_hint):
                return True
        elif asked is not None:
            self.place.ask_next(asked)
            if error.code not in _REFRESH:
                if error.code in MOVED or self.place.leader == 0:
                    self._locations.refresh_soon()
                return False
        try:
            await self._locations.refresh(timeout_s=1.0)
        except Closed:
            return False  # what is to be said of it depends on the attempts before
        except SteleError as exc:
            if isinstance(exc, Rejected) and exc.code is not Code.WRONG_CLUSTER:
                raise
            # The masters may be away, and others have their addresses; the replicas known so far are asked in turn.
        return False


def _last_word(error: SteleError, maybe_done: bool, timeout_s: float) -> SteleError:
    if isinstance(error, Closed):
        told = "this client was closed before there was an answer"
        if maybe_done:
            return Retryable(f"{told}; the write may have been done", code=Code.UNKNOWN_OUTCOME)
        return Closed(f"{told}; nothing was done")
    if maybe_done:
        return Retryable(
            f"no answer within {timeout_s:.1f} s, and the write may have been done: {error.args[0]}; "
            "read before writing it anew",
            code=Code.UNKNOWN_OUTCOME,
        )
    # That the table itself is gone the masters alone can tell.
    if error.code in (Code.NOT_LEADER, Code.UNAVAILABLE) or error.code in _REFRESH:
        return Retryable(
            f"no leader found within {timeout_s:.1f} s: {error.args[0]}; nothing was done",
            code=Code.NO_QUORUM,
        )
    return error
