"""What a user should know, in one word and a sentence. Made by planner, tables and health; read by status.

Invariant: the first finding of a kind is always the same one for the same facts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Which condition a finding feeds."""

    STALLED = "Stalled"
    DEGRADED = "Degraded"
    RECONCILING = "Reconciling"
    NOT_READY = "NotReady"


@dataclass(frozen=True, slots=True)
class Finding:
    """`group` names the TabletGroup it is about; empty: the cluster itself. `member`: the one of several it is about."""

    kind: Kind
    reason: str
    message: str
    group: str = ""
    member: str = ""
