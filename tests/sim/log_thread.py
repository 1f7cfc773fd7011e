"""The thread of a node's log, and its syncs in the background: both take simulated time. One for each life of
a node.

Invariant: once the node's life has ended it does nothing more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stele.wal import Log
from stele.wal.append_queue import Writer

if TYPE_CHECKING:
    from tests.sim.disk import WorldSync
    from tests.sim.node import SimNode


class LogThread:
    """The thread of one log. `marks`: the last two places up to which it was synced, as (sequence,
    offset)."""

    def __init__(self, node: SimNode, log: Log) -> None:
        self._node = node
        self._world = node.world
        self._log = log
        self._life = node.life
        self._due = False
        self.marks = [(0, 0), (0, 0)]

    @property
    def _over(self) -> bool:
        return self._life != self._node.life

    def _takes(self) -> float:
        node, world = self._node, self._world
        return world.now + world.rng.uniform(0.05, world.plan.sync_ms) + node.disk_waits()

    def look(self) -> None:
        """Do the waiting work, if there is any, and record what is synced."""
        at = self._log.synced_place
        mark = (at >> 40, at & ((1 << 40) - 1))
        if mark != self.marks[1]:
            self.marks = [self.marks[1], mark]
        if self._log.shared.append_queue.writer is Writer.THREAD and not self._due:
            self._due = True
            self._world.at(self._takes(), self._turn)

    def _turn(self) -> None:
        if self._over:
            return
        self._due = False
        self._log.turn()
        if not self._node.lost_power():
            self.look()

    def sync_begins(self, sync: WorldSync, number: int) -> None:
        """The log's loop has begun a sync in the background."""
        self._world.at(self._takes(), self._sync_ends, sync, number)

    def _sync_ends(self, sync: WorldSync, number: int) -> None:
        loop = self._node.loop
        if self._over or loop is None or sync.begun != number or not sync.under_way:
            return
        sync.end()
        if not self._node.lost_power():
            loop.call_soon(sync.tell)
