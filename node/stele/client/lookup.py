"""Checks the arguments of a point read, and decodes its answer. Pure; used by table.py.

Invariant: an argument that does not fit the table is refused before any server is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from stele.client import arguments
from stele.model.column import shown
from stele.model.errors import Corrupt, Rejected
from stele.model.rows import python_rows
from stele.model.schema import Schema

Row = Mapping[str, Any]
Key = Row | Sequence[Any] | Any


def ids_of(table: str, schema: Schema, columns: Sequence[str] | None) -> tuple[int, ...]:
    """Return the ids of the columns with these names; () for None.

    Raises:
        Rejected: a name is not that of a column, or no name is given.
    """
    if columns is None:
        return ()
    names = arguments.names(columns, "columns")
    unknown = [name for name in names if name not in schema.by_name]
    if unknown or not names:
        raise Rejected(
            f"columns {shown(columns)}: expected columns of table {table}: {', '.join(schema.by_name)}"
        )
    return tuple(int(schema.by_name[name].id) for name in names)


def key_row(schema: Schema, key: Key) -> Row:
    """Return a key as a mapping of the key columns.

    Raises:
        Rejected: another number of values.
    """
    if isinstance(key, Mapping):
        return key
    names = [column.name for column in schema.key_columns]
    values = list(key) if isinstance(key, (tuple, list)) else [key]
    if len(values) != len(names):
        raise Rejected(
            f"key {shown(key)}: expected values of {', '.join(names)}, or a mapping of these columns"
        )
    return dict(zip(names, values))


def rows_of(table: str, rows: bytes) -> list[dict[str, Any]]:
    """Decode the rows of a node's answer.

    Raises:
        Corrupt: it is not an Arrow stream of rows.
    """
    if not rows:
        return []
    try:
        found = list(pa.ipc.open_stream(rows))
        for batch in found:
            batch.validate(full=True)
    except (pa.ArrowException, OSError) as exc:
        raise Corrupt(
            f"table {table}: a node's answer to a read is not an Arrow stream of rows: {exc}"
        ) from exc
    return [row for batch in found for row in python_rows(batch)]
