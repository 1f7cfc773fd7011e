"""Reads of one tablet that came in one turn of the loop, while other nodes confirm that this replica still leads.

Made by `Reads`; the node asks the others (stele.tserver.confirming), many tablets at once.

Invariant: the reads are answered, refused or left to the core exactly once, whatever answers come later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Protocol

from stele.consensus.state import Standing
from stele.model.config import Peer
from stele.model.ids import ReplicaId


class RoundOwner(Protocol):
    """The `Reads` that made a round. It asks the core whether enough voters have confirmed."""

    def confirmed(self, begun: ReadRound, followers: Collection[ReplicaId]) -> bool:
        """Answer the reads if these followers are enough. Returns whether they are."""

    def leave_to_core(self, begun: ReadRound) -> None:
        """Have the core ask anew, by heartbeats."""


class ReadRound:
    """Reads that are answered at `index`, once a majority confirms that this replica led in `term` after they
    came.

    The node asks `others`, the other voters. It calls `confirm` or `refuse` once for each answer. It calls
    `give_up` if answers are missing.
    """

    __slots__ = ("_confirmed", "_futures", "_open", "_owner", "index", "others", "standing", "term")

    def __init__(
        self,
        owner: RoundOwner,
        standing: Standing,
        others: tuple[Peer, ...],
        term: int,
        index: int,
        futures: list[asyncio.Future[int]],
    ) -> None:
        self.standing = standing
        self.others = others
        self.term = term
        self.index = index
        self._owner = owner
        self._futures = futures
        self._confirmed: list[ReplicaId] = []
        self._open = len(others)

    def confirm(self, replica_id: ReplicaId) -> None:
        """Count a voter that followed this replica in `term` after the reads came."""
        if self._futures:
            self._confirmed.append(replica_id)
            if not self._owner.confirmed(self, self._confirmed):
                self.refuse()

    def refuse(self) -> None:
        """Count an answer that completes no majority. After the last answer, leave the reads to the core."""
        self._open -= 1
        if not self._open:
            self.give_up()

    def give_up(self) -> None:
        """Leave the reads to the core, if they still wait."""
        if self._futures:
            self._owner.leave_to_core(self)

    def end(self) -> list[asyncio.Future[int]]:
        """End the round. Returns the futures of its reads, for the caller to answer. Later answers change
        nothing.
        """
        futures, self._futures = self._futures, []
        return futures
