"""Where a new replica is placed, and which of too many replicas is removed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stele.driver.planner import plan
from stele.driver.steps import (
    BeginIntent,
    Blocked,
    RemovePeer,
)
from stele.driver.view import ClusterView, CopyView, NodeState
from stele.model.ids import NodeId
from stele.wal.options import LogOptions
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY, ModelNode, node_name
from tests.driver.stories import node_of, one, one_dead, reported, story


@pytest.mark.parametrize(
    ("begun", "left"),
    [
        (["BeginIntent", "StartCopy"], ["CancelCopy"]),
        (["BeginIntent", "StartCopy", "DemotePeer", "AddWitness"], ["RemovePeer", "CancelCopy"]),
    ],
)
def test_a_target_whose_disk_filled_up_is_left_for_another(begun: list[str], left: list[str]) -> None:
    """Several copies found room in the same place. Those that came too late would fail for ever."""
    cluster, t = one_dead()
    for title in begun:
        step = plan(cluster.view(), POLICY)[0]
        assert type(step).__name__ == title
        cluster.apply(step)
    full = cluster.intents[t.tablet_id].target_node

    def seen() -> ClusterView:
        view = cluster.view()
        nodes = tuple(replace(n, disk_free_bytes=1 if n.node_id == full else 1 << 40) for n in view.nodes)
        failed = CopyView("Failed", 10, 20, error="DISK_FULL")
        view = reported(view, lambda r: replace(r, copy=failed) if r.node_id == full else r)
        return replace(view, nodes=nodes)

    for title in left:
        step = plan(seen(), POLICY)[0]
        assert type(step).__name__ == title
        cluster.apply(step)
        cluster.advance()
    again = plan(seen(), POLICY)[0]
    assert isinstance(again, BeginIntent) and again.target_node != full


def test_a_node_whose_log_would_refuse_entries_is_no_target() -> None:
    cluster, _ = one_dead()
    view, low = cluster.view(), LogOptions().low_space_bytes
    for free_bytes, step in ((low, Blocked), (4 * low, BeginIntent)):
        nodes = tuple(replace(n, disk_free_bytes=free_bytes) for n in view.nodes)
        assert isinstance(plan(replace(view, nodes=nodes), POLICY)[0], step)
    without_inodes = tuple(replace(n, disk_free_bytes=1 << 40, disk_low=True) for n in view.nodes)
    assert isinstance(plan(replace(view, nodes=without_inodes), POLICY)[0], Blocked)


def test_a_node_that_the_catalog_does_not_know_as_formed_is_no_target() -> None:
    view = one_dead()[0].view()
    unformed = tuple(replace(n, formed=False) for n in view.nodes)
    assert isinstance(plan(replace(view, nodes=unformed), POLICY)[0], Blocked)


def test_no_place_left() -> None:
    cluster, _ = one_dead(machines=3)
    assert story(cluster) == ["Blocked:NoTarget"]
    cluster.nodes[node_name(9)] = ModelNode(node_name(9), "m9", "z1")
    assert story(cluster)[-1] == "EndIntent" and cluster.healthy()


def test_replicas_that_one_pass_plans_are_spread() -> None:
    cluster = Cluster(7, 1, 7, 3)
    cluster.nodes[node_name(3)].alive = False
    cluster.advance()
    targets = [s.target_node for s in plan(cluster.view(), POLICY) if isinstance(s, BeginIntent)]
    assert len(targets) == 3 and len(set(targets)) == 3


def test_of_too_many_voters_those_on_draining_nodes_go_and_the_leader_goes_last() -> None:
    cluster, t = one(rf=5, machines=5)
    t.rf = 3
    for replica in (0, 1):
        node_of(cluster, t, replica).state = NodeState.DRAINING
    t.leader = t.config.peers[4].node_id
    assert story(cluster) == ["RemovePeer", "RemovePeer", "RetireNode", "RetireNode"]
    assert [p.replica_id for p in t.config.peers] == [3, 4, 5]
    other, u = one(rf=5, machines=5)
    u.rf, u.leader = 3, u.config.peers[4].node_id
    assert story(other) == ["RemovePeer", "RemovePeer"]
    assert [p.replica_id for p in u.config.peers] == [1, 2, 5]


def test_of_too_many_voters_one_that_shares_a_machine_goes_first() -> None:
    cluster, t = one(rf=5, machines=5)
    t.rf = 3
    node_of(cluster, t, 1).machine = node_of(cluster, t, 0).machine
    (step,) = plan(cluster.view(), POLICY)
    assert isinstance(step, RemovePeer) and step.replica_id == 2


def test_no_replica_goes_where_the_masters_have_heard_nobody_or_what_is_lost() -> None:
    cluster, _ = one_dead()
    view = cluster.view()
    unheard = tuple(replace(n, ever_heard=n.node_id != node_name(4)) for n in view.nodes)
    (step,) = plan(replace(view, nodes=unheard), POLICY)
    assert isinstance(step, BeginIntent) and step.target_node == node_name(5)
    (step,) = plan(view, replace(POLICY, lost=frozenset({node_name(4)}), lost_after_ms=5_000, retire=False))
    assert isinstance(step, BeginIntent) and step.target_node == node_name(5)


def test_a_target_has_room_for_the_replica_that_takes_most() -> None:
    """Other replicas may hold next to nothing, such as one that is being copied."""
    cluster, _ = one_dead()
    view = reported(cluster.view(), lambda r: replace(r, bytes_on_disk=(1 << 30) * (r.replica_id == 1)))
    free = {node_name(4): (1 << 30), node_name(5): (3 << 30)}
    nodes = tuple(
        replace(n, disk_free_bytes=free.get(n.node_id, 8 << 30), disk_used_bytes=1) for n in view.nodes
    )
    (step,) = plan(replace(view, nodes=nodes), POLICY)
    assert isinstance(step, BeginIntent) and step.target_node == node_name(5)
    full = tuple(replace(n, disk_free_bytes=min(n.disk_free_bytes, 1 << 30)) for n in nodes)
    (step,) = plan(replace(view, nodes=full), POLICY)
    assert isinstance(step, Blocked) and step.code == "NoRoom" and "enlarge the volumes" in step.reason


def test_a_replica_goes_to_the_zone_that_lost_one() -> None:
    cluster = Cluster(6, 3, 1, 3)  # on machines 1, 2, 3 in zones 1, 2, 0; 4, 5, 6 are free, in zones 1, 2, 0
    (t,) = cluster.tablets.values()
    for replica in range(3):
        lost = node_of(cluster, t, replica)
        lost.alive = False
        cluster.advance()
        (begin,) = plan(cluster.view(), POLICY)
        assert isinstance(begin, BeginIntent) and cluster.nodes[NodeId(begin.target_node)].zone == lost.zone
        lost.alive = True
        cluster.advance()
