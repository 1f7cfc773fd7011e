"""TabletGroups to tables: made once, left alone when asked for otherwise, dropped only when asked to."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from stele.driver.progress import Progress
from stele.model.alter import AddColumn, DropColumn, RenameColumn, SetHistory
from stele_operator.plan import make_plan
from stele_operator.plan.actions import (
    AlterTable,
    CreateTable,
    DeleteTable,
    SetFinalizers,
    SetReplicationFactor,
)
from stele_operator.plan.findings import Kind
from stele_operator.plan.observation import GroupObject, Observation
from stele_operator.plan.status import cluster_status, group_status
from tests.operator.world import COLUMNS, World
from tests.operator.worlds import made, touching

NOW = "2026-01-01T00:00:00Z"


def conditions(world: World, name: str = "") -> dict[str, tuple[str, str, str]]:
    """Conditions of a TabletGroup, or of the cluster, by type."""
    o = world.observe()
    plan = make_plan(o)
    status = group_status(o, plan, the_group(o, name), NOW) if name else cluster_status(o, plan, (), NOW)
    return {c["type"]: (c["status"], c["reason"], c["message"]) for c in status["conditions"]}


def the_group(o: Observation, name: str) -> GroupObject:
    """The TabletGroup of this name."""
    return next(g for g in o.groups if g.name == name)


def test_ready_when_every_tablet_has_a_leader() -> None:
    world = made()
    assert conditions(world, "events")["Ready"] == ("True", "Writable", "all 4 tablets have leaders")
    assert conditions(world)["Ready"][:2] == ("True", "Writable")
    assert [conditions(world)[t][0] for t in ("Reconciling", "Degraded", "Stalled")] == ["False"] * 3


def test_a_lost_node_degrades_and_a_lost_leader_makes_it_not_ready() -> None:
    world = made()
    world.kill("n1")
    world.settle()
    for _ in range(31):
        world.step()
    assert conditions(world)["Degraded"][:2] == ("True", "MasterLost")
    leads = {t.leader_node for t in world.tablets} & {
        p["metadata"]["annotations"]["stele.dev/node-id"]
        for p in world.of("Pod")
        if p["spec"]["nodeName"] == "n1"
    }
    assert leads
    ready = conditions(world, "events")["Ready"]
    assert ready[:2] == ("False", "NoLeader")


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"replicationFactor": 7}, "TooFewNodes", "nodes.replicas=5"),
    ({"primaryKey": ["nope"]}, "InvalidSpec", "primaryKey names a column that columns does not have: nope"),
    ({"primaryKey": ["text"]}, "InvalidSpec", "a column of the primary key cannot be nullable: text"),
    ({"primaryKey": ["id", "id"]}, "InvalidSpec", "primaryKey names id twice"),
    (
        {"partitioning": {"hash": [{"columns": ["text"], "buckets": 2}]}},
        "InvalidSpec",
        "not in primaryKey: text",
    ),
    ({"columns": [{"name": "id", "type": "double"}]}, "InvalidSpec", "cannot be double: id"),
    ({"columns": [{"name": "id", "type": "text"}]}, "InvalidSpec", "spec.columns.0.type"),
    ({"tableName": "events"}, "NameTaken", "belongs to TabletGroup events"),
]


@pytest.mark.parametrize(("spec", "reason", "words"), REFUSED)
def test_a_rule_broken_is_a_condition_and_nothing_is_touched(
    spec: dict[str, Any], reason: str, words: str
) -> None:
    world = made()
    world.step()
    world.group("other", **{"deletionPolicy": "Retain", **spec})
    plan = make_plan(world.observe())
    assert not plan.actions
    stalled = conditions(world, "other")["Stalled"]
    assert stalled[:2] == ("True", reason)
    assert words in stalled[2]
    assert conditions(world, "other")["Ready"][0] == "False"
    assert conditions(world, "events")["Ready"][0] == "True"


def test_a_table_that_the_masters_refuse_waits_for_a_human_and_is_asked_for_without_haste() -> None:
    world = made()
    world.step()
    world.group("other", deletionPolicy="Retain")
    o = world.observe()
    asked = make_plan(o)
    assert [type(a) for a in asked.actions] == [CreateTable]
    told = replace(o, refused={("TabletGroup", "other"): "no such type"})
    plan = make_plan(told)
    assert plan.wait_s > asked.wait_s
    (stalled,) = [f for f in plan.findings if f.kind is Kind.STALLED]
    assert (stalled.group, stalled.reason) == ("other", "Refused") and "no such type" in stalled.message
    assert cluster_status(told, plan, (), NOW)["conditions"][1]["reason"] == "AsAskedFor"


def test_a_schema_that_differs_from_the_table_changes_nothing() -> None:
    world = made()
    group = world.objects["TabletGroup", "events"]
    group["spec"]["columns"] = [*group["spec"]["columns"], {"name": "more", "type": "int8"}]
    group["spec"]["replicationFactor"] = 5
    plan = make_plan(world.observe())
    assert not plan.actions
    found = conditions(world, "events")
    assert found["Stalled"][:2] == ("True", "TableDiffers")
    assert "column more cannot be added: stored rows need a value" in found["Stalled"][2]
    assert found["Ready"][0] == "True"


MORE = {"name": "more", "type": "int8", "nullable": True}


def test_new_columns_renamed_ones_and_dropped_ones() -> None:
    world = made()
    spec = world.objects["TabletGroup", "events"]["spec"]
    spec["columns"] = [COLUMNS[0], MORE, {**COLUMNS[1], "name": "said", "renamedFrom": "text"}]
    plan = make_plan(world.observe())
    (alter,) = plan.actions
    assert isinstance(alter, AlterTable) and alter.event == "TableAltered"
    assert alter.steps == (RenameColumn("text", "said"), AddColumn("more", "int8", True))
    assert conditions(world, "events")["Reconciling"][:2] == ("True", "Altering")
    assert conditions(world, "events")["Ready"][0] == "True", "it is written on meanwhile"
    world.run()
    assert [c.name for c in world.tables[0].columns] == ["id", "said", "more"]
    assert not make_plan(world.observe()).actions, "renamedFrom may stay"
    assert conditions(world, "events")["Stalled"][0] == "False"
    del spec["columns"][1]
    assert not make_plan(world.observe()).actions
    found = conditions(world, "events")["Stalled"]
    assert (
        found[1] == "TableDiffers"
        and "column more that the TabletGroup lacks; set allowColumnDrop" in found[2]
    )
    spec["allowColumnDrop"] = True
    (drop,) = make_plan(world.observe()).actions
    assert isinstance(drop, AlterTable) and drop.steps == (DropColumn("more"),)
    world.run()
    assert [c.name for c in world.tables[0].columns] == ["id", "said"]


def test_all_of_a_change_or_nothing() -> None:
    """Also while its tablets take an earlier one over, and where the masters refuse it."""
    world = made()
    spec = world.objects["TabletGroup", "events"]["spec"]
    spec["columns"] = [COLUMNS[0], {**COLUMNS[1], "type": "binary"}, MORE]
    assert not make_plan(world.observe()).actions
    assert "that cannot change" in conditions(world, "events")["Stalled"][2]
    spec["columns"] = [*COLUMNS, MORE]
    world.tables = [replace(t, state="ALTERING") for t in world.tables]
    assert not make_plan(world.observe()).actions
    world.tables = [replace(t, state="RUNNING") for t in world.tables]
    told = replace(world.observe(), refused={("TabletGroup", "events"): "too many columns"})
    (stalled,) = [f for f in make_plan(told).findings if f.kind is Kind.STALLED]
    assert stalled.reason == "Refused" and "too many columns" in stalled.message


def test_owner_comment_and_history_are_set_with_the_table_and_follow_its_resource() -> None:
    world = World()
    notes = {"owner": "ops", "comment": "clicks", "historyRetention": "168h"}
    world.group("events", **notes)
    world.run()
    (table,) = world.tables
    assert (table.owner, table.comment, table.history_ms) == ("ops", "clicks", 604_800_000)
    spec = world.objects["TabletGroup", "events"]["spec"]
    spec |= {"owner": "data", "historyRetention": "1h30m", "columns": [*COLUMNS, MORE]}
    (alter,) = make_plan(world.observe()).actions
    assert isinstance(alter, AlterTable)
    assert alter.steps == (AddColumn("more", "int8", True), SetHistory(5_400_000))
    assert alter.notes == (("owner", "data"),)
    assert (
        alter.reason == "TabletGroup events asks for other columns or ranges and history retention and owner"
    )
    world.run()
    assert (world.tables[0].owner, world.tables[0].comment) == ("data", "clicks")
    for name in notes:
        del spec[name]
    assert not make_plan(world.observe()).actions, "what the resource does not name is left as it is"
    spec["comment"] = ""
    (alter,) = make_plan(world.observe()).actions
    assert isinstance(alter, AlterTable) and (alter.steps, alter.notes) == ((), (("comment", ""),))
    spec["historyRetention"] = "90m"
    world.run()
    assert (world.tables[0].comment, world.tables[0].history_ms) == ("", 5_400_000)


def test_the_default_retention_alters_no_table_that_has_it() -> None:
    world = made()
    world.objects["TabletGroup", "events"]["spec"]["historyRetention"] = "15m"
    assert not make_plan(world.observe()).actions


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("historyRetention", "30s", "historyRetention is 30s; it must be 1m to 3650d"),
        ("historyRetention", "3651d", "it must be 1m to 3650d"),
        ("historyRetention", "soon", "spec.historyRetention"),
        ("owner", "a\nb", "owner of 3 characters"),
        ("owner", "x" * 129, "spec.owner"),
        ("comment", "a\x07", "comment of 2 characters"),
    ],
)
def test_bad_notes(field: str, value: str, why: str) -> None:
    world = made()
    world.objects["TabletGroup", "events"]["spec"][field] = value
    assert not make_plan(world.observe()).actions
    found = conditions(world, "events")["Stalled"]
    assert found[1] == "InvalidSpec" and why in found[2]


def test_a_table_that_was_there_before_is_not_altered() -> None:
    world = made()
    world.tables = [replace(t, table_id="f" * 32) for t in world.tables]
    world.tablets = [replace(t, table_id="f" * 32) for t in world.tablets]
    world.objects["TabletGroup", "events"]["spec"]["columns"] = [*COLUMNS, MORE]
    assert not make_plan(world.observe()).actions
    assert conditions(world, "events")["Stalled"][1] == "TableDiffers"


def test_notes_and_history_of_an_adopted_table_are_told_first_and_followed_later() -> None:
    """Another made it. What differs at first is told, and nothing is changed; once it is adopted, they follow."""
    world = made()
    world.objects["TabletGroup", "events"]["spec"]["deletionPolicy"] = "Retain"
    world.run()
    del world.objects["TabletGroup", "events"]
    notes = {"owner": "ops", "comment": "clicks", "historyRetention": "2d"}
    world.group(
        "events",
        deletionPolicy="Retain",
        partitioning={"hash": [{"columns": ["id"], "buckets": 4}]},
        **notes,
    )
    assert not touching(make_plan(world.observe()))
    stalled = conditions(world, "events")["Stalled"]
    assert stalled[1] == "TableDiffers"
    for told in (
        "owner of the table is empty",
        "comment of the table is empty",
        "retention of the table is 15m",
    ):
        assert told in stalled[2]
    o = world.observe()
    assert "tableID" not in group_status(o, make_plan(o), the_group(o, "events"), NOW)
    (table,) = world.tables
    world.tables = [replace(table, owner="ops", comment="clicks", history_ms=2 * 86_400_000)]
    o = world.observe()
    group = world.objects["TabletGroup", "events"]
    group["status"] = group_status(o, make_plan(o), the_group(o, "events"), NOW)
    assert group["status"]["tableID"] == table.table_id
    group["spec"] |= {"owner": "data", "historyRetention": "1h"}
    world.run()
    (table,) = world.tables
    assert (table.owner, table.comment, table.history_ms) == ("data", "clicks", 3_600_000)
    assert conditions(world, "events")["Ready"][0] == "True"


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


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ([{**MORE, "renamedFrom": "text"}, *COLUMNS], "which columns also names"),
        (
            [COLUMNS[0], {**MORE, "renamedFrom": "x"}, {**MORE, "name": "n", "renamedFrom": "x"}],
            "two columns are renamedFrom x",
        ),
    ],
)
def test_unclear_renames(columns: list[dict[str, Any]], why: str) -> None:
    world = made()
    world.objects["TabletGroup", "events"]["spec"]["columns"] = columns
    assert not make_plan(world.observe()).actions
    assert conditions(world, "events")["Stalled"][1] == "InvalidSpec"
    assert why in conditions(world, "events")["Stalled"][2]


def test_a_table_is_made_once_under_the_uid_of_its_group() -> None:
    world = World({"nodes": {"replicas": 3}})
    world.run()
    group = world.group("events")
    made_plan = world.step()
    (create,) = [a for a in made_plan.actions if isinstance(a, CreateTable)]
    assert create.table_id == group["metadata"]["uid"].replace("-", "")
    world.run()
    assert len(world.tables) == 1


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


def test_an_unknown_zone_is_said_and_the_others_are_used() -> None:
    world = World({"nodes": {"replicas": 3}, "zones": ["z1", "z9", "z2"]})
    world.run()
    stalled = conditions(world)["Stalled"]
    assert stalled[:2] == ("True", "UnknownZone")
    assert "z9" in stalled[2]
    zones = {c["metadata"]["annotations"]["stele.dev/zone"] for c in world.of("PersistentVolumeClaim")}
    assert zones == {"z1", "z2"}


def test_conditions_keep_the_time_of_their_last_change() -> None:
    world = made()
    o = world.observe()
    first = cluster_status(o, make_plan(o), (), "2026-01-01T00:00:00Z")
    world.cluster["status"] = first
    o = world.observe()
    assert cluster_status(o, make_plan(o), (), "2027-01-01T00:00:00Z") == first


def test_a_status_stays_below_64_kib() -> None:
    world = World({"nodes": {"replicas": 100}}, machines=120)
    world.run(passes=200)
    o = world.observe()
    long = Progress(
        "a" * 32, "t" * 128, "Copying", "WaitCopy", "why " * 400, "AddPreFollower", 1, 2, None, "e" * 900
    )
    status = cluster_status(o, make_plan(o), [long] * 500, NOW)
    assert len(status["members"]) == 100
    assert len(status["healing"]["active"]) == 20
    assert status["healing"]["total"] == 500
    assert len(json.dumps(status).encode()) < 64 * 1024


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
