"""Limits how many unary requests are read at once: gRPC does not say how large one is before all of it has
arrived.

Used by `Guard`. A request gets a place before it is read, and gives it back once it is read and charged to
the budget. A request without a place waits for its turn (`FairQueue`); gRPC holds at most 64 KiB of it
meanwhile.

Invariant: at most `places` requests are read at once. A request that does not arrive is given up after
ARRIVES_S. While others wait, the one that began first is given up after YIELD_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from stele.model.errors import Code, Retryable
from stele.rpc.fair import FairQueue

T = TypeVar("T")

ARRIVES_S = 30.0
YIELD_S = 2.0


class RequestPlaces:
    """Bounds how many requests are being received at once. Event loop only."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        self._reading: dict[asyncio.Timeout, float] = {}  # start times, in order

    async def receive(self, source: tuple[str, ...], read: Callable[[], Awaitable[T]]) -> T:
        """Read the request with `read`, once there is a place.

        Raises:
            Retryable: TIMED_OUT: it did not arrive in time. Also what `read` raises.
        """
        if self._free:
            self._free -= 1
        else:
            await self._wait(source)
        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(ARRIVES_S) as timeout:
                self._reading[timeout] = began_s
                self._hurry()
                try:
                    return await read()
                finally:
                    del self._reading[timeout]
        except TimeoutError:
            raise Retryable(
                "the request did not arrive in time; send it again", code=Code.TIMED_OUT
            ) from None
        finally:
            self._leave()

    async def _wait(self, source: tuple[str, ...]) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.push(source, future)
        self._hurry()
        try:
            await future
        except asyncio.CancelledError:
            if not self._waiting.remove(source, future):
                self._leave()  # it already had its place
            raise

    def _leave(self) -> None:
        while self._waiting:
            future = self._waiting.pop()
            if not future.done():
                future.set_result(None)
                self._hurry()
                return
        self._free += 1

    def _hurry(self) -> None:
        """While others wait, give the request that began first only YIELD_S."""
        if self._waiting and self._reading:
            oldest, began_s = next(iter(self._reading.items()))
            due_s = max(began_s + YIELD_S, asyncio.get_running_loop().time())
            if not oldest.expired() and (oldest.when() or 0.0) > due_s:
                oldest.reschedule(due_s)
