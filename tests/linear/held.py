"""Judges who held a name, and when: never two at once. Imports nothing of the client."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hold:
    """From when to when a holder took itself for the only one, by a clock that all share."""

    holder: str
    begun: float
    ended: float


def faults_of(holds: Iterable[Hold]) -> list[str]:
    """Each pair of holds of different holders that overlap."""
    faults = list[str]()
    latest = dict[str, Hold]()  # by holder: that which ended last
    for hold in sorted(holds, key=lambda each: each.begun):
        faults += [
            f"{hold.holder} held it from {hold.begun:.3f} on, and {other.holder} until {other.ended:.3f}"
            for name, other in latest.items()
            if name != hold.holder and other.ended > hold.begun
        ]
        before = latest.get(hold.holder)
        if before is None or before.ended < hold.ended:
            latest[hold.holder] = hold
    return faults
