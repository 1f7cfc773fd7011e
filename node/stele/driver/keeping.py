"""Keeps a view of the cluster and renews it where something changed. Used by executor, operator, masters that
drive, and clients.

The leading master answers in pages (stele.master.view_changes). After a gap, with a new leader, and at a
caller's first request the view is fetched anew. A master of an earlier version knows no pages; each of its
answers is a whole view.

Invariant: a view is given out only after the last page, so it shows one moment.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from stele.driver.view import ClusterView, Intent, NodeView, ReplicaView, Tablets, TabletView
from stele.driver.wire import claim_from_pb, holding_from_pb, intent_from_pb, node_from_pb, tablet_from_pb
from stele.model.errors import Code, Retryable
from stele.rpc.convert import id_from_pb
from stele.rpc.masters import Masters
from stele.rpc.proto import master_pb2

PAGES_MAX = 10_000
"""The most pages of one renewal. A cluster of the largest size needs about a hundred."""
APPENDED_AT_ONCE = 256
"""The most messages that are copied in one step of the event loop: some 1 ms."""

Pages = Callable[[master_pb2.ViewPlacePB], Awaitable[master_pb2.GetClusterViewResponse]]
"""A function that returns the next page after a place."""

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")


def pages_of(
    masters: Masters, holder: str = "", *, timeout_s: float | None = None, rounds: int | None = None
) -> Pages:
    """Make the function that gets pages from the leading master. `holder`: the caller is a working driver of
    this name.
    """

    async def page(since: master_pb2.ViewPlacePB) -> master_pb2.GetClusterViewResponse:
        request = master_pb2.GetClusterViewRequest(holder=holder, since=since)
        answer: master_pb2.GetClusterViewResponse = await masters.call(
            "GetClusterView", request, timeout_s=timeout_s, rounds=rounds
        )
        return answer

    return page


class Units(Generic[T, U, V]):
    """The units of a view, converted from pages: tablets, tables and intents, by id. Pure.

    Invariant: after the last page of a renewal they equal the leader's units at that moment.
    """

    def __init__(
        self,
        tablet: Callable[[master_pb2.TabletViewPB, int], T],
        table: Callable[[master_pb2.TableInfoPB], U],
        intent: Callable[[master_pb2.IntentPB], V],
    ) -> None:
        self._convert = (tablet, table, intent)
        self.place = master_pb2.ViewPlacePB()
        self.tablets: dict[str, T] = {}
        self.tables: dict[str, U] = {}
        self.intents: dict[str, V] = {}

    def take(self, page: master_pb2.GetClusterViewResponse) -> set[str]:
        """Apply a page, or the whole view that a master of an earlier release sends. Returns the tablets in it."""
        tablet, table, intent = self._convert
        if page.anew or not page.HasField("upto"):
            for kept in (self.tablets, self.tables, self.intents):
                kept.clear()
        touched = {id_from_pb(raw) for raw in page.gone_tablets}
        for tablet_id in touched:
            self.tablets.pop(tablet_id, None)
        now_ms = page.now_ms  # one number for all of them
        for told in page.tablets:
            tablet_id = id_from_pb(told.tablet_id)
            self.tablets[tablet_id] = tablet(told, now_ms)
            touched.add(tablet_id)
        for tablet_id in touched:
            self.intents.pop(tablet_id, None)
        for begun in page.intents:
            self.intents[id_from_pb(begun.tablet_id)] = intent(begun)
        for raw in page.gone_tables:
            self.tables.pop(id_from_pb(raw), None)
        for info in page.tables:
            self.tables[id_from_pb(info.table_id)] = table(info)
        self.place = page.upto
        return touched


@dataclass(frozen=True, slots=True)
class Kept:
    """The newest view.

    - `last`: its last page, with the nodes, the claim and the policy as received.
    - `tables`: by id.
    - `anew`: whether everything was fetched again.
    - `touched`: if not, the tablets that were fetched.
    """

    view: ClusterView
    last: master_pb2.GetClusterViewResponse
    tables: tuple[master_pb2.TableInfoPB, ...]
    anew: bool
    touched: frozenset[str]


class ViewKeeper:
    """Keeps one view. Callers may share it; they renew it one after another."""

    def __init__(self) -> None:
        self._units: Units[tuple[TabletView, int], master_pb2.TableInfoPB, Intent] = Units(
            _aged_from, _copied, intent_from_pb
        )
        self._ageing: set[str] = set()
        self._tablets = Tablets(())
        """The tablets as last given out, in the order of their ids."""
        self._tables: tuple[master_pb2.TableInfoPB, ...] = ()
        """The tables as last given out, in the order of their ids."""
        self._renewed: set[str] = set()
        """Tablets that came in pages since `_tablets` was given out."""
        self._members_changed = self._tables_changed = True
        self._lock = asyncio.Lock()

    async def renew(self, pages: Pages) -> Kept:
        """Fetch what changed since the last call, and return the view.

        Raises:
            SteleError: a page was refused or did not come. The next call goes on from there.
        """
        async with self._lock:
            anew, touched = False, set[str]()
            for _ in range(PAGES_MAX):
                page = await pages(self._units.place)
                # A page has hundreds of tablets. Let the loop run between pages: it may have to renew a
                # Lease.
                touched |= await to_its_end(self._take, page)
                anew = anew or page.anew or not page.HasField("upto")
                if not page.more:
                    return await to_its_end(self._kept, page, anew, frozenset(touched))
            raise Retryable(
                "the cluster's view changes faster than it can be read; try again", code=Code.THROTTLED
            )

    def _take(self, page: master_pb2.GetClusterViewResponse) -> set[str]:
        if page.anew or not page.HasField("upto"):
            self._ageing.clear()
            self._members_changed = self._tables_changed = True
        told_before = self._units.tablets.keys()
        if page.gone_tablets or any(id_from_pb(t.tablet_id) not in told_before for t in page.tablets):
            self._members_changed = True
        if page.tables or page.gone_tables:
            self._tables_changed = True
        touched = self._units.take(page)
        self._renewed |= touched
        for tablet_id in touched:
            told = self._units.tablets.get(tablet_id)
            if told is not None and any(r.ages for r in told[0].replicas):
                self._ageing.add(tablet_id)
            else:
                self._ageing.discard(tablet_id)
        return touched

    def _kept(self, last: master_pb2.GetClusterViewResponse, anew: bool, touched: frozenset[str]) -> Kept:
        units = self._units
        if self._members_changed:
            self._tablets = Tablets(tablet for tablet, _ in _sorted(units.tablets))
            self._members_changed = False
        if self._tables_changed:
            self._tables = _sorted(units.tables)
            self._tables_changed = False
        newer: dict[str, TabletView] = {}
        for tablet_id in self._renewed | self._ageing:
            tablet, told_ms = units.tablets.get(tablet_id, (None, 0))
            if tablet is not None:
                by_ms = last.now_ms - told_ms if tablet_id in self._ageing else 0
                newer[tablet_id] = older(tablet, by_ms)
        self._renewed.clear()
        self._tablets = self._tablets.with_newer(newer)
        view = view_of(last, map(node_from_pb, last.nodes), self._tablets, _sorted(units.intents))
        return Kept(view, last, self._tables, anew, touched)


async def to_its_end(work: Callable[..., T], *args: Any) -> T:
    """Run `work` in a thread, and wait for it even if the caller is cancelled. The next renewal must not
    begin before it ends.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((running,))
        running.exception()  # retrieved here: nobody asks for it
        raise


def view_of(
    pb: master_pb2.GetClusterViewResponse,
    nodes: Iterable[NodeView],
    tablets: Tablets,
    intents: tuple[Intent, ...],
) -> ClusterView:
    """The view with these nodes, tablets and intents. The rest comes from a message."""
    return ClusterView(
        nodes=tuple(nodes),
        tablets=tablets,
        intents=intents,
        claim=claim_from_pb(pb.claim) if pb.HasField("claim") else None,
        settled=pb.settled,
        leader_master=id_from_pb(pb.leader),
        term=pb.term,
        now_us=pb.now_us,
        holding=holding_from_pb(pb.policy),
    )


def older(tablet: TabletView, by_ms: int) -> TabletView:
    """The tablet as it would be some ms later if nothing were reported meanwhile."""
    return replace(tablet, replicas=tuple(_older(r, by_ms) for r in tablet.replicas)) if by_ms > 0 else tablet


def _older(replica: ReplicaView, by_ms: int) -> ReplicaView:
    if not replica.ages:
        return replica
    unreached = {peer: ms + by_ms for peer, ms in replica.unreached_ms.items()}
    return replace(replica, age_ms=replica.age_ms + by_ms, unreached_ms=unreached)


def ageless(tablet: TabletView) -> TabletView:
    """The tablet with age 0 for the reports whose age does not matter."""
    return replace(tablet, replicas=tuple(r if r.ages else replace(r, age_ms=0) for r in tablet.replicas))


def _copied(info: master_pb2.TableInfoPB) -> master_pb2.TableInfoPB:
    """A copy of the message. The original would keep the memory of its whole page."""
    own = master_pb2.TableInfoPB()
    own.CopyFrom(info)
    return own


def _aged_from(pb: master_pb2.TabletViewPB, now_ms: int) -> tuple[TabletView, int]:
    return ageless(tablet_from_pb(pb)), now_ms


class WholeView:
    """The whole view as one message, for a caller that looks repeatedly. Each look fetches only what changed."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._units: Units[tuple[master_pb2.TabletViewPB, int], master_pb2.TableInfoPB, master_pb2.IntentPB]
        self._units = Units(lambda told, now_ms: (told, now_ms), lambda info: info, lambda intent: intent)

    async def look(self) -> master_pb2.GetClusterViewResponse:
        """Fetch what changed since the last look, and return the whole view as it is now.

        Raises:
            SteleError: the leading master refused a request, or none answered.
            Retryable: THROTTLED, the view changes faster than it can be read.
        """
        units = self._units
        for _ in range(PAGES_MAX):
            page = await self._pages(units.place)
            if not page.HasField("upto"):
                return page
            units.take(page)
            if not page.more:
                return await self._put_together(page)
        raise Retryable(
            "the cluster's view changes faster than it can be read; try again", code=Code.THROTTLED
        )

    async def _put_together(
        self, page: master_pb2.GetClusterViewResponse
    ) -> master_pb2.GetClusterViewResponse:
        """Put the view together, with nodes and claim of the last page. Each step of the event loop copies
        few units.
        """
        for field in ("tablets", "tables", "intents", "gone_tablets", "gone_tables"):
            page.ClearField(field)
        for told in _in_steps(self._units.tablets):
            page.tablets.extend(tablet for tablet, _ in told)
            for (_, told_ms), tablet in zip(told, page.tablets[-len(told) :], strict=True):
                for replica in tablet.replicas:
                    replica.age_ms += max(0, page.now_ms - told_ms)
            await asyncio.sleep(0)
        for infos in _in_steps(self._units.tables):
            page.tables.extend(infos)
            await asyncio.sleep(0)
        for intents in _in_steps(self._units.intents):
            page.intents.extend(intents)
            await asyncio.sleep(0)
        return page


async def whole_view(pages: Pages) -> master_pb2.GetClusterViewResponse:
    """The whole view as one message, put together from pages.

    Raises:
        SteleError: a page was refused or did not come.
    """
    return await WholeView(pages).look()


def _in_steps(by_id: dict[str, T]) -> Iterator[Sequence[T]]:
    """Yield all values by id, some at a time."""
    found = _sorted(by_id)
    for start in range(0, len(found), APPENDED_AT_ONCE):
        yield found[start : start + APPENDED_AT_ONCE]


def _sorted(by_id: dict[str, T]) -> tuple[T, ...]:
    return tuple(by_id[key] for key in sorted(by_id))
