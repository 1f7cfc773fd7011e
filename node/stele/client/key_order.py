"""Keys of a scan: the encoded bounds, and rows of several tablets in key order. Pure; used by scan.py and
table.py.

Invariant: sorting makes no array larger than Arrow allows, however large the table is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stele.model import keys
from stele.model.column import shown
from stele.model.errors import Rejected
from stele.model.schema import Schema

_TAKE_BYTES_MAX = 512 << 20
"""Larger columns are sorted in parts: Arrow joins a column to take rows from it, and an array holds at most 2
GiB."""


def in_key_order(table: pa.Table, schema: Schema) -> pa.Table:
    names = table.schema.names  # a column that was asked for twice is there twice
    keyed = pa.table({column.name: table.column(names.index(column.name)) for column in schema.key_columns})
    order = pc.sort_indices(keyed, sort_keys=[(name, "ascending") for name in keyed.schema.names])
    if all(column.nbytes <= _TAKE_BYTES_MAX for column in table.columns):
        return table.take(order)
    return pa.Table.from_batches(_taken_in_parts(table, order.to_numpy()), table.schema)


def _taken_in_parts(table: pa.Table, order: npt.NDArray[np.uint64]) -> Iterator[pa.RecordBatch]:
    """A table's rows in this order, as batches of bounded size. Joins no column of the table."""
    lengths = np.zeros(table.num_rows, np.int64)
    for column in table.columns:
        if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
            lengths += pc.fill_null(pc.binary_length(column), 0).to_numpy()
    ends = np.cumsum(lengths[order])
    batches = table.to_batches()
    starts = np.cumsum([0, *(batch.num_rows for batch in batches[:-1])])
    begin = 0
    while begin < len(order):
        before = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + _TAKE_BYTES_MAX, "right")))
        rows = order[begin:end].astype(np.int64)
        by_place = np.argsort(rows)
        cuts = np.searchsorted(rows, starts[1:], sorter=by_place)
        found = [
            batch.take(pa.array(rows[members] - start))
            for batch, start, members in zip(batches, starts, np.split(by_place, cuts))
        ]
        joined = pa.concat_batches(found)
        del found
        yield joined.take(pa.array(np.argsort(by_place)))
        begin = end


def key_bound(bound: Any, schema: Schema, what: str) -> bytes:
    """Encode a bound of a key range: values of the first key columns, in order or by name.

    A value of only the first key column may be bare.

    Raises:
        Rejected: names that are not the first key columns, or values that do not fit.
    """
    if bound is None:
        return b""
    columns = schema.key_columns
    names = [column.name for column in columns]
    if isinstance(bound, Mapping):
        wanted = names[: len(bound)]
        if set(wanted) != set(bound):
            raise Rejected(f"{what}: expected values of the first key columns {wanted}, got {list(bound)}")
        values = [bound[name] for name in wanted]
    else:
        values = list(bound) if isinstance(bound, (tuple, list)) else [bound]
    if not 0 < len(values) <= len(columns):
        raise Rejected(
            f"{what} is {shown(bound)}, with {len(values)} values; expected values of {', '.join(names)}"
        )
    for column, value in zip(columns, values):
        why = column.fault(value) if value is not None else f"column {column.name} is None"
        if why:
            raise Rejected(f"{what}: {why}; expected {column.a_type}")
    types = [column.arrow for column in columns[: len(values)]]
    if len(values) == len(columns):
        return keys.encode_tuple(values, types)
    # A string before other columns is encoded with an end marker: let a column follow, and cut it off again.
    return keys.encode_tuple([*values, 0], [*types, pa.int8()])[:-1]
