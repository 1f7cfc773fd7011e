"""The incarnation of a tablet: which of its histories a replica has. It is 0 until the tablet's first recovery after
a lost majority.

It has two parts: how many recoveries led to the history, and a random mark of the last one. A recovery adds one to the
count that its author knows. The masters know the catalog's count, `stele local cmeta rewrite` that of one volume. So
two authors may reach the same count, and the mark keeps their histories apart. Imports nothing of ours.

Invariant: no two recoveries give the same incarnation. A history is replaced only by one with
more recoveries. Of two with the same number, the first stays.
"""

from __future__ import annotations

import secrets

MARK_BITS = 40
"""With this many bits, two independent recoveries have the same mark once in 10^12 times. For up to 8,191
recoveries the incarnation stays below 2^53, up to which JSON readers hold whole numbers exactly."""
RECOVERIES_AHEAD_MAX = 64
"""How many recoveries an incarnation may be ahead of the replica that hears of it. An administrator asks for
each of them."""

Version = tuple[int, int]
"""(incarnation, log index) of a committed configuration."""


def recoveries(incarnation: int) -> int:
    """How many recoveries led to this history."""
    return incarnation >> MARK_BITS


def raised(incarnation: int, mark: int | None = None) -> int:
    """The incarnation after one more recovery. `mark`: by default a random one."""
    chosen = secrets.randbits(MARK_BITS) if mark is None else mark
    return ((recoveries(incarnation) + 1) << MARK_BITS) | chosen


def is_given_up(told: int, known: int) -> bool:
    """Whether `told` is a history that was given up: not `known`, and with as many recoveries or fewer."""
    return told != known and recoveries(told) <= recoveries(known)


def is_newer(told: Version, known: Version) -> bool:
    """Whether the first version is newer: of the same history and later, or of a history with more recoveries."""
    if told[0] == known[0]:
        return told[1] > known[1]
    return not is_given_up(told[0], known[0])


def within_reach(told: int, own: int) -> bool:
    """Whether `told` is at most RECOVERIES_AHEAD_MAX ahead of `own`, and so believable."""
    return recoveries(told) <= recoveries(own) + RECOVERIES_AHEAD_MAX


def shown(incarnation: int) -> str:
    """Return the incarnation as text: the number of recoveries, then the mark in hex, such as `1-09c35b02f7`. An
    incarnation of 0 is `0`."""
    if not incarnation:
        return "0"
    return f"{recoveries(incarnation)}-{incarnation & ((1 << MARK_BITS) - 1):010x}"
