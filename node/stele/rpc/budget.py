"""One byte budget per node for messages that came in and are not applied yet. Used only on the event loop.

Bytes are charged before a message is decoded, and released once it is answered. Incomplete messages of
clients take room from clients, too. Invariant: 0 <= used <= limit, unless one message alone is larger.
Clients leave `reserve` free, so that heartbeats, votes and replication get through when clients have filled
the rest.
"""

from __future__ import annotations

import time
from types import TracebackType

from stele import metrics
from stele.model.errors import Code, InvariantViolation, Retryable, ensure

_RETRY_MIN_MS, _RETRY_UNKNOWN_MS, _RETRY_MAX_MS = 10, 50, 500
_RATE_S = 0.1
"""The rate at which bytes are given back is measured over at least this time, and only at a refusal."""
REQUEST_BYTES = 1_024
"""Bytes charged for each request of a client beside its size: about what a node needs to work on one."""


class Charge:
    """Bytes taken from a budget. `release` gives them back, once. Also a context manager."""

    __slots__ = ("_budget", "size_bytes")

    def __init__(self, budget: ByteBudget, size_bytes: int) -> None:
        self._budget = budget
        self.size_bytes = size_bytes

    def release(self) -> None:
        """Give the bytes back. A second call does nothing."""
        size, self.size_bytes = self.size_bytes, 0
        self._budget.give_back(size)

    def __enter__(self) -> Charge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class ByteBudget:
    """`limit_bytes` in total. Only control traffic may use the last `reserve_bytes`."""

    __slots__ = (
        "_given_back",
        "_looked_s",
        "_rate",
        "arriving_bytes",
        "limit_bytes",
        "reserve_bytes",
        "used_bytes",
    )

    def __init__(self, limit_bytes: int = 128 << 20, reserve_bytes: int = 32 << 20) -> None:
        ensure(
            0 <= reserve_bytes < limit_bytes, "the reserve of a byte budget must be smaller than its limit"
        )
        self.limit_bytes = limit_bytes
        self.reserve_bytes = reserve_bytes
        self.used_bytes = 0
        self.arriving_bytes = 0
        """Bytes of incomplete messages of clients (see stele.rpc.arriving)."""
        self._rate = 0.0  # bytes given back per second, measured at the last refusal
        self._given_back = 0  # bytes since then
        self._looked_s = time.monotonic()

    def arrives(self, delta: int) -> None:
        """The bytes held of incomplete messages changed by `delta`."""
        self.arriving_bytes += delta

    def take(self, size_bytes: int, *, control: bool = False) -> None:
        """Take `size_bytes`, all of which must be given back later.

        An empty budget takes any size, so that no message below the message limit starves.

        Raises:
            Retryable: THROTTLED: the budget is used up. The error says how long it takes until there is room,
                at the present rate.
        """
        limit = self.limit_bytes if control else self.limit_bytes - self.reserve_bytes - self.arriving_bytes
        if self.used_bytes and self.used_bytes + size_bytes > limit:
            metrics.budget_refused.inc()
            raise Retryable(
                f"{self.used_bytes} of {limit} bytes of requests are in progress; "
                f"there is no room for {size_bytes} more; send again a little later",
                code=Code.THROTTLED,
                retry_after_ms=self._room_in_ms(self.used_bytes + size_bytes - limit),
            )
        self.used_bytes += size_bytes

    def _room_in_ms(self, size_bytes: int) -> int:
        now_s = time.monotonic()
        elapsed_s = now_s - self._looked_s
        if elapsed_s > _RATE_S:
            self._rate = self._given_back / elapsed_s
            self._looked_s, self._given_back = now_s, 0
        if not self._rate:
            return _RETRY_UNKNOWN_MS
        return min(max(int(1_000 * size_bytes / self._rate), _RETRY_MIN_MS), _RETRY_MAX_MS)

    def give_back(self, size_bytes: int) -> None:
        """Give back bytes that were taken before."""
        self.used_bytes -= size_bytes
        self._given_back += size_bytes
        if self.used_bytes < 0:
            raise InvariantViolation("a byte budget got back more than was taken")

    def charge(self, size_bytes: int, *, control: bool = False) -> Charge:
        """As `take`, but returns an object that gives the bytes back."""
        self.take(size_bytes, control=control)
        return Charge(self, size_bytes)
