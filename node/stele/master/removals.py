"""Knows which nodes may still acknowledge writes to deleted tablets. One object per leadership.

tables.py begins a removal, orders.py ends it, and service.py waits for it. A write needs a majority of the
voters. A node that has executed DeleteTablet has no replica, and its fence refuses older orders to create
one. So a tablet takes no more writes once the nodes left are too few for a majority. Only nodes that were
named as members count.

Invariant: a node counts as done only after its own answer to an order of this leadership.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from stele.master.catalog import Catalog
from stele.master.liveness import Liveness
from stele.master.records import TabletRecord, deleted_row
from stele.model.config import MemberType
from stele.rpc.proto import common_pb2


@dataclass(slots=True)
class _Left:
    nodes: set[str]
    """Nodes that may have a replica."""
    harmless: int
    """If no more than this many nodes are left, they are too few to commit anything."""


@dataclass(slots=True)
class Removals:
    """Deleted tablets, and the nodes that have not answered for them yet."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _left: dict[str, _Left] = field(default_factory=dict)

    def begin(self, catalog: Catalog, marks: Iterable[TabletRecord]) -> None:
        """Begin the removal of deleted tablets. `marks`: their rows, which name the nodes that may have a
        replica."""
        for tablet_id in [t for t in self._left if t not in catalog.tablets]:
            del self._left[tablet_id]
        for row in marks:
            self._left[row.tablet_id] = _Left(set(row.holders), row.harmless)

    def begin_again(self, catalog: Catalog, table_id: str) -> None:
        """Begin again for a table that an earlier leader removed, and ask the nodes that its rows name once
        more.

        Rows from the version before name no nodes. For these tablets every node is asked.
        """
        everybody: set[str] = {
            n.node_id
            for n in catalog.nodes.values()
            if n.role == "node" and n.formed and n.state != "RETIRED"
        }
        for row in catalog.tablets_of_table(table_id):
            if row.state == "DELETED" and row.tablet_id not in self._left:
                asked = everybody.intersection(row.holders) if row.holders else set(everybody)
                self._left[row.tablet_id] = _Left(asked, row.harmless)

    def nodes_left(self, tablet_id: str) -> set[str]:
        """Nodes that may have a replica of a deleted tablet."""
        left = self._left.get(tablet_id)
        return left.nodes if left is not None else set()

    def done(self, tablet_id: str, node_id: str) -> None:
        """Record that a node has no replica of this tablet and cannot create one."""
        left = self._left.get(tablet_id)
        if left is not None:
            left.nodes.discard(node_id)
            self.changed.set()

    def unfinished(self, catalog: Catalog, table_id: str) -> dict[str, set[str]]:
        """The tablets of a removed table that could still acknowledge writes, each with the nodes that have
        not answered.
        """
        lefts = ((tablet_id, self._left.get(tablet_id)) for tablet_id in catalog.tablets_of.get(table_id, {}))
        return {
            tablet_id: left.nodes
            for tablet_id, left in lefts
            if left is not None and len(left.nodes) > left.harmless
        }


def deleted(catalog: Catalog, liveness: Liveness, row: TabletRecord, now_us: int) -> TabletRecord:
    """The row of a tablet that is deleted now. It tells a later leader which nodes to ask."""
    voters = sum(p.member_type is not MemberType.NON_VOTER for p in row.config.peers)
    return replace(
        deleted_row(row, "DELETED", now_us),
        holders=tuple(sorted(_holders(catalog, liveness, row))),
        # A change under way may already have removed one voter that the catalog still counts.
        harmless=max(0, voters - 1) // 2,
    )


def _holders(catalog: Catalog, liveness: Liveness, row: TabletRecord) -> set[str]:
    """Nodes that may have a replica of a tablet, by its row, its intent, and the nodes' reports."""
    nodes: set[str] = {peer.node_id for peer in row.config.peers}
    intent = catalog.intents.get(row.tablet_id)
    if intent is not None:
        nodes.add(intent.target_node)
    gone = (common_pb2.TOMBSTONED, common_pb2.DELETED)
    nodes.update(r.node_id for r in liveness.all_reports_of(row.tablet_id) if r.status.data_state not in gone)
    return nodes
