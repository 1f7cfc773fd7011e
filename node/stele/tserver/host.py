"""What a replica needs from its node (`stele.consensus.ports.Host`), assembled from the node's parts. Decides
nothing.

Invariant: nothing here blocks the event loop. Calls on hot paths are the parts' own methods, with nothing in between.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from stele.consensus.ports import HostedReplica
from stele.model.ids import NodeId, StreamKey
from stele.tserver.memory import StoreMemory
from stele.tserver.messenger import Messenger
from stele.tserver.shutdown import Shutdown
from stele.tserver.threads import NodeThreads
from stele.tserver.ticker import ReplicaClock
from stele.tserver.wall_clock import WallClock
from stele.wal.log import Log


class NodeHost:
    """The Host of all replicas of a node.

    `report_due(key)`: this replica must be reported to the masters again. `woken(key)`: this replica was at
    rest, and must be ticked again.
    """

    def __init__(
        self,
        node_id: NodeId,
        clock: ReplicaClock,
        wall_clock: WallClock,
        threads: NodeThreads,
        messenger: Messenger,
        stores: StoreMemory,
        node_log: Log,
        shutdown: Shutdown,
        *,
        report_due: Callable[[StreamKey], None],
        woken: Callable[[StreamKey], None],
        cluster_version: Callable[[], int],
    ) -> None:
        self.node_id = node_id
        self.now_ms = clock.now_ms
        self.steady_us = wall_clock.monotonic_us
        self.wall_us = wall_clock.read
        self.clock_fault = wall_clock.fault
        self.send = messenger.send
        self.takes_beats = messenger.beating.takes_beats
        self.beat = messenger.beating.beat
        self.read_came = messenger.confirming.read_came
        self.ask_leader = messenger.following.ask_leader
        self.dropped = messenger.dropped
        self.fail = shutdown.fail
        self.in_thread = threads.in_thread
        self.cluster_version = cluster_version
        self._wall_clock = wall_clock
        self._stores = stores
        self._log = node_log
        self._shutdown = shutdown
        self._report_due = report_due
        self._woken = woken
        self._random = random.Random()

    def latest_time(self) -> int:
        """The highest hybrid time that an uncommitted entry may have."""
        return self._wall_clock.latest_time

    def randint(self, a: int, b: int, /) -> int:
        """A whole number from a to b, both included."""
        return a + int(self._random.random() * (b - a + 1))

    def woken(self, replica: HostedReplica) -> None:
        """Tick a replica again that was at rest."""
        self._woken(replica.superblock.key)

    def changed(self, replica: HostedReplica) -> None:
        """Report a replica: its state, role, term or configuration differs from its last report."""
        self.changed_key(replica.superblock.key)

    def changed_key(self, key: StreamKey) -> None:
        """Report the replica under this key, which differs from its last report. Does nothing while the node
        stops.
        """
        if not self._shutdown.stopping:
            self._report_due(key)

    def low_space(self) -> bool:
        """Whether writes must be refused because the disk is nearly full."""
        return self._log.low_space

    def stores_full(self) -> bool:
        """Whether writes have to wait for flushes."""
        return self._stores.full
