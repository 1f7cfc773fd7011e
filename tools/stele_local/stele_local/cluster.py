"""A complete one-machine Kubernetes: API server, controllers, machines. This is the Python API for tests and
the demo.

    async with LocalCluster(folder) as cluster:
        await cluster.off("n2")

Owns: the folder (kubeconfig, state, machines, logs, hosts file) and every process that it starts. Invariants:
none of those processes survives the context, even after an exception or Ctrl-C. A folder has one cluster at a
time. If the context is entered again, the cluster has the objects, volumes and addresses that it had before.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog
import yaml
from aiohttp import web

from stele_local import dns, keeper, processes
from stele_local.container import Backoff, Start, start_process
from stele_local.controllers import Loop, collect_garbage, count_budgets, is_ready
from stele_local.copies import original_of
from stele_local.folder import as_called, own, write_private
from stele_local.http import ApiServer
from stele_local.jobs import Jobs
from stele_local.kinds import BUILT_IN, NODE, POD
from stele_local.kubelet import Kubelet, mark_stopped
from stele_local.machines import Machines, condition
from stele_local.operator_process import OperatorProcess
from stele_local.registry import Registry
from stele_local.scheduler import Scheduler
from stele_local.status import bad_request
from stele_local.store import Store
from stele_local.volumes import Volumes

Json = dict[str, Any]
log = structlog.get_logger("stele_local")
PORT = 6443
MACHINES, ZONES = 5, 3
_BUDGETS = next(kind for kind in BUILT_IN if kind.plural == "poddisruptionbudgets")


@dataclass(frozen=True, slots=True)
class Settings:
    """`machines` and `zones`: None means as many as the folder's cluster has, or 5 and 3 if there is none.
    `node_grace_seconds`: after this silence a machine's Node is NotReady (40 on a real cluster). `start`: how
    to start the processes of pods.
    """

    machines: int | None = None
    zones: int | None = None
    node_grace_seconds: float = 4.0
    history_max: int = 4096
    backoff: Backoff = field(default_factory=Backoff)
    start: Start = start_process


class OtherSettings(Exception):
    """The folder holds a cluster of another size than was asked for. The message says what to do."""


class LocalCluster:
    """One cluster in this process's event loop. Enter it from the main thread, because pods die with that
    thread."""

    def __init__(self, folder: Path, settings: Settings | None = None) -> None:
        self.folder, self.settings = folder.resolve(), settings or Settings()
        self.token = self.url = ""
        self.operator: OperatorProcess | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.stopped = asyncio.Event()

    async def __aenter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = own(self.folder)
        try:
            await self._start()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    async def _start(self) -> None:
        (self.folder / "cluster.json").unlink(missing_ok=True)  # of an earlier owner that was killed
        processes.sweep(self.folder)  # leftover processes of an earlier owner would hold the addresses
        settings = self.settings
        self.store = Store(settings.history_max)
        kept = keeper.load(self.folder, self.store)
        machines, zones = _size(self.folder, settings, kept)
        original = original_of(self.folder)
        if kept and original is not None:
            log.info("this folder is a copy, and gets an identity of its own", original=str(original))
            self._claim, network = _claim_network("", avoid=kept.network)
        else:
            self._claim, network = _claim_network(kept.network if kept else "")
        self.token = kept.token if kept and original is None else secrets.token_urlsafe(24)
        self.registry = Registry(self.store)
        self.machines = Machines(
            self.registry, self.folder / "machines", machines, zones, network, settings.node_grace_seconds
        )
        self._were_ready = mark_stopped(self.registry)
        hosts = dns.HostsFile(self.registry, self.folder / "hosts.json")
        hosts.write()
        self._kubelet = Kubelet(
            self.registry, self.machines, self.folder, network, hosts, settings.backoff, settings.start
        )
        self._volumes = Volumes(self.registry, self.machines)
        scheduler = Scheduler(self.registry, self.machines)
        self._keeper = keeper.Keeper(
            self.folder,
            self.store,
            lambda: keeper.Identity(
                network, self.token, machines, zones, self.operator is not None, str(self.folder)
            ),
        )
        self._loops = {
            "machines": Loop("machines", self.machines.step, 0.5),
            "scheduler": Loop("scheduler", scheduler.step, 1.0),
            "jobs": Loop("jobs", Jobs(self.registry, settings.backoff).step, 1.0),
            "volumes": Loop("volumes", self._volumes.step, 1.0),
            "kubelet": Loop("kubelet", self._kubelet.step, 1.0),
            "garbage": Loop("garbage", lambda: collect_garbage(self.registry), 1.0),
            "budgets": Loop("budgets", lambda: count_budgets(self.registry, _BUDGETS), 1.0),
            "names": Loop("names", hosts.write, 1.0),
            "keeper": Loop("keeper", self._keeper.step, 1.0, keeper.PAUSE_SECONDS),
        }
        for loop in self._loops.values():
            self.store.listen(loop.wake)
        self._server = ApiServer(self.registry, self.token, self._kubelet.read_log, self._control)
        await self._listen(f"{network}.0.1")
        self._tasks = [asyncio.create_task(loop.run(), name=name) for name, loop in self._loops.items()]
        self._write_access()
        if kept and kept.operator:
            self.start_operator()
        log.info("up", url=self.url, folder=str(self.folder), machines=machines, again=kept is not None)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.operator is not None:
            await self.operator.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._kubelet.stop()
        self._keeper.step()
        self._server.end()
        await self._runner.cleanup()
        self._claim.close()
        processes.sweep(self.folder)
        with contextlib.suppress(FileNotFoundError):
            (self.folder / "cluster.json").unlink()
        os.close(self._lock)

    async def _listen(self, address: str) -> None:
        self._runner = web.AppRunner(self._server.app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, address, PORT).start()
        self.url = f"http://{address}:{PORT}"

    # -- access

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    def _write_access(self) -> None:
        named = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "stele-local",
            "clusters": [{"name": "stele-local", "cluster": {"server": f"{self.url}/{self.token}"}}],
            "users": [{"name": "admin", "user": {"token": self.token}}],
            "contexts": [
                {
                    "name": "stele-local",
                    "context": {"cluster": "stele-local", "user": "admin", "namespace": "default"},
                }
            ],
        }
        write_private(self.kubeconfig, yaml.safe_dump(named))
        access = {"pid": os.getpid(), "url": self.url, "token": self.token}
        write_private(self.folder / "cluster.json", json.dumps(access))

    def environment(self, namespace: str = "default") -> dict[str, str]:
        """Environment variables for a process in the cluster. With them it finds the API and the DNS names,
        and ends with the cluster.
        """
        return {"KUBECONFIG": str(self.kubeconfig), **self._kubelet.process_environment(namespace)}

    # -- the operator

    def start_operator(self) -> None:
        """Run Stele's operator beside the cluster, also after the next start in this folder. Does nothing if
        it runs already.
        """
        if self.operator is None:
            home = self.folder / "logs" / "operator"
            self.operator = OperatorProcess(self.kubeconfig, home, self.environment, self.settings.backoff)
            self._loops["keeper"].wake()

    async def stop_operator(self) -> None:
        """End the operator. It does not start again with the cluster."""
        if self.operator is not None:
            await self.operator.stop()
            self.operator = None
            self._loops["keeper"].wake()

    # -- machines

    async def off(self, name: str) -> None:
        """Switch a machine off: kill all its processes with SIGKILL. Returns when they are gone.

        Raises:
            KeyError: there is no such machine. `on` and `wipe` raise this too.
        """
        await self._kubelet.power_off(self.machines[name])
        log.info("machine off", machine=name)

    async def on(self, name: str) -> None:
        """Switch a machine on again, with its old disks."""
        await self._kubelet.power_on(self.machines[name])
        self.wake()
        log.info("machine on", machine=name)

    async def wipe(self, name: str) -> None:
        """Empty a machine's disks.

        Raises:
            ValueError: the machine is on.
        """
        try:
            self.machines.wipe(name)
        except ValueError as error:
            raise ValueError(f"{error} with `{as_called(self.folder)} off {name}`") from None
        self.wake()
        log.info("machine wiped", machine=name)

    def wake(self) -> None:
        for loop in self._loops.values():
            loop.wake()

    def status(self) -> Json:
        """The state of the cluster: its machines with their power, node state and pods; the operator, if one
        was started. `returning` has the pods that ran before and are not ready again.
        """
        rows = []
        for machine in self.machines:
            node = self.registry.find(NODE, "", machine.name)
            pods = [
                p["metadata"]["name"]
                for p in self.store.objects(POD.key)
                if p["spec"].get("nodeName") == machine.name
            ]
            ready = bool(node) and condition(node or {}, "Ready") == "True"
            rows.append(
                {
                    "name": machine.name,
                    "zone": machine.zone,
                    "on": machine.on,
                    "node_ready": ready,
                    "pods": pods,
                }
            )
        told = {"url": self.url, "folder": str(self.folder), "machines": rows, "returning": self._returning()}
        return told | ({"operator": self.operator.status()} if self.operator else {})

    def _returning(self) -> list[str]:
        """Names of pods that were ready when the cluster last stopped and are not ready again, on machines
        that are on.
        """
        off = {machine.name for machine in self.machines if not machine.on}
        return [
            pod["metadata"]["name"]
            for pod in self.store.objects(POD.key)
            if pod["metadata"]["uid"] in self._were_ready
            and pod["spec"].get("nodeName") not in off
            and not is_ready(pod)
        ]

    async def _control(self, words: list[str]) -> Json:
        """The control endpoint behind the command line. `words` are a command and its arguments.

        Raises:
            ApiError: there is no such command or machine, or the command cannot be run now.
        """
        match words:
            case ["status"]:
                return self.status()
            case ["down"]:
                self.stopped.set()
                return {}
            case ["forget-history"]:
                self.store.forget_history()
                return {}
            case ["operator"]:
                self.start_operator()
                return self.status()
            case ["operator", "stop"]:
                await self.stop_operator()
                return self.status()
            case [("off" | "on" | "wipe"), name] if name not in self.machines:
                known = ", ".join(machine.name for machine in self.machines)
                raise bad_request(f"there is no machine {name}; the machines are {known}")
            case [("off" | "on" | "wipe") as verb, name]:
                try:
                    await {"off": self.off, "on": self.on, "wipe": self.wipe}[verb](name)
                except ValueError as error:
                    raise bad_request(str(error)) from error
                return self.status()
        raise bad_request(
            f"{' '.join(words)!r} is not a request that stele-local knows; `stele-local --help` lists them"
        )


def _size(folder: Path, settings: Settings, kept: keeper.Identity | None) -> tuple[int, int]:
    """The numbers of machines and zones.

    Raises:
        OtherSettings: the folder holds a cluster of another size.
    """
    if kept is None:
        return settings.machines or MACHINES, settings.zones or ZONES
    asked = settings.machines or kept.machines, settings.zones or kept.zones
    if asked != (kept.machines, kept.zones):
        raise OtherSettings(
            f"the cluster in {folder} has {kept.machines} machines in {kept.zones} zones, not {asked[0]} in {asked[1]}: "
            f"start it without --machines and --zones, or remove it first with `{as_called(folder)} down --wipe`"
        )
    return asked


def _claim_network(before: str, avoid: str = "") -> tuple[socket.socket, str]:
    """Claim a /16 network of loopback that no other cluster of this machine uses. It is claimed as long as
    the returned socket is open.

    `before`: the network that this cluster had, taken if it is free. `avoid`: the network of the folder from
    which this one was copied.
    """
    networks = [f"127.{second}" for second in range(20, 250) if f"127.{second}" != avoid]
    for network in (*([before] if before else []), *networks):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0stele-local-{network}")
        except OSError:
            claim.close()
            continue
        return claim, network
    raise OSError("other clusters use all loopback networks 127.20 to 127.249; end one with stele-local down")
