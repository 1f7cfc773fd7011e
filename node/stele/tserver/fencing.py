"""Fences this node when an administrator asks for it: the node runs, but serves nobody. Called by the
heartbeater.

Owns the wanted state that the last leading master gave. To fence, it first hands over the leaders here. From
then on no replica sends or answers anything (`Replicas.fence`). Invariant: the node stays fenced through
restarts, until a leading master says otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from stele.consensus.ports import InThread
from stele.model.errors import SteleError
from stele.tserver.monitor import HAND_OVER_S
from stele.tserver.replicas import Replicas

log = structlog.get_logger("stele.tserver")


class Fencing:
    """The fencing of one node. `fenced`: whether its volume says that it is fenced. `remember(fenced)` writes
    that to the volume, and blocks.
    """

    def __init__(
        self, replicas: Replicas, *, fenced: bool, remember: Callable[[bool], None], in_thread: InThread
    ) -> None:
        self._replicas = replicas
        self._remember = remember
        self._in_thread = in_thread
        self._wanted = self._kept = fenced
        self._term = 0
        self._task: asyncio.Task[None] | None = None
        replicas.fence(fenced)

    def told(self, fenced: bool, term: int) -> None:
        """Take from the leading master of this term whether this node is to be fenced.

        An earlier leader may not know of the newest order, so its word is ignored.
        """
        if term < self._term:
            return
        self._term, self._wanted = term, fenced
        if self._is_done:
            return
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._follow())

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def _is_done(self) -> bool:
        return self._replicas.fenced == self._kept == self._wanted

    async def _follow(self) -> None:
        """Bring the node to the wanted state, which may change meanwhile.

        If the volume cannot store the state, the node is fenced all the same, and the next heartbeat tries
        again.
        """
        while not self._is_done:
            wanted, before = self._wanted, self._replicas.fenced
            if wanted and not before:
                await self._replicas.hand_over_leadership(HAND_OVER_S)
            try:
                await self._in_thread(self._remember, wanted)
                self._kept = wanted
            except (OSError, SteleError) as exc:
                log.error(
                    "whether this node is fenced was not written to its volume; it is tried again",
                    wanted=wanted,
                    error=str(exc),
                )
            if wanted or not self._kept:
                self._replicas.fence(wanted)
            if self._replicas.fenced is not before:
                log.info("fenced" if wanted else "no longer fenced")
            if self._kept is not wanted:
                return
