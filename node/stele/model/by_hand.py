"""What an administrator asked of a tablet's replicas, as one value. Shared by catalog, driver and command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ByHand:
    """A tablet's placement by hand. It applies until it is released, but healing takes precedence.

    Attributes:
        pinned: Nodes on which the tablet should have a replica.
        avoided: Nodes on which it should have none, unless no other node is left.
        extra: Replicas beyond its table's replication factor.
        owner: Who asked for it.
        reason: Why, in words.
        since_us: Since when, by the wall clock of a master.
    """

    pinned: tuple[str, ...] = ()
    avoided: tuple[str, ...] = ()
    extra: int = 0
    owner: str = ""
    reason: str = ""
    since_us: int = 0

    def __bool__(self) -> bool:
        """Whether anything is asked for."""
        return bool(self.pinned or self.avoided or self.extra)


NOT_BY_HAND = ByHand()
