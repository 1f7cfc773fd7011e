"""What a user should know, in one word and a sentence. Made by planner, tables and health; read by status.

Invariant: the first finding of a kind is always the same one for the same facts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Which condition a finding feeds. A remark makes none true: it is an event, and a word where nothing is left to do."""

    STALLED = "Stalled"
    DEGRADED = "Degraded"
    RECONCILING = "Reconciling"
    NOT_READY = "NotReady"
    REMARK = "Remark"


@dataclass(frozen=True, slots=True)
class Finding:
    """`group` names the TabletGroup it is about; empty: the cluster itself. `member`: the one of several it is about; `fate`: why
    that one does not serve. Another of these is news, another message is not."""

    kind: Kind
    reason: str
    message: str
    group: str = ""
    member: str = ""
    fate: str = ""

    @property
    def about(self) -> tuple[str, str, str, str]:
        """What it is about: the same again, or in other words, is the same finding."""
        return self.group, self.reason, self.member, self.fate


OPERATOR_OLDER = "OperatorOlder"


def overlooked(unknown: tuple[str, ...]) -> str:
    """What is to be known of fields that this operator does not know."""
    return f"this operator is older than the definitions and overlooks {', '.join(unknown)}; once it is upgraded it looks at them"
