"""Says what the event loop did in its longest turn. Used by scale_driver.py; for measurements only.

Each callback of the loop is timed, in this thread's own processor time: others share the machine. Of a task it notes where
it was before and after, as `function:line`. Invariant: what runs changes nothing but by some µs for each callback.
"""

from __future__ import annotations

import asyncio
import gc
import time
from types import CoroutineType
from typing import Any

_NAMED_MS = 0.3
"""A callback that takes less is counted, and not named."""


class Turns:
    """Keeps the longest time that the loop did not turn or the interpreter's collector ran, and what ran
    then."""

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self.what = ""
        self._steps: list[tuple[float, str]] = []
        self._count = 0
        self._collected_ms = self._began_s = 0.0
        gc.callbacks.append(self._collected)
        _time_callbacks(self)
        self._task = asyncio.create_task(self._watch())

    def take(self) -> tuple[float, str]:
        """Return the longest time since the last call, in ms, and what ran then."""
        found = self.longest_ms, self.what
        self.longest_ms, self.what = 0.0, ""
        return found

    def step(self, ms: float, what: str) -> None:
        """Record that a callback has run."""
        self._count += 1
        if what:
            self._steps.append((ms, what))

    async def _watch(self) -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.001)
            held_ms = (time.thread_time() - before) * 1000
            if held_ms > self.longest_ms:
                named = ", ".join(f"{what} {ms:.1f}" for ms, what in sorted(self._steps, reverse=True)[:6])
                self.longest_ms = held_ms
                self.what = f"{self._count} callbacks ({named}), the collector {self._collected_ms:.1f}"
            self._steps.clear()
            self._count, self._collected_ms = 0, 0.0

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        """Time a collection, for which all threads wait. It ends in the thread where it began."""
        if phase == "start":
            self._began_s = time.thread_time()
            return
        took_ms = (time.thread_time() - self._began_s) * 1000
        self._collected_ms += took_ms
        if took_ms > self.longest_ms:
            self.longest_ms, self.what = took_ms, f"the collector, generation {info['generation']}"


def _time_callbacks(turns: Turns) -> None:
    """Have each callback of every loop of this process timed."""
    run: Any = asyncio.Handle._run

    def timed(handle: Any) -> None:
        task = getattr(handle._callback, "__self__", None)
        at = _place(task) if isinstance(task, asyncio.Task) else ""
        before = time.thread_time()
        callback = handle._callback
        run(handle)
        ms = (time.thread_time() - before) * 1000
        if ms < _NAMED_MS:
            turns.step(ms, "")
        elif isinstance(task, asyncio.Task):
            turns.step(ms, f"{at} → {_place(task)}")
        else:
            turns.step(ms, getattr(callback, "__qualname__", repr(callback)))

    asyncio.Handle._run = timed  # type: ignore[attr-defined]


def _place(task: asyncio.Task[Any]) -> str:
    """Where a task is: the innermost coroutine, and the one that it began with."""
    outer: Any = task.get_coro()
    inner = outer
    while isinstance(found := getattr(inner, "cr_await", None), CoroutineType):
        inner = found
    frame = getattr(inner, "cr_frame", None)
    line = frame.f_lineno if frame is not None else "end"
    return f"{getattr(outer, '__qualname__', '?')}…{getattr(inner, '__qualname__', '?')}:{line}"
