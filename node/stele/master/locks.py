"""Locks of tables and tablets, for the leader's operations. Each leadership has its own.

Order: tables before tablets, one kind by ascending name. Invariant: a lock is let go only when what was proposed under
it is applied, or known never to be.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager


class Locks:
    """Made as needed, dropped when nobody holds or wants them."""

    def __init__(self) -> None:
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}
        self._users: dict[tuple[str, str], int] = {}

    @asynccontextmanager
    async def hold(self, tables: Iterable[str] = (), tablets: Iterable[str] = ()) -> AsyncIterator[None]:
        """Hold these, taken in the one order that all keep to."""
        names = [("1 table", t) for t in sorted(set(tables))] + [
            ("2 tablet", t) for t in sorted(set(tablets))
        ]
        async with AsyncExitStack() as stack:
            for name in names:
                await stack.enter_async_context(self._one(name))
            yield

    @asynccontextmanager
    async def _one(self, name: tuple[str, str]) -> AsyncIterator[None]:
        lock = self._locks.setdefault(name, asyncio.Lock())
        self._users[name] = self._users.get(name, 0) + 1
        try:
            async with lock:
                yield
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name], self._locks[name]

    def __len__(self) -> int:
        return len(self._locks)
