"""Turns simple Python rows into blocks without Arrow. Simple rows are dicts with all columns and no nulls, in which each
value is of its column's type.

The client uses this, because making Arrow arrays for some dozens of rows takes most of its time. Invariant:
for rows accepted here, `stele.model.rows` gives the same rows and finds no fault.
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
    """Encodes simple rows of one table into blocks. Made by `plain_rows`."""

    rows_max = ROWS_MAX
    """The most rows of a block."""

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
        """Return the values of the rows twice: row by row in column order, and by column id. None if a row is
        not simple enough to be encoded here."""
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
        """Return the block of at most `rows_max` rows."""
        return self._layout.encode(op, list(zip(*values)))

    def batch(self, values: Sequence[Values]) -> pa.RecordBatch:
        """The rows as an Arrow batch."""
        arrow = self._arrow
        arrays = [pa.array(column, field.type) for column, field in zip(zip(*values), arrow)]
        return pa.RecordBatch.from_arrays(arrays, schema=arrow)


def plain_rows(schema: Schema) -> PlainRows | None:
    """Return the encoder for a schema. None: a column's type cannot be encoded here, or there is only one column."""
    fits = checks_of(schema)
    if fits is None or len(fits) < 2 or layout_of(schema) is None:
        return None
    return PlainRows(schema, fits)


def checks_of(schema: Schema) -> list[Callable[[Sequence[Any]], bool]] | None:
    """Return a function for each column that says whether given values of it may be encoded here. None: values
    of some column never may."""
    fits = [_FITS.get(column.type) for column in schema.columns]
    return None if None in fits else [each for each in fits if each is not None]


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
    except UnicodeEncodeError:  # a lone surrogate
        return False


_FITS = {
    **{f"int{bits}": _ints_within(bits) for bits in (8, 16, 32, 64)},
    "double": _are_floats,
    "string": _are_texts,
}
