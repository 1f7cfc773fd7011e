"""The node's threads: pools for blocking work and for point reads, and how Flight's own threads call the
event loop.

Owns the two pools. Invariant: a thread of Flight waits no longer than its time-out, however busy the loop is.
Once `close` has returned, no work given to `in_thread` is under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar, TypeVarTuple

from stele.model.errors import Code, Retryable

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

IO_THREADS = 8
READS_AT_ONCE = 4
"""Threads that only do point reads, so that reads do not wait for flushes and for replicas that open."""


class NodeThreads:
    """The pools of one node. Made on its event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._io = ThreadPoolExecutor(IO_THREADS, "stele-io")
        self._reads = ThreadPoolExecutor(READS_AT_ONCE, "stele-read")

    async def in_thread(self, work: Callable[[*Ts], T], /, *args: *Ts) -> T:
        """Run blocking work: opening, flushing, superblocks, collecting the log."""
        return await self._loop.run_in_executor(self._io, work, *args)

    async def in_read_thread(self, work: Callable[[*Ts], T], /, *args: *Ts) -> T:
        """Run a point read."""
        return await self._loop.run_in_executor(self._reads, work, *args)

    def submit(self, work: Callable[[*Ts], object], /, *args: *Ts) -> None:
        """As `in_thread`, but nobody waits for it, and errors are dropped."""
        self._io.submit(work, *args)

    def end_reads(self) -> None:
        """Begin no further point read. Those under way end by themselves; they write nothing."""
        self._reads.shutdown(wait=False, cancel_futures=True)

    async def close(self) -> None:
        """Wait for all work given to `in_thread`. This takes as long as the disk takes; the caller bounds
        it."""
        await self._loop.run_in_executor(None, self._io.shutdown)


def on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Run `work` on `loop`, from another thread; return its result or raise its error.

    Raises:
        Retryable: TIMED_OUT after `timeout_s`.
    """
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result(timeout_s)
    except FutureTimeout:
        future.cancel()
        raise Retryable(
            "the node did not get to this request in time; try again", code=Code.TIMED_OUT
        ) from None
