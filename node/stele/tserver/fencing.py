"""Fences this node when an administrator asks for it: it runs, but serves nobody. Called by the heartbeater.

Owns the wanted state that the last leader master gave. The leaders here are handed over first; then no
replica sends or answers anything (`Replicas.fence`). Invariant: it stays so through restarts, until a leader
master says otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from stele.tserver.monitor import HAND_OVER_S
from stele.tserver.replicas import Replicas
from stele.tserver.threads import InThread

log = structlog.get_logger("stele.tserver")


class Fencing:
    """The fencing of one node. `fenced`: the state on its volume. `remember(fenced)` writes it; it blocks."""

    def __init__(
        self, replicas: Replicas, *, fenced: bool, remember: Callable[[bool], None], in_thread: InThread
    ) -> None:
        self._replicas = replicas
        self._remember = remember
        self._in_thread = in_thread
        self._wanted = fenced
        self._task: asyncio.Task[None] | None = None
        replicas.fence(fenced)

    def told(self, fenced: bool) -> None:
        """Take from a leader master whether this node is to be fenced."""
        if fenced == self._wanted:
            return
        self._wanted = fenced
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._follow())

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        """Wait until the node is as wanted. The wanted state may change meanwhile."""
        while self._replicas.fenced != self._wanted:
            wanted = self._wanted
            if wanted:
                await self._replicas.hand_over_leadership(HAND_OVER_S)
            await self._in_thread(self._remember, wanted)
            self._replicas.fence(wanted)
            log.info("fenced" if wanted else "no longer fenced")
