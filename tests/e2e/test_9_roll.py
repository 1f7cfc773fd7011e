"""What the spec says of pods is rolled out under writes, and back; a bad image stops at one pod, and its correction goes there first."""

from __future__ import annotations

from typing import Any

from tests.e2e.bench import Bench
from tests.e2e.test_9_leaders import spread_soon

BAD = "stele/node:there-is-none"


def uids(bench: Bench) -> dict[str, str]:
    """Which pods there are."""
    return {p.metadata.name: p.metadata.uid for p in bench.pods()}


def anew(bench: Bench, before: dict[str, str]) -> bool:
    """Whether each pod was made again, and all is whole."""
    now = uids(bench)
    return now.keys() == before.keys() and all(now[n] != before[n] for n in now) and bench.whole()


def noted(note: str | None) -> dict[str, Any]:
    """A change of all pods."""
    return {role: {"podAnnotations": {"note": note}} for role in ("masters", "nodes")}


def test_a_roll_and_back_under_writes(bench: Bench) -> None:
    bench.have(fresh=True)
    bench.patch("TabletCluster", {"healing": {"witnessAfter": "2m", "silentAfter": "15m"}})
    loaded = bench.program("load")
    stream = bench.stream()
    for note in ("next", None):
        before = uids(bench)
        bench.patch("TabletCluster", noted(note))
        bench.until(
            "it says how far it is",
            lambda: bench.condition("TabletCluster", "Reconciling")["reason"] in ("Rolling", "RollWaits"),
        )
        bench.note(f"          {bench.condition('TabletCluster', 'Reconciling')['message']}")
        bench.until("each pod was made again", lambda before=before: anew(bench, before), 900)
    spread_soon(bench)
    streamed = bench.written(stream)
    bench.sound()
    bench.compare(loaded, streamed)


def test_a_bad_image_and_its_correction(bench: Bench) -> None:
    bench.have(fresh=True)
    bench.patch("TabletCluster", {"healing": {"witnessAfter": "10m", "silentAfter": "20m"}})
    stream = bench.stream()
    before = uids(bench)
    bench.patch("TabletCluster", {"image": BAD})
    bench.until(
        "Stalled=RollStopped",
        lambda: bench.condition("TabletCluster", "Stalled")["reason"] == "RollStopped",
        180,
    )
    bench.note(f"          {bench.condition('TabletCluster', 'Stalled')['message']}")
    changed = [name for name, uid in uids(bench).items() if before[name] != uid]
    assert len(changed) == 1, changed
    assert bench.ready("TabletCluster") and bench.ready("TabletGroup")
    bench.patch("TabletCluster", {"image": None})
    bench.until("all is whole", bench.whole, 300)
    spread_soon(bench)
    assert {n for n, uid in uids(bench).items() if before[n] != uid} == set(changed)
    assert all(p.spec.containers[0].image != BAD for p in bench.pods())
    streamed = bench.written(stream)
    bench.sound()
    bench.compare(streamed)
