"""The chart: lints, renders for every choice of rights, and refuses bad values with a sentence. What it allows is
tests/operator/test_rights.py's to judge, without helm."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from stele_operator.api.generate import DIRECTORY

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "stele"
HELM = os.environ.get("HELM") or shutil.which("helm")
pytestmark = pytest.mark.skipif(HELM is None, reason="no helm on the path, nor in HELM")


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    """Run helm; what it said is in the result."""
    return subprocess.run([str(HELM), *words], capture_output=True, text=True, check=False)


def rendered(*settings: str) -> list[Json]:
    """All objects of the chart with `--set` of each setting."""
    sets = [word for setting in settings for word in ("--set", setting)]
    done = helm("template", "stele", str(CHART), "--namespace", "data", "--kube-version", "1.33.0", *sets)
    assert done.returncode == 0, done.stderr
    return [o for o in yaml.safe_load_all(done.stdout) if o]


def of(objects: list[Json], kind: str) -> list[Json]:
    """Those of a kind."""
    return [o for o in objects if o["kind"] == kind]


def test_lint() -> None:
    done = helm("lint", "--strict", "--kube-version", "1.33.0", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_kubernetes_that_would_refuse_the_crds_is_refused_by_name() -> None:
    """Their rules use quantity(), which came with 1.28, and an API server takes new rules only of the version before."""
    for version, taken in (("1.28.15", False), ("1.29.0", True), ("1.29.1-eks-508b6b3", True)):
        done = helm("template", "stele", str(CHART), "--kube-version", version)
        assert (done.returncode == 0) == taken, done.stderr
    assert "Kubernetes 1.29 or newer" in (ROOT / "docs" / "kubernetes.md").read_text()


def test_crds_are_those_of_the_folder_kept_and_optional() -> None:
    there = {
        d["metadata"]["name"]: d for d in (yaml.safe_load(p.read_text()) for p in DIRECTORY.glob("*.yaml"))
    }
    for definition in of(rendered(), "CustomResourceDefinition"):
        assert definition["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        assert definition == there.pop(definition["metadata"]["name"])
    assert not there
    assert not of(rendered("crds.install=false"), "CustomResourceDefinition")


def test_by_default_every_right_is_namespaced() -> None:
    objects = rendered()
    assert not of(objects, "ClusterRole") and not of(objects, "ClusterRoleBinding")
    assert {r["metadata"]["namespace"] for r in of(objects, "Role")} == {"data"}
    more = rendered("namespaces={data,other}")
    assert {r["metadata"]["namespace"] for r in of(more, "Role")} == {"data", "other"}
    arguments = of(more, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [a for a in arguments if a.startswith("--namespace")] == ["--namespace=data", "--namespace=other"]


def test_cluster_roles_come_by_choice() -> None:
    machines = of(rendered("rbac.machines=true"), "ClusterRole")
    assert [r["rules"] for r in machines] == [
        [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}]
    ]
    objects = rendered("allNamespaces=true")
    assert len(of(objects, "ClusterRole")) == 1
    assert [r["metadata"]["name"] for r in of(objects, "Role")] == ["stele-lease"]
    arguments = of(objects, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert not [a for a in arguments if a.startswith("--namespace")]
    assert not of(rendered("rbac.create=false"), "Role")


def test_the_operator_runs_restricted_with_probes_and_a_limit() -> None:
    spec = of(rendered(), "Deployment")[0]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    # Who waits for the API server is not ready, and not to be killed.
    paths = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")]
    assert paths == ["/livez", "/livez", "/readyz"]
    assert container["resources"]["limits"]["memory"]


def test_the_operators_pod_is_placed_as_it_is_said() -> None:
    said = {"schedulerName": "volcano", "runtimeClassName": "kata", "priorityClassName": "high"}
    rack = "topologySpreadConstraints[0].topologyKey=rack"
    spec = of(rendered(*(f"{k}={v}" for k, v in said.items()), rack), "Deployment")[0]["spec"]["template"][
        "spec"
    ]
    assert said.items() <= spec.items() and spec["topologySpreadConstraints"] == [{"topologyKey": "rack"}]


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("replicas=two", "replicas"),
        ("logLevel=loud", "logLevel"),
        ("metrics.port=80", "port"),
        ("image.pullpolicy=Always", "pullpolicy"),
        ("namespaces={Data}", "namespaces"),
        ("nodeReplicas=3", "nodeReplicas"),
        ("fullnameOverride=Stele", "fullnameOverride"),
    ],
)
def test_bad_values_are_refused_by_name(setting: str, sentence: str) -> None:
    done = helm("template", "stele", str(CHART), "--kube-version", "1.33.0", "--set", setting)
    assert done.returncode != 0
    assert sentence in done.stderr


def test_no_name_is_longer_than_kubernetes_takes() -> None:
    for setting in (f"fullnameOverride={'a' * 63}", f"nameOverride={'b' * 63}"):
        for made in rendered(setting):
            if made["kind"] != "CustomResourceDefinition":
                assert len(made["metadata"]["name"]) <= (63 if made["kind"] == "Service" else 253)
                assert all(len(value) <= 63 for value in made["metadata"]["labels"].values())


@pytest.mark.parametrize("name", ["stele", "a" * 55, "a" * 63])
def test_the_test_asks_the_service_that_is_there(name: str) -> None:
    objects = rendered(f"fullnameOverride={name}")
    (service,) = of(objects, "Service")
    (pod,) = of(objects, "Pod")
    assert f"//{service['metadata']['name']}.data.svc:" in pod["spec"]["containers"][0]["command"][2]


def test_every_value_is_described() -> None:
    text = (CHART / "values.yaml").read_text()
    described = (CHART / "README.md").read_text()
    for key in yaml.safe_load(text):
        assert re.search(rf"^\|.*`{key}[`.]", described, re.M), (
            f"charts/stele/README.md does not tell of {key}"
        )


def test_spark_has_an_account_of_its_own_where_it_was_asked_for_which_may_make_pods() -> None:
    assert not [o for o in rendered() if "spark" in o["metadata"]["name"]]
    objects = rendered("spark.serviceAccount=stele-spark", "namespaces={other}")
    mine = [o for o in objects if o["metadata"]["name"] == "stele-spark"]
    assert sorted((o["kind"], o["metadata"]["namespace"]) for o in mine) == [
        (kind, namespace)
        for kind in ("Role", "RoleBinding", "ServiceAccount")
        for namespace in ("data", "other")
    ]
    for role in of(mine, "Role"):
        allowed = {(r, verb) for rule in role["rules"] for r in rule["resources"] for verb in rule["verbs"]}
        assert ("pods", "create") in allowed and not {r for r, _ in allowed} & {"secrets", "pods/exec", "*"}
    for binding in of(mine, "RoleBinding"):
        (subject,) = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == ("stele-spark", binding["metadata"]["namespace"])
