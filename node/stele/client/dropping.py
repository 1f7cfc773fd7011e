"""Deletes tables; drops them so that they can be recalled, lists those, and recalls them. Used by async_client.py.

The masters decide everything; this module finds a dropped table by what its user calls it. Invariant: a table is
recalled only if exactly one is meant.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from stele.client.locations import TableInfo, table_info_from_pb
from stele.model.errors import Advice, Code, Rejected, Retryable
from stele.model.ids import new_id
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.masters import Masters
from stele.rpc.proto import master_pb2

Ask = Callable[..., Awaitable[Any]]
"""Calls a master: `AsyncClient._ask`."""
_PART_OF_ID = re.compile(r"[0-9a-f]{8,32}")
_WAIT_AT_LEAST_S = 0.001
_DELETE_AT_LEAST_S = 0.1


class _Tables(Protocol):
    """What an `AsyncClient` knows of tables."""

    async def describe(self, name: str) -> TableInfo: ...

    async def dropped_tables(self) -> list[DroppedTable]: ...


@dataclass(frozen=True, slots=True)
class DroppedTable:
    """A table or key space that was dropped and can be recalled. Returned by `client.drop_table` and
    `client.dropped_tables`.

    Attributes:
        name: Its name before the drop. Another table may have this name by now.
        table_id: 32 hex digits, which `recall_table` takes, too.
        kind: "table" or "keyspace".
        dropped: When, by the clock of the master that led then.
        left_s: For how many seconds it can still be recalled.
        tablets: The number of its tablets.
        replication_factor: The number of replicas that each of them keeps.

    Example:
        >>> space = client.create_keyspace("marks")
        >>> gone = client.drop_table("marks", keep_s=3600)
        >>> gone.name, gone.tablets, gone.left_s > 3000
        ('marks', 1, True)
        >>> client.delete_table(gone.table_id)
    """

    name: str
    table_id: str
    kind: str
    dropped: datetime
    left_s: float
    tablets: int
    replication_factor: int


def _from_pb(pb: master_pb2.TableInfoPB) -> DroppedTable:
    return DroppedTable(
        name=pb.name,
        table_id=id_from_pb(pb.table_id),
        kind=pb.kind or "table",
        dropped=datetime.fromtimestamp(pb.dropped_us / 1e6, UTC),
        left_s=pb.keep_left_ms / 1000,
        tablets=pb.tablets,
        replication_factor=pb.replication_factor,
    )


async def delete(
    ask: Ask,
    info: TableInfo | DroppedTable,
    timeout_s: float,
    deadline: float,
    deleted: Callable[[], None],
) -> None:
    """Delete a table for good, and wait until no node may acknowledge rows of it. `deleted` is called once the masters have
    deleted it, perhaps several times.

    `timeout_s`: how long to wait for the next node that answers. `deadline`: until when to wait for the first.

    Raises:
        Retryable: UNKNOWN_OUTCOME: it is deleted, but some nodes did not answer in time.
    """
    left = math.inf
    while True:
        answer = await _delete(ask, info, max(deadline - time.monotonic(), _DELETE_AT_LEAST_S))
        deleted()
        if not answer.unreached:
            return
        if answer.tablets_left < left:  # a table of thousands of tablets takes long
            left, deadline = answer.tablets_left, time.monotonic() + timeout_s
        elif time.monotonic() >= deadline:
            raise Retryable(_still_served(info, answer.unreached), code=Code.UNKNOWN_OUTCOME)


async def _delete(ask: Ask, info: TableInfo | DroppedTable, wait_s: float) -> master_pb2.DeleteTableResponse:
    """Delete a table. The answer names nodes that may still acknowledge rows of it. The masters bound the wait."""
    request = master_pb2.DeleteTableRequest(table_id=id_to_pb(info.table_id), wait_ms=int(wait_s * 1000))
    try:
        answer: master_pb2.DeleteTableResponse = await ask("DeleteTable", request)
    except Rejected as exc:
        if exc.code is not Code.NOT_FOUND:  # otherwise an earlier attempt has deleted it
            raise
        answer = master_pb2.DeleteTableResponse()
    return answer


async def drop(ask: Ask, info: TableInfo, keep_s: float | None, timeout_s: float) -> DroppedTable:
    """Drop a table, and wait until no node that the masters hear serves it.

    Raises:
        Retryable: UNKNOWN_OUTCOME: it is dropped, but some nodes did not confirm it within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    request = master_pb2.DropTableRequest(
        table_id=id_to_pb(info.table_id),
        keep_ms=0 if keep_s is None else max(1, round(keep_s * 1000)),
        drop_id=id_to_pb(new_id()),
    )
    while True:
        request.wait_ms = _wait_ms(deadline)
        answer: master_pb2.DropTableResponse = await ask("DropTable", request)
        if not answer.unreached:
            return _from_pb(answer.table)
        if time.monotonic() >= deadline:
            raise Retryable(
                f"{info.name} is dropped, but {_named(answer.unreached)} did not answer: programs that have it open may "
                "still write there until these nodes reach the masters again; those rows are kept, too",
                code=Code.UNKNOWN_OUTCOME,
            )


async def recall(ask: Ask, name: str, new_name: str | None, timeout_s: float) -> TableInfo:
    """Take a dropped table back, and wait for at most `timeout_s` until the nodes serve it."""
    deadline = time.monotonic() + timeout_s
    found = meant(await dropped(ask), name)
    request = master_pb2.RecallTableRequest(
        table_id=id_to_pb(found.table_id), new_name=new_name or "", recall_id=id_to_pb(new_id())
    )
    while True:
        request.wait_ms = _wait_ms(deadline)
        answer: master_pb2.RecallTableResponse = await ask("RecallTable", request)
        if not answer.unreached or time.monotonic() >= deadline:
            return table_info_from_pb(answer.table)


async def dropped(ask: Ask) -> list[DroppedTable]:
    """Return all tables that can be recalled, by name; of the same name, the newest first."""
    answer = await ask("ListTables", master_pb2.ListTablesRequest(include_removed=True))
    found = [_from_pb(pb) for pb in answer.tables if pb.state == "DROPPED"]
    return sorted(found, key=lambda t: (t.name, -t.dropped.timestamp(), t.table_id))


async def keep_dropped_s(masters: Masters) -> float:
    """For how many seconds dropped tables can be recalled, unless `drop` was given another time."""
    answer = await masters.call("ListTables", master_pb2.ListTablesRequest())
    if not answer.keep_dropped_ms:
        raise Rejected(
            "the leading master is of release 0.1, which keeps no dropped tables; upgrade all masters first",
            code=Code.UNSUPPORTED_VERSION,
        )
    return float(answer.keep_dropped_ms / 1000)


async def set_keep_dropped(masters: Masters, keep_s: float) -> float:
    """Set for how many seconds tables that are dropped from now on can be recalled. Returns the earlier setting.

    Raises:
        Rejected: INVALID_ARGUMENT: less than a second, or more than a year.
    """
    request = master_pb2.SetKeepDroppedRequest(keep_ms=round(keep_s * 1000))
    answer = await masters.call("SetKeepDropped", request)
    return float(answer.before_ms / 1000)


async def deletable(client: _Tables, name: str) -> TableInfo | DroppedTable:
    """The table of this name, or the dropped one with this id. Raises Rejected NOT_FOUND."""
    try:
        return await client.describe(name)
    except Rejected as exc:
        if exc.code is not Code.NOT_FOUND or not is_part_of_id(name):
            raise
        found = [t for t in await client.dropped_tables() if is_part_of_id(name, t.table_id)]
        if not found:
            raise
        return meant(found, name)


def meant(tables: Sequence[DroppedTable], called: str) -> DroppedTable:
    """The dropped table with this name, this id, or an id that begins so.

    Raises:
        Rejected: NOT_FOUND; INVALID_ARGUMENT, there are several.
    """
    found = [t for t in tables if t.name == called] or [
        t for t in tables if is_part_of_id(called, t.table_id)
    ]
    if not found:
        raise Rejected(
            f"no dropped table {called}", code=Code.NOT_FOUND, advice=Advice.LIST_DROPPED, name=called
        )
    if len(found) > 1:
        each = ", ".join(f"{t.table_id[:8]} of {t.dropped:%Y-%m-%d %H:%M:%S} UTC" for t in found[:5])
        raise Rejected(f"{len(found)} dropped tables are called {called}; name one by its id: {each}")
    return found[0]


def is_part_of_id(text: str, table_id: str = "") -> bool:
    """Whether the text is an id, or at least its first 8 digits: of `table_id`, or of any table if that is not given."""
    return _PART_OF_ID.fullmatch(text) is not None and (not table_id or table_id.startswith(text))


def _still_served(info: TableInfo | DroppedTable, nodes: Sequence[str]) -> str:
    """Return the message about a deleted table while these nodes have not answered."""
    kind = "key space" if info.kind == "keyspace" else "table"
    named = ", ".join(nodes[:3]) + (", ..." if len(nodes) > 3 else "")
    many = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    verb = "does" if len(nodes) == 1 else "do"
    return (
        f"{kind} {info.name} is deleted, but {many} ({named}) {verb} not answer: a program that has it open and reaches "
        "them may still write to it, until the masters hear these nodes again"
    )


def _wait_ms(deadline: float) -> int:
    return int(max(deadline - time.monotonic(), _WAIT_AT_LEAST_S) * 1000)


def _named(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more nodes" if len(nodes) > 3 else "")
