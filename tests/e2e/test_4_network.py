"""A machine's network cable: one out, and nothing splits; three out, and nothing is taken away; then all is back."""

from __future__ import annotations

import time

from tests.e2e.bench import Bench

# Long enough that nobody is retired while a cable is out.
PATIENT = {"machineLostAfter": "30m", "silentAfter": "30m"}


def test_one_machine_is_cut_off(bench: Bench) -> None:
    bench.have(fresh=True)
    bench.patch("TabletCluster", {"healing": PATIENT})
    loaded = bench.program("load")
    machine = bench.machine_with_both()
    identities = {n: m["nodeUUID"] for n, m in bench.members().items()}
    pods = {p.metadata.name: p.metadata.uid for p in bench.pods()}
    stream = bench.stream()
    started = time.time()
    bench.power("cut", machine)
    bench.until("its node is told as lost", lambda: bench.told("NodeLost", started))
    bench.until("every tablet of the table has its voters elsewhere", bench.tablets_healthy, 300)
    time.sleep(10)
    bench.power("mend", machine)
    bench.until("all back by themselves", lambda: bench.whole() and bench.no_copy_left(), 300)
    streamed = bench.written(stream)
    bench.sound()
    bench.compare(loaded, streamed)
    assert {n: m["nodeUUID"] for n, m in bench.members().items()} == identities
    assert {p.metadata.name: p.metadata.uid for p in bench.pods()} == pods, "a pod was made anew"


def test_three_machines_are_cut_off(bench: Bench) -> None:
    bench.have(fresh=True)
    loaded = bench.program("load")
    masters = sorted({p.spec.node_name for p in bench.pods("master")})
    others = sorted({p.spec.node_name for p in bench.pods("node")} - set(masters))
    bench.place.upgrade(f"nodeSelector.kubernetes\\.io/hostname={masters[0]}")
    bench.until("the operator leads again", lambda: bench.members() and bench.whole())
    cut = [masters[1], *others]
    assert len(cut) == 3, f"masters on {masters}, other nodes on {others}"
    claims = {n: c.metadata.uid for n, c in bench.claims().items()}
    identities = {n: m["nodeUUID"] for n, m in bench.members().items()}
    started = time.time()
    for machine in cut:
        bench.power("cut", machine)
    bench.until(
        "Stalled=TooManyLost",
        lambda: (
            (c := bench.condition("TabletCluster", "Stalled"))["status"] == "True"
            and c["reason"] == "TooManyLost"
        ),
    )
    bench.note(f"          {bench.condition('TabletCluster', 'Stalled')['message']}")
    time.sleep(60)
    assert not [r for r in ("Retiring", "PodDeleted", "ClaimReleased") if bench.told(r, started)]
    assert not [message for message in bench.told("HealEnded", started) if "Removing" in message]
    for machine in cut:
        bench.power("mend", machine)
    bench.until("all back by themselves", lambda: bench.whole() and bench.no_copy_left(), 300)
    assert bench.condition("TabletCluster", "Stalled")["status"] == "False"
    assert {n: c.metadata.uid for n, c in bench.claims().items()} == claims
    assert {n: m["nodeUUID"] for n, m in bench.members().items()} == identities
    bench.sound()
    bench.compare(loaded)
    bench.place.roll_back()
