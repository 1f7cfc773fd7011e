"""Chooses which replicas a round of upkeep looks at, so that replicas at rest cost little.

Each turn gets the replicas that were awake since the last turn, those to keep, and a part of all others.

Each kind of round has a wheel of its own (maintenance.py, log_space.py, holds.py). The wheel only chooses;
the round looks.

Invariant: each replica is chosen once in PARTS turns, even at rest. A replica that was awake is also chosen
in the next turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stele.consensus.replica import Replica
from stele.model.ids import StreamKey
from stele.tserver.replicas import Replicas

PARTS = 12
"""In this many turns each replica is looked at once, even if it rests all the time."""


class Parts:
    """Gives the keys of `all_of` part by part. Each call gives one part, and PARTS calls give every key once.
    Then it begins again.
    """

    def __init__(self, all_of: Callable[[], Iterable[StreamKey]]) -> None:
        self._all_of = all_of
        self._left: list[StreamKey] = []  # not given since it began anew
        self._size = 0

    def next(self) -> list[StreamKey]:
        """The next part."""
        if not self._left:
            self._left = list(self._all_of())
            self._size = -(-len(self._left) // PARTS)
        at = max(0, len(self._left) - self._size)
        part, self._left = self._left[at:], self._left[:at]
        return part


class Wheel:
    """Chooses the replicas that each turn of one kind of round looks at."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._stirred = replicas.stirring()
        self._kept: dict[StreamKey, None] = {}
        self._parts = Parts(replicas.keys)

    def turn(self) -> list[Replica]:
        """The replicas to look at now, each once."""
        due = {**self._kept, **dict.fromkeys(self._stirred()), **dict.fromkeys(self._parts.next())}
        self._kept = {}
        by_key = self._replicas.by_key
        return [replica for key in due if (replica := by_key(key)) is not None]

    def keep(self, replica: Replica) -> None:
        """Include this replica in the next turn."""
        self._kept[replica.superblock.key] = None
