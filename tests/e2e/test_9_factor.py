"""The replication factor of a table changes while it is written: 3, 5, 3. The operator does the rest."""

from __future__ import annotations

from tests.e2e.bench import Bench
from tests.e2e.test_9_leaders import spread_soon


def growing(bench: Bench) -> bool:
    """Whether the TabletGroup says that replicas are added."""
    return bool(
        bench.condition("TabletGroup", "Reconciling")["reason"] in ("AddingReplicas", "ReplicationFactor")
    )


def settled(bench: Bench) -> bool:
    """Whether nothing is left to add or to remove."""
    return not growing(bench) and bench.whole() and bench.no_copy_left()


def test_three_five_three(bench: Bench) -> None:
    bench.have(fresh=True)
    loaded = bench.program("load")
    stream = bench.stream()
    bench.patch("TabletGroup", {"replicationFactor": 5})
    bench.until("it says that replicas are added", lambda: growing(bench), 60)
    bench.note(f"          {bench.condition('TabletGroup', 'Reconciling')['message']}")
    assert bench.condition("TabletGroup", "Degraded")["status"] == "False", "nothing is lost"
    bench.until("every tablet has five replicas", lambda: settled(bench), 600)
    bench.patch("TabletGroup", {"replicationFactor": 3})
    bench.sound()  # by the masters' view: right after the change the operator's status is still that of before
    bench.until("every tablet has three replicas again", lambda: settled(bench), 300)
    spread_soon(bench)
    streamed = bench.written(stream)
    bench.compare(loaded, streamed)


def test_more_replicas_than_nodes_are_refused(bench: Bench) -> None:
    """The condition says what to change, and the table keeps what it has."""
    bench.have()
    bench.patch("TabletGroup", {"replicationFactor": 7})
    bench.until(
        "Stalled=TooFewNodes",
        lambda: bench.condition("TabletGroup", "Stalled")["reason"] == "TooFewNodes",
    )
    bench.note(f"          {bench.condition('TabletGroup', 'Stalled')['message']}")
    bench.patch("TabletGroup", {"replicationFactor": 3})
    bench.until(
        "nothing waits any more", lambda: bench.condition("TabletGroup", "Stalled")["status"] == "False"
    )
    assert bench.whole()
