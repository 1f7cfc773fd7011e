"""A machine loses its power: back before its node is retired it is taken back; for good, node and master are replaced."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest

from tests.e2e.bench import Bench
from tests.e2e.test_9_drain import cordoned
from tests.e2e.test_9_leaders import spread_soon

HEAL = ("Copying", "Demoting", "AddingWitness", "Removing", "Ending")
"""The steps of a tablet that had no voter to spare, in their order."""


def test_off_and_back_in_time(bench: Bench) -> None:
    bench.have(fresh=True)
    loaded = bench.program("load")
    # Copies that take minutes: the machine is back before they are done.
    slow = {"copies": 1, "bytesPerSecond": "200Ki"}
    bench.patch(
        "TabletCluster", {"budget": slow, "healing": {"machineLostAfter": "15m", "silentAfter": "15m"}}
    )
    machine = bench.machine_with_both()
    node, claims = bench.member_on(machine, "node"), {n: c.metadata.uid for n, c in bench.claims().items()}
    identities = {n: m["nodeUUID"] for n, m in bench.members().items()}
    started = time.time()
    bench.power("off", machine)
    bench.until("a witness stands in", bench.witnessed)

    def lost() -> bool:
        return any(e.startswith(f"{node} is lost") for e in bench.told("NodeLost", started))

    bench.until("the node is told as lost", lost)
    bench.power("on", machine)
    bench.until(f"whole again with {node} back", lambda: bench.whole() and bench.no_copy_left(), 300)
    bench.sound()
    assert {n: c.metadata.uid for n, c in bench.claims().items()} == claims
    assert {n: m["nodeUUID"] for n, m in bench.members().items()} == identities
    ended = bench.told("HealEnded", started)
    assert any("PromotingBack" in message for message in ended), f"nobody was promoted back: {ended}"
    assert not bench.told("Retiring", started)
    bench.compare(loaded)
    bench.patch("TabletCluster", {"budget": {"copies": 4, "bytesPerSecond": "100Mi"}})


def test_off_for_good(bench: Bench) -> None:
    bench.have(fresh=True)
    loaded = bench.program("load")
    machine = bench.machine_with_both()
    node, master = bench.member_on(machine, "node"), bench.member_on(machine, "master")
    stream = bench.stream()
    started, since = time.time(), time.monotonic()
    bench.power("off", machine)
    bench.power("wipe", machine)
    with bench.place.checker(machine) as checker:
        bench.until(
            "healed: every tablet has its voters on other machines", lambda: checker.healed(machine), 300
        )
    bench.until("retired", lambda: {node, master} <= bench.released(), 300)
    bench.note(f"          {time.monotonic() - since:.1f} s from power failure to both claims let go")
    streamed = bench.written(stream)

    assert bench.told("HealBegan", started) and bench.told("Retiring", started)
    ended = [message for message in bench.told("HealEnded", started) if message.startswith(f"{node}: ")]
    assert any(all(step in message for step in HEAL) for message in ended), (
        f"steps that did not happen: {ended}"
    )
    whole = next(message for message in ended if all(step in message for step in HEAL))
    assert sorted(HEAL, key=whole.index) == list(HEAL)
    assert "; 0 bytes copied" not in whole
    masters = bench.pods("master")
    assert len({p.spec.node_name for p in masters} - {machine}) == 3 and master not in {
        p.metadata.name for p in masters
    }
    bench.compare(loaded, streamed)
    bench.power.restore()
    bench.until("the new node is there too", lambda: bench.whole() and len(bench.pods("node")) == 5, 300)
    assert bench.pod(node) is None


@pytest.mark.parametrize("spare", [False, True], ids=["no spare machine", "spare machines"])
def test_off_until_given_up_and_back(bench: Bench, spare: bool) -> None:
    """Node and master were given up, and are back with all that they hold: they are in service again."""
    bench.clear()
    machines = sorted(m.metadata.name for m in bench.core.list_node().items)
    with ExitStack() as stack:
        for other in machines[3:]:
            stack.enter_context(cordoned(bench, other))
        # With spare machines copies take minutes: the node is back before all of its tablets have moved.
        slow = {"copies": 1, "bytesPerSecond": "200Ki"}
        bench.apply("cluster", nodes={"replicas": 3, "storage": {"size": "2Gi"}}, budget=slow)
        bench.apply("flights")
        bench.until("the cluster is whole", lambda: bench.whole() and bench.ready("TabletGroup"), 240)
        loaded = bench.program("load")
        before = {p.metadata.name for p in bench.pods()}
        machine = bench.machine_with_both()
        node = bench.member_on(machine, "node")
        # With spare machines the writes would make copies longer than the test waits.
        stream = None if spare else bench.stream()
        started = time.time()
        bench.power("off", machine)
        bench.until("the node is given up", lambda: bench.members()[node]["state"] == "Draining")
        bench.until("another is made for it", lambda: {p.metadata.name for p in bench.pods("node")} - before)
        if spare:
            stack.close()
            bench.until("a copy runs", lambda: any(h["step"] == "Copying" for h in bench.healing()))
        bench.power("on", machine)
        bench.until("the node returns", lambda: bench.told("Returning", started))
        bench.until("all is whole", lambda: bench.whole() and bench.no_copy_left(), 300)
        assert bench.members()[node]["state"] == "Ready"
        if not spare:
            bench.until(
                "those made in vain are gone", lambda: {p.metadata.name for p in bench.pods()} == before
            )
            assert bench.condition("TabletCluster", "DrainBlocked")["status"] == "False"
        spread_soon(bench)
        streamed = [bench.written(stream)] if stream is not None else []
        bench.sound()
        bench.compare(loaded, *streamed)
