"""Shows in a backup's status what its holds cost now. Called by errands; pure.

A backup holds history while it reads. A hold of a chain of backups stays after that, so that an incremental
backup can follow. The next backup of the chain takes it over. Invariant: what cannot be found out now stays
in the status as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stele_operator.plan.moments import seconds_of, timestamp

Json = dict[str, Any]
FIELDS = ("holds", "heldBytes", "heldUntil", "holdBroken")
_BROKEN_MAX = 500


@dataclass(frozen=True, slots=True)
class HoldSeen:
    """A hold, as the leaders of its tablets report it. `bytes`: what it keeps in all replicas together.
    `since_s`: the time from which history is kept. `broken`: why the hold no longer keeps anything; "" if it
    does.
    """

    bytes: int
    since_s: float
    until_s: float
    broken: str = ""


Seen = Mapping[tuple[str, str], HoldSeen | None]
"""Holds by cluster and name. None means that no tablet has the hold. If a hold is missing here, its state is
not known.
"""


def names_of(status: Json, progress: Json) -> list[str]:
    """Names of the holds of a backup, from the progress of its Job, otherwise from its status."""
    told = progress.get("holds")
    found = told if isinstance(told, list) else status.get("holds") or []
    return [str(name) for name in found][:2]


def with_holds(status: Json, names: list[str], cluster: str, seen: Seen, *, over: bool) -> Json:
    """The status, with what these holds cost. `over`: the backup has ended, so a hold that is gone does not
    come back.
    """
    if not names:
        return status
    if any((cluster, name) not in seen for name in names):
        return status | {"holds": names}
    rest = {word: value for word, value in status.items() if word not in FIELDS}
    there = [hold for name in names if (hold := seen[cluster, name]) is not None]
    if over and (snapshot_s := seconds_of(status.get("snapshotTime"))):
        there = [hold for hold in there if hold.since_s < snapshot_s + 1]  # else it has moved on
    if not there:
        return rest | {"heldBytes": 0} | ({} if over else {"holds": names})
    whole = [hold for hold in there if not hold.broken]
    # A hold's cost includes what a younger one keeps.
    found = rest | {"holds": names, "heldBytes": max((hold.bytes for hold in whole), default=0)}
    if whole:
        return found | {"heldUntil": timestamp(max(hold.until_s for hold in whole))}
    return found | {"holdBroken": there[0].broken[:_BROKEN_MAX]}
