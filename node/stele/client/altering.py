"""Alters a table: asks the masters for the change, and waits until all tablets have it. Used by table.py.

Invariant: one change has one id, so that a repeated request does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stele.client import arguments
from stele.client.locations import Locations
from stele.model.column import shown
from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import new_id
from stele.model.partition import PartitionSchema
from stele.model.partitioning import encoded_bounds
from stele.model.ranges import AddRange, DropRange, RangeStep
from stele.model.schema import Schema
from stele.model.steps import AddColumn, ChangeDefault, DropColumn, RenameColumn, SetHistory, Step
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


def history_steps(history_s: float | None) -> list[Step]:
    """Return the step that sets the history retention; no step for None. 0 sets the default."""
    if history_s is None:
        return []
    return [SetHistory(arguments.history_ms(history_s))]


def notes_of(owner: str | None, comment: str | None) -> dict[str, str]:
    """Return the notes to change, by name. A note that is None does not change."""
    given = {"owner": owner, "comment": comment}
    return {name: arguments.note(note, name) for name, note in given.items() if note is not None}


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


def range_steps(
    partitions: PartitionSchema, schema: Schema, add: Iterable[Sequence[Any]], drop: Iterable[Sequence[Any]]
) -> list[RangeStep]:
    """The steps of a change of ranges: drops, then new ones. Bounds are pairs of values.

    Raises:
        Rejected: the table has no ranges, or a bound is not a value of its columns; lists all faults.
    """
    pairs = [(DropRange, "drop_ranges", pair) for pair in drop] + [
        (AddRange, "add_ranges", pair) for pair in add
    ]
    if not pairs:
        return []
    if partitions.range is None:
        raise Rejected(
            "the table has no range partitions; ranges can be added to a table made with stele.range"
        )
    columns = [schema.by_id[i] for i in partitions.range.column_ids]
    faults: list[str] = []
    steps: list[RangeStep] = []
    for kind, what, pair in pairs:
        try:
            steps.append(kind(*encoded_bounds(pair, columns)))
        except Rejected as exc:
            faults.append(f"{what}: {exc.args[0]}")
    if faults:
        raise Rejected("; ".join(faults))
    return steps


async def _ask(
    locations: Locations, request: master_pb2.AlterTableRequest, deadline: float, *, drops: bool
) -> master_pb2.AlterTableResponse:
    """Have the masters make the change. If it `drops` ranges, ask again until nodes have deleted them.

    A repeated request has no steps. The masters remember only a table's last few changes, so they might make
    a forgotten change a second time. That could drop a range which was added again since.
    """
    answer: master_pb2.AlterTableResponse | None = None
    while answer is None or answer.unreached:
        rest_s = max(0.001, deadline - time.monotonic())
        request.wait_ms = int(rest_s * 1000) if drops else 0
        try:
            told: master_pb2.AlterTableResponse = await locations.masters.call(
                "AlterTable", request, timeout_s=rest_s
            )
        except (Rejected, Retryable):
            if answer is None:
                raise
            break  # other changes came in between, or the time is over
        answer = told
        if not drops:
            return answer  # what is left to delete is of another change
        request.ClearField("steps")
        for field in ("new_name", "owner", "comment"):
            request.ClearField(field)
        if time.monotonic() >= deadline:
            break
    if answer.unreached:
        raise Retryable(
            f"the ranges of table {locations.info.name} are dropped, but {', '.join(answer.unreached[:3])} did not "
            "answer: until the masters hear these nodes again, a program that reaches them may still write to the ranges",
            code=Code.UNKNOWN_OUTCOME,
        )
    return answer


async def alter(
    locations: Locations,
    steps: Sequence[Step | RangeStep],
    new_name: str | None,
    notes: Mapping[str, str],
    timeout_s: float,
) -> None:
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
    for name, note in notes.items():
        setattr(request, name, note)
    drops = any(isinstance(step, DropRange) for step in steps)
    answer = await _ask(locations, request, deadline, drops=drops)
    added = any(isinstance(step, AddRange) for step in steps)
    why = ""
    while (rest_s := deadline - time.monotonic()) > 0:
        try:
            await locations.refresh(timeout_s=rest_s)
        except Retryable as exc:
            why = f": {exc.args[0]}"
            continue
        info = locations.info
        version = 0 if info.schema is None else int(info.schema.version)
        if version >= answer.schema_version and info.state != "ALTERING" and (locations.led or not added):
            return
    raise Retryable(
        f"table {locations.info.name} is altered, but not all its tablets have the change after "
        f"{timeout_s:.0f} s{why}; `stele ksck` says why; the change continues, so do not send it again",
        code=Code.NOT_READY,
    )
