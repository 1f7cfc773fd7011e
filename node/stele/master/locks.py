"""Locks of tables and tablets, for the leader's operations. Each leadership has its own.

Order: tables before tablets, each kind in ascending order of names. Invariant: a lock is released only when
the proposal under it is applied, or known never to be applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager


class Locks:
    """Locks that are created on demand. A lock is dropped when nobody holds or awaits it."""

    def __init__(self) -> None:
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}
        self._users: dict[tuple[str, str], int] = {}

    @asynccontextmanager
    async def hold(self, tables: Iterable[str] = (), tablets: Iterable[str] = ()) -> AsyncIterator[None]:
        """Hold these locks. All callers acquire them in the same order, so no deadlock can occur."""
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
