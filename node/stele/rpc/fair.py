"""Who is next, where several wait for one thing. No I/O, no clock; any thread, one at a time.

Invariant: those who wait are served by turns of their sources, and of one source in the order in which they came: however
many one source sends, another waits for one of its turns at most.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Of things that wait, each with its source: a name for each level, as (host, connection)."""

    def __init__(self) -> None:
        self._size = 0
        self._items: deque[T] = deque()
        self._sources: dict[str, FairQueue[T]] = {}  # whose turn it is comes first

    def __len__(self) -> int:
        return self._size

    def push(self, source: tuple[str, ...], item: T) -> None:
        """It waits behind those of the same source."""
        self._size += 1
        if not source:
            self._items.append(item)
            return
        if source[0] not in self._sources:
            self._sources[source[0]] = FairQueue()
        self._sources[source[0]].push(source[1:], item)

    def pop(self) -> T:
        """Take out the next one. Raises IndexError: nothing waits."""
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
        """It waits no longer; false if it did not."""
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
    """(host, connection) of a caller, as gRPC and Flight name it: "ipv4:10.0.0.7:41234"."""
    return peer.rpartition(":")[0], peer
