"""Finds and ends processes by the marks in their environment: a cluster's whose owner died, a machine's that lost its power.

Reads /proc; Linux only. Invariant: when `sweep` has returned, no process that carries the marks is left."""

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
    """Process ids that carry the cluster's mark in their environment, ours excepted; only those of `machine`, if given."""
    marks = {f"{FOLDER_VARIABLE}={folder}".encode()}
    if machine:
        marks.add(f"{MACHINE_VARIABLE}={machine}".encode())
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # gone meanwhile, or another user's
                continue
            if marks.issubset(variables):
                found.append(int(entry.name))
    return found


def sweep(folder: Path, machine: str = "") -> int:
    """Kills them all and waits until they are gone; returns how many there were."""
    killed: set[int] = set()
    while alive := left_over(folder, machine):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        time.sleep(_LOOK_SECONDS)
    return len(killed)
