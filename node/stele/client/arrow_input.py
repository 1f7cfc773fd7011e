"""Arrow data from callers: its record batches, and their columns fitted to a table's. Used by bulk.py, tables
and Spark.

Sends nothing. Invariant: a value either keeps its meaning or is refused with a reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal

import pyarrow as pa

from stele.client.cast_values import cast_each, is_text
from stele.client.casts import python_value
from stele.model.block import DELETES, INSERTS, RowOp
from stele.model.column import Column, shown
from stele.model.errors import Rejected
from stele.model.schema import Schema

Refused = dict[int, dict[int, str]]
"""By column id and row: why a value does not fit its column."""


def batches_of(
    data: pa.Table | pa.RecordBatch | pa.RecordBatchReader | Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """The record batches of any Arrow data.

    Raises:
        Rejected: `data` is not Arrow data.
    """
    if isinstance(data, pa.Table):
        yield from data.to_batches()
        return
    # A pandas frame or a mapping can be iterated over too, but yields names.
    several = isinstance(data, Iterable) and not isinstance(data, (pa.RecordBatch, str, bytes, Mapping))
    for batch in data if several and not hasattr(data, "to_dict") else [data]:
        if not isinstance(batch, pa.RecordBatch):
            raise Rejected(_no_arrow_data(batch))
        yield batch


def _no_arrow_data(given: object) -> str:
    kind = type(given)
    expected = "expected a pyarrow Table, RecordBatch, RecordBatchReader or several RecordBatches"
    if kind.__module__.partition(".")[0] == "pandas":
        expected = "pass pyarrow.Table.from_pandas(frame)"
    elif isinstance(given, Mapping):
        expected = "pass pyarrow.Table.from_pylist([row, ...]) for rows, pyarrow.table({...}) for columns"
    return f"write_arrow: {kind.__name__} is not Arrow data; {expected}"


def fit(
    batch: pa.RecordBatch, table: str, schema: Schema, op: RowOp, *, begun: bool = False
) -> tuple[pa.RecordBatch, tuple[int, ...], Refused]:
    """`batch` with exactly the columns of a block of `op`, cast to the table's types; their ids; and values
    that do not fit.

    Values that do not fit are null in the result. `begun`: earlier rows of this write were already accepted.

    Raises:
        Rejected: lists all faults: unknown columns, missing ones, types that cannot be cast. Also text in
            which no value fits, because such a column has another kind of data; not if the write has begun.
    """
    faults = [f"unknown column {_named(name)}" for name in batch.schema.names if name not in schema.by_name]
    wanted = schema.key_columns if op in DELETES else schema.columns
    arrays, ids = [], []
    refused: Refused = {}
    for column in wanted:
        position = batch.schema.get_field_index(column.name)
        if position < 0:
            required = column in schema.key_columns or (
                op in INSERTS and not column.nullable and column.default is None
            )
            if required:
                faults.append(f"column {column.name} is missing")
            continue
        array = batch.column(position)
        if array.type != column.arrow:
            try:
                found, reasons = cast_each(array, column.arrow)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:
                faults.append(f"column {column.name}: {array.type} does not fit {column.type} ({exc})")
                continue
            if reasons:
                words = {row: _why_refused(column, array[row], why) for row, why in reasons.items()}
                if not begun and _says_text(array.type) and found.null_count == len(found):
                    first = next(iter(words.values()))
                    faults.append(f"column {column.name}: {array.type} does not fit {column.type} ({first})")
                    continue
                refused[int(column.id)] = words
            array = found
        arrays.append(array)
        ids.append(int(column.id))
    if faults:
        expected = ", ".join(f"{column.name} {column.type}" for column in wanted)
        raise Rejected(f"table {table}: the columns do not fit: {'; '.join(faults)}; expected {expected}")
    return pa.record_batch(arrays, schema=schema.to_arrow(ids)), tuple(ids), refused


def _says_text(type_: pa.DataType) -> bool:
    return is_text(type_.value_type if pa.types.is_dictionary(type_) else type_)


def _why_refused(column: Column, scalar: pa.Scalar, why: str) -> str:
    """Why a value was refused; for a number in the words of a session. A session accepts no text, and no
    midnight as date."""
    value = python_value(scalar)
    told = column.fault(value) if isinstance(value, (int, float, Decimal)) else ""
    return told or f"column {column.name}: {shown(value)} is not {column.a_type} ({why})"


def _named(name: str) -> str:
    """An unknown column's name; for an index that pandas added, with what to do."""
    remedy = (
        " (pandas' index; pass pyarrow.Table.from_pandas(frame, preserve_index=False))"
        if name.startswith("__index_level_")
        else ""
    )
    return f"{name!r}{remedy}"
