"""A fair queue for several sources. No I/O, no clock. Any thread, one at a time.

Invariant: sources take turns, and items of one source leave in the order they came. However many items one
source has, another waits for at most one of its turns.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Waiting items, each with its source: a name per level, such as (host, connection)."""

    def __init__(self) -> None:
        self._size = 0
        self._items: deque[T] = deque()
        self._sources: dict[str, FairQueue[T]] = {}  # in the order of their turns

    def __len__(self) -> int:
        return self._size

    def push(self, source: tuple[str, ...], item: T) -> None:
        """Add an item behind those of the same source."""
        self._size += 1
        if not source:
            self._items.append(item)
            return
        if source[0] not in self._sources:
            self._sources[source[0]] = FairQueue()
        self._sources[source[0]].push(source[1:], item)

    def pop(self) -> T:
        """Take out the next item. Raises IndexError if nothing waits."""
        if not self._size:
            raise IndexError("nothing waits")
        self._size -= 1
        if self._items:
            return self._items.popleft()
        name = next(iter(self._sources))
        queue = self._sources.pop(name)
        item = queue.pop()
        if queue:
            self._sources[name] = queue
        return item

    def remove(self, source: tuple[str, ...], item: T) -> bool:
        """Take out one item. Returns False if it was not waiting."""
        if not source:
            if item not in self._items:
                return False
            self._items.remove(item)
        else:
            queue = self._sources.get(source[0])
            if queue is None or not queue.remove(source[1:], item):
                return False
            if not queue:
                del self._sources[source[0]]
        self._size -= 1
        return True


def source_of(peer: str) -> tuple[str, str]:
    """(host, connection) of a caller, from gRPC's and Flight's form "ipv4:10.0.0.7:41234"."""
    return peer.rpartition(":")[0], peer
