"""Volumes that are not what they should be: refused and said so, and never a second catalog."""

from __future__ import annotations

import time

import pytest

from tests.e2e.bench import NAMESPACE, Bench

_EMPTY = "rm -rf /data/stele && mkdir /data/stele"


def restart(bench: Bench, name: str) -> float:
    """Its pod made anew on the same volume; returns when that was asked for."""
    started = time.time()
    uid = bench.pod(name).metadata.uid
    bench.core.delete_namespaced_pod(name, NAMESPACE, grace_period_seconds=0)
    bench.until(f"{name} has another pod", lambda: (p := bench.pod(name)) and p.metadata.uid != uid)
    return started


def refused(bench: Bench, name: str, fate: str, what: str) -> None:
    """The member was lost to this fate, with this in its message; its pod was made anew on a volume that will not do."""
    started = restart(bench, name)

    def told() -> bool:
        events = [*bench.told("NodeLost", started), *bench.told("MasterLost", started)]
        return any(e.startswith(f"{name} is ") and f"({fate}: " in e and what in e for e in events)

    bench.until(f"{name} is refused: {fate}, {what}", told)


@pytest.mark.parametrize("role", ["node", "master"])
def test_an_empty_mount(bench: Bench, role: str) -> None:
    bench.have(fresh=True)
    loaded = bench.program("load")
    name = bench.pods(role)[0].metadata.name
    cluster = bench.kube.status("TabletCluster", "flights")["clusterUUID"]
    bench.execute(name, "sh", "-c", _EMPTY)
    refused(bench, name, "VolumeEmpty", "its volume is empty")
    bench.until("it was replaced", lambda: name in bench.released() and bench.whole(), 300)
    assert bench.kube.status("TabletCluster", "flights")["clusterUUID"] == cluster
    assert len(bench.pods("master")) == 3
    bench.sound()
    bench.compare(loaded)


def test_a_volume_of_another_node(bench: Bench) -> None:
    bench.have(fresh=True)
    loaded = bench.program("load")
    one, other = (p.metadata.name for p in bench.pods("node")[:2])
    identity = bench.execute(other, "cat", "/data/stele/node.json")
    code = "import sys; open('/data/stele/node.json', 'w').write(sys.argv[1])"
    bench.execute(one, "python", "-c", code, identity)
    refused(bench, one, "VolumeEmpty", "belongs to another node")
    bench.until("it was replaced", lambda: one in bench.released() and bench.whole(), 300)
    bench.sound()
    bench.compare(loaded)


@pytest.mark.parametrize("role", ["node", "master"])
def test_an_older_copy(bench: Bench, role: str) -> None:
    bench.have(fresh=True)
    pod = bench.pods(role)[0]
    name, machine = pod.metadata.name, pod.spec.node_name
    node_id = pod.metadata.annotations["stele.dev/node-id"]
    cluster = bench.kube.status("TabletCluster", "flights")["clusterUUID"]
    # Standing still, so that the copy is of one moment, as a storage snapshot is.
    bench.signal(machine, node_id, "SIGSTOP")
    bench.execute(name, "cp", "-a", "/data/stele", "/data/older")
    bench.signal(machine, node_id, "SIGCONT")
    loaded = bench.program("load")
    bench.apply("delays")
    bench.until("another table is ready", lambda: bench.ready("TabletGroup", "delays"))
    bench.signal(machine, node_id, "SIGSTOP")
    bench.execute(name, "sh", "-c", "mv /data/stele /data/newest && mv /data/older /data/stele")
    refused(bench, name, "VolumeLost", "older copy")
    bench.until("it was replaced", lambda: name in bench.released() and bench.whole(), 300)
    assert bench.kube.status("TabletCluster", "flights")["clusterUUID"] == cluster
    bench.sound()
    bench.compare(loaded)


def test_two_pods_with_one_volume(bench: Bench) -> None:
    bench.have(patient=True)
    pod = bench.pods("node")[0]
    twin = bench.api.sanitize_for_serialization(pod)
    twin["metadata"] = {"name": "twin", "namespace": NAMESPACE}
    twin["spec"] |= {"restartPolicy": "Never", "hostname": "twin"}
    twin.pop("status")
    bench.core.create_namespaced_pod(NAMESPACE, twin)
    try:
        bench.until(
            "the second has ended",
            lambda: bench.core.read_namespaced_pod("twin", NAMESPACE).status.phase == "Failed",
        )
        ended = (
            bench.core.read_namespaced_pod("twin", NAMESPACE).status.container_statuses[0].state.terminated
        )
        bench.note(f"          it says: {ended.message}")
        assert ended.exit_code == 2 and "another process uses it" in (ended.message or "")
        assert bench.whole()
    finally:
        bench.core.delete_namespaced_pod("twin", NAMESPACE, grace_period_seconds=0)
