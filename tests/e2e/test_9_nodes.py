"""Nodes come and go as somebody wants it: scale out and in, park and return, under writes; no acknowledged row is lost."""

from __future__ import annotations

import time
from typing import Any

from tests.e2e.bench import CLUSTER, Bench
from tests.e2e.test_9_leaders import spread_soon

PATIENT = {"witnessAfter": "5s", "silentAfter": "15m", "machineLostAfter": "15m"}


def nodes(bench: Bench) -> dict[str, dict[str, Any]]:
    """Nodes that are not retired, as the status has them."""
    return {name: m for name, m in bench.members().items() if m["role"] == "node" and m["state"] != "Retired"}


def scale(bench: Bench, replicas: int) -> None:
    """As `kubectl scale` does it."""
    where = bench.where("TabletCluster")
    bench.custom.patch_namespaced_custom_object_scale(*where, CLUSTER, {"spec": {"replicas": replicas}})


def serve(bench: Bench, replicas: int) -> bool:
    """So many nodes are there, all ready, and every tablet is whole."""
    states = [m["state"] for m in nodes(bench).values()]
    return states == ["Ready"] * replicas and bench.whole()


def streamed(bench: Bench, stream: Any, *written: dict[str, Any]) -> None:
    """The writer ends; all rows that it was told are written are there."""
    result = bench.written(stream)
    bench.sound()
    bench.compare(*written, result)


def test_scale_out_and_in_under_writes(bench: Bench) -> None:
    """3, 6, 4 nodes through /scale. The victims are named before, drained, retired, and their claims let go."""
    bench.clear()
    # Machines may be fewer than six; two replicas of a tablet never share one all the same.
    spread = {"replicas": 3, "storage": {"size": "2Gi"}, "machineSpread": "Preferred"}
    bench.apply("cluster", nodes=spread, healing={**PATIENT, "keepFor": "1h"}, deletionPolicy="Delete")
    bench.apply("flights", deletionPolicy="Delete")
    bench.until("three nodes serve", lambda: serve(bench, 3), 240)
    loaded = bench.program("load")
    stream = bench.stream()
    scale(bench, 6)
    bench.until("six nodes serve", lambda: serve(bench, 6), 300)
    started = time.time()
    scale(bench, 4)
    bench.until(
        "the victims are named",
        lambda: bench.condition("TabletCluster", "Reconciling")["reason"] in ("NodesLeaving", "NodeDraining"),
    )
    message = bench.condition("TabletCluster", "Reconciling")["message"]
    bench.note(f"          {message}")
    victims = {name for name in nodes(bench) if name in message}
    assert len(victims) == 2
    bench.until("four nodes serve", lambda: serve(bench, 4), 600)
    assert set(nodes(bench)).isdisjoint(victims)
    spread_soon(bench)
    bench.until("the claims are let go", lambda: victims <= bench.released())
    assert len(bench.told("Retiring", started)) >= 2
    streamed(bench, stream, loaded)


def test_scale_in_is_refused_and_says_why(bench: Bench) -> None:
    """Below the replication factor. Set back, all is as before."""
    bench.have(patient=True)
    before = set(nodes(bench))
    scale(bench, 2)
    bench.until(
        "it says why", lambda: bench.condition("TabletCluster", "Stalled")["reason"] == "DrainRefused"
    )
    bench.note(f"          {bench.condition('TabletCluster', 'Stalled')['message']}")
    scale(bench, len(before))
    bench.until("whole again", bench.whole)
    assert set(nodes(bench)) == before


def test_a_parked_machine_is_away_past_the_time_of_healing_and_back(bench: Bench) -> None:
    """Nothing is copied, nobody is replaced, and writes go on."""
    bench.have(fresh=True)
    bench.patch("TabletCluster", {"healing": PATIENT})
    loaded = bench.program("load")
    masters = {p.spec.node_name for p in bench.pods("master")}
    machine = bench.place.victim(sorted({p.spec.node_name for p in bench.pods("node")} - masters))
    name = bench.member_on(machine, "node")
    stream = bench.stream()
    identities = {n: m["nodeUUID"] for n, m in nodes(bench).items()}
    bench.patch("TabletCluster", {"nodes": {"park": [name]}})
    bench.until(
        "it is parked",
        lambda: "nodes.park names it" in bench.members()[name].get("message", ""),
    )
    started = time.time()
    bench.power("off", machine)
    bench.until("it is away", lambda: bench.members()[name]["state"] == "Parked")
    time.sleep(60)
    assert bench.members()[name]["state"] == "Parked"
    assert not [m for m in bench.told("HealBegan", started) if name in m] and not bench.told(
        "NodeLost", started
    )
    bench.power("on", machine)
    bench.until("it is back, and all is whole", lambda: serve(bench, len(identities)), 300)
    assert {n: m["nodeUUID"] for n, m in nodes(bench).items()} == identities
    bench.patch("TabletCluster", {"nodes": {"park": []}})
    bench.until("nobody is parked", lambda: not bench.members()[name].get("message"))
    spread_soon(bench)
    streamed(bench, stream, loaded)
