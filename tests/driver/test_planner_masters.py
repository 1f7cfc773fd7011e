"""A driver continues what another began, and a leading master does not know everything yet."""

from __future__ import annotations

from dataclasses import replace

from stele.driver.planner import plan
from stele.driver.steps import (
    Blocked,
)
from tests.driver.model_parts import POLICY
from tests.driver.stories import REPLACED, one_dead, story


def test_an_orphan_intent_is_taken_over() -> None:
    cluster, _ = one_dead()

    def crash() -> None:
        cluster.epoch += 1

    steps = story(cluster, after={"AddWitness": crash})
    assert steps[4:] == ["TakeOverIntent", "RemovePeer", "EndIntent"]


def test_a_new_leader_master_takes_nobody_for_returned() -> None:
    cluster, _ = one_dead()

    def fails_over() -> None:
        cluster.new_leader_rounds = 3

    steps = story(cluster, after={"DemotePeer": fails_over})
    assert steps == REPLACED


def test_a_new_leader_master_replaces_nobody_that_it_has_not_heard_yet() -> None:
    cluster, _ = one_dead()
    cluster.new_leader_rounds = 2
    (step,) = plan(cluster.view(), POLICY)
    assert isinstance(step, Blocked) and step.code == "NotHeard"


def test_nothing_is_planned_on_a_view_that_is_not_settled() -> None:
    cluster, _ = one_dead()
    (only,) = plan(replace(cluster.view(), settled=False), POLICY)
    assert isinstance(only, Blocked) and only.code == "NotSettled"
