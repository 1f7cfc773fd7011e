"""Drops the rows of deleted tablets and tables from the catalog. Called by background.py on the leader.

The row of a DELETED or REPLACED tablet is the permission to delete late replicas of it. A replica whose
tablet has no row is kept for ever. The tablet may be healthy, and the catalog wrong or restored from an older
copy. So a row must stay as long as a replica may appear. It is dropped when all of this holds:

1. The tablet has been gone for `forget_after_ms`. By then orders to create replicas have ended, and no client
   repeats its create request.
2. Every formed node that is not RETIRED is alive and has sent this leader a full report. No report names a
   replica of the tablet. A silent node thus blocks all rows until it returns or is RETIRED.
3. No intent and no order about the tablet is under way.

A RETIRED node that returns with such a replica keeps it. A table's row is dropped with that of its last
tablet; its name was free before. A removed table may have no tablets, because all its ranges were dropped
long before. Then no tablet's row says since when the table is gone. Its row is dropped once one leader has
known it without tablets for `forget_after_ms`. Rows of nodes stay: ids are never used again, and a RETIRED
node that returns must not look new.

Invariant: a row is dropped only under its lock, and only while all nodes that may hold a replica of its
tablet report.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

import structlog

from stele.master.leadership import Leadership
from stele.master.orders import Orders
from stele.master.port import drop
from stele.model.kvop import KeyOperation

log = structlog.get_logger("stele.master")

DROPPED_AT_ONCE = 64
"""The most tablets in one step and one batch."""
LOOKED_AT_ONCE = 1_024


class Forgetting:
    """The task of one leadership."""

    def __init__(self, lead: Leadership, orders: Orders) -> None:
        self._lead = lead
        self._orders = orders
        self._next: deque[str] = deque()
        self._without_tablets: dict[str, int] = {}
        """Removed tables without tablets, and the time since when this leader knows them (ms of its steady
        clock).
        """

    async def step(self) -> None:
        """Examine some of the deleted tablets, and drop the rows that are due in one batch."""
        if not self._all_heard():
            return
        if not self._next:
            self._next.extend(self._lead.catalog.gone)
        due: list[str] = []
        ordered = self._orders.under_way()
        for _ in range(min(LOOKED_AT_ONCE, len(self._next))):
            tablet_id = self._next.popleft()
            if self._is_due(tablet_id, ordered):
                due.append(tablet_id)
            if len(due) == DROPPED_AT_ONCE:
                break
        if due:
            await self._lead.do(self._drop(due))
        if due_tables := self._tables_due():
            await self._lead.do(self._drop_tables(due_tables))

    def _tables_due(self) -> list[str]:
        catalog, now_ms = self._lead.catalog, self._lead.now_ms()
        self._without_tablets = {
            table_id: self._without_tablets.get(table_id, now_ms)
            for table_id in catalog.removed
            if table_id not in catalog.tablets_of
        }
        over = now_ms - self._lead.options.forget_after_ms
        due = (table_id for table_id, since_ms in self._without_tablets.items() if since_ms <= over)
        return list(islice(due, DROPPED_AT_ONCE))

    async def _drop_tables(self, table_ids: list[str]) -> None:
        lead = self._lead
        async with lead.locks.hold(tables=[f"id/{t}" for t in table_ids]):
            rows = [lead.catalog.tables[t] for t in table_ids if t in self._tables_due()]
            if rows:
                await lead.commit([drop(row) for row in rows])
                log.info("dropped the rows of removed tables without tablets", tables=len(rows))

    def _all_heard(self) -> bool:
        lead = self._lead
        may_hold = [
            n for n in lead.catalog.nodes.values() if n.role == "node" and n.formed and n.state != "RETIRED"
        ]
        return all(lead.is_alive(n) for n in may_hold) and lead.liveness.all_full(n.node_id for n in may_hold)

    def _is_due(self, tablet_id: str, ordered: set[str]) -> bool:
        lead = self._lead
        row = lead.catalog.tablets.get(tablet_id)
        return (
            row is not None
            and row.state in ("DELETED", "REPLACED")
            and lead.wall_us() - row.since_us >= lead.options.forget_after_ms * 1000
            and not lead.liveness.all_reports_of(tablet_id)
            and tablet_id not in lead.catalog.intents
            and tablet_id not in ordered
        )

    async def _drop(self, tablet_ids: list[str]) -> None:
        lead = self._lead
        tables = {lead.catalog.tablets[t].table_id for t in tablet_ids}
        async with lead.locks.hold(tables=[f"id/{t}" for t in tables], tablets=tablet_ids):
            if not self._all_heard():
                return
            ordered = self._orders.under_way()
            rows = [lead.catalog.tablets[t] for t in tablet_ids if self._is_due(t, ordered)]
            going = {row.tablet_id for row in rows}
            batch: list[KeyOperation] = [drop(row) for row in rows]
            for table_id in dict.fromkeys(row.table_id for row in rows):
                table = lead.catalog.tables.get(table_id)
                last = going.issuperset(lead.catalog.tablets_of[table_id])
                if table is not None and table.state == "REMOVED" and last:
                    batch.append(drop(table))
            if batch:
                await lead.commit(batch)
                log.info(
                    "dropped the rows of deleted tablets", tablets=len(rows), tables=len(batch) - len(rows)
                )
