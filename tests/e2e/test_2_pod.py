"""A pod is deleted, its container killed for memory, its process stopped: the same node is back on its volume."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.e2e.bench import Bench

# The first process gets the worst score, then memory is taken until the kernel looks for a victim.
_EAT = (
    "import os\n"
    "open('/proc/1/oom_score_adj', 'w').write('1000')\n"
    "held = []\n"
    "while True: held.append(b'x' * (16 << 20))\n"
)


def deleted(bench: Bench, name: str) -> None:
    """kubectl delete pod."""
    bench.core.delete_namespaced_pod(name, bench.kube.namespace)


def out_of_memory(bench: Bench, name: str) -> None:
    """Its container takes more than its limit."""
    bench.execute(name, "python", "-c", _EAT)
    bench.until(
        "the container was OOMKilled",
        lambda: any(
            s.last_state.terminated and s.last_state.terminated.reason == "OOMKilled"
            for s in bench.pod(name).status.container_statuses
        ),
    )


def stopped(bench: Bench, name: str) -> None:
    """SIGSTOP: nothing answers any more, and only the liveness probe can tell."""
    pod = bench.pod(name)
    node_id = pod.metadata.annotations["stele.dev/node-id"]
    restarts = pod.status.container_statuses[0].restart_count
    bench.signal(pod.spec.node_name, node_id, "SIGSTOP")
    bench.until(
        "the liveness probe had it restarted",
        lambda: bench.pod(name).status.container_statuses[0].restart_count > restarts,
        240,
    )


@pytest.mark.parametrize("what", [deleted, out_of_memory, stopped])
def test_the_same_node_is_back_on_its_volume(bench: Bench, what: Callable[[Bench, str], None]) -> None:
    bench.have(patient=True, limit="600Mi")
    started = time.time()
    name = bench.pods("node")[0].metadata.name
    before, claims = bench.members(), {n: c.metadata.uid for n, c in bench.claims().items()}
    what(bench, name)
    bench.until(
        f"{name} is back, {what.__name__}",
        lambda: (pod := bench.pod(name)) and not pod.metadata.deletion_timestamp and bench.whole(),
        240,
    )
    assert {n: c.metadata.uid for n, c in bench.claims().items()} == claims
    after = bench.members()
    assert {n: m["nodeUUID"] for n, m in after.items()} == {n: m["nodeUUID"] for n, m in before.items()}
    assert after[name]["replicas"] == before[name]["replicas"]
    healed = bench.told("HealBegan", started)
    assert not healed, f"a copy was made: {healed}"
