"""How many copies run, and whether one more may begin. One for each plan; called by planner.

A copy that begins as PRE_FOLLOWER has a slot from its intent on, until it is promoted or that takes too long. A witness has one
only while its rows are fetched: it logs and votes without.

Invariant: no more than `max_copies` have a slot, but for those that an earlier driver or policy began.
"""

from __future__ import annotations

from collections.abc import Iterable

from stele.driver.situation import Member, Situation
from stele.driver.trials import Trials
from stele.driver.view import CopyView, ReplicaView
from stele.model.config import MemberType

_MOVING = ("Starting", "Fetching", "Verifying", "Installing")


def waits_for_turn(copy: CopyView | None) -> bool:
    """Whether a witness was prepared, and told to fetch no rows yet."""
    return copy is not None and copy.state == "Waiting"


class Slots:
    """Counts what this plan begins, too. `trials` says whose promotion takes too long."""

    def __init__(self, situations: Iterable[Situation], max_copies: int, trials: Trials) -> None:
        self._max = max_copies
        self._taken = 0
        self._owed = 0
        for s in situations:
            if s.spare < 0 or not s.data_voters:
                continue  # no copy of it can go on, nor hold up those of others
            self._taken += _has_slot(s, trials)
            self._owed += sum(_lacks_rows(m) for m in s.members)

    def take(self) -> bool:
        """A slot for the rows of a witness that votes already."""
        if self._taken >= self._max:
            return False
        self._taken += 1
        self._owed = max(0, self._owed - 1)
        return True

    def begin(self) -> bool:
        """A slot for another copy: witnesses that vote and lack their rows come first, as their logs grow meanwhile."""
        if self._taken + self._owed >= self._max:
            return False
        self._taken += 1
        return True


def _has_slot(s: Situation, trials: Trials) -> bool:
    if any(_is_witness(m) and moves(m.report) for m in s.members):
        return True
    if s.intent is None or (s.joining is not None and s.joining.peer.member_type is not MemberType.NON_VOTER):
        return False
    if s.intent.witness:
        return moves(s.brought)
    return not trials.is_late(s.tablet.tablet_id, s.intent.replica_id)


def _is_witness(m: Member) -> bool:
    return m.peer.member_type is MemberType.WITNESS


def moves(report: ReplicaView | None) -> bool:
    """Whether the rows of a replica are on their way."""
    return report is not None and report.copy is not None and report.copy.state in _MOVING


def _lacks_rows(m: Member) -> bool:
    has_data = m.report is not None and m.report.has_data
    return _is_witness(m) and m.live and not has_data and not moves(m.report)
