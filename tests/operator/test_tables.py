"""TabletGroups to tables: made once and left alone when asked for otherwise; the conditions that tell of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from stele.driver.progress import Progress
from stele_operator.plan import make_plan
from stele_operator.plan.actions import (
    CreateTable,
)
from stele_operator.plan.findings import Kind
from stele_operator.plan.status import cluster_status
from tests.operator.world import World
from tests.operator.worlds import NOW, conditions, made


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


def test_a_tablet_without_a_leader_is_not_called_new() -> None:
    world = made()
    new, lost, *others = world.tablets
    world.tablets[:] = [
        replace(new, state="CREATING", leader_node=""),
        replace(lost, leader_node="", replicas=()),
        *others,
    ]
    ready = conditions(world, "events")["Ready"]
    assert ready[:2] == ("False", "NoLeader"), "what needs somebody is told first"
    assert "1 of 4 tablets have no leader; 1 others are still being created" in ready[2]
    world.tablets[:] = [replace(new, state="CREATING", leader_node=""), lost, *others]
    ready = conditions(world, "events")["Ready"]
    assert ready[:2] == ("False", "Creating")
    assert "3 of 4 tablets serve so far; the others are being created" in ready[2]


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


def test_a_table_is_made_once_under_the_uid_of_its_group() -> None:
    world = World({"nodes": {"replicas": 3}})
    world.run()
    group = world.group("events")
    made_plan = world.step()
    (create,) = [a for a in made_plan.actions if isinstance(a, CreateTable)]
    assert create.table_id == group["metadata"]["uid"].replace("-", "")
    world.run()
    assert len(world.tables) == 1


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
