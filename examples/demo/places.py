"""Where the demo runs: a Kubernetes to apply to, a way to switch a machine off, the operator, and the programs.

Called by __main__.py. `Place` is what the demo needs of one; LocalPlace is stele_local, KubePlace a real cluster.

Invariant: when a place is left, also by an exception or Ctrl-C, no process that it started is left, unless it was told
to keep them.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from examples.demo.health import Checker
from examples.demo.kube import Kube
from examples.demo.outside import nothing, watched
from stele_local.folder import as_called, kept, owner_of

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = "flights"
MASTER_PORT = 7051
_STOP_SECONDS = 15
_LOCAL_SECONDS = 180
"""A bound for one command of stele-local, not what it takes."""


class Program(Protocol):
    """One of the demo's programs, running until it is told to stop."""

    def stop(self, seconds: float) -> str:
        """Ask it to stop and wait; returns what it printed.

        Raises:
            RuntimeError: it failed, or did not stop in time.
        """
        ...

    def kill(self) -> None:
        """Away with it, if it still runs."""
        ...


class Health(Protocol):
    """Whether the cluster is whole again, judged from the masters' view. A context manager."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def healed(self, lost_machine: str) -> bool:
        """Whether every tablet has all its voters on machines other than this one."""
        ...

    def summary(self) -> str:
        """What was seen last, in a few words."""
        ...


class Place(Protocol):
    """What the demo needs of a place."""

    title: str
    patience: float
    folder: Path
    keep: bool

    @property
    def kube(self) -> Kube:
        """The API server and namespace to apply to."""
        ...

    def set_up(self, kube: Kube, say: Callable[[str], None]) -> None:
        """The CustomResourceDefinitions and the operator."""
        ...

    def operator_alive(self) -> bool:
        """False if the operator has ended for good."""
        ...

    def victim(self, candidates: list[str]) -> str:
        """Which of these machines to lose."""
        ...

    def power_off(self, machine: str, meanwhile: Callable[[], None] = nothing) -> None:
        """Switch a machine off. `meanwhile` is called again and again until it is."""
        ...

    def wipe(self, machine: str, meanwhile: Callable[[], None] = nothing) -> None:
        """Lose the disks of a machine that is off."""
        ...

    def run(
        self,
        program: str,
        *arguments: str,
        seconds: float,
        say: Callable[[str], None],
        meanwhile: Callable[[], None],
    ) -> str:
        """Run one of the demo's programs to its end; returns what it printed. `say` takes what it tells on the way,
        `meanwhile` is called again and again.

        Raises:
            RuntimeError: it failed; the message says where to look.
        """
        ...

    def shows_bar(self, program: str) -> bool:
        """Whether a program draws on the terminal while it runs, so that nobody else may."""
        ...

    def begin(self, program: str, *arguments: str) -> Program:
        """Start one of the demo's programs."""
        ...

    def checker(self, lost_machine: str) -> Health:
        """Whether all is whole again without this machine."""
        ...

    def logs(self) -> str:
        """Where to look when something went wrong."""
        ...

    def lines_to_try(self) -> str:
        """For one who kept it running."""
        ...


class LocalProgram:
    """A process beside the demo, its output in a file."""

    def __init__(self, words: list[str], output: Path) -> None:
        self._output = output
        with open(output, "wb") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log)

    def stop(self, seconds: float) -> str:
        """As Program.stop."""
        self._process.terminate()
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"it did not stop within {seconds:.0f} s: see {self._output}") from None
        if code != 0:
            raise RuntimeError(f"it failed with {code}: see {self._output}")
        return self._output.read_text()

    def kill(self) -> None:
        """As Program.kill."""
        self._process.kill()
        self._process.wait()


class LocalPlace:
    """stele_local: a one-machine Kubernetes in `folder`, with the operator as a process of its own beside it."""

    title = "a Kubernetes of five machines on this one, and the operator"
    patience = 1.0

    def __init__(self, folder: Path, *, keep: bool) -> None:
        self.folder = folder
        self.kubeconfig = folder / "kubeconfig"
        self.keep = keep
        self._ours = not folder.exists() or not any(folder.iterdir())
        self._operator: subprocess.Popen[bytes] | None = None
        self._off = ""

    @property
    def kube(self) -> Kube:
        """Its API server; after `up`."""
        return Kube(self.kubeconfig, "default")

    def set_up(self, kube: Kube, say: Callable[[str], None]) -> None:
        """The operator as a process, the definitions from crds/."""
        pid = self.start_operator()
        say(f"operator runs as process {pid}; logs in {self.logs()}")
        kube.apply_crds(ROOT / "crds")

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        if owner_of(self.folder) is not None or kept(self.folder) is not None:
            remedy = f"remove it with `{as_called(self.folder)} down --wipe`, or give another --folder"
            raise RuntimeError(
                f"{self.folder} holds a cluster already, and the demo begins with a new one; {remedy}"
            )
        try:
            self._local("up")
        except RuntimeError:  # it has left nothing
            raise
        except BaseException:
            self._local("down", check=False)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.keep and error is None:
            return
        # A second Ctrl-C must not stop the stopping.
        old = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self.stop_operator()
            self._local("down", check=False)
        finally:
            signal.signal(signal.SIGINT, old)

    def start_operator(self) -> int:
        """Start the operator with the place's kubeconfig; returns its process id."""
        with open(self.folder / "operator.log", "ab") as log:
            self._operator = subprocess.Popen(
                self._operator_command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        (self.folder / "operator.pid").write_text(str(self._operator.pid))
        return self._operator.pid

    def _operator_command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "stele_operator", "run"),
            *("--kubeconfig", str(self.kubeconfig)),
            *("--namespace", "default"),
            *("--metrics-host", "127.0.0.1", "--metrics-port", "0"),
            *("--identity", "the-demo's"),
        ]

    def stop_operator(self) -> None:
        """Ask the operator to stop and wait until it is gone."""
        process = self._operator
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill_operator(self) -> None:
        """Kill -9 of the operator."""
        if self._operator is not None:
            self._operator.kill()
            self._operator.wait()

    def operator_alive(self) -> bool:
        """Whether the operator that was started still runs."""
        return self._operator is not None and self._operator.poll() is None

    def power_off(self, machine: str, meanwhile: Callable[[], None] = nothing) -> None:
        """Kill all its processes."""
        self._off = machine
        self._local("off", machine, meanwhile=meanwhile)

    def wipe(self, machine: str, meanwhile: Callable[[], None] = nothing) -> None:
        """Remove its volumes."""
        self._local("wipe", machine, meanwhile=meanwhile)

    def power_on(self, machine: str) -> None:
        """Switch a machine on again."""
        self._local("on", machine)

    def victim(self, candidates: list[str]) -> str:
        """The first."""
        return candidates[0]

    def shows_bar(self, program: str) -> bool:
        """`load` does, where there is a terminal."""
        return program == "load" and sys.stdout.isatty()

    def run(
        self,
        program: str,
        *arguments: str,
        seconds: float,
        say: Callable[[str], None],
        meanwhile: Callable[[], None],
    ) -> str:
        """As a process; the progress bar of `load` goes to the terminal, if there is one."""
        log = self.folder / f"{program}.log"
        words = command(program, "--masters", master_addresses(self.kube), *arguments)
        interactive = self.shows_bar(program)
        with open(log, "wb") as errors, open(log, "rb") as told:

            def look() -> None:
                for line in told.read().decode(errors="replace").splitlines():
                    if line.startswith(f"{program}: "):
                        say(f"{program:<7} {line.removeprefix(f'{program}: ')}")
                meanwhile()

            try:
                streams = {"stdout": subprocess.PIPE, "stderr": None if interactive else errors}
                done = watched(words, seconds, look, **streams)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"{program} takes longer than {seconds:.0f} s; see {log}") from None
            look()
        if done.returncode != 0:
            tail = log.read_text().strip().splitlines()[-1:] or ["no message"]
            raise RuntimeError(f"{program} failed with {done.returncode}: {tail[0]}; see {log}")
        return str(done.stdout)

    def begin(self, program: str, *arguments: str) -> LocalProgram:
        """As a process."""
        words = command(program, "--masters", master_addresses(self.kube), *arguments)
        return LocalProgram(words, self.folder / f"{program}.log")

    def checker(self, lost_machine: str) -> Checker:
        """In a thread of the demo."""
        kube = self.kube
        return Checker(lambda: master_addresses(kube))

    def logs(self) -> str:
        """Where to look when something went wrong."""
        return str(self.folder)

    def lines_to_try(self) -> str:
        """For one who kept it running."""
        bin_folder = Path(sys.prefix) / "bin"
        pid, log = self.folder / "operator.pid", self.folder / "operator.log"
        stop = f"kill $(cat {pid}); {bin_folder}/stele-local --folder {self.folder} down"
        heading = "To stop it" + (
            " and remove its data" if self._ours else f"; its data stay in {self.folder}"
        )
        return f"""
  export PATH={bin_folder}:$PATH KUBECONFIG={self.kubeconfig} STELE_MASTERS={master_addresses(self.kube)}
  stele ksck
  stele table list
  stele table scan flights --columns carrier,flight,arr_delay --limit 5
  kubectl get tc,tg          # where a kubectl is at hand
  stele-local --folder {self.folder} status
  stele-local --folder {self.folder} on {self._off or "n1"}      # power for the lost machine, empty: the waiting node starts there
  stele-local --folder {self.folder} off n4     # lose another

STELE_MASTERS has the addresses of now: once those masters were replaced, nobody answers there. By name it works always:
  stele-local --folder {self.folder} exec stele --masters {CLUSTER}-masters:{MASTER_PORT} ksck

The operator is process {pid.read_text()}. Nothing starts it again if it ends, as a Deployment would; this does:
  {shlex.join(self._operator_command())} >> {log} 2>&1 & echo $! > {pid}
Its metrics and probes listen on a free port of 127.0.0.1, which the last such line names:
  grep "serving probes and metrics" {log}

{heading}:
  {stop}{f"; rm -r {self.folder}" if self._ours else ""}
"""

    def _local(self, *words: str, check: bool = True, meanwhile: Callable[[], None] = nothing) -> None:
        done = watched(
            [sys.executable, "-m", "stele_local", "--folder", str(self.folder), *words],
            _LOCAL_SECONDS,
            meanwhile,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(os.environ),
            start_new_session=True,
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"stele-local {' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")


def master_addresses(kube: Kube) -> str:
    """host:port of the cluster's masters, separated by commas."""
    pods = kube.pods(f"stele.dev/cluster={CLUSTER},stele.dev/role=master")
    return ",".join(f"{p.status.pod_ip}:{MASTER_PORT}" for p in pods if p.status.pod_ip)


def command(program: str, *arguments: str) -> list[str]:
    """The command line of one of the demo's programs."""
    return [sys.executable, "-m", "examples.demo.tools", program, *arguments]
