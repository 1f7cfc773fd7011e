"""Scans over Arrow Flight: answers what the Flight server asks of a node, on the server's own threads.

The event loop only waits for a complete snapshot and hands out the view; Flight's thread reads the rows.
Invariant: rows come from one immutable view, a damaged replica serves no rows, and scans use a bounded share
of memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa

from stele.consensus.replica import Replica
from stele.model import keys
from stele.model.errors import Code, Corrupt, Rejected, Retryable
from stele.model.ids import HybridTime
from stele.model.predicate import ScanSpec
from stele.model.schema import Schema
from stele.rpc.flight import Rows
from stele.rpc.flight_plan import Planned
from stele.rpc.ticket import ScanCommand, Ticket, with_incarnation
from stele.tablet.store import TabletStore
from stele.tablet.view import View
from stele.tserver.leader_load import LeaderLoad, scan_units
from stele.tserver.memory import ScanMemory
from stele.tserver.reads import check_incarnation, refuse_newer
from stele.tserver.replicas import Replicas
from stele.tserver.threads import on_loop

_PLAN_TIMEOUT_S = 11.0
_TOLD_UNITS = 64
"""A scan's load is passed to the event loop in portions of at least this many units. Each portion takes a
turn of the loop.
"""
Plan = Callable[[ScanCommand], Coroutine[Any, Any, Planned]]


class Scans:
    """The ScanProvider of a node. `plan(command)` makes a plan on the event loop (plans.py)."""

    def __init__(self, plan: Plan, replicas: Replicas, memory: ScanMemory, load: LeaderLoad) -> None:
        self._plan = plan
        self._replicas = replicas
        self._memory = memory
        self._load = load
        self._loop = asyncio.get_running_loop()

    def plan(self, command: ScanCommand) -> Planned:
        """The plan of a scan."""
        return on_loop(self._loop, self._plan(command), _PLAN_TIMEOUT_S)

    def scan(self, ticket: Ticket) -> tuple[pa.Schema, Iterable[Rows]]:
        """The rows of one ticket."""
        replica, view, schema = on_loop(self._loop, self._open(ticket), ticket.wait_ms / 1000 + 1.0)
        try:
            spec = _spec(ticket, schema)
            arrow = with_incarnation(spec.arrow_schema(schema), replica.superblock.tablet_incarnation)
        except BaseException:
            view.close()
            raise
        rows = self._rows(replica, view, _with_key(spec, schema) if ticket.resumable else spec)
        return arrow, _resumable(rows, schema, len(arrow)) if ticket.resumable else rows

    def _rows(self, replica: Replica, view: View, spec: ScanSpec) -> Iterator[pa.RecordBatch]:
        try:
            with view, self._memory.held(view.memory):
                yield from self._counted(replica, view.scan(spec, last=True))
        except Corrupt as exc:
            self._loop.call_soon_threadsafe(replica.fail, str(exc))
            raise Retryable(f"this replica is damaged: {exc}; ask another", code=Code.NOT_LEADER) from exc

    def _counted(self, replica: Replica, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the same batches, and count them for the load of their replica."""
        units = 1
        try:
            with contextlib.closing(rows):  # type: ignore[type-var]  # a generator
                for batch in rows:
                    units += scan_units(batch.nbytes)
                    if units >= _TOLD_UNITS:
                        self._loop.call_soon_threadsafe(self._load.add, replica, units)
                        units = 0
                    yield batch
        finally:  # also if the client takes no more rows, or the node ends meanwhile
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._load.add, replica, units)

    async def _open(self, ticket: Ticket) -> tuple[Replica, View, Schema]:
        replica = self._replicas.for_client(ticket.tablet_id)
        check_incarnation(replica, ticket.incarnation, exact=bool(ticket.prepared))
        machine = table_of(replica)
        try:
            async with asyncio.timeout(ticket.wait_ms / 1000):
                snapshot = ticket.snapshot or int(await replica.reads.latest_snapshot())
                ask = replica.following.holds if ticket.any_replica else None
                await replica.reads.snapshot_ready(snapshot, prepared=ticket.prepared, ask=ask)
        except TimeoutError:
            raise Retryable(
                f"snapshot {ticket.snapshot} was not ready within {ticket.wait_ms} ms; try again",
                code=Code.SNAPSHOT_NOT_READY,
            ) from None
        check_incarnation(replica, ticket.incarnation, exact=bool(ticket.prepared))
        refuse_newer(machine, ticket.schema_version)
        view = machine.view(HybridTime(snapshot))
        return replica, view, view.schema


def _spec(ticket: Ticket, schema: Schema) -> ScanSpec:
    """The scan that a ticket describes. A ticket of an older schema is read by column ids.

    Raises:
        Rejected: SCHEMA_MISMATCH. The ticket names no columns, so its reader expects those of its own schema;
            or one of its columns was dropped.
    """
    if ticket.schema_version == schema.version:
        return ticket.spec(schema)
    why = "the ticket names no columns"
    try:
        spec = ticket.spec(schema)
        if spec.column_ids:
            return spec
    except Rejected as exc:
        why = str(exc.args[0])
    raise Rejected(
        f"the ticket was made with schema version {ticket.schema_version}, but the tablet has "
        f"{schema.version}, and {why}; plan the scan again",
        code=Code.SCHEMA_MISMATCH,
    )


def _with_key(spec: ScanSpec, schema: Schema) -> ScanSpec:
    """The same scan in key order, with all key columns. Missing key columns are added after the others."""
    wanted = spec.column_ids or schema.column_ids
    extra = tuple(int(c.id) for c in schema.key_columns if c.id not in wanted)
    return replace(spec, column_ids=(*wanted, *extra), ordered=True)


def _resumable(rows: Iterator[pa.RecordBatch], schema: Schema, wanted: int) -> Iterator[Rows]:
    """Yield each batch, cut to its first `wanted` columns, with the least key that can follow its last row."""
    with contextlib.closing(rows):  # type: ignore[type-var]  # a generator
        for batch in rows:
            if not batch.num_rows:
                yield batch.select(range(wanted))
                continue
            last = keys.encode_keys(batch.slice(batch.num_rows - 1), schema)[0].as_py()
            yield batch.select(range(wanted)), last + b"\x00"


def table_of(replica: Replica) -> TabletStore:
    """The rows of a replica.

    Raises:
        Rejected: the replica is not of a table.
        Retryable: the replica does not serve now.
    """
    if replica.superblock.kind != "table":
        raise Rejected(
            f"tablet {replica.tablet_id[:8]} is a {replica.superblock.kind}; only tables are scanned"
        )
    machine = replica.machine
    if not isinstance(machine, TabletStore) or not replica.running:
        raise Retryable("this replica holds no rows, or is FAILED; ask another", code=Code.NOT_LEADER)
    return machine
