"""Chooses moves that balance replicas over zones and nodes. Called by planner and `stele rebalance`; pure.

First the spread of each tablet over zones is repaired. Then a move must lessen a measure by at least twice
STEP:

    sum over nodes of (replicas^2 + (bytes / mean bytes of a replica)^2)
    + 2 * sum over nodes and tables of (replicas of the table)^2

A move of a tablet with the size s (in mean replicas) from a to b lessens it by twice

    (replicas a - replicas b - 1) + 2 * (same of its table - 1) + s * (bytes a - bytes b - s)

The last s is multiplied by 1.5, so that small changes of sizes move nothing back. No move reduces the spread
of a tablet over zones. Each move lessens a sum that cannot fall below zero, so moves always end. The move
that lowers the sum most is chosen, because a smaller one might have to be undone later. Of equal moves it is
the one between machines that differ most. Nothing moves for machines alone, since the disks of nodes decide
how much they hold.

Invariant: it moves only tablets at rest, and only to nodes that may get replicas and have room. It never
moves two replicas onto one machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from stele.driver.moves import begin_move
from stele.driver.policy import Policy
from stele.driver.replica_places import Place, Places
from stele.driver.situation import Situation
from stele.driver.slots import Slots
from stele.driver.steps import Step
from stele.driver.targets import Load, has_room, host_of, usable
from stele.driver.view import MOVE, ClusterView, NodeView

STEP = 1.0
"""A move must lower the measure by at least twice this. Moving one replica to a node with two fewer lowers
the first term by as much.
"""
_TABLE_WEIGHT = 2
"""The weight of tables in the measure. It lets nodes with equally many replicas exchange replicas of a table
that only some of them have.
"""
_SIZE_WEIGHT = 1.5
_NO_TABLES: Counter[str] = Counter()
_PAIRS_MAX = 256
"""The most pairs of nodes that are examined for one move, those that differ most first."""


@dataclass(frozen=True, slots=True)
class Move:
    """The move of one replica to another node. `bytes`: how much is copied, by the largest replica that was
    reported.
    """

    tablet_id: str
    table_name: str
    replica_id: int
    source: str
    target: str
    bytes: int
    reason: str


class ReplicaBalance:
    """The places of replicas, as if each move under way or chosen were done."""

    def __init__(self, view: ClusterView, policy: Policy, places: Places, load: Load) -> None:
        self._policy = policy
        self._load = load
        self._places = places
        self._nodes: Mapping[str, NodeView] = {n.node_id: n for n in view.nodes}
        self._targets = [
            n
            for n in sorted(view.nodes, key=lambda n: n.node_id)
            if usable(n, "node", policy) and n.node_id not in load.avoid | load.out_of_reach
        ]
        self._mean = places.mean_bytes
        self._due: Counter[str] = Counter()
        self._moved: set[str] = set()
        """Tablets that were moved. Each moves at most once, since a tablet changes by one replica at a time.
        """
        self._short_of_room = False
        """Whether a move was refused only because its target has no room."""
        self._scene = (
            tuple((n.node_id, n.host, n.zone) for n in view.nodes),
            tuple(n.node_id for n in self._targets),
        )
        if self._is_balanced:
            return
        self._replicas = Counter(places.replicas)
        self._of_table = {node: Counter(tables) for node, tables in places.of_table.items()}
        self._bytes = Counter(places.bytes)
        several = len({n.zone for n in view.nodes}) > 1
        crowded = (places.place(t) for t in sorted(places.crowded)) if several else ()
        self._spread = [place for place in crowded if self._zones_of(place)]

    @property
    def _is_balanced(self) -> bool:
        """Whether an earlier look at these same nodes found no move, and nothing has changed since."""
        return self._places.balanced == self._scene

    def _count(self, place: Place, node: str, number: int) -> None:
        self._replicas[node] += number
        self._of_table.setdefault(node, Counter())[place.table_id] += number
        self._bytes[node] += number * place.size

    def moves(self) -> Iterator[Move]:
        """The moves in their order, until no move lowers the measure enough."""
        while (move := self.next()) is not None:
            yield move

    def next(self) -> Move | None:
        """The next move, or None. From then on the move counts as done."""
        if self._is_balanced:
            return None
        move = self._for_spread() or self._for_load()
        if move is None and not self._moved and not self._short_of_room:
            self._places.balanced = self._scene
        return move

    # --- zones

    def _zones_of(self, place: Place) -> tuple[str, list[str]] | None:
        """The zone with too many replicas of a tablet, and the zones that should have one more. None: the
        tablet is spread as well as possible.
        """
        zones = Counter(n.zone for m in place.nodes if (n := self._nodes.get(m)) is not None)
        if not zones:
            return None
        most = min(zones, key=lambda z: (-zones[z], z))
        fewer = sorted(
            {n.zone for n in self._targets if zones[n.zone] + 2 <= zones[most]}, key=lambda z: (zones[z], z)
        )
        return (most, fewer) if fewer else None

    def _for_spread(self) -> Move | None:
        while self._spread:
            place = self._spread.pop()
            found = self._zones_of(place)
            if found is None:
                continue
            most, fewer = found
            leader = place.tablet.leader_node
            sources = [m for m in place.nodes if (n := self._nodes.get(m)) is not None and n.zone == most]
            source = min(sources, key=lambda m: (m == leader, -self._replicas[m], m))
            for zone in fewer:
                fitting = [n for n in self._targets if n.zone == zone and self._fits(place, n)]
                if fitting:
                    target = min(fitting, key=lambda n: (self._replicas[n.node_id], n.node_id))
                    reason = f"more of its replicas than needed are in zone {most or '(none)'}, and zone {zone or '(none)'} has fewer"
                    return self._done(place, source, target, reason)
        return None

    # --- load

    def _for_load(self) -> Move | None:
        most: tuple[float, Place, str, NodeView] | None = None
        for source, target in self._pairs():
            best = self._best(source, target)
            if best is not None and (most is None or best[0] > most[0]):
                most = (*best, source, target)
        if most is None:
            return None
        _, place, source, target = most
        return self._done(place, source, target, self._why(place, source, target.node_id))

    def _pairs(self) -> list[tuple[str, NodeView]]:
        """Pairs (source, target) between which a move may help. Those whose replicas and bytes differ most come
        first. If that is equal, the pairs whose machines differ most come first.
        """
        of_table = self._largest_difference()
        machines: Counter[str] = Counter()
        for node, count in self._replicas.items():
            machines[host_of(self._nodes, node)] += count
        found = []
        for source in (n for n, count in self._replicas.items() if count > 0):
            for target in self._targets:
                replicas = self._replicas[source] - self._replicas[target.node_id]
                heavier = self._units(source) - self._units(target.node_id)
                # x * (h - 1.5 x) is at most h^2 / 6.
                most: float = replicas - 1 + _TABLE_WEIGHT * max(0, of_table - 1)
                most += heavier * heavier / 6 if heavier > 0 else 0.0
                if source != target.node_id and most >= STEP:
                    crowded = machines[host_of(self._nodes, source)] - machines[target.host]
                    found.append((-(replicas + heavier), -crowded, source, target.node_id, target))
        found.sort(key=lambda f: f[:4])
        return [(source, target) for *_, source, _, target in found[:_PAIRS_MAX]]

    def _largest_difference(self) -> int:
        """The largest surplus of a node in replicas of one table, compared with a possible target."""
        targets = {n.node_id for n in self._targets}
        most: Counter[str] = Counter()
        least: dict[str, int] = {}
        on_targets: Counter[str] = Counter()
        for node, tables in self._of_table.items():
            for table, count in tables.items():
                if count <= 0:
                    continue
                most[table] = max(most[table], count)
                if node in targets:
                    on_targets[table] += 1
                    least[table] = min(least.get(table, count), count)
        return max(
            (n - (least.get(t, 0) if on_targets[t] == len(targets) else 0) for t, n in most.items()),
            default=0,
        )

    def _units(self, node: str) -> float:
        return self._bytes[node] / self._mean if self._mean else 0.0

    def _best(self, source: str, target: NodeView) -> tuple[float, Place] | None:
        """The tablet whose move from `source` to `target` lowers the measure most. None if no move lowers it
        enough (`STEP`).
        """
        best: tuple[float, bool, int, str] | None = None
        found: Place | None = None
        replicas = self._replicas[source] - self._replicas[target.node_id] - 1
        heavier = self._units(source) - self._units(target.node_id)
        by_size = (
            heavier * heavier / (4 * _SIZE_WEIGHT) if heavier > 0 else 0.0
        )  # the most that any size adds
        here, there = self._of_table[source], self._of_table.get(target.node_id, _NO_TABLES)
        # Most tablets differ in nothing that decides, so whole groups of them are passed over.
        for zones, tables in self._places.resting.get(source, {}).items():
            if not self._keeps_spread(zones, source, target):
                continue
            for table, tablets in tables.items():
                plain = replicas + _TABLE_WEIGHT * (here[table] - there[table] - 1)
                if plain + by_size < STEP:
                    continue
                for place in tablets:
                    tablet_id = place.tablet.tablet_id
                    units = place.size / self._mean if self._mean else 0.0
                    gain = plain + units * (heavier - _SIZE_WEIGHT * units)
                    if gain < STEP or (best is not None and -gain > best[0]) or tablet_id in self._moved:
                        continue
                    leads = place.tablet.leader_node == source
                    key = (-gain, leads, place.size, tablet_id)
                    if (best is None or key < best) and self._fits(place, target):
                        best, found = key, place
        return (-best[0], found) if best is not None and found is not None else None

    def _fits(self, place: Place, target: NodeView) -> bool:
        """Whether the node has room, and its machine no replica of the tablet."""
        if any(host_of(self._nodes, node) == target.host for node in place.nodes):
            return False
        due = self._load.bytes_due[target.node_id] + self._due[target.node_id]
        room = has_room(target, due + place.size, self._policy)
        self._short_of_room |= not room
        return room

    def _keeps_spread(self, zones: tuple[str, ...], source: str, target: NodeView) -> bool:
        """Whether a tablet in these zones may move between these nodes."""
        left = self._nodes[source].zone
        return left == target.zone or zones.count(target.zone) < zones.count(left)

    def _why(self, place: Place, source: str, target: str) -> str:
        def has(node: str) -> str:
            own = self._of_table.get(node, _NO_TABLES)[place.table_id]
            return f"{self._replicas[node]} replicas ({own} of this table, {self._bytes[node]:,} bytes)"

        return f"node {source[:8]} has {has(source)}, node {target[:8]} has {has(target)}"

    def _done(self, place: Place, source: str, target: NodeView, reason: str) -> Move:
        tablet = place.tablet
        peer = tablet.config.peer_on(source)
        self._count(place, source, -1)
        self._count(place, target.node_id, 1)
        self._due[target.node_id] += place.size
        self._moved.add(tablet.tablet_id)
        return Move(
            tablet.tablet_id,
            tablet.table_name,
            peer.replica_id if peer is not None else 0,
            source,
            target.node_id,
            place.size,
            f"balance: {reason}",
        )


def begin_moves(
    view: ClusterView,
    policy: Policy,
    situation: Callable[[str], Situation | None],
    places: Places,
    load: Load,
    slots: Slots,
    epoch: int,
) -> list[Step]:
    """The first steps of moves for balance, as many as there are slots. `situation`: a function that gives a
    tablet's situation.
    """
    steps: list[Step] = []
    if not slots.can_move:
        return steps
    moves = ReplicaBalance(view, policy, places, load).moves()
    while slots.can_move and (move := next(moves, None)) is not None:
        s, target = situation(move.tablet_id), view.node(move.target)
        source = s.member(move.replica_id) if s is not None else None
        if s is not None and source is not None and target is not None and slots.begin_move():
            steps.append(begin_move(s, source, target, move.reason, MOVE, epoch))
    return steps
