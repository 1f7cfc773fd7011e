"""A machine is drained as `kubectl drain` does it: cordoned, and its pods evicted as far as the budgets let them go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kubernetes.client.exceptions import ApiException

from tests.e2e.bench import CLUSTER, NAMESPACE, Bench
from tests.e2e.test_9_leaders import spread_soon

_TOO_MANY_REQUESTS = 429
_NOT_FOUND = 404


def evict(bench: Bench, pod: Any) -> str:
    """Empty if this pod went, else what the API server said: that its budget does not let it go."""
    body = {"metadata": {"name": pod.metadata.name, "namespace": NAMESPACE}}
    try:
        bench.core.create_namespaced_pod_eviction(pod.metadata.name, NAMESPACE, body)
    except ApiException as exc:
        if exc.status == _NOT_FOUND:
            return ""
        assert exc.status == _TOO_MANY_REQUESTS, exc
        return str(exc.body)
    return ""


def drain(bench: Bench, machine: str) -> list[str]:
    """Evict what belongs to the cluster and the operator from a machine; names of members that went."""
    mine = [p for p in [*bench.pods(), *bench.operators()] if p.spec.node_name == machine]
    for pod in mine:
        bench.until(f"{pod.metadata.name} is evicted from {machine}", lambda pod=pod: not evict(bench, pod))
    uids = {p.metadata.uid for p in mine}
    bench.until(
        f"{machine} is drained",
        lambda: not uids & {p.metadata.uid for p in [*bench.pods(), *bench.operators()]},
    )
    return [p.metadata.name for p in mine if p.metadata.labels.get("stele.dev/cluster")]


@contextmanager
def cordoned(bench: Bench, machine: str) -> Iterator[None]:
    """Takes no new pod meanwhile."""
    bench.core.patch_node(machine, {"spec": {"unschedulable": True}})
    try:
        yield
    finally:
        bench.core.patch_node(machine, {"spec": {"unschedulable": None}})


def drain_reason(bench: Bench) -> str:
    """Of the condition DrainBlocked."""
    return str(bench.condition("TabletCluster", "DrainBlocked")["reason"])


def test_one_machine_after_another(bench: Bench) -> None:
    """As for a new kernel: each comes back, and nobody is replaced."""
    bench.have(fresh=True)
    bench.patch("TabletCluster", {"healing": {"machineLostAfter": "15m", "silentAfter": "15m"}})
    loaded = bench.program("load")
    identities = {n: m["nodeUUID"] for n, m in bench.members().items()}
    stream = bench.stream()
    for machine in sorted({p.spec.node_name for p in bench.pods()}):
        bench.until("a drain may begin", lambda: drain_reason(bench) == "Drainable", 300)
        with cordoned(bench, machine):
            gone = drain(bench, machine)
            node = next(name for name in gone if bench.members()[name]["role"] == "node")
            other = next(p for p in bench.pods("node") if p.metadata.name != node)
            assert "disruption budget" in evict(bench, other), "a second node may go while the first is away"
            bench.until("DrainBlocked says why", lambda: drain_reason(bench) in ("PodsNotReady", "VoterLost"))
            message = bench.condition("TabletCluster", "DrainBlocked")["message"]
            bench.note(f"          {message}")
    bench.until("whole after the last", lambda: bench.whole() and bench.no_copy_left(), 300)
    spread_soon(bench)
    streamed = bench.written(stream)
    assert {n: m["nodeUUID"] for n, m in bench.members().items()} == identities
    bench.sound()
    bench.compare(loaded, streamed)


def test_a_machine_drained_for_good(bench: Bench) -> None:
    """Its volumes cannot follow: node and master are replaced, and nothing is lost."""
    bench.have(fresh=True)
    loaded = bench.program("load")
    machine = bench.machine_with_both()
    stream = bench.stream()
    with cordoned(bench, machine):
        gone = set(drain(bench, machine))
        bench.until("node and master are replaced", lambda: gone <= bench.released(), 600)
        with bench.place.checker(machine) as checker:
            bench.until("every tablet has its voters on other machines", lambda: checker.healed(machine), 300)
        streamed = bench.written(stream)
        assert len({p.spec.node_name for p in bench.pods("master")} - {machine}) == 3
        bench.compare(loaded, streamed)
    bench.until("the new node is there too", lambda: bench.whole() and len(bench.pods("node")) == 5, 300)
    assert not gone & {p.metadata.name for p in bench.pods()}


def test_a_table_of_one_replica_blocks(bench: Bench) -> None:
    """The condition names it, and a drain may go on once it is gone."""
    bench.have(fresh=True)
    bench.apply("delays", replicationFactor=1)
    bench.until("the table of one replica is ready", lambda: bench.ready("TabletGroup", "delays"))
    bench.until("DrainBlocked=SingleReplica", lambda: drain_reason(bench) == "SingleReplica")
    message = bench.condition("TabletCluster", "DrainBlocked")["message"]
    bench.note(f"          {message}")
    assert "delays" in message
    nodes, masters = bench.pods("node"), bench.pods("master")
    refused = [evict(bench, pod) for pod in nodes]
    assert all("disruption budget" in said for said in refused), refused
    assert evict(bench, masters[0]) == "", "the catalog has three replicas: a master may go"
    bench.custom.delete_namespaced_custom_object(*bench.where("TabletGroup"), "delays")
    bench.until("a drain may begin", lambda: drain_reason(bench) == "Drainable")
    bench.until("a node may go", lambda: evict(bench, nodes[0]) == "")
    bench.until("whole again", lambda: bench.whole() and len(bench.pods("node")) == 5, 300)
    assert CLUSTER in bench.names("TabletCluster")
