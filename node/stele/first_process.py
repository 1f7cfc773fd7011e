"""Lets the first process of a container end when it is told to. Called by programs before heavy imports; imports nothing
of ours.

The kernel gives SIGTERM to the first process of a container only if it has a handler. Otherwise Kubernetes waits for
the whole grace period, and kills it. Invariant: the signal handlers of a process that is not the first stay as they were.
"""

from __future__ import annotations

import os
import signal

_EXIT_TERMINATED = 128 + signal.SIGTERM


def end_when_told() -> None:
    """End at SIGTERM as any other process does by default, until the program sets a handler of its own."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(_EXIT_TERMINATED))
