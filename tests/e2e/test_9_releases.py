"""From images of release 0.1.0 to this release's, back, and forth again, then finalized: by the operator, under writes."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path

from examples.demo.__main__ import last_json
from examples.demo.outside import image, run
from tests.e2e.bench import CLUSTER, NAMESPACE, Bench
from tests.e2e.test_9_leaders import WITHIN_S, spread
from tests.e2e.test_9_roll import anew, uids
from tests.upgrade.release import unpacked

OLD = "stele/node:0.1.0"
MASTERS = f"{CLUSTER}-masters.{NAMESPACE}:7051"
PATIENT = {"witnessAfter": "2m", "silentAfter": "15m", "machineLostAfter": "10m"}
_DOCKERFILE = """\
FROM {base}
COPY stele /opt/old/stele
ENV PYTHONPATH=/opt/old:/opt/app
"""


def old_image(folder: Path) -> None:
    """Build the image of nodes and masters with the code of release 0.1.0, and bring it onto the machines."""
    context = unpacked(folder / "release")
    (context / "Dockerfile").write_text(_DOCKERFILE.format(base=image("node")))
    run([*shlex.split(os.environ.get("STELE_DOCKER", "docker")), "build", "-q", "-t", OLD, str(context)], 600)
    if load := shlex.split(os.environ.get("STELE_IMAGE_LOAD", "")):
        run([*load, OLD], 1800)


def stele(bench: Bench, *words: str) -> str:
    """Run `stele` in the pod of a master."""
    return bench.execute(bench.pods("master")[0].metadata.name, "stele", *words, "--masters", MASTERS)


def test_the_release_before_to_this_one_and_back(bench: Bench, tmp_path: Path) -> None:
    old_image(tmp_path)
    bench.clear()
    bench.apply("cluster", healing=PATIENT, image=OLD)
    bench.apply("flights")
    bench.until("the cluster is whole", lambda: bench.whole() and bench.ready("TabletGroup"), 240)
    assert {p.spec.containers[0].image for p in bench.pods()} == {OLD}
    loaded = bench.program("load")
    stream = bench.place.begin("stream")
    time.sleep(5)
    for new, found in ((None, "0.2.0"), (OLD, "0.1.0"), (None, "0.2.0")):
        before = uids(bench)
        bench.patch("TabletCluster", {"image": new})
        bench.until(f"each pod runs {found}", lambda before=before: anew(bench, before), 900)
        assert {p.spec.containers[0].image for p in bench.pods()} == {new or image("node")}
    assert "cluster version 1 is finalized" in stele(bench, "cluster", "version")
    bench.patch("TabletCluster", {"version": "0.2"})
    bench.until("the upgrade is finalized", lambda: bench.told("VersionFinalized"))
    assert "cluster version 2 is finalized" in stele(bench, "cluster", "version")
    bench.until("no node leads more than one above its share", lambda: spread(bench), WITHIN_S)
    streamed = last_json(stream.stop(60), "stream")
    bench.note(f"          {streamed['rows']:,} rows written, longest wait {streamed['longest_wait_ms']} ms")
    bench.sound()
    bench.compare(loaded, streamed)
