"""Runs a bounded number of coroutines at once. Used by create, restore and compare."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def in_parallel(items: Iterable[T], count: int, work: Callable[[T], Awaitable[object]]) -> None:
    """Run `work(item)` for each item, `count` at once. The first error ends the others, and is raised once they ended."""
    pending = iter(items)

    async def worker() -> None:
        for item in pending:
            await work(item)

    tasks = [asyncio.create_task(worker()) for _ in range(count)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
