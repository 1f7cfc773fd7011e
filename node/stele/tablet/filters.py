"""Predicates over columns, vectorised. Called by view.py; opens no files.

Invariant: a row passes only if every predicate is true for it. Null passes only `is_null`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stele.model.predicate import Predicate
from stele.model.schema import Schema

_COMPARE: dict[str, Any] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


class Filter:
    """All predicates of one scan, their values converted once."""

    def __init__(self, predicates: Sequence[Predicate], schema: Schema) -> None:
        """Raises Rejected for a predicate that does not fit the schema."""
        self._tests = [(schema.by_id[p.column_id].name, p.op, _wanted(p, schema)) for p in predicates]

    def mask(self, batch: pa.RecordBatch) -> pa.BooleanArray | None:
        """Which rows pass (null: does not pass); None if there are no predicates. Finds columns by name."""
        mask = None
        for name, op, values in self._tests:
            # Take the first column of that name: a caller may ask for one column twice.
            column = batch.column(batch.schema.get_all_field_indices(name)[0])
            if op == "is_null":
                found = pc.is_null(column)
            elif op == "is_not_null":
                found = pc.is_valid(column)
            elif op == "in":
                found = pc.is_in(column, value_set=values, skip_nulls=True)
            else:
                found = _COMPARE[op](column, values[0])
            mask = found if mask is None else pc.and_(mask, found)
        return mask


def _wanted(predicate: Predicate, schema: Schema) -> pa.Array:
    """The values to compare a column with. Arrow's "in" compares bits, so floats need care.

    NaN must equal nothing, so it is left out. 0.0 equals -0.0, so either stands for both."""
    values = predicate.array(schema)
    if predicate.op != "in" or not pa.types.is_floating(values.type):
        return values
    values = values.filter(pc.equal(values, values))
    if pc.any(pc.equal(values, pa.scalar(0.0, values.type))).as_py():
        values = pa.concat_arrays([values, pa.array([0.0, -0.0], values.type)])
    return values
