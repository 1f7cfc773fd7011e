"""From Python rows to batches, and which rows of a batch are at fault. Used by the client to build blocks and by the
store before it writes one. Opens no files.

Invariant: a fault of a row never touches its neighbours: the good rows go on, the bad ones are listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stele.model.block import DELETES, INSERTS, UPDATES, Block, RowError, RowOp
from stele.model.errors import Code, Rejected
from stele.model.schema import Column, Schema, is_whole, whole_fault

_CONVERT_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError)


def batch_from_rows(
    rows: Sequence[Mapping[str, Any]], schema: Schema, op: RowOp
) -> tuple[pa.RecordBatch, tuple[int, ...], npt.NDArray[np.int64], list[RowError]]:
    """(batch of the good rows, its column ids, their positions in `rows`, errors of the bad ones).

    insert and upsert rows are whole: a column not given takes its default, else null. Rows of one update must name
    the same columns; of a delete, only key columns are used.

    Raises:
        Rejected: update rows that name different columns (split them by their columns first).
    """
    errors: dict[int, str] = {}
    for position, row in enumerate(rows):
        unknown = [name for name in row if name not in schema.by_name]
        if unknown:
            errors[position] = (
                f"unknown column {', '.join(map(str, unknown))}; expected {', '.join(schema.by_name)}"
            )
    columns = _columns_for(rows, errors, schema, op)
    arrays: list[pa.Array] = []
    for column in columns:
        fill = op in INSERTS and column.default is not None
        default = column.default_scalar().as_py() if fill else None
        values = [row.get(column.name, default) for row in rows]
        arrays.append(_convert(column, values, errors))
        if not column.nullable and arrays[-1].null_count:
            for position in np.flatnonzero(np.asarray(arrays[-1].is_null())).tolist():
                given = column.name in rows[position]
                what = "is null" if given else "is missing and has no default"
                errors.setdefault(position, f"column {column.name} {what}; expected a {column.type}")
    batch = pa.record_batch(arrays, schema=schema.to_arrow([c.id for c in columns]))
    kept = np.arange(len(rows), dtype=np.int64)
    if errors:
        kept = np.delete(kept, list(errors))
        batch = batch.take(pa.array(kept))
    found = [RowError(row, Code.INVALID_ARGUMENT, errors[row]) for row in sorted(errors)]
    return batch, tuple(int(c.id) for c in columns), kept, found


def _columns_for(
    rows: Sequence[Mapping[str, Any]], errors: Mapping[int, str], schema: Schema, op: RowOp
) -> list[Column]:
    if op in DELETES:
        return list(schema.key_columns)
    if op not in UPDATES:
        return list(schema.columns)
    key = {c.name for c in schema.key_columns}
    names: set[str] | None = None
    for position, row in enumerate(rows):
        if position in errors:
            continue
        if names is None:
            names = set(row)
        elif names != set(row):
            raise Rejected("update: rows name different columns; split them by their columns first")
    wanted = (names or set()) | key
    return [c for c in schema.columns if c.name in wanted]


def _convert(column: Column, values: list[Any], errors: dict[int, str]) -> pa.Array:
    arrow = column.arrow
    try:
        if not (is_whole(arrow) and any(map(whole_fault, values))):
            return pa.array(values, arrow)
    except _CONVERT_ERRORS:
        pass
    for position, value in enumerate(values):
        try:
            fault = whole_fault(value) if is_whole(arrow) else ""
            if fault:
                raise TypeError(fault)
            pa.array([value], arrow)
        except _CONVERT_ERRORS as exc:
            errors.setdefault(position, f"column {column.name}: {value!r} is no {column.type} ({exc})")
            values[position] = None
    return pa.array(values, arrow)


def null_faults(block: Block, schema: Schema) -> list[RowError]:
    """Rows of a decoded block that hold null where the schema forbids it, or lack a column they must give.

    A row that is deleted needs its key only. Costs nothing per row where no column has nulls.
    """
    errors: dict[int, str] = {}
    for position, column_id in enumerate(block.column_ids):
        column = schema.by_id[column_id]
        if column.nullable or not block.batch.column(position).null_count:
            continue
        bad = np.asarray(block.batch.column(position).is_null())
        if not schema.is_key(column_id):
            if block.op in DELETES:
                continue
            if block.row_ops is not None:
                bad = bad & (block.row_ops < RowOp.DELETE)
        for row in np.flatnonzero(bad).tolist():
            errors.setdefault(row, f"column {column.name} is null; expected a {column.type}")
    if len(block.column_ids) != len(schema.columns):
        _missing_columns(block, schema, errors)
    return [RowError(row, Code.INVALID_ARGUMENT, errors[row]) for row in sorted(errors)]


def _missing_columns(block: Block, schema: Schema, errors: dict[int, str]) -> None:
    present = set(block.column_ids)
    lacking = [c for c in schema.columns if c.id not in present and not c.nullable and c.default is None]
    if not lacking or (block.op is not None and block.op not in INSERTS):
        return
    message = f"column {', '.join(c.name for c in lacking)} is missing and has no default"
    whole = np.ones(block.rows, bool) if block.row_ops is None else block.row_ops <= RowOp.UPSERT
    for row in np.flatnonzero(whole).tolist():
        errors.setdefault(row, message)
