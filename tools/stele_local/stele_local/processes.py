"""Finds and ends processes by marks in their environment. They are leftovers of a cluster, or run on a
machine that was switched off.

Reads /proc, so it needs Linux. Invariant: after `sweep` has returned, no process with the marks is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

FOLDER_VARIABLE = "STELE_LOCAL_FOLDER"  # marks every process of a cluster
MACHINE_VARIABLE = "STELE_LOCAL_MACHINE"  # and every process of a pod
_LOOK_SECONDS = 0.01


def left_over(folder: Path, machine: str = "") -> list[int]:
    """Ids of processes with the cluster's mark, except this one. If `machine` is given, only the processes of
    that machine.
    """
    marks = {f"{FOLDER_VARIABLE}={folder}".encode()}
    if machine:
        marks.add(f"{MACHINE_VARIABLE}={machine}".encode())
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # the process has ended, or belongs to another user
                continue
            if marks.issubset(variables):
                found.append(int(entry.name))
    return found


def sweep(folder: Path, machine: str = "") -> int:
    """Kill all marked processes and wait until they are gone. Returns how many there were."""
    killed: set[int] = set()
    while alive := left_over(folder, machine):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        time.sleep(_LOOK_SECONDS)
    return len(killed)
