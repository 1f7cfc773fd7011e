"""A stele_local with our CRDs and an operator process, for tests. Everything ends with the context."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from stele_local.cluster import LocalCluster, Settings
from stele_local.store import Change
from stele_operator.api.generate import DIRECTORY
from stele_operator.kube import Kube, configuration
from stele_operator.lease import EXIT_LOST
from tests.harness.pods import start_forked
from tests.harness.template import Forked, operator_template
from tests.operator.rights import Door, door

Json = dict[str, Any]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
IDENTITY = "operator-under-test"
ENDS_WITHIN_S = 300.0


async def install_crds(kube: Kube) -> None:
    """Create our CRDs and wait until they are served."""
    for path in sorted(DIRECTORY.glob("*.yaml")):
        body = yaml.safe_load(path.read_text())
        await kube._request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", body=body)
    async with asyncio.timeout(60):
        while not await kube.serves_our_resources():
            await asyncio.sleep(0.05)


class Bench:
    """A Kubernetes, a client, and an operator process that can be killed and started again."""

    def __init__(self, local: LocalCluster, kube: Kube, folder: Path, kubeconfig: Path, guard: Door) -> None:
        self.local = local
        self.kube = kube
        self.guard = guard
        self._folder = folder
        self._kubeconfig = kubeconfig
        self._operator: Forked | None = None
        self._more: tuple[str, ...] = ()
        self.starts = 0
        self._kept: dict[str, Callable[[], bool]] = {}
        self._broken: list[str] = []
        local.store.listen(self._look)

    async def start(self, *more: str) -> None:
        """Start the operator, with more arguments where they are given."""
        self.starts += 1
        self._more = more
        environment = {**os.environ, **self.local.environment()}
        # The names of the cluster come from there; the operator, as every test, from where this process has it.
        path = [environment["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
        with open(self._folder / f"operator-{self.starts}.log", "wb") as log:  # noqa: ASYNC230 - at once
            arguments = [
                *(
                    "run",
                    "--kubeconfig",
                    str(self._kubeconfig),
                    "--namespace",
                    "default",
                    "--identity",
                    IDENTITY,
                ),
                *("--metrics-host", "127.0.0.1", "--metrics-port", "0", *more),
            ]
            self._operator = await asyncio.to_thread(
                operator_template().start, arguments, environment, log.fileno()
            )

    async def end(self, number: int = signal.SIGKILL) -> int:
        """Send a signal and wait; returns the exit code."""
        process, self._operator = self._operator, None
        if process is None:
            return 0
        process.send_signal(number)
        return await process.ended(ENDS_WITHIN_S)

    async def apply(self, name: str, **spec: Any) -> Json:
        """Create an example, with parts of its spec replaced."""
        body = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
        body["spec"] |= spec
        return await self.kube.create(body["kind"], "default", body)

    async def names(self, kind: str) -> set[str]:
        """Names of all objects of a kind."""
        return {o["metadata"]["name"] for o in await self.kube.list(kind, "default")}

    async def condition(self, kind: str, name: str, condition: str) -> tuple[str, str, str]:
        """Status, reason and message of a condition; empty before it is written."""
        found = await self.kube.get(kind, "default", name)
        for one in ((found or {}).get("status") or {}).get("conditions") or ():
            if one["type"] == condition:
                return one["status"], one["reason"], one["message"]
        return "", "", ""

    async def events(self, kind: str) -> list[Json]:
        """Events about a kind of resource."""
        return [e for e in await self.kube.list("Event", "default") if e["involvedObject"]["kind"] == kind]

    @contextlib.contextmanager
    def keep(self, what: str, holds: Callable[[], bool]) -> Iterator[None]:
        """In the block `holds()`, which reads `local.store`, is true after each write of anybody, however soon the next follows:
        who asks the server now and then does not see all its states. What broke it fails the block, at the latest as it ends."""
        self._kept[what] = holds
        try:
            yield
        finally:
            del self._kept[what]
        assert not self._broken, self._broken

    def _look(self, change: Change) -> None:
        metadata = change.obj["metadata"]
        self._broken += [
            f"not so, by {change.table[1]}/{metadata['name']} at version {change.version}: {what}"
            for what, holds in self._kept.items()
            if not holds()
        ]

    async def until(self, what: str, true: Callable[[], Awaitable[bool]], seconds: float = 360.0) -> None:
        """Wait for something that stays, once it is so. On a busy machine a cluster of many processes needs minutes to be Ready."""
        end = time.monotonic() + seconds
        while not await true():
            assert not self._broken, self._broken
            if self._operator is not None and self._operator.poll() == EXIT_LOST:
                # A busy machine may cost it the Lease. A kubelet would start it again.
                await self.start(*self._more)
            if time.monotonic() > end:
                logs = (self._folder / f"operator-{self.starts}.log").read_text()[-3000:]
                raise AssertionError(f"not within {seconds} s: {what}\n{logs}")
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def bench(folder: Path, machines: int = 5) -> AsyncIterator[Bench]:
    """A Kubernetes with our CRDs; the operator is started by the test, with the chart's rights and no others."""
    async with (
        LocalCluster(folder / "local", Settings(machines=machines, start=start_forked)) as local,
        door(local.kubeconfig, folder) as (guard, kubeconfig),
    ):
        kube = Kube(await configuration(str(local.kubeconfig)))
        made = Bench(local, kube, folder, kubeconfig, guard)
        try:
            await install_crds(kube)
            yield made
        finally:
            await made.end()
            await kube.close()
        assert not guard.refused, guard.refused
