"""Adds and drops ranges of tables: determines which tablets come and go. Called by altering.py, under its
locks.

The tablets of a dropped range are deleted like those of a deleted table (removals.py, forgetting.py).
Invariant: a tablet keeps its ordinal and its bounds, so no other tablet of the table is touched.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stele.master.leadership import Leadership
from stele.master.placement import check_machines
from stele.master.port import drop, insert, swap
from stele.master.records import TableRecord, TabletRecord
from stele.master.removals import deleted
from stele.master.tables import check_catalog, check_places, check_view, new_tablet
from stele.model.errors import Rejected
from stele.model.kvop import KeyOperation
from stele.model.partition import PartitionSchema, numbered
from stele.model.ranges import RangeStep, with_steps
from stele.model.schema import Schema
from stele.model.split_json import shown_range


@dataclass(frozen=True, slots=True)
class Reranged:
    """The partitioning of a table after a change, the tablets that come, and those that go."""

    partitioning: str
    added: tuple[TabletRecord, ...] = ()
    dropped: tuple[TabletRecord, ...] = ()

    @property
    def changes(self) -> bool:
        """Whether any tablet comes or goes."""
        return bool(self.added or self.dropped)

    def marks(self, lead: Leadership) -> list[TabletRecord]:
        """The rows that dropped tablets leave in the catalog: DELETED, so that late replicas are deleted too."""
        now_us = lead.wall_us()
        return [deleted(lead.catalog, lead.liveness, row, now_us) for row in self.dropped]

    def batch(self, lead: Leadership, marks: Sequence[TabletRecord]) -> list[KeyOperation]:
        """The changes of tablets' rows and of their intents."""
        intents = [i for row in self.dropped if (i := lead.catalog.intents.get(row.tablet_id)) is not None]
        return [
            *(swap(row, mark) for row, mark in zip(self.dropped, marks, strict=True)),
            *(drop(intent) for intent in intents),
            *(insert(row) for row in self.added),
        ]


def reranged(lead: Leadership, table: TableRecord, steps: Sequence[RangeStep]) -> Reranged:
    """The partitioning and the tablets of a table after these steps.

    Raises:
        Rejected: lists all faults.
    """
    before = PartitionSchema.from_json(table.partitioning)
    if before.range is None:
        raise Rejected(
            "the table has no range partitions, so none can be added or dropped; make a table with a range"
        )
    schema = Schema.from_json(table.schema)
    columns = [schema.by_id[i] for i in before.range.column_ids]
    show = functools.partial(shown_range, columns=columns)
    after = replace(before, range=with_steps(before.range, steps, show))
    if faults := after.faults(schema):
        raise Rejected("; ".join(faults))
    parts = dict(numbered(after))
    rows = lead.catalog.current_tablets(table.table_id)
    known = {row.ordinal for row in rows}
    now_us = lead.wall_us()
    return Reranged(
        after.to_json(),
        tuple(new_tablet(table, n, part, now_us) for n, part in parts.items() if n not in known),
        tuple(row for row in rows if row.ordinal not in parts),
    )


def check_new_tablets(
    lead: Leadership, table: TableRecord, tablets: int, batch: Sequence[KeyOperation]
) -> None:
    """Refuse this number of new tablets of a table if there is no room for them.

    Raises:
        Rejected: INVALID_ARGUMENT, too few machines, or too many replicas on them. TOO_LARGE.
        Retryable: NOT_READY, not all nodes were heard yet.
    """
    if not tablets:
        return
    lead.check_settled()
    machines = {c.machine for c in lead.candidates()}
    # not check_replication_factor: release 0.1.0 made tables of factors that new ones cannot have
    factor = table.replication_factor
    check_machines(f"replication factor {factor}", factor, len(machines), len(lead.active_machines()))
    check_places(lead, table, tablets, "alter")
    check_view(lead, table, tablets, "alter")
    check_catalog(lead, table, batch, "alter")
