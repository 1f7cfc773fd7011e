"""Finds and kills the processes of a cluster that runs in a folder. Touches no other process.

Invariant: a process is one of the cluster's only if its command line names the cluster's folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Victim:
    """One `stele node run` or `stele master run`."""

    pid: int
    role: str
    node_id: str


def find(folder: Path) -> list[Victim]:
    """All node and master processes of the cluster in `folder`, in order of node id."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if not any(str(folder) in word for word in words) or "run" not in words:
                continue
            role = words[words.index("run") - 1]
            if role in ("node", "master") and "--node-id" in words:
                found.append(Victim(int(entry.name), role, words[words.index("--node-id") + 1]))
    return sorted(found, key=lambda victim: (victim.role, victim.node_id, victim.pid))


def kill(victim: Victim) -> bool:
    """Kill -9; false if it was gone already."""
    try:
        os.kill(victim.pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
