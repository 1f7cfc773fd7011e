"""An operator that starts while the API server is away: in a pod it waits, answers probes, and goes on."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from stele_operator import app
from stele_operator.app import Options
from stele_operator.kube import UNREACHABLE, BadKubeconfig, Kube, KubeError
from tests.operator.cluster import bench
from tests.tserver.test_ipv6 import has_ipv6


class Away(Kube):
    """A connection to an API server that is away, then starts, then is there."""

    answers: list[KubeError]
    go_on: asyncio.Event | None = None

    async def serves_our_resources(self) -> bool:
        if self.go_on is not None:
            await self.go_on.wait()
        if self.answers:
            raise self.answers.pop(0)
        return await super().serves_our_resources()


def away() -> list[KubeError]:
    """What it answers meanwhile."""
    return [
        KubeError(0, UNREACHABLE, "GET /apis: connection refused"),
        KubeError(503, "ServiceUnavailable", "starting"),
        KubeError(429, "TooManyRequests", "busy"),
        KubeError(403, "Forbidden", "roles are not loaded yet"),
    ]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


async def test_in_a_pod_it_waits_for_the_api_server_and_is_alive_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path, machines=1) as made:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
        monkeypatch.setattr(app, "_AGAIN_S", 0.3)
        await made.kube.create("Lease", "default", lease("somebody else"))
        kube, port = Away(made.kube.settings), free_port()
        kube.answers, kube.go_on = away(), asyncio.Event()
        options = Options("image", "test", namespaces=("default",), metrics_host="", metrics_port=port)
        running = asyncio.create_task(app.serve(kube, options))
        try:
            async with aiohttp.ClientSession() as session:

                async def asked(path: str, host: str = "127.0.0.1") -> int:
                    async with session.get(f"http://{host}:{port}{path}") as answer:
                        return answer.status

                async def listens() -> bool:
                    try:
                        return bool(await asked("/livez"))
                    except aiohttp.ClientError:
                        return False

                await made.until("it listens", listens)
                assert (await asked("/livez"), await asked("/readyz")) == (200, 503)
                if has_ipv6():
                    assert await asked("/livez", "[::1]") == 200

                async def ready() -> bool:
                    return await asked("/readyz") == 200

                kube.go_on.set()
                await made.until("it has found the API server", ready)
                assert not running.done()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await kube.close()


def lease(holder: str) -> dict[str, object]:
    """A lease that is held for long, so that who finds it stands by."""
    metadata = {"name": "stele-operator", "namespace": "default"}
    spec = {
        "holderIdentity": holder,
        "leaseDurationSeconds": 3600,
        "renewTime": "2026-01-01T00:00:00.000000Z",
    }
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


@pytest.mark.parametrize("kubeconfig", ["given", ""])
async def test_elsewhere_what_is_wrong_with_the_api_server_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kubeconfig: str
) -> None:
    """A kubeconfig that was given is what may be wrong, in a pod too."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    if kubeconfig:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    async with bench(tmp_path, machines=1) as made:
        kube = Away(made.kube.settings)
        try:
            for error in away():
                kube.answers = [error]
                with pytest.raises(BadKubeconfig, match="check its server and credentials"):
                    await app.serve(kube, Options("image", "test", kubeconfig=kubeconfig, metrics_port=0))
        finally:
            await kube.close()


async def test_one_that_waits_ends_when_it_is_told(tmp_path: Path) -> None:
    """As a container's first process, which signals without a handler do not end, it was killed 20 s later."""
    async with bench(tmp_path, machines=1) as made:
        await made.kube.create("Lease", "default", lease("somebody else"))
        program = (sys.executable, "-m", "stele_operator", "run", "--metrics-port", "0")
        given = ("--kubeconfig", str(made.local.kubeconfig), "--namespace", "default")
        pipe = asyncio.subprocess.PIPE
        operator = await asyncio.create_subprocess_exec(*program, *given, stdout=pipe, stderr=pipe)
        assert operator.stderr is not None
        try:
            async with asyncio.timeout(100):
                while b"serving probes" not in (line := await operator.stderr.readline()):
                    assert line, "it ended"
                operator.terminate()
                assert await operator.wait() == 0
        finally:
            if operator.returncode is None:
                operator.kill()
            await operator.communicate()


def test_it_stays_without_the_libraries_that_only_tables_with_ranges_need() -> None:
    """With numpy and pyarrow its process took 137 MB before it knew a cluster, and without them 92."""
    program = (
        "import stele_operator.app, stele_operator.masters as m, sys; from stele.rpc.proto import master_pb2 as pb; "
        "m._table(pb.TableInfoPB(name='t')); print(sorted({'numpy', 'pyarrow'} & sys.modules.keys()))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"
