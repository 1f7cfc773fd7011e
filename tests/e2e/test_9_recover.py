"""Two of three volumes of a table are wiped: the cluster says so, gives nothing up by itself, and is recovered by hand."""

from __future__ import annotations

from tests.e2e.bench import CLUSTER, NAMESPACE, Bench
from tests.e2e.test_6_volumes import _EMPTY, restart
from tests.e2e.test_9_leaders import spread_soon

MASTERS = f"{CLUSTER}-masters.{NAMESPACE}:7051"


def test_two_volumes_of_a_table_are_wiped(bench: Bench) -> None:
    bench.have(fresh=True)
    loaded = bench.program("load")
    pods = bench.pods("node")
    one, other = (p.metadata.name for p in pods[:2])
    master = bench.pods("master")[0].metadata.name
    for name in (one, other):
        bench.execute(name, "sh", "-c", _EMPTY)
    for name in (one, other):
        restart(bench, name)

    def lost() -> bool:
        return bool(bench.condition("TabletCluster", "MajorityLost")["status"] == "True")

    bench.until("MajorityLost", lost, 300)
    message = bench.condition("TabletCluster", "MajorityLost")["message"]
    bench.note(f"          {message}")
    assert f"stele tablet recover --all-lost --masters {MASTERS}" in message

    def recover(*more: str) -> str:
        return bench.execute(master, "stele", "tablet", "recover", "--all-lost", "--masters", MASTERS, *more)

    told = recover()
    bench.note("          " + told.replace("\n", "\n          "))
    assert (
        "may be lost: writes that only the lost voters had acknowledged, after" in told
        and "nothing was changed" in told
    )
    assert lost(), "to look changes nothing"
    told = recover("--accept-data-loss", "--reason", "two volumes were wiped")
    bench.note("          " + told.replace("\n", "\n          "))
    assert "serve again" in told
    bench.until("no majority is lost any more", lambda: not lost())
    # The other tablets have lost one of three; to heal them from two lost nodes at once is a person's word, too.
    bench.patch("TabletCluster", {"healing": {"maxLostNodes": 2}})
    stream = bench.stream()
    bench.until("it was healed", lambda: bench.whole() and {one, other} <= bench.released(), 600)
    spread_soon(bench)
    streamed = bench.written(stream)
    bench.sound()
    bench.compare(loaded, streamed)
