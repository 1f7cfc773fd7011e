"""Tasks that run to their end although their caller is cancelled: an operation cut in half leaves its owner half changed.

Owned by replicas, the tablet manager and the masters. Invariant: cancelling a caller ends only the waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class ShieldedTasks:
    """The operations of one owner that are under way."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, operation: Coroutine[Any, Any, T]) -> T:
        """Run an operation to its end; returns its result or raises its error."""
        return await asyncio.shield(self.start(operation))

    def start(self, operation: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run an operation to its end. Nobody needs to wait for the task."""
        task = asyncio.get_running_loop().create_task(operation)
        self._running.add(task)
        task.add_done_callback(self._over)
        return task

    async def end(self, within_s: float) -> None:
        """Wait `within_s` seconds for what runs, then cancel the rest. Called when the owner ends."""
        if self._running:
            await asyncio.wait(self._running, timeout=within_s)
        for task in list(self._running):
            task.cancel()

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked may have gone
