"""`stele.column`: one column of a new table, with a default as a Python value. Pure; asks nobody."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
from typing import Any, TypeAlias

from stele.client.arguments import of_kind, refusal, text
from stele.model.column import Column
from stele.model.errors import Rejected
from stele.model.ids import ColumnId

NewColumn: TypeAlias = tuple[str, str, bool, str | None]
"""(name, type, nullable, default as JSON text or None), as `Schema.make` takes it."""


def column(name: str, type: str, *, nullable: bool = False, default: Any = None) -> NewColumn:
    """One column of a new table, for `Schema.make`.

    Args:
        name: Its name: letters, digits and underscores.
        type: bool, int8, int16, int32, int64, float, double, decimal(p,s), string, binary, date or timestamp.
        nullable: Whether a row may have null here.
        default: The value of rows that are inserted without one; None: there is no default.

    Raises:
        Rejected: There is no such type, or the default does not fit it.

    Example:
        >>> unit = stele.column("unit", "string", default="m")
        >>> schema = stele.Schema.make([stele.column("n", "int64"), unit], key=["n"])
        >>> table = client.create_table("lengths", schema)
        >>> written = table.put({"n": 1})
        >>> table.get(1)
        {'n': 1, 'unit': 'm'}
    """
    text(name, "column name")
    text(type, f"type of column {name}")
    of_kind(nullable, bool, f"nullable of column {name}", "True or False")
    if default is None:
        return name, type, nullable, None
    plain = default.item() if hasattr(default, "item") else default  # of numpy
    made = Column(ColumnId(0), name, type, nullable, json.dumps(_json(plain, name)))
    if why := made.fault(plain) or made.default_fault():
        raise Rejected(why)
    made.default_scalar()  # raises where the value fits the column, but its text does not: days as a number
    return name, type, nullable, made.default


def _json(value: Any, name: str) -> Any:
    """A default as JSON text, the form in definitions of tables."""
    match value:
        case bool() | int() | float() | str():
            return value
        case decimal.Decimal():
            return str(value)
        case bytes():
            return base64.b64encode(value).decode()
        case datetime.datetime() if value.tzinfo is None:
            return value.replace(tzinfo=datetime.UTC).isoformat()
        case datetime.date():
            return value.isoformat()
    raise refusal(f"default of column {name}", value, "a value of the column's type")
