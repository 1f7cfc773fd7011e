"""The rules of the CRDs: bad resources are refused with a sentence, what is fixed stays, and older resources stay editable."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from stele_local.cluster import LocalCluster, Settings
from stele_operator.api.generate import DIRECTORY
from stele_operator.kube import Kube, KubeError, configuration
from tests.operator.crd_bodies import SPREAD, Json, changed, example, machines, others

BAD: list[tuple[str, str, Any, str]] = [
    ("cluster", "spec.masters.replicas", 2, "spec.masters.replicas"),
    ("cluster", "spec.nodes.replicas", 0, "spec.nodes.replicas"),
    ("cluster", "spec.nodes.retire", ["a", "a"], 'Duplicate value: "a"'),
    ("cluster", "spec.nodes.park", ["Flights_0"], "spec.nodes.park[0]"),
    ("cluster", "spec.nodes", {"retire": ["a", "b"], "park": ["b"]}, "name the same node"),
    ("cluster", "spec.nodes.storage.size", "lots", "spec.nodes.storage.size"),
    ("cluster", "spec.healing.witnessAfter", "soon", "spec.healing.witnessAfter"),
    ("cluster", "spec.deletionPolicy", "Maybe", "spec.deletionPolicy"),
    ("cluster", "spec.logLevel", "loud", 'supported values: "debug", "info", "warning", "error"'),
    ("cluster", "spec.logLevel", "INFO", "spec.logLevel"),
    ("cluster", "spec.leaderLease", "100ms", "leaderLease must be 0s, or from 150ms to 5s"),
    ("cluster", "spec.leaderLease", "6s", "leaderLease must be 0s, or from 150ms to 5s"),
    ("cluster", "spec.leaderLease", "1m", "leaderLease must be 0s, or from 150ms to 5s"),
    ("cluster", "spec.budget.maxUnavailable", 0, "spec.budget.maxUnavailable"),
    ("cluster", "spec.budget.maxUnavailable", 101, "spec.budget.maxUnavailable"),
    ("cluster", "spec.budget.maxUnavailable", "50%", "spec.budget.maxUnavailable"),
    ("cluster", "spec.budget.bytesPerSecond", "0", "bytesPerSecond must be at least 64Ki"),
    ("cluster", "spec.budget.bytesPerSecond", 100, "bytesPerSecond must be at least 64Ki"),
    ("cluster", "spec.budget.bytesPerSecond", "16Ei", "and at most 1Ei"),
    ("cluster", "spec.nodes.storage.size", "100Mi", "storage.size must be at least 1Gi"),
    ("cluster", "spec.masters.storage.size", "1", "storage.size must be at least 1Gi"),
    ("cluster", "spec.nodes.log", {"segmentSize": "3Mi"}, "log.segmentSize must be from 4Mi to 256Mi"),
    ("cluster", "spec.masters.log", {"segmentSize": "1Gi"}, "log.segmentSize must be from 4Mi to 256Mi"),
    ("cluster", "spec.masters.log", {"spareSegments": 65}, "spec.masters.log.spareSegments"),
    ("cluster", "spec.nodes.resources", {"requests": {"memry": "2Gi"}}, "may only name cpu, memory"),
    ("cluster", "spec.masters.resources", {"limits": {"cpus": 2}}, "may only name cpu, memory"),
    (
        "cluster",
        "spec.nodes.resources",
        {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}},
        "limits.memory must not be less than",
    ),
    (
        "cluster",
        "spec.nodes.resources",
        {"requests": {"cpu": 2}, "limits": {"cpu": "1500m"}},
        "limits.cpu must not be less than",
    ),
    ("cluster", "metadata.name", "a" * 41, "at most 40 characters"),
    ("cluster", "metadata.name", "dotted.name", "lower-case letters, digits and '-'"),
    ("cluster", "metadata.name", "2024-flights", "beginning with a letter"),
    ("cluster", "spec.nodes.resources", {"limits": {"memory": "256Mi"}}, "nodes.resources: the memory limit"),
    (
        "cluster",
        "spec.nodes.resources",
        {"requests": {"memory": "511Mi"}},
        "the memory limit must be at least 512Mi",
    ),
    (
        "cluster",
        "spec.masters.resources",
        {"limits": {"memory": "128Mi"}},
        "masters.resources: the memory limit",
    ),
    ("cluster", "spec.imagePullSecrets", [{}], "spec.imagePullSecrets[0].name"),
    ("cluster", "spec.imagePullSecrets", [{"name": "Registry"}], "spec.imagePullSecrets[0].name"),
    ("cluster", "spec.imagePullSecrets", [{"name": "a"}, {"name": "a"}], 'Duplicate value: {"name":"a"}'),
    ("cluster", "spec.imagePullSecrets", [{"name": f"s{n}"} for n in range(17)], "at most 16 items"),
    ("cluster", "spec.serviceAccountName", "", "spec.serviceAccountName"),
    ("cluster", "spec.serviceAccountName", "system:x", "spec.serviceAccountName"),
    ("cluster", "spec.masters.priorityClassName", "Very High", "spec.masters.priorityClassName"),
    ("cluster", "spec.nodes.nodeSelector", {"disk": "s s d"}, "spec.nodes.nodeSelector.disk"),
    ("cluster", "spec.nodes.nodeSelector", {"disk": "x" * 64}, "spec.nodes.nodeSelector.disk"),
    (
        "cluster",
        "spec.nodes.nodeSelector",
        {"-disk": "ssd"},
        "nodeSelector: a key is a name of at most 63 letters",
    ),
    ("cluster", "spec.nodes.nodeSelector", {"Acme.org/disk": "ssd"}, "nodeSelector: a key is a name"),
    ("cluster", "spec.nodes.nodeSelector", {"a/b/c": "ssd"}, "nodeSelector: a key is a name"),
    ("cluster", "spec.nodes.nodeSelector", {"x" * 64: "ssd"}, "nodeSelector: a key is a name"),
    ("cluster", "spec.nodes.nodeSelector", {"x" * 254 + "/disk": "ssd"}, "nodeSelector: a key is a name"),
    ("cluster", "spec.nodes.nodeSelector", {"": "ssd"}, "nodeSelector: a key is a name"),
    ("cluster", "spec.nodes.nodeSelector", {f"k{n}": "v" for n in range(17)}, "at most 16 items"),
    (
        "cluster",
        "spec.masters.nodeSelector",
        {"topology.kubernetes.io/zone": "z1"},
        "use zones, of which each pod gets one",
    ),
    ("cluster", "spec.nodes.tolerations", [{"operator": "Exists"}], "spec.nodes.tolerations[0].key"),
    ("cluster", "spec.nodes.tolerations", [{"key": "", "operator": "Exists"}], "tolerations[0].key"),
    ("cluster", "spec.nodes.tolerations", [{"key": "a b"}], "spec.nodes.tolerations[0].key"),
    ("cluster", "spec.nodes.tolerations", [{"key": "gpu", "operator": "Like"}], '"Exists", "Equal"'),
    ("cluster", "spec.nodes.tolerations", [{"key": "gpu", "effect": "Never"}], '"NoExecute"'),
    ("cluster", "spec.nodes.tolerations", [{"key": "gpu", "value": "a b"}], "tolerations[0].value"),
    (
        "cluster",
        "spec.nodes.tolerations",
        [{"key": "gpu", "operator": "Exists", "value": "x"}],
        "operator Exists tolerates any value",
    ),
    (
        "cluster",
        "spec.masters.tolerations",
        [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}],
        "must not be one of Kubernetes' own",
    ),
    (
        "cluster",
        "spec.masters.tolerations",
        [{"key": "node.cloudprovider.kubernetes.io/shutdown", "operator": "Exists"}],
        "must not be one of Kubernetes' own",
    ),
    ("cluster", "spec.nodes.tolerations", [{"key": f"t{n}"} for n in range(17)], "at most 16 items"),
    ("cluster", "spec.nodes.affinity", machines(), "In and NotIn need values"),
    ("cluster", "spec.nodes.affinity", machines(operator="Exists", values=["x"]), "take no values"),
    (
        "cluster",
        "spec.nodes.affinity",
        machines(operator="Gt", values=["4", "5"]),
        "one value, a whole number",
    ),
    ("cluster", "spec.nodes.affinity", machines(operator="Lt", values=["4Gi"]), "one value, a whole number"),
    ("cluster", "spec.nodes.affinity", machines(operator="Like", values=["x"]), '"DoesNotExist"'),
    ("cluster", "spec.nodes.affinity", machines(key="a b", values=["x"]), "matchExpressions[0].key"),
    (
        "cluster",
        "spec.masters.affinity",
        machines(key="topology.kubernetes.io/zone", values=["z1"]),
        "use zones, of which each pod gets one",
    ),
    (
        "cluster",
        "spec.masters.affinity",
        {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{}]}}},
        "should have at least 1 properties",
    ),
    (
        "cluster",
        "spec.masters.affinity",
        {
            "nodeAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 101, "preference": {}}]
            }
        },
        "weight",
    ),
    ("cluster", "spec.masters.affinity", others(topologyKey=""), "topologyKey"),
    (
        "cluster",
        "spec.masters.affinity",
        others(labelSelector={"matchLabels": {"a b": "x"}}),
        "matchLabels: a key",
    ),
    (
        "cluster",
        "spec.masters.affinity",
        others(labelSelector={"matchExpressions": [{"key": "app", "operator": "Gt", "values": ["1"]}]}),
        'Unsupported value: "Gt"',
    ),
    ("cluster", "spec.nodes.topologySpreadConstraints", [{}], "topologySpreadConstraints[0].maxSkew"),
    ("cluster", "spec.nodes.topologySpreadConstraints", [{**SPREAD, "maxSkew": 0}], "[0].maxSkew"),
    (
        "cluster",
        "spec.nodes.topologySpreadConstraints",
        [SPREAD, {**SPREAD, "maxSkew": 2}],
        "Duplicate value",
    ),
    (
        "cluster",
        "spec.nodes.topologySpreadConstraints",
        [{**SPREAD, "whenUnsatisfiable": "ScheduleAnyway", "minDomains": 2}],
        "minDomains is for DoNotSchedule only",
    ),
    ("cluster", "spec.nodes.runtimeClassName", "Kata", "spec.nodes.runtimeClassName"),
    ("cluster", "spec.masters.schedulerName", "my scheduler", "spec.masters.schedulerName"),
    ("cluster", "spec.nodes.podLabels", {"stele.dev/role": "x"}, "podLabels must not name stele.dev/"),
    ("cluster", "spec.nodes.podLabels", {"app.kubernetes.io/managed-by": "x"}, "podLabels must not name"),
    ("cluster", "spec.nodes.podLabels", {"team": "data & co"}, "spec.nodes.podLabels.team"),
    ("cluster", "spec.nodes.podLabels", {"a b": "x"}, "podLabels: a key is a name"),
    ("cluster", "spec.masters.podAnnotations", {"stele.dev/spec-hash": "x"}, "podAnnotations must not name"),
    ("cluster", "spec.masters.podAnnotations", {"a b": "x"}, "podAnnotations: a key is a name"),
    ("cluster", "spec.masters.podAnnotations", {"a": "x" * 4097}, "spec.masters.podAnnotations.a"),
    ("flights", "spec.clusterRef.name", "2024-flights", "spec.clusterRef.name"),
    ("flights", "spec.replicationFactor", 2, "spec.replicationFactor"),
    ("flights", "spec.columns.0.type", "text", "spec.columns[0].type"),
    ("flights", "spec.columns", [], "spec.columns"),
    ("flights", "spec.clusterRef", ..., "spec.clusterRef"),
    ("flights", "spec.primaryKey", ["nope"], "primaryKey names a column that columns does not have"),
    ("flights", "spec.primaryKey", ["tailnum"], "a column of the primary key cannot be nullable"),
    ("flights", "spec.columns.10.type", "double", "a column of the primary key cannot be float or double"),
    ("flights", "spec.primaryKey", ["year", "year"], "primaryKey names a column twice"),
    ("flights", "spec.partitioning.hash.0.columns", ["dest"], "names a column that is not in primaryKey"),
    ("flights", "spec.partitioning.hash.0.buckets", 1, "spec.partitioning.hash[0].buckets"),
    ("flights", "spec.partitioning.range", {"columns": ["dest"], "ranges": [{}]}, "not in primaryKey"),
    ("flights", "spec.partitioning.range", {"columns": ["flight"], "ranges": []}, "range.ranges"),
    ("flights", "spec.partitioning.range", {"columns": ["flight"]}, "range.ranges"),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("name", "path", "value", "words"), BAD)
async def test_a_bad_resource_is_refused_with_a_sentence(
    kube: Kube, name: str, path: str, value: Any, words: str
) -> None:
    body = changed(example(name), path, value)
    with pytest.raises(KubeError) as caught:
        await kube.create(body["kind"], "default", body)
    assert caught.value.status == 422
    assert words in str(caught.value)


FIXED: list[tuple[str, str, Any, str]] = [
    ("cluster", "spec.nodes.storage.className", "fast", "storage.className cannot change"),
    ("flights", "spec.clusterRef.name", "other", "clusterRef cannot change"),
    ("flights", "spec.tableName", "other", "tableName cannot change"),
    ("flights", "spec.primaryKey", ["year"], "primaryKey cannot change"),
    ("flights", "spec.columns.0.type", "int32", "the type of a column cannot change"),
    ("flights", "spec.columns.0.nullable", True, "cannot"),
    ("flights", "spec.partitioning.hash.0.buckets", 16, "partitioning cannot change"),
    (
        "flights",
        "spec.partitioning.range",
        {"columns": ["flight"], "ranges": [{"from": [1]}]},
        "partitioning cannot change",
    ),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("name", "path", "value", "words"), FIXED)
async def test_what_is_fixed_stays(kube: Kube, name: str, path: str, value: Any, words: str) -> None:
    body = example(name)
    made = await kube.create(body["kind"], "default", body)
    patch = {"spec": changed(body, path, value)["spec"]}
    try:
        with pytest.raises(KubeError) as caught:
            await kube.patch(body["kind"], "default", body["metadata"]["name"], patch)
        assert caught.value.status == 422
        assert words in str(caught.value)
    finally:
        await kube.delete(body["kind"], "default", body["metadata"]["name"], made["metadata"]["uid"], "")


@pytest.mark.asyncio(loop_scope="module")
async def test_what_may_change_changes(kube: Kube) -> None:
    body = example("cluster")
    made = await kube.create("TabletCluster", "default", body)
    patch = {
        "spec": {
            "nodes": {
                "replicas": 7,
                "storage": {"size": "3Gi"},
                "resources": {"requests": {"memory": "128Mi"}, "limits": {"memory": "512Mi", "cpu": 1}},
            },
            "paused": True,
            "image": "stele/node:2",
            "budget": {"maxUnavailable": 3, "copies": 64, "bytesPerSecond": "64Ki"},
            "masters": {
                "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}
            },
        }
    }
    await kube.patch("TabletCluster", "default", "flights", patch)
    patch["spec"]["nodes"] = {
        "replicas": 2,
        "retire": ["flights-node-0"],
        "park": ["flights-node-1"],
        "storage": {"size": "2Gi"},
    }  # a growth that was refused, taken back
    await kube.patch("TabletCluster", "default", "flights", patch)
    await kube.delete("TabletCluster", "default", "flights", made["metadata"]["uid"], "")


@pytest.mark.asyncio(loop_scope="module")
async def test_ranges_may_change_and_their_columns_may_not(kube: Kube) -> None:
    body = example("flights")
    body["spec"]["partitioning"]["range"] = {
        "columns": ["flight"],
        "ranges": [{"to": [100]}, {"from": ["100"]}],
    }
    made = await kube.create("TabletGroup", "default", body)
    more = [{"to": [100]}, {"from": [100], "to": [200]}]
    changed_ranges = {"spec": {"partitioning": {"range": {"ranges": more}}}}
    there = await kube.patch("TabletGroup", "default", "flights", changed_ranges)
    assert there["spec"]["partitioning"]["range"] == {"columns": ["flight"], "ranges": more}
    for fixed, words in (
        ({"range": {"columns": ["carrier"]}}, "partitioning.range.columns cannot change"),
        ({"range": None}, "partitioning cannot change"),
    ):
        with pytest.raises(KubeError) as caught:
            await kube.patch("TabletGroup", "default", "flights", {"spec": {"partitioning": fixed}})
        assert caught.value.status == 422 and words in str(caught.value)
    await kube.delete("TabletGroup", "default", "flights", made["metadata"]["uid"], "")


OLDER: list[tuple[str, Any, Any]] = [
    ("budget", {"copies": 4, "bytesPerSecond": "0"}, {"bytesPerSecond": "1"}),
    ("nodes", {"replicas": 3, "storage": {"size": "100Mi"}}, {"storage": {"size": "200Mi"}}),
    ("masters", {"resources": {"requests": {"memry": "1Gi"}}}, {"resources": {"requests": {"cpus": "1"}}}),
    (
        "masters",
        {"resources": {"requests": {"cpu": 2}, "limits": {"cpu": 1}}},
        {"resources": {"requests": {"cpu": 3}}},
    ),
]


def without_rules(part: Any) -> Any:
    """A definition as it was before there were rules."""
    if isinstance(part, dict):
        return {k: without_rules(v) for k, v in part.items() if k != "x-kubernetes-validations"}
    return [without_rules(v) for v in part] if isinstance(part, list) else part


@pytest.mark.parametrize(("part", "there", "worse"), OLDER, ids=["rate", "size", "name", "limit"])
async def test_what_stands_in_a_cluster_stays_editable_when_a_rule_comes(
    tmp_path: Path, part: str, there: Json, worse: Json
) -> None:
    """Its other fields change, and its status is written; only the field itself must then be as the rule says."""
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    async with LocalCluster(tmp_path, Settings(machines=1)) as local:
        kube = Kube(await configuration(str(local.kubeconfig)))
        try:
            for path in sorted(DIRECTORY.glob("*.yaml")):
                await kube._request("POST", definitions, body=without_rules(yaml.safe_load(path.read_text())))
            while not await kube.serves_our_resources():
                await asyncio.sleep(0.05)
            body = {"apiVersion": "stele.dev/v1alpha1", "kind": "TabletCluster", "metadata": {"name": "old"}}
            await kube.create("TabletCluster", "default", {**body, "spec": {part: there}})
            for path in sorted(DIRECTORY.glob("*.yaml")):
                now = yaml.safe_load(path.read_text())
                place = f"{definitions}/{now['metadata']['name']}"
                await kube._request("PATCH", place, body=now, content="application/merge-patch+json")
            with pytest.raises(
                KubeError, match=r"at least|may only name|must not be less"
            ):  # the rules are in force
                await kube.create(
                    "TabletCluster", "default", {**body, "metadata": {"name": "new"}, "spec": {part: there}}
                )
            await kube.patch("TabletCluster", "default", "old", {"spec": {"paused": True}})
            await kube.patch("TabletCluster", "default", "old", {"status": {"replicas": 1}}, "status")
            with pytest.raises(KubeError, match=r"at least|may only name|must not be less"):
                await kube.patch("TabletCluster", "default", "old", {"spec": {part: worse}})
        finally:
            await kube.close()
