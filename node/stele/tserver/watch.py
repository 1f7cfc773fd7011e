"""What a node looks at once a second: its disk, its log, its gauges. At every tick: whether its log moves.

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
from collections import Counter
from typing import TYPE_CHECKING

import structlog

from stele import metrics
from stele.consensus.replica import ReplicaState
from stele.model.errors import Code, Retryable
from stele.tablet.store import TabletStore

if TYPE_CHECKING:
    from stele.tserver.node import Node

log = structlog.get_logger("stele.tserver")

HAND_OVER_S = 10.0


class NodeWatch:
    """`look` once a second, `tick` at each tick; `measure` before anything that wants the disk's figures."""

    def __init__(self, node: Node) -> None:
        self._node = node
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
        self.disk_bytes = await self._node.in_thread(self._node.volume.disk_bytes)

    async def look(self) -> None:
        """One round."""
        await self.measure()
        self._mind_space()
        self._count()
        if self._node.log.failed is not None:
            self._node.fail(self._node.log.failed)

    def tick(self, now_ms: int) -> None:
        """Time has passed, as the replicas count it: a stall of ours is none of the disk's.

        Not in `look`, which a disk that hangs holds up as well.
        """
        self._mind_clock(now_ms)
        under_way = self._node.log.under_way
        if under_way is None or under_way != self._log_under_way:
            self._log_under_way, self._log_moved_ms = under_way, now_ms
        elif now_ms - self._log_moved_ms > self._node.options.log_stall_ms:
            waited_s = (now_ms - self._log_moved_ms) // 1000
            self._node.fail(
                Retryable(
                    f"the disk of {self._node.log.directory} hangs: a write or sync of the log has not returned for "
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
        node = self._node
        low = node.low_space()
        if low and not self._told_low:
            log.warning(
                "the disk is nearly full; writes are refused",
                free_bytes=self.disk_bytes[0],
                free_inodes=node.log.free_files,
            )
            self._leaving = asyncio.create_task(node.replicas.hand_over_leadership(HAND_OVER_S))
        self._told_low = low

    def _mind_clock(self, now_ms: int) -> None:
        """Timestamps judge each reading by themselves; here the replicas are told whether to stand for election."""
        node = self._node
        fault = node.clock_fault(node.wall_us())
        if self._fit != (not fault):
            self._fit, self._clock_due_ms = not fault, now_ms
            if fault:
                log.error("this node makes no timestamps, and leads where nobody else can", error=fault)
            else:
                log.warning("the clock of this node is right again")
            node.replicas.fit_to_lead(self._fit)
        under_way = self._leaving is not None and not self._leaving.done()
        if self._fit or under_way or now_ms < self._clock_due_ms:
            return
        self._clock_due_ms = now_ms + int(HAND_OVER_S * 1000)
        self._leaving = asyncio.create_task(node.replicas.hand_over_leadership(HAND_OVER_S, to_any=True))

    def _count(self) -> None:
        node = self._node
        ahead_us = node.wall_clock.ahead_us
        metrics.clock_ahead_seconds.set((ahead_us or 0) / 1e6)
        states = Counter(r.state for r in node.replicas)
        for state in ReplicaState:
            metrics.replicas.labels(state.name).set(states[state])
        metrics.replicas_leading.set(sum(r.is_leader for r in node.replicas))
        metrics.replicas_resting.set(node.quiet.resting)
        metrics.store_files.set(
            sum(len(r.machine.files) for r in node.replicas if isinstance(r.machine, TabletStore))
        )
        metrics.store_memory_bytes.set(node.stores.bytes)
        metrics.wal_bytes.set(node.log.bytes_on_disk)
        metrics.disk_free_bytes.set(self.disk_bytes[0])
        metrics.copy_sessions.set(len(node.sessions))
