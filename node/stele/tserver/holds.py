"""Holds on the history of tablets that this node leads: carries out clients' orders, measures what holds
cost, and ends holds.

Called by tablet_service.py and maintenance.py. The rules are in `stele.model.holds` and
`stele.tablet.holding`.

Invariants: an order is proposed only once a leading master has said that all members can read it. A leader
finds out by its clock and its files that a hold has expired, or costs too much. The hold ends only by an
entry of the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import structlog

from stele.consensus.ports import Host
from stele.consensus.replica import Replica
from stele.model.clock import physical_us, utc
from stele.model.errors import Code, Corrupt, Rejected, SteleError
from stele.model.holds import VERSION_NEEDED, Action, HoldOrder, faults_of, too_costly
from stele.model.ids import StreamKey
from stele.rpc.client_stream import WRITE_DEADLINE_MS
from stele.rpc.proto import tserver_pb2 as pb
from stele.tablet.store import TabletStore
from stele.tserver.gate import require_version
from stele.tserver.reads import check_tablet, store_of
from stele.tserver.replicas import Replicas
from stele.tserver.wheel import Wheel

log = structlog.get_logger("stele.tserver.holds")

MEASURE_MS = 60_000
"""Pause between two measurements of what the holds of a tablet cost."""
_ORDER_MS = 5_000
_ACTIONS = {
    pb.HOLD_TAKE: Action.TAKE,
    pb.HOLD_RENEW: Action.RENEW,
    pb.HOLD_RELEASE: Action.RELEASE,
}


async def hold_history(
    replica: Replica, request: pb.HoldHistoryRequest, cluster_version: int
) -> pb.HoldHistoryResponse:
    """Carry out a client's order on the holds of a tablet. Returns all its holds. `cluster_version`: the
    finalized one; 0: not heard yet.

    Raises:
        Rejected: INVALID_ARGUMENT. CLOCK_AHEAD: `since` is in the future. TOO_LARGE: too many holds.
            UNSUPPORTED_VERSION: the version that holds need is not finalized. CURSOR_LOST: the history is
            gone, or so is the hold to renew.
        Retryable: NOT_LEADER and other codes of `Writes.propose`.
    """
    check_tablet(replica, "table", request.tablet_incarnation)
    replica.check_leader()
    store, deadline_ms = store_of(replica), request.deadline_ms or WRITE_DEADLINE_MS
    action = _ACTIONS.get(request.action)
    if action is None:
        await replica.reads.linearizable_read(deadline_ms)
        return _answer(store)
    order = HoldOrder(action, request.hold, request.since, request.expires_in_ms, request.bytes_max)
    if faults := faults_of(order):
        raise Rejected("; ".join(faults))
    require_version(cluster_version, VERSION_NEEDED, f"hold {request.hold}")
    if action is Action.RELEASE:
        # A full node takes releases. One of what is not there adds nothing to its log.
        await replica.reads.linearizable_read(deadline_ms)
        if store.held.named(order.name) is None:
            return _answer(store)
    if order.since:
        await replica.reads.snapshot_ready(order.since, deadline_ms)  # refuses the future, too
    if order.action is Action.TAKE and order.since:
        _check_there(store, order)
    outcome = await replica.writes.propose(order.encoded(), deadline_ms, small=order.action is Action.RELEASE)
    if (error := outcome.error()) is not None:
        raise error
    if order.action is Action.TAKE and order.since:
        _check_there(store, order)  # a flush or a merge may have begun before the entry was applied
    return _answer(store)


def _check_there(store: TabletStore, order: HoldOrder) -> None:
    kept_from = store.kept_from
    if order.since < kept_from:
        raise Rejected(
            f"hold {order.name}: history from {utc(physical_us(order.since))} on is gone in part; this replica has it from "
            f"{utc(physical_us(kept_from))} on; begin again with a scan, and take the hold at its snapshot"
            f"{store.broken_since(order.since)}",
            code=Code.CURSOR_LOST,
        )


def _answer(store: TabletStore) -> pb.HoldHistoryResponse:
    costs = store.hold_costs
    return pb.HoldHistoryResponse(
        holds=[
            pb.HoldPB(
                name=hold.name,
                since=hold.since,
                expires_us=hold.expires_us,
                bytes_max=hold.bytes_max,
                broken=hold.broken,
                bytes=costs.get((hold.name, hold.since), 0),
            )
            for hold in store.held.holds
        ]
    )


class HoldKeeper:
    """Ends holds that have expired, and breaks holds that cost too much, in the tablets led here. Measures
    what the holds of all replicas here cost.
    """

    def __init__(self, replicas: Replicas, host: Host) -> None:
        self._wheel = Wheel(replicas)
        self._host = host
        self._measured: dict[StreamKey, int] = {}

    async def look(self) -> None:
        """Do one round over the tablets with holds, and over tablets that may have got holds."""
        now, held = self._host.now_ms(), dict[StreamKey, int]()
        for replica in self._wheel.turn():
            store = replica.machine
            if not isinstance(store, TabletStore) or not replica.running:
                continue
            if not store.held.holds:
                store.hold_costs = {}
                continue
            self._wheel.keep(replica)
            key = replica.superblock.key
            held[key] = self._measured.get(key, now - MEASURE_MS)
            if now - held[key] >= MEASURE_MS:
                held[key] = now
                await self._measure(replica, store)
            if replica.is_leader:
                await self._order(replica, self._due(store))
        self._measured = held

    async def _measure(self, replica: Replica, store: TabletStore) -> None:
        try:
            await self._host.in_thread(store.measure_holds)
        except Corrupt as exc:
            replica.fail(f"measuring holds: {exc}")
        except Exception as exc:
            log.error(
                "the bytes that holds keep could not be measured", tablet=replica.tablet_id, exc_info=exc
            )  # the other tablets are looked at

    def _due(self, store: TabletStore) -> Iterable[HoldOrder]:
        """The orders that are due for the holds of a tablet led here: expire those whose time is over, break
        those that cost too much.
        """
        now_us, expires_us = self._host.wall_us(), store.held.expires_us
        if expires_us is not None and now_us > expires_us:
            yield HoldOrder(Action.EXPIRE)
        for hold in store.held.holds:
            cost = store.hold_costs.get((hold.name, hold.since), 0)
            if not hold.broken and cost > hold.bytes_max:
                yield HoldOrder(Action.BREAK, hold.name, hold.since, why=too_costly(hold, cost, now_us))

    async def _order(self, replica: Replica, orders: Iterable[HoldOrder]) -> None:
        for order in orders:
            if order.action is Action.BREAK:
                log.warning(
                    "a hold on history is broken", tablet=replica.tablet_id, hold=order.name, why=order.why
                )
            try:
                await replica.writes.propose(order.encoded(), _ORDER_MS, small=True)
            except SteleError as exc:
                log.info(
                    "an order about a hold failed; it is tried again",
                    tablet=replica.tablet_id,
                    error=str(exc),
                )
                return
            await asyncio.sleep(0)


def held_bytes(stores: Iterable[TabletStore]) -> int:
    """Estimate the bytes of files that the holds of these stores keep. For each store, only its costliest
    hold counts.
    """
    return sum(max(store.hold_costs.values(), default=0) for store in stores)
