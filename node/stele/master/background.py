"""The leader's background task: updates the catalog from reports, and orders nodes to match the catalog.

Each pass compares the rows of some tablets with the newest reports, and does what is due. A tablet is looked
at when its row or a report changed. Each sweep looks at the tablets that are not RUNNING, or for which
anything is due. As a safeguard every tablet is also looked at now and then without a cause. Between passes
the task remembers only which tablets to look at next, and when each order was last sent.

Invariant: a row changes only under its lock, based on its value then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import replace
from itertools import islice

import structlog

from stele import metrics
from stele.master.altering import Alterations
from stele.master.dropping import keep_dropped_time
from stele.master.forgetting import Forgetting
from stele.master.leadership import Leadership
from stele.master.nodes import record_registrations
from stele.master.orders import Orders
from stele.master.patience import Patience
from stele.master.placement import Placement
from stele.master.port import insert, swap, unchanged
from stele.master.records import TABLET_STATES, TabletRecord, deleted_row
from stele.master.replica_ids import raised
from stele.master.wanted import keep_time
from stele.model.config import Configuration, Peer
from stele.model.errors import Code, Retryable, SteleError
from stele.model.ids import CATALOG_TABLET_ID, ReplicaId, TabletId, new_id
from stele.model.incarnation import is_newer, within_reach
from stele.model.kvop import KeyOperation
from stele.rpc.convert import config_from_pb
from stele.rpc.logging import OncePer
from stele.rpc.proto import common_pb2

log = structlog.get_logger("stele.master")

TABLETS_AT_ONCE = 64
"""The most tablets that one turn of the event loop examines (some 4 ms) and one batch changes."""
ROUND_SWEEPS = 64
"""Each tablet is looked at without a cause once in this many sweeps; in a small cluster, in every sweep.

Each look takes some 0.1 ms. Ten thousand looks in every sweep would take all the time of a master.
"""
CREATING_PER_NODE = 32
"""The most tablets for each live node that are CREATING at once. The others wait as PREPARING.

A tablet that is CREATING has a limited time to get a leader. It must not spend that time in line behind a thousand others.
"""
REPLACED_QUARTERS = 3
"""How many quarters of the catalog replacement tablets may fill. While nodes do not answer, tablets are
replaced again and again.

The last quarter is for changes of existing tablets and nodes, which are bounded.
"""
REFUSED_TOLD = 8
"""A warning is logged after this many refused passes in a row."""


class Background:
    """The background task of one leadership."""

    def __init__(self, lead: Leadership, orders: Orders) -> None:
        self._lead = lead
        self._orders = orders
        self._forgetting = Forgetting(lead, orders)
        self._alterations = Alterations(lead)
        self._swept_ms = 0
        self._open: dict[str, None] = {}
        """Tablets to look at in the next sweep: something was due, or they are not RUNNING."""
        self._queue: dict[str, int] = {}
        """PREPARING tablets in line, oldest first, and how many replicas each needs. They are placed as fewer are CREATING."""
        self._patience = Patience(lead)
        self._once = OncePer()
        self._round: list[str] | None = None
        """Tablets that the present round of looks without a cause has still to look at. None: a new leader,
        which looks at all.
        """
        self._refused = 0
        """Passes in a row that ended with CAS_FAILED."""
        self._full = False
        """Whether the message "the catalog is full" was logged and still holds."""

    async def run(self) -> None:
        """Examine changed tablets, and from time to time all tablets, until the leadership ends."""
        lead = self._lead
        while not lead.ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(lead.options.sweep_ms / 1000):
                    await lead.wake.wait()
            lead.wake.clear()
            if lead.ended:
                return
            try:
                await self.look()
                self._refused = 0
            except SteleError as exc:
                self._log_unfinished(exc)
                await asyncio.sleep(0.05)

    def _log_unfinished(self, error: SteleError) -> None:
        """Log why a pass failed. A row that changed meanwhile is normal and is not logged.

        If rows changed in pass after pass, memory and key space differ. That is logged at the 8th, 16th,
        32nd, ... time.
        """
        if error.code is not Code.CAS_FAILED:
            log.info("background pass not finished; the next pass tries again", error=str(error))
            return
        self._refused += 1
        if self._refused >= REFUSED_TOLD and self._refused & (self._refused - 1) == 0:
            log.warning(
                "background passes keep failing with CAS_FAILED", passes=self._refused, error=str(error)
            )

    async def look(self) -> None:
        """Run one pass. Work that it could not finish stays due."""
        lead = self._lead
        now = lead.now_ms()
        lead.liveness.awake(now)
        lead.full = False
        await record_registrations(lead)
        sweep = now - self._swept_ms >= lead.options.sweep_ms
        if sweep:
            self._swept_ms = now
            self._orders.forget_old()
            lead.dirty.update((t, None) for t in self._to_sweep())
            for state in TABLET_STATES:
                metrics.master_tablets.labels(state).set(lead.catalog.states[state])
        due = list(lead.dirty)
        for start in range(0, len(due), TABLETS_AT_ONCE):
            chosen = due[start : start + TABLETS_AT_ONCE]
            for tablet_id in chosen:
                lead.dirty.pop(tablet_id, None)
            try:
                await self._look_at(chosen)
            except SteleError:
                lead.dirty.update((t, None) for t in chosen)
                raise
            await asyncio.sleep(0)  # if nothing was due, no await has yet given other tasks a turn
        if lead.settled:
            await self._place_line()
        await self._alterations.look()
        if sweep:
            await keep_time(lead)
            await self._forgetting.step()
            await keep_dropped_time(lead)
            self._log_full()

    def _to_sweep(self) -> list[str]:
        """The tablets to look at in a sweep."""
        catalog = self._lead.catalog
        share = max(TABLETS_AT_ONCE, -(-len(catalog.current) // ROUND_SWEEPS))
        left = self._round or list(catalog.current)
        if self._round is None:  # the line begins in the order in which tablets began to wait
            share = len(left)
            left.sort(key=lambda t: catalog.tablets[t].since_us)
        chosen, self._round = left[:share], left[share:]
        altering = [t for table_id in catalog.altering for t in catalog.tablets_of.get(table_id, ())]
        # A deleted tablet needs attention only while a node still reports a replica of it.
        gone = [t for t in self._lead.liveness.reported() if t in catalog.gone]
        return [CATALOG_TABLET_ID, *self._open, *altering, *gone, *chosen]

    def _log_full(self) -> None:
        """Log that the catalog is full. It is logged again only after a pass that had room for everything."""
        space = self._lead.log.key_space
        if self._lead.full and not self._full and space is not None:
            log.error(
                "the catalog is full, so changes of nodes and tablets are not recorded. Delete tables and "
                "forget nodes that are gone for good. Rows of deleted tables leave the catalog after an "
                "hour, when all nodes that are not RETIRED have reported",
                bytes=space.held_bytes,
                bytes_max=space.bytes_max,
            )
        self._full = self._lead.full

    async def _look_at(self, tablet_ids: list[str]) -> None:
        lead = self._lead
        known = [t for t in tablet_ids if t in lead.catalog.tablets]
        due = [t for t in known if self._changed(lead.catalog.tablets[t]) != lead.catalog.tablets[t]]
        if due:
            await lead.do(self._follow_reports(due))
        for tablet_id in known:
            if self._too_late(lead.catalog.tablets[tablet_id]):
                await lead.do(self._replace(tablet_id))
        for tablet_id in tablet_ids:
            row = lead.catalog.tablets.get(tablet_id)
            ordered = row is not None and self._orders.consider(row)
            if row is not None and (ordered or tablet_id in due or row.state == "CREATING"):
                self._open[tablet_id] = None
            else:
                self._open.pop(tablet_id, None)
            if row is not None and row.state == "PREPARING":
                self._queue[tablet_id] = lead.catalog.replication_factor(row)
            else:
                self._queue.pop(tablet_id, None)

    # --- rows follow reports ---

    async def _follow_reports(self, tablet_ids: list[str]) -> None:
        lead = self._lead
        async with lead.locks.hold(tablets=tablet_ids):
            rows = [lead.catalog.tablets[t] for t in tablet_ids]
            due = [(row, changed) for row in rows if (changed := self._changed(row)) != row]
            if batch := lead.fitting([swap(row, changed) for row, changed in due]):
                await lead.commit(batch)
            for row, changed in due:
                if lead.catalog.tablets.get(row.tablet_id) == changed:
                    _log_change(row, changed)

    def _changed(self, row: TabletRecord) -> TabletRecord:
        """The row, updated from the newest reports."""
        lead = self._lead
        if row.state not in ("CREATING", "RUNNING"):
            return row
        config, term = row.config, row.term
        if row.tablet_id == CATALOG_TABLET_ID:
            own = lead.log.committed_config
            if own.peers and own.version > config.version:
                config, term = own, max(term, lead.term)
            next_id = raised(row, config)
            if config == row.config and next_id == row.next_replica_id:
                return row
            incarnation = max(row.incarnation, config.incarnation)  # `stele local cmeta rewrite` raised it
            return replace(row, config=config, term=term, next_replica_id=next_id, incarnation=incarnation)
        created: set[int] = set()
        for report in lead.liveness.reports_of(row.tablet_id):
            status = report.status
            created.add(status.replica_id)
            told = status.committed_config
            newer = is_newer((told.incarnation, told.opid_index), config.version)
            if newer and told.peers and within_reach(told.incarnation, row.incarnation):
                config, term = config_from_pb(told), max(term, status.term)
        leader_term, leader = lead.liveness.leader_of(row.tablet_id)
        led = bool(leader) and config.peer_on(leader) is not None
        members = {p.replica_id for p in config.peers}
        uncreated = tuple(r for r in row.uncreated if r not in created and r in members)
        state = "RUNNING" if row.state == "CREATING" and led and self._leader_runs(row) else row.state
        next_id = raised(row, config)
        if (state, config, uncreated, next_id) == (
            row.state,
            row.config,
            row.uncreated,
            row.next_replica_id,
        ):
            return row
        return replace(
            row,
            state=state,
            since_us=row.since_us if state == row.state else lead.wall_us(),
            config=config,
            term=max(term, leader_term),
            leader=leader if led else row.leader,
            next_replica_id=next_id,
            uncreated=uncreated,
            incarnation=max(row.incarnation, config.incarnation),  # as above
        )

    def _leader_runs(self, row: TabletRecord) -> bool:
        return any(
            r.status.role == common_pb2.LEADER and r.status.state == common_pb2.RUNNING
            for r in self._lead.liveness.reports_of(row.tablet_id)
        )

    # --- new tablets ---

    async def _place_line(self) -> None:
        """Place the first tablets in line, as many as may become CREATING now. Leave out those for which there are too few
        machines.
        """
        lead = self._lead
        candidates = lead.candidates()
        machines = Placement(candidates).machines
        room = max(0, CREATING_PER_NODE * len(candidates) - lead.catalog.states["CREATING"])
        chosen = list(islice((t for t, needed in self._queue.items() if needed <= machines), room))
        for start in range(0, len(chosen), TABLETS_AT_ONCE):
            some = [t for t in chosen[start : start + TABLETS_AT_ONCE] if t in lead.catalog.tablets]
            await lead.do(self._place(some))
            await self._look_at(some)
            await asyncio.sleep(0)
        stranded = [(t, needed) for t, needed in self._queue.items() if needed > machines]
        if not lead.catalog.states["CREATING"] and lead.catalog.states["PREPARING"] <= len(stranded):
            self._patience.times = 1
        self._tell_stranded(stranded, machines)

    def _tell_stranded(self, stranded: list[tuple[str, int]], machines: int) -> None:
        """Log that tablets cannot be placed: a line for each number of replicas, once in a while."""
        for needed, tablets in Counter(needed for _, needed in stranded).items():
            self._once.tell(
                log.warning,
                "tablets cannot be placed yet: too few machines have a live ACTIVE node; add or start nodes",
                str(needed),
                machines,
                tablets=tablets,
                first=next(t for t, n in stranded if n == needed),
                needed=needed,
                machines=machines,
            )

    async def _place(self, tablet_ids: list[str]) -> None:
        """Choose peers for PREPARING tablets, which become CREATING, in one batch. The batch fails if the row
        of a chosen node has changed.
        """
        lead = self._lead
        async with lead.locks.hold(tablets=tablet_ids):
            placement = Placement(lead.candidates())
            batch: list[KeyOperation] = []
            used: dict[str, None] = {}
            for tablet_id in tablet_ids:
                row = lead.catalog.tablets[tablet_id]
                if row.state != "PREPARING":
                    continue
                try:
                    nodes = placement.choose(lead.catalog.replication_factor(row))
                except Retryable:
                    continue  # a machine became silent meanwhile
                used.update((n, None) for n in nodes)
                peers = tuple(
                    Peer(n, ReplicaId(i + 1), lead.liveness.located(lead.catalog.nodes[n]).address)
                    for i, n in enumerate(nodes)
                )
                batch.append(
                    swap(
                        row,
                        replace(
                            row,
                            state="CREATING",
                            since_us=lead.wall_us(),
                            config=Configuration(-1, peers),
                            leader=nodes[0],
                            next_replica_id=len(peers) + 1,
                            uncreated=tuple(p.replica_id for p in peers),
                        ),
                    )
                )
            if batch := lead.fitting(batch):
                await lead.commit(batch + [unchanged(lead.catalog.nodes[n]) for n in used])

    def _too_late(self, row: TabletRecord) -> bool:
        if row.state != "CREATING" or not self._lead.settled:
            return False
        return self._lead.wall_us() - row.since_us > self._patience.given_us(row)

    async def _replace(self, tablet_id: str) -> None:
        """Replace a tablet that got no leader in time by a new one, in one batch."""
        lead = self._lead
        table_id = lead.catalog.tablets[tablet_id].table_id
        async with lead.locks.hold(tables=(f"id/{table_id}",), tablets=(tablet_id,)):
            row = lead.catalog.tablets[tablet_id]
            if not self._too_late(row):
                return
            now_us = lead.wall_us()
            fresh = TabletRecord(
                TabletId(new_id()), row.table_id, row.ordinal, "PREPARING", row.partition, now_us
            )
            batch = [swap(row, deleted_row(row, "REPLACED", now_us)), insert(fresh)]
            if not lead.has_room(batch, REPLACED_QUARTERS):
                lead.full = True
                return
            log.warning("tablet had no leader in time and was replaced", tablet=tablet_id, by=fresh.tablet_id)
            await lead.commit(batch)
            self._patience.replaced(row, now_us)
        lead.look_at(fresh.tablet_id)


def _log_change(row: TabletRecord, changed: TabletRecord) -> None:
    if changed.state != row.state:
        log.info("tablet", tablet=row.tablet_id, state=changed.state, leader=changed.leader)
    if changed.config != row.config:
        peers = [f"{p.replica_id}@{p.node_id[:8]}:{p.member_type.name}" for p in changed.config.peers]
        log.info("configuration", tablet=row.tablet_id, index=changed.config.opid_index, peers=peers)
