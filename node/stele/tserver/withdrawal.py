"""Withdraws dropped tables from service: no replica of them here answers clients. Called by the heartbeater.

Owns the list of such tables, as the last leading master sent it. The replicas run on: they vote, take entries
and are copied. Invariant: the list stays through restarts. The masters hear of it only after it is on the
volume. No older list replaces it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import structlog

from stele.consensus.ports import InThread
from stele.model.ids import OpId
from stele.rpc.convert import id_from_pb
from stele.rpc.proto import master_pb2 as pb
from stele.tserver.node_record import Dropped
from stele.tserver.replicas import Replicas

log = structlog.get_logger("stele.tserver")


class Withdrawal:
    """The dropped tables of one node. `dropped`: the list on its volume. `remember(dropped)` writes the list;
    it blocks.
    """

    def __init__(
        self,
        replicas: Replicas,
        *,
        dropped: Dropped,
        remember: Callable[[Dropped], None],
        in_thread: InThread,
    ) -> None:
        self._replicas = replicas
        self._remember = remember
        self._in_thread = in_thread
        self._kept = self._wanted = dropped
        self._heard = dropped.at
        self._task: asyncio.Task[None] | None = None
        self._obey()

    @property
    def digest(self) -> int:
        """The digest that names the list on the volume."""
        return self._kept.digest

    def told(self, response: pb.TSHeartbeatResponse, then: Callable[[], None]) -> None:
        """Take over the list in a leading master's answer. Calls `then()` once a new list is on the volume.

        An answer of an earlier leader changes nothing. Nor does an earlier answer of the same leader.
        """
        at = OpId(response.term, response.catalog_index)
        if at < self._heard:
            return
        self._heard = at
        digest = response.dropped_digest
        if digest != self._wanted.digest:
            if digest and not response.dropped_tables:
                if digest != self._kept.digest:
                    return  # it answers a heartbeat that told another list, so it has none
                self._wanted = replace(self._kept, at=at)
            else:
                tables = sorted(id_from_pb(raw) for raw in response.dropped_tables)
                self._wanted = Dropped(tuple(tables), digest, at)
            self._obey()
        if self._kept.digest != digest and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._follow(then))

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _obey(self) -> None:
        self._replicas.withdraw(frozenset(self._wanted.tables))

    async def _follow(self, then: Callable[[], None]) -> None:
        """Write the wanted list to the volume. If the wanted list changes meanwhile, write again."""
        while self._kept.digest != self._wanted.digest:
            wanted = self._wanted
            try:
                await self._in_thread(self._remember, wanted)
            except OSError as exc:
                log.warning(
                    "the list of dropped tables could not be written; it is tried again", error=str(exc)
                )
                return
            self._kept = wanted
            log.info(
                "recorded the dropped tables; their replicas here serve no clients", tables=len(wanted.tables)
            )
        then()
