"""Chooses leaders to move so that load is spread, once leader counts are. Called by planner through
`leader_groups.py`; pure.

The load of a leader is the number of requests of clients per second. A busy leader of one node and a quieter
one of another node are exchanged, so each node leads as many as before. The two are of one table, or the
counts of their tables stay as even. If the other node has no leader that can move back, quiet leaders of up
to three nodes are exchanged in a ring. If one node leads one more than another, one leader may move alone:
the two nodes swap their counts.

The measure is compared in this order: the sum of the squares of the loads of nodes, then of zones, then of
machines. An exchange lowers one of these numbers, and raises none before it. Some nodes, zones or machines
get load by it. Each of them ends at least a step below the load that the busy leader's place had before. The
number falls by at least twice the square of a step. Two nodes whose loads differ by less than two steps
exchange nothing.

Of several exchanges between two nodes, the one that lowers the measure most is chosen. For this choice alone,
the loads of each table on these nodes count as well, with half weight.

Invariants: the counts of nodes, tables, zones and machines stay as even as they were. While loads do not
change, exchanges end and none is undone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property

from stele.driver.leader_balance import Group, Move, Sites, shares

STEP_SHARE, STEP_MIN = 0.2, 200
"""A step is this part of the mean load of a node, but at least STEP_MIN requests a second. That many take a
node less than 1 % of a processor. So clusters with little to do stay as they are.
"""
_BUSIEST_MAX = 32
"""The most leaders of one node that are examined for a move to another one, the busiest first."""
_PAIRS_MAX = 64
"""The most pairs of nodes that are examined for one exchange, those that differ most first."""
_WAYS_PAIRS_MAX, _WAYS_MAX = 8, 4
"""Bounds on the search for exchanges by way of other nodes. Only the first _WAYS_PAIRS_MAX pairs are
searched, and in each pair only the _WAYS_MAX busiest leaders.
"""
_WAY_MAX = 3
"""The most leaders that are moved in exchange for one busy leader."""

_Step = tuple[Group, str, str]
"""A leader, the node that it leaves, and the node to which it goes."""


@dataclass(frozen=True, slots=True)
class _Swap:
    """An exchange: the busy leader's step first, then the steps of the leaders that go back.

    `kind`: an index into `_Loads.kinds`. It says whether the loads of nodes, zones or machines become more
    even.
    """

    steps: tuple[_Step, ...]
    kind: int


def choose_exchanges(
    groups: Mapping[str, Group],
    loads: Mapping[str, int],
    most: int,
    sites: Sites,
    calm: Set[str] = frozenset(),
) -> tuple[Move, ...]:
    """The first exchanges to make, as at most this many moves; empty if loads are spread. Each group moves at
    most once.

    `loads`: by tablet, without zeros. `calm`: tablets whose leaders stay for now.
    """
    own: Counter[str] = Counter()
    for tablet_id, load in loads.items():
        if (group := groups.get(tablet_id)) is not None:
            own[group.leader] += load
    if _are_alike(own, sites):
        return ()
    spread = _Loads(groups, loads, own, sites, calm)
    found: list[Move] = []
    while (swap := spread.next(most - len(found))) is not None:
        found += spread.carry_out(swap)
    return tuple(found)


def _are_alike(own: Counter[str], sites: Sites) -> bool:
    """Whether the loads of all nodes differ by less than a step. That is so in most calls, and then no
    leaders are examined.
    """
    nodes = len(sites.machines)
    step = max(STEP_SHARE * own.total() / max(nodes, 1), STEP_MIN)
    least = min(own.values(), default=0) if len(own) >= nodes > 0 else 0
    return max(own.values(), default=0) - least < step


class _Loads:
    """The assignment of leaders while exchanges are chosen. `own`: the load of each node.

    `kinds`: (kind, function, loads) for the kinds of place "node", "zone" and "machine". The function gives
    the place of a node. `loads`: the load of each place.
    """

    def __init__(
        self,
        groups: Mapping[str, Group],
        loads: Mapping[str, int],
        own: Counter[str],
        sites: Sites,
        calm: Set[str],
    ) -> None:
        self._groups = groups
        self._loads = loads
        self._sites = sites
        self._fixed = set(calm)
        self._led: dict[str, dict[str, Group]] = {}
        self._near: dict[str, set[str]] = {}
        self._of_table: dict[str, Counter[str]] = {}
        self._load_of_table: dict[str, Counter[str]] = {}
        nodes: set[str] = set()
        for group in groups.values():
            nodes.update(group.places)
            self._put(group, group.leader)
        self._nodes = sorted(nodes)
        self._before = own
        self._step = max(STEP_SHARE * own.total() / max(len(nodes), 1), STEP_MIN)
        self.kinds: list[tuple[str, Callable[[str], str], Counter[str]]] = []
        for kind, place in (("node", _itself), ("zone", sites.zone), ("machine", sites.machine)):
            of_place: Counter[str] = Counter()
            for node in self._nodes:
                of_place[place(node)] += own[node]
            self.kinds.append((kind, place, of_place))

    def _put(self, group: Group, node: str) -> None:
        self._led.setdefault(node, {})[group.tablet_id] = group
        self._near.setdefault(node, set()).update(group.places)
        self._of_table.setdefault(group.table, Counter())[node] += 1
        self._load_of_table.setdefault(group.table, Counter())[node] += self._load(group)

    def _load(self, group: Group) -> int:
        return self._loads.get(group.tablet_id, 0)

    @cached_property
    def _share(self) -> Counter[str]:
        return shares([self._groups[t] for t in sorted(self._groups)])

    # --- candidates

    def next(self, most: int) -> _Swap | None:
        """The next exchange, of at most this many moves; None if there is none."""
        if most < 2:
            return None  # half an exchange would change the counts
        for kind in range(len(self.kinds)):
            pairs = self._pairs(kind)
            for source, target in pairs:
                if (swap := self._best(kind, self._direct(kind, source, target))) is not None:
                    return swap
            for source, target in pairs[:_WAYS_PAIRS_MAX]:
                steps = (way for way in self._over_others(source, target) if len(way) <= most)
                if (swap := self._best(kind, steps)) is not None:
                    return swap
        return None

    def _differs(self, kind: int, source: str, target: str) -> int:
        """How much more load the place of `source` has than the place of `target`; 0 if both are in one
        place.
        """
        _, place, loads = self.kinds[kind]
        return loads[place(source)] - loads[place(target)]

    def _pairs(self, kind: int) -> list[tuple[str, str]]:
        """Pairs of nodes between which an exchange may help, those that differ most first."""
        found = [
            (-differs, source, target)
            for source in self._nodes
            for target in self._near.get(source, ())
            if (differs := self._differs(kind, source, target)) >= 2 * self._step
        ]
        found.sort()
        return [(source, target) for _, source, target in found[:_PAIRS_MAX]]

    def _busiest(self, source: str, target: str) -> list[Group]:
        busy = [g for g in self._movable(source, target) if self._load(g) >= self._step]
        return sorted(busy, key=lambda g: (-self._load(g), g.tablet_id))[:_BUSIEST_MAX]

    def _movable(self, source: str, target: str) -> Iterator[Group]:
        for tablet_id, group in self._led.get(source, {}).items():
            if target in group.places and tablet_id not in self._fixed:
                yield group

    def _direct(self, kind: int, source: str, target: str) -> Iterator[tuple[_Step, ...]]:
        """Exchanges between two nodes. For each busy leader, they include those that leave both nodes with
        about the same load.
        """
        half = self._differs(kind, source, target) / 2
        by_table: dict[str, list[tuple[int, str]]] = {}
        others: list[tuple[int, str]] = []
        for group in self._movable(target, source):
            entry = self._load(group), group.tablet_id
            by_table.setdefault(group.table, []).append(entry)
            if self._of_table[group.table][target] > self._of_table[group.table][source]:
                others.append(entry)
        for entries in (*by_table.values(), others):
            entries.sort()
        for group in self._busiest(source, target):
            step = group, source, target
            if self._may_move_alone(*step):
                yield (step,)
            for entries in (by_table.get(group.table, []), others):
                at = bisect_left(entries, (self._load(group) - half, ""))
                for _, tablet_id in entries[max(0, at - 1) : at + 2]:
                    yield step, (self._groups[tablet_id], target, source)

    def _may_move_alone(self, group: Group, source: str, target: str) -> bool:
        """Whether all counts stay as even: in each of them the target leads one fewer than the source."""
        of_table, sites = self._of_table[group.table], self._sites
        if len(self._led[source]) <= len(self._led.get(target, ())) or of_table[source] <= of_table[target]:
            return False
        for place in (sites.zone, sites.machine):
            here, there = place(source), place(target)
            if here != there and self._leads(place, here) <= self._leads(place, there):
                return False
        return len(self._led.get(target, ())) <= self._share[target]

    def _leads(self, place: Callable[[str], str], where: str) -> int:
        return sum(len(led) for node, led in self._led.items() if place(node) == where)

    def _over_others(self, source: str, target: str) -> Iterator[tuple[_Step, ...]]:
        """Exchanges in which quiet leaders go back by way of other nodes."""
        for group in self._busiest(source, target)[:_WAYS_MAX]:
            for table in (group.table, ""):
                if way := self._way(target, source, table):
                    yield (group, source, target), *way

    def _way(self, source: str, target: str, table: str) -> tuple[_Step, ...]:
        """A shortest way from one node to another, with the quietest leader that can move along each part of
        it.

        `table`: only leaders of this table. "": leaders of any table whose counts allow it.
        """
        before: dict[str, _Step] = {}
        rim = [source]
        for _ in range(_WAY_MAX):
            further = []
            for node in rim:
                for place, (_, tablet_id) in sorted(self._quietest(node, table).items()):
                    if place != source and place not in before:
                        before[place] = self._groups[tablet_id], node, place
                        further.append(place)
            if target in before:
                way = [before[target]]
                while way[-1][1] != source:
                    way.append(before[way[-1][1]])
                return tuple(reversed(way))
            rim = further
        return ()

    def _quietest(self, node: str, table: str) -> dict[str, tuple[int, str]]:
        """By place: load and tablet of the quietest leader that may go there."""
        found: dict[str, tuple[int, str]] = {}
        for tablet_id, group in self._led.get(node, {}).items():
            if tablet_id in self._fixed or (table and group.table != table):
                continue
            of_table, entry = self._of_table[group.table], (self._load(group), tablet_id)
            for place in group.places:
                if place != node and (table or of_table[node] > of_table[place]):
                    found[place] = min(found.get(place, entry), entry)
        return found

    # --- what an exchange is worth

    def _best(self, kind: int, candidates: Iterable[tuple[_Step, ...]]) -> _Swap | None:
        """The exchange that lowers the measure most; None if none lowers it by enough."""
        found: tuple[float, tuple[_Step, ...]] | None = None
        for steps in candidates:
            gain = self._gain(kind, steps)
            if gain > 0 and (found is None or gain > found[0]):
                found = gain, steps
        return _Swap(found[1], kind) if found is not None else None

    def _gain(self, kind: int, steps: tuple[_Step, ...]) -> float:
        """By how much an exchange lowers the measure. 0: by too little, or a count would become less even."""
        of_nodes: Counter[str] = Counter()
        of_tables: dict[str, Counter[str]] = {}
        counts: dict[str, Counter[str]] = {}
        for group, source, target in steps:
            load = self._load(group)
            for change, by in (
                (of_nodes, load),
                (of_tables.setdefault(group.table, Counter()), load),
                (counts.setdefault(group.table, Counter()), 1),
            ):
                change[source] -= by
                change[target] += by
        if sum(_rise(self._of_table[table], change) for table, change in counts.items()) > 0:
            return 0.0
        rise = 0.0
        for number, (_, place, loads) in enumerate(self.kinds[: kind + 1]):
            of_places: Counter[str] = Counter()
            for node, more in of_nodes.items():
                of_places[place(node)] += more
            rise = _rise(loads, of_places)
            if number < kind and rise > 0:
                return 0.0
        limit = loads[place(steps[0][1])] - self._step
        if any(more > 0 and loads[where] + more > limit for where, more in of_places.items()):
            return 0.0
        if -of_places[place(steps[0][1])] < self._step or rise > -2 * self._step * self._step:
            return 0.0
        in_tables = sum(_rise(self._load_of_table[table], change) for table, change in of_tables.items())
        return max(-rise - in_tables / 2, 1.0)  # tables only choose between exchanges

    # --- what is chosen

    def carry_out(self, swap: _Swap) -> Iterator[Move]:
        """Count an exchange as done. Returns its moves, the last first, so each node gives a leader before it
        takes one.
        """
        for number, (group, source, target) in reversed(list(enumerate(swap.steps))):
            yield self._move(group, source, target, swap.kind, returns=number > 0)

    def _move(self, group: Group, source: str, target: str, kind: int, *, returns: bool) -> Move:
        load, name = self._load(group), self.kinds[kind][0]
        leads = len(self._led[source]), len(self._led.get(target, ()))
        of_table = self._of_table[group.table]
        in_table = of_table[source], of_table[target]
        of_table[source] -= 1
        self._load_of_table[group.table][source] -= load
        del self._led[source][group.tablet_id]
        self._put(group, target)
        self._fixed.add(group.tablet_id)
        for _, place, loads in self.kinds:
            loads[place(source)] -= load
            loads[place(target)] += load
        before = self._before_of(kind, source), self._before_of(kind, target)
        return Move(
            group.tablet_id, source, target, leads, in_table, 0, loads=before, evens=name, returns=returns
        )

    def _before_of(self, kind: int, node: str) -> int:
        """The load of the node's place before the first move."""
        place = self.kinds[kind][1]
        return sum(self._before[n] for n in self._nodes if place(n) == place(node))


def _itself(node: str) -> str:
    return node


def _rise(numbers: Mapping[str, int], changes: Mapping[str, int]) -> float:
    """By how much these changes raise the sum of the squares."""
    return sum(change * (2 * numbers[where] + change) for where, change in changes.items())
