"""Rows of Python that can be written as they are: dicts with all columns of a table, no nulls, values of the columns' own types.
Used by the client, which for some dozens of rows spends most of its time on making Arrow's arrays and taking them apart again.

Invariant: of what is taken here, `stele.model.rows` makes the same rows, and finds no fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import pyarrow as pa

from stele.model.block import RowOp
from stele.model.layout import ROWS_MAX, layout_of
from stele.model.schema import Schema

_TEXT_CHARS_MAX = 1 << 20
_Rows = Sequence[Mapping[str, Any]]
Values = tuple[Any, ...]


class PlainRows:
    """What takes such rows of one table. Made by `plain_rows`."""

    rows_max = ROWS_MAX
    """How many a block may have."""

    def __init__(self, schema: Schema, fits: Sequence[Callable[[Sequence[Any]], bool]]) -> None:
        layout = layout_of(schema)
        assert layout is not None
        self._layout = layout
        self._arrow = schema.to_arrow()
        self._column_ids = schema.column_ids
        self._width = {len(fits)}
        self._fits = fits
        self._values_of = itemgetter(*schema.by_name)

    def values(self, rows: _Rows) -> tuple[list[Values], dict[int, Values]] | None:
        """Their values, by row in the order of the columns, and by column id; None if any row is none of this kind, or may be
        at fault."""
        if set(map(type, rows)) != _DICT or set(map(len, rows)) != self._width:
            return None
        try:
            found = list(map(self._values_of, rows))
        except KeyError:
            return None
        columns = list(zip(*found))
        if not all([fits(column) for fits, column in zip(self._fits, columns)]):
            return None
        return found, dict(zip(self._column_ids, columns))

    def encode(self, op: RowOp, values: Sequence[Values]) -> bytes:
        """The block of at most `rows_max` rows."""
        return self._layout.encode(op, list(zip(*values)))

    def batch(self, values: Sequence[Values]) -> pa.RecordBatch:
        """The rows as Arrow has them."""
        arrow = self._arrow
        arrays = [pa.array(column, field.type) for column, field in zip(zip(*values), arrow)]
        return pa.RecordBatch.from_arrays(arrays, schema=arrow)


def plain_rows(schema: Schema) -> PlainRows | None:
    """None: some of its columns are of types that are not taken, or there is only one."""
    fits = [_FITS.get(column.type) for column in schema.columns]
    if len(fits) < 2 or None in fits or layout_of(schema) is None:
        return None
    return PlainRows(schema, [each for each in fits if each is not None])


_DICT, _INT, _FLOAT, _STR = {dict}, {int}, {float}, {str}


def _ints_within(bits: int) -> Callable[[Sequence[Any]], bool]:
    least, most = -(1 << (bits - 1)), (1 << (bits - 1)) - 1

    def fits(values: Sequence[Any]) -> bool:
        return set(map(type, values)) == _INT and least <= min(values) and max(values) <= most

    return fits


def _are_floats(values: Sequence[Any]) -> bool:
    return set(map(type, values)) == _FLOAT


def _are_texts(values: Sequence[Any]) -> bool:
    if set(map(type, values)) != _STR:
        return False
    text = "".join(values)
    if len(text) > _TEXT_CHARS_MAX:
        return False
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:  # half of a pair
        return False


_FITS = {
    **{f"int{bits}": _ints_within(bits) for bits in (8, 16, 32, 64)},
    "double": _are_floats,
    "string": _are_texts,
}
