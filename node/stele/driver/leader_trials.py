"""A driver's memory of the leaders that it moved to spread them. Fed by executor, read by `leader_moves.py`.

Invariant: safety does not depend on it. A new driver begins with an empty memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from stele.driver.steps import MoveLeader, Step
from stele.driver.view import ClusterView
from stele.model.errors import Code, SteleError

SEEN_MS = 10_000
"""How long the view may show the old leader after a move. A node reports its new role within a heartbeat."""
REFUSED_MS = 15_000
"""How long a tablet's leader is not moved again to a node that its leader refused because it lags."""
GONE_MS = 5_000
"""How long no leader moves after a leader reported that a node does not answer. Nodes stop before masters
know it; after this time they do."""
LATE_MS = 60_000
"""The same where the node did not take over in time, or did not answer: writes may have waited for it."""
STALE_MS = 2_000
"""The same where only the view was older than the leader."""
_MINUTE_MS = 60_000
_WAITS_MS = {
    Code.UNSAFE_CHANGE: GONE_MS,
    Code.TIMED_OUT: LATE_MS,
    Code.UNAVAILABLE: LATE_MS,
    **dict.fromkeys((Code.CAS_FAILED, Code.NOT_LEADER, Code.CHANGE_IN_PROGRESS), STALE_MS),
}


@dataclass(frozen=True, slots=True)
class LeaderTrials:
    """`moved`: the tablets whose leaders this driver moved just now, with the node to which each went.
    `refused`: (tablet, node) of moves that failed lately. `left`: how many more leaders may move now."""

    moved: Mapping[str, str] = field(default_factory=dict)
    refused: frozenset[tuple[str, str]] = frozenset()
    left: int = 1_000_000


NO_LEADER_TRIALS = LeaderTrials()


class LeaderMemory:
    """The memory of one driver."""

    def __init__(self) -> None:
        self._moved: dict[str, tuple[str, int]] = {}
        self._refused: dict[tuple[str, str], int] = {}
        self._ordered_ms: deque[int] = deque()
        self._rests_until_ms: int | None = None

    def look(self, view: ClusterView, per_minute: int, now_ms: int) -> LeaderTrials:
        """What the planner should know at `now_ms`."""
        for tablet_id, (node, until_ms) in list(self._moved.items()):
            tablet = view.tablet(tablet_id)
            if tablet is None or tablet.leader_node == node or now_ms >= until_ms:
                del self._moved[tablet_id]
        self._refused = {key: until for key, until in self._refused.items() if now_ms < until}
        while self._ordered_ms and now_ms - self._ordered_ms[0] >= _MINUTE_MS:
            self._ordered_ms.popleft()
        rests = self._rests_until_ms is not None and now_ms < self._rests_until_ms
        return LeaderTrials(
            {tablet_id: node for tablet_id, (node, _) in self._moved.items()},
            frozenset(self._refused),
            0 if rests else max(0, per_minute - len(self._ordered_ms)),
        )

    def note(self, step: Step, error: SteleError | None, now_ms: int) -> None:
        """Record how a step ended. Moves that failed count for the minute too, as writes may have waited."""
        if not isinstance(step, MoveLeader) or step.removes:
            return
        self._ordered_ms.append(now_ms)
        if error is None:
            self._moved[step.tablet_id] = (step.target_node, now_ms + SEEN_MS)
        else:
            wait_ms = _WAITS_MS.get(error.code, REFUSED_MS)
            if error.code is Code.UNSAFE_CHANGE:
                self._rests_until_ms = now_ms + wait_ms
            self._refused[step.tablet_id, step.target_node] = now_ms + wait_ms
