"""Moves of healthy replicas: by hand and for balance; interrupted, taken over, taken back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stele.driver.planner import plan
from stele.driver.policy import Policy
from stele.driver.steps import BeginIntent, Blocked, CancelCopy, DemotePeer, RemovePeer
from stele.driver.view import MOVE, MOVE_BY_HAND, NodeState
from stele.model.by_hand import NOT_BY_HAND, ByHand
from stele.model.ids import NodeId
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY, ModelNode, ModelTablet, node_name
from tests.driver.stories import node_of, one, story
from tests.driver.test_planner_draining import least_spare

MOVED = ["BeginIntent", "StartCopy", "AddPreFollower", "RemovePeer", "EndIntent"]
"""The story of a replica that moves."""


def asked(source: int = 2, target: int = 5, machines: int = 5, rf: int = 3) -> tuple[Cluster, ModelTablet]:
    """A tablet with a replica that somebody wants moved to another node."""
    cluster, t = one(rf, machines)
    t.by_hand = ByHand(pinned=(node_name(target),), avoided=(t.config.peers[source].node_id,))
    return cluster, t


def places(t: ModelTablet) -> set[str]:
    """The nodes with replicas."""
    return {p.node_id for p in t.config.peers}


def begun(cluster: Cluster, steps: int) -> None:
    """Take the first steps."""
    for _ in range(steps):
        cluster.apply(plan(cluster.view(), POLICY)[0])
        cluster.advance()


def test_a_replica_moves_by_hand_and_stays_there() -> None:
    cluster, t = asked()
    assert story(cluster) == MOVED and node_name(5) in places(t)
    assert story(cluster, policy=replace(POLICY, rebalance=True)) == []


def test_the_leader_hands_over_before_its_replica_goes() -> None:
    cluster, t = asked(source=0)
    assert t.leader == node_of(cluster, t, 0).node_id
    assert story(cluster) == [*MOVED[:3], "MoveLeader", *MOVED[3:]] and t.leader in places(t)


def test_no_voter_is_ever_missing() -> None:
    cluster, _ = asked()
    assert least_spare(cluster, next(iter(cluster.tablets.values()))) == 1


def test_the_only_replica_moves() -> None:
    cluster, t = asked(source=0, rf=1)
    assert story(cluster) == [*MOVED[:3], "MoveLeader", *MOVED[3:]] and places(t) == {node_name(5)}


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_another_driver_goes_on(steps: int) -> None:
    cluster, t = asked()
    begun(cluster, steps)
    cluster.epoch += 1
    told = story(cluster)
    assert told[0] == "TakingOver" or told[0] == "TakeOverIntent"
    assert node_name(5) in places(t) and len(places(t)) == 3
    assert len(cluster.moves) == 1


@pytest.mark.parametrize(("steps", "left"), [(1, ["CancelCopy"]), (2, ["CancelCopy"])])
def test_what_is_taken_back_leaves_nothing(steps: int, left: list[str]) -> None:
    cluster, t = asked()
    before = places(t)
    begun(cluster, steps)
    t.by_hand = NOT_BY_HAND
    assert story(cluster) == left and places(t) == before


def test_what_is_taken_back_after_it_was_added_is_removed() -> None:
    cluster, t = asked()
    before = places(t)
    cluster.nodes[node_name(5)].hangs = True
    for _ in range(2):
        cluster.apply(plan(cluster.view(), POLICY)[0])
    t.replicas[4].copied = 2
    cluster.apply(plan(cluster.view(), POLICY)[0])
    t.by_hand = NOT_BY_HAND
    assert story(cluster) == ["RemovePeer", "CancelCopy"] and places(t) == before


def test_a_voter_that_dies_meanwhile_is_healed_first_with_a_witness() -> None:
    cluster, t = asked(machines=6)
    begun(cluster, 1)
    node_of(cluster, t, 1).alive = False
    cluster.advance()
    (step,) = plan(cluster.view(), POLICY)
    assert isinstance(step, CancelCopy) and "its heal goes first" in step.reason
    told = story(cluster)
    assert told[:4] == ["CancelCopy", "BeginIntent", "StartCopy", "DemotePeer"]
    assert node_name(5) in places(t) and cluster.healthy()


def test_a_source_that_dies_after_its_successor_voted_just_goes() -> None:
    cluster, t = asked()
    while len(t.config.voters) < 4:
        begun(cluster, 1)
    node_of(cluster, t, 2).alive = False
    cluster.advance()
    assert story(cluster) == ["RemovePeer", "EndIntent"] and node_name(5) in places(t)


def test_a_target_that_dies_is_given_up_and_the_source_stays() -> None:
    cluster, t = asked()
    before = places(t)
    begun(cluster, 2)
    cluster.nodes[node_name(5)].alive = False
    assert story(cluster)[0] == "CancelCopy"
    assert places(t) - {node_name(4)} <= before and len(places(t)) == 3


def test_a_pinned_node_that_comes_back_gets_its_replica_back() -> None:
    cluster, t = asked()
    story(cluster)
    cluster.nodes[node_name(5)].alive = False
    cluster.advance()
    story(cluster)
    assert node_name(5) not in places(t) and cluster.healthy()
    cluster.nodes[node_name(5)].alive = True
    assert story(cluster) == MOVED and node_name(5) in places(t)


def test_a_node_that_takes_no_replicas_gets_none_and_nothing_is_blocked() -> None:
    cluster, t = asked()
    t.by_hand = ByHand(pinned=(node_name(5),))
    cluster.nodes[node_name(5)].state = NodeState.DRAINING
    assert not [s for s in plan(cluster.view(), replace(POLICY, retire=False))]


def test_one_more_replica_is_added_where_it_was_asked_for_and_removed_where_it_was_asked_for() -> None:
    cluster, t = one(machines=6)
    t.by_hand = ByHand(pinned=(node_name(6),), extra=1)
    assert story(cluster) == ["BeginIntent", "StartCopy", "AddPreFollower", "EndIntent"]
    assert node_name(6) in places(t) and len(places(t)) == 4
    first = t.config.peers[0].node_id
    assert t.leader == first
    t.by_hand = ByHand(pinned=(node_name(6),), avoided=(first,))
    assert story(cluster) == ["MoveLeader", "RemovePeer"]
    assert first not in places(t) and len(places(t)) == 3


def test_a_node_that_is_pinned_and_avoided_keeps_its_replica() -> None:
    """The replica went back and forth for ever (seed 465 of moves_world). The masters never record such a
    request."""
    cluster, t = asked()
    t.by_hand = ByHand(pinned=(node_name(5),), avoided=(node_name(5),))
    story(cluster)
    assert node_name(5) in places(t) and not plan(cluster.view(), POLICY)


def test_no_move_begins_while_a_voter_does_not_answer_its_leader() -> None:
    """Its node is heard, so it is no fault yet. But the tablet could lose no other voter."""
    cluster, t = asked()
    node_of(cluster, t, 1).opening = True
    cluster.advance()
    assert not [s for s in plan(cluster.view(), POLICY) if isinstance(s, BeginIntent)]
    node_of(cluster, t, 1).opening = False
    cluster.advance()
    assert story(cluster) == MOVED


def test_moves_take_half_of_the_slots_and_wait_for_them() -> None:
    cluster = Cluster(8, 1, 6, 3)
    for t in cluster.tablets.values():
        free = next(n for n in cluster.nodes if n not in places(t))
        t.by_hand = ByHand(pinned=(free,))
    steps = plan(cluster.view(), replace(POLICY, max_copies=4))
    assert [s.kind for s in steps if isinstance(s, BeginIntent)] == [MOVE_BY_HAND] * 2
    assert {s.code for s in steps if isinstance(s, Blocked)} == {"CopyLimit"}


def test_a_heal_finds_a_slot_while_moves_wait() -> None:
    cluster = Cluster(8, 1, 6, 5)
    for t in list(cluster.tablets.values())[:4]:
        t.by_hand = ByHand(pinned=(next(n for n in cluster.nodes if n not in places(t)),))
    policy = replace(POLICY, max_copies=2)
    for step in plan(cluster.view(), policy):
        cluster.apply(step)
    sick = list(cluster.tablets.values())[5]
    sick.replicas[2].failed = True
    cluster.advance()
    begins = [s for s in plan(cluster.view(), policy) if isinstance(s, BeginIntent)]
    assert [s.tablet_id for s in begins] == [sick.tablet_id] and begins[0].kind == "replace"


def test_a_lower_factor_ends_a_move() -> None:
    cluster, t = asked(machines=7, rf=5)
    begun(cluster, 2)
    t.rf = 3
    assert "CancelCopy" in story(cluster) and len(places(t)) == 3


def test_a_member_that_moves_is_not_at_fault() -> None:
    cluster, _ = asked()
    (step,) = plan(cluster.view(), POLICY)
    assert step.cause.startswith("move-by-hand/") and "placed by hand" in step.reason
    cluster.apply(step)
    (step,) = plan(cluster.view(), POLICY)
    assert step.cause.startswith("move-by-hand/")
    while not isinstance(step, RemovePeer):
        cluster.apply(step)
        cluster.advance()
        (step,) = plan(cluster.view(), POLICY)
        assert not isinstance(step, DemotePeer)
    assert "it moves" in step.reason and "DRAINING" not in step.reason


@pytest.mark.parametrize("rfs", [(3, 5, 3, 1, 3), (1, 3, 5, 3, 1)])
def test_the_factor_changes_up_and_down_without_less_than_it_tolerates(rfs: tuple[int, ...]) -> None:
    cluster, t = one(rfs[0], machines=6)
    for rf in rfs[1:]:
        lower = min(rf, t.rf)
        t.rf = rf
        spares = [cluster.spare(t)]
        for _ in range(60):
            steps = plan(cluster.view(), POLICY)
            if not steps:
                break
            for step in steps:
                cluster.apply(step)
                spares.append(cluster.spare(t))
            cluster.advance()
        assert len(places(t)) == rf and cluster.healthy()
        assert min(spares) >= (lower - 1) // 2


def test_a_smaller_factor_keeps_the_spread_and_the_leader() -> None:
    cluster = Cluster(6, 3, 1, 5)
    (t,) = cluster.tablets.values()
    leader, t.rf = t.leader, 3
    assert story(cluster) == ["RemovePeer", "RemovePeer"]
    zones = {cluster.nodes[NodeId(n)].zone for n in places(t)}
    assert len(zones) == 3 and t.leader == leader


def test_policy_of_one_copy_still_moves() -> None:
    assert Policy(max_copies=1).max_moves == 1


def test_a_move_makes_way_for_a_heal_that_waits_for_its_turn() -> None:
    """With one copy at a time, a move to a slow node held the only slot, so a FAILED voter was not
    replaced."""
    policy = replace(POLICY, rebalance=True, max_copies=1)
    cluster = Cluster(7, 1, 7, 5)
    cluster.nodes[node_name(8)] = ModelNode(node_name(8), "m8", "z0", hangs=True)

    def drive(rounds: int) -> None:
        for _ in range(rounds):
            for step in plan(cluster.view(), policy):
                cluster.apply(step)
            cluster.advance()

    drive(3)
    (moving,) = cluster.intents.values()
    assert moving.kind == MOVE
    hurt = next(t for t in cluster.tablets.values() if t.tablet_id != moving.tablet_id)
    failed = next(p for p in hurt.config.peers if p.node_id != hurt.leader)
    hurt.replicas[failed.replica_id].failed = True
    cluster.advance()
    drive(5)
    assert {i.tablet_id: i.kind for i in cluster.intents.values()} == {hurt.tablet_id: "replace"}
