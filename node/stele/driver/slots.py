"""Counts the running copies, and decides whether one more may begin. One object for each plan; called by
planner.

A copy for a PRE_FOLLOWER holds a slot from its intent until its promotion, or until that takes too long. A
witness holds a slot only while its rows are fetched, because it logs and votes without them.

A move of a healthy replica holds a slot too. Moves may use only half of the slots.

Invariant: at most `max_copies` copies hold a slot, plus those that an earlier driver or policy began.
"""

from __future__ import annotations

from collections.abc import Iterable

from stele.driver.kept_steps import Asked
from stele.driver.policy import Policy
from stele.driver.situation import Member, Situation
from stele.driver.trials import NO_TRIALS, Trials
from stele.driver.view import CopyView, ReplicaView
from stele.model.config import MemberType

_MOVING = ("Starting", "Fetching", "Verifying", "Installing")


def waits_for_turn(copy: CopyView | None) -> bool:
    """Whether a witness is prepared, but has no order to fetch its rows yet."""
    return copy is not None and copy.state == "Waiting"


class Uses:
    """How many slots tablets use: `taken` in all, `moves` of them for moves. `owed`: how many witnesses still
    need one.
    """

    def __init__(self) -> None:
        self.taken = self.moves = self.owed = 0

    def count(self, s: Situation, number: int, trials: Trials = NO_TRIALS) -> None:
        """Add a tablet (`number` 1), or take it out again (-1). `trials`: which promotions take too long."""
        if s.spare < 0 or not s.data_voters:
            return  # its copies stand still without a majority, so they hold no slot
        takes = _has_slot(s, trials)
        self.taken += number * takes
        self.moves += number * (takes and s.intent is not None and s.intent.moves)
        self.owed += number * sum(_lacks_rows(m) for m in s.members)


TAKE, BEGIN, MOVE = "take", "begin", "move"
"""Kinds of slots: for a witness that votes already, for a new copy, for a move of a healthy replica."""


class Slots:
    """Counts the copies that run and those that this plan begins.

    `uses`: the slots of all tablets, as if no promotion took too long. `late`: the tablets whose promotion
    does, by `trials`.
    """

    def __init__(
        self,
        uses: Uses,
        policy: Policy,
        trials: Trials = NO_TRIALS,
        late: Iterable[Situation] = (),
        asked: Asked | None = None,
    ) -> None:
        self._max = policy.max_copies
        self._max_moves = policy.max_moves
        self._asked = asked or Asked()
        others = Uses()
        for s in late:
            others.count(s, -1)
            others.count(s, 1, trials)
        self._taken = uses.taken + others.taken
        self._moves = uses.moves + others.moves
        self._owed = uses.owed + others.owed

    def refuses(self, kind: str) -> bool:
        """Whether there is no slot of this kind."""
        if kind == TAKE:
            return self._taken >= self._max
        full = self._taken + self._owed >= self._max
        return full or (kind == MOVE and self._moves >= self._max_moves)

    def take(self) -> bool:
        """Take a slot to fetch the rows of a witness that votes already. Returns whether there was one."""
        if not self._gives(TAKE):
            return False
        self._owed = max(0, self._owed - 1)
        return True

    def begin(self) -> bool:
        """Take a slot for a new copy. Returns whether there was one.

        Voting witnesses without their rows go first, because their logs grow meanwhile.
        """
        return self._gives(BEGIN)

    @property
    def can_move(self) -> bool:
        """Whether there is a slot for one more move of a healthy replica."""
        return not self.refuses(MOVE)

    def begin_move(self) -> bool:
        """Take a slot for the copy of a move. Returns whether there was one."""
        if not self._gives(MOVE):
            return False
        self._moves += 1
        return True

    def _gives(self, kind: str) -> bool:
        if self.refuses(kind):
            self._asked.refused += (kind,)
            return False
        self._asked.others = True
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
