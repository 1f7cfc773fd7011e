"""Which of Spark's filters a scan can take, and how they read there. Called by source.py; talks to nothing.

Invariant: a filter that is taken keeps exactly the rows Spark would keep; what is not taken goes back to Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import datasource as ds

_COMPARISONS: dict[type[ds.Filter], str] = {
    ds.EqualTo: "=",
    ds.GreaterThan: ">",
    ds.GreaterThanOrEqual: ">=",
    ds.LessThan: "<",
    ds.LessThanOrEqual: "<=",
}


@dataclass(frozen=True, slots=True)
class Pushed:
    """(column, operator, value) as scans take it; pickled on its way to the executors."""

    column: str
    op: str
    value: Any = None


def push(
    filters: Iterable[ds.Filter], columns: Mapping[str, pa.DataType]
) -> tuple[list[Pushed], list[ds.Filter]]:
    """Split filters into those a scan takes and those Spark must apply itself."""
    taken: list[Pushed] = []
    left: list[ds.Filter] = []
    for one in filters:
        pushed = _translate(one, columns)
        if pushed is None:
            left.append(one)
        else:
            taken.append(pushed)
    return taken, left


def _translate(one: ds.Filter, columns: Mapping[str, pa.DataType]) -> Pushed | None:
    if isinstance(one, ds.Not):
        child = one.child
        if isinstance(child, ds.IsNull):
            return _on_column(child.attribute, "is_not_null", None, columns)
        if isinstance(child, ds.EqualTo):
            return _on_column(child.attribute, "!=", child.value, columns)
        return None
    if isinstance(one, ds.IsNull):
        return _on_column(one.attribute, "is_null", None, columns)
    if isinstance(one, ds.IsNotNull):
        return _on_column(one.attribute, "is_not_null", None, columns)
    if isinstance(one, ds.In):
        return _on_column(one.attribute, "in", list(one.value), columns)
    op = _COMPARISONS.get(type(one))
    if op is None or one.value is None:  # type: ignore[attr-defined]
        return None
    return _on_column(one.attribute, op, one.value, columns)  # type: ignore[attr-defined]


def _on_column(
    attribute: tuple[str, ...], op: str, value: Any, columns: Mapping[str, pa.DataType]
) -> Pushed | None:
    """A nested attribute, or a name that is no column, is Spark's to judge."""
    if len(attribute) != 1 or attribute[0] not in columns:
        return None
    floating = pa.types.is_floating(columns[attribute[0]])
    if floating and (op in (">", ">=", "in") or value != value):
        return None  # Spark orders NaN above all numbers and equal to itself, Arrow does neither
    return Pushed(attribute[0], op, value)
