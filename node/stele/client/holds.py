"""Holds on a table's history: one of the same name on each of its tablets. Used by table.py.

Asks the leader of each tablet. Every request may be repeated, so it is sent again until somebody answers it.

Invariant: when a call returns that a hold was taken or renewed, each tablet named in the answer has the hold.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from stele.client import arguments
from stele.client.locations import Locations, TabletPlace
from stele.model.amounts import plural
from stele.model.errors import Code, NotLeader, Rejected, Retryable, SteleError
from stele.model.holds import BYTES_MAX, BYTES_MIN, EXPIRES_MAX_MS, EXPIRES_MIN_MS, name_of
from stele.model.partition import numbered
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import tserver_pb2 as pb
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub

_AT_ONCE = 32
_ATTEMPT_S = 5.0
_AGAIN_S = 0.1
_OF_LEADERS = (Code.THROTTLED, Code.NOT_READY, Code.DISK_FULL)
"""Refusals of a leader: another replica would only say that it does not lead."""
_MOVED = frozenset(
    (Code.NOT_FOUND, Code.TABLET_DELETED, Code.WRONG_NODE, Code.WRONG_CLUSTER, Code.STALE_INCARNATION)
)
"""Codes after which the masters are asked where the tablet is."""


@dataclass(frozen=True, slots=True)
class TableHold:
    """A hold on a table's history, as `Table.hold` and `Table.holds` return it.

    Attributes:
        name: What it is called.
        since: The hybrid time from which on all changes can be read.
        expires: When it ends, unless it is renewed.
        max_bytes: How many bytes of old rows it may keep in each replica of a tablet.
        bytes: About how many it keeps in one replica, where it keeps most, as last measured.
        broken: Why it keeps nothing any more; "" while it does.
        tablets: The ids of the tablets that have it.
        tablets_without: The number of the table's other tablets.

    Example:
        >>> held = table.hold("copy", expires_in_s=600)
        >>> held.name, held.broken, held.tablets_without
        ('copy', '', 0)
        >>> table.release_hold("copy")
    """

    name: str
    since: int
    expires: datetime
    max_bytes: int
    bytes: int = 0
    broken: str = ""
    tablets: tuple[str, ...] = field(default=(), repr=False)
    tablets_without: int = 0


class TableHolds:
    """The holds of one table. `now`: a hybrid time that is not below what the client has seen."""

    def __init__(self, pool: ChannelPool, locations: Locations, now: Callable[[], int]) -> None:
        self._pool = pool
        self._locations = locations
        self._now = now

    async def take(
        self, name: Any, since: Any, expires_in_s: Any, max_bytes: Any, tablets: Any, timeout_s: float
    ) -> TableHold:
        """See AsyncTable.hold."""
        request = pb.HoldHistoryRequest(
            action=pb.HOLD_TAKE,
            hold=_name(name),
            since=arguments.snapshot(since, "since") or self._now(),
            expires_in_ms=expires_ms(expires_in_s, "expires_in_s"),
            bytes_max=arguments.whole_number(max_bytes, "max_bytes", least=BYTES_MIN, most=BYTES_MAX),
        )
        its = None if tablets is None else set(arguments.names(tablets, "tablets"))
        places = self._places(its)
        if not places:
            raise Rejected(
                f"table {self._locations.info.name}: none of these tablets is part of it now; leave out `tablets` to hold all"
            )
        found, failures = await self._order(request, places, timeout_s)
        if failures:
            error = failures[0]
            if (
                isinstance(error, Rejected) and found
            ):  # what it had taken would only use disk until it expires
                undone = pb.HoldHistoryRequest(action=pb.HOLD_RELEASE, hold=name)
                await self._order(undone, self._places(set(found)), timeout_s)
            raise self._failed(name, "taken", error, len(failures), len(found))
        merged = self._merged(found)
        if name not in merged:
            raise Rejected(
                f"table {self._locations.info.name}: the ranges to hold were dropped meanwhile; take a hold on what is left"
            )
        return merged[name]

    async def renew(self, hold: Any, expires_in_s: Any, since: Any, timeout_s: float) -> TableHold:
        """See AsyncTable.renew_hold."""
        name = hold.name if isinstance(hold, TableHold) else _name(hold)
        request = pb.HoldHistoryRequest(
            action=pb.HOLD_RENEW,
            hold=name,
            since=arguments.snapshot(since, "since"),
            expires_in_ms=expires_ms(expires_in_s, "expires_in_s"),
        )
        its = set(hold.tablets) if isinstance(hold, TableHold) else None
        found, failures = await self._order(request, self._places(its), timeout_s)
        if failures:
            raise self._failed(name, "renewed", failures[0], len(failures), len(found))
        if name not in (merged := self._merged(found)):
            raise Rejected(
                f"table {self._locations.info.name}: all ranges that had hold {name} were dropped; take a new one",
                code=Code.CURSOR_LOST,
            )
        return merged[name]

    async def release(self, name: Any, timeout_s: float) -> None:
        """See AsyncTable.release_hold."""
        request = pb.HoldHistoryRequest(action=pb.HOLD_RELEASE, hold=_name(name))
        found, failures = await self._order(request, self._places(), timeout_s)
        if failures:
            raise self._failed(name, "released", failures[0], len(failures), len(found))

    async def all(self, timeout_s: float) -> list[TableHold]:
        """See AsyncTable.holds."""
        found, failures = await self._order(pb.HoldHistoryRequest(), self._places(), timeout_s)
        if failures:
            raise failures[0]
        return sorted(self._merged(found).values(), key=lambda hold: hold.name)

    def _places(self, its: set[str] | None = None) -> list[TabletPlace]:
        """Return the table's tablets; with `its`, only those whose ids are in it."""
        ordinals = [ordinal for ordinal, _ in numbered(self._locations.info.partition_schema)]
        places = self._locations.by_ordinal(ordinals)
        return places if its is None else [place for place in places if place.tablet_id in its]

    async def _order(
        self, request: pb.HoldHistoryRequest, places: Sequence[TabletPlace], timeout_s: float
    ) -> tuple[dict[str, Sequence[pb.HoldPB]], list[SteleError]]:
        """Send a request to each of these tablets. Returns the holds that each one answers, by tablet, and the errors.

        Errors that no retry can mend come first. Tablets whose range was dropped are left out."""
        free, until = asyncio.Semaphore(_AT_ONCE), time.monotonic() + timeout_s
        found: dict[str, Sequence[pb.HoldPB]] = {}
        failures: list[SteleError] = []

        async def ask(place: TabletPlace) -> None:
            mine = pb.HoldHistoryRequest()
            mine.CopyFrom(request)
            async with free:
                try:
                    answer = await self._ask(mine, place, until)
                except SteleError as exc:
                    failures.append(exc)
                    return
            if answer is not None:
                found[place.tablet_id] = answer.holds

        await asyncio.gather(*(ask(place) for place in places))
        return found, sorted(failures, key=lambda exc: isinstance(exc, Retryable))

    async def _ask(
        self, request: pb.HoldHistoryRequest, place: TabletPlace, until: float
    ) -> pb.HoldHistoryResponse | None:
        """Ask a tablet's leader. Returns its answer; None: the range of the tablet was dropped.

        If `until` cuts an attempt off, the refusal before it is raised, because it says more."""
        said: SteleError | None = None
        while not place.dropped:
            rest_s = until - time.monotonic()
            target = place.target()
            request.tablet_id, request.tablet_incarnation = id_to_pb(place.tablet_id), place.incarnation
            request.deadline_ms = max(1, int(min(rest_s, _ATTEMPT_S) * 1_000))
            try:
                answer: pb.HoldHistoryResponse = await self._pool.unary(
                    target.address,
                    TabletServerServiceStub,
                    "HoldHistory",
                    request,
                    timeout_s=max(0.05, min(rest_s, _ATTEMPT_S)),
                    to_node=target.node_id,
                )
                return answer
            except SteleError as exc:
                error = exc
            if not isinstance(error, Retryable) and error.code not in _MOVED:
                raise error
            if said is None or error.code is not Code.TIMED_OUT or rest_s >= _ATTEMPT_S:
                said = error
            hint = error.leader_hint if isinstance(error, NotLeader) else ""
            if not (hint and place.led_by(hint)) and error.code not in _OF_LEADERS:
                place.ask_next(target)
            if time.monotonic() + _AGAIN_S > until:
                raise said
            if error.code in _MOVED or error.code is Code.UNAVAILABLE:
                with suppress(Retryable):  # the last place known is as good as any
                    await self._locations.refresh(timeout_s=max(0.05, until - time.monotonic()))
            await asyncio.sleep(_AGAIN_S * (0.5 + random.random()))
        return None

    def _merged(self, found: dict[str, Sequence[pb.HoldPB]]) -> dict[str, TableHold]:
        """The holds by name, merged from their tablets: the latest `since`, the earliest end, and the highest cost."""
        of_name = defaultdict[str, dict[str, pb.HoldPB]](dict)
        for tablet_id, held in found.items():
            for each in held:
                of_name[each.name][tablet_id] = each
        every = len(self._places())
        return {
            name: TableHold(
                name,
                max(each.since for each in its.values()),
                datetime.fromtimestamp(min(each.expires_us for each in its.values()) / 1e6, UTC),
                min(each.bytes_max for each in its.values()),
                max(each.bytes for each in its.values()),
                next((each.broken for each in its.values() if each.broken), ""),
                tuple(sorted(its)),
                every - len(its),
            )
            for name, its in of_name.items()
        }

    def _failed(self, name: str, done: str, error: SteleError, failed: int, well: int) -> SteleError:
        """The first error, with the number of tablets that had one."""
        where = f" in {plural(failed, 'tablet')} of {failed + well}" if failed + well > 1 else ""
        message = f"hold {name} was not {done}{where}: {error.args[0]}"
        kind = Retryable if isinstance(error, Retryable) else Rejected
        return kind(f"table {self._locations.info.name}: {message}", code=error.code)


def _name(given: Any) -> str:
    try:
        return name_of(given)
    except ValueError as exc:
        raise Rejected(str(exc)) from None


def expires_ms(given: Any, what: str) -> int:
    """How long a hold lasts, in ms, from seconds. `what`: the argument, for messages."""
    ms = round(arguments.seconds(given, what) * 1_000)
    if not EXPIRES_MIN_MS <= ms <= EXPIRES_MAX_MS:
        raise arguments.refusal(what, given, "a number of seconds, 1 to a year")
    return ms
