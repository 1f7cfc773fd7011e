"""A complete one-machine Kubernetes: API server, controllers, machines. The Python API for tests and the
demo.

    async with LocalCluster(folder) as cluster:
        await cluster.off("n2")

Owns: the folder (kubeconfig, machines, logs, hosts file) and every process it starts. Invariants: none of
those processes survives the context, also after an exception or Ctrl-C. A folder has one cluster at a
time."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import shlex
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog
import yaml
from aiohttp import web

from stele_local import dns, processes
from stele_local.container import Backoff
from stele_local.controllers import Loop, collect_garbage, count_budgets
from stele_local.http import ApiServer
from stele_local.kinds import BUILT_IN, NODE, POD
from stele_local.kubelet import Kubelet
from stele_local.machines import Machines, condition
from stele_local.registry import Registry
from stele_local.scheduler import Scheduler
from stele_local.status import bad_request
from stele_local.store import Store
from stele_local.volumes import Volumes

Json = dict[str, Any]
log = structlog.get_logger("stele_local")
PORT = 6443
_BUDGETS = next(kind for kind in BUILT_IN if kind.plural == "poddisruptionbudgets")


@dataclass(frozen=True, slots=True)
class Settings:
    """`node_grace_seconds`: silence after which a machine's Node is NotReady (40 on a real cluster)."""

    machines: int = 5
    zones: int = 3
    node_grace_seconds: float = 4.0
    history_max: int = 4096
    backoff: Backoff = field(default_factory=Backoff)


class FolderTaken(Exception):
    """Another cluster runs in the folder. Its processes would look like leftovers of an earlier owner."""


class LocalCluster:
    """One cluster in this process's event loop. Enter it from the main thread, because pods die with that
    thread."""

    def __init__(self, folder: Path, settings: Settings | None = None) -> None:
        self.folder, self.settings = folder.resolve(), settings or Settings()
        self.token = secrets.token_urlsafe(24)
        self.url = ""
        self._tasks: list[asyncio.Task[None]] = []
        self.stopped = asyncio.Event()

    async def __aenter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _own(self.folder)
        processes.sweep(self.folder)  # leftover processes of an earlier owner would hold the addresses
        self._claim, network = _claim_network()
        settings = self.settings
        self.store = Store(settings.history_max)
        self.registry = Registry(self.store)
        self.machines = Machines(
            self.registry,
            self.folder / "machines",
            settings.machines,
            settings.zones,
            network,
            settings.node_grace_seconds,
        )
        hosts = dns.HostsFile(self.registry, self.folder / "hosts.json")
        hosts.write()
        self._kubelet = Kubelet(self.registry, self.machines, self.folder, network, hosts, settings.backoff)
        self._volumes = Volumes(self.registry, self.machines)
        scheduler = Scheduler(self.registry, self.machines)
        self._loops = {
            "machines": Loop("machines", self.machines.step, 0.5),
            "scheduler": Loop("scheduler", scheduler.step, 1.0),
            "volumes": Loop("volumes", self._volumes.step, 1.0),
            "kubelet": Loop("kubelet", self._kubelet.step, 1.0),
            "garbage": Loop("garbage", lambda: collect_garbage(self.registry), 1.0),
            "budgets": Loop("budgets", lambda: count_budgets(self.registry, _BUDGETS), 1.0),
            "names": Loop("names", hosts.write, 1.0),
        }
        for loop in self._loops.values():
            self.store.listen(loop.wake)
        self._server = ApiServer(self.registry, self.token, self._kubelet.read_log, self._control)
        await self._listen(f"{network}.0.1")
        self._tasks = [asyncio.create_task(loop.run(), name=name) for name, loop in self._loops.items()]
        self._write_access()
        log.info("up", url=self.url, folder=str(self.folder), machines=settings.machines)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._kubelet.stop()
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
        _write_private(self.kubeconfig, yaml.safe_dump(named))
        access = {"pid": os.getpid(), "url": self.url, "token": self.token}
        _write_private(self.folder / "cluster.json", json.dumps(access))

    def environment(self, namespace: str = "default") -> dict[str, str]:
        """Environment variables of a process in the cluster: for the API, for DNS names, and to end with
        the cluster."""
        return {"KUBECONFIG": str(self.kubeconfig), **self._kubelet.process_environment(namespace)}

    # -- machines

    async def off(self, name: str) -> None:
        """Switch a machine off: SIGKILL to all its processes. Returns when they are gone. Raises KeyError
        for an unknown machine, as do `on` and `wipe`."""
        await self._kubelet.power_off(self.machines[name])
        log.info("machine off", machine=name)

    async def on(self, name: str) -> None:
        """Switch a machine on again, with its old disks."""
        await self._kubelet.power_on(self.machines[name])
        self.wake()
        log.info("machine on", machine=name)

    async def wipe(self, name: str) -> None:
        """Empty a machine's disks; raises ValueError while it is on."""
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
        """Machines with their power, node state and pods."""
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
        return {"url": self.url, "folder": str(self.folder), "machines": rows}

    async def _control(self, words: list[str]) -> Json:
        """The control endpoint behind the command line; raises ApiError."""
        match words:
            case ["status"]:
                return self.status()
            case ["down"]:
                self.stopped.set()
                return {}
            case ["forget-history"]:
                self.store.forget_history()
                return {}
            case [("off" | "on" | "wipe") as verb, name] if name in self.machines:
                try:
                    await {"off": self.off, "on": self.on, "wipe": self.wipe}[verb](name)
                except ValueError as error:
                    raise bad_request(str(error)) from error
                return self.status()
        known = ", ".join(machine.name for machine in self.machines)
        raise bad_request(f"{' '.join(words)}: expected status, down, or off, on, wipe with one of {known}")


def _lock(folder: Path) -> int:
    """Locks the folder until the descriptor is closed, or this process ends. Raises FolderTaken."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise FolderTaken(
            f"a cluster runs in {folder} already; run `{as_called(folder)} down` first, or give another --folder"
        ) from None
    return descriptor


def _own(folder: Path) -> int:
    """Locks the folder and writes our process id into the lock file. Raises FolderTaken."""
    descriptor = _lock(folder)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def as_called(folder: Path) -> str:
    """The command line of `stele-local` for this folder, for messages."""
    return f"stele-local --folder {shlex.quote(str(folder))}"


def owner_of(folder: Path) -> int | None:
    """The id of the process that holds the folder's lock, also one that starts or hangs. None: no process;
    0: unknown."""
    with contextlib.suppress(FileNotFoundError):
        for _ in range(100):
            try:
                os.close(_lock(folder))
            except FolderTaken:
                if text := (
                    folder / "lock"
                ).read_text():  # the id is written a moment after the lock is taken
                    return int(text)
                time.sleep(0.01)
            else:
                return None
        return 0
    return None


def _claim_network() -> tuple[socket.socket, str]:
    """A /16 of loopback that no other cluster on this machine uses; an abstract socket holds it until we
    end."""
    for second in range(20, 250):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0stele-local-127.{second}")
        except OSError:
            claim.close()
            continue
        return claim, f"127.{second}"
    raise OSError("other clusters use all loopback networks 127.20 to 127.249; end one with stele-local down")


def _write_private(path: Path, text: str) -> None:
    temporary = path.with_suffix(".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(temporary, path)
