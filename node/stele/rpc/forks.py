"""Forks of a process that has used gRPC. A child has none of its parent's threads, on which gRPC (ours, and that of Flight) goes on
relying, for a while even after all is closed: calls find nobody, scans abort. So a child is refused, with a sentence.

Invariant: a process says of itself that it was forked from one that used gRPC only if that is so.
"""

from __future__ import annotations

import os

from stele.model.errors import Rejected

_used = False
_forked = False


def use() -> None:
    """This process begins to use gRPC. Raises as `ensure_own`."""
    global _used
    ensure_own()
    _used = True


def forked() -> bool:
    """Whether this process was forked from one that had begun to use gRPC."""
    return _forked


def ensure_own() -> None:
    """Refuse a process that cannot use gRPC.

    Raises:
        Rejected: it was forked from one that did.
    """
    if _forked:
        raise Rejected(
            "this process was forked from one that has used Stele, and has none of its threads; start processes with "
            'multiprocessing.get_context("spawn") or "forkserver", or make clients after the fork only'
        )


def _in_child() -> None:
    global _forked
    _forked = _used


os.register_at_fork(after_in_child=_in_child)
