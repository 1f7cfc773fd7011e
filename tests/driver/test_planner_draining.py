"""Nodes that are drained, lost or given back: which of their replicas go and when, and when the nodes retire."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stele.driver.leader_trials import LeaderMemory
from stele.driver.planner import plan
from stele.driver.policy import Policy
from stele.driver.steps import (
    WAITS,
    BeginIntent,
    CancelCopy,
    MoveLeader,
    RemovePeer,
    RetireNode,
    WaitPromotion,
)
from stele.driver.trials import Trials
from stele.driver.view import NodeState
from stele.model.errors import Code, Retryable
from stele.model.ids import NodeId
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY, ModelTablet, Refused
from tests.driver.stories import node_of, one, one_dead, story


def test_a_node_is_drained_and_retires() -> None:
    cluster, t = one()
    node = node_of(cluster, t, 0)
    assert t.leader == node.node_id
    node.state = NodeState.DRAINING
    assert story(cluster) == [
        *(
            "BeginIntent",
            "StartCopy",
            "MoveLeader",
            "AddPreFollower",
            "RemovePeer",
            "EndIntent",
            "RetireNode",
        ),
    ]
    assert node.state is NodeState.RETIRED


def test_a_draining_voter_stays_until_its_successor_votes() -> None:
    """If it had been removed earlier, the tablet could have lost no other replica."""
    cluster, t = one()
    node_of(cluster, t, 1).state = NodeState.DRAINING
    while len(t.config.peers) == 3:
        cluster.advance()
        for step in plan(cluster.view(), POLICY):
            if not isinstance(step, WAITS):
                cluster.apply(step)
    for _ in range(3):
        assert [type(step) for step in plan(cluster.view(), POLICY)] == [WaitPromotion]
    assert "RemovePeer" in story(cluster) and cluster.healthy()


def least_spare(cluster: Cluster, t: ModelTablet) -> int:
    """The lowest number of voters that the tablet could lose, from now until all is well."""
    spares = []
    for _ in range(60):
        steps = plan(cluster.view(), POLICY)
        if not steps:
            return min(spares)
        for step in steps:
            cluster.apply(step)
            spares.append(cluster.spare(t))
        cluster.advance()
    raise AssertionError("no end")


def test_voters_of_two_draining_nodes_stay_until_each_has_a_successor() -> None:
    """Both were removed when the first successor voted. The rows of the second were copied while no voter
    could be spared."""
    cluster, t = one(machines=6)
    node_of(cluster, t, 1).state = node_of(cluster, t, 2).state = NodeState.DRAINING
    assert least_spare(cluster, t) == 1 and cluster.healthy()


def test_a_draining_voter_stays_while_a_dead_one_is_replaced() -> None:
    cluster, t = one(machines=6)
    node_of(cluster, t, 1).alive = False
    node_of(cluster, t, 2).state = NodeState.DRAINING
    cluster.advance()
    while cluster.spare(t) < 1:
        for step in plan(cluster.view(), POLICY):
            cluster.apply(step)
        cluster.advance()
    assert least_spare(cluster, t) == 1 and cluster.healthy()


def test_a_voter_that_dies_while_another_is_drained_goes_first() -> None:
    cluster, t = one(machines=6)
    node_of(cluster, t, 1).state = NodeState.DRAINING
    while len(t.config.voters) < 4:
        for step in plan(cluster.view(), POLICY):
            cluster.apply(step)
        cluster.advance()
    node_of(cluster, t, 2).alive = False
    cluster.advance()
    (step,) = plan(cluster.view(), POLICY)
    assert isinstance(step, RemovePeer) and step.replica_id == 3
    cluster.apply(step)
    assert least_spare(cluster, t) == 1 and cluster.healthy()


def test_a_leader_that_must_go_is_not_told_to_wait_for_a_voter_that_lags() -> None:
    """The voter with the lowest id had just returned and was chosen again and again. Each time the leader
    took no writes for an election timeout. Now its leader refuses it at once, and the driver chooses
    another."""
    cluster, t = one()
    node = node_of(cluster, t, 0)
    node.state = NodeState.DRAINING
    lags = node_of(cluster, t, 1).node_id
    t.behind.add(lags)
    memory, moves = LeaderMemory(), []
    for number in range(40):
        view = cluster.view()
        trials = Trials(leaders=memory.look(view, 480, number * 1_000))
        for step in plan(view, POLICY, trials):
            error = None
            try:
                cluster.apply(step)
            except Refused:
                error = Retryable("it lags", code=Code.NOT_READY)
            memory.note(step, error, number * 1_000)
            moves += [step.target_node] if isinstance(step, MoveLeader) else []
        cluster.advance()
    # The second time its replica is removed, and the leader chooses.
    assert moves == [lags, ""] and node.state is NodeState.RETIRED


def test_a_demoted_replica_on_a_draining_node_is_not_promoted_back() -> None:
    cluster, t = one_dead()
    node = node_of(cluster, t, 2)

    def returns() -> None:
        node.alive, node.state = True, NodeState.DRAINING

    steps = story(cluster, after={"DemotePeer": returns})
    assert "PromoteBack" not in steps and cluster.healthy() and node.state is NodeState.RETIRED


@pytest.mark.parametrize("state", ["PREPARING", "CREATING"])
def test_a_node_that_a_new_tablet_names_does_not_retire(state: str) -> None:
    cluster, t = one()
    node_of(cluster, t, 2).state = NodeState.DRAINING
    view = cluster.view()
    new = tuple(replace(tablet, state=state) for tablet in view.tablets)
    assert plan(replace(view, tablets=new), POLICY) == ()
    assert [type(s) for s in plan(replace(view, tablets=()), POLICY)] == [RetireNode]


def test_a_lost_node_drains_and_retires() -> None:
    cluster, t = one_dead()
    node = node_of(cluster, t, 2)
    policy = Policy(dead_after_ms=10_000, lost=frozenset({node.node_id}))
    steps = story(cluster, policy=policy)
    assert "DrainNode" in steps and steps[-1] == "RetireNode" and node.state is NodeState.RETIRED


def test_a_node_that_is_heard_is_not_drained_whatever_it_is_called() -> None:
    cluster, t = one()
    called_lost = Policy(dead_after_ms=10_000, lost=frozenset({node_of(cluster, t, 2).node_id}))
    assert not plan(cluster.view(), called_lost)


def test_a_node_that_only_an_intent_names_does_not_retire() -> None:
    cluster, _ = one_dead()
    (begin,) = plan(cluster.view(), POLICY)
    assert isinstance(begin, BeginIntent)
    cluster.apply(begin)
    cluster.nodes[NodeId(begin.target_node)].state = NodeState.DRAINING
    assert [type(s) for s in plan(cluster.view(), POLICY)] == [CancelCopy]
    cluster.intents.clear()
    steps = plan(cluster.view(), POLICY)
    assert [s.node_id for s in steps if isinstance(s, RetireNode)] == [begin.target_node]


def test_who_may_not_retire_nodes_heals_their_tablets_and_leaves_them() -> None:
    cluster, t = one_dead()
    node = node_of(cluster, t, 2)
    policy = Policy(dead_after_ms=10_000, lost=frozenset({node.node_id}), retire=False)
    assert story(cluster, policy=policy)[-1] == "EndIntent" and node.state is NodeState.ACTIVE


def test_one_of_two_draining_nodes_is_given_back_where_there_is_no_third_machine() -> None:
    """The next new node may come to its machine. Both replicas waited for a target, each for the other's
    place."""
    cluster, t = one(machines=4)
    draining = [node_of(cluster, t, 1), node_of(cluster, t, 2)]
    for node in draining:
        node.state = NodeState.DRAINING
    for _ in range(60):
        for step in plan(cluster.view(), POLICY):
            cluster.apply(step)
        assert cluster.spare(t) >= 1
        cluster.advance()
    assert len(t.config.voters) == 3
    assert [node.state for node in draining].count(NodeState.RETIRED) == 1
