"""Drops tables so that they can be recalled, recalls them, and deletes them once their time is over.

Called by service.py and background.py on the leader. A DROPPED table has no name and serves nobody. Its
tablets stay as they are, so drivers heal, move and count them as any others. Nodes refuse clients' requests
for it. They learn of it by the answers to their heartbeats, and keep the list on their volumes.

The leader's steady clock counts the time, and the leader writes it down now and then. So a new leader never
shortens it.

Invariant: a table is deleted by this module only while it is DROPPED, and only after its whole time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import structlog

from stele.master.leadership import Leadership
from stele.master.port import swap
from stele.master.records import NodeRecord, TableRecord, TabletRecord
from stele.master.tables import KINDS, check_there, delete_table, is_name
from stele.master.versions import CLUSTER_LOCK, require_version
from stele.model.bounds import DROPPED_TABLES_MAX, KEEP_DROPPED_MAX_MS, KEEP_DROPPED_MIN_MS
from stele.model.config import MemberType
from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import new_id
from stele.model.kvop import KeyOperation
from stele.rpc.convert import id_from_pb
from stele.rpc.proto import master_pb2

log = structlog.get_logger("stele.master")

WAIT_MS_MAX = 2_000
"""The longest wait for nodes. It is shorter than a caller's timeout of one attempt."""
_ASK_S = 0.02
DELETED_AT_ONCE = 8
"""The most tables that one sweep deletes. Each takes a batch of its own."""
WRITTEN_AT_ONCE = 64
"""The most rows in one batch that writes down times."""
_AT_ONCE = 64
"""The most tablets that one turn of the event loop examines."""


async def drop_table(lead: Leadership, request: master_pb2.DropTableRequest) -> TableRecord:
    """Take a table out of service and keep its tablets for a time. Returns its row. A repeated request does
    nothing.

    Raises:
        Rejected: NOT_FOUND. INVALID_ARGUMENT, the time is too short. UNSUPPORTED_VERSION, the cluster version
            is not finalized. TOO_LARGE, too many dropped tables are kept already. CAS_FAILED, this request
            dropped the table before, and it was recalled since.
        Retryable: NOT_READY, the table is being renamed.
    """
    wanted = lead.catalog.table(id_from_pb(request.table_id), request.name)
    where = f"drop {KINDS.get(wanted.kind, 'table')} {wanted.name!r}"
    drop_id = id_from_pb(request.drop_id)
    # The last lock is for their number.
    async with lead.locks.hold(tables=(f"id/{wanted.table_id}", f"name/{wanted.name}", "dropped tables")):
        table = lead.catalog.tables.get(wanted.table_id, wanted)
        if table.state == "DROPPED":
            return table
        check_there(table)
        if table.name != wanted.name:
            raise Retryable(f"{where}: it was renamed meanwhile; try again", code=Code.NOT_READY)
        if drop_id and drop_id == table.dropped_by:
            raise Rejected(f"{where}: it was dropped, and somebody recalled it since", code=Code.CAS_FAILED)
        require_version(lead, 2, f"{where} and keep it")
        cluster = lead.catalog.cluster
        keep_ms = request.keep_ms or (cluster.keep_dropped_ms if cluster is not None else 0)
        _check_time(where, keep_ms)
        if len(lead.catalog.withdrawn) >= DROPPED_TABLES_MAX:
            raise Rejected(
                f"{where}: {len(lead.catalog.withdrawn)} dropped tables are on record already, the most possible. Delete some "
                "for good (`stele table list --dropped`); they leave the catalog after an hour, when all nodes that are "
                "not RETIRED have reported",
                code=Code.TOO_LARGE,
            )
        dropped = replace(
            table,
            state="DROPPED",
            dropped_us=max(1, lead.wall_us()),
            keep_ms=keep_ms,
            dropped_by=drop_id or new_id(),
        )
        lead.kept_until_ms[table.table_id] = lead.now_ms() + keep_ms
        await lead.commit([swap(table, dropped)])
    log.info("table dropped", table=table.name, table_id=table.table_id, kept_s=keep_ms // 1000)
    return dropped


async def recall_table(lead: Leadership, request: master_pb2.RecallTableRequest) -> TableRecord:
    """Bring a dropped table back into service. Returns its row. A repeated request does nothing.

    Raises:
        Rejected: NOT_FOUND, there is no such table, or it was deleted. ALREADY_PRESENT, the name is used.
            INVALID_ARGUMENT, the text is not a name, or the table is in service under another name.
            CAS_FAILED, this request recalled the table before, and it was dropped since.
    """
    table_id, recall_id = id_from_pb(request.table_id), id_from_pb(request.recall_id)
    wanted = lead.catalog.table(table_id)
    name, kind = request.new_name or wanted.name, KINDS.get(wanted.kind, "table")
    where = f"recall {kind} {wanted.name!r}"
    if not is_name(name):
        raise Rejected(f"{where}: new name of {len(name)} characters; expected a name as for a new table")
    async with lead.locks.hold(tables=(f"id/{table_id}", f"name/{name}")):
        table = lead.catalog.tables.get(table_id, wanted)
        if table.state == "REMOVED" or table_id not in lead.catalog.tables:
            raise Rejected(
                f"{where}: it is deleted for good; its time to be recalled is over, or somebody ended it",
                code=Code.NOT_FOUND,
            )
        if table.state != "DROPPED":
            if table.name == name or (recall_id and recall_id == table.recalled_by):
                return table
            raise Rejected(f"{where}: it is not dropped; `stele table rename` gives it another name")
        if recall_id and recall_id == table.recalled_by:
            raise Rejected(f"{where}: it was recalled, and somebody dropped it since", code=Code.CAS_FAILED)
        other = lead.catalog.table_by_name.get(name)
        if other is not None:
            raise Rejected(
                f"{where}: {KINDS.get(other.kind, 'table')} {name!r} exists; recall it under another name, with --as or new_name",
                code=Code.ALREADY_PRESENT,
            )
        state = "ALTERING" if table.fully_applied_schema else "RUNNING"
        back = replace(table, name=name, state=state, dropped_us=0, keep_ms=0, recalled_by=recall_id)
        await lead.commit([swap(table, back)])
    log.info("table recalled", table=name, table_id=table_id)
    return back


async def set_keep_dropped(lead: Leadership, request: master_pb2.SetKeepDroppedRequest) -> int:
    """Set how long tables dropped from now on are kept. Returns the setting before.

    Raises:
        Rejected: INVALID_ARGUMENT, the time is too short or too long.
        Retryable: NOT_READY, the cluster is not on record yet.
    """
    _check_time("time to keep dropped tables", request.keep_ms)
    async with lead.locks.hold(tables=(CLUSTER_LOCK,)):
        cluster = lead.catalog.cluster
        if cluster is None:
            raise Retryable("the cluster is not on record yet; try again", code=Code.NOT_READY)
        if cluster.keep_dropped_ms != request.keep_ms:
            await lead.commit([swap(cluster, replace(cluster, keep_dropped_ms=request.keep_ms))])
        return cluster.keep_dropped_ms


def _check_time(where: str, keep_ms: int) -> None:
    if not KEEP_DROPPED_MIN_MS <= keep_ms <= KEEP_DROPPED_MAX_MS:
        raise Rejected(
            f"{where}: {keep_ms / 1000:g} s; expected {KEEP_DROPPED_MIN_MS / 1000:g} s to "
            f"{KEEP_DROPPED_MAX_MS // 86_400_000} days"
        )


# --- what nodes know of it ---


async def wait_for_nodes(lead: Leadership, table_id: str, wait_ms: int, *, silent: bool = True) -> list[str]:
    """Wait until the nodes know which tables are dropped, at most WAIT_MS_MAX. `silent`: silent nodes count,
    too.

    Returns the names of the nodes that do not know it yet and may still serve this table (`_serving`).

    Raises:
        NotLeader: this master no longer leads.
    """
    lead.check()
    until_ms = lead.now_ms() + min(wait_ms, WAIT_MS_MAX)
    while any(lead.is_alive(node) for node in _behind(lead)) and lead.now_ms() < until_ms:
        await asyncio.sleep(_ASK_S)
        lead.check()
    behind: set[str] = {n.node_id for n in _behind(lead) if silent or lead.is_alive(n)}
    left = await _serving(lead, table_id, behind) if behind else set()
    while left and lead.now_ms() < until_ms:
        await asyncio.sleep(_ASK_S)
        lead.check()
        left &= {n.node_id for n in _behind(lead)}
    return sorted(n.name or n.node_id for n in lead.catalog.nodes.values() if n.node_id in left)


def _behind(lead: Leadership) -> list[NodeRecord]:
    """Nodes that have not reported the digest of the present list of dropped tables."""
    digest, lives = lead.catalog.withdrawn_digest, lead.liveness.nodes
    return [
        n
        for n in lead.catalog.nodes.values()
        if n.role == "node"
        and n.formed
        and n.state != "RETIRED"
        and ((life := lives.get(n.node_id)) is None or life.dropped_digest != digest)
    ]


async def _serving(lead: Leadership, table_id: str, among: set[str]) -> set[str]:
    """Choose from these nodes those that may still serve the table. Each matches one of three cases:

    - It is live and holds a replica.
    - It led a tablet of the table when last heard.
    - It and others of these nodes are a majority of a tablet, so they may have elected a leader since.

    One silent node with live peers is not such a case: it hears a master before it can lead, unless the
    leader fails just then.
    """
    alive = {n for n in among if lead.is_alive(lead.catalog.nodes[n])}
    found: set[str] = set()
    for number, row in enumerate(lead.catalog.current_tablets(table_id), 1):
        _, leader = lead.liveness.leader_of(row.tablet_id)
        found |= {leader or row.leader} & among
        found |= {peer.node_id for peer in row.config.peers} & alive
        found |= {report.node_id for report in lead.liveness.reports_of(row.tablet_id)} & alive
        found |= _majority(row, among)
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)
    return found


def _majority(row: TabletRecord, among: set[str]) -> set[str]:
    """The tablet's voters among these nodes, if they are a majority of its voters; otherwise none."""
    voters: set[str] = {p.node_id for p in row.config.peers if p.member_type is not MemberType.NON_VOTER}
    chosen = voters & among
    return chosen if len(chosen) > len(voters) // 2 else set()


# --- time ---


async def keep_dropped_time(lead: Leadership) -> None:
    """Delete the dropped tables whose time is over. Now and then write down the time that the others have
    left.
    """
    over: list[TableRecord] = []
    due: list[str] = []
    for table in lead.catalog.dropped.values():
        left_ms = lead.keep_left_ms(table)
        if not left_ms:
            over.append(table)
        elif table.keep_ms - left_ms >= _step_ms(table.keep_ms):
            due.append(table.table_id)
    if due:
        await lead.do(_write_time(lead, due[:WRITTEN_AT_ONCE]))
    for table in over[:DELETED_AT_ONCE]:
        await lead.do(delete_table(lead, table.table_id, if_still=lambda t: _is_over(lead, t)))
        left = lead.catalog.tables.get(table.table_id)
        if left is None or left.state == "REMOVED":  # otherwise somebody was faster, and recalled it
            log.info(
                "a dropped table was deleted, because its time was over",
                table=table.name,
                table_id=table.table_id,
            )


def _is_over(lead: Leadership, table: TableRecord) -> bool:
    return table.state == "DROPPED" and not lead.keep_left_ms(table)


def _step_ms(keep_ms: int) -> int:
    """How much time may pass before the time left is written down again.

    A new leader lengthens the time by at most this much. Each write costs the whole row, with its schema.
    """
    return max(60_000, min(keep_ms // 10, 600_000))


async def _write_time(lead: Leadership, table_ids: Sequence[str]) -> None:
    async with lead.locks.hold(tables=[f"id/{t}" for t in table_ids]):
        tables = [t for i in table_ids if (t := lead.catalog.dropped.get(i)) is not None]
        changed = [replace(t, keep_ms=lead.keep_left_ms(t)) for t in tables]
        batch: list[KeyOperation] = [swap(old, new) for old, new in zip(tables, changed, strict=True)]
        if batch := lead.fitting(batch):
            await lead.commit(batch)
