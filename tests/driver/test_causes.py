"""All steps of a heal have one cause: the node that it replaces, and the epoch of the driver that began it."""

from __future__ import annotations

from dataclasses import replace

from stele.driver.nodes import node_steps
from stele.driver.planner import plan
from stele.driver.progress import Pace
from stele.driver.steps import WAITS, RemovePeer, Step
from stele.driver.wire import intent_from_pb, intent_to_pb
from stele.rpc.proto import master_pb2
from tests.driver.model import Cluster
from tests.driver.model_parts import POLICY
from tests.driver.stories import node_of, one, one_dead


def told(cluster: Cluster, *, new_driver_after: str = "") -> list[Step]:
    """All steps until nothing is left to do. After the first step of this kind, another driver takes over."""
    steps: list[Step] = []
    for _ in range(30):
        for step in plan(cluster.view(), POLICY):
            steps.append(step)
            if not isinstance(step, WAITS):
                cluster.apply(step)
            if type(step).__name__ == new_driver_after:
                cluster.epoch += 1
                new_driver_after = ""
        cluster.advance()
    return steps


def test_all_steps_of_a_heal_name_the_node_that_is_replaced() -> None:
    cluster, t = one_dead()
    dead = node_of(cluster, t, 2).node_id
    steps = told(cluster)
    assert isinstance(steps[-2], RemovePeer) and cluster.healthy()
    assert {step.cause for step in steps} == {f"heal/{dead[:8]}-{cluster.epoch}"}


def test_a_driver_that_takes_over_keeps_the_cause() -> None:
    cluster, t = one_dead()
    dead, epoch = node_of(cluster, t, 2).node_id, cluster.epoch
    steps = told(cluster, new_driver_after="DemotePeer")
    assert "TakeOverIntent" in {type(step).__name__ for step in steps} and cluster.healthy()
    assert {step.cause for step in steps} == {f"heal/{dead[:8]}-{epoch}"}


def test_where_no_member_is_at_fault_the_tablet_is_the_cause() -> None:
    cluster, t = one()
    t.rf = 1
    assert plan(cluster.view(), POLICY)[0].cause == f"tablet/{t.tablet_id[:8]}-{cluster.epoch}"


def test_what_becomes_of_the_node_itself_has_the_same_cause() -> None:
    cluster, t = one_dead()
    dead = node_of(cluster, t, 2).node_id
    policy = replace(POLICY, retire=True, lost=frozenset({dead}))
    (drain,) = node_steps(cluster.view(), policy)
    assert drain.cause == plan(cluster.view(), policy)[0].cause == f"heal/{dead[:8]}-{cluster.epoch}"


def test_orders_and_progress_carry_the_cause() -> None:
    cluster, _ = one_dead()
    (step,) = plan(cluster.view(), POLICY)
    assert step.because == f"{step.cause}: {step.reason}"
    assert Pace().record(step, "t", 0).cause == step.cause


def test_an_intent_without_a_cause_is_one_of_an_earlier_driver() -> None:
    """Its steps are named after the state that can be seen now."""
    cluster, t = one_dead()
    cluster.apply(plan(cluster.view(), POLICY)[0])
    intent = cluster.intents[t.tablet_id]
    sent = intent_to_pb(intent)
    assert intent.cause and intent_from_pb(sent).cause == intent.cause
    sent.ClearField("cause")
    old = intent_from_pb(master_pb2.IntentPB.FromString(sent.SerializeToString()))
    cluster.intents[t.tablet_id] = old
    assert old.cause == "" and plan(cluster.view(), POLICY)[0].cause == intent.cause
