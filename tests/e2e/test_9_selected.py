"""A cluster on machines of its own: labels, taints, a priority, an account and a pull secret, as the scheduler sees them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml
from kubernetes import client

from tests.e2e.bench import EXAMPLES, NAMESPACE, Bench

Json = dict[str, Any]
OURS = "stele-e2e-selected"
PRIORITY = 1234


def label(bench: Bench, machine: str, value: str | None) -> None:
    """The label that the nodes' selector asks for; None takes it off."""
    bench.core.patch_node(machine, {"metadata": {"labels": {OURS: value}}})


def taint(bench: Bench, machine: str, *, on: bool) -> None:
    """A taint that only the nodes of the cluster bear."""
    others = [t for t in bench.core.read_node(machine).spec.taints or () if t.key != OURS]
    mine = [client.V1Taint(key=OURS, value="nodes", effect="NoSchedule")] if on else []
    bench.core.patch_node(machine, {"spec": {"taints": others + mine}})


@contextmanager
def surroundings(bench: Bench, machines: list[str]) -> Iterator[None]:
    """Machines with label and taint, a PriorityClass, a ServiceAccount and a pull secret; none of it is left."""
    scheduling: Any = client.SchedulingV1Api(bench.api)
    named = {"metadata": {"name": OURS}}
    every = [m.metadata.name for m in bench.core.list_node().items]
    scheduling.create_priority_class({**named, "value": PRIORITY})
    try:
        bench.core.create_namespaced_service_account(NAMESPACE, named)
        secret = {**named, "type": "kubernetes.io/dockerconfigjson"}
        bench.core.create_namespaced_secret(NAMESPACE, {**secret, "stringData": {".dockerconfigjson": "{}"}})
        for machine in machines:
            label(bench, machine, "nodes")
            taint(bench, machine, on=True)
        yield
    finally:
        for machine in every:
            label(bench, machine, None)
            taint(bench, machine, on=False)
        bench.clear()
        scheduling.delete_priority_class(OURS)


def at_rest(bench: Bench) -> Json:
    """Why nothing is being done, in the words of the status."""
    return bench.condition("TabletCluster", "Reconciling")


def test_nodes_stand_on_the_machines_they_are_given(bench: Bench) -> None:
    bench.clear()
    every = sorted(m.metadata.name for m in bench.core.list_node().items)
    given, spare = every[1:4], every[4]
    example = yaml.safe_load((EXAMPLES / "cluster.yaml").read_text())["spec"]
    tolerations = [{"key": OURS, "value": "nodes", "effect": "NoSchedule"}]
    asked = {
        "nodeSelector": {OURS: "nodes"},
        "tolerations": tolerations,
        "priorityClassName": OURS,
        "podLabels": {"team": "data"},
        "podAnnotations": {"example.org/why": "tablets"},
    }
    with surroundings(bench, given):
        bench.apply(
            "cluster",
            nodes={**example["nodes"], "replicas": 3, **asked},
            masters={**example["masters"], "tolerations": tolerations},
            imagePullSecrets=[{"name": OURS}],
            serviceAccountName=OURS,
            updateStrategy="OnDelete",
        )
        bench.apply("flights")
        bench.until("the cluster is whole", lambda: bench.whole() and bench.ready("TabletGroup"), 240)
        nodes = bench.pods("node")
        assert sorted(p.spec.node_name for p in nodes) == given
        for pod in nodes:
            assert (pod.spec.priority, pod.spec.service_account_name) == (PRIORITY, OURS)
            assert [s.name for s in pod.spec.image_pull_secrets] == [OURS]
            assert pod.metadata.labels["team"] == "data"
            assert pod.metadata.annotations["example.org/why"] == "tablets"
        assert all(p.spec.priority != PRIORITY for p in bench.pods("master"))
        loaded = bench.program("load")

        before = {p.metadata.name: p.metadata.uid for p in bench.pods()}
        bench.patch("TabletCluster", {"nodes": {"podLabels": {"team": "platform"}}})
        bench.until("the status says RestartPending", lambda: at_rest(bench)["reason"] == "RestartPending")
        assert {p.metadata.name: p.metadata.uid for p in bench.pods()} == before

        machine = given[0]
        label(bench, machine, None)
        moved = bench.member_on(machine, "node")
        bench.until("the status says Misplaced", lambda: at_rest(bench)["reason"] == "Misplaced")
        bench.note(f"          {at_rest(bench)['message']}")
        assert moved in at_rest(bench)["message"]
        bench.core.delete_namespaced_persistent_volume_claim(moved, NAMESPACE)
        bench.core.delete_namespaced_pod(moved, NAMESPACE)

        def waits() -> bool:
            message: str = bench.condition("TabletCluster", "Degraded")["message"]
            return "node affinity/selector" in message

        started = time.time()
        bench.until("the status says why the new node waits", waits, 180)
        bench.note(f"          {bench.condition('TabletCluster', 'Degraded')['message']}")
        label(bench, spare, "nodes")
        bench.until("whole on another machine", bench.whole, 300)
        bench.note(f"          {time.time() - started:.0f} s without the third node")
        nodes = bench.pods("node")
        assert sorted(p.spec.node_name for p in nodes) == [*given[1:], spare]
        assert {p.metadata.labels["team"] for p in nodes} == {"data", "platform"}
        bench.sound()  # a master may stand on the machine that nodes have left
        bench.compare(loaded)
