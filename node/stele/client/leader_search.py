"""Finds the present leader of a tablet by asking its other replicas, while the presumed leader is silent.

One per TabletClient. A leader that is cut off or stopped refuses nothing, and its connection stays open until
pings fail. The others have long elected a new leader by then.

Invariants: a request is abandoned only if another replica leads in the newest term that any replica reported.
The silent leader is asked, too. A request is never abandoned because a leader is slow. A tablet has one
search at a time, a client a few. While answers stay late, the pause after each search grows.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from stele.client.locations import Locations, ReplicaPlace, TabletPlace
from stele.client.streams import NodeStream, Streams
from stele.model.errors import SteleError
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.proto import consensus_pb2, tserver_pb2
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub

SLOW_S = 0.4
"""How long a request may wait for an answer before the other replicas are asked."""
_REST_FIRST_S, _REST_MAX_S = 0.2, 1.6
_SEARCH_TIMEOUT_S = 1.0
_GRACE_S = 0.1
"""How long to wait for a newer term after a replica has named a leader."""
_CALL_TIMEOUT_S = 30.0
"""The time limit of one call. It is longer than the search, because a call that times out closes its
connection, which other calls share."""


@dataclass(slots=True)
class _Attempt:
    """A waiting request. The request contains its number at the stream."""

    since: float
    target: ReplicaPlace
    stream: NodeStream
    request: tserver_pb2.ClientRequest


class LeaderSearch:
    """Watches a tablet's requests that wait for an answer."""

    def __init__(self, place: TabletPlace, locations: Locations, streams: Streams) -> None:
        self._place = place
        self._locations = locations
        self._streams = streams
        self._loop = asyncio.get_running_loop()
        self._attempts: dict[int, _Attempt] = {}  # oldest first
        self._next = 0
        self._term = 0  # the newest term that a replica has reported
        self._rest_s = _REST_FIRST_S
        self._timer: asyncio.TimerHandle | None = None
        self._search: asyncio.Task[None] | None = None

    def begin(self, target: ReplicaPlace, stream: NodeStream, request: tserver_pb2.ClientRequest) -> int:
        """Note that a request is about to be sent. Returns a number to pass to `end` when the request no
        longer waits."""
        self._next += 1
        self._attempts[self._next] = _Attempt(self._loop.time(), target, stream, request)
        if self._timer is None and self._search is None:
            self._timer = self._loop.call_later(SLOW_S, self._look)
        return self._next

    def end(self, number: int) -> None:
        """Note that the request was answered, or failed."""
        del self._attempts[number]

    def _look(self) -> None:
        """Search if the oldest request has waited long. Runs again as long as a request waits."""
        self._timer = None
        if not self._attempts:
            return
        waited_s = self._loop.time() - next(iter(self._attempts.values())).since
        if waited_s < SLOW_S:
            self._rest_s = max(self._rest_s / 2, _REST_FIRST_S)
            self._timer = self._loop.call_later(SLOW_S - waited_s, self._look)
        elif not self._streams.closed:
            self._search = self._streams.in_background(self._find())
            self._search.add_done_callback(self._searched)

    def _searched(self, search: asyncio.Task[None]) -> None:
        self._search = None
        self._timer = self._loop.call_later(self._rest_s * (0.5 + random.random()), self._look)
        self._rest_s = min(2 * self._rest_s, _REST_MAX_S)
        if not search.cancelled():
            search.result()

    async def _find(self) -> None:
        place = self._place
        async with self._streams.searches:
            term, leader = await find_leader(self._streams.pool, place)
        if not leader or term < self._term:
            return
        self._term = term
        if not place.led_by(leader):
            self._locations.refresh_soon()  # there may be new replicas, which the next search can ask
            return
        late = self._loop.time() - SLOW_S
        for attempt in list(self._attempts.values()):
            if attempt.target.node_id != leader and attempt.since <= late:
                why = f"does not answer, and {leader} leads now"
                attempt.stream.give_up(attempt.request.request_id, why)


async def find_leader(pool: ChannelPool, place: TabletPlace) -> tuple[int, str]:
    """Return (term, node id of its leader) of the newest term that any replica reports; "" if the term has no
    leader.

    Waits a second at most, and only _GRACE_S once a leader was named."""
    asking = {asyncio.ensure_future(_named_by(pool, replica, place.tablet_id)) for replica in place.replicas}
    loop = asyncio.get_running_loop()
    until = loop.time() + _SEARCH_TIMEOUT_S
    newest, leader = 0, ""
    waiting = asking
    try:
        while waiting and (rest_s := until - loop.time()) > 0:
            done, waiting = await asyncio.wait(waiting, timeout=rest_s, return_when=asyncio.FIRST_COMPLETED)
            for answer in done:
                term, named = answer.result()
                if term > newest:
                    newest, leader = term, ""
                if term == newest and named:
                    leader = named
            if leader:
                until = min(until, loop.time() + _GRACE_S)
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    return newest, leader


async def _named_by(pool: ChannelPool, replica: ReplicaPlace, tablet_id: str) -> tuple[int, str]:
    """Return (term, node id of its leader or "") according to this replica; term 0 if the replica does not
    answer."""
    request = consensus_pb2.GetConsensusStateRequest(tablet_ids=[id_to_pb(tablet_id)])
    try:
        answer = await pool.unary(
            replica.address, ConsensusServiceStub, "GetConsensusState", request, timeout_s=_CALL_TIMEOUT_S
        )
    except SteleError:
        return 0, ""
    for status in answer.replicas:
        return status.term, id_from_pb(status.leader_node) if status.leader_node else ""
    return 0, ""
