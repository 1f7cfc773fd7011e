"""What a node looks at once a second: its disk and its log. At every tick: whether its log moves.

Owns the last measurement of the disk. Decides nothing about tablets but one thing: a node whose disk gets full, or whose
clock is wrong, hands its leaders over.

A disk that hangs gives no error, and the node answers heartbeats: it would take the fault tolerance of all its tablets
in silence. So it ends, and is healed as a silent node is. (CockroachDB does the same after the same 20 s.)

Invariant: leaders are handed over once for each time that the disk gets full, however long it stays so. If the others
have no space either, leaders would go round and round. Those of a node whose clock is wrong can do nothing: while it is,
they are handed over again each HAND_OVER_S.
"""

from __future__ import annotations

import asyncio

import structlog

from stele.consensus.ports import Host
from stele.model.errors import Code, Retryable
from stele.tserver.replicas import Replicas
from stele.tserver.volume import Volume
from stele.wal.log import Log

log = structlog.get_logger("stele.tserver")

HAND_OVER_S = 10.0


class NodeWatch:
    """`look` once a second, `tick` at each tick; `measure` before anything that wants the disk's figures."""

    def __init__(
        self, volume: Volume, node_log: Log, replicas: Replicas, host: Host, *, log_stall_ms: int
    ) -> None:
        self._volume = volume
        self._node_log = node_log
        self._replicas = replicas
        self._host = host
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
        """Ask the volume how full it is."""
        self.disk_bytes = await self._host.in_thread(self._volume.disk_bytes)

    async def look(self) -> None:
        """One round."""
        if self._node_log.failed is not None:  # first: a disk that fails may not say how full it is
            self._host.fail(self._node_log.failed)
        await self.measure()
        self._mind_space()

    def tick(self, now_ms: int) -> None:
        """Time has passed, as the replicas count it: a stall of ours is none of the disk's.

        Not in `look`, which a disk that hangs holds up as well.
        """
        self._mind_clock(now_ms)
        under_way = self._node_log.under_way
        if under_way is None or under_way != self._log_under_way:
            self._log_under_way, self._log_moved_ms = under_way, now_ms
        elif now_ms - self._log_moved_ms > self._log_stall_ms:
            waited_s = (now_ms - self._log_moved_ms) // 1000
            self._host.fail(
                Retryable(
                    f"the disk of {self._node_log.directory} hangs: a write or sync of the log has not returned for "
                    f"{waited_s} s; look at the disk, then start again",
                    code=Code.IO_ERROR,
                )
            )

    async def close(self) -> None:
        """Stop handing over."""
        if self._leaving is not None:
            self._leaving.cancel()
            await asyncio.gather(self._leaving, return_exceptions=True)

    def _mind_space(self) -> None:
        low = self._host.low_space()
        if low and not self._told_low:
            log.warning(
                "the disk is nearly full; writes are refused",
                free_bytes=self.disk_bytes[0],
                free_inodes=self._node_log.free_files,
            )
            self._leaving = asyncio.create_task(self._replicas.hand_over_leadership(HAND_OVER_S))
        self._told_low = low

    def _mind_clock(self, now_ms: int) -> None:
        """Timestamps judge each reading by themselves; here the replicas are told whether to stand for election."""
        fault = self._host.clock_fault(self._host.wall_us())
        if self._fit != (not fault):
            self._fit, self._clock_due_ms = not fault, now_ms
            if fault:
                log.error("this node makes no timestamps, and leads where nobody else can", error=fault)
            else:
                log.warning("the clock of this node is right again")
            self._replicas.fit_to_lead(self._fit)
        under_way = self._leaving is not None and not self._leaving.done()
        if self._fit or under_way or now_ms < self._clock_due_ms:
            return
        self._clock_due_ms = now_ms + int(HAND_OVER_S * 1000)
        self._leaving = asyncio.create_task(self._replicas.hand_over_leadership(HAND_OVER_S, to_any=True))
