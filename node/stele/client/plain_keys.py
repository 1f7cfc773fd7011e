"""Keys of point reads as Python values, without Arrow. Used by point_reads.py; waits for nothing.

Making Arrow arrays of a handful of keys takes most of a client's time for them. Invariant: for keys accepted here, the
general way (`stele.model.rows`) gives the same keys and finds no fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from stele.model.block import HEADER, RowOp
from stele.model.layout import ROWS_MAX, Layout, layout_of
from stele.model.partition import PartitionSchema, assign, assign_few
from stele.model.plain import checks_of
from stele.model.schema import Schema

KEYS_MAX = 512
"""For more keys at once, Arrow assigns them to tablets faster."""

Values = tuple[Any, ...]
"""The values of one key, in the order of the key columns."""


class PlainKeys:
    """The keys of one table. Made by `plain_keys`."""

    def __init__(self, schema: Schema, layout: Layout, key_schema: Schema) -> None:
        self._schema = schema
        self._layout = layout
        self._fits = checks_of(key_schema)
        self._column_ids = key_schema.column_ids
        self._arrow = key_schema.to_arrow()
        front = HEADER.size + 4 * len(self._column_ids)
        self._front = front + -front % 8  # a read sends only the message of a block

    def values(self, keys: Sequence[Any]) -> list[Values] | None:
        """Return the values of these keys; None if one of them cannot be encoded here."""
        kinds, width = set(map(type, keys)), len(self._column_ids)
        if self._fits is None:
            return None
        if width == 1 and kinds.isdisjoint(_SEQUENCES):
            found = [(key,) for key in keys]
        elif kinds == _TUPLE and set(map(len, keys)) == {width}:
            found = list(keys)
        else:
            return None
        return found if all(fits(column) for fits, column in zip(self._fits, zip(*found))) else None

    def assign(self, values: Sequence[Values], partitioning: PartitionSchema) -> list[int]:
        """Return the ordinal of each key's tablet; OUTSIDE if no range covers the key."""
        if len(values) > KEYS_MAX:
            ordinals: list[int] = assign(self.batch(values), self._schema, partitioning).tolist()
            return ordinals
        return assign_few(dict(zip(self._column_ids, zip(*values))), self._schema, partitioning)

    def encode(self, values: Sequence[Values]) -> bytes:
        """Encode these keys as an Arrow record batch message."""
        columns = list(zip(*values))
        if len(values) <= ROWS_MAX:
            return self._layout.encode(RowOp.DELETE, columns)[self._front :]
        return message_of(self.batch(values))

    def batch(self, values: Sequence[Values]) -> pa.RecordBatch:
        """These keys in Arrow."""
        arrays = [pa.array(column, field.type) for column, field in zip(zip(*values), self._arrow)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._arrow)


_TUPLE, _SEQUENCES = {tuple}, {tuple, list, dict}


def message_of(keys: pa.RecordBatch) -> bytes:
    """An Arrow record batch message."""
    raw: bytes = keys.serialize().to_pybytes()
    return raw


def plain_keys(schema: Schema) -> PlainKeys | None:
    """Return the encoder of a schema's keys, made once. None if a key column is neither an integer nor text."""
    if "plain_keys" not in schema.derived:
        schema.derived["plain_keys"] = _made(schema)
    found: PlainKeys | None = schema.derived["plain_keys"]
    return found


def _made(schema: Schema) -> PlainKeys | None:
    keys = Schema(schema.version, schema.key_columns, schema.key_column_ids, schema.next_column_id)
    layout = layout_of(keys)
    if layout is None or checks_of(keys) is None:
        return None
    return PlainKeys(schema, layout, keys)
