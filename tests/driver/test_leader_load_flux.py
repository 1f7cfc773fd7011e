"""Loads that go up and down, counted and told as nodes do it: leaders are exchanged, and none goes to and fro."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from stele.driver.known import Known
from stele.driver.leader_balance import Group, shares
from stele.driver.leader_trials import CALM_COUNTS_MS, CALM_MAX_MS, CALM_MS, LeaderMemory
from stele.driver.planner import plan
from stele.driver.steps import MoveLeader
from stele.driver.trials import Trials
from stele.driver.view import ClusterView
from stele.tserver.leader_load import LeaderLoad
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY

SPREAD = replace(POLICY, balance_leaders=True)
SECOND_MS = 1_000
MINUTE = 60


@dataclass(eq=False)
class Counted:
    """A replica as `LeaderLoad` counts it."""

    tablet_id: str
    node_id: str
    is_leader: bool = False
    running: bool = True
    load: int = 0


@dataclass
class World:
    """A cluster that clients ask for something: `rates` a second of each tablet. Nodes count, and masters know what they told."""

    cluster: Cluster
    rng: random.Random
    now_ms: int = 0
    rates: dict[str, float] = field(default_factory=dict)
    moves: list[tuple[str, str, str, int]] = field(default_factory=list)
    told: int = 0
    """Reports because of loads alone."""

    def __post_init__(self) -> None:
        self.counts = {n: LeaderLoad() for n in self.cluster.nodes}
        self.replicas = {
            (t.tablet_id, p.node_id): Counted(t.tablet_id, p.node_id)
            for t in self.cluster.tablets.values()
            for p in t.config.peers
        }
        self.known: dict[tuple[str, str], int] = {}
        self.kept = Known()
        self.memory = LeaderMemory()

    def second(self) -> None:
        """Clients ask, nodes count, and the driver makes a pass."""
        self.now_ms += SECOND_MS
        for (tablet_id, node_id), replica in self.replicas.items():
            leads = self.cluster.tablets[tablet_id].leader == node_id
            if leads != replica.is_leader:
                replica.is_leader = leads
                self.known[tablet_id, node_id] = replica.load
            if leads and (rate := self.rates.get(tablet_id, 0.0)):
                units = max(0, round(self.rng.gauss(rate, rate**0.5)))
                self.counts[node_id].add(replica, units)  # type: ignore[arg-type]
        for count in self.counts.values():
            found: list[Any] = list(count.look(self.now_ms))
            for replica in found:
                self.told += 1
                self.known[replica.tablet_id, replica.node_id] = replica.load
        view = self.view()
        known = self.memory.look(view, SPREAD.leader_moves_per_minute, self.now_ms)
        for step in plan(view, SPREAD, Trials(leaders=known), self.kept):
            assert isinstance(step, MoveLeader), step
            self.moves.append(
                (
                    step.tablet_id,
                    self.cluster.tablets[step.tablet_id].leader,
                    step.target_node,
                    self.now_ms,
                )
            )
            self.cluster.apply(step)
            self.memory.note(step, None, self.now_ms)

    def view(self) -> ClusterView:
        """What the masters know."""
        view = self.cluster.view()
        tablets = tuple(
            replace(
                t,
                replicas=tuple(
                    replace(r, load=self.known.get((t.tablet_id, r.node_id), 0)) for r in t.replicas
                ),
            )
            for t in view.tablets
        )
        return replace(
            view,
            tablets=tablets,
            nodes=tuple(replace(n, load=self.counts[n.node_id].total) for n in view.nodes),
        )

    def run(self, seconds: int, each: Callable[[int], None] | None = None) -> int:
        """Let time pass. Returns how many leaders moved."""
        before = len(self.moves)
        for number in range(seconds):
            if each is not None:
                each(number)
            self.second()
        return len(self.moves) - before

    def by_node(self) -> list[float]:
        """What clients ask of each node's leaders, the most first."""
        found = dict.fromkeys(self.cluster.nodes, 0.0)
        for t in self.cluster.tablets.values():
            found[self.cluster.nodes[t.leader].node_id] += self.rates.get(t.tablet_id, 0.0)  # type: ignore[index]
        return sorted(found.values(), reverse=True)

    def check_counts(self) -> None:
        """No node leads more than one above its share."""
        found = [
            Group(t.tablet_id, str(t.table), t.leader, tuple(sorted(p.node_id for p in t.config.peers)))
            for t in self.cluster.tablets.values()
        ]
        share, leads = shares(found), Counter(g.leader for g in found)
        assert all(leads[n] <= share[n] + 1 for n in leads)

    def apart_ms(self) -> int:
        """The shortest time between two moves of one leader."""
        times: dict[str, list[int]] = {}
        for tablet, _, _, when in self.moves:
            times.setdefault(tablet, []).append(when)
        return min((b - a for at in times.values() for a, b in pairwise(at)), default=1 << 30)


def world(seed: int, machines: int = 3, tablets: int = 12) -> World:
    """Leaders are spread by count."""
    found = World(Cluster(machines, 1, tablets, 3), random.Random(seed))
    found.run(30)
    found.moves.clear()
    return found


def pile(found: World, rate: float) -> None:
    """What the first node leads is asked for most."""
    first = next(iter(found.cluster.nodes))
    for t in found.cluster.tablets.values():
        found.rates[t.tablet_id] = rate * found.rng.uniform(0.7, 1.3) if t.leader == first else rate / 50


def test_a_cluster_at_rest_tells_nothing() -> None:
    found = world(1)
    found.run(5 * MINUTE)
    assert found.told == 0 and not found.moves
    pile(found, 2_000)
    found.run(MINUTE)
    assert found.told
    found.rates.clear()
    found.run(5 * MINUTE)
    told = found.told
    assert not any(found.known.values())
    found.run(30 * MINUTE)
    assert found.told == told


@pytest.mark.parametrize("seed", range(6))
def test_loads_are_spread_and_stay_so(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = world(seed, 3 + seed % 3, 12 + 3 * seed)
    pile(found, 2_000)
    before = found.by_node()
    moved = found.run(8 * MINUTE)
    after, mean = found.by_node(), sum(before) / len(before)
    assert after[0] <= max(0.5 * before[0], 1.4 * mean)
    reports = found.told
    assert found.run(30 * MINUTE) == 0, "loads differ by chance alone"
    assert found.told - reports < 5 * len(found.cluster.tablets)
    found.check_counts()
    with capsys.disabled():
        print(
            f"\nseed {seed}: {moved} moves; the fullest node from {before[0]:.0f} to {after[0]:.0f}, mean {mean:.0f}; "
            f"{found.told - reports} reports in half an hour of {len(found.cluster.tablets)} tablets"
        )


@pytest.mark.parametrize("seed", range(4))
def test_no_leader_goes_to_and_fro_while_loads_change(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Now this tablet is busy, now that one, for half a minute to some minutes."""
    found = world(100 + seed, 3 + seed % 3, 18)
    ids = list(found.cluster.tablets)
    span_s = (20, 60, 150, 400)[seed]

    def change(second: int) -> None:
        if second % (span_s // 4) == 0:
            found.rates[found.rng.choice(ids)] = found.rng.choice((10, 100, 1_000, 4_000))

    moved = found.run(60 * MINUTE, change)
    assert found.apart_ms() >= CALM_MS
    by_tablet = Counter(tablet for tablet, *_ in found.moves)
    found.check_counts()
    with capsys.disabled():
        print(
            f"\na load changes each {span_s / 4:.0f} s: {moved} moves in an hour, {max(by_tablet.values(), default=0)} of "
            f"one leader; {found.told} reports"
        )
    assert moved <= 2 * 60, "more than one exchange a minute"


def test_drivers_that_follow_each_other_move_nothing_back() -> None:
    """None knows what the one before it moved. The successor of a leader has not counted its whole load yet."""
    found = world(7, 3, 12)
    pile(found, 2_000)

    def another(second: int) -> None:
        if second % 40 == 0:
            found.memory = LeaderMemory()
            found.memory.begins(found.now_ms)

    found.run(10 * MINUTE, another)
    twice = {tablet for tablet, n in Counter(tablet for tablet, *_ in found.moves).items() if n > 1}
    assert found.moves and not twice, found.moves


@pytest.mark.parametrize("seed", (0, 2))
def test_a_leader_that_moves_again_and_again_stays_longer_each_time(
    seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loads go up and down without end, by a third and more."""
    found = world(seed, 3, 6)
    usual = {t: found.rng.choice((500, 1_000, 2_000)) for t in found.cluster.tablets}

    def change(second: int) -> None:
        if second % 60 == 0:
            found.rates.update({t: rate * max(0.1, found.rng.gauss(1, 0.3)) for t, rate in usual.items()})

    moved = found.run(60 * MINUTE, change)
    again = 0
    for tablet in usual:
        calm_ms, before_ms = 0, -CALM_COUNTS_MS
        for when_ms in (when_ms for moves, *_, when_ms in found.moves if moves == tablet):
            assert when_ms >= before_ms + calm_ms
            if calm_ms and when_ms < before_ms + calm_ms + CALM_COUNTS_MS:
                calm_ms, again = min(2 * calm_ms, CALM_MAX_MS), again + 1
            else:
                calm_ms = CALM_MS
            before_ms = when_ms
    with capsys.disabled():
        print(f"\nseed {seed}: {moved} moves in an hour, {again} of a leader that had moved lately")
    assert again
