"""Detects forks of a process that has used gRPC. A forked child has none of its parent's threads.

gRPC, also that of Flight, relies on those threads, even for a while after everything is closed. In a child,
calls would hang and scans abort. So a child is refused with a message. Invariant: a process counts as forked
only if its parent had used gRPC.
"""

from __future__ import annotations

import os

from stele.model.errors import Rejected

_used = False
_forked = False


def use() -> None:
    """Record that this process begins to use gRPC. Raises what `ensure_own` raises."""
    global _used
    ensure_own()
    _used = True


def forked() -> bool:
    """Whether this process was forked from one that had begun to use gRPC."""
    return _forked


def ensure_own() -> None:
    """Refuse a process that cannot use gRPC.

    Raises:
        Rejected: it was forked from one that used gRPC.
    """
    if _forked:
        raise Rejected(
            "this process was forked from one that used Stele, and lacks its threads; start processes with "
            'multiprocessing.get_context("spawn") or "forkserver", or create clients only after the fork'
        )


def _in_child() -> None:
    global _forked
    _forked = _used


os.register_at_fork(after_in_child=_in_child)
