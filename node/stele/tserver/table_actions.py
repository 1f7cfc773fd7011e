"""The actions on tables that Flight clients may ask for: list, create and drop. Bodies and results are JSON (docs/flight.md).

Used by plans.py. Asks the leader master, which decides everything. Invariant: an action that is asked for twice because its
answer was lost changes nothing twice.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import new_id
from stele.model.jsons import parse_json, whole_number
from stele.model.partitioning import HashPartitioning, by_ids
from stele.model.schema import Schema
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.convert_schema import partitioning_to_pb, schema_to_pb
from stele.rpc.proto import master_pb2

Ask = Callable[[str, Any], Awaitable[Any]]
Fields = dict[str, Any]

_DROP_WAIT_S = 5.0
_LED_WITHIN_S = 8.0
_LOOK_S = 0.2
_BUCKETS_MAX = 100_000


class TableActions:
    """The actions of one node. `ask(method, request)` calls the leader master."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._actions: dict[str, Callable[[Fields], Awaitable[Fields]]] = {
            "list-tables": self._list,
            "create-table": self._create,
            "drop-table": self._drop,
        }

    async def act(self, name: str, body: bytes) -> bytes:
        """Carry out an action.

        Raises:
            Rejected: there is no such action, the body does not fit it, or the masters refuse it.
            Retryable: no master leads; NOT_READY: a table was created, but has no leaders yet.
        """
        action = self._actions.get(name)
        if action is None:
            raise Rejected(
                f"there is no action {name[:40]!r}; expected one of {', '.join(self._actions)}",
                code=Code.UNSUPPORTED_VERSION,
            )
        try:
            fields = parse_json(body or b"{}")
            if not isinstance(fields, dict):
                raise ValueError("expected an object")
            return json.dumps(await action(fields)).encode()
        except (ValueError, TypeError, KeyError) as exc:
            raise Rejected(f"action {name}: {exc!r}; the body is JSON, as docs/flight.md says") from exc

    async def locations(self, table: str) -> master_pb2.GetTableLocationsResponse:
        """A table and where its tablets are. Raises Rejected: NOT_FOUND."""
        request = master_pb2.GetTableLocationsRequest(name=table)
        try:
            answer: master_pb2.GetTableLocationsResponse = await self._ask("GetTableLocations", request)
        except Rejected as exc:
            if exc.code is not Code.NOT_FOUND:
                raise
            raise Rejected(f"no table {table}", code=Code.NOT_FOUND) from exc
        if answer.table.kind == "keyspace":
            raise Rejected(f"{table} is a key space, not a table")
        return answer

    async def _list(self, fields: Fields) -> Fields:
        answer = await self._ask("ListTables", master_pb2.ListTablesRequest())
        return {"tables": sorted(pb.name for pb in answer.tables if pb.kind != "keyspace")}

    async def _create(self, fields: Fields) -> Fields:
        """Create a table, and wait until each of its tablets has a leader."""
        name = str(fields["table"])
        columns = [(str(name), str(kind), bool(nullable)) for name, kind, nullable in fields["columns"]]
        schema = Schema.make(columns, [str(each) for each in fields["key"]])
        parts = [
            HashPartitioning(
                tuple(str(each) for each in part["columns"]),
                whole_number(part["buckets"], _BUCKETS_MAX, 2),
                number,
            )
            for number, part in enumerate(fields.get("hash", ()))
        ]
        request = master_pb2.CreateTableRequest(
            name=name,
            schema=schema_to_pb(schema),
            partitioning=partitioning_to_pb(by_ids(parts, schema)),
            replication_factor=whole_number(fields.get("replication_factor", 3), 7, 1),
            table_id=id_to_pb(new_id()),
        )
        await self._ask("CreateTable", request)
        until = time.monotonic() + _LED_WITHIN_S
        while True:
            info = (await self.locations(name)).table
            if info.tablets and info.tablets_running >= info.tablets:
                return {"table_id": id_from_pb(info.table_id)}
            if time.monotonic() > until:
                raise Retryable(
                    f"table {name} was created, but only {info.tablets_running} of {info.tablets} tablets have a "
                    "leader so far",
                    code=Code.NOT_READY,
                )
            await asyncio.sleep(_LOOK_S)

    async def _drop(self, fields: Fields) -> Fields:
        """Drop a table so that it can be taken back."""
        name = str(fields["table"])
        found = await self.locations(name)
        request = master_pb2.DropTableRequest(
            table_id=found.table.table_id, wait_ms=int(_DROP_WAIT_S * 1000), drop_id=id_to_pb(new_id())
        )
        answer = await self._ask("DropTable", request)
        if answer.unreached:
            raise Retryable(
                f"{name} is dropped, but {', '.join(answer.unreached[:3])} did not answer and may still serve it",
                code=Code.UNKNOWN_OUTCOME,
            )
        return {"table_id": id_from_pb(found.table.table_id)}
