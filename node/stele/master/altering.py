"""Alters tables: one replicated batch, then orders to the leaders of its tablets, until all replicas follow.

Called by service.py on the leader, by orders.py, and by background.py. A change of columns is an entry in each
tablet's log (stele.tablet); a change of ranges adds and deletes tablets (reranging.py).

Invariant: a table is ALTERING from the batch with its new schema until every tablet has applied it, whichever
master leads. Until then it keeps the schema that all tablets have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import structlog

from stele.master.catalog import CURRENT_TABLETS
from stele.master.leadership import Leadership
from stele.master.liveness import Report
from stele.master.port import swap
from stele.master.records import TableRecord, TabletRecord
from stele.master.reranging import Reranged, check_new_tablets, reranged
from stele.master.tables import KINDS, ROOM_LOCK, check_there, check_view_bytes, is_name
from stele.master.versions import require_version
from stele.master.view_size import all_view_bytes
from stele.model.alter import altered
from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import TabletId
from stele.model.kvop import KeyOperation
from stele.model.notes import note_faults
from stele.model.schema import Schema
from stele.model.steps import Step
from stele.rpc.convert import id_from_pb
from stele.rpc.convert_schema import steps_from_pb
from stele.rpc.proto import common_pb2, master_pb2

log = structlog.get_logger("stele.master")

_QUARTERS = 3
"""How many quarters of the catalog altered tables may fill. Replacement tablets may fill as many
(background.py).
"""
_REMEMBERED_MAX = 4
"""How many alter requests a table's row remembers, because a client repeats its request until it is answered.
"""
_AT_ONCE = 64
"""The most tablets that one turn of the event loop examines."""


async def alter_table(lead: Leadership, request: master_pb2.AlterTableRequest) -> TableRecord:
    """Change columns, ranges, history, notes or the name of a table, and return its row. Its tablets follow
    afterwards.

    A repeated request (the same `alter_id`) does nothing.

    Raises:
        Rejected: INVALID_ARGUMENT, lists all faults. NOT_FOUND. ALREADY_PRESENT, the new name is used.
            TOO_LARGE. UNSUPPORTED_VERSION, the cluster version is not finalized.
        Retryable: NOT_READY, the table is being created or altered.
    """
    alter_id = id_from_pb(request.alter_id)
    wanted = lead.catalog.table(id_from_pb(request.table_id), request.name)
    names = {f"name/{wanted.name}", f"name/{request.new_name or wanted.name}"}
    drops = any(step.HasField("drop_range") for step in request.steps)
    held = set(lead.catalog.tablets_of.get(wanted.table_id, ())) if drops else set()
    async with lead.locks.hold(tables=(f"id/{wanted.table_id}", *names, ROOM_LOCK), tablets=held):
        table = lead.catalog.table(wanted.table_id)
        check_there(table)
        if alter_id in table.altered_by.split():
            lead.removals.begin_again(lead.catalog, table.table_id)
            return table
        if table.name != wanted.name:
            raise Retryable(f"table {wanted.name!r} was renamed meanwhile; try again", code=Code.NOT_READY)
        changed, tablets = _changed(lead, table, request)
        if not held.issuperset(row.tablet_id for row in tablets.dropped):
            raise Retryable(
                f"a tablet of table {table.name!r} was replaced meanwhile; try again", code=Code.NOT_READY
            )
        marks = tablets.marks(lead)
        batch = [*tablets.batch(lead, marks), swap(table, changed)]
        _check_room(lead, table, changed, batch)
        check_new_tablets(lead, changed, len(tablets.added), batch)
        await lead.commit(batch)
        lead.removals.begin(lead.catalog, marks)
    looked_at = [row.tablet_id for row in (*tablets.added, *tablets.dropped)]
    if changed.state == "ALTERING":
        looked_at += map(TabletId, lead.catalog.tablets_of.get(table.table_id, ()))
    for tablet_id in looked_at:
        lead.look_at(tablet_id)
    return changed


def _remembered(ids: str, newest: str) -> str:
    """The ids of the last requests, with the newest added."""
    return " ".join(f"{ids} {newest}".split()[-_REMEMBERED_MAX:])


def _changed(
    lead: Leadership, table: TableRecord, request: master_pb2.AlterTableRequest
) -> tuple[TableRecord, Reranged]:
    where = f"alter {KINDS[table.kind]} {table.name!r}: "
    faults: list[str] = []
    schema, tablets = None, Reranged(table.partitioning)
    steps: list[Step] = []
    try:
        if request.steps and not table.schema:
            raise Rejected("a key space has no columns and keeps no old versions")
        steps, ranges = steps_from_pb(request.steps)
        if ranges:
            tablets = reranged(lead, table, ranges)
    except Rejected as exc:
        faults.append(str(exc.args[0]).removeprefix("alter: "))
    try:
        if steps:
            schema = altered(Schema.from_json(table.schema), steps)
    except Rejected as exc:
        faults.append(str(exc.args[0]).removeprefix("alter: "))
    new_name = request.new_name or table.name
    if not is_name(new_name):
        faults.append(f"new name of {len(new_name)} characters; expected a name as for a new table")
    owner = request.owner if request.HasField("owner") else table.owner
    comment = request.comment if request.HasField("comment") else table.comment
    faults += note_faults(owner, comment)
    noted = request.HasField("owner") or request.HasField("comment")
    if not request.steps and not request.new_name and not noted:
        faults.append(
            "it changes nothing; name a column to add, drop or rename, a default, a range, the history, an owner, a "
            "comment, or a new name"
        )
    if faults:
        raise Rejected(where + "; ".join(faults))
    if new_name != table.name and new_name in lead.catalog.table_by_name:
        raise Rejected(f"{where}{new_name!r} exists already; choose another name", code=Code.ALREADY_PRESENT)
    changed = replace(
        table,
        name=new_name,
        altered_by=_remembered(table.altered_by, id_from_pb(request.alter_id)),
        partitioning=tablets.partitioning,
        owner=owner,
        comment=comment,
    )
    if noted:
        require_version(lead, 2, where.removesuffix(": "))
    if schema is None and not tablets.changes:
        return changed, tablets
    _check_may_alter(lead, table, where, columns=schema is not None)
    if schema is None:
        return changed, tablets
    altering = replace(changed, state="ALTERING", schema=schema.to_json(), fully_applied_schema=table.schema)
    return altering, tablets


def _check_may_alter(lead: Leadership, table: TableRecord, where: str, *, columns: bool) -> None:
    if table.state == "ALTERING":
        raise Retryable(
            f"{where}an earlier change has not reached all tablets yet; try again", code=Code.NOT_READY
        )
    # A replica that is created later would begin with the new schema, and its log with entries of the old one.
    tablets = lead.catalog.current_tablets(table.table_id)
    young = [t for t in tablets if t.state != "RUNNING" or t.uncreated] if columns else []
    if young:
        raise Retryable(
            f"{where}{len(young)} of its tablets are being created; try again", code=Code.NOT_READY
        )
    require_version(lead, 2, where.removesuffix(": "))


def _check_room(
    lead: Leadership, table: TableRecord, changed: TableRecord, batch: Sequence[KeyOperation]
) -> None:
    """Refuse a change if it would make a row, the catalog or a view too large. A change that drops columns
    always passes."""
    row_bytes = sum(len(o.value) + len(o.key) for o in batch)
    if _length(changed) > _length(table):
        what = f"alter table {table.name!r} to this definition"
        check_view_bytes(lead, all_view_bytes(lead.catalog, changed), what)
    if row_bytes > lead.options.create_bytes_max or not lead.has_room(batch, _QUARTERS):
        raise Rejected(
            f"alter table {table.name!r}: its new definition has {len(changed.schema)} bytes, more than the "
            "catalog has room for; use fewer columns, or delete tables",
            code=Code.TOO_LARGE,
        )


def _length(table: TableRecord) -> int:
    notes = len(table.owner.encode()) + len(table.comment.encode())
    return len(table.schema) + len(table.partitioning) + notes


def leader_to_alter(lead: Leadership, row: TabletRecord) -> Report | None:
    """The report of a tablet's leader that lacks its table's newest schema. None: the leader has it, or is
    not known.

    While no change is under way, only the survivor of a lost majority may lack it. That survivor may have
    been away when the table was altered.
    """
    version = lead.catalog.altering.get(row.table_id)
    if row.state != "RUNNING" or (version is None and not row.incarnation):
        return None
    leader = _leader(lead, row)
    if leader is None:
        return None
    if version is None:
        table = lead.catalog.tables.get(row.table_id)
        if table is None or not table.schema:
            return None
        version = int(Schema.from_json(table.schema).version)
    return leader if leader.status.schema_version < version else None


def _leader(lead: Leadership, row: TabletRecord) -> Report | None:
    _, node_id = lead.liveness.leader_of(row.tablet_id)
    for report in lead.liveness.reports_of(row.tablet_id):
        if report.node_id == node_id and report.status.role == common_pb2.LEADER:
            return report
    return None


def _follows(lead: Leadership, row: TabletRecord, version: int) -> bool:
    """Whether a tablet has this schema: its leader has it, and so have all other replicas that run on live
    nodes.
    """
    leader = _leader(lead, row)
    if leader is None or leader.status.schema_version < version:
        return False
    for report in lead.liveness.reports_of(row.tablet_id):
        node, status = lead.catalog.nodes.get(report.node_id), report.status
        serves = status.state == common_pb2.RUNNING and status.has_data
        member = row.config.names(status.replica_id, report.node_id)
        if serves and member and node is not None and lead.is_alive(node) and status.schema_version < version:
            return False
    return True


class Alterations:
    """The tables that are being altered, as one leadership follows them. Holds only what can be rebuilt from
    the catalog and from reports.
    """

    def __init__(self, lead: Leadership) -> None:
        self._lead = lead
        self._left: dict[tuple[str, int], dict[TabletId, None]] = {}
        """Tablets that have not taken the change yet, by table and version."""

    async def look(self) -> None:
        """Note the tablets that have the new schema by now. A table becomes RUNNING again once all its
        tablets have it.
        """
        lead, before = self._lead, self._left
        self._left = {}
        for table_id, version in list(lead.catalog.altering.items()):
            left = before.get((table_id, version))
            if left is None:
                left = {t.tablet_id: None for t in lead.catalog.current_tablets(table_id)}
            self._left[table_id, version] = left
            if await self._all_follow(left, version):
                await lead.do(self._finish(table_id, version))

    async def _all_follow(self, left: dict[TabletId, None], version: int) -> bool:
        for number, tablet_id in enumerate(list(left), 1):
            row = self._lead.catalog.tablets.get(tablet_id)
            # One that was never made, of a new range, has been replaced by one that begins with the new schema.
            there = row is not None and row.state in CURRENT_TABLETS
            if row is not None and there and not _follows(self._lead, row, version):
                return False  # it stays the first to be looked at
            del left[tablet_id]
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
        return True

    async def _finish(self, table_id: str, version: int) -> None:
        """Make a table RUNNING again, unless it is no longer ALTERING. A table that was dropped meanwhile
        stays DROPPED.
        """
        lead = self._lead
        async with lead.locks.hold(tables=(f"id/{table_id}",)):
            table = lead.catalog.tables.get(table_id)
            if table is None or lead.catalog.altering.get(table_id) != version:
                return
            state = "DROPPED" if table.state == "DROPPED" else "RUNNING"
            await lead.commit([swap(table, replace(table, state=state, fully_applied_schema=""))])
        log.info("table altered", table=table.name, schema_version=version)
