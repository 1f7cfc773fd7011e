"""ReadIndex rounds: one confirmation of leadership serves all reads that asked before it began (Raft §8).

Used by the core's leader part; sends nothing itself.

Invariant: a read is answered with a commit index taken after it asked, and confirmed by a majority after that.
"""

from __future__ import annotations

from collections.abc import Iterable

from stele.model.ids import ReplicaId


class ReadRounds:
    """Reads of one leadership."""

    __slots__ = ("_acknowledged", "asked", "index", "round_id", "waiting")

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.round_id = 0
        """Number of the round under way or, if none is, of the last one."""
        self.index = 0
        self.asked: list[int] = []
        """Of the round under way: those that wait for its majority."""
        self._acknowledged: dict[int, bool] = {}

    @property
    def pending(self) -> bool:
        """Whether any read is not answered yet."""
        return bool(self.asked or self.waiting)

    def begin(self, commit_index: int) -> None:
        """Start a round for all that wait."""
        self.round_id += 1
        self.index = commit_index
        self.asked, self.waiting = self.waiting, []
        self._acknowledged = {}

    def acknowledge(self, replica_id: ReplicaId, round_id: int) -> bool:
        """A peer still follows this leader; whether that is news for the round under way."""
        if not self.asked or round_id != self.round_id or replica_id in self._acknowledged:
            return False
        self._acknowledged[replica_id] = True
        return True

    def confirmed(self, voters: Iterable[ReplicaId], own: ReplicaId, majority: int) -> tuple[int, ...]:
        """Contexts of the reads that may be served now, if a majority of `voters` has acknowledged."""
        if not self.asked:
            return ()
        count = sum(1 for v in voters if v == own or v in self._acknowledged)
        if count < majority:
            return ()
        contexts, self.asked = tuple(self.asked), []
        return contexts

    def abandon(self) -> tuple[int, ...]:
        """All reads not answered yet; leadership is over."""
        contexts = (*self.asked, *self.waiting)
        self.asked, self.waiting = [], []
        return contexts
