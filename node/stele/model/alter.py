"""How steps (steps.py) change the schema of a table. Used by client, master and store; opens no files.

Invariant: a column id names one column for ever, and key columns are never dropped. Blocks, files and tickets
of an older schema can therefore still be read, by column ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stele.model.column import Column, arrow_type
from stele.model.errors import Rejected
from stele.model.ids import ColumnId, SchemaVersion
from stele.model.nearest import did_you_mean
from stele.model.schema import Schema
from stele.model.steps import AddColumn, ChangeDefault, DropColumn, RenameColumn, SetHistory, Step

STEPS_MAX = 1_000
"""The most steps of one change."""
ADDED_DEFAULT_BYTES_MAX = 256
"""The most bytes of an added column's default, as JSON. Each stored row gets it when it is read, so a scan of
many rows takes this much more memory for each of them."""


def altered(schema: Schema, steps: Sequence[Step]) -> Schema:
    """Return the schema after these steps, applied in order. Its version is one higher.

    Raises:
        Rejected: lists every step that cannot be done, else every fault of the resulting schema.
    """
    if not 0 < len(steps) <= STEPS_MAX:
        raise Rejected(f"alter: {len(steps)} changes of columns; expected 1 to {STEPS_MAX}")
    faults: list[str] = []
    columns = list(schema.columns)
    next_id, history_ms = schema.next_column_id, schema.history_ms
    for step in steps:
        if isinstance(step, SetHistory):
            history_ms = step.history_ms
            continue
        places = {column.name: at for at, column in enumerate(columns)}
        if isinstance(step, AddColumn):
            faults += _add_faults(step) + _taken(step.name, columns)
            columns.append(
                Column(ColumnId(next_id), step.name, step.type, step.nullable, step.default, step.default)
            )
            next_id += 1
            continue
        at = places.get(step.name)
        if at is None:
            faults.append(f"there is no column {step.name}{did_you_mean(step.name, places)}")
            continue
        match step:
            case DropColumn():
                if columns[at].id in schema.key_column_ids:
                    faults.append(f"column {step.name} is in the primary key and cannot be dropped")
                else:
                    del columns[at]
            case RenameColumn():
                faults += _taken(step.new_name, columns[:at] + columns[at + 1 :])
                columns[at] = replace(columns[at], name=step.new_name)
            case ChangeDefault():
                columns[at] = replace(columns[at], default=step.default)
                if fault := _written_fault(columns[at]):
                    faults.append(fault)
    if faults:
        raise Rejected("alter: " + "; ".join(faults))
    version = SchemaVersion(schema.version + 1)
    return Schema(version, tuple(columns), schema.key_column_ids, next_id, history_ms)


def _add_faults(step: AddColumn) -> list[str]:
    try:
        arrow_type(step.type)
    except Rejected as exc:
        return [f"column {step.name}: {exc.args[0]}"]
    if step.default is None:
        if step.nullable:
            return []
        return [f"column {step.name}: stored rows need a value; make it nullable or give it a default"]
    size = len(step.default.encode())
    if size > ADDED_DEFAULT_BYTES_MAX:
        return [
            f"column {step.name}: a default of {size} bytes; at most {ADDED_DEFAULT_BYTES_MAX} are allowed for an "
            "added column"
        ]
    fault = _written_fault(Column(ColumnId(0), step.name, step.type, step.nullable, step.default))
    return [fault] if fault else []


def _taken(name: str, columns: Sequence[Column]) -> list[str]:
    for column in columns:
        if column.name.lower() == name.lower():
            return [f"there is a column {column.name} already (case is ignored)"]
    return []


def _written_fault(column: Column) -> str:
    """Return a message if rows would get another default than the text says. Otherwise return "".

    A text that does not fit the type also gives "": `Schema` reports it."""
    try:
        column.default_scalar()
    except Rejected:
        return ""
    return column.default_fault()


def follows(new: Schema, old: Schema) -> bool:
    """Whether `new` may replace `old`: a later version, the same key, and no column id with another type.

    Normally it is the next version. A replica that survived a lost majority may have missed several."""
    return (
        new.version > old.version
        and new.key_column_ids == old.key_column_ids
        and new.next_column_id >= old.next_column_id
        and all(
            column.type == before.type and column.nullable == before.nullable
            if (before := old.by_id.get(int(column.id))) is not None
            else column.id >= old.next_column_id
            for column in new.columns
        )
    )
