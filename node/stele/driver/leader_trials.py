"""A driver's memory of the leaders that it moved to spread them. Fed by executor, read by `leader_moves.py`.

Invariant: safety does not depend on this memory. A new driver begins with an empty one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from stele.driver.steps import MoveLeader, Step
from stele.driver.view import ClusterView, TabletView
from stele.model.errors import Code, SteleError

SEEN_MS = 10_000
"""How long the view may show the old leader after a move. A node reports its new role within a heartbeat."""
REFUSED_MS = 15_000
"""How long a tablet's leader is not moved again to a node that was refused as a target because it lags."""
GONE_MS = 5_000
"""How long no leader moves after a leader reported that a node does not answer. A node stops before the
masters know it; after this time they do.
"""
LATE_MS = 60_000
"""How long a tablet's leader is not moved again to a node that did not take over in time, or did not answer.
Writes may have waited for that node.
"""
STALE_MS = 2_000
"""How long a tablet's leader is not moved again to a node after an order that failed because the view was outdated."""
BEGINS_MS = 2_000
"""How long a new driver moves no leaders. Another driver may have moved some just now; nodes report that
within a second.
"""
RESTS_MS = 15_000
"""How long a leader that moved is not moved again to spread leaders, wherever it is."""
FELL_BACK_MS, FELL_BACK_MAX_MS = 30_000, 600_000
"""How long a tablet's leader is not moved again to a node that it left within `RESTS_MS`. The node may be too
slow to lead. Each repetition doubles the time, up to FELL_BACK_MAX_MS.
"""
LOADS_EVERY_MS = 10_000
"""How often a driver checks whether leaders should move for their load."""
LOADS_REST_MS = 30_000
"""How long a driver moves no leaders for load after it began or moved a leader. Nodes report new loads in that time."""
CALM_MS, CALM_MAX_MS = 120_000, 600_000
"""How long a leader that moved does not move again for its load, because loads go up and down. Each
repetition doubles the time, up to CALM_MAX_MS.
"""
CALM_COUNTS_MS = 600_000
"""A leader's next move counts as a repetition until this long after its calm."""
_MINUTE_MS = 60_000
_WAITS_MS = {
    Code.UNSAFE_CHANGE: GONE_MS,
    Code.TIMED_OUT: LATE_MS,
    Code.UNAVAILABLE: LATE_MS,
    **dict.fromkeys((Code.CAS_FAILED, Code.NOT_LEADER, Code.CHANGE_IN_PROGRESS), STALE_MS),
}


@dataclass(frozen=True, slots=True)
class LeaderTrials:
    """What a driver remembers of leaders, for one plan.

    - `moved`: the tablets whose leaders this driver moved just now, each with the node to which its leader
      went.
    - `rests`: tablets whose leaders it moved lately.
    - `refused`: (tablet, node) of moves that failed lately, or did not last.
    - `left`: how many more leaders may move now.
    - `loads`: whether leaders may move for their load now. `calm`: tablets whose leaders are excepted,
      because they moved lately.
    """

    moved: Mapping[str, str] = field(default_factory=dict)
    rests: frozenset[str] = frozenset()
    refused: frozenset[tuple[str, str]] = frozenset()
    left: int = 1_000_000
    loads: bool = True
    calm: frozenset[str] = frozenset()


NO_LEADER_TRIALS = LeaderTrials()


@dataclass
class _Moved:
    """A move that was carried out.

    `term`: the last term in which a view showed the leader at the target; -1: no view has shown it there.
    `fell`: whether the leader has left the target since.
    """

    target: str
    done_ms: int
    term: int = -1
    fell: bool = False

    @property
    def under_way(self) -> bool:
        """Whether views may still show the previous leader."""
        return self.term < 0 and not self.fell

    def left(self, tablet: TabletView, now_ms: int) -> bool:
        """Whether the leader has left the target: another replica leads in a newer term. Older views do not
        count.

        If no view has shown the leader at the target, it counts as left after SEEN_MS.
        """
        if tablet.leader_node in ("", self.target):
            return False
        return tablet.term > self.term if self.term >= 0 else now_ms >= self.done_ms + SEEN_MS


class LeaderMemory:
    """What one driver remembers of leaders."""

    def __init__(self) -> None:
        self._moved: dict[str, _Moved] = {}
        self._refused: dict[tuple[str, str], int] = {}
        self._fell_back: dict[tuple[str, str], tuple[int, int]] = {}
        """How often a leader left the node to which it was moved, and until when that counts."""
        self._ordered_ms: deque[int] = deque()
        self._rests_until_ms: int | None = None
        self._loads_from_ms: int | None = None
        self._calm: dict[str, tuple[int, int]] = {}
        """By tablet: how long its leader is calm after its last move, and until when. Forgotten
        CALM_COUNTS_MS later.
        """

    def begins(self, now_ms: int) -> None:
        """Record that the driver has just taken the claim: for a moment it moves no leaders."""
        self._rest(now_ms + BEGINS_MS)
        self._loads_from_ms = now_ms + LOADS_REST_MS

    def rests(self, now_ms: int) -> bool:
        """Whether no leader may move for a moment."""
        return self._rests_until_ms is not None and now_ms < self._rests_until_ms

    @property
    def some_rest(self) -> bool:
        """Whether there are leaders that moved lately and may not move again yet."""
        return bool(self._moved)

    def _rest(self, until_ms: int) -> None:
        self._rests_until_ms = max(until_ms, self._rests_until_ms or until_ms)

    def look(self, view: ClusterView, per_minute: int, now_ms: int) -> LeaderTrials:
        """Update the memory from a view. Returns what the planner should know at `now_ms`."""
        for tablet_id, move in list(self._moved.items()):
            tablet = view.tablet(tablet_id)
            if tablet is None or now_ms >= move.done_ms + RESTS_MS:
                del self._moved[tablet_id]
            elif tablet.leader_node == move.target:
                move.term = tablet.term
            elif not move.fell and move.left(tablet, now_ms):
                move.fell = True
                self._fell(tablet_id, move.target, now_ms)
        self._refused = {key: until for key, until in self._refused.items() if now_ms < until}
        self._fell_back = {key: fell for key, fell in self._fell_back.items() if now_ms < fell[1]}
        self._calm = {
            tablet_id: calm for tablet_id, calm in self._calm.items() if now_ms < calm[1] + CALM_COUNTS_MS
        }
        loads = self._loads_from_ms is None or now_ms >= self._loads_from_ms
        if loads:
            self._loads_from_ms = now_ms + LOADS_EVERY_MS
        while self._ordered_ms and now_ms - self._ordered_ms[0] >= _MINUTE_MS:
            self._ordered_ms.popleft()
        return LeaderTrials(
            {tablet_id: move.target for tablet_id, move in self._moved.items() if move.under_way},
            frozenset(self._moved),
            frozenset(self._refused),
            0 if self.rests(now_ms) else max(0, per_minute - len(self._ordered_ms)),
            loads,
            frozenset(tablet_id for tablet_id, (_, until_ms) in self._calm.items() if now_ms < until_ms),
        )

    def for_minutes(self, now_ms: int) -> LeaderTrials:
        """The part of `look` that forbids moves for minutes. It leaves out rests that end in seconds, for
        which a caller can wait.
        """
        return LeaderTrials(
            refused=frozenset(key for key, until_ms in list(self._refused.items()) if now_ms < until_ms),
            calm=frozenset(t for t, (_, until_ms) in list(self._calm.items()) if now_ms < until_ms),
        )

    def _fell(self, tablet_id: str, target: str, now_ms: int) -> None:
        """Record that a leader has left the node to which it was moved."""
        key = tablet_id, target
        times, _ = self._fell_back.get(key, (0, 0))
        wait_ms = min(FELL_BACK_MS << min(times, 10), FELL_BACK_MAX_MS)
        self._refused[key] = now_ms + wait_ms
        self._fell_back[key] = times + 1, now_ms + 2 * wait_ms + _MINUTE_MS

    def _calms(self, tablet_id: str, now_ms: int) -> None:
        """Record that a leader was moved, so it is calm for a time. After another move lately, that time is
        doubled.
        """
        calm_ms, until_ms = self._calm.get(tablet_id, (0, 0))
        again = calm_ms and now_ms < until_ms + CALM_COUNTS_MS
        calm_ms = min(2 * calm_ms, CALM_MAX_MS) if again else CALM_MS
        self._calm[tablet_id] = calm_ms, now_ms + calm_ms

    def note(self, step: Step, error: SteleError | None, now_ms: int) -> None:
        """Record how a step ended. A failed move also counts among the moves of this minute, since writes may
        have waited.
        """
        if not isinstance(step, MoveLeader) or step.removes:
            return
        self._ordered_ms.append(now_ms)
        if error is None:
            self._moved[step.tablet_id] = _Moved(step.target_node, now_ms)
            self._calms(step.tablet_id, now_ms)
            self._loads_from_ms = now_ms + LOADS_REST_MS
        else:
            wait_ms = _WAITS_MS.get(error.code, REFUSED_MS)
            if error.code is Code.UNSAFE_CHANGE:
                self._rest(now_ms + wait_ms)
            self._refused[step.tablet_id, step.target_node] = now_ms + wait_ms
