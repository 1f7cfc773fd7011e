"""The answer before nodes are drained or parked agrees with what the planner then does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stele.driver.feasible import absence, drain_faults
from stele.driver.planner import plan
from stele.driver.steps import Blocked
from stele.driver.view import ClusterView, NodeState, Wanted
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY
from tests.driver.stories import node_of, one, reported, story


def with_disks(view: ClusterView, free: int) -> ClusterView:
    """Every node reports a disk with this many free bytes."""
    nodes = tuple(replace(n, disk_free_bytes=free, disk_used_bytes=1) for n in view.nodes)
    return replace(view, nodes=nodes)


@pytest.mark.parametrize("machines", [3, 4, 5])
@pytest.mark.parametrize("leaving", [1, 2])
def test_a_drain_is_refused_where_the_planner_would_find_no_machine(machines: int, leaving: int) -> None:
    cluster, t = one(machines=machines)
    going = [node_of(cluster, t, i) for i in range(leaving)]
    faults = drain_faults(cluster.view(), POLICY, {n.node_id for n in going})
    for node in going:
        node.state, node.wanted = NodeState.DRAINING, Wanted.RETIRED
    told = story(cluster)
    assert bool(faults) == ("Blocked:NoTarget" in told)
    if faults:
        (fault,) = faults
        assert f"tablet {t.tablet_id[:8]} of t: 3 replicas need a machine each" in fault
        assert f"{machines - leaving} machine" in fault and "lower the replication factor" in fault
    else:
        assert told[-1] == "RetireNode"


def test_a_drain_is_refused_where_the_disks_of_the_others_are_too_small_together() -> None:
    """Two tablets are on the same three nodes. Only the fourth node can take them, and it has room for
    one."""
    cluster = Cluster(4, 1, 5, 3)
    view = reported(cluster.view(), lambda r: replace(r, bytes_on_disk=1 << 30))
    leaving = set(list(cluster.nodes)[:1])
    assert drain_faults(with_disks(view, (2 << 30) + POLICY.min_disk_free_bytes), POLICY, leaving) == ()
    (fault,) = drain_faults(with_disks(view, (1 << 30) + POLICY.min_disk_free_bytes), POLICY, leaving)
    assert "no node in service on another machine has room" in fault and "enlarge the volumes" in fault
    assert fault.count(" of t") == 1


def test_many_tablets_are_counted_and_a_few_named() -> None:
    cluster = Cluster(3, 1, 9, 3)
    (fault,) = drain_faults(cluster.view(), POLICY, set(list(cluster.nodes)[:1]))
    assert fault.count(" of t") == 3 and "and 6 more" in fault


def test_of_a_dropped_table_one_learns_how_to_be_rid_of_it() -> None:
    """Its replication factor cannot be lowered while it is dropped."""
    cluster, t = one(machines=3)
    leaving = {node_of(cluster, t, 0).node_id}
    view = cluster.view()
    gone = replace(view.tablets[0], table_name="t (dropped)")
    dropped = replace(view, tablets=(gone,))
    (fault,) = drain_faults(dropped, POLICY, leaving)
    assert f"`stele table delete {gone.table_id[:8]}`" in fault and "`stele table recall`" in fault
    assert "or lower the replication factor" not in fault
    full = replace(with_disks(one()[0].view(), 1), tablets=dropped.tablets)
    (fault,) = drain_faults(full, POLICY, leaving)
    assert "no node in service" in fault and f"`stele table delete {gone.table_id[:8]}`" in fault


def test_tables_in_use_and_dropped_ones_are_told_apart() -> None:
    cluster = Cluster(3, 1, 2, 3)
    view = cluster.view()
    first, second = view.tablets
    view = replace(view, tablets=(first, replace(second, table_name="t (dropped)")))
    used, dropped = drain_faults(view, POLICY, set(list(cluster.nodes)[:1]))
    assert first.tablet_id[:8] in used and used.endswith("or lower the replication factor")
    assert second.tablet_id[:8] in dropped and "stele table delete" in dropped


def test_a_tablet_with_more_replicas_than_are_wanted_needs_no_other_machine() -> None:
    """Its factor was lowered, or there are to be fewer masters."""
    cluster, t = one(machines=3)
    leaving = {node_of(cluster, t, 0).node_id}
    assert drain_faults(cluster.view(), POLICY, leaving)
    t.rf = 1
    assert drain_faults(cluster.view(), POLICY, leaving) == ()


def test_a_node_without_replicas_can_always_be_drained() -> None:
    cluster, t = one(machines=4)
    free = next(n for n in cluster.nodes if t.config.peer_on(n) is None)
    assert drain_faults(cluster.view(), POLICY, {free}) == ()


def test_a_node_may_be_parked_while_every_tablet_keeps_a_majority_without_it() -> None:
    cluster, t = one()
    first, second, third = (node_of(cluster, t, i) for i in range(3))
    assert absence(cluster.view(), POLICY, {first.node_id}).faults == ()
    (fault,) = absence(cluster.view(), POLICY, {first.node_id, second.node_id}).faults
    assert f"tablet {t.tablet_id[:8]} of t" in fault
    second.wanted = Wanted.PARKED  # it may fail at any moment
    assert absence(cluster.view(), POLICY, {first.node_id}).faults
    second.wanted = None
    third.alive = False
    cluster.advance()
    assert absence(cluster.view(), POLICY, {first.node_id}).faults
    assert absence(cluster.view(), POLICY, {third.node_id}).faults == (), "it is away already"


def test_a_tablet_of_one_replica_is_named_and_blocks_nothing() -> None:
    cluster, t = one(rf=1)
    found = absence(cluster.view(), POLICY, {t.config.peers[0].node_id})
    assert found.faults == () and "the replication factor is 1" in found.notes[0]
    assert not any(isinstance(s, Blocked) for s in plan(cluster.view(), POLICY))
