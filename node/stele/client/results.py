"""The result of a write, and how a refused row is named.

Invariant: every row is either written or listed with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from stele.client import html
from stele.client.durability import Durability
from stele.model.amounts import refused_of
from stele.model.block import RowError
from stele.model.column import shown
from stele.model.errors import Code, Rejected, Retryable, error_for
from stele.model.rows import python_rows
from stele.model.schema import Schema
from stele.rpc.errors import code_of, with_number
from stele.rpc.proto import tserver_pb2

_SHOWN = 5


def row_error_from_pb(pb: tserver_pb2.RowErrorPB) -> RowError:
    """The error of a row, from its message."""
    return RowError(pb.row, code_of(pb.code), with_number(pb.code, pb.message))


def key_text(row: Mapping[str, Any], schema: Schema) -> str:
    """A row's key as messages show it, such as `id=3` or `a=1, b='x'`; "" if the row lacks a key column."""
    names = [column.name for column in schema.key_columns]
    if any(row.get(name) is None for name in names):
        return ""
    return ", ".join(f"{name}={_value(row[name])}" for name in names)


def _value(value: Any) -> str:
    try:
        return shown(value) if isinstance(value, (str, bytes)) else str(value)
    except Exception:  # noqa: BLE001 - as in `shown`
        return shown(value)


def with_keys(errors: Sequence[RowError], batch: pa.RecordBatch, schema: Schema) -> list[RowError]:
    """The errors of rows of `batch`, each with its row's key before the message."""
    if not errors:
        return []
    names = [column.name for column in schema.key_columns]
    rows = python_rows(batch.select(names).take(pa.array([error.row for error in errors])))
    return [with_key(error, row, schema) for error, row in zip(errors, rows)]


def with_key(error: RowError, row: Mapping[str, Any], schema: Schema) -> RowError:
    """An error with its row's key before the message."""
    key = key_text(row, schema)
    return replace(error, message=f"{key}: {error.message}") if key else error


@dataclass(slots=True)
class WriteResult:
    """`rows_written` were acknowledged. `row_errors` say why others were not; their positions are those in
    the input.

    `timestamp`: the highest hybrid time of the batches; a scan at or above it sees all of them. 0 if nothing
    was sent; a scan takes 0 as now. `durability`: the least that one of the batches got.

    Example:
        >>> result = table.write_arrow(table.scan().to_table(), "insert", raise_row_errors=False)
        >>> result.rows_written, [error.code.name for error in result.row_errors]
        (0, ['ALREADY_PRESENT', 'ALREADY_PRESENT'])
    """

    table: str

    rows_written: int = 0
    row_errors: list[RowError] = field(default_factory=list)
    timestamp: int = 0
    durability: Durability = Durability.SYNCED

    def _repr_html_(self) -> str:
        return html.of_result(self.table, self.rows_written, self.row_errors)

    def raise_for_errors(self) -> WriteResult:
        """Return self if no row failed.

        Raises:
            RowErrors: some rows failed; the others are written.
        """
        if self.row_errors:
            raise RowErrors(self)
        return self


class RowErrors(Rejected):
    """Some rows were refused, each for its own reason; `result` lists them all. The other rows are written.

    Rows of a session may also lack an answer; their codes are those of a `Retryable`.

    Example:
        >>> try:
        ...     table.write_arrow(table.scan().to_table(), "insert")
        ... except stele.RowErrors as error:
        ...     [refused.row for refused in error.errors]
        [0, 1]
    """

    def __init__(self, result: WriteResult) -> None:
        errors = result.row_errors
        told = "; ".join(f"row {e.row}: {e.code.name} {e.message}" for e in errors[:_SHOWN])
        more = f"; and {len(errors) - _SHOWN} more" if len(errors) > _SHOWN else ""
        unanswered = any(isinstance(error_for(e.code, ""), Retryable) for e in errors)
        super().__init__(
            f"table {result.table}: "
            f"{refused_of(len(errors), result.rows_written, 'not acknowledged' if unanswered else 'refused')}"
            f"{'; the others are written' if result.rows_written else ''}: {told}{more}",
            code=errors[0].code if len({e.code for e in errors}) == 1 else Code.INVALID_ARGUMENT,
        )
        self.result = result

    @property
    def errors(self) -> Sequence[RowError]:
        """The errors of the rows that were not written."""
        return self.result.row_errors
