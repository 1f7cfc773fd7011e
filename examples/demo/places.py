"""Where the demo runs: a Kubernetes to apply to, a way to switch a machine off, and the operator.

Called by __main__.py. Everything else of the demo speaks to the API server and the masters alone.

Invariant: when a place is left, also by an exception or Ctrl-C, no process that it started is left, unless it was told
to keep them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

_STOP_SECONDS = 15


class LocalPlace:
    """stele_local: a one-machine Kubernetes in `folder`, with the operator as a process of its own beside it."""

    def __init__(self, folder: Path, *, keep: bool) -> None:
        self.folder = folder
        self.kubeconfig = folder / "kubeconfig"
        self.keep = keep
        self._operator: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._local("up")
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
                [
                    *(sys.executable, "-m", "stele_operator", "run"),
                    *("--kubeconfig", str(self.kubeconfig)),
                    *("--namespace", "default"),
                    *("--metrics-host", "127.0.0.1", "--metrics-port", "0"),
                    *("--identity", "the-demo's"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        (self.folder / "operator.pid").write_text(str(self._operator.pid))
        return self._operator.pid

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

    def power_off(self, machine: str, *, for_good: bool) -> None:
        """Switch a machine off; `for_good`: its disks are lost with it."""
        self._local("off", machine)
        if for_good:
            self._local("wipe", machine)

    def power_on(self, machine: str) -> None:
        """Switch a machine on again."""
        self._local("on", machine)

    def logs(self) -> str:
        """Where to look when something went wrong."""
        return str(self.folder)

    def _local(self, *words: str, check: bool = True) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "stele_local", "--folder", str(self.folder), *words],
            capture_output=True,
            text=True,
            env=dict(os.environ),
            start_new_session=True,
            check=False,
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"stele-local {' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
