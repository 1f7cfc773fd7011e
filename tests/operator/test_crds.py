"""The CRDs: checked in as generated, and taken by the API server with the fields that Kubernetes knows."""

from __future__ import annotations

import pytest

from stele_operator.api.generate import CHART_DIRECTORY, DIRECTORY, DOCUMENT, chart_rendered, rendered
from stele_operator.api.reference import reference
from stele_operator.api.scalars import byte_count, seconds
from stele_operator.kube import Kube
from tests.operator.crd_bodies import AFFINITY, SPREAD, changed, example


def test_every_field_is_documented_as_generated() -> None:
    assert DOCUMENT.read_text() == reference(), "run python -m stele_operator.api.generate"


def test_crds_are_checked_in_as_generated() -> None:
    there = {path.name: path.read_text() for path in DIRECTORY.glob("*.yaml")}
    assert there == rendered(), "run python -m stele_operator.api.generate"


def test_the_chart_brings_the_same_crds_and_keeps_them() -> None:
    there = {path.name: path.read_text() for path in CHART_DIRECTORY.glob("*.yaml")}
    assert there == chart_rendered(), "run python -m stele_operator.api.generate"


def test_durations_and_quantities() -> None:
    assert [seconds(t) for t in ("90s", "1h30m", "250ms", "1d", "0s")] == [90, 5400, 0.25, 86400, 0]
    assert [byte_count(t) for t in ("10Gi", "500M", "1.5Ki", "7", "100m")] == [
        10 << 30,
        500_000_000,
        1536,
        7,
        1,
    ]
    for bad in ("", "5", "5 s", "s", "-1s", "1w"):
        with pytest.raises(ValueError, match="duration"):
            seconds(bad)
    for bad in ("", "10GiB", "-1", "1e3"):
        with pytest.raises(ValueError, match="quantity"):
            byte_count(bad)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "name", ["cluster", "dedicated", "flights", "delays", "months", "backup", "nightly", "restore"]
)
async def test_examples_are_taken(kube: Kube, name: str) -> None:
    body = example(name)
    made = await kube.create(body["kind"], "default", body)
    await kube.delete(body["kind"], "default", body["metadata"]["name"], made["metadata"]["uid"], "")


@pytest.mark.asyncio(loop_scope="module")
async def test_defaults_are_filled_in(kube: Kube) -> None:
    body = {
        "apiVersion": "stele.dev/v1alpha1",
        "kind": "TabletCluster",
        "metadata": {"name": "bare"},
        "spec": {},
    }
    made = await kube.create("TabletCluster", "default", body)
    spec = made["spec"]
    assert spec["masters"] == {"replicas": 3, "storage": {"size": "10Gi"}}
    assert spec["nodes"]["machineSpread"] == "Required"
    assert spec["healing"] == {
        "witnessAfter": "30s", "silentAfter": "5m", "machineLostAfter": "10m", "machineDeletedAfter": "0s",
        "volumeLostAfter": "0s", "maxLostNodes": 1, "mastersDriveAfter": "2m",
        "keepFor": "24h",
    }  # fmt: skip
    assert spec["budget"] == {"maxUnavailable": 1, "copies": 4, "bytesPerSecond": "100Mi"}
    assert (spec["deletionPolicy"], spec["paused"]) == ("Retain", False)
    await kube.delete("TabletCluster", "default", "bare", made["metadata"]["uid"], "")


@pytest.mark.asyncio(loop_scope="module")
async def test_what_kubernetes_takes_of_pods_is_taken_and_nothing_is_filled_in(kube: Kube) -> None:
    """An operator that knows none of these fields would else be told of them in every cluster."""
    body = changed(example("cluster"), "metadata.name", "fields")
    role = {
        "nodeSelector": {"disk": "ssd", "node.kubernetes.io/instance-type": "m5.4xlarge", "empty": ""},
        "tolerations": [{"key": "gpu"}, {"key": "acme.org/x", "operator": "Exists", "effect": "NoExecute"}],
        "affinity": AFFINITY,
        "topologySpreadConstraints": [
            {**SPREAD, "labelSelector": {}, "minDomains": 2, "nodeTaintsPolicy": "Honor"},
            {**SPREAD, "whenUnsatisfiable": "ScheduleAnyway"},
        ],
        "priorityClassName": "tablets.high",
        "runtimeClassName": "kata",
        "schedulerName": "volcano",
        "podLabels": {"app.kubernetes.io/part-of": "flights", "x" * 253 + "/" + "y" * 63: "z"},
        "podAnnotations": {"prometheus.io/scrape": "true", "Note_1": "any text: {}"},
    }
    body["spec"]["masters"] |= role
    made = await kube.create("TabletCluster", "default", body)
    equal = {"operator": "Equal"}
    taken = {**role, "tolerations": [{**equal, **t} for t in role["tolerations"]]}
    assert {name: made["spec"]["masters"][name] for name in role} == taken
    assert not role.keys() & made["spec"]["nodes"].keys()
    assert not {"imagePullSecrets", "serviceAccountName"} & made["spec"].keys()
    empty = {"nodeSelector": {}, "tolerations": [], "affinity": {"podAffinity": {}}, "podLabels": {}}
    empty |= {"podAnnotations": {}, "topologySpreadConstraints": []}
    patch = {"spec": {"nodes": empty, "imagePullSecrets": []}}
    now = await kube.patch("TabletCluster", "default", "fields", patch)
    assert {name: now["spec"]["nodes"][name] for name in empty} == empty
    await kube.delete("TabletCluster", "default", "fields", made["metadata"]["uid"], "")
