"""Arrow data from callers: its record batches, and their columns fitted to a table's. Used by bulk.py, tables
and Spark.

Sends nothing. Invariant: a value either keeps its meaning or is refused with a reason.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from stele.client.cast_values import cast_each, is_text
from stele.client.casts import python_value
from stele.model.block import DELETES, INSERTS, RowOp
from stele.model.column import Column, shown
from stele.model.errors import Rejected
from stele.model.schema import Schema

_UNNAMED_INDEX = "__index_level_"
"""How pyarrow names an index of pandas that has no name."""

Refused = dict[int, dict[int, str]]
"""By column id and row: why a value does not fit its column."""


class UnfitColumns(Rejected):
    """The columns do not fit the table, and no row of the write was sent."""


class ArrowStream(Protocol):
    """Data of any library that gives them as an Arrow stream: frames of pandas and polars, relations of DuckDB."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """A PyCapsule of a C stream."""


ArrowData: TypeAlias = (
    pa.Table | pa.RecordBatch | pa.RecordBatchReader | ArrowStream | Iterable[pa.RecordBatch]
)


def arrow_of(data: ArrowData) -> ArrowData:
    """Convert data of another library to pyarrow's. Return pyarrow data and iterables unchanged. May take
    long for large frames.

    Raises:
        Rejected: columns of a pandas frame that are not Arrow data, or a stream that has no columns.
    """
    if isinstance(data, getattr(sys.modules.get("pandas"), "DataFrame", ())):
        return _of_frame(data)
    if isinstance(data, (pa.Table, pa.RecordBatch, pa.RecordBatchReader)):
        return data
    if not hasattr(data, "__arrow_c_stream__"):
        return data
    try:
        return pa.RecordBatchReader.from_stream(data)
    except (
        pa.ArrowException,
        TypeError,
        ValueError,
    ) as exc:  # a stream of bare values, such as of one column
        raise Rejected(f"{_no_arrow_data(data)} ({exc})") from exc


def _of_frame(frame: Any) -> pa.Table:
    """Convert a pandas frame to Arrow. A named index becomes columns. An index without a name only numbers
    the rows, and is left out.

    Pandas' nulls, which in a column of floats are nan, become null."""
    named = any(name is not None for name in frame.index.names)
    try:
        found = pa.Table.from_pandas(frame, preserve_index=named)
    except (pa.ArrowException, TypeError, ValueError) as exc:
        raise Rejected(
            f"write_arrow: the DataFrame is not Arrow data: {'; '.join(map(str, exc.args))}"
        ) from exc
    return found.select([name for name in found.schema.names if not name.startswith(_UNNAMED_INDEX)])


def batches_of(data: ArrowData) -> Iterator[pa.RecordBatch]:
    """Return the record batches of any Arrow data.

    Raises:
        Rejected: `data` is not Arrow data.
    """
    found: Any = arrow_of(data)
    if isinstance(found, pa.Table):
        yield from found.to_batches()
        return
    several = isinstance(found, Iterable) and not isinstance(found, (pa.RecordBatch, str, bytes, Mapping))
    for batch in found if several else [found]:
        if not isinstance(batch, pa.RecordBatch):
            raise Rejected(_no_arrow_data(batch))
        yield batch


def _no_arrow_data(given: object) -> str:
    kind = type(given)
    expected = "expected a pyarrow Table, a DataFrame, another Arrow stream, or several RecordBatches"
    if isinstance(given, Mapping):
        expected = "pass pyarrow.Table.from_pylist([row, ...]) for rows, pyarrow.table({...}) for columns"
    return f"write_arrow: {kind.__name__} is not Arrow data; {expected}"


def fit(
    batch: pa.RecordBatch, table: str, schema: Schema, op: RowOp, *, begun: bool = False
) -> tuple[pa.RecordBatch, tuple[int, ...], Refused]:
    """Fit `batch` to a block of `op`: exactly its columns, cast to the table's types. Returns (the batch, the
    column ids, the values that do not fit).

    Values that do not fit are null in the result. `begun`: earlier rows of this write were already accepted.

    Raises:
        UnfitColumns: lists all faults: unknown columns, missing ones, and types that cannot be cast. A column
            of text in which no value fits counts as one that cannot be cast, because it holds other data.
        Rejected: raised in place of UnfitColumns if `begun`. Then a column of text may have no fitting value.
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
        kind = Rejected if begun else UnfitColumns
        raise kind(f"table {table}: the columns do not fit: {'; '.join(faults)}; expected {expected}")
    return pa.record_batch(arrays, schema=schema.to_arrow(ids)), tuple(ids), refused


def _says_text(type_: pa.DataType) -> bool:
    return is_text(type_.value_type if pa.types.is_dictionary(type_) else type_)


def _why_refused(column: Column, scalar: pa.Scalar, why: str) -> str:
    """Return the message for a refused value. A number gets the message that a session gives. Texts and dates
    do not, because a session refuses some that are accepted here."""
    value = python_value(scalar)
    told = column.fault(value) if isinstance(value, (int, float, Decimal)) else ""
    return told or f"column {column.name}: {shown(value)} is not {column.a_type} ({why})"


def _named(name: str) -> str:
    """Return an unknown column's name. If pandas added it as an index, say what to do."""
    remedy = (
        " (pandas' index; pass pyarrow.Table.from_pandas(frame, preserve_index=False))"
        if name.startswith(_UNNAMED_INDEX)
        else ""
    )
    return f"{name!r}{remedy}"
