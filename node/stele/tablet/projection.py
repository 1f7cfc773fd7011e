"""Rows that were written with one schema, as columns of another. Used by everything that reads a memtable.

Invariant: a column is found by its id. A column that was added after the rows were written has its read default.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from stele.model.column import Column
from stele.model.schema import Schema


def projected(
    batch: pa.RecordBatch, written: Schema, columns: Sequence[Column], arrow: pa.Schema
) -> pa.RecordBatch:
    """These columns of `batch`, which has all columns of the schema `written`. `arrow`: their Arrow schema."""
    if columns == written.columns:
        return batch
    place = written.places
    arrays = []
    for column in columns:
        at = place.get(int(column.id))
        arrays.append(batch.column(at) if at is not None else read_defaults(column, batch.num_rows))
    return pa.RecordBatch.from_arrays(arrays, schema=arrow)


def read_defaults(column: Column, rows: int) -> pa.Array:
    """The values of a column in rows that are older than it."""
    scalar = column.read_scalar()
    return pa.repeat(scalar, rows) if scalar.is_valid else pa.nulls(rows, column.arrow)
