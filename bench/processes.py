"""Server processes of other systems. Called by etcd_side and kudu_side, from the main thread.

Invariant: no server outlives the bench, however that ends: Linux kills the child when the thread that started
it ends. A Ctrl-C reaches only the bench, which stops them by their ids.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_LAUNCH = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"
    "os.getppid() == int(sys.argv[1]) or sys.exit(1)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)


class Servers:
    """Processes by name. The output of each goes into `<directory>/<name>.out`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a process, the first time or again."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with self._out(name).open("ab") as out:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """Kill -9, and wait for the end."""
        self._processes[name].kill()
        self._processes[name].wait()

    def stop(self) -> None:
        """Stop all processes."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()

    def ended(self) -> str:
        """The process that ended by itself, with its last line; empty if all run."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                said = self._out(name).read_text(errors="replace").splitlines()
                return f"{name} ended with {process.returncode}: {said[-1] if said else 'it said nothing'}"
        return ""

    def resident_bytes(self, name: str) -> int:
        """The resident memory of one process."""
        return resident_bytes(self._processes[name].pid)

    def _out(self, name: str) -> Path:
        return self._directory / f"{name}.out"


def resident_bytes(pid: int) -> int:
    """Resident memory of a process.

    Raises:
        RuntimeError: the process has ended.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no resident memory: it has ended")


def own_and_mapped(pid: int) -> tuple[int, int]:
    """Bytes of a process in memory: its own, and of files and libraries that it maps, which processes share.

    Raises:
        OSError: the process has ended.
    """
    found = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    own, mapped = (int(found[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
    return own, mapped
