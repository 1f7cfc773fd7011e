"""One clock for all replicas of a node: a tick every 25 ms, and a slow round every second.

Raft's time advances by at most `STEP_MS` per tick. If the loop stalls or the processor is overloaded,
time-outs grow with the delay of messages. Otherwise one election would follow the next.

Invariant: after a stall of the event loop, messages that came in meanwhile are read before time advances. So
this node does not take its own stall for the silence of others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from stele import metrics

log = structlog.get_logger("stele.tserver")

TICK_MS = 25
STEP_MS = 50
STALL_MS = 200
_SLOW_MS = 1_000


class ReplicaClock:
    """Time in milliseconds, as the replicas of one node count it."""

    def __init__(self, monotonic_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._monotonic_ns = monotonic_ns
        self._real_ms = self._counted = monotonic_ns() // 1_000_000

    def now_ms(self) -> int:
        """The present time. It advances by at most STEP_MS between two ticks. Read for each message that
        comes in."""
        passed = self._monotonic_ns() // 1_000_000 - self._real_ms
        return self._counted + (passed if passed < STEP_MS else STEP_MS)

    def tick(self) -> int:
        """Count one tick. Returns how many ms have really passed since the tick before."""
        self._counted = self.now_ms()
        real = self._monotonic_ns() // 1_000_000
        passed, self._real_ms = real - self._real_ms, real
        return passed


class Ticker:
    """Calls `tick(now_ms)` on the event loop, and awaits `slow()` once a second."""

    def __init__(
        self, clock: ReplicaClock, tick: Callable[[int], None], slow: Callable[[], Awaitable[None]]
    ) -> None:
        self._clock = clock
        self._tick = tick
        self._slow = slow
        clock.tick()
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._run_slow())]

    async def close(self) -> None:
        """Stop."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_MS / 1000)
            passed = self._clock.tick()
            if passed > STALL_MS:
                metrics.loop_stall_seconds.inc(passed / 1000)
                log.warning("the event loop stalled", ms=passed)
            try:
                self._tick(self._clock.now_ms())
            except Exception:
                log.exception("a tick failed; the ticker continues")

    async def _run_slow(self) -> None:
        while True:
            await asyncio.sleep(_SLOW_MS / 1000)
            try:
                await self._slow()
            except Exception:
                log.exception("the slow round failed; the ticker continues")
