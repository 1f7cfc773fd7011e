"""From Python rows to batches, and which rows of a batch are wrong. Opens no files.

The client uses it to build blocks, the store before it writes one. Invariant: a wrong row never affects the
others: the good rows are kept, the wrong ones are listed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stele.model.block import DELETES, INSERTS, UPDATES, Block, RowError, RowOp
from stele.model.column import Column, shown
from stele.model.errors import Code, Rejected
from stele.model.schema import Schema

_NONE: Mapping[int, Mapping[int, str]] = MappingProxyType({})


def check_row(row: object) -> None:
    """Check that `row` is a mapping.

    Raises:
        Rejected: it is not.
    """
    if not isinstance(row, (dict, Mapping)):  # the fast check first
        raise Rejected(
            f"row {shown(row)}: expected a mapping of column names to values, like {{'id': 1}}, "
            f"got {type(row).__name__}"
        )


def python_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a batch as dicts by column name; see `python_values`."""
    names = batch.schema.names
    return [dict(zip(names, row)) for row in zip(*map(python_values, batch.columns))]


def python_values(array: pa.Array) -> list[Any]:
    """Arrow values as Python values.

    Python has no dates or timestamps outside the years 1 to 9999; such a value becomes its number, of days or
    microseconds since 1970. That number is accepted wherever a value is. A string that is not UTF-8, possible
    only in an unchecked batch, becomes its bytes.
    """
    try:
        found: list[Any] = array.to_pylist()
        return found
    except OverflowError:
        bare = array.view(pa.int32() if pa.types.is_date(array.type) else pa.int64())
    except UnicodeDecodeError:
        bare = array.view(pa.binary())
    return [_python_value(scalar, value) for scalar, value in zip(array, bare.to_pylist())]


def _python_value(scalar: pa.Scalar, bare: int | bytes | None) -> Any:
    try:
        return scalar.as_py()
    except (OverflowError, UnicodeDecodeError):
        return bare


def batch_from_rows(
    rows: Sequence[Mapping[str, Any]], schema: Schema, op: RowOp
) -> tuple[pa.RecordBatch, tuple[int, ...], npt.NDArray[np.int64], list[RowError]]:
    """(batch of the good rows, its column ids, their positions in `rows`, errors of the bad ones).

    For insert and upsert a missing column gets its default, else null. Rows of one update must name the same
    columns. A delete uses only the key columns.

    Raises:
        Rejected: update rows name different columns; split them by their columns first.
    """
    faults = _Faults()
    known = frozenset(schema.by_name)
    if len(known.union(*rows)) > len(known):
        for position, row in enumerate(rows):
            unknown = [name for name in row if name not in known]
            if unknown:
                faults.add(
                    position,
                    f"{_columns(name if type(name) is str else shown(name) for name in unknown)} unknown; "
                    f"expected {', '.join(schema.by_name)}",
                )
    columns = _columns_for(rows, faults.by_row, schema, op)
    arrays: list[pa.Array] = []
    for column in columns:
        fill = op in INSERTS and column.default is not None
        default = column.default_scalar().as_py() if fill else None
        values = [row.get(column.name, default) for row in rows]
        array, unfit = _convert(column, values)
        arrays.append(array)
        for position, why in unfit.items():
            faults.add(position, why)
        if not column.nullable and array.null_count:
            for position in np.flatnonzero(np.asarray(array.is_null())).tolist():
                if column.name not in rows[position]:
                    faults.missing(position, column)
                elif position not in unfit:
                    faults.null(position, column)
    batch = pa.record_batch(arrays, schema=schema.to_arrow([c.id for c in columns]))
    kept = np.arange(len(rows), dtype=np.int64)
    found = faults.errors()
    if found:
        kept = np.delete(kept, [error.row for error in found])
        batch = batch.take(pa.array(kept))
    return batch, tuple(int(c.id) for c in columns), kept, found


class _Faults:
    """All faults of each row, not only the first."""

    __slots__ = ("_missing", "_null", "by_row")

    def __init__(self) -> None:
        self.by_row: dict[int, list[str]] = {}
        self._missing: dict[int, list[Column]] = {}
        self._null: dict[int, list[Column]] = {}

    def add(self, row: int, why: str) -> None:
        self.by_row.setdefault(row, []).append(why)

    def missing(self, row: int, column: Column) -> None:
        self._missing.setdefault(row, []).append(column)

    def null(self, row: int, column: Column) -> None:
        self._null.setdefault(row, []).append(column)

    def errors(self) -> list[RowError]:
        """One error for each row with a fault."""
        for row, columns in self._null.items():
            self.add(row, f"{_columns(c.name for c in columns)} null; {_expected(columns)}")
        for row, columns in self._missing.items():
            self.add(row, _missing_text(columns))
        return [
            RowError(row, Code.INVALID_ARGUMENT, "; ".join(self.by_row[row])) for row in sorted(self.by_row)
        ]


def _missing_text(columns: Sequence[Column]) -> str:
    """The fault of a row that lacks these columns. Part of a write's outcome, so its words must never
    change."""
    have = "have" if len(columns) > 1 else "has"
    return f"{_columns(c.name for c in columns)} missing and {have} no default; {_expected(columns)}"


def _columns(names: Iterable[str]) -> str:
    listed = list(names)
    return f"columns {', '.join(listed)} are" if len(listed) > 1 else f"column {listed[0]} is"


def _expected(columns: Sequence[Column]) -> str:
    return f"expected {', '.join(c.a_type for c in columns)}"


def _columns_for(
    rows: Sequence[Mapping[str, Any]], errors: Container[int], schema: Schema, op: RowOp
) -> list[Column]:
    if op in DELETES:
        return list(schema.key_columns)
    if op not in UPDATES:
        return list(schema.columns)
    key = {c.name for c in schema.key_columns}
    names: set[str] | None = None
    for position, row in enumerate(rows):
        if position in errors:
            continue
        if names is None:
            names = set(row)
        elif names != set(row):
            raise Rejected("update: rows name different columns; split them by their columns first")
    wanted = (names or set()) | key
    return [c for c in schema.columns if c.name in wanted]


def _convert(column: Column, values: list[Any]) -> tuple[pa.Array, dict[int, str]]:
    """Return the values as an array, with null for each that does not fit. Also return the reasons, by position."""
    try:
        return column.array(values), {}
    except Rejected:
        faults = {at: why for at, value in enumerate(values) if (why := column.fault(value))}
    return column.array([None if at in faults else value for at, value in enumerate(values)]), faults


def null_faults(block: Block, schema: Schema) -> list[RowError]:
    """Errors for rows that have null where the schema forbids it, or that lack a required column.

    A deleted row needs only its key. If no column has nulls, the check takes no time per row. The messages are
    part of a write's outcome, on which replicas must agree. So their words must never change.
    """
    faults = _Faults()
    _nulls(block, schema, faults)
    return faults.errors()


def row_faults(
    block: Block, schema: Schema, unfit: Mapping[int, Mapping[int, str]] = _NONE
) -> list[RowError]:
    """Return an error for each row that a node would refuse: for nulls (`null_faults`), or for an invalid value.

    A value can be invalid although the array has the column's type, such as a string that is not UTF-8. Every
    string and decimal is checked, as on the node. `unfit`: by column id and row, why a value did not fit; the
    block has null in its place.

    Raises:
        Rejected: an array is broken as a whole and not safe to read.
    """
    faults = _Faults()
    for of_column in unfit.values():
        for row, why in of_column.items():
            faults.add(row, why)
    _nulls(block, schema, faults, unfit)
    for position, column_id in enumerate(block.column_ids):
        column, array = schema.by_id[column_id], block.batch.column(position)
        for row in _unsound(array):
            one = array.slice(row, 1)
            try:
                one.validate()
            except pa.ArrowInvalid as exc:
                raise Rejected(f"column {column.name}: the Arrow array is invalid: {exc}") from None
            (value,) = python_values(one)
            said = f"is not {column.a_type} (it has too many digits)"
            if isinstance(value, bytes):
                said = "is not UTF-8"
            faults.add(row, f"column {column.name}: {shown(value)} {said}")
    return faults.errors()


def _unsound(array: pa.Array, first: int = 0) -> Iterator[int]:
    """Return the positions of invalid values. Bisection finds them, because mostly there are none or few."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        if len(array) <= 1:
            yield first
            return
        half = len(array) // 2
        yield from _unsound(array.slice(0, half), first)
        yield from _unsound(array.slice(half), first + half)


def _nulls(
    block: Block, schema: Schema, faults: _Faults, unfit: Mapping[int, Mapping[int, str]] = _NONE
) -> None:
    for position, column_id in enumerate(block.column_ids):
        column = schema.by_id[column_id]
        if column.nullable or not block.batch.column(position).null_count:
            continue
        bad = np.asarray(block.batch.column(position).is_null())
        if not schema.is_key(column_id):
            if block.op in DELETES:
                continue
            if block.row_ops is not None:
                bad = bad & (block.row_ops < RowOp.DELETE)
        told = unfit.get(column_id, ())
        for row in np.flatnonzero(bad).tolist():
            if row not in told:
                faults.null(row, column)
    if len(block.column_ids) != len(schema.columns):
        _missing_columns(block, schema, faults)


def missing_fault(block: Block, schema: Schema) -> str:
    """A message that names the required columns which inserted rows lack; "" if there are none."""
    lacking, rows = _missing(block, schema)
    return _missing_text(lacking) if lacking and rows.any() else ""


def _missing(block: Block, schema: Schema) -> tuple[list[Column], npt.NDArray[np.bool_]]:
    """The required columns that a block lacks, and which of its rows must have them."""
    if block.row_ops is None and block.op not in INSERTS:
        return [], np.zeros(block.rows, bool)
    present = set(block.column_ids)
    lacking = [c for c in schema.columns if c.id not in present and not c.nullable and c.default is None]
    if block.row_ops is not None:
        return lacking, block.row_ops <= RowOp.UPSERT
    return lacking, np.ones(block.rows, bool)


def _missing_columns(block: Block, schema: Schema, faults: _Faults) -> None:
    """Add a fault to each row that lacks a required column. Leaders now refuse such a block as a whole, but old
    logs may contain one."""
    lacking, rows = _missing(block, schema)
    for row in np.flatnonzero(rows).tolist() if lacking else []:
        for column in lacking:
            faults.missing(row, column)
