"""Watches the node's disk, log and wall clock. Checks once a second how full the disk is, and at every tick
whether the log makes progress.

Owns the last measurement of the disk. A node whose disk is nearly full, or whose clock is wrong, hands its
leaderships over.

A disk that hangs gives no error, and the node still answers heartbeats. So nobody would heal its tablets.
Therefore the node ends, and its tablets are healed like those of a silent node. (CockroachDB also ends after
20 s.)

Invariant: each time the disk gets full, leaderships are handed over once, however long it stays full.
Otherwise leaderships would go round in circles when all nodes are full. A leader whose clock is wrong can
write nothing. So while the clock is wrong, leaderships are handed over again every HAND_OVER_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from stele.consensus.ports import InThread
from stele.model.errors import Code, Retryable
from stele.tserver.replicas import Replicas
from stele.tserver.volume import Volume
from stele.tserver.wall_clock import WallClock
from stele.wal.log import Log

log = structlog.get_logger("stele.tserver")

HAND_OVER_S = 10.0


class NodeMonitor:
    """Monitors one node. Its owner calls `look` once a second, `tick` at each tick, and `measure` before
    anything reads `disk_bytes`.

    `fail(error)` ends the node, for example if the log makes no progress for `log_stall_ms`.
    """

    def __init__(
        self,
        volume: Volume,
        node_log: Log,
        replicas: Replicas,
        wall_clock: WallClock,
        *,
        in_thread: InThread,
        fail: Callable[[Exception], None],
        log_stall_ms: int,
    ) -> None:
        self._volume = volume
        self._node_log = node_log
        self._replicas = replicas
        self._wall_clock = wall_clock
        self._in_thread = in_thread
        self._fail = fail
        self._log_stall_ms = log_stall_ms
        self.disk_bytes = (0, 0)
        """(free, used), as last measured."""
        self._told_low = False
        self._fit = True
        self._clock_due_ms = 0
        self._leaving: asyncio.Task[None] | None = None
        self._log_under_way: tuple[int, int] | None = None
        self._log_moved_ms = 0

    async def measure(self) -> None:
        """Measure how full the disk is."""
        self.disk_bytes = await self._in_thread(self._volume.disk_bytes)

    async def look(self) -> None:
        """Do one round of checks."""
        if self._node_log.failed is not None:  # first, because a failing disk may not report how full it is
            self._fail(self._node_log.failed)
        await self.measure()
        self._mind_space()

    def tick(self, now_ms: int) -> None:
        """Check the clock, and whether the disk hangs. `look` cannot check that, because a disk that hangs
        blocks it.

        `now_ms`: the time that the replicas count. It skips stalls of this process, so that a stall is not
        taken for a disk that hangs.
        """
        self._mind_clock(now_ms)
        under_way = self._node_log.under_way
        if under_way is None or under_way != self._log_under_way:
            self._log_under_way, self._log_moved_ms = under_way, now_ms
        elif now_ms - self._log_moved_ms > self._log_stall_ms:
            waited_s = (now_ms - self._log_moved_ms) // 1000
            self._fail(
                Retryable(
                    f"the disk of {self._node_log.directory} hangs: a write or sync of the log has not "
                    f"returned for {waited_s} s; check the disk, then start the node again",
                    code=Code.IO_ERROR,
                )
            )

    async def close(self) -> None:
        """Stop. A hand-over under way is given up."""
        if self._leaving is not None:
            self._leaving.cancel()
            await asyncio.gather(self._leaving, return_exceptions=True)

    def _mind_space(self) -> None:
        low = self._node_log.low_space
        if low and not self._told_low:
            log.warning(
                "the disk is nearly full; writes are refused",
                free_bytes=self.disk_bytes[0],
                free_inodes=self._node_log.free_files,
            )
            self._leaving = asyncio.create_task(self._replicas.hand_over_leadership(HAND_OVER_S))
        self._told_low = low

    def _mind_clock(self, now_ms: int) -> None:
        """Tell the replicas whether to stand for election, by whether the clock is right.

        Besides, each timestamp checks its own reading of the clock.
        """
        fault = self._wall_clock.fault(self._wall_clock.read())
        if self._fit != (not fault):
            self._fit, self._clock_due_ms = not fault, now_ms
            if fault:
                log.error(
                    "the clock of this node is wrong; until it is right, this node assigns no timestamps and leads "
                    "only tablets that no other node can lead",
                    error=fault,
                )
            else:
                log.warning("the clock of this node is right again")
            self._replicas.fit_to_lead(self._fit)
        under_way = self._leaving is not None and not self._leaving.done()
        if self._fit or under_way or now_ms < self._clock_due_ms:
            return
        self._clock_due_ms = now_ms + int(HAND_OVER_S * 1000)
        self._leaving = asyncio.create_task(self._replicas.hand_over_leadership(HAND_OVER_S, to_any=True))
