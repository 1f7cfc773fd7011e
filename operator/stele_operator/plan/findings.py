"""Findings: what a user should know, as a one-word reason and a message. Made by the plan, read by status.

Invariant: for the same facts the first finding of a kind is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The condition to which a finding belongs. A REMARK makes no condition true. It becomes an event, and
    the reason of the condition Reconciling while that is False.
    """

    STALLED = "Stalled"
    DEGRADED = "Degraded"
    RECONCILING = "Reconciling"
    NOT_READY = "NotReady"
    REMARK = "Remark"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a user should know. `group`: the TabletGroup that it is about; "" means the cluster
    itself. `member`: the member that it is about, if any. `fate`: why that member does not serve. A change of
    these makes a new finding; a change of the message alone does not.
    """

    kind: Kind
    reason: str
    message: str
    group: str = ""
    member: str = ""
    fate: str = ""

    @property
    def about(self) -> tuple[str, str, str, str]:
        """The subject of the finding. Two findings with the same subject are the same finding."""
        return self.group, self.reason, self.member, self.fate


OPERATOR_OLDER = "OperatorOlder"

HIBERNATING, HIBERNATED, WAKING = "Hibernating", "Hibernated", "Waking"
SLEEP = (HIBERNATING, HIBERNATED, WAKING)
"""Reasons of a cluster that serves nothing, or not everything, because somebody asked for that. They are not
alarms.
"""
PARK_WAITS, PARK_REFUSED = "ParkWaits", "ParkRefused"
"""Reasons why a node is not parked: it waits for others that are away, or a person must change the spec."""
RESTING = ("Paused", HIBERNATED)
"""Reasons that mean: nothing is under way, because what was asked for is reached."""


def overlooked(unknown: tuple[str, ...]) -> str:
    """The message about fields that this operator does not know."""
    return f"this operator is older than the definitions and ignores {', '.join(unknown)}; upgrade it to use them"
