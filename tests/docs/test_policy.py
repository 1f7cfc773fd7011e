"""The NetworkPolicy of docs/kubernetes.md lets through what the operator's manifests and the chart need, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from stele_operator.plan import naming
from tests.docs.blocks import ROOT, blocks
from tests.operator.world import World
from tests.operator.worlds import made

Labels = dict[str, str]
CHART = ROOT / "charts" / "stele"
OURS, MONITORING = "data", "monitoring"
CLIENT = (OURS, {"stele-client": "flights"})
PROMETHEUS = (MONITORING, {"app.kubernetes.io/name": "prometheus"})
STRANGERS = [(OURS, {"run": "shell"}), ("other", {"stele-client": "flights"}), ("other", {})]


@pytest.fixture(scope="module")
def policies() -> list[dict[str, Any]]:
    (block,) = (b for b in blocks("docs/kubernetes.md", language="yaml") if "NetworkPolicy" in b.code)
    return list(yaml.safe_load_all(block.code))


@pytest.fixture(scope="module")
def world() -> World:
    return made()


def operator() -> Labels:
    """What the chart puts on the operator's pod for the release `stele`."""
    name = yaml.safe_load((CHART / "Chart.yaml").read_text())["name"]
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/instance": "stele"}
    selector = (
        (CHART / "templates" / "_helpers.tpl")
        .read_text()
        .partition('"stele.selector"')[2]
        .partition("end")[0]
    )
    assert all(f"\n{label}: " in selector for label in labels)
    return labels


def metrics_port() -> int:
    """Of the operator."""
    return int(yaml.safe_load((CHART / "values.yaml").read_text())["metrics"]["port"])


def members(world: World) -> list[tuple[Labels, dict[str, int]]]:
    """(Labels, ports by name) of each pod of the cluster."""
    return [
        (
            pod["metadata"]["labels"],
            {p["name"]: p["containerPort"] for p in pod["spec"]["containers"][0]["ports"]},
        )
        for pod in world.of("Pod")
    ]


def matches(selector: dict[str, Any], labels: Labels) -> bool:
    """Only by `matchLabels`; another kind of selector is an error here."""
    assert set(selector) <= {"matchLabels"}
    return selector.get("matchLabels", {}).items() <= labels.items()


def allowed(policies: list[dict[str, Any]], source: tuple[str, Labels], to: Labels, port: int) -> bool:
    """As Kubernetes defines it: a pod that no policy selects takes all, another what one of its rules names."""
    namespace, labels = source
    chosen = [p["spec"] for p in policies if matches(p["spec"]["podSelector"], to)]
    for spec in chosen:
        assert spec["policyTypes"] == ["Ingress"]
        for rule in spec["ingress"]:
            assert set(rule) == {"from", "ports"} and all(set(p) == {"port"} for p in rule["ports"])
            for peer in rule["from"]:
                assert peer and set(peer) <= {"podSelector", "namespaceSelector"}
                space = peer.get("namespaceSelector")
                here = (
                    matches(space, {"kubernetes.io/metadata.name": namespace}) if space else namespace == OURS
                )
                if here and matches(peer.get("podSelector", {}), labels) and {"port": port} in rule["ports"]:
                    return True
    return not chosen


def test_members_and_clients_reach_all_that_they_use(policies: list[dict[str, Any]], world: World) -> None:
    everyone = members(world)
    assert len(everyone) == 8
    for to, ports in everyone:
        assert set(ports) == {"grpc", "flight", "stream", "http"}
        for name in ("grpc", "flight", "stream"):
            for source in (*((OURS, labels) for labels, _ in everyone), CLIENT):
                assert allowed(policies, source, to, ports[name]), (source, to, name)
            assert not allowed(policies, PROMETHEUS, to, ports[name])
        assert not allowed(policies, CLIENT, to, ports["http"])


def test_the_operator_reaches_the_calls_of_masters_and_nodes(
    policies: list[dict[str, Any]], world: World
) -> None:
    for to, ports in members(world):
        reached = {name for name, port in ports.items() if allowed(policies, (OURS, operator()), to, port)}
        assert reached == {"grpc"}


def test_prometheus_reaches_metrics_and_helm_test_the_operator(
    policies: list[dict[str, Any]], world: World
) -> None:
    for to, ports in members(world):
        assert allowed(policies, PROMETHEUS, to, ports["http"])
    tester = {**operator(), "app.kubernetes.io/name": f"{operator()['app.kubernetes.io/name']}-test"}
    for source in (PROMETHEUS, (OURS, tester)):
        assert allowed(policies, source, operator(), metrics_port())


def test_nobody_else_reaches_anything(policies: list[dict[str, Any]], world: World) -> None:
    for source in STRANGERS:
        assert not allowed(policies, source, operator(), metrics_port())
        for to, ports in members(world):
            assert not any(allowed(policies, source, to, port) for port in ports.values()), source


def test_each_object_has_a_name_and_no_port_that_nobody_has(policies: list[dict[str, Any]]) -> None:
    assert len({p["metadata"]["name"] for p in policies}) == 2
    for policy in policies:
        assert (policy["apiVersion"], policy["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
    named = {p["port"] for policy in policies for rule in policy["spec"]["ingress"] for p in rule["ports"]}
    ours = (naming.PORT_NODE, naming.PORT_MASTER, naming.PORT_FLIGHT, naming.PORT_STREAM, naming.PORT_HTTP)
    assert named == {*ours, metrics_port()}
