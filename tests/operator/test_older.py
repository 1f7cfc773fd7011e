"""An operator that is older than the definitions: the API server fills in fields that it does not know, and it goes on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from stele_operator.api.definitions import definitions
from stele_operator.observe import parse_cluster, parse_group
from stele_operator.plan.actions import CreateObject, CreateTable, SetFinalizers
from stele_operator.plan.cluster_plan import Plan
from stele_operator.plan.findings import Kind
from tests.operator.cluster import bench
from tests.operator.world import COLUMNS, World
from tests.operator.worlds import NOW, conditions, made

Json = dict[str, Any]
LATER = {"backup": {"schedule": "never"}}


def told(plan: Plan, group: str = "") -> list[tuple[Kind, str]]:
    return [(f.kind, f.reason) for f in plan.findings if f.group == group]


def test_a_cluster_with_a_field_of_later_definitions_is_healed_and_told() -> None:
    """It was InvalidSpec: no pod was made again, and without a policy nothing was healed."""
    world = made()
    world.cluster["spec"].update(LATER)
    del world.objects["Pod", "flights-node-2"]
    plan = world.step()
    assert [a.name for a in plan.actions if isinstance(a, CreateObject)] == ["flights-node-2"]
    assert plan.policy is not None
    assert (Kind.REMARK, "OperatorOlder") in told(plan)
    assert not [f for f in plan.findings if f.kind is Kind.STALLED]
    world.run()
    status, reason, message = conditions(world)["Reconciling"]
    assert (status, reason) == ("False", "OperatorOlder") and "spec.backup" in message
    assert {t: c[0] for t, c in conditions(world).items() if t != "Reconciling"} == {
        "Ready": "True",
        "Degraded": "False",
        "Stalled": "False",
        "DrainBlocked": "False",
        "MajorityLost": "False",
        "CopiesEqual": "True",
    }
    del world.cluster["spec"]["backup"]
    assert conditions(world)["Reconciling"][1] == "AsAskedFor"


def test_retain_is_carried_out_beside_a_field_of_later_definitions() -> None:
    world = World({"deletionPolicy": "Delete"})
    world.run()
    assert all(c["metadata"]["ownerReferences"] for c in world.of("PersistentVolumeClaim"))
    world.cluster["spec"].update({**LATER, "deletionPolicy": "Retain"})
    world.run()
    assert not any(c["metadata"].get("ownerReferences") for c in world.of("PersistentVolumeClaim"))


def test_a_rule_that_is_broken_beside_it_is_still_one() -> None:
    world = made()
    world.cluster["spec"].update({**LATER, "nodes": {"replicas": "many"}})
    plan = world.step()
    assert plan.policy is None and not plan.actions
    (finding,) = [f for f in plan.findings if f.kind is Kind.STALLED]
    assert finding.reason == "InvalidSpec"
    assert "spec.nodes.replicas" in finding.message and "backup" not in finding.message


def test_a_table_that_is_there_goes_on_beside_a_field_of_later_definitions() -> None:
    world = made()
    group = world.objects["TabletGroup", "events"]
    group["spec"]["columns"] = [{**column, "codec": "plain"} for column in COLUMNS]
    group["spec"]["deletionPolicy"] = "Retain"
    plan = world.step()
    assert [type(a) for a in plan.actions] == [SetFinalizers]
    assert told(plan, "events") == [(Kind.REMARK, "OperatorOlder")]
    told_so = conditions(world, "events")
    assert told_so["Ready"][:2] == ("True", "Writable") and told_so["Stalled"][0] == "False"
    assert told_so["Reconciling"][:2] == ("False", "OperatorOlder")
    assert "spec.columns[].codec;" in told_so["Reconciling"][2]
    group["spec"]["deletionPolicy"] = "Delete"
    world.run()
    group["metadata"]["deletionTimestamp"] = NOW
    world.run()
    assert [t.state for t in world.tables] == ["REMOVED"]


def test_a_table_is_not_made_of_what_is_read_in_part() -> None:
    """What it is made of cannot be changed afterwards."""
    world = made()
    world.group("later", columns=[{"name": "id", "type": "int64", "default": 1.5}])
    columns = world.objects["TabletGroup", "later"]["spec"]["columns"]
    for _ in range(3):
        assert not any(isinstance(a, CreateTable) for a in world.step().actions)
    ready = conditions(world, "later")["Ready"]
    assert ready[:2] == ("False", "OperatorOlder") and "spec.columns[].default;" in ready[2]
    assert conditions(world, "later")["Stalled"][0] == "False"
    del columns[0]["default"]
    plan = world.step()
    assert [a.name for a in plan.actions if isinstance(a, CreateTable)] == ["later"]


def everywhere(schema: Json, value: Any, path: str) -> list[str]:
    """Puts an unknown field into every object of ours in `value`; where."""
    found = []
    if schema.get("type") == "array":
        for item in value:
            found += everywhere(schema["items"], item, f"{path}[]")
    elif "properties" in schema:
        for name, child in schema["properties"].items():
            if name in value:
                found += everywhere(child, value[name], f"{path}.{name}")
        value["later"] = 1
        found.append(f"{path}.later")
    return found


FULL: dict[str, Json] = {
    "tabletclusters.yaml": {
        "imagePullSecrets": [{"name": "registry"}],
        "masters": {"storage": {}, "resources": {"requests": {"cpu": "1"}}},
        "nodes": {"storage": {}, "resources": {"limits": {"memory": "1Gi"}}, "tolerations": [{"key": "gpu"}]},
        "healing": {},
        "budget": {},
    },
    "tabletgroups.yaml": {
        "clusterRef": {"name": "flights"},
        "columns": COLUMNS,
        "primaryKey": ["id"],
        "partitioning": {"hash": [{"columns": ["id"], "buckets": 2}, {"columns": ["id"], "buckets": 2}]},
    },
}


@pytest.mark.parametrize("name", sorted(FULL))
def test_a_field_may_be_added_anywhere(name: str) -> None:
    schema = definitions()[name]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec = copy.deepcopy(FULL[name])
    metadata = {"namespace": "data", "name": "x", "uid": "1", "resourceVersion": "1"}
    parse = parse_cluster if name == "tabletclusters.yaml" else parse_group
    known = parse({"metadata": metadata, "spec": copy.deepcopy(spec)})
    added = everywhere(schema, spec, "spec")
    seen = parse({"metadata": metadata, "spec": spec})
    assert not known.faults and not known.unknown
    assert not seen.faults and seen.spec == known.spec
    assert sorted(seen.unknown) == sorted(set(added)) and len(seen.unknown) > 3


async def test_definitions_that_are_upgraded_under_a_running_operator_stop_nothing(tmp_path: Path) -> None:
    """As in each `helm upgrade` that brings a field, until the new operator runs."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/tabletclusters.stele.dev"
    async with bench(tmp_path) as made:
        await made.start()
        await made.apply("cluster", nodes={"replicas": 3, "storage": {"size": "1Gi"}}, paused=True)
        definition = await made.kube._request("GET", path)
        root = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        root["properties"]["spec"]["properties"]["backup"] = {
            "type": "object",
            "default": {},
            "properties": {"schedule": {"type": "string", "default": "never"}},
        }
        await made.kube._request("PUT", path, body=definition)
        cluster = await made.kube.patch("TabletCluster", "default", "flights", {"spec": {"paused": False}})
        assert cluster["spec"]["backup"] == {"schedule": "never"}

        async def started() -> bool:
            return await made.names("Pod") >= {f"flights-master-{i}" for i in range(3)}

        await made.until("the first masters have pods", started)

        async def said() -> bool:
            return any(
                e["reason"] == "OperatorOlder" and "spec.backup" in e["message"]
                for e in await made.events("TabletCluster")
            )

        await made.until("an event names the field", said)
        assert (await made.condition("TabletCluster", "flights", "Stalled"))[0] != "True"
