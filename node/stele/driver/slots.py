"""Counts the running copies, and decides whether one more may begin. One object for each plan; called by
planner.

A copy for a PRE_FOLLOWER holds a slot from its intent until its promotion, or until that takes too long. A
witness holds one only while its rows are fetched, because it logs and votes without them.

A move of a healthy replica holds one too, and moves may use only half of the slots.

Invariant: at most `max_copies` copies hold a slot, plus those that an earlier driver or policy began.
"""

from __future__ import annotations

from collections.abc import Iterable

from stele.driver.policy import Policy
from stele.driver.situation import Member, Situation
from stele.driver.trials import Trials
from stele.driver.view import CopyView, ReplicaView
from stele.model.config import MemberType

_MOVING = ("Starting", "Fetching", "Verifying", "Installing")


def waits_for_turn(copy: CopyView | None) -> bool:
    """Whether a witness is prepared, but has no order to fetch its rows yet."""
    return copy is not None and copy.state == "Waiting"


class Slots:
    """Counts the copies that run and those that this plan begins. `trials`: which promotions take too
    long."""

    def __init__(self, situations: Iterable[Situation], policy: Policy, trials: Trials) -> None:
        self._max = policy.max_copies
        self._max_moves = policy.max_moves
        self._moves = 0
        self._taken = 0
        self._owed = 0
        for s in situations:
            if s.spare < 0 or not s.data_voters:
                continue  # its copies stand still without a majority, so they hold no slot
            takes = _has_slot(s, trials)
            self._taken += takes
            self._moves += takes and s.intent is not None and s.intent.moves
            self._owed += sum(_lacks_rows(m) for m in s.members)

    def take(self) -> bool:
        """A slot to fetch the rows of a witness that votes already."""
        if self._taken >= self._max:
            return False
        self._taken += 1
        self._owed = max(0, self._owed - 1)
        return True

    def begin(self) -> bool:
        """A slot for a new copy. Voting witnesses without their rows go first, because their logs grow
        meanwhile."""
        if self._taken + self._owed >= self._max:
            return False
        self._taken += 1
        return True

    @property
    def can_move(self) -> bool:
        """Whether there is a slot for one more move of a healthy replica."""
        return self._moves < self._max_moves and self._taken + self._owed < self._max

    def begin_move(self) -> bool:
        """A slot for the copy of a move."""
        if not self.can_move:
            return False
        self._moves += 1
        self._taken += 1
        return True


def _has_slot(s: Situation, trials: Trials) -> bool:
    if any((_is_witness(m) or m.rowless) and fetches_rows(m.report) for m in s.members):
        return True
    if s.intent is None or (s.joining is not None and s.joining.peer.member_type is not MemberType.NON_VOTER):
        return False
    if s.intent.witness:
        return fetches_rows(s.target_report)
    return not trials.is_late(s.tablet.tablet_id, s.intent.replica_id)


def _is_witness(m: Member) -> bool:
    return m.peer.member_type is MemberType.WITNESS


def fetches_rows(report: ReplicaView | None) -> bool:
    """Whether the rows of a replica are being copied."""
    return report is not None and report.copy is not None and report.copy.state in _MOVING


def _lacks_rows(m: Member) -> bool:
    return m.rowless and m.live and not fetches_rows(m.report)
