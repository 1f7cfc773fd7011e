"""A changed replicationFactor of a TabletGroup: given to its table, shown as progress, or refused with a sentence."""

from __future__ import annotations

from dataclasses import replace

from stele_operator.plan import make_plan
from stele_operator.plan.actions import (
    SetReplicationFactor,
)
from stele_operator.plan.findings import Kind
from tests.operator.worlds import conditions, made


def test_a_changed_replication_factor_is_given_to_the_table_and_shown_as_progress() -> None:
    world = made()
    world.step()
    group = world.objects["TabletGroup", "events"]
    group["spec"]["replicationFactor"] = 5
    (action,) = make_plan(world.observe()).actions
    assert isinstance(action, SetReplicationFactor) and action.factor == 5
    assert conditions(world, "events")["Reconciling"][:2] == ("True", "ReplicationFactor")
    world.step()
    assert world.tables[0].replication_factor == 5 and not make_plan(world.observe()).actions
    found = conditions(world, "events")
    assert found["Reconciling"] == (
        "True",
        "AddingReplicas",
        "4 of 4 tablets get more replicas, for replicationFactor 5",
    )
    assert found["Degraded"][0] == "False" and found["Ready"][0] == "True"
    assert conditions(world)["Degraded"][0] == "False"


def test_a_voter_that_is_lost_while_replicas_are_added_is_told_as_lost() -> None:
    world = made()
    world.step()
    world.objects["TabletGroup", "events"]["spec"]["replicationFactor"] = 5
    world.step()
    world.kill("n1")
    for _ in range(40):
        world.step()
    assert conditions(world, "events")["Degraded"][:2] == ("True", "VoterLost")


def test_a_replication_factor_beyond_the_nodes_waits_for_a_human_and_keeps_the_table() -> None:
    world = made()
    world.step()
    world.objects["TabletGroup", "events"]["spec"]["replicationFactor"] = 7
    assert not make_plan(world.observe()).actions
    stalled = conditions(world, "events")["Stalled"]
    assert stalled[:2] == ("True", "TooFewNodes") and "keeps replication factor 3" in stalled[2]


def test_a_replication_factor_that_the_masters_refuse_is_told_and_asked_for_without_haste() -> None:
    world = made()
    world.step()
    world.objects["TabletGroup", "events"]["spec"]["replicationFactor"] = 5
    o = world.observe()
    told = replace(o, refused={("TabletGroup", "events"): "only 4 machines have ACTIVE nodes"})
    plan = make_plan(told)
    assert plan.wait_s > make_plan(o).wait_s
    (stalled,) = [f for f in plan.findings if f.kind is Kind.STALLED]
    assert (stalled.group, stalled.reason) == ("events", "Refused")
    assert "only 4 machines have ACTIVE nodes; the table keeps replication factor 3" in stalled.message


def test_a_table_that_somebody_else_made_keeps_its_replication_factor() -> None:
    """It has the name and the columns of the TabletGroup, which has not taken it over."""
    world = made()
    world.step()
    other = replace(world.tables[0], table_id="e" * 32, name="theirs", replication_factor=5)
    world.tables.append(other)
    world.group("theirs", deletionPolicy="Retain")
    world.objects["TabletGroup", "theirs"]["spec"]["partitioning"] = world.objects["TabletGroup", "events"][
        "spec"
    ]["partitioning"]
    assert not make_plan(world.observe()).actions
    assert "replication factor 5" in conditions(world, "theirs")["Stalled"][2]
