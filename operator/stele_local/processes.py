"""Finds and ends the processes of a cluster whose owner died. Reads /proc; Linux only."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from stele_local.kubelet import FOLDER_VARIABLE


def left_over(folder: Path) -> list[int]:
    """Process ids that carry the cluster's mark in their environment, ours excepted."""
    mark = f"{FOLDER_VARIABLE}={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # gone meanwhile, or another user's
                continue
            if mark in variables:
                found.append(int(entry.name))
    return found


def sweep(folder: Path) -> int:
    """Kills them all; returns how many there were."""
    killed: set[int] = set()
    while alive := [pid for pid in left_over(folder) if pid not in killed]:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    return len(killed)
