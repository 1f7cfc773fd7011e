"""ReadIndex rounds: one confirmation of leadership serves all reads that came before the round (Raft §8).
Part of `Leader`.

Invariant: a read is answered with a commit index that was taken after the read came, once a majority has then
confirmed this leader.
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
        """The contexts of the reads that the round under way will answer."""
        self._acknowledged: dict[int, bool] = {}

    @property
    def pending(self) -> bool:
        """Whether a read waits for its answer."""
        return bool(self.asked or self.waiting)

    def begin(self, commit_index: int) -> None:
        """Start a round for all reads that wait."""
        self.round_id += 1
        self.index = commit_index
        self.asked, self.waiting = self.waiting, []
        self._acknowledged = {}

    def acknowledge(self, replica_id: ReplicaId, round_id: int) -> bool:
        """Note that a peer still follows this leader. Returns whether that is new for the round under way."""
        if not self.asked or round_id != self.round_id or replica_id in self._acknowledged:
            return False
        self._acknowledged[replica_id] = True
        return True

    def confirmed(self, voters: Iterable[ReplicaId], own: ReplicaId, majority: int) -> tuple[int, ...]:
        """End the round if a majority of `voters` has acknowledged it. Returns the contexts of its reads."""
        if not self.asked:
            return ()
        count = sum(1 for v in voters if v == own or v in self._acknowledged)
        if count < majority:
            return ()
        contexts, self.asked = tuple(self.asked), []
        return contexts

    def abandon(self) -> tuple[int, ...]:
        """Drop all reads that wait, because leadership is over. Returns their contexts."""
        contexts = (*self.asked, *self.waiting)
        self.asked, self.waiting = [], []
        return contexts
