"""Summarizes the moves of leaders as two events: when they begin, and when they end. Used by heal; makes no
calls or decisions.

Leaders of a hundred tablets may move after a restart. Invariant: each begin is followed by one end. A round
in which every move was refused does not count as a begin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from stele.driver.progress import Progress, with_names
from stele_operator.heals import News


class LeaderMoves:
    """The moves of one cluster's leaders since they began. This memory may be lost at any time."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._moved: Counter[tuple[str, str]] = Counter()
        self._causes: dict[str, None] = {}

    def note(self, records: Sequence[Progress], names: Mapping[str, str], now_s: float) -> list[News]:
        """Record a round of the driver, and return its news. `names`: member names by the first eight digits
        of their UUIDs.
        """
        moves = [r for r in records if r.leaders is not None]
        if not moves:
            return self.over(names, now_s)
        news = []
        if self._began_s is None and any(r.leaders and r.leaders.moved for r in moves):
            self._began_s = now_s
            reasons = dict.fromkeys(r.reason.partition(": ")[2] for r in moves)
            news.append(News("LeadersMoving", with_names("; ".join(reasons), names)))
        for record in moves:
            if record.leaders is not None and record.leaders.moved:
                self._moved[record.node_id, record.leaders.target] += record.leaders.moved
                self._causes[record.cause] = None
        return news

    def over(self, names: Mapping[str, str], now_s: float) -> list[News]:
        """The LeadersMoved event if leaders moved since the last one; otherwise empty. Call it once no leader
        moves any more.
        """
        if self._began_s is None:
            return []
        took_s, count = max(0.0, now_s - self._began_s), sum(self._moved.values())
        pairs = (
            f"{moved} from node {source[:8]} to node {target[:8]}"
            for (source, target), moved in sorted(self._moved.items())
        )
        leaders = f"{count} leaders" if count != 1 else "1 leader"
        text = f"{leaders} in {took_s:.0f} s: {', '.join(pairs)} ({', '.join(self._causes)})"
        self._began_s = None
        self._moved.clear()
        self._causes.clear()
        return [News("LeadersMoved", with_names(text, names))]
