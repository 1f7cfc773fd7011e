"""One clock for all replicas of a node: a tick every 25 ms, and a slow round every second.

Invariant: after a stall of the event loop what came in meanwhile is read before time is counted, so that a stall of
ours is not taken for silence of others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

log = structlog.get_logger("stele.tserver")

TICK_MS = 25
STALL_MS = 100
_CATCH_UP_S = 0.01
_SLOW_MS = 1_000


class Ticker:
    """Calls `tick(now_ms)` on the event loop, and awaits `slow()` once a second."""

    def __init__(self, tick: Callable[[int], None], slow: Callable[[], Awaitable[None]]) -> None:
        self._tick = tick
        self._slow = slow
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._run_slow())]

    async def close(self) -> None:
        """Stop."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self) -> None:
        due = time.monotonic_ns() // 1_000_000 + TICK_MS
        while True:
            now = time.monotonic_ns() // 1_000_000
            await asyncio.sleep(max(due - now, 1) / 1000)
            now = time.monotonic_ns() // 1_000_000
            if now - due > STALL_MS:
                log.warning("the event loop stalled", ms=now - due)
                await asyncio.sleep(_CATCH_UP_S)
                now = time.monotonic_ns() // 1_000_000
            due = now + TICK_MS
            try:
                self._tick(now)
            except Exception:
                log.exception("a tick failed; time goes on")

    async def _run_slow(self) -> None:
        while True:
            await asyncio.sleep(_SLOW_MS / 1000)
            try:
                await self._slow()
            except Exception:
                log.exception("the slow round failed; it goes on")
