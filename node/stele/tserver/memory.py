"""What a node's memory is shared out to, and how much of it its stores hold. Made at its start; owned by the node.

Invariant: where stores hold more than twice their share, no leader here takes a write. What counts are the stores that a
flush makes smaller; a replica that has FAILED holds nobody up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stele.consensus.replica import Replica
from stele.tserver.replicas import Replicas

LOOK_MS = 20
"""For so long a sum is taken as it was: writes ask for it, one by one."""


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """Bytes at most: `budget_bytes` of requests being worked on, `queue_bytes` of the log's entries that are not yet written
    and `cache_bytes` of its newest ones, `stores_bytes` of rows in stores before the largest is flushed."""

    budget_bytes: int = 256 << 20
    queue_bytes: int = 64 << 20
    cache_bytes: int = 32 << 20
    stores_bytes: int = 1 << 30


class StoreMemory:
    """The sum of what the stores of a node hold in memory until they are flushed."""

    def __init__(self, replicas: Replicas, bytes_max: int, now_ms: Callable[[], int]) -> None:
        self.bytes_max = bytes_max
        self._replicas = replicas
        self._now_ms = now_ms
        self._sum = 0
        self._due_ms = 0

    @property
    def over(self) -> bool:
        """Whether a store is to be flushed, however small."""
        return self.bytes > self.bytes_max

    @property
    def full(self) -> bool:
        """Whether writes have to wait for flushes."""
        now = self._now_ms()
        if now >= self._due_ms:
            self._due_ms = now + LOOK_MS
            self._sum = self.bytes
        return self._sum > 2 * self.bytes_max

    @property
    def bytes(self) -> int:
        """The sum as it is now."""
        return sum(map(held_bytes, self._replicas))


def held_bytes(replica: Replica) -> int:
    """What the rows take that a flush of this replica writes."""
    machine = replica.machine
    if machine is None or not replica.running or machine.applied == machine.flushed:
        return 0
    return int(getattr(machine, "memory_bytes", 0))
