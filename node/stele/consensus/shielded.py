"""Tasks that run to their end even if their caller is cancelled. Otherwise their owner could be left half
changed.

Used by replicas, the tablet manager and the masters. This file also has waits for threads, which cannot be
cancelled.

Invariant: cancelling a caller ends only its waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class ShieldedTasks:
    """The operations of one owner that are under way."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, operation: Coroutine[Any, Any, T]) -> T:
        """Run an operation to its end. Returns its result or raises its error."""
        return await asyncio.shield(self.start(operation))

    def start(self, operation: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run an operation to its end. No caller needs to await the task."""
        task = asyncio.get_running_loop().create_task(operation)
        self._running.add(task)
        task.add_done_callback(self._over)
        return task

    async def end(self, within_s: float) -> None:
        """End, because the owner ends: wait up to `within_s` seconds for the operations under way, then
        cancel the rest.
        """
        if self._running:
            await asyncio.wait(self._running, timeout=within_s)
        for task in list(self._running):
            task.cancel()

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved here: the caller may have gone


async def until_finished(waited: Awaitable[T]) -> T:
    """Return the result of `waited`, or raise its error.

    A thread cannot be cancelled. So a caller that is cancelled meanwhile goes on only once `waited` has
    ended.
    """
    future = asyncio.ensure_future(waited)
    await until_done(future)
    return future.result()


async def until_done(future: asyncio.Future[Any]) -> None:
    """Return once `future` has ended.

    If the caller was cancelled meanwhile, raise CancelledError after that.
    """
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError:
            cancelled = True
    if not future.cancelled():
        future.exception()  # retrieved here: the caller may not ask for it
    if cancelled:
        raise asyncio.CancelledError


async def together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all coroutines at once. If one fails, or the caller is cancelled, cancel the others. Returns once
    all have ended.

    Raises the first error. `asyncio.TaskGroup` of Python 3.11 would lose a cancellation of the caller that
    comes together with a failure.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for ended in [task for task in tasks if task.done()]:
            ended.result()
    finally:
        for task in tasks:
            task.cancel()
        await until_done(asyncio.gather(*tasks, return_exceptions=True))
