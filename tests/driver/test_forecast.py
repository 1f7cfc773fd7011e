"""The forecast of a loss comes true: the forecast, then the loss in the model, healed to the end."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stele.driver.forecast import Forecast, foretell
from stele.driver.planner import plan
from stele.driver.policy import Policy
from stele.driver.steps import WAITS, Blocked
from stele.driver.view import ClusterView, NodeState
from stele.model.config import MemberType
from stele.model.ids import NodeId
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY, node_name

GIB = 1 << 30


def healed(cluster: Cluster) -> set[str]:
    """Heal until only waits are left. Returns the tablets that are Blocked then."""
    steps = plan(cluster.view(), POLICY)
    for _ in range(400):
        if not steps:
            return set()
        if all(isinstance(s, Blocked) for s in steps):
            return {s.tablet_id for s in steps}
        for step in steps:
            if not isinstance(step, WAITS):
                cluster.apply(step)
        cluster.advance()
        steps = plan(cluster.view(), POLICY)
    raise AssertionError("no end")


def lose(cluster: Cluster, nodes: set[NodeId]) -> None:
    for node_id in nodes:
        cluster.nodes[node_id].alive = False
        cluster.nodes[node_id].gone = True
    cluster.advance()


@pytest.mark.parametrize("seed", range(60))
def test_what_is_foretold_happens(seed: int) -> None:
    rng = random.Random(seed)
    machines = rng.randint(3, 8)
    rf = rng.choice([r for r in (1, 3, 5) if r <= machines])
    cluster = Cluster(machines, rng.randint(1, 3), rng.randint(1, 12), rf)
    lost = {node_name(n) for n in rng.sample(range(1, machines + 1), rng.randint(1, min(3, machines - 1)))}
    before = {t.tablet_id: {p.replica_id for p in t.config.peers} for t in cluster.tablets.values()}
    forecast = foretell(cluster.view(), POLICY, lost)

    lose(cluster, lost)
    blocked = healed(cluster)
    stopped = {t.tablet_id for t in cluster.tablets.values() if not cluster.has_quorum(t)}
    short = {t for t in blocked if t not in stopped}
    assert {a.tablet_id for a in forecast.stopped} == stopped
    assert {a.tablet_id for a in forecast.unhealed} == short
    made = {
        (t.tablet_id, sum(p.replica_id not in before[t.tablet_id] for p in t.config.peers))
        for t in cluster.tablets.values()
        if any(p.replica_id not in before[t.tablet_id] for p in t.config.peers)
    }
    foretold = {
        (t, sum(c.tablet_id == t for c in forecast.copies)) for t in {c.tablet_id for c in forecast.copies}
    }
    assert foretold == made
    assert forecast.harmless == (not stopped and not short)


def test_a_loss_of_nothing_costs_nothing() -> None:
    forecast = foretell(Cluster(4, 1, 4, 3).view(), POLICY, ())
    assert forecast == Forecast((), 0, 0, (), (), (), (), None, "")


def sized(view: ClusterView, *, size: int, free: int) -> ClusterView:
    tablets = tuple(
        replace(t, replicas=tuple(replace(r, bytes_on_disk=size) for r in t.replicas)) for t in view.tablets
    )
    nodes = tuple(replace(n, disk_free_bytes=free, disk_used_bytes=1) for n in view.nodes)
    return replace(view, tablets=tablets, nodes=nodes)


def test_room_is_counted_over_all_copies() -> None:
    """Each node has room for one replica of 40 GiB, but there are more to place."""
    view = sized(Cluster(5, 1, 10, 3).view(), size=40 * GIB, free=60 * GIB)
    forecast = foretell(view, POLICY, {node_name(1)})
    assert forecast.replicas == 6
    per_target = [c.target_node for c in forecast.copies]
    assert len(per_target) == len(set(per_target)) == 4
    assert (
        len(forecast.unhealed) == 2
        and "no ACTIVE node on another machine has room" in forecast.unhealed[0].reason
    )
    assert not forecast.harmless and forecast.bytes_copied == 160 * GIB


def test_the_least_time_follows_from_the_rate() -> None:
    view = sized(Cluster(6, 1, 6, 3).view(), size=GIB, free=100 * GIB)
    slow = Policy(max_copies=2, bytes_per_second=64 << 20)
    forecast = foretell(view, slow, {node_name(1)})
    assert forecast.copying_s == len(forecast.copies) * GIB / (2 * (64 << 20))
    alone = foretell(view, replace(slow, max_copies=100), {node_name(1)})
    assert alone.copying_s == GIB / (64 << 20), "not shorter than one copy"


def test_more_lost_than_the_policy_heals_is_said() -> None:
    view = Cluster(6, 1, 6, 3).view()
    forecast = foretell(view, replace(POLICY, max_lost_nodes=1), {node_name(1), node_name(4)})
    assert "2 nodes would be silent at once, more than maxLostNodes (1)" in forecast.healing_stops
    assert not forecast.harmless and forecast.copies, "the forecast also covers what the limit holds back"


def test_changes_under_way_are_taken_as_done() -> None:
    cluster = Cluster(5, 1, 1, 3)
    (tablet,) = cluster.tablets.values()
    lose(cluster, {tablet.config.peers[2].node_id})
    for _ in range(3):
        for step in plan(cluster.view(), POLICY):
            if not isinstance(step, WAITS):
                cluster.apply(step)
    view = cluster.view()
    (intent,) = view.intents
    forecast = foretell(view, POLICY, {intent.target_node})
    (copy,) = forecast.copies
    assert copy.lost_node == intent.target_node and forecast.replicas == 1 and not forecast.stopped


def test_nodes_that_drain_take_no_copy() -> None:
    cluster = Cluster(5, 1, 5, 3)
    cluster.nodes[node_name(5)].state = NodeState.DRAINING
    forecast = foretell(cluster.view(), POLICY, {node_name(1)})
    assert node_name(5) not in {c.target_node for c in forecast.copies}
    assert all(MemberType.VOTER is p.member_type for t in cluster.tablets.values() for p in t.config.peers)
