"""The change budget on real pods: several nodes at once, evictions beside parked nodes, an operator killed while it holds."""

from __future__ import annotations

from typing import Any

import yaml

from tests.e2e.bench import CLUSTER, EXAMPLES, NAMESPACE, Bench, Json
from tests.e2e.test_5_operator import kill_process
from tests.e2e.test_9_drain import drain_reason, evict
from tests.e2e.test_9_leaders import groups
from tests.e2e.test_9_releases import stele
from tests.e2e.watching import Away

PATIENT = {"witnessAfter": "2m", "silentAfter": "15m", "machineLostAfter": "15m"}


def begin(bench: Bench, buckets: int, factor: int, most: int) -> None:
    """A cluster with a table of so many tablets, and this budget."""
    bench.clear()
    budget = yaml.safe_load((EXAMPLES / "cluster.yaml").read_text())["spec"]["budget"]
    bench.apply("cluster", healing=PATIENT, budget={**budget, "maxUnavailable": most})
    columns = ["time_hour", "carrier", "flight"]
    parts = {"hash": [{"columns": columns, "buckets": buckets}]} if buckets > 1 else {"hash": []}
    bench.apply("flights", partitioning=parts, replicationFactor=factor)
    bench.until("the cluster is whole", lambda: bench.whole() and bench.ready("TabletGroup"), 240)


def nodes_anew(bench: Bench, before: dict[str, str]) -> bool:
    """Whether the pod of each node was made again, and all is whole."""
    now = uids(bench)
    return now.keys() == before.keys() and all(now[n] != before[n] for n in now) and bench.whole()


def uids(bench: Bench) -> dict[str, str]:
    """The pods of nodes."""
    return {p.metadata.name: p.metadata.uid for p in bench.pods("node")}


def note(bench: Bench, text: str) -> None:
    """A change of the pods of nodes, and of no others."""
    bench.patch("TabletCluster", {"nodes": {"podAnnotations": {"note": text}}})


def budget(bench: Bench) -> Json:
    """Who holds it and who waits, as the status has it."""
    found: Json = bench.kube.status("TabletCluster", CLUSTER).get("budget", {})
    return found


def ended(bench: Bench, stream: Any) -> None:
    """The writer ends; all that was acknowledged is there."""
    result = bench.written(stream)
    bench.sound()
    bench.compare(result)


def test_two_nodes_at_once_where_no_tablet_has_both(bench: Bench) -> None:
    """One tablet on three of five nodes: a roll takes two at once, never two of those three, and the first one alone."""
    begin(bench, buckets=1, factor=3, most=2)
    (tablet,) = groups(bench)
    names = {m["nodeUUID"]: n for n, m in bench.members().items()}
    holders = {names[node] for node in tablet.places}
    stream = bench.stream()
    before = uids(bench)
    with Away(bench, "node") as away:
        note(bench, "two at once")
        bench.until("each node was made again", lambda: nodes_anew(bench, before), 600)
    bench.note(
        f"          together: {sorted(sorted(pair) for pair in away.together)}; with rows: {sorted(holders)}"
    )
    assert away.most == 2
    assert all(len(pair & holders) <= 1 for pair in away.together)
    assert all("flights-node-0" not in pair for pair in away.together), "the first one goes alone"
    ended(bench, stream)


def test_two_may_be_evicted_where_all_tables_have_five_replicas(bench: Bench) -> None:
    """A third may not. A parked node takes one of the two places, and may be evicted itself."""
    begin(bench, buckets=2, factor=5, most=2)
    stream = bench.stream()

    def rests() -> bool:
        told = bench.condition("TabletCluster", "DrainBlocked")
        return bool(told["reason"] == "Drainable" and "2 nodes" in told["message"] and bench.whole())

    bench.until("two nodes may go", rests)
    bench.note(f"          {bench.condition('TabletCluster', 'DrainBlocked')['message']}")
    a, b, c, *_ = bench.pods("node")
    with Away(bench, "node") as away:
        assert [evict(bench, pod) for pod in (a, b)] == ["", ""]
        assert "disruption budget" in evict(bench, c), "a third may go while two are away"
        bench.until("both are back", lambda: made_again(bench, a, b) and rests(), 300)
        assert away.most == 2
        parked, other, third, *_ = bench.pods("node")
        bench.patch("TabletCluster", {"nodes": {"park": [parked.metadata.name]}})

        def labelled() -> bool:
            pod = bench.pod(parked.metadata.name)
            return pod is not None and "stele.dev/parked" in pod.metadata.labels

        bench.until("its pod has the label", labelled)
        bench.until(
            "one other node may go",
            lambda: "one node" in bench.condition("TabletCluster", "DrainBlocked")["message"],
        )
        bench.until("Kubernetes counts the others alone", lambda: counted(bench) == (4, 1), 60)
        assert [evict(bench, pod) for pod in (parked, other)] == ["", ""]
        assert "disruption budget" in evict(bench, third), "one more may go beside a parked node"
        bench.patch("TabletCluster", {"nodes": {"park": []}})
        bench.until("all are back", lambda: made_again(bench, parked, other) and rests(), 300)
    assert away.most == 2
    ended(bench, stream)


def made_again(bench: Bench, *pods: Any) -> bool:
    """Whether each of these pods has another one in its place."""
    now = uids(bench)
    return all(now.get(p.metadata.name, p.metadata.uid) != p.metadata.uid for p in pods)


def test_a_parked_node_may_be_evicted_and_no_other(bench: Bench) -> None:
    """With one place, which the parked node takes: the selector of the disruption budget leaves it out."""
    bench.have(fresh=True)
    bench.patch("TabletCluster", {"healing": PATIENT})
    bench.until("a drain may begin", lambda: drain_reason(bench) == "Drainable")
    parked, other, *_ = bench.pods("node")
    bench.patch("TabletCluster", {"nodes": {"park": [parked.metadata.name]}})
    bench.until("DrainBlocked=NodeParked", lambda: drain_reason(bench) == "NodeParked")
    bench.note(f"          {bench.condition('TabletCluster', 'DrainBlocked')['message']}")
    assert "disruption budget" in evict(bench, other)
    assert evict(bench, parked) == ""
    bench.until(
        "it is back",
        lambda: (pod := bench.pod(parked.metadata.name)) and pod.metadata.uid != parked.metadata.uid,
    )
    labels = bench.pod(parked.metadata.name).metadata.labels
    assert "stele.dev/parked" in labels, "the new pod has the label, too"
    bench.patch("TabletCluster", {"nodes": {"park": []}})
    bench.until("a drain may begin", lambda: drain_reason(bench) == "Drainable" and bench.whole())
    assert "stele.dev/parked" not in bench.pod(parked.metadata.name).metadata.labels


def test_killed_in_the_middle_of_a_roll(bench: Bench) -> None:
    """The masters keep who holds the budget and who waits; the next operator goes on. One node is away at most."""
    bench.have(fresh=True)
    bench.patch("TabletCluster", {"healing": PATIENT})
    stream = bench.stream()
    before = uids(bench)
    last = max(before)
    with Away(bench, "node") as away:
        note(bench, "killed")
        (operator,) = taken(bench, last)
        kill_process(bench, operator)
        bench.until("the next operator says who has it", lambda: bool(budget(bench)), 60)
        bench.patch("TabletCluster", {"nodes": {"park": []}})
        bench.until("nobody is parked", lambda: not bench.members()[last].get("message"), 120)

        (operator,) = taken(bench, last)
        other = bench.new_leader()
        bench.core.delete_namespaced_pod(operator.metadata.name, NAMESPACE, grace_period_seconds=0)
        said = next(line for line in stele(bench, "ksck").splitlines() if "change budget" in line)
        bench.note(f"          no operator: {said}")
        assert "held by upgrade (flights-node-" in said and f"park/{last} must wait" in said, said
        bench.until("the next operator leads", other)
        bench.patch("TabletCluster", {"nodes": {"park": []}})
        bench.until("each node was made again", lambda: nodes_anew(bench, before), 900)
    assert away.most == 1, away.together
    ended(bench, stream)


def taken(bench: Bench, last: str) -> list[Any]:
    """The operators, once a node is away for the roll and the parking of another waits for that."""
    known = uids(bench)
    bench.until("a node is away for the roll", lambda: rolled(bench, known), 300)
    bench.patch("TabletCluster", {"nodes": {"park": [last]}})
    bench.until("park waits for it", lambda: waits(bench, f"park/{last}"), 60)
    bench.note(f"          {budget(bench)}")
    return bench.operators()


def counted(bench: Bench) -> tuple[int, int]:
    """How many nodes the disruption budget counts, and how many of them may go."""
    found = bench.disruption_budget("node").status
    return found.expected_pods, found.disruptions_allowed


def rolled(bench: Bench, known: dict[str, str]) -> bool:
    """Whether a node's pod is being made again."""
    now = uids(bench)
    going = any(p.metadata.deletion_timestamp is not None for p in bench.pods("node"))
    return (going or now != known) and not bench.whole()


def waits(bench: Bench, who: str) -> bool:
    """Whether somebody waits for the budget, which the roll holds."""
    found = budget(bench)
    return found.get("holder") == "upgrade" and who in found.get("waiting", ())
