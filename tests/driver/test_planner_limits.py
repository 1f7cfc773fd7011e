"""How much the planner does at once, and which losses are so large that it does nothing."""

from __future__ import annotations

from dataclasses import replace

from stele.driver.planner import plan
from stele.driver.policy import Policy
from stele.driver.steps import (
    AddWitness,
    BeginIntent,
    Blocked,
    CancelCopy,
    RemovePeer,
)
from stele.model.config import Peer
from stele.model.ids import CATALOG_TABLET_ID, ReplicaId
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY, ModelReplica, node_name
from tests.driver.stories import node_of, one, one_dead, reported, story


def test_a_machine_that_is_lost_with_its_node_and_its_master_is_one_of_each() -> None:
    """Otherwise nothing would be healed with `maxLostNodes: 1` whenever a master's machine is lost."""
    cluster = Cluster(6, 1, 2, 3)
    (table, catalog) = cluster.tablets.values()  # on nodes 1, 2, 3 and 2, 3, 4
    cluster.nodes[node_name(1)].alive = cluster.nodes[node_name(4)].alive = False
    cluster.advance()
    view, strict = cluster.view(), replace(POLICY, max_lost_nodes=1)
    assert [s.code for s in plan(view, strict) if isinstance(s, Blocked)] == ["TooManyLost"] * 2
    tablets = tuple(
        replace(t, tablet_id=CATALOG_TABLET_ID) if t.tablet_id == catalog.tablet_id else t
        for t in view.tablets
    )
    steps = {s.tablet_id: s for s in plan(replace(view, tablets=tablets), strict)}
    assert isinstance(steps[table.tablet_id], BeginIntent)
    blocked = steps[CATALOG_TABLET_ID]  # no other master is there
    assert isinstance(blocked, Blocked) and blocked.code == "NoTarget"


def test_where_too_many_are_lost_nothing_that_was_begun_is_taken_back() -> None:
    cluster, _ = one_dead()
    (begun,) = plan(cluster.view(), POLICY)
    assert isinstance(begun, BeginIntent)
    cluster.apply(begun)
    cluster.nodes[begun.target_node].alive = False
    cluster.advance()
    assert isinstance(plan(cluster.view(), POLICY)[0], CancelCopy)
    (blocked,) = plan(cluster.view(), replace(POLICY, max_lost_nodes=0))
    assert isinstance(blocked, Blocked) and blocked.code == "TooManyLost"


def test_a_dead_witness_stays_while_the_others_are_no_majority_that_answers() -> None:
    """Two of its five voters are dead, and one more does not answer the leader for a moment."""
    cluster, t = one(rf=5, machines=9)
    node_of(cluster, t, 3).alive = node_of(cluster, t, 4).alive = False
    cluster.advance()
    policy = replace(POLICY, max_lost_nodes=9, unreached_after_ms=1 << 40)
    while not isinstance(step := plan(cluster.view(), policy)[0], AddWitness):
        cluster.apply(step)
    cluster.apply(step)
    cluster.nodes[step.target_node].alive = False
    cluster.advance()
    assert isinstance(plan(cluster.view(), policy)[0], RemovePeer)
    (silent, *_) = (p.replica_id for p in t.config.peers if p.node_id != t.leader and cluster.live(t, p))
    view = reported(cluster.view(), lambda r: replace(r, unreached_ms={**r.unreached_ms, silent: 6_000}))
    (blocked,) = plan(view, policy)
    assert isinstance(blocked, Blocked) and blocked.code == "UnsafeToRemove"


def test_a_lost_majority_is_left_alone() -> None:
    cluster, t = one()
    for replica in (1, 2):
        node_of(cluster, t, replica).alive = False
    cluster.advance()
    assert story(cluster) == ["Blocked:LostMajority"]


def test_copies_at_once_are_bounded_and_the_most_urgent_go_first() -> None:
    cluster = Cluster(8, 1, 8, 5)
    dead = node_name(3)
    cluster.nodes[dead].alive = False
    cluster.advance()
    steps = plan(cluster.view(), Policy(dead_after_ms=10_000, max_copies=2))
    assert sum(isinstance(s, BeginIntent) for s in steps) == 2
    assert {s.code for s in steps if isinstance(s, Blocked)} == {"CopyLimit"}
    targets = [s.target_node for s in steps if isinstance(s, BeginIntent)]
    assert len(set(targets)) == 2 and dead not in targets


def test_copies_that_cannot_go_on_hold_up_no_others() -> None:
    """The copies were under way when their tablets lost their majorities. Nobody knows when these come
    back."""
    cluster = Cluster(9, 1, 9, 5)
    dead = node_name(3)
    cluster.nodes[dead].alive = False
    cluster.advance()
    policy = Policy(dead_after_ms=10_000, max_lost_nodes=9, max_copies=1)
    (begun,) = [s for s in plan(cluster.view(), policy) if isinstance(s, BeginIntent)]
    cluster.apply(begun)
    stuck = cluster.tablets[begun.tablet_id]
    for also in [p.node_id for p in stuck.config.peers if p.node_id != dead][:2]:
        cluster.nodes[also].alive = False
    cluster.advance()
    steps = {s.tablet_id: s for s in plan(cluster.view(), policy)}
    blocked = steps.pop(begun.tablet_id)
    assert isinstance(blocked, Blocked) and blocked.code == "LostMajority"
    assert any(isinstance(s, BeginIntent) for s in steps.values())


def test_a_replica_of_the_same_number_on_another_node_is_not_the_intents() -> None:
    """An administrator had added replica 4 by hand. The driver ended its own intent for 4 as if it were that
    replica."""
    cluster, t = one_dead(machines=6)
    begun = next(s for s in plan(cluster.view(), POLICY) if isinstance(s, BeginIntent))
    cluster.apply(begun)
    by_hand = next(n for n in cluster.nodes if n != begun.target_node and t.config.peer_on(n) is None)
    t.replicas[4] = ModelReplica(by_hand, has_data=True)
    t.config = replace(t.config, peers=(*t.config.peers, Peer(by_hand, ReplicaId(4), "")))
    (step,) = plan(cluster.view(), POLICY)
    assert isinstance(step, CancelCopy) and "a replica on another node has the id 4" in step.reason
