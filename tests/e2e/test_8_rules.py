"""Resources that break a rule: refused by the API server with the sentence, or, where only the operator can see it,
told in a condition, with nothing touched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from kubernetes.client.exceptions import ApiException

from tests.e2e.bench import CLUSTER, EXAMPLES, Bench

Json = dict[str, Any]


def example(file: str, changes: Json, name: str) -> Json:
    """An example under another name, with parts of its spec replaced."""
    body: Json = yaml.safe_load((EXAMPLES / f"{file}.yaml").read_text())
    body["metadata"] = {"name": name}
    body["spec"] = {**copy.deepcopy(body["spec"]), **changes}
    return body


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("cluster", {"masters": {"replicas": 2}}, "Unsupported value: 2"),
        ("cluster", {"nodes": {"replicas": 0}}, "should be greater than or equal to 1"),
        ("cluster", {"healing": {"witnessAfter": "soon"}}, "witnessAfter"),
        ("cluster", {"nodes": {"storage": {"size": "lots"}}}, "size"),
        ("cluster", {"nodes": {"storage": {"size": "100Mi"}}}, "storage.size must be at least 1Gi"),
        ("cluster", {"nodes": {"resources": {"requests": {"memry": "1Gi"}}}}, "may only name cpu, memory"),
        ("cluster", {"budget": {"bytesPerSecond": "0"}}, "bytesPerSecond must be at least 64Ki"),
        ("cluster", {"nodes": {"nodeSelector": {"-x": "y"}}}, "nodeSelector: a key is a name of"),
        ("cluster", {"nodes": {"podLabels": {"stele.dev/role": "x"}}}, "podLabels must not name stele.dev/"),
        ("cluster", {"masters": {"tolerations": [{"operator": "Exists"}]}}, "tolerations[0].key: Required"),
        ("flights", {"primaryKey": ["nowhere"]}, "primaryKey"),
        ("flights", {"primaryKey": ["carrier", "carrier"]}, "primaryKey names a column twice"),
        ("flights", {"replicationFactor": 2}, "replicationFactor"),
        (
            "flights",
            {"columns": [{"name": "a", "type": "text"}]},
            "spec.columns[0].type in body should match",
        ),
        ("flights", {"partitioning": {"hash": [{"columns": ["dest"], "buckets": 4}]}}, "partitioning"),
    ],
)
def test_refused_with_a_sentence(bench: Bench, name: str, changes: Json, sentence: str) -> None:
    body = example(name, changes, "bad")
    with pytest.raises(ApiException) as caught:
        bench.custom.create_namespaced_custom_object(*bench.where(body["kind"]), body)
    assert caught.value.status == 422
    assert sentence in str(caught.value.body)


def test_what_cannot_change_is_refused_on_update(bench: Bench) -> None:
    bench.have()
    for kind, change, sentence in (
        ("TabletCluster", {"masters": {"replicas": 4}}, "masters.replicas"),
        ("TabletCluster", {"nodes": {"retire": ["a"], "park": ["a"]}}, "name the same node"),
        ("TabletGroup", {"clusterRef": {"name": "other"}}, "clusterRef cannot change"),
        ("TabletGroup", {"primaryKey": ["carrier"]}, "primaryKey cannot change"),
    ):
        with pytest.raises(ApiException) as caught:
            bench.patch(kind, change)
        assert caught.value.status == 422 and sentence in str(caught.value.body)


@pytest.mark.parametrize(
    ("changes", "reason", "holds"),
    [
        ({"replicationFactor": 7}, "TooFewNodes", "Stalled"),
        ({"tableName": "flights"}, "NameTaken", "Stalled"),
        ({"clusterRef": {"name": "nobody"}}, "ClusterNotFound", "Reconciling"),  # it may come yet
    ],
)
def test_what_only_the_operator_sees_is_a_condition(
    bench: Bench, changes: Json, reason: str, holds: str
) -> None:
    bench.have()
    pods = {p.metadata.name: p.metadata.uid for p in bench.pods()}
    body = example("flights", changes, "odd")
    bench.custom.create_namespaced_custom_object(*bench.where("TabletGroup"), body)
    try:
        bench.until(
            f"TabletGroup odd says {reason}",
            lambda: bench.condition("TabletGroup", "Ready", "odd")["reason"] == reason,
            60,
        )
        bench.note(f"          {bench.condition('TabletGroup', 'Ready', 'odd')['message']}")
        assert bench.condition("TabletGroup", holds, "odd")["status"] == "True"
        assert bench.kube.status("TabletCluster", CLUSTER)["tablets"]["total"] == 8
        assert bench.ready("TabletGroup")
        assert {p.metadata.name: p.metadata.uid for p in bench.pods()} == pods
    finally:
        bench.custom.delete_namespaced_custom_object(*bench.where("TabletGroup"), "odd")
    bench.until("TabletGroup odd is gone", lambda: "odd" not in bench.names("TabletGroup"), 60)
