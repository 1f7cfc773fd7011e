"""Creates and deletes tables, with one replicated batch each. Called by service.py and dropping.py on the leader.

background.py then places the tablets. Invariant: a table and all its tablets appear and disappear in one
batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace

from stele.master.catalog import GONE_TABLES
from stele.master.choosing import chosen_partitioning, why_so_many
from stele.master.leadership import Leadership
from stele.master.placement import check_replication_factor
from stele.master.port import drop, insert, put
from stele.master.records import TableRecord, TabletRecord
from stele.master.removals import deleted
from stele.master.versions import require_version
from stele.master.view_size import (
    ONE_MESSAGE_BYTES_MAX,
    VIEW_BYTES_MAX,
    all_view_bytes,
    view_bytes,
    wanted_replicas,
)
from stele.model.amounts import plural
from stele.model.errors import Code, Rejected
from stele.model.ids import NodeId, TableId, TabletId, new_id
from stele.model.kvop import KeyOperation
from stele.model.notes import note_faults
from stele.model.partition import Partition, PartitionSchema, numbered
from stele.model.schema import Schema
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.convert_schema import partitioning_from_pb, schema_from_pb
from stele.rpc.proto import master_pb2

KINDS = {"table": "table", "keyspace": "key space"}
"""The kinds of table records, and their names in messages."""
NAME_CHARS_MAX = 256
DELETE_WAIT_MS_MAX = 2_000
"""The longest wait for a delete. It is shorter than a caller's timeout of one attempt."""
_ANSWERS_S = 0.005
DEFAULT_BYTES_MAX = 4_096
"""The most bytes of a default's JSON. Each row without the column stores the default. So a small write could
become large.
"""


def parse(request: master_pb2.CreateTableRequest, bytes_max: int, created_us: int) -> TableRecord:
    """The table that a request describes. It gets a new id if the request has none.

    Raises:
        Rejected: TOO_LARGE. INVALID_ARGUMENT, with every fault of name, schema and partitioning.
    """
    if request.ByteSize() > bytes_max:
        raise Rejected(
            f"create table: the definition has {request.ByteSize()} bytes, at most {bytes_max}; use fewer columns or split keys",
            code=Code.TOO_LARGE,
        )
    faults = note_faults(request.owner, request.comment)
    if not is_name(request.name):
        faults.append(
            f"name of {len(request.name)} characters; expected 1 to {NAME_CHARS_MAX}, not blank, no control characters"
        )
    kind = request.kind or "table"
    if kind not in KINDS:
        faults.append(f"kind {kind!r}; expected one of {', '.join(KINDS)}")
    schema_json, partitioning = "", PartitionSchema()
    if kind == "table":
        schema = None
        try:
            schema = schema_from_pb(request.schema)
            schema_json = schema.to_json()
            partitioning = partitioning_from_pb(request.partitioning)
        except Rejected as exc:
            faults.append(str(exc.args[0]))
        if schema is not None:
            faults.extend(partitioning.faults(schema))
    elif request.HasField("partitioning") and request.partitioning.ByteSize():
        faults.append("a key space has one tablet; remove the partitioning")
    if faults:
        raise Rejected(f"create {KINDS.get(kind, 'table')} {request.name!r}: " + "; ".join(faults))
    return TableRecord(
        TableId(id_from_pb(request.table_id) or new_id()),
        request.name,
        "RUNNING",
        schema_json,
        partitioning.to_json(),
        request.replication_factor or 3,
        kind,
        created_us,
        owner=request.owner,
        comment=request.comment,
    )


def check_there(table: TableRecord) -> None:
    """Refuse a table that was dropped or deleted.

    Raises:
        Rejected: NOT_FOUND.
    """
    kind = KINDS.get(table.kind, "table")
    if table.state == "DROPPED":
        raise Rejected(
            f"{kind} {table.name!r} was dropped; `stele table recall {table.table_id[:8]}` brings it back",
            code=Code.NOT_FOUND,
        )
    if table.state == "REMOVED":
        raise Rejected(f"{kind} {table.name!r} was deleted", code=Code.NOT_FOUND)


def is_name(text: str) -> bool:
    """Whether the text can be a name: not blank, not too long, and without control characters."""
    controls = any(unicodedata.category(character) == "Cc" for character in text)
    return bool(text.strip()) and len(text) <= NAME_CHARS_MAX and not controls


ROOM_LOCK = "room for tablets"
"""The lock that is held from the check of the room for tablets until the checked change is on record. So
several requests at the same time cannot pass the bounds together.
"""


async def create_table(
    lead: Leadership, request: master_pb2.CreateTableRequest
) -> master_pb2.CreateTableResponse:
    """Create a table; its tablets are placed afterwards. A repeated request does nothing.

    Raises:
        Rejected: INVALID_ARGUMENT, also for a default that is long or would be rounded. TOO_LARGE, also if
            the tables would no longer fit into one view. ALREADY_PRESENT. TABLET_DELETED, the request was
            done before and its table is removed.
        Retryable: NOT_READY, not all nodes were heard yet, or too few answer.
    """
    table = parse(request, lead.options.create_bytes_max, lead.wall_us())
    async with lead.locks.hold(tables=(f"id/{table.table_id}", f"name/{table.name}", ROOM_LOCK)):
        before = lead.catalog.tables.get(table.table_id)
        if _chooses(request):
            lead.check_settled()
            chosen = chosen_partitioning(Schema.from_json(table.schema), _nodes(lead))
            table = replace(table, partitioning=before.partitioning if before else chosen.to_json())
        if _is_there(lead, table, chosen=bool(request.table_id)):
            return _created(lead, table, request)
        lead.check_settled()
        _check_defaults(table)
        partitioning = PartitionSchema.from_json(table.partitioning)
        if partitioning.has_gaps:
            require_version(lead, 2, f"create table {table.name!r} with gaps between its ranges")
        if table.owner or table.comment or (table.schema and Schema.from_json(table.schema).history_ms):
            require_version(
                lead, 2, f"create table {table.name!r} with an owner, a comment or a history retention"
            )
        check_replication_factor(
            table.replication_factor,
            len({c.machine for c in lead.candidates()}),
            len(lead.active_machines()),
        )
        check_places(lead, table, partitioning.tablets, "create")
        check_view(lead, table, partitioning.tablets, "create")
        parts = numbered(partitioning)
        tablets = [new_tablet(table, ordinal, part, lead.wall_us()) for ordinal, part in parts]
        batch = [insert(t) for t in tablets] + [insert(table)]
        if sum(len(o.value) + len(o.key) for o in batch) > lead.options.create_bytes_max:
            raise Rejected(
                f"create table {table.name!r}: too many tablets for one batch; use fewer partitions",
                code=Code.TOO_LARGE,
            )
        check_catalog(lead, table, batch, "create")
        await lead.commit(batch)
    for tablet in tablets:
        lead.look_at(tablet.tablet_id)
    return _created(lead, table, request)


def _created(
    lead: Leadership, table: TableRecord, request: master_pb2.CreateTableRequest
) -> master_pb2.CreateTableResponse:
    response = master_pb2.CreateTableResponse(table_id=id_to_pb(table.table_id))
    if _chooses(request):
        response.tablets = PartitionSchema.from_json(table.partitioning).tablets
        response.why = why_so_many(response.tablets, _nodes(lead))
    return response


def _nodes(lead: Leadership) -> int:
    """How many nodes the cluster has, including silent ones."""
    return sum(n.role == "node" and n.state == "ACTIVE" for n in lead.catalog.nodes.values())


def _chooses(request: master_pb2.CreateTableRequest) -> bool:
    """Whether the master chooses how many tablets a table gets."""
    named = request.partitioning.ByteSize() > 0
    return request.choose_tablets and not named and request.kind in ("", "table")


def new_tablet(table: TableRecord, ordinal: int, part: Partition, now_us: int) -> TabletRecord:
    """The row of a tablet that is to be placed."""
    return TabletRecord(TabletId(new_id()), table.table_id, ordinal, "PREPARING", part, now_us)


def _is_there(lead: Leadership, table: TableRecord, *, chosen: bool) -> bool:
    before = lead.catalog.tables.get(table.table_id) if chosen else None
    if before is not None:
        asked = replace(
            table,
            replication_factor=before.replication_factor,
            replication_factor_before=before.replication_factor_before,
            owner=before.owner,
            comment=before.comment,
        )
        same = _as_made(before, table.created_us) == asked
        if same and before.state not in GONE_TABLES:
            return True
        if same:  # a repeated request; another table may have its name by now
            done = "dropped" if before.state == "DROPPED" else "deleted"
            raise Rejected(
                f"table id {table.table_id[:8]} was created and {done} since; choose a new id",
                code=Code.TABLET_DELETED,
            )
        raise Rejected(
            f"table id {table.table_id[:8]} belongs to another table; choose a new id",
            code=Code.ALREADY_PRESENT,
        )
    other = lead.catalog.table_by_name.get(table.name)
    if other is not None:
        raise Rejected(f"{KINDS[other.kind]} {table.name!r} exists already", code=Code.ALREADY_PRESENT)
    return False


def _as_made(table: TableRecord, created_us: int) -> TableRecord:
    """A table's row as its create request made it."""
    return replace(
        table,
        created_us=created_us,
        state="RUNNING",
        altered_by="",
        dropped_us=0,
        keep_ms=0,
        dropped_by="",
        recalled_by="",
    )


def _check_defaults(table: TableRecord) -> None:
    """Check the size of defaults. Only new tables are checked; existing tables keep theirs."""
    columns = Schema.from_json(table.schema).columns if table.schema else ()
    lengths = [(c.name, len(c.default.encode())) for c in columns if c.default is not None]
    faults = [
        f"column {name}: a default of {length} bytes; at most {DEFAULT_BYTES_MAX} are allowed"
        for name, length in lengths
        if length > DEFAULT_BYTES_MAX
    ]
    faults.extend(filter(None, (column.default_fault() for column in columns)))
    if faults:
        raise Rejected(f"create table {table.name!r}: " + "; ".join(faults))


def check_places(lead: Leadership, table: TableRecord, tablets: int, what: str) -> None:
    """Refuse this number of new tablets if the nodes would have too many replicas. `what`: "create" or "alter"."""
    wanted = tablets * table.replication_factor
    what = f"{what} table {table.name!r}: {wanted} more replicas"
    check_replicas(lead, wanted + wanted_replicas(lead.catalog), what, "use fewer partitions or add nodes")


def check_replicas(lead: Leadership, total: int, what: str, remedy: str) -> None:
    """Refuse a change after which tables would want more replicas than nodes may have. `total`: the replicas
    then wanted.
    """
    nodes = len(lead.candidates())
    if total > lead.options.tablets_per_node_max * nodes:
        raise Rejected(
            f"{what} would make {total} on {plural(nodes, 'node')}, of at most "
            f"{lead.options.tablets_per_node_max} each; {remedy}"
        )


def check_view(lead: Leadership, table: TableRecord, tablets: int, what: str) -> None:
    """Refuse new tablets with which a view would be too large. `what`: "create" or "alter"."""
    catalog = lead.catalog
    total = all_view_bytes(catalog) + view_bytes(table, tablets)
    why = f"{what} table {table.name!r}: {tablets} new tablets would make {tablets + len(catalog.current)}"
    check_view_bytes(lead, total, why)


def check_view_bytes(lead: Leadership, total: int, what: str) -> None:
    """Refuse a change if the view of all tables would then have too many bytes. `total`: the bytes. `what`:
    the change, in words.

    Raises:
        Rejected: TOO_LARGE. UNSUPPORTED_VERSION, programs of the release before could not see the cluster any
            more.
    """
    if total > VIEW_BYTES_MAX:
        raise Rejected(
            f"{what}: the view of the cluster would have {total >> 10} KiB, but masters and drivers hold at most "
            f"{VIEW_BYTES_MAX >> 10} KiB; use fewer partitions or replicas, or delete tables",
            code=Code.TOO_LARGE,
        )
    if total > ONE_MESSAGE_BYTES_MAX:
        size = f"{total >> 10} KiB, and the release before reads {ONE_MESSAGE_BYTES_MAX >> 10} KiB"
        require_version(lead, 2, f"{what} (the view of the cluster would have {size})")


def check_catalog(lead: Leadership, table: TableRecord, batch: Sequence[KeyOperation], what: str) -> None:
    """Refuse new tablets if they would fill more than half of the catalog. Changes of existing tables need
    the rest.
    """
    space = lead.log.key_space
    held = space.held_bytes + space.check_operations(batch) if space is not None else 0
    if space is not None and held > space.bytes_max // 2:
        raise Rejected(
            f"{what} table {table.name!r}: the catalog would grow to {held >> 10} KiB, but new tablets may fill at most "
            f"{space.bytes_max >> 11} KiB. Delete tables; their rows leave the catalog after an hour, when all nodes that "
            "are not RETIRED have reported",
            code=Code.TOO_LARGE,
        )


def _whatever(table: TableRecord) -> bool:
    return True


async def delete_table(
    lead: Leadership, table_id: str, name: str = "", *, if_still: Callable[[TableRecord], bool] = _whatever
) -> TableId:
    """Remove a table and its tablets from service for good. Returns its id. A repeated removal does nothing.

    Its rows stay until forgetting.py drops them. If `if_still` is false for the table, nothing is removed.

    Raises:
        Rejected: NOT_FOUND.
    """
    wanted = lead.catalog.table(table_id, name).table_id
    async with lead.locks.hold(
        tables=(f"id/{wanted}", f"name/{lead.catalog.tables[wanted].name}"),
        tablets=lead.catalog.tablets_of.get(wanted, {}),
    ):
        table = lead.catalog.tables[wanted]
        if table.state == "REMOVED":
            lead.removals.begin_again(lead.catalog, wanted)
            return wanted
        if not if_still(table):
            return wanted
        tablets = lead.catalog.current_tablets(wanted)
        now_us = lead.wall_us()
        marks = [deleted(lead.catalog, lead.liveness, t, now_us) for t in tablets]
        batch = [put(mark) for mark in marks]
        batch += [drop(i) for t in tablets if (i := lead.catalog.intents.get(t.tablet_id)) is not None]
        await lead.commit([*batch, put(replace(table, state="REMOVED"))])
        lead.removals.begin(lead.catalog, marks)
    for tablet in tablets:
        lead.look_at(tablet.tablet_id)
    return wanted


async def wait_for_deletion(lead: Leadership, table_id: TableId, wait_ms: int) -> tuple[list[str], int]:
    """Wait until no write to a removed table can be acknowledged any more, at most DELETE_WAIT_MS_MAX.

    Returns the names of the nodes that have not answered yet, and the number of their tablets.

    Raises:
        NotLeader: this master no longer leads; the next leader asks these nodes again.
    """
    removals, until_ms = lead.removals, lead.now_ms() + min(wait_ms, DELETE_WAIT_MS_MAX)
    asked_ms = until_ms - DELETE_WAIT_MS_MAX - lead.options.order_retry_ms
    while unfinished := removals.unfinished(lead.catalog, table_id):
        lead.check()
        now_ms = lead.now_ms()
        if now_ms - asked_ms >= lead.options.order_retry_ms:
            asked_ms = now_ms
            for tablet_id in unfinished:
                lead.look_at(tablet_id)
        if now_ms >= until_ms:
            break
        removals.changed.clear()
        await asyncio.sleep(
            _ANSWERS_S
        )  # a table may have thousands of tablets, so it waits for all answers together
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(until_ms - now_ms, lead.options.order_retry_ms) / 1000):
                await removals.changed.wait()
    nodes = lead.catalog.nodes
    names = (getattr(nodes.get(NodeId(n)), "name", "") or n for n in set().union(*unfinished.values()))
    return sorted(names), len(unfinished)
