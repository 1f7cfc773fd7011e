"""Reads of one tablet at its nearest replica, which need not lead. One `Nearby` per TabletClient; used by reads.py.

Followers of the reader's zone are asked first, then the others, and the leader last. A replica that did not answer is left
alone for a while.

Invariant: an answer is no older than its reader allows, and never older than what this client has written or seen of the
tablet. A replica that cannot be sure of that says so, and the next one is asked.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from stele.client.attempts import ELSEWHERE, REFRESH, SAME_AGAIN
from stele.client.leader_search import SLOW_S
from stele.client.locations import ReplicaPlace, TabletPlace
from stele.client.streams import Response
from stele.model.errors import Code, SteleError, let_go
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import tserver_pb2

if TYPE_CHECKING:
    from stele.client.tablet import TabletClient

_SILENT_S, _UNSURE_S = 2.0, 0.5
"""How long a replica is left alone that did not answer, or that could not tell how old its rows are."""
_ATTEMPT_MIN_S = 0.05
_OTHERS = ELSEWHERE | SAME_AGAIN | {Code.SNAPSHOT_TOO_OLD}
"""Codes after which another replica may answer."""


class How(NamedTuple):
    """Which rows may be read: those of a snapshot, or those of at most this age."""

    max_staleness_us: int | None
    snapshot: int = 0


class AgedRow(NamedTuple):
    """A row that may be old. Returned by `get` and `get_many` with `max_staleness`.

    Attributes:
        row: The row; None if there was none.
        age_s: The row has all writes that were acknowledged at least this many seconds before the call.
        node_id: The node that answered.

    Example:
        >>> found = table.get((date(2024, 5, 1), "cellar"), ["value"], max_staleness=5.0)
        >>> found.row, 0 <= found.age_s <= 5
        ({'value': 12.0}, True)
    """

    row: dict[str, Any] | None
    age_s: float
    node_id: str


class NearAnswer(NamedTuple):
    """What a replica answered."""

    rows: bytes
    places: list[int]
    age_s: float
    node_id: str


class Nearby:
    """The replicas of one tablet, nearest first, for a reader in `zone`; "" if it is not known."""

    def __init__(self, tablet: TabletClient, zone: str) -> None:
        self.tablet = tablet
        self._place: TabletPlace = tablet.place
        self._zone = zone
        self._first = random.randrange(1 << 16)  # so that clients without a zone differ
        self._left_alone: dict[str, float] = {}  # until when, by node

    async def read(self, request: tserver_pb2.ReadRequest, how: How, timeout_s: float) -> NearAnswer:
        """Read the rows with the keys of a request. Raises what `TabletClient.read` raises."""
        asked = tserver_pb2.ClientRequest(read=request)
        asked.read.snapshot = how.snapshot
        response, node_id = await self._nearest(asked, asked.read, how.max_staleness_us or 0, timeout_s)
        answer = response.read
        return NearAnswer(answer.rows, list(answer.places), answer.age_us / 1e6, node_id)

    async def kv(
        self, request: tserver_pb2.KvRequest, max_staleness_us: int, timeout_s: float
    ) -> tserver_pb2.KvResponse:
        """Read from a key space. Raises what `TabletClient.kv` raises."""
        asked = tserver_pb2.ClientRequest(kv=request)
        response, _ = await self._nearest(asked, asked.kv, max_staleness_us, timeout_s)
        return response.kv

    async def _nearest(
        self,
        asked: tserver_pb2.ClientRequest,
        body: tserver_pb2.ReadRequest | tserver_pb2.KvRequest,
        max_staleness_us: int,
        timeout_s: float,
    ) -> tuple[Response, str]:
        """Return (the answer of the nearest replica that can answer, its node)."""
        until = time.monotonic() + timeout_s
        body.any_replica, body.max_staleness_us, body.after = True, max_staleness_us, self.tablet.seen
        for replica in self._followers():
            rest_s = until - time.monotonic()
            if rest_s < 2 * _ATTEMPT_MIN_S:
                break
            try:
                response = await self.tablet.ask_at(replica, asked, timeout_s=min(SLOW_S, rest_s / 2))
            except SteleError as exc:
                let_go(exc)
                if exc.code not in _OTHERS:
                    raise
                self._failed(replica, exc)
            else:
                return response, replica.node_id
        body.any_replica = False
        response = await self.tablet.ask_leader(asked, max(0.001, until - time.monotonic()))
        return response, self._place.target().node_id if self._place.replicas else ""

    def _followers(self) -> list[ReplicaPlace]:
        """The replicas to ask before the leader, the nearest first."""
        replicas = self._place.replicas
        if not replicas:
            return []
        leader, now = self._place.target(), time.monotonic()
        start = self._first % len(replicas)
        followers = [r for r in (*replicas[start:], *replicas[:start]) if r != leader]
        awake = [r for r in followers if self._left_alone.get(r.node_id, 0.0) <= now]
        return sorted(awake, key=lambda r: not self._zone or r.zone != self._zone)

    def _failed(self, replica: ReplicaPlace, error: SteleError) -> None:
        silent = error.code in (Code.TIMED_OUT, Code.UNAVAILABLE)
        self._left_alone[replica.node_id] = time.monotonic() + (_SILENT_S if silent else _UNSURE_S)
        if error.code in REFRESH or silent:
            self.tablet.refresh_soon()


def address(asked: tserver_pb2.ClientRequest, place: TabletPlace, timeout_s: float) -> None:
    """Address a read to a tablet at a replica. The node stops waiting a little before the caller does, so that it can
    say so in time."""
    request = asked.kv if asked.HasField("kv") else asked.read
    request.tablet_id = id_to_pb(place.tablet_id)
    request.tablet_incarnation = place.incarnation
    request.deadline_ms = max(1, int(timeout_s * 900))


class NearTablet:
    """A tablet whose rows are read in one way, at its nearest replica."""

    __slots__ = ("_how", "_nearby")

    def __init__(self, nearby: Nearby, how: How) -> None:
        self._nearby = nearby
        self._how = how

    async def read(self, request: tserver_pb2.ReadRequest, *, timeout_s: float) -> NearAnswer:
        """As `Nearby.read`."""
        return await self._nearby.read(request, self._how, timeout_s)


def aged(row: dict[str, Any] | None, answer: NearAnswer | None) -> AgedRow:
    """Pair a row with its age. A key outside all ranges has no row, at age 0."""
    return AgedRow(row, 0.0, "") if answer is None else AgedRow(row, answer.age_s, answer.node_id)
