"""A replica is dead, FAILED or missing: the planner's steps until another is in its place, with
interruptions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stele.driver.planner import plan
from stele.driver.steps import (
    WAITS,
    Blocked,
    RemovePeer,
)
from stele.driver.view import NodeState
from stele.model.config import MemberType
from stele.model.ids import ReplicaId
from tests.driver.model_parts import POLICY, node_name
from tests.driver.stories import REPLACED, node_of, one, one_dead, reported, story


def test_a_dead_replica_where_no_fault_can_be_spared() -> None:
    cluster, _ = one_dead()
    assert story(cluster) == REPLACED
    assert cluster.healthy()


def test_a_dead_replica_where_one_fault_can_be_spared() -> None:
    cluster, _ = one_dead(rf=5, machines=6)
    assert story(cluster) == ["BeginIntent", "StartCopy", "AddPreFollower", "RemovePeer", "EndIntent"]


def test_the_dead_one_returns_before_anything_was_changed() -> None:
    cluster, t = one_dead()
    node = node_of(cluster, t, 2)

    def returns() -> None:
        node.alive = True

    assert story(cluster, after={"StartCopy": returns}) == ["BeginIntent", "StartCopy", "CancelCopy"]
    assert [p.replica_id for p in t.config.peers] == [1, 2, 3]


def test_the_dead_one_returns_in_time() -> None:
    cluster, t = one_dead()
    node = node_of(cluster, t, 2)

    def returns() -> None:
        node.alive = True

    steps = story(cluster, after={"DemotePeer": returns})
    assert steps[:4] == ["BeginIntent", "StartCopy", "DemotePeer", "PromoteBack"]
    assert steps[-1] == "CancelCopy" and [p.replica_id for p in t.config.peers] == [1, 2, 3]


def test_the_target_dies_meanwhile() -> None:
    cluster, t = one_dead()

    def dies() -> None:
        cluster.nodes[cluster.intents[t.tablet_id].target_node].alive = False

    steps = story(cluster, after={"StartCopy": dies})
    assert steps[:3] == ["BeginIntent", "StartCopy", "CancelCopy"] and cluster.healthy()


def test_a_replica_is_added() -> None:
    cluster, t = one(rf=1)
    t.rf = 3
    assert story(cluster) == [
        *("BeginIntent", "StartCopy", "AddPreFollower", "EndIntent"),
        *("BeginIntent", "StartCopy", "AddWitness", "EndIntent"),
    ]
    assert cluster.healthy()


def test_a_failed_replica_whose_machine_is_the_only_place() -> None:
    cluster, t = one(machines=3)
    t.replicas[3].failed = True
    other = next(p.replica_id for p in t.config.peers[:2] if p.node_id != t.leader)
    view = reported(cluster.view(), lambda r: replace(r, unreached_ms={other: 6_000}))
    (blocked,) = plan(view, POLICY)
    assert isinstance(blocked, Blocked) and blocked.code == "NoTarget", "no majority answers without it"
    assert story(cluster) == [
        *("DemotePeer", "RemovePeer", "BeginIntent", "StartCopy", "AddWitness", "EndIntent"),
    ]
    assert {p.node_id for p in t.config.peers} == set(cluster.nodes) and t.config.peer(4) is not None


def test_a_failed_replica_elsewhere() -> None:
    cluster, t = one()
    t.replicas[3].failed = True
    assert story(cluster) == REPLACED


def test_a_tombstone_beside_the_leader_does_not_hide_what_the_leader_says() -> None:
    """Replica 1 was made again on its machine as replica 4, which leads. Replica 2 can no longer catch up on
    its log."""
    cluster, t = one()
    t.replicas[1].failed = True
    cluster.nodes[node_name(4)].state = cluster.nodes[node_name(5)].state = NodeState.DRAINING
    story(cluster)
    leader = t.config.peer(ReplicaId(4))
    assert leader is not None and leader.node_id == t.replicas[1].node_id and t.replicas[1].tombstoned
    t.leader = leader.node_id
    lacking = (ReplicaId(2),)
    view = reported(cluster.view(), lambda r: replace(r, lacking_peers=lacking) if r.replica_id == 4 else r)
    assert "replica 2" in plan(view, POLICY)[0].reason


@pytest.mark.parametrize("found", ["failed", "tombstoned"])
def test_a_new_replica_that_is_of_no_use_is_made_anew_under_another_number(found: str) -> None:
    cluster, t = one_dead()

    def breaks() -> None:
        setattr(t.replicas[4], found, True)

    steps = story(cluster, after={"StartCopy": breaks})
    assert steps[:3] == ["BeginIntent", "StartCopy", "CancelCopy"]
    assert cluster.healthy() and t.config.peer(4) is None


def test_reasons_are_told_in_words() -> None:
    cluster, _ = one_dead()
    reasons = []
    for _ in range(30):
        for step in plan(cluster.view(), POLICY):
            reasons.append(step.reason)
            if not isinstance(step, WAITS):
                cluster.apply(step)
            if isinstance(step, RemovePeer):
                gone = f"replica {step.replica_id} on node {step.node_id[:8]}: its node is silent; replica 4 on node "
                assert step.reason.startswith(gone)
                assert step.reason.endswith("was promoted after a copy of 20 bytes and has taken its place")
        cluster.advance()
    assert all(reasons) and "the group tolerates no fault now" in reasons[0]


def test_whoever_is_removed_is_named_first() -> None:
    """Also if nothing has taken its place: here there are more voters than wanted."""
    cluster, t = one()
    t.rf = 1
    for _ in range(2):
        step = plan(cluster.view(), POLICY)[0]
        assert isinstance(step, RemovePeer)
        named = f"replica {step.replica_id} on node {step.node_id[:8]}: "
        assert step.reason.startswith(named) and step.reason.count("replica ") == 1
        cluster.apply(step)
        cluster.advance()


def test_a_second_death_makes_room_for_the_replica_that_waits_for_its_vote() -> None:
    """Six voters, two of them dead, would need all four others. So a dead one first gives up its vote."""
    cluster, t = one(rf=5, machines=6)
    first, second = node_of(cluster, t, 4), node_of(cluster, t, 3)
    first.alive = False
    cluster.advance()

    def dies() -> None:
        second.alive = False

    steps = story(cluster, after={"AddPreFollower": dies})
    assert steps[:4] == ["BeginIntent", "StartCopy", "AddPreFollower", "DemotePeer"]
    assert [p.member_type for p in t.config.peers if p.node_id == node_name(6)] == [MemberType.VOTER]
