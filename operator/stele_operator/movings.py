"""Summarizes the driver's moves of healthy replicas as one event when they begin and one when they end. Used
by heal; makes no calls or decisions.

Invariant: the end is reported once, after the first round of the driver without a step of a move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stele.driver.progress import with_names
from stele.driver.steps import BeginIntent, EndIntent
from stele.driver.view import MOVE, MOVE_BY_HAND
from stele_operator.heals import News, Work

_CAUSES = (f"{MOVE}/", f"{MOVE_BY_HAND}/")


class Movings:
    """The moves of one cluster that are under way. This memory may be lost; the remaining moves then count as
    new.
    """

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._ended = 0
        self._bytes: dict[str, int] = {}

    def note(self, round_: Sequence[Work], names: Mapping[str, str], now_s: float) -> list[News]:
        """Record a round of the driver, and return its news. `names`: member names by the first eight digits
        of their UUIDs.
        """
        mine = [work for work in round_ if work.record.cause.startswith(_CAUSES)]
        for work in mine:
            tablet, done = work.record.tablet_id, work.bytes_done
            self._bytes[tablet] = max(self._bytes.get(tablet, 0), done)
            self._ended += work.record.kind == EndIntent.__name__ and not work.record.error
        if not mine:
            return self.over(now_s)
        if self._began_s is not None:
            return []
        self._began_s = now_s
        first = next((w for w in mine if w.record.kind == BeginIntent.__name__), mine[0]).record
        more = f", and {len(mine) - 1} more" if len(mine) > 1 else ""
        return [News("Moving", f"{first.where}{more}: {with_names(first.reason, names)}")]

    def over(self, now_s: float) -> list[News]:
        """The Moved event if replicas moved since the last one; otherwise empty. Call it once no move is
        under way any more.
        """
        if self._began_s is None:
            return []
        took, count = max(0.0, now_s - self._began_s), self._ended
        told = f"{count} replica{'s' * (count != 1)} moved in {took:.0f} s; {sum(self._bytes.values()):,} bytes copied"
        self._began_s, self._ended, self._bytes = None, 0, {}
        return [News("Moved", told)]
