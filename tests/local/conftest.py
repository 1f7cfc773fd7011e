"""A cluster per test, in this process, with short times."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest_asyncio

from stele_local.cluster import LocalCluster, Settings
from stele_local.container import Backoff
from stele_local.kinds import POD

Json = dict[str, Any]
WAIT_SECONDS = 60.0
SETTINGS = Settings(machines=3, node_grace_seconds=0.5, backoff=Backoff(0.1, 0.2, 5.0))


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    async with LocalCluster(tmp_path, SETTINGS) as started:
        yield started


async def until(holds: Callable[[], Any], what: str) -> Any:
    """Waits until `holds()` is true and returns it; fails with `what` otherwise."""
    deadline = asyncio.get_running_loop().time() + WAIT_SECONDS
    while not (value := holds()):
        assert asyncio.get_running_loop().time() < deadline, f"waited {WAIT_SECONDS:g} s: {what}"
        await asyncio.sleep(0.02)
    return value


SERVE = """
import http.server, os, pathlib, signal, sys, threading
folder = pathlib.Path(sys.argv[1])
(folder / "starts").open("a").write("x")
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        sick = (folder / self.path.strip("/")).exists()
        self.send_response(500 if sick else 200)
        self.end_headers()
    def log_message(self, *words):
        pass
server = http.server.ThreadingHTTPServer((os.environ["POD_IP"], 7080), Answer)
def stop(*_):
    print("asked to stop", flush=True)
    threading.Thread(target=server.shutdown).start()
signal.signal(signal.SIGTERM, stop)
print("serving", flush=True)
server.serve_forever()
"""


def pod(name: str, *command: str, claim: str = "", **spec: Any) -> Json:
    """A pod of one container that runs `command`, or an HTTP server on 7080 that keeps a file per start in /data."""
    container: Json = {
        "name": "main",
        "image": "stele/node:dev",
        "command": list(command) or ["python", "-c", SERVE, "/data"],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": 7080}, "periodSeconds": 1},
    }
    container |= spec.pop("container", {})
    volume = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
    body: Json = {
        "metadata": {"name": name, "labels": {"app": "x"}},
        "spec": {
            "containers": [container],
            "volumes": [{"name": "data", **volume}],
            "terminationGracePeriodSeconds": 5,
            **spec,
        },
    }
    return body


def claim(name: str) -> Json:
    return {
        "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }


def condition(cluster: LocalCluster, name: str, type_: str = "Ready") -> str:
    found = cluster.registry.find(POD, "default", name)
    conditions = ((found or {}).get("status") or {}).get("conditions") or []
    return next((c["status"] for c in conditions if c["type"] == type_), "")


def container_status(cluster: LocalCluster, name: str) -> Json:
    statuses = cluster.registry.get(POD, "default", name)["status"].get("containerStatuses") or [{}]
    return statuses[0]
