"""Chooses which leaders move, so that they are spread over the nodes. Called by planner through
`leader_moves.py`; pure.

Any of a group's `places` may lead it. An assignment of groups to places is a semi-matching. It is optimal if
no cost-reducing path is left. See Harvey, Ladner, Lovász, Tamir: Semi-matchings for bipartite graphs and load
balancing, 2006. A path moves one leader from each of its nodes to the next. Most paths have one move. Where
replicas are spread unevenly, only paths of several nodes reach the optimum.

The share of a node is the most that it leads in any optimal assignment. So it depends on the places alone,
and not on who leads now.

The measure of an assignment is compared in this order:
1. how many leaders the nodes have above their shares plus one;
2. for each table the sum of the squares of its leaders per node;
3. the sum of the squares of all leaders per node;
4. the same per zone, then the same per machine.

Where nothing is left to move by this measure, `leader_loads.py` exchanges leaders of different loads.

Part 4 decides only between two nodes of which one leads one more than the other. Nodes come before zones and
machines, since zones and machines may have different numbers of nodes.

Invariants: each path lowers the measure, so moves end and none is undone. While a node leads more than one
above its share, there is a move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

STEP = 2
"""A leader moves to spread counts only if its node leads at least this many more than the target. With less,
the two would only change places. Nodes above their share plus one are excepted.
"""


@dataclass(frozen=True, slots=True)
class Group:
    """A tablet: who leads it, and the nodes that may lead it. `places` includes `leader`. It has only the
    leader if the leader must not move.
    """

    tablet_id: str
    table: str
    leader: str
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """A group gets another leader: `target` in place of `source`.

    - `leads`: how many groups source and target lead. `of_table`: the same for the groups of this table.
    - `share`: the share of the source.
    - `of_zone`, `of_machine`: how many groups their zones and machines lead.

    All are counted before the first move of the plan.
    """

    tablet_id: str
    source: str
    target: str
    leads: tuple[int, int]
    of_table: tuple[int, int]
    share: int
    of_zone: tuple[int, int] = (0, 0)
    of_machine: tuple[int, int] = (0, 0)
    loads: tuple[int, int] | None = None
    """Set if the leader moves for its load (`leader_loads.py`): the loads of source and target, or of their
    zones or machines.
    """
    evens: str = "node"
    """Of which kind of place `loads` gives the loads: node, zone or machine."""
    returns: bool = False
    """Whether this leader moves back in exchange for a busier one."""


@dataclass(frozen=True, slots=True)
class Sites:
    """Where nodes are: their zones and machines. A node that is not listed has a machine of its own, and no
    zone.
    """

    zones: Mapping[str, str] = field(default_factory=dict)
    machines: Mapping[str, str] = field(default_factory=dict)

    def zone(self, node: str) -> str:
        """The node's zone."""
        return self.zones.get(node, "")

    def machine(self, node: str) -> str:
        """The node's machine."""
        return self.machines.get(node, node)


NOWHERE = Sites()
"""Sites in which each node has a machine of its own, and all are in one zone."""


def choose_moves(groups: Sequence[Group], most: int, sites: Sites = NOWHERE) -> tuple[Move, ...]:
    """The first moves of leaders that spread them over the nodes; at most `most`, and none if they are spread.

    Each group moves at most once.
    """
    if not groups or most <= 0:
        return ()
    share = shares(groups)
    spread = _Spread(groups, {g.tablet_id: g.leader for g in groups}, most, sites)
    leads, by_zone, by_machine = Counter(spread.load), Counter(spread.by_zone), Counter(spread.by_machine)
    of_table = {table: Counter(of) for table, of in spread.of_table.items()}
    while not spread.full and (
        _lower_excess(spread, share)
        or _spread_tables(spread, share)
        or _spread_all(spread, share)
        or _spread_sites(spread, share)
    ):
        pass
    found = []
    for group, source in spread.moves():
        target, of = spread.at[group.tablet_id], of_table[group.table]
        pair = (leads[source], leads[target])
        zones = by_zone[sites.zone(source)], by_zone[sites.zone(target)]
        machines = by_machine[sites.machine(source)], by_machine[sites.machine(target)]
        in_table = of[source], of[target]
        found.append(Move(group.tablet_id, source, target, pair, in_table, share[source], zones, machines))
    return tuple(found[:most])


def shares(groups: Sequence[Group]) -> Counter[str]:
    """The share of each node: the most leaders that it has in any optimal assignment."""
    spread = _Spread(groups, _greedy(groups), None)
    settled: set[str] = set()
    while True:
        source = next((n for n in spread.heaviest() if n not in settled), None)
        if source is None:
            break
        path, reached = spread.path(source, _below(spread.load, spread.load[source] - STEP))
        if path:
            spread.walk(path)
            settled.clear()
        else:
            settled |= reached  # no lighter node can be reached from any of these either
    share = Counter({node: spread.load[node] for node in spread.nodes})
    for load in sorted(set(share.values()), reverse=True):
        # One more leader can reach a node from a node that leads one more. The assignment stays optimal.
        for node in spread.reached_from([n for n in spread.nodes if spread.load[n] == load]):
            if spread.load[node] == load - 1:
                share[node] = load
    return share


def _greedy(groups: Iterable[Group]) -> dict[str, str]:
    """An assignment near the optimum. Groups with the fewest places choose first."""
    load: Counter[str] = Counter()
    at = {}
    for group in sorted(groups, key=lambda g: (len(g.places), g.tablet_id)):
        node = min(group.places, key=lambda n: (load[n], n))
        at[group.tablet_id] = node
        load[node] += 1
    return at


def _lower_excess(spread: _Spread, share: Counter[str]) -> bool:
    """Move a leader from a node that leads more than one above its share to a node that leads fewer than its
    share.

    Other leaders may have to move along the way, so this looks for a path of moves. There is one while a node
    leads too many: an optimal assignment differs from the present one by such paths.
    """
    over = [n for n in spread.heaviest() if spread.load[n] > share[n] + 1]
    for source in sorted(over, key=lambda n: share[n] - spread.load[n]):
        path, _ = spread.path(source, lambda n: spread.load[n] < share[n])
        if path:
            spread.walk(path)
            return True
    return False


def _spread_tables(spread: _Spread, share: Counter[str]) -> bool:
    """Move a leader to a node that leads fewer of the same table. The target leads at most its share plus one
    afterwards.
    """
    for table in spread.tables:
        of = spread.of_table[table]
        for source in sorted(of, key=lambda n: (-of[n], n)):
            if of[source] < STEP:
                break
            if path := _path_of_table(spread, share, table, source):
                spread.walk(path, table)
                return True
    return False


def _path_of_table(spread: _Spread, share: Counter[str], table: str, source: str) -> list[str]:
    fewer, room = _below(spread.of_table[table], spread.of_table[table][source] - STEP), _room(spread, share)
    path, _ = spread.path(source, lambda n: fewer(n) and room(n), table=table)
    return path


def _spread_all(spread: _Spread, share: Counter[str]) -> bool:
    """Move a leader to a node that leads fewer in all, if its table stays as well spread."""
    for source in spread.heaviest():
        if path := _path_in_all(spread, share, source):
            spread.walk(path)
            return True
    return False


def _path_in_all(spread: _Spread, share: Counter[str], source: str) -> list[str]:
    fewer, room = _below(spread.load, spread.load[source] - STEP), _room(spread, share)
    tables = spread.of_table
    path, _ = spread.path(source, lambda n: fewer(n) and room(n), lambda t, a, b: tables[t][a] > tables[t][b])
    return path


def _spread_sites(spread: _Spread, share: Counter[str]) -> bool:
    """Move a leader to a node that leads one fewer, if its zone or machine leads fewer by STEP.

    The two nodes swap their counts, so the balance of nodes and tables stays as good."""
    room, tables = _room(spread, share), spread.of_table
    for source in spread.heaviest():
        for target in spread.beside(source):
            alike = spread.load[source] == spread.load[target] + 1
            if not (alike and room(target) and spread.betters_sites(source, target)):
                continue
            if spread.edge(source, target, lambda t, a, b: tables[t][a] > tables[t][b]):
                spread.walk([source, target])
                return True
    return False


def _below(load: Counter[str], limit: int) -> Callable[[str], bool]:
    return lambda node: load[node] <= limit


def _room(spread: _Spread, share: Counter[str]) -> Callable[[str], bool]:
    """Whether one more leader leaves a node within its share plus one."""
    return lambda node: spread.load[node] <= share[node]


Edge = Callable[[str, str, str], bool]
"""A function that says whether a leader of this table may go from one node to another."""


class _Spread:
    """An assignment that is being improved. `moved`: the first place of each group that moved, in the order
    of the moves.
    """

    def __init__(
        self, groups: Sequence[Group], at: dict[str, str], most: int | None, sites: Sites = NOWHERE
    ) -> None:
        self.at = at
        self._sites = sites
        self.by_zone: Counter[str] = Counter()
        self.by_machine: Counter[str] = Counter()
        self.moved: dict[str, str] = {}
        self._most = most
        self._groups = {g.tablet_id: g for g in groups}
        self.load: Counter[str] = Counter()
        self.of_table: dict[str, Counter[str]] = {}
        self._led: dict[str, dict[str, dict[str, dict[str, None]]]] = {}
        """The groups by leading node, by another place, by table."""
        for group in groups:
            self._put(group, at[group.tablet_id])
        self.nodes = sorted({n for g in groups for n in g.places})
        self.tables = sorted(self.of_table)

    @property
    def full(self) -> bool:
        """Whether as many groups moved as requested."""
        return self._most is not None and len(self.moved) >= self._most

    def moves(self) -> list[tuple[Group, str]]:
        """The groups that are led elsewhere now, and where each was led before."""
        return [(self._groups[t], node) for t, node in self.moved.items() if self.at[t] != node]

    def beside(self, node: str) -> list[str]:
        """The nodes that may get a leader from this one."""
        return sorted(place for place, tables in self._led.get(node, {}).items() if tables)

    def betters_sites(self, source: str, target: str) -> bool:
        """Whether moving one leader spreads zones better, or spreads machines better and zones as well as before."""
        sites = self._sites
        zones = self.by_zone[sites.zone(source)] - self.by_zone[sites.zone(target)]
        machines = self.by_machine[sites.machine(source)] - self.by_machine[sites.machine(target)]
        if sites.zone(source) != sites.zone(target) and zones != 1:
            return zones >= STEP
        return sites.machine(source) != sites.machine(target) and machines >= STEP

    def heaviest(self) -> list[str]:
        """All nodes, those that lead most first."""
        return sorted(self.nodes, key=lambda n: (-self.load[n], n))

    def path(
        self, source: str, ends: Callable[[str], bool], may: Edge | None = None, table: str | None = None
    ) -> tuple[list[str], set[str]]:
        """The nodes of a shortest path to a node for which `ends` is true, and all nodes reached.

        Of several such nodes it takes the least loaded one. Without a path, the first list is empty. `table`:
        only leaders of this table may move.
        """
        before: dict[str, str] = {source: ""}
        rim = [source]
        while rim:
            further = []
            for node in rim:
                for place in sorted(self._led.get(node, {})):
                    if place not in before and self.edge(node, place, may, table):
                        before[place] = node
                        further.append(place)
            if found := [n for n in further if ends(n)]:
                path = [min(found, key=lambda n: (self.load[n], n))]
                while before[path[-1]]:
                    path.append(before[path[-1]])
                return path[::-1], set(before)
            rim = further
        return [], set(before)

    def reached_from(self, sources: Sequence[str]) -> set[str]:
        """All nodes that can be reached by paths from these."""
        found, rim = set(sources), list(sources)
        while rim:
            further = {p for node in rim for p, by in self._led.get(node, {}).items() if by} - found
            found |= further
            rim = sorted(further)
        return found

    def edge(self, node: str, place: str, may: Edge | None, table: str | None = None) -> bool:
        """Whether a leader may go from the one node to the other."""
        tables = self._led[node].get(place, {})
        if table is not None:
            return table in tables
        return any(may is None or may(t, node, place) for t in tables)

    def walk(self, path: Sequence[str], table: str | None = None) -> None:
        """Move a leader along each edge, the last edge first. So each node gives one before it takes one.

        Of several groups, choose the one whose table this move spreads best. `table`: only leaders of this
        table.
        """
        for source, target in reversed(list(pairwise(path))):
            found = self._led[source][target]
            names = [table] if table is not None else list(found)
            gain = {t: self.of_table[t][source] - self.of_table[t][target] for t in names}
            chosen = max(gain, key=lambda t: (gain[t], t))
            self._move(self._groups[min(found[chosen])], target)

    def _move(self, group: Group, target: str) -> None:
        source = self.at[group.tablet_id]
        self._count(source, -1)
        self.of_table[group.table][source] -= 1
        for place in group.places:
            if place != source:
                by_table = self._led[source][place]
                by_table[group.table].pop(group.tablet_id)
                if not by_table[group.table]:
                    del by_table[group.table]
        self.at[group.tablet_id] = target
        self._put(group, target)
        self.moved.setdefault(group.tablet_id, source)

    def _put(self, group: Group, node: str) -> None:
        self._count(node, 1)
        self.of_table.setdefault(group.table, Counter())[node] += 1
        led = self._led.setdefault(node, {})
        for place in group.places:
            if place != node:
                led.setdefault(place, {}).setdefault(group.table, {})[group.tablet_id] = None

    def _count(self, node: str, number: int) -> None:
        self.load[node] += number
        self.by_zone[self._sites.zone(node)] += number
        self.by_machine[self._sites.machine(node)] += number
