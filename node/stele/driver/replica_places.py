"""The places of all tablets' replicas, for balance. Kept from round to round, renewed where something changed;
pure.

Used by `replica_balance.py`. Remembers when no move is left, so that a round over a cluster at rest looks for
none.

Invariant: everything equals what a new object says of the same situations.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from stele.driver.situation import Situation, at_rest
from stele.driver.targets import tablet_bytes
from stele.driver.view import TabletView


@dataclass(frozen=True, slots=True)
class Place:
    """A tablet, and the nodes where it is once the change under way is done.

    `size`: bytes of a replica. `rests`: whether it may be moved. `zones`: those of its members, sorted.
    """

    tablet: TabletView
    nodes: tuple[str, ...]
    size: int
    rests: bool
    zones: tuple[str, ...]

    @property
    def table_id(self) -> str:
        """The table of the tablet."""
        return self.tablet.table_id

    @property
    def crowded(self) -> bool:
        """Whether two of its members are in one zone."""
        return len(set(self.zones)) < len(self.zones)

    @property
    def counts_as(self) -> tuple[object, ...]:
        """The values on which balance depends."""
        return self.nodes, self.size, self.rests, self.zones, self.table_id


class Places:
    """The tablets of nodes, with counts.

    - `replicas`, `bytes`: by node. `of_table`: by node and table.
    - `resting`: tablets that may be moved, grouped by node, zones and table. Balance asks for a whole group
      at once.
    - `crowded`: those of them that have two members in one zone.
    - `balanced`: the nodes for which no move is left, by an earlier look.
    """

    def __init__(self) -> None:
        self.replicas: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.of_table: dict[str, Counter[str]] = {}
        self.resting: dict[str, dict[tuple[str, ...], dict[str, list[Place]]]] = {}
        self.crowded: set[str] = set()
        self.balanced: object = None
        self._places: dict[str, Place] = {}

    def take(self, tablet_id: str, s: Situation | None) -> None:
        """Take over a tablet that was judged again. `s` None: the tablet is gone."""
        before = self._places.pop(tablet_id, None)
        place = _place_of(s) if s is not None and s.tablet.node_role == "node" else None
        if place is not None:
            self._places[tablet_id] = place
        if (place.counts_as if place else None) != (before.counts_as if before else None):
            self.balanced = None
            if before is not None:
                self._count(before, -1)
            if place is not None:
                self._count(place, 1)
        self._put(tablet_id, before, place)

    @property
    def mean_bytes(self) -> float:
        """The mean size of a replica."""
        replicas = self.replicas.total()
        return self.bytes.total() / replicas if replicas else 0.0

    def _count(self, place: Place, number: int) -> None:
        for node in place.nodes:
            self.replicas[node] += number
            self.bytes[node] += number * place.size
            of_table = self.of_table.setdefault(node, Counter())
            of_table[place.table_id] += number
            if not of_table[place.table_id]:
                del of_table[place.table_id]

    def _put(self, tablet_id: str, before: Place | None, place: Place | None) -> None:
        self.crowded.discard(tablet_id)
        if before is not None and before.rests:
            for node in before.nodes:
                by_table = self.resting[node][before.zones]
                by_table[before.table_id] = [p for p in by_table[before.table_id] if p is not before]
                if not by_table[before.table_id]:
                    del by_table[before.table_id]
                if not by_table:
                    del self.resting[node][before.zones]
        if place is not None and place.rests:
            for node in place.nodes:
                by_zones = self.resting.setdefault(node, {})
                by_zones.setdefault(place.zones, {}).setdefault(place.table_id, []).append(place)
            if place.crowded:
                self.crowded.add(tablet_id)

    def place(self, tablet_id: str) -> Place:
        """Where a tablet is."""
        return self._places[tablet_id]


def _place_of(s: Situation) -> Place:
    nodes: list[str] = [m.peer.node_id for m in s.members if not m.leaving]
    if s.intent is not None and s.intent.target_node not in nodes:
        nodes.append(s.intent.target_node)
    zones = sorted(m.node.zone for m in s.members if m.node is not None)
    rests = at_rest(s) and not s.tablet.by_hand
    return Place(s.tablet, tuple(nodes), tablet_bytes(s.tablet), rests, tuple(zones))
