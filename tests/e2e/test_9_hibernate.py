"""A cluster hibernates and wakes: no pod meanwhile, the same members on the same volumes, no lost row."""

from __future__ import annotations

import time

from tests.e2e.bench import CLUSTER, Bench
from tests.e2e.test_9_leaders import spread_soon

ASLEEP_S = 45
"""Longer than `witnessAfter` here, and than the masters wait for a driver."""
HASTY = {
    "witnessAfter": "5s",
    "silentAfter": "10m",
    "machineLostAfter": "10m",
    "mastersDriveAfter": "20s",
}


def identities(bench: Bench) -> dict[str, tuple[str, str]]:
    """The uid of each claim and the node that it belongs to."""
    return {
        name: (claim.metadata.uid, claim.metadata.annotations["stele.dev/node-id"])
        for name, claim in bench.claims().items()
    }


def asleep(bench: Bench) -> bool:
    """No pod is left, and the cluster says so."""
    return not bench.pods() and bench.condition("TabletCluster", "Ready")["reason"] == "Hibernated"


def test_hibernate_and_wake(bench: Bench) -> None:
    bench.have(fresh=True)
    bench.patch("TabletCluster", {"healing": HASTY})
    loaded = bench.program("load")
    before = identities(bench)
    started = time.time()
    bench.patch("TabletCluster", {"hibernate": True})
    bench.until("all pods are gone", lambda: asleep(bench), 240)
    bench.note(f"          {bench.condition('TabletCluster', 'Ready')['message']}")
    assert {m["state"] for m in bench.members().values()} == {"Hibernated"}
    assert bench.columns("TabletCluster")["Reason"] == "Hibernated"
    time.sleep(ASLEEP_S)
    assert asleep(bench) and identities(bench) == before
    for alarm in ("Degraded", "Stalled", "Reconciling"):
        assert bench.condition("TabletCluster", alarm)["status"] == "False"
    bench.patch("TabletCluster", {"hibernate": False})
    bench.until("every member is back, and all tablets are whole", bench.whole, 600)
    spread_soon(bench)
    assert identities(bench) == before and {p.metadata.name for p in bench.pods()} == set(before)
    for reason in ("Hibernating", "Hibernated", "Waking"):
        assert bench.told(reason, started), reason
    for reason in ("NodeLost", "MasterLost", "HealBegan", "TooManyLost"):
        assert not bench.told(reason, started), reason
    stream = bench.stream()
    streamed = bench.written(stream)
    bench.sound()
    bench.compare(loaded, streamed)


def test_a_change_made_while_it_sleeps_is_there_when_it_wakes(bench: Bench) -> None:
    """And the operator is started anew in between."""
    bench.have(patient=True)
    nodes = {name for name, m in bench.members().items() if m["role"] == "node" and m["state"] == "Ready"}
    bench.patch("TabletCluster", {"hibernate": True})
    bench.until("all pods are gone", lambda: asleep(bench), 240)
    bench.patch("TabletCluster", {"nodes": {"podAnnotations": {"note": "changed"}}})
    bench.scale_operator(0)
    bench.until("the operator is away", lambda: not bench.operators())
    bench.scale_operator(1)
    bench.patch("TabletCluster", {"hibernate": False})
    bench.until("every member is back", bench.whole, 600)
    noted = {p.metadata.name for p in bench.pods("node") if p.metadata.annotations.get("note") == "changed"}
    assert noted == nodes, CLUSTER
    bench.patch("TabletCluster", {"nodes": {"podAnnotations": None}})
    bench.until("the change is rolled back", bench.whole, 600)
