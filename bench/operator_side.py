"""Measures the operator: a real process beside stele_local, with the cluster of examples/cluster.yaml at rest.

Called by __main__, on the main thread and outside an event loop, because it starts processes as the demo
does.
"""

from __future__ import annotations

import time
from pathlib import Path

from bench.processes import resident_bytes
from examples.demo.kube import Kube, condition
from examples.demo.places import LocalPlace

_ROOT = Path(__file__).resolve().parents[1]
_READY_S, _REST_S = 180.0, 15.0


def at_rest(folder: Path) -> int:
    """Return the operator's resident memory in bytes, some passes after its TabletCluster became Ready.

    Raises:
        RuntimeError: if stele_local or the operator does not run, or the cluster is not Ready in time.
    """
    with LocalPlace(folder, keep=False) as place:
        pid = place.start_operator()
        kube = Kube(place.kubeconfig, "default")
        kube.apply_crds(_ROOT / "crds")
        ((kind, name),) = kube.apply(_ROOT / "examples" / "cluster.yaml")
        deadline = time.monotonic() + _READY_S
        while True:
            ready = condition(kube.status(kind, name), "Ready")
            if ready["status"] == "True":
                break
            if not place.operator_alive():
                raise RuntimeError("the operator ended")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{kind}/{name} not Ready after {_READY_S:.0f} s: {ready['message']}")
            time.sleep(0.5)
        time.sleep(_REST_S)
        return resident_bytes(pid)
