"""What somebody wants of nodes: parked ones are expected back, draining ones are emptied, and each wanted
state can be recalled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stele.driver.nodes import node_steps
from stele.driver.planner import plan
from stele.driver.steps import (
    WAITS,
    Blocked,
    DrainNode,
    EndWish,
    MoveLeader,
    ParkNode,
    RetireNode,
    Step,
)
from stele.driver.view import NodeState, NodeView, Wanted
from stele.model.ids import NodeId
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY, ModelNode
from tests.driver.stories import node_of, one, one_dead, story


def want(node: ModelNode, wanted: Wanted | None, by: str = "administrator") -> None:
    """An administrator asks for this state of a node."""
    given_away = wanted in (Wanted.DRAINED, Wanted.RETIRED)
    node.state = NodeState.DRAINING if given_away else NodeState.ACTIVE
    node.wanted, node.wanted_by = wanted, by if wanted is not None else ""


def orders(steps: tuple[Step, ...]) -> list[Step]:
    """Steps that need an order."""
    return [s for s in steps if not isinstance(s, WAITS)]


# --- parked


def test_a_parked_node_that_is_away_is_waited_for_until_its_time_is_over() -> None:
    cluster, t = one_dead()
    node = node_of(cluster, t, 2)
    want(node, Wanted.PARKED)
    before = t.config
    assert plan(cluster.view(), POLICY) == ()
    want(node, None)
    assert story(cluster)[-1] == "EndIntent" and t.config.peer_on(node.node_id) is None
    assert before != t.config and cluster.healthy()


def test_a_parked_node_does_not_count_as_lost() -> None:
    strict = replace(POLICY, max_lost_nodes=1)
    cluster = Cluster(7, 1, 7, 3)
    names = list(cluster.nodes)
    for name in (names[0], names[3]):
        cluster.nodes[name].alive = False
    cluster.advance()
    assert {s.code for s in plan(cluster.view(), strict) if isinstance(s, Blocked)} == {"TooManyLost"}
    want(cluster.nodes[names[0]], Wanted.PARKED)
    steps = plan(cluster.view(), strict)
    assert orders(steps) and not any(isinstance(s, Blocked) and s.code == "TooManyLost" for s in steps)


def test_the_volume_of_a_parked_node_is_lost() -> None:
    """Nothing is left to wait for."""
    cluster, t = one_dead()
    node = node_of(cluster, t, 2)
    want(node, Wanted.PARKED)
    node.gone = True
    policy = replace(POLICY, lost=frozenset({node.node_id}))
    steps = story(cluster, policy=policy)
    assert "DrainNode" in steps and steps[-1] == "RetireNode" and cluster.healthy()


def test_a_parked_node_gets_nothing_new() -> None:
    cluster, t = one_dead(machines=4)
    free = next(n for n in cluster.nodes.values() if t.config.peer_on(n.node_id) is None)
    want(free, Wanted.PARKED)
    (step,) = plan(cluster.view(), POLICY)
    assert isinstance(step, Blocked) and step.code == "NoTarget"
    want(free, None)
    (begin,) = plan(cluster.view(), POLICY)
    cluster.apply(begin)
    want(free, Wanted.PARKED)
    assert [type(s).__name__ for s in plan(cluster.view(), POLICY)] == ["CancelCopy"]


def test_a_dead_voter_is_replaced_while_another_is_away_on_a_parked_node() -> None:
    """One of five. The parked node's replica is neither demoted nor removed."""
    cluster, t = one(rf=5, machines=7)
    parked, dead = node_of(cluster, t, 1), node_of(cluster, t, 3)
    want(parked, Wanted.PARKED)
    parked.alive = dead.alive = False
    cluster.advance()
    assert cluster.spare(t) == 0
    assert "EndIntent" in story(cluster)
    assert t.config.peer_on(parked.node_id) is not None and t.config.peer_on(dead.node_id) is None
    assert cluster.spare(t) == 1 and len(t.config.voters) == 5
    parked.alive = True
    cluster.advance()
    want(parked, None)
    assert story(cluster) == [] and cluster.healthy()


def test_two_of_three_voters_are_away_and_one_of_them_is_parked() -> None:
    """Nothing can be done, and the reason names both."""
    cluster, t = one_dead()
    node_of(cluster, t, 1).alive = False
    want(node_of(cluster, t, 1), Wanted.PARKED)
    cluster.advance()
    (step,) = plan(cluster.view(), POLICY)
    assert isinstance(step, Blocked) and step.code == "LostMajority"
    assert (
        "its node is parked or fenced, and does not answer" in step.reason
        and "its node is silent" in step.reason
    )


def test_a_drain_waits_for_a_parked_node_that_is_away() -> None:
    """No majority of two could accept a third that is not there yet. The leader refused it again and
    again."""
    cluster, t = one()
    parked = node_of(cluster, t, 2)
    want(parked, Wanted.PARKED)
    parked.alive = False
    cluster.advance()
    want(node_of(cluster, t, 1), Wanted.RETIRED)
    told = story(cluster)
    assert told == ["Blocked:Parked"] and not cluster.intents
    parked.alive = True
    cluster.advance()
    assert story(cluster)[-1] == "RetireNode" and cluster.spare(t) == 1


def test_a_replica_that_failed_on_a_parked_node_is_replaced() -> None:
    cluster, t = one()
    want(node_of(cluster, t, 2), Wanted.PARKED)
    t.replicas[3].failed = True
    cluster.advance()
    assert "RemovePeer" in story(cluster) and cluster.healthy()


# --- leaders


@pytest.mark.parametrize("wanted", [Wanted.PARKED, Wanted.DRAINED, Wanted.RETIRED])
def test_leaders_leave_first_and_only_to_nodes_in_service(wanted: Wanted) -> None:
    """All of them, although only three copies may run at once."""
    cluster = Cluster(5, 1, 10, 3)
    first, second = list(cluster.nodes.values())[:2]
    want(first, wanted)
    want(second, wanted)
    led = [t for t in cluster.tablets.values() if t.leader in (first.node_id, second.node_id)]
    assert len(led) == 4
    for _ in range(4):
        for step in orders(plan(cluster.view(), POLICY)):
            if isinstance(step, MoveLeader):
                assert cluster.nodes[step.target_node] not in (first, second) and not step.removes
            cluster.apply(step)
        cluster.advance()
    assert not [t for t in cluster.tablets.values() if t.leader in (first.node_id, second.node_id)]
    assert wanted is Wanted.PARKED or cluster.intents, "copies were under way"


def test_a_leader_stays_on_a_node_that_drains_where_nobody_in_service_could_lead() -> None:
    cluster, t = one(rf=1)
    want(node_of(cluster, t, 0), Wanted.PARKED)
    assert plan(cluster.view(), POLICY) == ()
    cluster, t = one()
    for i in range(3):
        want(node_of(cluster, t, i), Wanted.PARKED)
    assert plan(cluster.view(), POLICY) == ()


# --- drained, retired, taken back


def test_a_drained_node_stays_and_a_retiring_one_retires() -> None:
    for wanted, state in ((Wanted.DRAINED, NodeState.DRAINING), (Wanted.RETIRED, NodeState.RETIRED)):
        cluster, t = one()
        node = node_of(cluster, t, 1)
        want(node, wanted)
        assert story(cluster)[-1] == ("RetireNode" if wanted is Wanted.RETIRED else "EndIntent")
        assert node.state is state and t.config.peer_on(node.node_id) is None


def test_a_drained_node_that_is_lost_and_empty_retires() -> None:
    cluster, t = one()
    node = node_of(cluster, t, 1)
    want(node, Wanted.DRAINED)
    story(cluster)
    node.alive = False
    assert plan(cluster.view(), POLICY) == ()
    (step,) = plan(cluster.view(), replace(POLICY, lost=frozenset({node.node_id})))
    assert isinstance(step, RetireNode)


@pytest.mark.parametrize("after", ["BeginIntent", "StartCopy", "AddPreFollower"])
def test_a_drain_is_taken_back_while_a_copy_is_under_way(after: str) -> None:
    """Nothing is left of it: no intent, no extra member, and the replica that was begun is deleted."""
    cluster, t = one()
    node = node_of(cluster, t, 1)
    want(node, Wanted.DRAINED)
    before = {p.replica_id for p in t.config.peers}
    story(cluster, after={after: lambda: want(node, None)})
    assert {p.replica_id for p in t.config.peers} == before and not cluster.intents
    cluster.advance()
    assert all(r.tombstoned for rid, r in t.replicas.items() if rid not in before) and cluster.healthy()


def test_a_drain_is_taken_back_after_the_new_voter_was_promoted() -> None:
    """Four voters: the surplus one is removed, and never two."""
    cluster, t = one()
    node = node_of(cluster, t, 1)
    want(node, Wanted.DRAINED)
    while len(t.config.voters) < 4:
        for step in orders(plan(cluster.view(), POLICY)):
            cluster.apply(step)
        cluster.advance()
    want(node, None)
    story(cluster)
    assert cluster.healthy() and cluster.spare(t) == 1


WISHES = replace(POLICY, retiring={}, parked={})


def steps_for(node: NodeView, policy: object = WISHES, *, cluster: Cluster | None = None) -> list[Step]:
    """The steps about one node of a cluster without tablets."""
    view = (cluster or Cluster(1, 1, 0, 1)).view()
    return list(node_steps(replace(view, nodes=(node,)), policy))  # type: ignore[arg-type]


NODE = NodeView(NodeId("1" * 32), "node", "m1", "z1", "a:1")
RETIRING = replace(WISHES, retiring={NODE.node_id: "nodes.replicas is 3"})
PARKING = replace(WISHES, parked={NODE.node_id: "nodes.park names it"})


def test_the_policys_wishes_become_orders_once() -> None:
    (drain,) = steps_for(NODE, RETIRING)
    assert isinstance(drain, DrainNode) and not drain.given_up and drain.reason == "nodes.replicas is 3"
    asked = replace(NODE, state=NodeState.DRAINING, wanted=Wanted.RETIRED, wanted_by="driver")
    (retire,) = steps_for(asked, RETIRING)
    assert isinstance(retire, RetireNode)
    (park,) = steps_for(NODE, PARKING)
    assert isinstance(park, ParkNode) and park.for_ms == POLICY.park_ms
    parked = replace(NODE, wanted=Wanted.PARKED, wanted_by="driver", wanted_left_ms=POLICY.park_ms - 1)
    assert steps_for(parked, PARKING) == []
    (again,) = steps_for(replace(parked, wanted_left_ms=POLICY.park_ms // 2), PARKING)
    assert isinstance(again, ParkNode), "before its time is over, it is asked for again"


def test_a_driver_takes_back_its_own_wish_and_nobody_elses() -> None:
    parked = replace(NODE, wanted=Wanted.PARKED, wanted_by="driver", wanted_left_ms=1)
    (step,) = steps_for(parked)
    assert isinstance(step, EndWish)
    assert steps_for(replace(parked, wanted_by="administrator")) == []
    assert steps_for(parked, POLICY) == [], "it wants nothing of nodes, such as `stele driver run`"
    by_hand = replace(NODE, state=NodeState.DRAINING, wanted=Wanted.DRAINED, wanted_by="administrator")
    for policy in (WISHES, RETIRING, PARKING):
        assert steps_for(by_hand, policy) == []


def test_a_scale_in_that_is_set_back_ends_the_drain() -> None:
    cluster, t = one()
    node = node_of(cluster, t, 1)
    policy = replace(POLICY, retiring={node.node_id: "nodes.replicas is 4"})
    for _ in range(3):
        for step in orders(plan(cluster.view(), policy)):
            cluster.apply(step)
        cluster.advance()
    assert cluster.intents and cluster.view().node(node.node_id).state is NodeState.DRAINING  # type: ignore[union-attr]
    assert "EndWish" in story(cluster, policy=WISHES)
    assert node.state is NodeState.ACTIVE and t.config.peer_on(node.node_id) is not None and cluster.healthy()


def test_a_node_that_was_given_up_and_is_to_retire_does_not_return() -> None:
    given_up = replace(NODE, state=NodeState.DRAINING, given_up=True)
    (step,) = steps_for(given_up, RETIRING)
    assert isinstance(step, DrainNode) and not step.given_up


def test_nothing_is_placed_on_a_node_that_is_about_to_leave() -> None:
    cluster, t = one_dead(machines=4)
    free = next(n for n in cluster.nodes.values() if t.config.peer_on(n.node_id) is None)
    for policy in (
        replace(WISHES, retiring={free.node_id: "scale in"}),
        replace(WISHES, parked={free.node_id: "new memory"}),
    ):
        steps = [s for s in plan(cluster.view(), policy) if s.tablet_id]
        assert [s.code for s in steps if isinstance(s, Blocked)] == ["NoTarget"]
