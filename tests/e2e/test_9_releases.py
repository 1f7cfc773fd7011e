"""From images of release 0.1.0 to this release's, back, and forth again, then finalized: by the operator, under writes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.demo.outside import image, run
from tests.e2e.bench import CLUSTER, NAMESPACE, Bench
from tests.e2e.test_9_leaders import spread_soon
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


def ready(pod: Any) -> bool:
    """Whether it serves, and is not going."""
    conditions = {c.type: c.status for c in pod.status.conditions or ()}
    return conditions.get("Ready") == "True" and pod.metadata.deletion_timestamp is None


def stele(bench: Bench, *words: str) -> str:
    """Run `stele` in the pod of a master with this release."""
    pod = next(p for p in bench.pods("master") if p.spec.containers[0].image != OLD and ready(p))
    return bench.execute(pod.metadata.name, "stele", *words, "--masters", MASTERS)


def show(bench: Bench, said: str) -> str:
    """Note what a command said."""
    for line in said.splitlines():
        bench.note(f"          {line}")
    return said


def half_way(bench: Bench, before: dict[str, str]) -> None:
    """While some members run the release before, nothing new is allowed, and each command says for whom it waits."""
    some_are_new(bench, before)
    said = show(bench, stele(bench, "cluster", "version"))
    assert "cluster version 1 is finalized; 2 waits for" in said and "0.1.0" in said
    said = show(bench, stele(bench, "cluster", "finalize", "--yes"))
    assert "UNSAFE_CHANGE: cluster version 2 cannot be finalized" in said
    assert "runs release 0.1.0, which reads cluster version 1; upgrade it" in said
    said = show(bench, stele(bench, "table", "alter", CLUSTER, "--rename", "dest=destination"))
    assert "UNSUPPORTED_VERSION" in said and "this needs cluster version 2" in said


def some_are_new(bench: Bench, before: dict[str, str]) -> None:
    """All masters, and perhaps a node, were made again."""

    def are() -> bool:
        there = [p for p in bench.pods("master") if before[p.metadata.name] != p.metadata.uid and ready(p)]
        return len(there) == sum("-master-" in name for name in before)

    bench.until("the masters were made again", are, 300)


def version_waits(bench: Bench) -> bool:
    """Whether the TabletCluster says that the version waits for members."""
    conditions = bench.kube.status("TabletCluster", CLUSTER)["conditions"]
    return any("cluster version 2" in c["message"] and "flights-node-" in c["message"] for c in conditions)


def test_the_release_before_to_this_one_and_back(bench: Bench, tmp_path: Path) -> None:
    """Page docs/upgrading.md, by its commands: nothing new before all have it, back at any time, then finalized."""
    old_image(tmp_path)
    bench.clear()
    bench.apply("cluster", healing=PATIENT, image=OLD)
    bench.apply("flights")
    bench.until("the cluster is whole", lambda: bench.whole() and bench.ready("TabletGroup"), 240)
    assert {p.spec.containers[0].image for p in bench.pods()} == {OLD}
    loaded = bench.program("load")
    stream = bench.stream()

    def roll(
        image_of: str | None, found: str, meanwhile: Callable[[Bench, dict[str, str]], None] | None
    ) -> None:
        before = uids(bench)
        bench.patch("TabletCluster", {"image": image_of})
        if meanwhile is not None:
            meanwhile(bench, before)
        bench.until(f"each pod runs {found}", lambda: anew(bench, before), 900)
        assert {p.spec.containers[0].image for p in bench.pods()} == {image_of or image("node")}

    roll(None, "0.2.0", half_way)
    said = show(bench, stele(bench, "cluster", "version"))
    assert "cluster version 1 is finalized; all members read 2" in said
    roll(OLD, "0.1.0", None)
    roll(None, "0.2.0", finalizing)
    bench.until("the upgrade is finalized", lambda: bench.told("VersionFinalized"))
    assert "cluster version 2 is finalized" in stele(bench, "cluster", "version")
    spread_soon(bench)
    streamed = bench.written(stream)
    bench.sound()
    bench.compare(loaded, streamed)


def finalizing(bench: Bench, before: dict[str, str]) -> None:
    """`spec.version`, while some members run the release before."""
    some_are_new(bench, before)
    bench.patch("TabletCluster", {"version": "0.2"})
    bench.until("the TabletCluster says for whom it waits", lambda: version_waits(bench), 60)
    assert not bench.told("VersionFinalized")
