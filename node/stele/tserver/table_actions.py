"""The actions on tables that Flight clients may ask for: list, create, alter and drop. Bodies and results are
JSON (docs/flight.md).

Used by plans.py. Asks the leading master, which decides everything. Invariant: a client whose answer was lost
may repeat an action; the repetition changes nothing more.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from stele.model.bounds import HISTORY_MAX_MS
from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import is_id, new_id
from stele.model.jsons import parse_json
from stele.model.partitioning import HashPartitioning, by_ids
from stele.model.schema import Schema
from stele.model.steps import AddColumn, ChangeDefault, DropColumn, RenameColumn, SetHistory, Step
from stele.model.strict import Fields
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.convert_schema import partitioning_to_pb, schema_to_pb, steps_to_pb
from stele.rpc.proto import master_pb2

Ask = Callable[[str, Any], Awaitable[Any]]
Answer = dict[str, Any]

_DROP_WAIT_S = 5.0
_WAIT_S = 8.0
"""How long to wait until all tablets of a new table have leaders, or all those of an altered one have the
change.
"""
_LOOK_S = 0.2
_BUCKETS_MAX = 100_000
_TEXTS = ("rename_to", "owner", "comment")
_OF_ALTER = ("table", "add", "drop", "rename", "defaults", "history_s", *_TEXTS, "table_id", "alter_id")
_OF_CREATE = ("table", "columns", "key", "hash", "replication_factor", "comment", "history_s", "table_id")


class TableActions:
    """The actions of one node. `ask(method, request)` calls the leading master."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._actions: dict[str, Callable[[Any], Awaitable[Answer]]] = {
            "list-tables": self._list,
            "create-table": self._create,
            "alter-table": self._alter,
            "drop-table": self._drop,
        }

    async def act(self, name: str, body: bytes) -> bytes:
        """Carry out an action.

        Raises:
            Rejected: there is no such action, the body does not fit it, or the masters refuse it.
            Retryable: no master leads. NOT_READY, a new table has no leaders yet, or not all tablets have a
                change yet.
        """
        action = self._actions.get(name)
        if action is None:
            raise Rejected(
                f"there is no action {name[:40]!r}; expected one of {', '.join(self._actions)}",
                code=Code.UNSUPPORTED_VERSION,
            )
        try:
            fields = parse_json(body or b"{}")
        except ValueError as exc:
            raise Rejected(f"action {name}: {exc}; the body is JSON, as docs/flight.md says") from exc
        try:
            return json.dumps(await action(fields)).encode()
        except ValueError as exc:
            raise Rejected(f"action {name}: {exc}") from exc

    async def locations(self, table: str) -> master_pb2.GetTableLocationsResponse:
        """A table and the places of its tablets.

        Raises:
            Rejected: NOT_FOUND.
        """
        return await self._located(master_pb2.GetTableLocationsRequest(name=table), table)

    async def _located(
        self, request: master_pb2.GetTableLocationsRequest, table: str
    ) -> master_pb2.GetTableLocationsResponse:
        try:
            answer: master_pb2.GetTableLocationsResponse = await self._ask("GetTableLocations", request)
        except Rejected as exc:
            if exc.code is not Code.NOT_FOUND:
                raise
            raise Rejected(
                f"no table {table}; the action `list-tables` shows the existing ones", code=Code.NOT_FOUND
            ) from exc
        if answer.table.kind == "keyspace":
            raise Rejected(f"{table} is a key space, not a table; Flight serves tables only")
        return answer

    async def _list(self, body: Any) -> Answer:
        Fields(body, ()).refuse_faults()
        answer = await self._ask("ListTables", master_pb2.ListTablesRequest())
        return {"tables": sorted(pb.name for pb in answer.tables if pb.kind != "keyspace")}

    async def _create(self, body: Any) -> Answer:
        """Create a table, and wait until each of its tablets has a leader.

        A request with a `table_id` that was used before creates nothing, and only waits."""
        fields = Fields(body, _OF_CREATE)
        name, key = fields.text("table", required=True), fields.texts("key", required=True)
        columns = _columns(fields, "columns", required=True)
        parts = [
            HashPartitioning(
                part.texts("columns", required=True),
                part.number("buckets", _BUCKETS_MAX, 2, default=2, required=True),
                number,
            )
            for number, part in enumerate(fields.objects("hash", ("columns", "buckets")))
        ]
        factor, comment = fields.number("replication_factor", 7, 1, default=3), fields.text("comment")
        history_ms, table_id = _history_ms(fields), _id(fields, "table_id")
        fields.refuse_faults()
        schema = replace(Schema.make(columns, list(key)), history_ms=history_ms)
        request = master_pb2.CreateTableRequest(
            name=name,
            schema=schema_to_pb(schema),
            partitioning=partitioning_to_pb(by_ids(parts, schema)),
            replication_factor=factor,
            comment=comment,
            table_id=id_to_pb(table_id or new_id()),
        )
        await self._ask("CreateTable", request)
        until = time.monotonic() + _WAIT_S
        while True:
            info = (await self.locations(name)).table
            if info.tablets and info.tablets_running >= info.tablets:
                return {"table_id": id_from_pb(info.table_id)}
            if time.monotonic() > until:
                raise Retryable(
                    f"table {name} was created, but only {info.tablets_running} of {info.tablets} tablets have a "
                    "leader so far; repeat the request to wait longer",
                    code=Code.NOT_READY,
                )
            await asyncio.sleep(_LOOK_S)

    async def _alter(self, body: Any) -> Answer:
        """Change columns, history, notes or the name of a table. Wait until each of its tablets has the
        change.

        A request with an `alter_id` that was used before changes nothing, and only waits. If the table was
        renamed, such a request must give its `table_id`.
        """
        fields = Fields(body, _OF_ALTER)
        name, given = fields.text("table", required=True), {each: fields.text(each) for each in _TEXTS}
        steps: list[Step] = [DropColumn(each) for each in fields.texts("drop")]
        steps += _renamed(fields)
        steps += _defaults(fields)
        steps += [AddColumn(*column) for column in _columns(fields, "add")]
        if fields.get("history_s") is not None:
            steps.append(SetHistory(_history_ms(fields)))
        table_id, alter_id = _id(fields, "table_id"), _id(fields, "alter_id")
        fields.refuse_faults()
        table_id = table_id or id_from_pb((await self.locations(name)).table.table_id)
        request = master_pb2.AlterTableRequest(
            table_id=id_to_pb(table_id),
            alter_id=id_to_pb(alter_id or new_id()),
            steps=steps_to_pb(steps),
            new_name=given["rename_to"],
        )
        for note in ("owner", "comment"):
            if fields.get(note) is not None:
                setattr(request, note, given[note])
        wanted = (await self._ask("AlterTable", request)).schema_version
        until = time.monotonic() + _WAIT_S
        located = master_pb2.GetTableLocationsRequest(table_id=request.table_id)
        while True:
            info = (await self._located(located, name)).table
            if info.state != "ALTERING" and info.schema.version >= wanted:
                return {"table_id": table_id}
            if time.monotonic() > until:
                raise Retryable(
                    f"table {info.name} is altered, but not all its tablets have the change so far; repeat the request to wait longer",
                    code=Code.NOT_READY,
                )
            await asyncio.sleep(_LOOK_S)

    async def _drop(self, body: Any) -> Answer:
        """Drop a table so that it can be recalled.

        A request with a `drop_id` that was used before drops nothing, and only waits. It must give the
        `table_id`, since another table may have the name by then.
        """
        fields = Fields(body, ("table", "table_id", "drop_id"))
        name = fields.text("table", required=True)
        table_id, drop_id = _id(fields, "table_id"), _id(fields, "drop_id")
        fields.refuse_faults()
        table_id = table_id or id_from_pb((await self.locations(name)).table.table_id)
        request = master_pb2.DropTableRequest(
            table_id=id_to_pb(table_id),
            wait_ms=int(_DROP_WAIT_S * 1000),
            drop_id=id_to_pb(drop_id or new_id()),
        )
        answer = await self._ask("DropTable", request)
        if answer.unreached:
            raise Retryable(
                f"{name} is dropped, but {', '.join(answer.unreached[:3])} did not answer and may still serve it; "
                "repeat the request to wait longer",
                code=Code.UNKNOWN_OUTCOME,
            )
        return {"table_id": table_id}


def _id(fields: Fields, name: str) -> str:
    """The id under this name in the body; "" if it is absent."""
    found = fields.text(name)
    if found and not is_id(found):
        fields.fault(name, found, "32 hex digits")
    return found


def _history_ms(fields: Fields) -> int:
    return 1_000 * fields.number("history_s", HISTORY_MAX_MS // 1_000)


def _columns(fields: Fields, name: str, *, required: bool = False) -> list[tuple[str, str, bool, str | None]]:
    """(name, type, nullable, default as JSON text) of each column."""
    found: list[tuple[str, str, bool, str | None]] = []
    for number, each in enumerate(fields.items(name, required=required)):
        match each:
            case [str(column), str(type_), bool(nullable)]:
                found.append((column, type_, nullable, None))
            case [str(column), str(type_), bool(nullable), str() | None as default]:
                found.append((column, type_, nullable, default))
            case _:
                fields.fault(
                    f"{name}[{number}]",
                    each,
                    '[NAME, TYPE, NULLABLE] or [NAME, TYPE, NULLABLE, DEFAULT], like ["stops", "int8", false, "0"]',
                )
    return found


def _defaults(fields: Fields) -> list[ChangeDefault]:
    found = []
    for number, each in enumerate(fields.items("defaults")):
        match each:
            case [str(column), str() | None as default]:
                found.append(ChangeDefault(column, default))
            case _:
                fields.fault(f"defaults[{number}]", each, '[NAME, DEFAULT], like ["stops", "0"]')
    return found


def _renamed(fields: Fields) -> list[RenameColumn]:
    found = []
    for number, each in enumerate(fields.items("rename")):
        match each:
            case [str(column), str(new_name)]:
                found.append(RenameColumn(column, new_name))
            case _:
                fields.fault(f"rename[{number}]", each, '[NAME, NEW NAME], like ["dest", "destination"]')
    return found
