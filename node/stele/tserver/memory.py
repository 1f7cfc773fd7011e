"""How much memory this process may use, how it is shared out, and how much of it stores and scans hold.

A scan keeps the rows that it reads in memory, even after they were flushed. Many slow readers that began at
different times could keep many flushed memtables.

Invariant: while stores hold more than twice their share, no leader here takes a write. Only stores that can
be flushed count, so a FAILED replica blocks nobody. While scans hold as much as the share of the stores, no
further memtable is scanned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stele import metrics
from stele.consensus.replica import Replica
from stele.model.errors import Code, Retryable
from stele.model.ids import StreamKey
from stele.tserver.replicas import Replicas
from stele.tserver.wheel import Parts

PROGRAM_BYTES = 192 << 20
"""Memory that an empty node with its compaction worker takes."""
LEAST_BYTES = 16 << 20
"""The smallest share. It must hold the largest message."""
LOOK_MS, LOOK_MAX_MS = 20, 250
"""How long a sum is reused, since each write asks for it. The longer time is used while there is much room.
"""
GROWTH_BYTES = 200 << 10
"""The bytes by which stores are assumed to grow at most in a millisecond: several times what a node can
apply.
"""


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """Upper bounds in bytes.

    - `budget_bytes`: requests being worked on.
    - `queue_bytes`: log entries that are not written yet.
    - `cache_bytes`: the newest log entries.
    - `stores_bytes`: rows in stores before the largest is flushed. Scans may hold as many again.
    - `limit_bytes`: the limit that was shared out, 0 if none is known.
    """

    budget_bytes: int = 256 << 20
    queue_bytes: int = 64 << 20
    cache_bytes: int = 32 << 20
    stores_bytes: int = 1 << 30
    limit_bytes: int = 0

    @staticmethod
    def of(limit_bytes: int, budget_bytes: int | None = None) -> MemoryShares:
        """The shares of a process that may use `limit_bytes`. 0: the limit is not known, which gives the
        defaults.

        The program and its worker take a part first; the shares divide the rest. No share is more than its
        default. `budget_bytes`: given by the user.
        """
        most = MemoryShares()
        free = max(limit_bytes - PROGRAM_BYTES, limit_bytes // 8) if limit_bytes else 8 * most.stores_bytes
        return MemoryShares(
            min(most.budget_bytes, max(LEAST_BYTES, free // 4)) if budget_bytes is None else budget_bytes,
            min(most.queue_bytes, max(LEAST_BYTES // 4, free // 16)),
            min(most.cache_bytes, max(LEAST_BYTES // 8, free // 32)),
            min(most.stores_bytes, max(LEAST_BYTES, free // 8)),
            limit_bytes,
        )

    def in_mib(self) -> dict[str, int]:
        """The shares as a start logs them."""
        return {
            "limit_mib": self.limit_bytes >> 20,
            "budget_mib": self.budget_bytes >> 20,
            "log_queue_mib": self.queue_bytes >> 20,
            "log_cache_mib": self.cache_bytes >> 20,
            "stores_mib": self.stores_bytes >> 20,
        }


def memory_limit(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """How many bytes this process may use. That is the least of three limits: its control group (version 2 or
    1), the groups above it, and the machine's memory. 0 if nothing shows it."""
    limits = []
    with suppress(OSError, ValueError, IndexError):
        told = next(
            line for line in (proc / "meminfo").read_text().splitlines() if line.startswith("MemTotal:")
        )
        limits.append(int(told.split()[1]) << 10)
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                limits += _limits(groups, path, "memory.max")
            elif "memory" in controllers.split(","):
                limits += _limits(groups / "memory", path, "memory.limit_in_bytes")
    return min(limits, default=0)


def _limits(root: Path, path: str, name: str) -> list[int]:
    """The limits of a control group and of those above it.

    In a container, `path` may be the machine's, while the root is the container's own group.
    """
    found = []
    group = root / path.lstrip("/")
    for each in (group, *group.parents):
        with suppress(OSError, ValueError):
            found.append(int((each / name).read_text()))  # "max" is not a number: no limit
        if each == root:
            break
    return found


class StoreMemory:
    """Counts the bytes that the stores of a node hold in memory until they are flushed."""

    def __init__(self, replicas: Replicas, bytes_max: int, now_ms: Callable[[], int]) -> None:
        self.bytes_max = bytes_max
        self._replicas = replicas
        self._stirred, self._to_flush = replicas.stirring(), replicas.stirring()
        self._now_ms = now_ms
        self._due_ms = 0
        self._full = False
        self._unflushed: dict[StreamKey, Replica] = {}  # as of the last look, like what each of them holds
        self._held: dict[StreamKey, int] = {}
        self._bytes = 0
        self._parts = Parts(lambda: self._unflushed)

    @property
    def over(self) -> bool:
        """Whether a store must be flushed, however small it is."""
        return self._more_than(self.bytes_max)

    @property
    def looked_over(self) -> bool:
        """As `over`, but as of the last look, which `unflushed` and `unflushed_awake` take, too."""
        return self._bytes > self.bytes_max

    @property
    def full(self) -> bool:
        """Whether writes have to wait for flushes."""
        now = self._now_ms()
        if now >= self._due_ms:
            most = 2 * self.bytes_max
            self._full = self._more_than(most)
            room_ms = (most - self._bytes) // GROWTH_BYTES
            self._due_ms = now + max(LOOK_MS, min(LOOK_MAX_MS, room_ms))
        return self._full

    @property
    def bytes(self) -> int:
        """The present sum of these bytes."""
        self._look(everything=True)
        return self._bytes

    def unflushed(self) -> list[Replica]:
        """The replicas that have something to flush."""
        self._look(everything=True)
        return list(self._unflushed.values())

    def unflushed_awake(self) -> list[Replica]:
        """The replicas with something to flush that are awake, or were awake since the last call."""
        self._look()
        return [self._unflushed[key] for key in self._to_flush() if key in self._unflushed]

    def _more_than(self, bytes_max: int) -> bool:
        self._look()
        if self._bytes > bytes_max:
            self._look(everything=True)
        return self._bytes > bytes_max

    def _look(self, *, everything: bool = False) -> None:
        """Measure again the replicas that were awake, and a part of those at rest. `everything`: all of those
        at rest.

        A replica at rest holds no more memory than when it was last measured, and less after a flush.
        """
        stirred = self._stirred()
        looks = {**self._unflushed, **stirred} if everything else {**self._part(), **stirred}
        by_key = self._replicas.by_key
        for key, replica in looks.items():
            self._bytes -= self._held.pop(key, 0)
            if by_key(key) is replica and has_unflushed(replica):
                self._unflushed[key] = replica
                self._held[key] = held = held_bytes(replica)
                self._bytes += held
            else:
                self._unflushed.pop(key, None)

    def _part(self) -> dict[StreamKey, Replica]:
        """The next part of the replicas with something to flush. In PARTS calls each comes once."""
        return {key: self._unflushed[key] for key in self._parts.next() if key in self._unflushed}


def has_unflushed(replica: Replica) -> bool:
    """Whether a flush of this replica would write something."""
    machine = replica.machine
    return machine is not None and machine.applied != machine.flushed


def held_bytes(replica: Replica) -> int:
    """How many bytes the rows take that a flush of this replica would write."""
    machine = replica.machine
    if machine is None or not replica.running or machine.applied == machine.flushed:
        return 0
    return machine.memory_bytes


class ScanMemory:
    """How many bytes of rows in memory the scans of a node hold, flushed or not.

    Any thread. The scans of a memtable share its sorted rows, so those count once.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._lock = threading.Lock()
        self._scans: dict[object, Mapping[int, int]] = {}

    @contextmanager
    def held(self, memory: Mapping[int, int]) -> Iterator[None]:
        """Count a scan's memory as long as the returned context lasts. `memory`: the bytes that the scan
        holds of each memtable, by its serial number.

        Raises:
            Retryable: THROTTLED, scans already hold as much as they may, and this one needs another memtable.
        """
        scan = object()
        with self._lock:
            held: dict[int, int] = {}
            for of_scan in list(self._scans.values()):
                held.update(of_scan)
            if sum(held.values()) >= self.bytes_max and not memory.keys() <= held.keys():
                metrics.flight_throttled.labels("memory").inc()
                raise Retryable(
                    "the scans on this node already use all memory that they may; try another replica",
                    code=Code.THROTTLED,
                )
            self._scans[scan] = memory
        try:
            yield
        finally:
            del self._scans[
                scan
            ]  # without the lock: the garbage collector may end a scan that nobody reads at any place
