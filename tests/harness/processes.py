"""A cluster of `stele` processes: started, formed, killed and cleaned up. Used from an event loop.

Every member has a loopback address of its own, so that ports are the same everywhere, as in pods. Invariant: no
process outlives the one that made it (PR_SET_PDEATHSIG), and logs stay in the cluster's directory.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from stele.client.admin import form_masters
from stele.model.errors import SteleError
from stele.model.ids import new_id
from stele.rpc.resolve import join_address
from tests.harness.loopback import Loopback
from tests.harness.template import Forked, template

NODE_PORT, MASTER_PORT, FLIGHT_PORT, STREAM_PORT, HTTP_PORT = 7050, 7051, 7052, 7053, 7080

# Linux sends SIGKILL to the child when the thread that started it ends, so clusters are started on the main thread. A
# change of the group would undo that, so it comes first.
_LAUNCH = (
    "import ctypes, os, sys\n"
    "sys.argv[2] == '-' or os.setgid(int(sys.argv[2]))\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"
    "os.getppid() == int(sys.argv[1]) or sys.exit(1)\n"
    "os.execv(sys.executable, [sys.executable, '-m', 'stele.cli', *sys.argv[3:]])\n"
)
_SKEW = Path(__file__).with_name("skew")
_LOG_TAIL_LINES = 15
READY_WITHIN_S = 180.0
"""Eight processes that start at once take more than a minute where two processors have much else to do."""
_FIRST_GROUP = 61_000


@dataclass
class Member:
    """A node or master: its identity and volume stay, its process comes and goes.

    `group`: the group id that its process runs under, by which a packet filter tells its packets (tests/linear)."""

    name: str
    role: str
    host: str
    directory: Path
    node_id: str = field(default_factory=new_id)
    machine: str = ""
    zone: str = ""
    group: int | None = None
    process: subprocess.Popen[bytes] | Forked | None = None
    program: Path | None = None
    """The folder that holds another release's package `stele`; None: that of this checkout."""

    flight_port: int = FLIGHT_PORT
    http_port: int = HTTP_PORT

    @property
    def address(self) -> str:
        """HOST:PORT of its gRPC server."""
        return join_address(self.host, MASTER_PORT if self.role == "master" else NODE_PORT)

    @property
    def flight_address(self) -> str:
        """HOST:PORT of its Flight server."""
        return join_address(self.host, self.flight_port)

    @property
    def log_path(self) -> Path:
        """Where its standard output and error go."""
        return self.directory.parent / f"{self.name}.log"

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self.process is not None and self.process.poll() is None

    def tail(self) -> str:
        """The last lines of its log."""
        if not self.log_path.exists():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])


class Cluster:
    """`masters` (1, 3 or 5) and `nodes` below `directory`; each on a machine of its own, zones in turn.

    `arguments` are added to every process's command line. With `groups` (needs root) each runs in a group of its own. With
    `clocks` the wall clock of each can be set. Processes of this release are forked from a template that has imported it. With
    `clocks`, an `environment` of their own or `anew`, each is a new program, as users start it; measurements want that.
    Use as `async with Cluster(tmp_path) as cluster:`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        masters: int = 3,
        nodes: int = 3,
        zones: tuple[str, ...] = ("z1", "z2", "z3"),
        arguments: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        groups: bool = False,
        clocks: bool = False,
        anew: bool = False,
    ) -> None:
        self.cluster_id = new_id()
        self.directory = directory
        self._groups = groups
        self._anew = anew or clocks or environment is not None
        self.arguments = arguments
        self._environment = {**os.environ, **(environment or {})}
        if clocks:
            path = filter(None, (str(_SKEW), self._environment.get("PYTHONPATH")))
            self._environment["PYTHONPATH"] = os.pathsep.join(path)
        self.loopback = Loopback()
        self.network = self.loopback.prefix
        self._zones = zones
        self.masters = [self._member("master", n) for n in range(masters)]
        self.nodes = [self._member("node", n) for n in range(nodes)]

    def _member(self, role: str, number: int) -> Member:
        name = f"{role}-{number}"
        last = (1 if role == "master" else 11) + number
        return Member(
            name=name,
            role=role,
            host=f"{self.network}.{last}",
            directory=self.directory / name,
            machine=f"machine-{number}",
            zone=self._zones[number % len(self._zones)] if self._zones else "",
            group=_FIRST_GROUP + last if self._groups else None,
        )

    @property
    def master_addresses(self) -> list[str]:
        """For clients."""
        return [member.address for member in self.masters]

    def named(self, member: Member) -> str:
        """What the command lines of others call a master."""
        return member.address

    def masters_told(self, member: Member) -> list[str]:
        """The masters on a member's command line."""
        return [self.named(master) for master in self.masters]

    @property
    def members(self) -> list[Member]:
        """Masters, then nodes."""
        return [*self.masters, *self.nodes]

    def member(self, node_id: str) -> Member:
        """The member with this node id."""
        return next(m for m in self.members if m.node_id == node_id)

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            self.kill_all()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc is not None:
            for member in self.members:
                print(f"--- {member.name} ({member.host}), log {member.log_path}\n{member.tail()}")
        self.kill_all()

    async def start(self, timeout_s: float = READY_WITHIN_S) -> None:
        """Start everything, form the masters, wait until all are ready.

        Raises:
            RuntimeError: with the tails of the logs if a process ends or is not ready in time.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        first = ",".join(f"{m.node_id}={self.named(m)}" for m in self.masters)
        for master in self.masters:
            self.launch(master, "--first-masters", first)
        await self.form(timeout_s)
        for node in self.nodes:
            self.launch(node)
        await self.wait_ready(timeout_s=timeout_s)

    def launch(self, member: Member, *extra: str) -> None:
        """Start a member's process. Masters name `--first-masters` or `--join` only for an empty volume."""
        member.directory.mkdir(parents=True, exist_ok=True)
        arguments = [
            *(member.role, "run"),
            *("--data-dir", str(member.directory)),
            *("--node-id", member.node_id),
            *("--cluster-id", self.cluster_id),
            *("--listen", member.address),
            *("--advertise", member.address),
            *("--masters", ",".join(self.masters_told(member))),
            *("--machine", member.machine),
            *("--zone", member.zone),
            *("--http-port", str(member.http_port)),
            *("--flight-port", str(member.flight_port)),
            *extra,
            *self.arguments,
        ]
        with member.log_path.open("ab") as out:
            member.process = self._started(member, arguments, out.fileno())

    def _started(self, member: Member, arguments: list[str], out: int) -> subprocess.Popen[bytes] | Forked:
        if member.program is None and not self._anew:
            return template().start(arguments, self._environment, out, self.loopback.claim, member.group)
        return subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(os.getpid()), str(member.group or "-"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=self._environment_of(member),
            start_new_session=True,
            pass_fds=(self.loopback.claim,),
        )

    def _environment_of(self, member: Member) -> dict[str, str]:
        if member.program is None:
            return self._environment
        path = filter(None, (str(member.program), self._environment.get("PYTHONPATH")))
        return {**self._environment, "PYTHONPATH": os.pathsep.join(path)}

    def add_node(self) -> Member:
        """One more node with a fresh identity, started."""
        member = self._member("node", len(self.nodes))
        self.nodes.append(member)
        self.launch(member)
        return member

    def kill(self, member: Member) -> None:
        """kill -9, and wait for the end."""
        self._signal(member, signal.SIGKILL)
        if member.process is not None:
            member.process.wait()

    def set_clock(self, member: Member, ahead_s: float) -> None:
        """Set its wall clock so far ahead of the true time, now and for later starts. Needs `clocks`."""
        skew = member.directory.with_name(f"{member.directory.name}.skew")
        aside = skew.with_name(f"{skew.name}.new")
        aside.write_text(str(int(ahead_s * 1e6)))
        aside.rename(skew)

    def pause(self, member: Member) -> None:
        """SIGSTOP: the process is there and does nothing."""
        self._signal(member, signal.SIGSTOP)

    def resume(self, member: Member) -> None:
        """SIGCONT."""
        self._signal(member, signal.SIGCONT)

    async def stop(self, member: Member, timeout_s: float = 20.0) -> int:
        """SIGTERM; the exit code."""
        self._signal(member, signal.SIGTERM)
        assert member.process is not None
        return await asyncio.to_thread(member.process.wait, timeout_s)

    def restart(self, member: Member) -> None:
        """Start again on the same volume."""
        self.launch(member)

    async def kill_each(self) -> None:
        """Kill each node and start it again, one after another, with a moment before and after for those who work with them."""
        for node in self.nodes:
            await asyncio.sleep(0.3)
            self.kill(node)
            await asyncio.sleep(0.3)
            self.restart(node)
            await self.wait_ready(node)
            await asyncio.sleep(0.7)

    def lose(self, member: Member) -> None:
        """The machine is gone for good, volume and all."""
        self.kill(member)
        shutil.rmtree(member.directory)

    def kill_all(self) -> None:
        """End every process at once."""
        for member in self.members:
            if member.running:
                self._signal(member, signal.SIGKILL)
        for member in self.members:
            if member.process is not None:
                member.process.wait()

    async def wait_ready(self, *members: Member, timeout_s: float = READY_WITHIN_S) -> None:
        """Until /readyz of these (default: all that were started) says ok.

        Raises:
            RuntimeError: if one ends or is not ready in time; with the tail of its log.
        """
        wanted = list(members) or [m for m in self.members if m.process is not None]
        deadline = time.monotonic() + timeout_s
        for member in wanted:
            while True:
                status, body = await self.http(member, "/readyz")
                if status == 200:
                    break
                self._must_run(member)
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"{member.name} not ready after {timeout_s} s: {body}\n{member.tail()}"
                    )
                await asyncio.sleep(0.05)

    async def http(self, member: Member, path: str) -> tuple[int, str]:
        """(status, body) of a GET on a member's HTTP port; (0, why) without an answer."""
        try:
            async with asyncio.timeout(2.0):
                reader, writer = await asyncio.open_connection(member.host, member.http_port)
                try:
                    writer.write(f"GET {path} HTTP/1.1\r\nHost: {member.host}\r\n\r\n".encode())
                    raw = await reader.read()
                finally:
                    writer.close()
        except (OSError, TimeoutError) as exc:
            return 0, str(exc) or "no answer"
        head, _, body = raw.partition(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/") else 0, body.decode(errors="replace")

    async def identity(self, member: Member) -> dict[str, Any]:
        """What /identity says."""
        status, body = await self.http(member, "/identity")
        if status != 200:
            raise RuntimeError(f"{member.name}: /identity answered {status} {body}")
        found: dict[str, Any] = json.loads(body)
        return found

    def log_lines(self, member: Member) -> list[dict[str, Any]]:
        """What its processes have logged; lines that are no JSON are left out."""
        lines = member.log_path.read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def resident_bytes(self, member: Member) -> int:
        """Resident memory of a member's process."""
        assert member.process is not None
        for line in Path(f"/proc/{member.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"{member.name} has no VmRSS")

    async def form(self, timeout_s: float = READY_WITHIN_S) -> None:
        """Until all first masters have formatted and know of each other.

        Raises:
            RuntimeError: a master ended, or it took too long.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                await form_masters(self.master_addresses, cluster_id=self.cluster_id)
                return
            except SteleError as exc:
                why = str(exc)
            for master in self.masters:
                self._must_run(master)
            if time.monotonic() > deadline:
                tails = "\n".join(m.tail() for m in self.masters)
                raise RuntimeError(f"the masters did not form: {why}\n{tails}")
            await asyncio.sleep(0.1)

    def _must_run(self, member: Member) -> None:
        if not member.running:
            code = member.process.returncode if member.process else None
            raise RuntimeError(f"{member.name} ended with {code}\n{member.tail()}")

    def _signal(self, member: Member, number: signal.Signals) -> None:
        if member.process is not None and member.process.poll() is None:
            member.process.send_signal(number)
