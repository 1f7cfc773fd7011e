"""What becomes of a table when its TabletGroup is deleted: it is dropped only under Delete, and only by the group that had it."""

from __future__ import annotations

from typing import Any

import pytest

from stele_operator.plan import make_plan
from stele_operator.plan.actions import (
    DeleteTable,
    SetFinalizers,
)
from stele_operator.plan.findings import Kind
from stele_operator.plan.status import group_status
from tests.operator.world import COLUMNS
from tests.operator.worlds import NOW, conditions, made, the_group, touching


def test_an_adopted_table_is_dropped_with_its_group_though_its_owner_differs() -> None:
    world = made()
    world.objects["TabletGroup", "events"]["spec"]["deletionPolicy"] = "Retain"
    world.run()
    del world.objects["TabletGroup", "events"]
    world.group("events", partitioning={"hash": [{"columns": ["id"], "buckets": 4}]})
    world.run()
    o = world.observe()
    group = world.objects["TabletGroup", "events"]
    group["status"] = group_status(o, make_plan(o), the_group(o, "events"), NOW)
    group["spec"]["owner"] = "another"
    group["metadata"]["deletionTimestamp"] = NOW
    world.run()
    assert ("TabletGroup", "events") not in world.objects
    assert [t.state for t in world.tables] == ["REMOVED"]


def test_the_table_is_dropped_before_its_group_goes_and_only_under_delete() -> None:
    world = made()
    group = world.objects["TabletGroup", "events"]
    assert group["metadata"]["finalizers"] == ["stele.dev/table"]
    group["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    plan = world.step()
    assert [type(a) for a in plan.actions] == [DeleteTable]
    plan = world.step()
    assert [type(a) for a in plan.actions] == [SetFinalizers]
    assert ("TabletGroup", "events") not in world.objects
    assert world.tables[0].state == "REMOVED"


@pytest.mark.parametrize("finalized", [1, 2])
def test_a_dropped_table_can_be_taken_back_once_all_can_read_that(finalized: int) -> None:
    world = made()
    world.finalized = world.readable = finalized
    world.objects["TabletGroup", "events"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    (drop,) = world.step().actions
    assert isinstance(drop, DeleteTable) and drop.kept == (finalized == 2)
    assert ("stele table recall" in drop.reason) == drop.kept


def test_a_group_made_again_gets_a_new_table_beside_a_dropped_one_of_its_name() -> None:
    world = made()
    (before,) = world.tables
    world.objects["TabletGroup", "events"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.run()
    assert ("TabletGroup", "events") not in world.objects
    world.group("events", partitioning={"hash": [{"columns": ["id"], "buckets": 4}]})
    world.run()
    now = [t for t in world.tables if t.state != "REMOVED"]
    assert [t.name for t in now] == [before.name] and now[0].table_id != before.table_id


def test_a_group_that_never_had_the_table_does_not_drop_it() -> None:
    """It asked for a name that was taken; both are deleted at once, and the one that had the table retains it."""
    world = made()
    world.objects["TabletGroup", "events"]["spec"]["deletionPolicy"] = "Retain"
    world.run()
    world.group("other", tableName="events")
    world.step()
    assert conditions(world, "other")["Stalled"][1] == "NameTaken"
    del world.objects["TabletGroup", "events"]
    world.objects["TabletGroup", "other"]["metadata"]["deletionTimestamp"] = NOW
    world.run()
    assert ("TabletGroup", "other") not in world.objects
    assert [t.state for t in world.tables] == ["RUNNING"]


def test_a_group_made_in_the_same_second_does_not_take_the_table_of_another() -> None:
    """It comes first by name, but the other one's table was there before it."""
    world = made()
    events = world.objects["TabletGroup", "events"]
    other = world.group("delta", tableName="events", partitioning=events["spec"]["partitioning"])
    other["metadata"]["creationTimestamp"] = events["metadata"]["creationTimestamp"]
    world.step()
    assert conditions(world, "delta")["Stalled"][1] == "NameTaken"
    assert conditions(world, "events")["Ready"][0] == "True"
    o = world.observe()
    recorded = group_status(o, make_plan(o), the_group(o, "events"), NOW)  # as an earlier version did
    other = world.objects["TabletGroup", "delta"]
    other["status"], other["metadata"]["deletionTimestamp"] = recorded, NOW
    world.run()
    assert ("TabletGroup", "delta") not in world.objects
    assert [t.state for t in world.tables] == ["RUNNING"]


def test_a_table_that_a_group_took_over_is_dropped_with_it() -> None:
    world = made()
    world.objects["TabletGroup", "events"]["spec"]["deletionPolicy"] = "Retain"
    world.run()
    del world.objects["TabletGroup", "events"]
    world.group("events", partitioning={"hash": [{"columns": ["id"], "buckets": 4}]})
    world.run()
    o = world.observe()
    group = world.objects["TabletGroup", "events"]
    group["status"] = group_status(o, make_plan(o), the_group(o, "events"), NOW)
    group["metadata"]["deletionTimestamp"] = NOW
    world.run()
    assert ("TabletGroup", "events") not in world.objects
    assert [t.state for t in world.tables] == ["REMOVED"]


@pytest.mark.parametrize("recorded", [False, True], ids=["as now", "recorded by an earlier version"])
def test_a_table_that_was_left_as_it_is_stays_when_the_faulty_group_is_deleted(recorded: bool) -> None:
    """Another made it, with other columns: whoever sees TableDiffers deletes the TabletGroup that he got wrong."""
    world = made()
    world.objects["TabletGroup", "events"]["spec"]["deletionPolicy"] = "Retain"
    world.run()
    table_id = world.objects["TabletGroup", "events"]["metadata"]["uid"].replace("-", "")
    del world.objects["TabletGroup", "events"]
    group = world.group("events", columns=[*COLUMNS, {"name": "more", "type": "int8"}])
    for _ in range(3):
        world.step()
        o = world.observe()
        group = world.objects["TabletGroup", "events"]
        group["status"] = group_status(o, make_plan(o), the_group(o, "events"), NOW)
        assert "tableID" not in group["status"]
    assert conditions(world, "events")["Stalled"][1] == "TableDiffers"
    if recorded:
        identity = world.objects["ConfigMap", "flights-identity"]["data"]["clusterUUID"]
        group["status"] |= {"tableID": table_id, "clusterUUID": identity}
    group["metadata"]["deletionTimestamp"] = NOW
    world.run()
    assert ("TabletGroup", "events") not in world.objects
    assert [t.state for t in world.tables] == ["RUNNING"]


def test_under_retain_the_finalizer_goes_and_the_table_stays() -> None:
    world = made()
    group = world.objects["TabletGroup", "events"]
    group["spec"]["deletionPolicy"] = "Retain"
    world.run()
    assert world.objects["TabletGroup", "events"]["metadata"]["finalizers"] == []
    del world.objects["TabletGroup", "events"]
    world.run()
    assert world.tables[0].state == "RUNNING"
    world.group("events", partitioning={"hash": [{"columns": ["id"], "buckets": 4}]})
    world.run()
    assert len(world.tables) == 1
    assert conditions(world, "events")["Ready"][0] == "True"


@pytest.mark.parametrize("leads", [True, False])
def test_retain_that_came_after_the_last_pass_is_heeded_and_lets_a_hanging_deletion_go(leads: bool) -> None:
    """The finalizer is left from Delete: nobody acted between the change and the deletion, or it hung and was changed."""
    world = made()
    group = world.objects["TabletGroup", "events"]
    if not leads:
        world.confirmed = set()
    group["spec"]["deletionPolicy"] = "Retain"
    group["metadata"]["deletionTimestamp"] = NOW
    plan = world.step()
    assert [type(a) for a in touching(plan)] == [SetFinalizers]
    assert "its table stays" in touching(plan)[0].reason
    assert ("TabletGroup", "events") not in world.objects
    assert [t.state for t in world.tables] == ["RUNNING"]


@pytest.mark.parametrize(
    "also", [{"paused": True}, {"masters": {"replicas": 2}}], ids=["paused", "a rule is broken"]
)
def test_a_deleted_group_says_what_it_waits_for_and_retain_lets_it_go(also: dict[str, Any]) -> None:
    """In a cluster that nothing is done to, also not to what is to go."""
    world = made()
    group = world.objects["TabletGroup", "events"]
    group["metadata"]["deletionTimestamp"] = NOW
    world.cluster["spec"] |= also
    assert not touching(world.step())
    found = conditions(world, "events")["Reconciling"]
    assert found[:2] == ("True", "ClusterNotKept")
    assert "set deletionPolicy to Retain" in found[2]
    world.objects["TabletGroup", "events"]["spec"]["deletionPolicy"] = "Retain"
    plan = world.step()
    assert [type(a) for a in touching(plan)] == [SetFinalizers]
    assert ("TabletGroup", "events") not in world.objects
    assert [t.state for t in world.tables] == ["RUNNING"]


def test_while_a_deleted_group_cannot_be_read_its_table_stays_and_it_is_said_what_to_do() -> None:
    """An operator older than the definitions: what it cannot read may say Retain."""
    world = made()
    group = world.objects["TabletGroup", "events"]
    group["metadata"]["deletionTimestamp"] = NOW
    group["spec"]["columns"] = [{"name": "id", "type": "uuid"}]
    plan = world.step()
    assert not plan.actions
    (finding,) = [f for f in plan.findings if f.group == "events"]
    assert (finding.kind, finding.reason) == (Kind.STALLED, "InvalidSpec")
    assert "spec.columns.0.type" in finding.message and "finalizer" in finding.message
    group["spec"]["columns"] = COLUMNS
    world.run()
    assert [t.state for t in world.tables] == ["REMOVED"]


def test_a_table_dropped_behind_its_back_is_not_made_again() -> None:
    world = made()
    o = world.observe()
    group = the_group(o, "events")
    world.objects["TabletGroup", "events"]["status"] = group_status(o, make_plan(o), group, NOW)
    world.apply(DeleteTable("by hand", "events", o.catalog.tables[0].table_id if o.catalog else "", "events"))
    assert not make_plan(world.observe()).actions
    assert conditions(world, "events")["Stalled"][1] == "TableRemoved"


def test_when_the_cluster_goes_its_groups_are_let_go() -> None:
    world = made()
    world.cluster["metadata"]["deletionTimestamp"] = NOW
    world.objects["TabletGroup", "events"]["metadata"]["deletionTimestamp"] = NOW
    plan = make_plan(world.observe())
    assert [type(a) for a in plan.actions] == [SetFinalizers]
