"""From `kubectl apply` to a row that was written: what a user sees at each stage, and that it is true."""

from __future__ import annotations

import time

from tests.e2e.bench import CLUSTER, Bench


def test_applied_then_writable(bench: Bench) -> None:
    bench.clear()
    started = time.time()
    bench.apply("cluster")
    bench.apply("flights")
    seen: list[str] = []

    def watched() -> bool:
        """Nothing may be claimed that is not so yet."""
        status = bench.kube.status("TabletCluster", CLUSTER)
        ready = bench.condition("TabletCluster", "Ready")
        running = sum(p.status.phase == "Running" for p in bench.pods())
        if ready["reason"] not in seen:
            seen.append(ready["reason"])
        assert status.get("readyMasters", 0) + status.get("readyReplicas", 0) <= running
        if bench.ready("TabletGroup"):
            assert ready["status"] == "True"
            assert bench.kube.status("TabletGroup", CLUSTER)["tablets"]["healthy"] >= 0
            return True
        return False

    bench.until("applied → table writable (aim: 15 s with images present)", watched, 240)
    bench.note(f"          stages: {' → '.join(seen)}")
    assert seen[-1] == "Writable"
    bench.until("nothing left to do", bench.whole)

    columns = bench.columns("TabletCluster")
    bench.note(f"          {columns}")
    assert (columns["Ready"], columns["Masters"], columns["Nodes"], columns["Healthy"]) == ("True", 3, 5, 8)
    table = bench.columns("TabletGroup")
    assert (table["Ready"], table["Healthy"], table["Tablets"]) == ("True", 8, 8)
    for reason in ("ClaimCreated", "PodCreated", "FormationConfirmed", "TableCreated", "Ready"):
        assert bench.told(reason, started), f"no event {reason}"
    formed, made = (bench.first(reason, started) for reason in ("FormationConfirmed", "TableCreated"))
    assert bench.first("ClaimCreated", started) <= formed <= made
    members = bench.members()
    machines = {p.metadata.name: p.spec.node_name for p in bench.pods()}
    assert {name: m["machine"] for name, m in members.items()} == machines
    for pod in bench.pods():
        assert pod.spec.security_context.run_as_non_root
        assert pod.spec.containers[0].security_context.read_only_root_filesystem

    loaded = bench.program("load")
    bench.note(f"          {loaded['rows']:,} rows at {loaded['rows_per_s']:,} rows/s")
    bench.compare(loaded)


def test_a_new_operator_restarts_no_node(bench: Bench) -> None:
    bench.have()
    before = {p.metadata.name: p.metadata.uid for p in bench.pods()}
    (operator,) = bench.operators()
    bench.place.upgrade("logLevel=debug")
    bench.until("the new operator leads", lambda: bench.leader() not in ("", operator.metadata.name))
    bench.place.test()
    bench.until("whole under the new operator", bench.whole)
    assert {p.metadata.name: p.metadata.uid for p in bench.pods()} == before
