"""The number of masters changes while rows are written: 1, 3, 1 and 3, 5, 3; a machine with a master loses its power meanwhile."""

from __future__ import annotations

import time
from typing import Any

from tests.e2e.bench import CLUSTER, NAMESPACE, Bench
from tests.e2e.test_9_drain import drain_reason
from tests.e2e.test_9_leaders import spread_soon


def masters(bench: Bench) -> dict[str, dict[str, Any]]:
    """Masters that are not retired, as the status has them."""
    there = bench.members()
    return {n: m for n, m in there.items() if m["role"] == "master" and m["state"] != "Retired"}


def serve(bench: Bench, number: int) -> bool:
    """So many masters hold the catalog, no other is there, and all is whole."""
    status = bench.kube.status("TabletCluster", CLUSTER)
    states = [m["state"] for m in masters(bench).values()]
    pods = [p for p in bench.pods("master") if p.metadata.deletion_timestamp is None]
    return (
        states == ["Ready"] * number
        and status.get("readyMasters") == number
        and len(pods) == number
        and bench.whole()
    )


def changing(bench: Bench) -> bool:
    """Whether the TabletCluster says that the number changes."""
    return bool(bench.condition("TabletCluster", "Reconciling")["reason"] == "MastersChanging")


def ask(bench: Bench, number: int) -> None:
    """Another number in the spec."""
    bench.patch("TabletCluster", {"masters": {"replicas": number}})


def shrink(bench: Bench, number: int, started: float) -> None:
    """Two masters fewer. The claims of those that leave are let go; the number was set twice since `started`."""
    before = set(masters(bench))
    ask(bench, number)
    bench.until(f"{number} of {len(before)} masters serve", lambda: serve(bench, number), 300)
    gone = before - set(masters(bench))
    assert len(gone) == 2
    bench.until("the claims of the others are let go", lambda: gone <= bench.released())
    assert not bench.told("MastersLost", started) and len(bench.told("MasterCountSet", started)) == 2


def test_one_three_one_under_writes(bench: Bench) -> None:
    """With three, each may be evicted; with one, none. Programs and nodes that knew one master learn of the others."""
    bench.clear()
    bench.apply("cluster", masters={"replicas": 1, "storage": {"size": "1Gi"}})
    bench.apply("flights")
    bench.until("one master serves", lambda: serve(bench, 1) and bench.ready("TabletGroup"), 240)
    stream = bench.stream()
    (first,), started = masters(bench), time.time()
    bench.until("no drain may take the master", lambda: drain_reason(bench) == "SingleReplica")
    ask(bench, 3)
    bench.until("it says that the number changes", lambda: changing(bench), 60)
    bench.note(f"          {bench.condition('TabletCluster', 'Reconciling')['message']}")
    bench.until("three masters serve", lambda: serve(bench, 3), 300)
    assert first in masters(bench)
    bench.until("a drain may begin", lambda: drain_reason(bench) == "Drainable")
    bench.core.delete_namespaced_pod(first, NAMESPACE)
    bench.until(
        "another master leads while the first one restarts",
        lambda: (
            bool((pod := bench.pod(first)) and pod.metadata.deletion_timestamp is None) and serve(bench, 3)
        ),
        240,
    )
    shrink(bench, 1, started)
    streamed = bench.written(stream)
    bench.sound()
    bench.compare(streamed)


def test_three_five_three_under_writes(bench: Bench) -> None:
    """No acknowledged row is lost, and those that leave are let go."""
    bench.have(fresh=True)
    loaded = bench.program("load")
    stream = bench.stream()
    before, started = set(masters(bench)), time.time()
    ask(bench, 5)
    bench.until("it says that the number changes", lambda: changing(bench), 60)
    bench.note(f"          {bench.condition('TabletCluster', 'Reconciling')['message']}")
    bench.until("five masters serve", lambda: serve(bench, 5), 300)
    assert before < set(masters(bench))
    shrink(bench, 3, started)
    spread_soon(bench)
    streamed = bench.written(stream)
    bench.sound()
    bench.compare(loaded, streamed)


def test_a_machine_is_lost_while_the_number_changes_and_it_is_set_back(bench: Bench) -> None:
    """It ends with three masters, whatever was under way."""
    bench.have(patient=True)
    ask(bench, 5)
    bench.until("it says that the number changes", lambda: changing(bench), 60)
    machine = bench.machine_with_both()
    bench.power("off", machine)
    time.sleep(10)
    ask(bench, 3)
    bench.power("on", machine)
    bench.machines_ready()
    bench.until("three masters serve", lambda: serve(bench, 3), 300)
    assert not bench.told("MastersLost")
