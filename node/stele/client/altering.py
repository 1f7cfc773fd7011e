"""Alters a table: asks the masters for the change, and waits until all tablets have it. Used by table.py.

Invariant: one change has one id, so that a repeated request does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stele.client import arguments
from stele.client.locations import Locations
from stele.model.alter import AddColumn, ChangeDefault, DropColumn, RenameColumn, Step
from stele.model.column import shown
from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import new_id
from stele.rpc.convert import id_to_pb
from stele.rpc.convert_schema import steps_to_pb
from stele.rpc.proto import master_pb2

ALTER_TIMEOUT_S = 60.0


def steps_of(
    add: Iterable[Sequence[Any]],
    drop: Sequence[str] | str,
    rename: Mapping[str, str],
    defaults: Mapping[str, str | None],
) -> list[Step]:
    """The steps of a change: drops, then renames, defaults and new columns.

    Raises:
        Rejected: an argument of a wrong kind.
    """
    steps: list[Step] = []
    if drop:
        names = [drop] if isinstance(drop, str) else drop
        steps += [DropColumn(name) for name in arguments.names(names, "drop")]
    for what, given in (("rename", rename), ("defaults", defaults)):
        arguments.of_kind(given, Mapping, what, "a mapping of column names")
    steps += [
        RenameColumn(arguments.text(name, "rename"), arguments.text(new_name, "rename"))
        for name, new_name in rename.items()
    ]
    for name, default in defaults.items():
        if default is not None and not isinstance(default, str):
            raise arguments.refusal("default", default, "JSON text, like '5', or None for no default")
        steps.append(ChangeDefault(arguments.text(name, "defaults"), default))
    steps += [_added(column) for column in add]
    return steps


def _added(column: Sequence[Any]) -> AddColumn:
    parts = tuple(column) if isinstance(column, (tuple, list)) else ()
    if not 2 <= len(parts) <= 4 or not all(isinstance(part, str) for part in parts[:2]):
        raise Rejected(f"add {shown(column)}: expected (name, type[, nullable[, default]])")
    name, type_ = parts[:2]
    nullable = parts[2] if len(parts) > 2 else False
    default = parts[3] if len(parts) > 3 else None
    if not isinstance(nullable, bool):
        raise Rejected(f"add {name}: nullable {shown(nullable)}: expected True or False")
    if default is not None and not isinstance(default, str):
        raise Rejected(f"add {name}: the default is {shown(default)}; expected JSON text, like '5'")
    return AddColumn(name, type_, nullable, default)


async def alter(locations: Locations, steps: Sequence[Step], new_name: str | None, timeout_s: float) -> None:
    """Have the masters change a table, and wait until all its tablets have the change.

    Raises:
        Rejected: the change is refused; lists all faults.
        Retryable: NOT_READY: the masters have it, but a tablet has not followed within `timeout_s`; it will.
    """
    deadline = time.monotonic() + timeout_s
    request = master_pb2.AlterTableRequest(
        table_id=id_to_pb(locations.table_id),
        alter_id=id_to_pb(new_id()),
        steps=steps_to_pb(steps),
        new_name="" if new_name is None else arguments.text(new_name, "new name"),
    )
    answer = await locations.masters.call("AlterTable", request, timeout_s=timeout_s)
    why = ""
    while (rest_s := deadline - time.monotonic()) > 0:
        try:
            await locations.refresh(timeout_s=rest_s)
        except Retryable as exc:
            why = f": {exc.args[0]}"
            continue
        info = locations.info
        version = 0 if info.schema is None else int(info.schema.version)
        if version >= answer.schema_version and info.state != "ALTERING":
            return
    raise Retryable(
        f"table {locations.info.name} is altered, but not all its tablets have the change after {timeout_s:.0f} s{why}; "
        "`stele ksck` says why; nothing needs to be sent again",
        code=Code.NOT_READY,
    )
