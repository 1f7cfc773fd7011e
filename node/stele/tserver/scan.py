"""Scans over Arrow Flight: what the Flight server asks of a node, on threads of its own.

The event loop only waits for a complete snapshot and hands out the view; Flight's thread reads the rows.
Invariant: rows come from one immutable view, a damaged replica serves no rows, and scans use a bounded share
of memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import pyarrow as pa

from stele.consensus.replica import Replica
from stele.model.errors import Code, Corrupt, Rejected, Retryable
from stele.model.ids import HybridTime
from stele.model.predicate import ScanSpec
from stele.model.schema import Schema
from stele.rpc.flight import Endpoint
from stele.rpc.ticket import ScanCommand, Ticket, with_incarnation
from stele.tablet.store import TabletStore
from stele.tablet.view import View
from stele.tserver.description import NodeDescription
from stele.tserver.memory import ScanMemory
from stele.tserver.reads import check_incarnation, refuse_newer
from stele.tserver.replicas import Replicas
from stele.tserver.threads import on_loop

_PLAN_TIMEOUT_S = 10.0


class Scans:
    """The ScanProvider of a node."""

    def __init__(self, description: NodeDescription, replicas: Replicas, memory: ScanMemory) -> None:
        self._description = description
        self._replicas = replicas
        self._memory = memory
        self._loop = asyncio.get_running_loop()

    def plan(self, command: ScanCommand) -> tuple[pa.Schema, list[Endpoint]]:
        """Plan the scan of one tablet on this node. Masters plan whole tables."""
        if not command.tablet_id:
            raise Rejected("a node plans scans of single tablets only; ask a master for the whole table")
        schema, snapshot, incarnation = on_loop(self._loop, self._describe(command), _PLAN_TIMEOUT_S)
        by_name = {c.name: c for c in schema.columns}
        unknown = [name for name in command.columns if name not in by_name]
        if unknown:
            raise Rejected(f"scan: the tablet has no columns {', '.join(unknown)}")
        # All columns by id: the table may have more columns when the ticket is used.
        column_ids = tuple(int(by_name[name].id) for name in command.columns) or schema.column_ids
        ticket = Ticket(
            cluster_id=self._description.identity.cluster_id,
            tablet_id=command.tablet_id,
            snapshot=snapshot,
            schema_version=schema.version,
            scan=ScanSpec(column_ids=column_ids).to_json(schema),
            fork_id=self._description.identity.fork_id,
            incarnation=incarnation,
        )
        return schema.to_arrow(column_ids), [Endpoint(ticket, (self._description.flight_address,))]

    def scan(self, ticket: Ticket) -> tuple[pa.Schema, Iterable[pa.RecordBatch]]:
        """The rows of one ticket."""
        replica, view, schema = on_loop(self._loop, self._open(ticket), ticket.wait_ms / 1000 + 1.0)
        try:
            spec = _spec(ticket, schema)
            arrow = with_incarnation(
                schema.to_arrow(spec.column_ids or None), replica.superblock.tablet_incarnation
            )
        except BaseException:
            view.close()
            raise
        return arrow, self._rows(replica, view, spec)

    def _rows(self, replica: Replica, view: View, spec: ScanSpec) -> Iterator[pa.RecordBatch]:
        try:
            with view, self._memory.held(view.memory):
                yield from view.scan(spec, last=True)
        except Corrupt as exc:
            self._loop.call_soon_threadsafe(replica.fail, str(exc))
            raise Retryable(f"this replica is damaged: {exc}; ask another", code=Code.NOT_LEADER) from exc

    async def _describe(self, command: ScanCommand) -> tuple[Schema, int, int]:
        replica = self._replicas.for_client(command.tablet_id)
        machine = _table(replica)
        snapshot = command.snapshot or int(await replica.reads.latest_snapshot())
        return machine.schema, snapshot, replica.superblock.tablet_incarnation

    async def _open(self, ticket: Ticket) -> tuple[Replica, View, Schema]:
        replica = self._replicas.for_client(ticket.tablet_id)
        check_incarnation(replica, ticket.incarnation, exact=bool(ticket.prepared))
        machine = _table(replica)
        try:
            async with asyncio.timeout(ticket.wait_ms / 1000):
                snapshot = ticket.snapshot or int(await replica.reads.latest_snapshot())
                await replica.reads.snapshot_ready(snapshot, prepared=ticket.prepared)
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
    """The scan of a ticket. One of an older schema is read by column ids.

    Raises:
        Rejected: SCHEMA_MISMATCH: it names no columns, so its reader expects those of its own schema; or one of
            its columns was dropped.
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
        f"{schema.version}, and {why}; "
        "plan the scan again",
        code=Code.SCHEMA_MISMATCH,
    )


def _table(replica: Replica) -> TabletStore:
    if replica.superblock.kind != "table":
        raise Rejected(f"tablet {replica.tablet_id} is a {replica.superblock.kind}; only tables are scanned")
    machine = replica.machine
    if not isinstance(machine, TabletStore) or not replica.running:
        raise Retryable("this replica holds no rows, or is FAILED; ask another", code=Code.NOT_LEADER)
    return machine
