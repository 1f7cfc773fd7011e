"""Parses `max_staleness` and `snapshot` of a read. Pure; used by reads.py.

Invariant: a read that history cannot answer is refused before any server is asked.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from stele.client import arguments
from stele.client.locations import TableInfo
from stele.client.nearby import How
from stele.model.errors import Rejected


def how_of(max_staleness: Any, snapshot: int | datetime | None, table: TableInfo) -> How | None:
    """Return how to read rows by key. None: at the leader, as they are now.

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
    """Return a staleness in microseconds.

    Raises:
        Rejected: it is no number of seconds, it is negative, or longer than the table's history.
    """
    seconds = arguments.seconds(max_staleness, "max_staleness", zero=True)
    if seconds > table.history_s:
        raise Rejected(
            f"max_staleness of {seconds:g} s: table {table.name} keeps {table.history_s:g} s of history; give at most that"
        )
    return int(seconds * 1e6)
