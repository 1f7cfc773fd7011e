"""Where the replicas of all tablets are, for balance. Kept from pass to pass, renewed for what changed; pure.

Used by `replica_balance.py`. It remembers that no move is left, so that a pass over a cluster at rest looks for
none.

Invariant: after `renew`, everything equals what a new object says of the same situations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from stele.driver.situation import Situation, at_rest
from stele.driver.targets import tablet_bytes


@dataclass(frozen=True, slots=True)
class Place:
    """A tablet, on the nodes where it is once the change under way is done. `size`: bytes of a replica. `rests`:
    it may be moved. `crowded`: two of the nodes are in one zone."""

    situation: Situation
    nodes: tuple[str, ...]
    size: int
    rests: bool
    crowded: bool

    @property
    def table_id(self) -> str:
        """Its table."""
        return self.situation.tablet.table_id

    @property
    def counts_as(self) -> tuple[object, ...]:
        """What balance depends on."""
        return self.nodes, self.size, self.rests, self.crowded, self.table_id


class Places:
    """The tablets of nodes, with counts.

    `replicas` and `bytes`: by node. `of_table`: by node and table. `resting`: tablets that may be moved, by table.
    `crowded`: those of them that are crowded. `balanced`: for which nodes it was found that no move is left.
    """

    def __init__(self) -> None:
        self.replicas: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.of_table: Counter[tuple[str, str]] = Counter()
        self.resting: dict[str, dict[str, Place]] = {}
        self.crowded: set[str] = set()
        self.balanced: object = None
        self._places: dict[str, Place] = {}
        self._stale: set[str] = set()

    def changed(self, tablets: Collection[str]) -> None:
        """These tablets were judged again, or are gone."""
        self._stale.update(tablets)

    def renew(self, situations: Mapping[str, Situation]) -> None:
        """Take over what changed."""
        for tablet_id in self._stale:
            s, before = situations.get(tablet_id), self._places.pop(tablet_id, None)
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
        self._stale.clear()

    @property
    def mean_bytes(self) -> float:
        """The mean size of a replica."""
        replicas = self.replicas.total()
        return self.bytes.total() / replicas if replicas else 0.0

    def _count(self, place: Place, number: int) -> None:
        for node in place.nodes:
            self.replicas[node] += number
            self.bytes[node] += number * place.size
            self.of_table[node, place.table_id] += number
            if not self.of_table[node, place.table_id]:
                del self.of_table[node, place.table_id]

    def _put(self, tablet_id: str, before: Place | None, place: Place | None) -> None:
        self.crowded.discard(tablet_id)
        if before is not None and before.rests:
            of_table = self.resting[before.table_id]
            del of_table[tablet_id]
            if not of_table:
                del self.resting[before.table_id]
        if place is not None and place.rests:
            self.resting.setdefault(place.table_id, {})[tablet_id] = place
            if place.crowded:
                self.crowded.add(tablet_id)

    def place(self, tablet_id: str) -> Place:
        """Where a tablet is."""
        return self._places[tablet_id]


def _place_of(s: Situation) -> Place:
    nodes: list[str] = [m.peer.node_id for m in s.members if not m.leaving]
    if s.intent is not None and s.intent.target_node not in nodes:
        nodes.append(s.intent.target_node)
    zones = [m.node.zone for m in s.members if m.node is not None]
    rests = at_rest(s) and not s.tablet.by_hand
    return Place(s, tuple(nodes), tablet_bytes(s.tablet), rests, len(set(zones)) < len(zones))
