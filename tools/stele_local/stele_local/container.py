"""Runs one container as a process group: starts it, probes it, restarts it with back-off, and stops it in
time.

Owns: the processes and the container's status. Reports every change to its pod through `on_change`.
Invariant: after `run` has ended or `kill` was called, no process of the group is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import structlog

from stele_local import probes
from stele_local.objects import now
from stele_local.podspec import NotYet

Json = dict[str, Any]
log = structlog.get_logger("stele_local.container")
LAUNCH = str(Path(__file__).with_name("launch.py"))
MESSAGE_BYTES_MAX = 4096
RETRY_SECONDS = 0.5  # pause between two checks for a missing volume or config map
Tell = Callable[[str, str, str], None]  # type, reason, message of an event


@dataclass(frozen=True, slots=True)
class Program:
    """What to run. `command` is looked up on the PATH of `environment`."""

    command: list[str]
    environment: dict[str, str]
    folder: Path


class Process(Protocol):
    """The operations on a process that a container needs. `subprocess.Popen` has them."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


Start = Callable[[Program, int], Process]
"""Starts a program whose output goes to this file descriptor. The program leads a session of its own, and
dies with this process.
"""


def start_process(program: Program, output: int) -> Process:
    """Start the program through launch.py, so that it dies with this process."""
    # Not asyncio's: in Python 3.11 a cancellation during the start of a process can hang for ever.
    return subprocess.Popen(
        [sys.executable, "-S", "-E", LAUNCH, str(os.getpid()), *program.command],
        stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=program.folder, env=program.environment,
        start_new_session=True,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Backoff:
    """The pause before a restart. There is none before the first restart; then the pause doubles. After a run
    of `reset_seconds` the count begins anew.
    """

    first_seconds: float = 1.0
    most_seconds: float = 20.0
    reset_seconds: float = 30.0

    def pause(self, crashes: int) -> float:
        return 0.0 if crashes <= 1 else min(self.most_seconds, self.first_seconds * 2 ** (crashes - 2))


class Container:
    """Runs the container `spec` of a pod until `stop` or `kill`."""

    def __init__(
        self,
        spec: Json,
        prepare: Callable[[], Program],
        address: str,
        logs: Path,
        restart_policy: str,
        grace_seconds: float,
        backoff: Backoff,
        start: Start,
        restarts: int,
        tell: Tell,
        on_change: Callable[[], None],
    ) -> None:
        self.spec, self._prepare, self._address, self._logs = spec, prepare, address, logs
        self._policy, self._grace_seconds, self._backoff = restart_policy, grace_seconds, backoff
        self._start = start
        self.restarts, self._tell, self._on_change = restarts, tell, on_change
        self.state: Json = {"waiting": {"reason": "ContainerCreating"}}
        self.last_state: Json = {}
        self.ready = self.started = False
        self.exit_code: int | None = None  # of a container that will not run again
        self._process: Process | None = None
        self._stopping = asyncio.Event()
        self._id = ""

    def log_path(self, previous: bool = False) -> Path:
        return self._logs / f"{self.spec['name']}-{self.restarts - previous}.log"

    def status(self) -> Json:
        status: Json = {
            "name": self.spec["name"], "image": self.spec.get("image", ""), "imageID": "", "ready": self.ready,
            "started": self.started, "restartCount": self.restarts, "state": self.state, "lastState": self.last_state,
        }  # fmt: skip
        if self._id:
            status["containerID"] = self._id
        return status

    async def run(self) -> None:
        """Run until the container has ended for good, by its restart policy or because of `stop`."""
        crashes = code = 0
        try:
            while True:
                program = await self._prepared()
                if program is None:
                    self.exit_code = code
                    return
                begun = asyncio.get_running_loop().time()
                code = await self._once(program)
                finished = self._policy == "Never" or (self._policy == "OnFailure" and code == 0)
                if self._stopping.is_set() or finished:
                    self.exit_code = code
                    return
                ran = asyncio.get_running_loop().time() - begun
                crashes = 1 if ran >= self._backoff.reset_seconds else crashes + 1
                self.last_state = self.state
                await self._pause(self._backoff.pause(crashes))
                if self._stopping.is_set():
                    self.state, self.exit_code = self.last_state, code
                    return
                self.restarts += 1
        finally:
            self.kill()
            self._on_change()

    async def _pause(self, seconds: float) -> None:
        if not seconds:
            return
        told = f"back-off {seconds:g}s restarting failed container={self.spec['name']}"
        self.state = {"waiting": {"reason": "CrashLoopBackOff", "message": told}}
        self._tell("Warning", "BackOff", told)
        self._on_change()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _prepared(self) -> Program | None:
        """Wait until its volumes and config maps exist, also before a restart. Returns the program, or None
        if the container must stop.
        """
        while not self._stopping.is_set():
            try:
                return self._prepare()
            except NotYet as why:
                if self.state != why.state:
                    self.state = why.state
                    self._tell("Warning", "Failed", why.message)
                    self._on_change()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_SECONDS):
                    await self._stopping.wait()
        return None

    async def _once(self, program: Program) -> int:
        message_path = program.folder / "termination-log"
        message_path.write_text("")
        self._logs.mkdir(parents=True, exist_ok=True)
        environment = {**program.environment, "STELE_TERMINATION_LOG": str(message_path)}
        with self.log_path().open("ab") as output:
            process = self._start(replace(program, environment=environment), output.fileno())
        self._process, started_at = process, now()
        self._id = f"process://{process.pid}"
        self.state = {"running": {"startedAt": started_at}}
        self.started = "startupProbe" not in self.spec
        self.ready = self.started and "readinessProbe" not in self.spec
        self._tell("Normal", "Started", f"Started container {self.spec['name']}")
        self._on_change()
        try:
            code = await self._attend(process)
        finally:  # also when the machine is switched off: no process of the group may be left
            self.kill()
            await _exit_code(process)
            self._process = None
        self.ready = self.started = False
        self.state = {"terminated": self._ending(code, started_at, message_path)}
        log.info("container ended", container=self.spec["name"], code=code, restarts=self.restarts)
        self._on_change()
        return code

    def _ending(self, code: int, started_at: str, message_path: Path) -> Json:
        ending: Json = {
            "exitCode": code, "reason": "Completed" if code == 0 else "Error", "startedAt": started_at,
            "finishedAt": now(), "containerID": self._id,
        }  # fmt: skip
        message = message_path.read_bytes()[:MESSAGE_BYTES_MAX].decode(errors="replace")
        if not message and code and self.spec["terminationMessagePolicy"] == "FallbackToLogsOnError":
            message = self.log_path().read_bytes()[-2048:].decode(errors="replace")
        return ending | ({"message": message} if message else {})

    async def _attend(self, process: Process) -> int:
        """Probe the process and wait for its end. Returns the exit code: 128 + signal if it was killed."""
        ended = asyncio.create_task(_exit_code(process))
        stopped = asyncio.create_task(self._stopping.wait())
        sick = asyncio.create_task(self._probe())
        try:
            await asyncio.wait({ended, stopped, sick}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                self.ready = False
                self._on_change()
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._grace_seconds):
                        await asyncio.shield(ended)
                self.kill()
            code = await ended
            return code if code >= 0 else 128 - code
        finally:
            for task in (ended, stopped, sick):
                task.cancel()

    async def _probe(self) -> None:
        """Keep `started` and `ready` up to date. Returns when the container must be restarted."""
        if startup := self.spec.get("startupProbe"):
            async for holds, why in probes.verdicts(startup, self.spec, self._address):
                if holds:
                    break
                self._unhealthy("Startup", why)
                return
            self.started = True
            self.ready = "readinessProbe" not in self.spec
            self._on_change()
        readiness = asyncio.create_task(self._watch_readiness())
        try:
            if liveness := self.spec.get("livenessProbe"):
                async for holds, why in probes.verdicts(liveness, self.spec, self._address):
                    if not holds:
                        self._unhealthy("Liveness", why)
                        return
            await asyncio.Event().wait()
        finally:
            readiness.cancel()

    async def _watch_readiness(self) -> None:
        probe = self.spec.get("readinessProbe")
        if probe is None:
            return
        async for holds, why in probes.verdicts(probe, self.spec, self._address):
            if not holds and self.ready:
                self._tell("Warning", "Unhealthy", f"Readiness probe failed: {why}")
            if holds != self.ready and not self._stopping.is_set():
                self.ready = holds
                self._on_change()

    def _unhealthy(self, word: str, why: str) -> None:
        self._tell("Warning", "Unhealthy", f"{word} probe failed: {why}")
        self._tell(
            "Normal",
            "Killing",
            f"Container {self.spec['name']} failed {word.lower()} probe, will be restarted",
        )

    def stop(self, grace_seconds: float) -> None:
        """Ask the container to end: SIGTERM now, and SIGKILL after `grace_seconds`."""
        self._grace_seconds = grace_seconds
        self._stopping.set()

    def kill(self) -> None:
        """Send SIGKILL to the whole process group at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


async def _exit_code(process: Process) -> int:
    """Wait until the process has ended. Returns its exit code, or minus the number of the signal that ended
    it.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(process.pid) if process.poll() is None else None
    if descriptor is not None:
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
    return process.wait()


def base_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of every process. This interpreter's programs come first on the PATH. Secrets
    of stele_local's own environment are left out.
    """
    kept = {
        key: os.environ[key] for key in ("LANG", "LC_ALL", "TZ", "TMPDIR", "JAVA_HOME") if key in os.environ
    }
    # not resolved: the folder of a virtual environment's python holds its scripts
    programs = str(Path(sys.executable).parent)
    path = os.pathsep.join([programs, os.environ.get("PATH", "/usr/bin:/bin")])
    return {**kept, "PATH": path, "PYTHONUNBUFFERED": "1", **extra}
