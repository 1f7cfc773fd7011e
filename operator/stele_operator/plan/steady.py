"""Keeps which tablets are steady: well by their own reports, as long as their nodes are heard. Used by
health; pure.

So a pass over ten thousand healthy tablets asks nothing about each of them. `Steady` keeps the steady tablets
from pass to pass, and counts them by table. `unwell` returns all other tablets, and the steady ones on nodes
that are not heard.

Invariant: a tablet that `unwell` leaves out is healthy, at once and with patience. It has a majority, and can
lose a voter. So the questions of health.py and majorities.py have one answer for all of them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

from stele.driver.situation import replica_failed
from stele.driver.view import ClusterView, NodeState, TabletView
from stele.model.config import MemberType
from stele.model.ids import CATALOG_TABLET_ID

if TYPE_CHECKING:
    from stele_operator.plan.observation import Catalog

_VOTERS_MIN = 3
"""A smaller group cannot lose a voter."""


def is_steady(tablet: TabletView) -> bool:
    """Whether a tablet is well as long as all its nodes are heard. This depends on nothing but the tablet's
    own view.
    """
    peers = tablet.config.peers
    return (
        tablet.tablet_id != CATALOG_TABLET_ID
        and tablet.state == "RUNNING"
        and len(peers) >= max(_VOTERS_MIN, tablet.replication_factor)
        and all(p.member_type is MemberType.VOTER for p in peers)
        and tablet.leader is not None
        and not any(r.waits or r.unreached_ms or r.failed_peers or r.lacking_peers for r in tablet.replicas)
        and not any(replica_failed(tablet.report(p.replica_id, p.node_id)) for p in peers)
    )


class Steady:
    """The steady tablets of one view. Call `renew` with the next view.

    Hold `lock` from `renew` until the last question, since passes run in threads.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._begin()

    def _begin(self) -> None:
        self.by_table: Counter[str] = Counter()
        """How many tablets of each table are steady."""
        self.by_node: Counter[str] = Counter()
        """For each node, how many steady tablets have it in their configuration."""
        self.others: dict[str, TabletView] = {}
        """All tablets that are not steady, by id. Readers must not change it."""
        self._view: ClusterView | None = None
        self._half = False
        self._known: dict[str, TabletView] = {}

    def renew(self, view: ClusterView) -> None:
        """Apply what changed since the last view."""
        if view is self._view and not self._half:
            return
        if self._half:  # an error left it half renewed
            self._begin()
        self._half = True
        known = self._known
        for tablet in view.tablets_since(self._view):
            before = known.get(tablet.tablet_id)
            if before is not tablet:
                if before is not None:
                    self._count(before, -1)
                known[tablet.tablet_id] = tablet
                self._count(tablet, 1)
        if len(known) != len(view.tablets):
            for tablet_id in known.keys() - {t.tablet_id for t in view.tablets}:
                self._count(known.pop(tablet_id), -1)
        self._view, self._half = view, False

    def _count(self, tablet: TabletView, number: int) -> None:
        if not is_steady(tablet):
            self.others.pop(tablet.tablet_id, None)
            if number > 0:
                self.others[tablet.tablet_id] = tablet
            return
        self.by_table[tablet.table_id] += number
        for peer in tablet.config.peers:
            self.by_node[peer.node_id] += number


def unwell(catalog: Catalog, silent_ms: float, away: Collection[str] = ()) -> list[TabletView]:
    """All tablets that are not certainly well, in the order of their ids. They are not steady, or have a node
    that is not heard.

    `silent_ms`: a node that is silent for this long counts as not heard. `away`: ids of nodes that do not
    count as heard, even if they send heartbeats.
    """
    with catalog.steady.lock:
        return _unwell(catalog.view, catalog.steady, silent_ms, away)


def _unwell(view: ClusterView, steady: Steady, silent_ms: float, away: Collection[str]) -> list[TabletView]:
    steady.renew(view)
    good = {
        n.node_id
        for n in view.nodes
        if n.ever_heard
        and n.heartbeat_age_ms < silent_ms
        and n.state is not NodeState.RETIRED
        and n.node_id not in away
    }
    bad = {n for n, count in steady.by_node.items() if count} - good
    found = list(steady.others.values())
    if bad:
        found += [
            t
            for t in view.tablets
            if t.tablet_id not in steady.others and any(p.node_id in bad for p in t.config.peers)
        ]
    return sorted(found, key=lambda t: t.tablet_id)
