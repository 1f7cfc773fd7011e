"""The core of a master: follows the catalog, starts and stops leading, keeps liveness. service.py and
server.py use it.

Invariant: a new leader answers nothing from memory before a read barrier has passed. Its memory must hold the
whole key space up to that barrier.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack

import structlog

from stele import metrics
from stele.master.background import Background
from stele.master.catalog import Catalog
from stele.master.cluster_view import Scene, written_keep_left, written_left
from stele.master.following import Following
from stele.master.leadership import Leadership, MasterOptions
from stele.master.liveness import Liveness
from stele.master.orders import Orders
from stele.master.port import CatalogLog, insert
from stele.master.records import (
    INTENT_PREFIX,
    TABLET_PREFIX,
    ClusterRecord,
    NodeRecord,
    TabletRecord,
)
from stele.master.standing_in import StandIn
from stele.master.starts import Starts
from stele.master.view_changes import ViewChanges
from stele.model.cluster_version import CLUSTER_VERSION
from stele.model.config import Configuration
from stele.model.errors import Code, NotLeader, Retryable, SteleError, of_later_program
from stele.model.ids import CATALOG_TABLET_ID, TableId
from stele.model.kvop import KeyOperation
from stele.model.partition import Partition
from stele.rpc.channels import ChannelPool
from stele.rpc.proto import master_pb2
from stele.tserver.wall_clock import monotonic_us

log = structlog.get_logger("stele.master")

CATALOG_TABLE_ID = TableId("0" * 32)
_BARRIER_RETRY_S = 0.05


def wall_us() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1000


def monotonic_ms() -> int:
    """Milliseconds of the monotonic clock."""
    return time.monotonic_ns() // 1_000_000


class Master:
    """The master of a process. Call `start` before use, `stop` at the end."""

    def __init__(
        self,
        node_id: str,
        cluster_id: str,
        catalog_log: CatalogLog,
        pool: ChannelPool,
        options: MasterOptions | None = None,
        *,
        now_ms: Callable[[], int] = monotonic_ms,
        wall: Callable[[], int] = wall_us,
        on_failure: Callable[[Exception], None] | None = None,
        adopted: bool = False,
    ) -> None:
        self.node_id = node_id
        self.cluster_id = cluster_id
        self.log = catalog_log
        self.options = options or MasterOptions()
        self.now_ms = now_ms
        self.wall_us = wall
        self.liveness = Liveness(now_ms(), adopted=adopted)
        self.lead: Leadership | None = None
        self.view_changes: ViewChanges | None = None
        """The changes of the view under the present leadership. None while this master does not lead."""
        self.starts = Starts(pool, lambda: self.liveness, now_ms, self.options.alive_ms)
        self._pool = pool
        self._on_failure = on_failure
        self._following: Following | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to follow the role of the catalog tablet's replica."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._ended)
        self.log.on_role_change(self._changed.set)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End the process if the master's task ended before `stop`: the process must not run without its
        master.

        The causes are rows of a later version, and bugs.
        """
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            log.error("the master failed, so this process ends", exc_info=error)
            if self._on_failure is not None:
                self._on_failure(error)

    async def stop(self) -> None:
        """Stop leading, and stop the task."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.starts.close()

    # --- leading ---

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self.log.key_space is None:
                continue
            leads = self.log.is_leader
            try:
                await self._load()
                if self.log.is_leader:
                    await self._lead_once()
            except SteleError as exc:
                if of_later_program(exc):
                    raise
                log.info(
                    "cannot lead yet; trying again" if leads else "cannot read the catalog yet; trying again",
                    error=str(exc),
                )
                await asyncio.sleep(_BARRIER_RETRY_S)
                if leads:
                    self._changed.set()

    async def _lead_once(self) -> None:
        """Lead for one term, from the election to its end."""
        term = self.log.term
        await self.log.read_barrier()
        catalog = self.catalog
        self.liveness.begin_leading(self.now_ms(), catalog.incarnation_of)
        lead = Leadership(term, self.log, catalog, self.liveness, self.options, self.now_ms, self.wall_us)

        def look(key: bytes) -> None:
            _look(lead, key)

        catalog.on_change(look)
        orders = Orders(lead, self._pool)
        tasks: list[asyncio.Task[None]] = []
        following = ExitStack()
        try:
            lead.check()
            if catalog.cluster is None:
                await lead.commit(first_rows(self.cluster_id, self.log.committed_config, self.wall_us()))
            changes = ViewChanges(self.scene)
            following.callback(changes.end)
            await changes.load()
            lead.check()
            self.lead, self.view_changes = lead, changes
            metrics.master_leads.set(1)
            log.info("leading", term=term, tables=len(catalog.tables), nodes=len(catalog.nodes))
            stand_in = StandIn(lead, self._pool, self.scene, changes, self.node_id)
            for work in (Background(lead, orders), stand_in):
                task = asyncio.get_running_loop().create_task(work.run())
                task.add_done_callback(lambda _: self._changed.set())
                tasks.append(task)
            while self._leads(term):
                for task in tasks:
                    if task.done():
                        task.result()
                self._changed.clear()
                await self._changed.wait()
        finally:
            self.lead = self.view_changes = None
            following.close()
            lead.end()
            catalog.no_more_changes(look)
            metrics.master_leads.set(0)
            log.info("this master is no longer the leader", term=term)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await orders.close()

    def _leads(self, term: int) -> bool:
        return self.log.is_leader and self.log.term == term and self._follows()

    def _follows(self) -> bool:
        """Whether the catalog in memory follows the key space that the catalog's replica has now."""
        following = self._following
        return following is not None and following.complete and following.key_space is self.log.key_space

    async def _load(self) -> None:
        """Make the memory follow the present key space. Returns at once if it does already."""
        while not self._follows() and (key_space := self.log.key_space) is not None:
            if self._following is None or self._following.key_space is not key_space:
                if self._following is not None:
                    self._following.end()
                self._following = Following(key_space)
            await self._following.load()

    # --- what services ask ---

    @property
    def catalog(self) -> Catalog:
        """The catalog as this master knows it, leader or not.

        Raises:
            Retryable: NOT_READY, it has not read all rows yet.
        """
        if self._following is None or not self._follows():
            self._changed.set()
            raise Retryable("this master does not hold the catalog yet; ask another", code=Code.NOT_READY)
        return self._following.catalog

    def require_lead(self) -> Leadership:
        """The leadership in force.

        Raises:
            NotLeader: another master leads (with a hint if known).
            Retryable: NOT_READY, this master was elected and still loads the catalog.
        """
        if self.lead is not None and not self.lead.ended:
            self.lead.check()
            return self.lead
        if self.log.is_leader:
            raise Retryable(
                "this master was just elected and still loads the catalog; try again", code=Code.NOT_READY
            )
        raise NotLeader(f"master {self.node_id[:8]} is not the leader", leader_hint=self.log.leader_node)

    async def confirmed_lead(self) -> Leadership:
        """The leadership in force, confirmed by a read barrier (ReadIndex). Everything acknowledged before is
        in memory.

        Answers that propose nothing need it. A leader that was replaced without knowing it would answer from
        old rows.

        Raises:
            SteleError: as `require_lead`, and NO_QUORUM or TIMED_OUT.
        """
        lead = self.require_lead()
        await lead.log.read_barrier()
        lead.check()
        return lead

    def tell_clocks(self, answer: master_pb2.TSHeartbeatResponse) -> None:
        """Add to an answer the time on which most clocks agree: the clocks of the nodes that this master
        hears, and its own.
        """
        clock_us, wall = monotonic_us(), self.wall_us()
        answer.clock_id, answer.clock_us, answer.wall_us = self.liveness.clock_id, clock_us, wall
        agreed_us = self.liveness.wall_agreed(
            self.node_id, wall - clock_us, self.now_ms(), self.options.alive_ms
        )
        if agreed_us is not None:
            answer.wall_agreed_us = clock_us + agreed_us

    def scene(self) -> Scene:
        """The sources of an answer at this moment."""
        self.liveness.awake(self.now_ms())
        lead = self.lead
        return Scene(
            self.catalog,
            self.liveness,
            self.options,
            self.now_ms(),
            self.wall_us(),
            self.log.leader_node,
            self.log.term,
            self.log.committed_config,
            lead is not None and lead.settled,
            lead.left_ms if lead is not None else written_left,
            lead.keep_left_ms if lead is not None else written_keep_left,
        )


def _look(lead: Leadership, key: bytes) -> None:
    """Schedule a background check of a tablet whose row or intent changed."""
    for prefix in (TABLET_PREFIX, INTENT_PREFIX):
        if key.startswith(prefix) and not lead.ended:
            lead.look_at(key[len(prefix) :].decode())


def first_rows(cluster_id: str, config: Configuration, now_us: int) -> list[KeyOperation]:
    """The first batch of a new cluster: the rows of the cluster, of its catalog tablet and of its first
    masters.
    """
    peers = config.peers
    catalog = TabletRecord(
        CATALOG_TABLET_ID,
        CATALOG_TABLE_ID,
        0,
        "RUNNING",
        Partition(),
        now_us,
        config,
        next_replica_id=max((p.replica_id for p in peers), default=0) + 1,
    )
    masters = [NodeRecord(p.node_id, "master", "ACTIVE", formed=True, address=p.address) for p in peers]
    rows = [insert(catalog), *(insert(m) for m in masters)]
    return [*rows, insert(ClusterRecord(cluster_id, CLUSTER_VERSION, len(peers)))]
