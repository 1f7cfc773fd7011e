"""Nodes that were given up as silent are heard again. They return to service, and their replacement is
cancelled. A node that somebody wants drained stays drained."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stele.driver.planner import plan
from stele.driver.steps import WAITS, DrainNode, RetireNode, ReturnNode, Step
from stele.driver.view import NodeState
from stele.master.records import GIVEN_UP_BEFORE
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY, ModelNode, ModelTablet, node_name
from tests.driver.stories import node_of, one, one_dead


def given_up(machines: int) -> tuple[Cluster, ModelTablet, ModelNode]:
    """A cluster of one tablet. The node of its last replica was given up as silent."""
    cluster, t = one_dead(machines=machines)
    node = node_of(cluster, t, 2)
    lost = replace(POLICY, lost=frozenset({node.node_id}))
    for step in plan(cluster.view(), lost):
        if isinstance(step, DrainNode):
            assert step.given_up
            # Masters of the version before store only the reason. From it, the node returns once they are
            # upgraded.
            assert step.reason == GIVEN_UP_BEFORE
            cluster.apply(step)
    assert node.state is NodeState.DRAINING
    return cluster, t, node


def settle(cluster: Cluster) -> list[Step]:
    """All steps until nothing is left to do."""
    told: list[Step] = []
    for _ in range(60):
        steps = plan(cluster.view(), POLICY)
        if not steps:
            return told
        for step in (s for s in steps if not isinstance(s, WAITS)):
            cluster.apply(step)
            told.append(step)
        cluster.advance()
    raise AssertionError(f"no end: {plan(cluster.view(), POLICY)}")


def test_a_node_back_with_its_data_is_in_service_again_where_there_is_no_spare_machine() -> None:
    """It stayed DRAINING for ever: its replicas had to leave, but there was no place for them."""
    cluster, t, node = given_up(machines=3)
    before = t.config
    node.alive = True
    assert [type(s) for s in settle(cluster)] == [ReturnNode]
    assert node.state is NodeState.ACTIVE and t.config == before and cluster.healthy()


@pytest.mark.parametrize("after", range(9))
def test_it_returns_at_any_step_of_its_replacement_and_that_is_taken_back(after: int) -> None:
    """Steps are interrupted, too: each pass plans again from the present state."""
    cluster, t, node = given_up(machines=4)
    for _ in range(after):
        for step in plan(cluster.view(), POLICY)[:1]:
            if not isinstance(step, WAITS):
                cluster.apply(step)
        cluster.advance()
    node.alive = True
    replaced = t.config.peer_on(node.node_id) is None
    settle(cluster)
    assert cluster.healthy() and node.state is not NodeState.DRAINING
    assert cluster.intents == {}
    if not replaced:
        assert node.state is NodeState.ACTIVE
        assert sorted(p.replica_id for p in t.config.peers) in ([1, 2, 3], [1, 2, 4])


def test_what_an_administrator_drains_stays_drained() -> None:
    cluster, t = one(machines=4)
    node = node_of(cluster, t, 2)
    node.state = NodeState.DRAINING
    node.alive = False
    cluster.advance()
    assert not any(isinstance(s, ReturnNode) for s in plan(cluster.view(), POLICY))
    node.alive = True
    steps = settle(cluster)
    assert isinstance(steps[-1], RetireNode) and node.state is NodeState.RETIRED


def test_a_node_is_not_taken_for_returned_by_a_master_that_has_not_heard_it() -> None:
    cluster, _, node = given_up(machines=3)
    cluster.new_leader_rounds = 3
    assert not any(isinstance(s, ReturnNode) for s in plan(cluster.view(), POLICY))
    called_lost = replace(POLICY, lost=frozenset({node.node_id}))
    cluster.new_leader_rounds, node.alive = 0, True
    assert not any(isinstance(s, ReturnNode) for s in plan(cluster.view(), called_lost))


def test_a_node_that_was_made_for_one_which_returned_is_taken_back_if_it_holds_nothing() -> None:
    cluster, t = one(machines=4)
    empty = next(n for n in cluster.nodes.values() if t.config.peer_on(n.node_id) is None)
    holds = node_of(cluster, t, 0)
    policy = replace(POLICY, unneeded=frozenset({empty.node_id, holds.node_id}))
    (step,) = plan(cluster.view(), policy)
    assert isinstance(step, DrainNode) and step.node_id == empty.node_id and not step.given_up
    cluster.apply(step)
    (step,) = plan(cluster.view(), policy)
    assert isinstance(step, RetireNode) and step.node_id == empty.node_id
    assert holds.state is NodeState.ACTIVE


def test_nothing_is_placed_on_a_node_that_is_to_be_taken_back() -> None:
    cluster, t = one_dead(machines=4)
    empty = next(n for n in cluster.nodes.values() if t.config.peer_on(n.node_id) is None)
    codes = {
        type(s).__name__ for s in plan(cluster.view(), replace(POLICY, unneeded=frozenset({empty.node_id})))
    }
    assert codes == {"Blocked", "DrainNode"}
    assert cluster.nodes[node_name(1)].state is NodeState.ACTIVE
