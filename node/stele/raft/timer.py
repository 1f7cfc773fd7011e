"""The election timer: when a replica campaigns if it hears no leader. Shared by all roles; reads no clock.

Invariant: a time-out is drawn between the shortest and the longest election timeout. After each further election
that too few voters answered in time, it is doubled, up to 16 times its length. Otherwise elections that come too
soon would keep overloaded voters busy. For the same reason it doubles with each false alarm, up to 4 times its length. It
halves again once there was none for half a minute. A replica that leads only where no other can waits longer, by twice
the longest timeout.
"""

from __future__ import annotations

from stele.raft.options import RaftOptions
from stele.raft.ports import Chance

NEVER_MS = 1 << 62
_DOUBLINGS_MAX = 4
_ALARMS_MAX = 2
_CALM_MS = 30_000


class ElectionTimer:
    """The election time-out of one replica, on its owner's clock."""

    __slots__ = ("_options", "_rng", "alarms", "calm_ms", "due_ms", "missed", "patience_ms", "unanswered")

    def __init__(self, options: RaftOptions, rng: Chance) -> None:
        self._options = options
        self._rng = rng
        self.due_ms = NEVER_MS
        """When to campaign; NEVER_MS for a leader, and for a replica that may not campaign."""
        self.patience_ms = 0
        """The time-out drawn last: how long a replica waits for its leader before it campaigns."""
        self.unanswered = 0
        """How many elections in a row ended by their time-out, because voters did not answer or a majority refused.
        0 once there is a leader."""
        self.missed = False
        """Whether no leader was heard within the time-out, and none since then. A connection that broke does not count."""
        self.alarms = 0
        """How many false alarms count now: the leader was missed, and then still led. At most 2."""
        self.calm_ms = NEVER_MS
        """When to forget one of them. NEVER_MS if none counts."""

    def draw(self, now_ms: int, *, patient: bool) -> None:
        """Draw a time-out that begins now. If `patient`, add twice the longest election timeout, so that others
        campaign first."""
        extra_ms = 2 * self._options.election_max_ms if patient else 0
        factor = 1 << max(min(self.unanswered, _DOUBLINGS_MAX), self.alarms)
        low = self._options.election_min_ms * factor + extra_ms
        high = self._options.election_max_ms * factor + extra_ms
        self.patience_ms = self._rng.randint(low, high)
        self.due_ms = now_ms + self.patience_ms

    def false_alarm(self, now_ms: int) -> None:
        """The leader was missed, and still leads: its node, or this one, is slow. Wait longer next time."""
        self.alarms = min(self.alarms + 1, _ALARMS_MAX)
        self.calm_ms = now_ms + _CALM_MS

    def calm(self, now_ms: int) -> None:
        """There was no false alarm for a while: forget one."""
        self.alarms -= 1
        self.calm_ms = now_ms + _CALM_MS if self.alarms else NEVER_MS

    def draw_quick(self, now_ms: int, *, patient: bool) -> None:
        """Campaign soon: the leader is known to have failed, so there is no need to wait for it."""
        extra_ms = 2 * self._options.election_max_ms if patient else 0
        low, high = (
            self._options.election_min_ms // 30 + extra_ms,
            self._options.election_min_ms // 3 + extra_ms,
        )
        self.due_ms = min(self.due_ms, now_ms + self._rng.randint(low, high))

    def draw_after(self, now_ms: int, free_ms: int) -> None:
        """Campaign soon after `free_ms`, when a promise ends. If the present time-out ends soon after `free_ms`
        anyway, keep it."""
        low, high = self._options.election_min_ms // 30, self._options.election_min_ms // 3
        soon_ms = max(now_ms, free_ms) + self._rng.randint(low, high)
        self.due_ms = self.due_ms if free_ms <= self.due_ms < soon_ms else soon_ms

    def draw_within(self, now_ms: int, low_ms: int, high_ms: int) -> None:
        """Campaign between `low_ms` and `high_ms` from now, or earlier if that was drawn before. Later after false alarms."""
        self.due_ms = min(self.due_ms, now_ms + (self._rng.randint(low_ms, high_ms) << self.alarms))
