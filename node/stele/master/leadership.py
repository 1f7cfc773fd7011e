"""The state that only the leading master has: locks, running operations, and how a batch is committed.

Made when a master leads and knows everything acknowledged before; discarded when it stops leading. Invariant:
an operation runs until its outcome is known, even if its caller stops waiting. Only then are its locks
released.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog

from stele import metrics
from stele.consensus.shielded import ShieldedTasks
from stele.master.catalog import Catalog
from stele.master.liveness import Liveness
from stele.master.locks import Locks
from stele.master.placement import Candidate
from stele.master.port import CatalogLog
from stele.master.records import NodeRecord, TableRecord
from stele.master.removals import Removals
from stele.model.errors import Code, NotLeader, Rejected, Retryable, SteleError
from stele.model.ids import OpId
from stele.model.kvop import KeyOperation

log = structlog.get_logger("stele.master")

MASTER_HOLDER = "master/"
"""How the name of a claim's holder begins when a master drives."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MasterOptions:
    """Options of a master; times in ms.

    `alive_ms`: after this much silence a node gets no new replicas; it keeps those it has.
    `disk_free_bytes_min`: a node with less free disk gets replicas only if no other can take them. Below 256
    MiB a node refuses them itself.
    """

    heartbeat_interval_ms: int = 1_000
    alive_ms: int = 3_500
    create_timeout_ms: int = 30_000
    order_retry_ms: int = 1_000
    missing_after_ms: int = 5_000
    """How long full reports must lack a replica before it counts as gone."""
    sweep_ms: int = 1_000
    forget_after_ms: int = 3_600_000
    """The shortest time for which the row of a deleted tablet stays (forgetting.py)."""
    tablets_per_node_max: int = 2_000
    create_bytes_max: int = 8 << 20
    locations_ttl_ms: int = 60_000
    disk_free_bytes_min: int = 512 << 20
    drive_after_ms: int = 120_000
    """After this much silence of all drivers the leader drives; 0: never. A policy in the catalog takes
    precedence."""


@dataclass(slots=True)
class Leadership:
    """The state of one term as leader."""

    term: int
    log: CatalogLog
    catalog: Catalog
    liveness: Liveness
    options: MasterOptions
    now_ms: Callable[[], int]
    wall_us: Callable[[], int]
    locks: Locks = field(default_factory=Locks)
    removals: Removals = field(default_factory=Removals)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    dirty: dict[str, None] = field(default_factory=dict)
    """Tablets that the background must examine, oldest first."""
    ended: bool = False
    claim_seen_ms: int = field(init=False)
    """When this leader last granted the driver's claim. A claim from an earlier leader counts as granted when
    this leader began.
    """
    claim_ttl_ms: int | None = None
    """How long the claim lasts after `claim_seen_ms`. None: an earlier leader granted it, and only that
    leader knew its lifetime.
    """
    wanted_since_ms: dict[str, int] = field(default_factory=dict)
    """By node: when this leader wrote the `left_ms` of its row. Other rows count from this leader's own
    start, so a new leader never shortens a time.
    """
    kept_until_ms: dict[str, int] = field(default_factory=dict)
    """By dropped table: until when it is kept, on this leader's steady clock.

    A `keep_ms` that is written meanwhile does not change this. So a write with an unknown outcome shortens no
    time.
    """
    began_ms: int = field(init=False)
    driver_heard_ms: int = field(init=False)
    """When a driver other than this master was last heard. If none was, the time when this master began to
    lead.
    """
    full: bool = False
    """Whether this pass of the background skipped work because the catalog is full."""
    _running: ShieldedTasks = field(default_factory=ShieldedTasks)

    def __post_init__(self) -> None:
        self.claim_seen_ms = self.began_ms = self.driver_heard_ms = self.now_ms()

    def hear_driver(self, holder: str) -> None:
        """Record that a driver is at work. A driving master does not count."""
        if holder and not holder.startswith(MASTER_HOLDER):
            self.driver_heard_ms = self.now_ms()

    async def do(self, operation: Coroutine[Any, Any, T]) -> T:
        """Run an operation to its end. If the caller is cancelled, only the waiting ends."""
        return await self._running.run(operation)

    async def commit(self, operations: Sequence[KeyOperation]) -> None:
        """Replicate one batch. On return it is in memory. The caller holds the locks of the rows that the
        batch changes.

        Raises:
            SteleError: as `CatalogLog.propose`.
        """
        self.check()
        try:
            await self.log.propose(operations)
        except SteleError as exc:
            metrics.master_batches.labels(exc.code.name).inc()
            raise
        metrics.master_batches.labels(Code.OK.name).inc()

    def has_room(self, operations: Sequence[KeyOperation], quarters: int = 4) -> bool:
        """Whether `quarters` quarters of the catalog have room for this batch. A batch that adds no bytes
        always fits."""
        space = self.log.key_space
        if space is None:
            return True  # the proposal itself reports the error
        try:
            growth = space.check_operations(operations)
        except Rejected:
            return False
        return not growth or space.held_bytes + growth <= space.bytes_max * quarters // 4

    def fitting(self, changes: Sequence[KeyOperation]) -> list[KeyOperation]:
        """The changes for which the catalog has room: all of them, unless it is full. Each must change a
        different row.
        """
        found = list(changes)
        if not self.has_room(found):
            found = []
            for change in changes:
                if self.has_room([*found, change]):
                    found.append(change)
            self.full = True
        return found

    def check(self) -> None:
        """Raise NOT_LEADER unless this master still leads in this term."""
        if self.ended or not self.log.is_leader or self.log.term != self.term:
            raise NotLeader("this master is no longer the leader", leader_hint=self.log.leader_node)

    def look_at(self, tablet_id: str) -> None:
        """Have the background examine a tablet soon."""
        self.dirty[tablet_id] = None
        self.wake.set()

    @property
    def order_opid(self) -> OpId:
        """The OpId in orders to nodes. Nodes refuse orders from an older leader or state."""
        return OpId(self.term, self.catalog.opid.index)

    @property
    def settled(self) -> bool:
        """Whether all live nodes have had time for a heartbeat: 1.5 heartbeat intervals, or less if each
        expected node has sent a full report.
        """
        if self.now_ms() - self.liveness.began_ms >= self.options.heartbeat_interval_ms * 3 // 2:
            return True
        expected = [n.node_id for n in self.catalog.nodes.values() if n.formed and n.state != "RETIRED"]
        return bool(expected) and self.liveness.all_full(expected)

    def check_settled(self) -> None:
        """Raise NOT_READY until `settled`, so that no caller is told "too few nodes" too early."""
        if not self.settled:
            raise Retryable(
                "this master became leader a moment ago and has not heard from all nodes; try again",
                code=Code.NOT_READY,
            )

    def is_alive(self, node: NodeRecord) -> bool:
        """Whether the node sent a heartbeat within `alive_ms`, so that it may get work."""
        if not self.liveness.ever_heard(node.node_id):
            return False
        return self.liveness.age_ms(node.node_id, self.now_ms()) <= self.options.alive_ms

    def left_ms(self, node: NodeRecord) -> int:
        """How long the wanted state of a node still lasts. 0: it has no end, or its time is over."""
        since_ms = self.wanted_since_ms.get(node.node_id, self.began_ms)
        return max(0, node.left_ms - (self.now_ms() - since_ms)) if node.left_ms else 0

    def keep_left_ms(self, table: TableRecord) -> int:
        """How long a dropped table can still be recalled; 0: its time is over."""
        until_ms = self.kept_until_ms.setdefault(table.table_id, self.began_ms + table.keep_ms)
        return max(0, until_ms - self.now_ms())

    def candidates(self) -> list[Candidate]:
        """Live nodes that take replicas and are `formed`. Each has the number of replicas that configurations
        give it, and of tablets that it leads.

        A node that is not `formed` is left out. If its volume were lost, the volume would be formatted again
        under the same id, without the node's votes.
        """
        counts, leads = self.catalog.replicas, self.catalog.leads
        return [
            Candidate(
                *(n.node_id, n.machine or n.node_id, n.zone, counts[n.node_id], self._is_full(n)),
                leads[n.node_id],
            )
            for n in self.catalog.nodes.values()
            if n.role == "node" and n.takes_replicas and n.formed and self.is_alive(n)
        ]

    def _is_full(self, node: NodeRecord) -> bool:
        free = self.liveness.disk_free(node.node_id)
        few = free is not None and free < self.options.disk_free_bytes_min
        return few or self.liveness.disk_low(node.node_id)

    def active_machines(self) -> set[str]:
        """The machines of all ACTIVE nodes, silent and parked ones included."""
        return {
            n.machine or n.node_id
            for n in self.catalog.nodes.values()
            if n.role == "node" and n.state == "ACTIVE"
        }

    def end(self) -> None:
        """Stop leading: no operation begins any more. A running operation ends with the error of its
        proposal.
        """
        self.ended = True
        self.wake.set()
