"""A request to one tablet, from its first attempt to its end: finds the leader, retries, backs off. Used by
tablet.py.

Invariant: every attempt has the same bytes under the same number. A write without an answer ends as
UNKNOWN_OUTCOME, unless no attempt can have been proposed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from stele.client.leader_search import LeaderSearch
from stele.client.locations import MOVED, Locations, ReplicaPlace, TabletPlace
from stele.client.sequencer import Sequencer
from stele.client.streams import GivenUp, NodeStream, NotSent, Response, Streams
from stele.model.errors import Closed, Code, NotLeader, Rejected, Retryable, SteleError, let_go
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import tserver_pb2

BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.01, 0.1
LARGE_BYTES = 64 << 10
"""While a node refuses requests, a request of this size or more is not sent at once. It waits for its turn
(see stele.client.brake)."""
ATTEMPT_TIMEOUT_S = 2.0
"""The time limit of the first attempt. It doubles with each attempt that timed out."""
_ATTEMPT_AT_LEAST_S = 0.05
_INTERNAL_TRIES = 3

ELSEWHERE = frozenset(
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
SAME_AGAIN = frozenset((Code.THROTTLED, Code.NOT_READY, Code.DISK_FULL, Code.SNAPSHOT_NOT_READY))
REFRESH = frozenset(
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
"""Codes that a leader of any release gives only before it proposes. CHANGE_IN_PROGRESS may mean that an
earlier attempt of the same write is still under way. That one ends soon, so the request is sent again."""
_MAYBE_DONE = frozenset(
    (Code.UNAVAILABLE, Code.TIMED_OUT, Code.UNKNOWN_OUTCOME, Code.INTERNAL, Code.IO_ERROR)
)


class Way:
    """How to reach one tablet: where its replicas are, and which may lead. One per TabletClient."""

    def __init__(self, place: TabletPlace, locations: Locations, streams: Streams) -> None:
        self.search = LeaderSearch(place, locations, streams)
        self._place = place
        self.locations = locations
        self._streams = streams
        self._rng = random.Random()

    def reach(
        self, request: tserver_pb2.ClientRequest, timeout_s: float, sequencer: Sequencer | None
    ) -> tuple[ReplicaPlace, NodeStream]:
        """Choose a replica to ask, and address the request to it.

        Raises:
            SteleError: none can be asked, for now or for good.
        """
        target = self._place.target()
        self._address(request, timeout_s, sequencer)
        stream = self._streams.to(target.node_id, target.address)
        if request.HasField("watch"):
            stream.watches(request.watch.number)
        return target, stream

    async def go_on(
        self,
        request: tserver_pb2.ClientRequest,
        timeout_s: float,
        sequencer: Sequencer | None,
        deadline: float,
        target: ReplicaPlace | None,
        error: SteleError,
    ) -> Response | SteleError:
        """Make further attempts after a first one, to `target`, has failed. Returns the answer, or the error
        to raise.

        If `deadline` cuts an attempt off, the refusal before it is returned, because it says more."""
        attempt_s, backoff_s = ATTEMPT_TIMEOUT_S, BACKOFF_FIRST_S
        said, cut_off = error, False
        maybe_done, failures_inside = False, 0
        passed: set[str] = set()  # the nodes that were asked since the last rest

        def last_word(error: SteleError) -> SteleError:
            return _last_word(error, maybe_done, timeout_s - (deadline - time.monotonic()))

        while True:
            if self.locations.gone:
                return Rejected(self.locations.gone, code=Code.NOT_FOUND)
            if self._place.dropped:
                return Rejected(self._place.dropped, code=Code.TABLET_DELETED)
            if isinstance(error, Closed):
                return last_word(error)
            if sequencer is not None and error.code is Code.TOO_OLD and not maybe_done:
                sequencer.forgotten = True  # requests in progress keep the old client id
                if sequencer.known:
                    return Retryable(
                        f"the tablet has forgotten this client id: {error.args[0]}", code=Code.NO_QUORUM
                    )
                return Rejected(
                    f"this machine's clock is behind: to tablet {self._place.tablet_id[:8]} a new client id looks "
                    "like one that it has forgotten after 15 minutes; set the clock, then write again; nothing was done",
                    code=Code.CLOCK_BEHIND,
                )
            wait_s = error.retry_after_ms / 1_000
            if wait_s and error.code not in SAME_AGAIN and error.code not in ELSEWHERE:
                # A refusal that only time lifts, such as CLOCK_AHEAD by a little.
                if deadline - time.monotonic() - wait_s < _ATTEMPT_AT_LEAST_S:
                    return last_word(error)
            elif error.code in _NOT_PROPOSED and maybe_done:
                # This attempt was not proposed. That says nothing of those before it.
                if error.code is not Code.CHANGE_IN_PROGRESS:
                    return last_word(error)
            elif error.code not in ELSEWHERE and error.code not in SAME_AGAIN:
                return error
            maybe_done |= sequencer is not None and _may_be_done(error)
            if error.code is not Code.TIMED_OUT or not cut_off:
                said = error
            failures_inside += error.code in (Code.INTERNAL, Code.CORRUPT, Code.IO_ERROR)
            given_up = isinstance(error, GivenUp)
            if error.code is Code.TIMED_OUT and not given_up:
                attempt_s *= 2
            if deadline - time.monotonic() <= max(backoff_s, wait_s) or failures_inside >= _INTERNAL_TRIES:
                return last_word(said)
            passed.add(target.node_id if target is not None else "")
            at_once = given_up or await self._turn_to(target, error, passed)
            if not at_once and error.code is not Code.THROTTLED:
                passed.clear()
                await asyncio.sleep(max(wait_s, backoff_s * (0.5 + self._rng.random())))
                backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)
            # An attempt that cannot be answered in time would only make the outcome less certain.
            rest_s = deadline - time.monotonic()
            if rest_s < _ATTEMPT_AT_LEAST_S:
                return last_word(said)
            this_s = min(attempt_s, rest_s)
            cut_off = this_s < attempt_s
            target = None
            try:
                target, stream = self.reach(request, this_s, sequencer)
                if not stream.brake.on:
                    return await self._ask(request, this_s, target, stream)
                return await self._ask_by_turns(request, this_s, sequencer, deadline, target, stream)
            except TimeoutError:
                return last_word(said)
            except SteleError as exc:
                let_go(exc)
                error = exc

    async def _ask(
        self, request: tserver_pb2.ClientRequest, timeout_s: float, target: ReplicaPlace, stream: NodeStream
    ) -> Response:
        number = self.search.begin(target, stream, request)
        try:
            return await stream.ask(request, timeout_s=timeout_s)
        except SteleError as exc:
            if exc.code is Code.THROTTLED:
                stream.brake.refused(exc)
            raise
        finally:
            self.search.end(number)

    async def _ask_by_turns(
        self,
        request: tserver_pb2.ClientRequest,
        attempt_s: float,
        sequencer: Sequencer | None,
        deadline: float,
        target: ReplicaPlace,
        stream: NodeStream,
    ) -> Response:
        """As `_ask`, but first wait for this request's turn among the requests that the node refused. Raises
        TimeoutError if its turn did not come in time."""
        size = request.ByteSize()
        async with asyncio.timeout(deadline - time.monotonic() - _ATTEMPT_AT_LEAST_S):
            await stream.brake.begin(size)
        end: Code | None = None
        try:
            this_s = min(attempt_s, deadline - time.monotonic())
            self._address(request, this_s, sequencer)
            response = await self._ask(request, this_s, target, stream)
            end = Code.OK
            return response
        except SteleError as exc:
            end = exc.code
            raise
        finally:
            stream.brake.end(size, end)

    def _address(
        self, request: tserver_pb2.ClientRequest, timeout_s: float, sequencer: Sequencer | None
    ) -> None:
        """Set what differs between attempts. The node stops waiting a little before the caller does, so that
        it can say so in time."""
        deadline_ms = max(1, int(timeout_s * 900))
        kind = request.WhichOneof("body")
        tablet_id = id_to_pb(self._place.tablet_id)
        lowest_unfinished = 0 if sequencer is None else sequencer.lowest_unfinished()
        if kind == "write":
            write = request.write
            write.tablet_id = tablet_id
            write.deadline_ms = deadline_ms
            write.lowest_unfinished = lowest_unfinished
            write.tablet_incarnation = self._place.incarnation
        elif kind == "read":
            request.read.tablet_id = tablet_id
            request.read.deadline_ms = deadline_ms
            request.read.tablet_incarnation = self._place.incarnation
        elif kind == "watch":
            watch = request.watch
            watch.tablet_id = tablet_id
            watch.deadline_ms = deadline_ms
            watch.tablet_incarnation = self._place.incarnation
            watch.number += 1  # two nodes may both take it: the silent one and the next
        else:
            request.kv.tablet_id = tablet_id
            request.kv.deadline_ms = deadline_ms
            request.kv.lowest_unfinished = lowest_unfinished
            request.kv.tablet_incarnation = self._place.incarnation

    async def _turn_to(self, asked: ReplicaPlace | None, error: SteleError, passed: set[str]) -> bool:
        """Decide whom to ask next. True: ask at once, because a leader was named that was not asked just now."""
        same_again = error.code in (*SAME_AGAIN, Code.CHANGE_IN_PROGRESS) or error.retry_after_ms
        if same_again and asked is not None:
            return False
        if isinstance(error, NotLeader) and error.leader_hint and asked is not None:
            if error.leader_hint != asked.node_id and self._place.led_by(error.leader_hint):
                return error.leader_hint not in passed
        elif asked is not None:
            self._place.ask_next(asked)
            if error.code not in REFRESH:
                if error.code in MOVED or self._place.leader == 0:
                    self.locations.refresh_soon()
                return False
        try:
            await self.locations.refresh(timeout_s=1.0)
        except Closed:
            return False  # the error to raise depends on the earlier attempts
        except SteleError as exc:
            if isinstance(exc, Rejected) and exc.code is not Code.WRONG_CLUSTER:
                raise
            # The masters may be down while others have their addresses; until then the known replicas are
            # asked in turn.
        return False


class Asking:
    """One request to a tablet. `ended` is called once, in a later turn of the loop, with the answer or a
    SteleError.

    If the request is cancelled, `ended` gets a CancelledError, within `cancel` or in a later turn. The first
    attempt needs no task, and nearly every request ends with it. Later attempts use one.
    """

    __slots__ = (
        "_deadline",
        "_ended",
        "_number",
        "_request",
        "_sequencer",
        "_stream",
        "_target",
        "_task",
        "_timeout_s",
        "_way",
    )

    def __init__(
        self,
        way: Way,
        request: tserver_pb2.ClientRequest,
        timeout_s: float,
        ended: Callable[[Response | BaseException], None],
        sequencer: Sequencer | None,
    ) -> None:
        self._way = way
        self._request = request
        self._timeout_s = timeout_s
        self._ended = ended
        self._sequencer = sequencer
        self._deadline = time.monotonic() + timeout_s
        self._target: ReplicaPlace | None = None
        self._stream: NodeStream | None = None
        self._task: asyncio.Task[Response | SteleError] | None = None
        first_s = max(0.001, min(ATTEMPT_TIMEOUT_S, timeout_s))
        try:
            self._target, stream = way.reach(request, first_s, sequencer)
            if stream.brake.on and request.ByteSize() >= LARGE_BYTES:
                raise Retryable(
                    f"{self._target.address} is overloaded, and other requests wait for it already",
                    code=Code.THROTTLED,
                )
            stream.start(request, first_s, self._answered)
        except SteleError as exc:
            let_go(exc)
            self._go_on(exc)
        else:
            self._stream = stream
            self._number = way.search.begin(self._target, stream, request)

    def cancel(self) -> None:
        """Stop asking, unless the request has ended."""
        if self._task is not None:
            self._task.cancel()
        elif self._stream is not None:
            self._stream.abandon(self._request.request_id)
            self._left()
            self._ended(asyncio.CancelledError())

    def _left(self) -> None:
        """Forget the first attempt, which has ended."""
        self._stream = None
        self._way.search.end(self._number)

    def _answered(self, end: Response | SteleError) -> None:
        stream = self._stream
        self._left()
        if not isinstance(end, SteleError):
            self._end(end)
        elif stream is not None and (stream.closed or stream.cut) and end.code is Code.UNAVAILABLE:
            # Nothing can be asked now: a loop that ends runs no new task.
            maybe_done = self._sequencer is not None and _may_be_done(end)
            self._ended(_last_word(Closed(), maybe_done, 0.0))
        else:
            if stream is not None and end.code is Code.THROTTLED:
                stream.brake.refused(end)
            self._go_on(end)

    def _go_on(self, error: SteleError) -> None:
        others = self._way.go_on(
            self._request, self._timeout_s, self._sequencer, self._deadline, self._target, error
        )
        self._task = asyncio.get_running_loop().create_task(others)
        self._task.add_done_callback(self._others_ended)

    def _others_ended(self, task: asyncio.Task[Response | SteleError]) -> None:
        self._task = None
        if task.cancelled():
            self._ended(asyncio.CancelledError())
        else:
            error = task.exception()
            self._end(task.result() if error is None else error)

    def _end(self, end: Response | BaseException) -> None:
        """Report the end. Nothing is acknowledged for a table that this client has deleted meanwhile."""
        gone = self._way.locations.gone
        if gone and not isinstance(end, BaseException):
            end = Rejected(gone, code=Code.NOT_FOUND)
        self._ended(end)


def _may_be_done(error: SteleError) -> bool:
    """Whether an attempt that ended with `error` may have written."""
    return error.code in _MAYBE_DONE and not isinstance(error, NotSent)


def _last_word(error: SteleError, maybe_done: bool, waited_s: float) -> SteleError:
    if isinstance(error, Closed):
        told = "this client was closed before an answer came"
        if maybe_done:
            return Retryable(f"{told}; the write may have been done", code=Code.UNKNOWN_OUTCOME)
        return Closed(f"{told}; nothing was done")
    if maybe_done:
        return Retryable(
            f"no answer within {waited_s:.1f} s, and the write may have been done: {error.args[0]}; "
            "read before writing it again",
            code=Code.UNKNOWN_OUTCOME,
        )
    # Only the masters know whether the table itself is gone.
    if error.code in (Code.NOT_LEADER, Code.UNAVAILABLE) or error.code in REFRESH:
        return Retryable(
            f"found no leader within {waited_s:.1f} s: {error.args[0]}; nothing was done",
            code=Code.NO_QUORUM,
        )
    return error
