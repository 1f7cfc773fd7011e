"""How old a read may be, as people say it. Pure; used by reads.py.

Invariant: a read that history cannot answer is refused before any server is asked.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from stele.client import arguments
from stele.client.locations import TableInfo
from stele.client.nearby import How
from stele.model.clock import from_physical_us
from stele.model.errors import Rejected
from stele.model.ids import HybridTime

CLOCKS_APART_US = 2_500_000
"""A scan reads so much later than it must, as a timestamp may lie so far ahead of the right time. A leader whose clock is off by
more than 2 s assigns none, and half a second is for snapshots of the future that it has served."""


def how_of(max_staleness: Any, snapshot: int | datetime | None, table: TableInfo) -> How | None:
    """How to read rows by key. None: through the leader, as they are now.

    Raises:
        Rejected: both are given, or one does not fit.
    """
    at = arguments.snapshot(snapshot)
    if max_staleness is None:
        return How(None, at) if at else None
    if snapshot is not None:
        raise Rejected("a read has either a snapshot or max_staleness; give one of them")
    return How(staleness_us(max_staleness, table))


def staleness_us(max_staleness: Any, table: TableInfo) -> int:
    """A staleness in microseconds.

    Raises:
        Rejected: it is no number of seconds, it is negative, or longer than the table's history.
    """
    seconds = arguments.seconds(max_staleness, "max_staleness", zero=True)
    if seconds > table.history_s:
        raise Rejected(
            f"max_staleness of {seconds:g} s: table {table.name} keeps {table.history_s:g} s of history; give at most that"
        )
    return int(seconds * 1e6)


def snapshot_for(max_staleness_us: int, now: HybridTime, seen: int) -> int:
    """The snapshot of a scan: the oldest one that holds all that was acknowledged `max_staleness_us` before `now`.

    It holds what this client has `seen`, too.
    """
    late_us = max_staleness_us - CLOCKS_APART_US
    if late_us <= 0:
        return int(now)
    return max(int(now) - int(from_physical_us(late_us)), seen)
