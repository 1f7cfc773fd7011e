"""Groups the rows that wait for a block: those of one group may share one. Used by batcher.py.

Invariant: of two rows given in different turns of the event loop, the later one never comes into an earlier
group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from stele.model.block import DELETES, INSERTS, UPDATES, RowOp
from stele.model.errors import let_go
from stele.model.plain import Values

if TYPE_CHECKING:
    from stele.client.dealing import Dealer

Row = Mapping[str, Any]
Done = asyncio.Future[Any]
Item = tuple[RowOp, Row, Done, int]
"""Operation, row, future, and the turn of the loop in which it was given."""


class Part:
    """Rows of one tablet with the same columns, waiting to leave. `ops`: one operation for all, or one for
    each row.

    `dealer` made it, and encodes it with its schema. `rows`: an Arrow batch, or the values of plain rows. `alone`: their block was too large, so they must not
    be joined with others again."""

    __slots__ = ("alone", "column_ids", "dealer", "futures", "ops", "rows")

    def __init__(
        self,
        dealer: Dealer,
        ops: RowOp | np.ndarray,
        column_ids: tuple[int, ...],
        rows: pa.RecordBatch | list[Values],
        futures: list[Done],
        alone: bool = False,
    ) -> None:
        self.dealer = dealer
        self.ops = ops
        self.column_ids = column_ids
        self.rows = rows
        self.futures = futures
        self.alone = alone

    @property
    def wanted(self) -> bool:
        """Whether anybody still waits for one of the rows."""
        return not all(future.done() for future in self.futures)

    @property
    def arrow_bytes(self) -> int:
        """Bytes of the Arrow rows. Plain rows are at most some hundred small ones, and count 0."""
        return 0 if isinstance(self.rows, list) else int(self.rows.nbytes)

    def some(self, start: int, end: int) -> Part:
        """A slice of the rows, to be sent alone."""
        ops = self.ops if isinstance(self.ops, RowOp) else self.ops[start:end]
        rows = self.rows[start:end]
        return Part(self.dealer, ops, self.column_ids, rows, self.futures[start:end], alone=True)


def joined_ops(parts: Sequence[Part]) -> RowOp | np.ndarray:
    """Join the operations of several parts: one for all rows if they agree, else one byte for each row."""
    first = parts[0].ops
    if isinstance(first, RowOp) and all(part.ops is first for part in parts):
        return first
    each = [
        np.full(len(part.futures), int(part.ops), np.uint8) if isinstance(part.ops, RowOp) else part.ops
        for part in parts
    ]
    return np.concatenate(each)


def groups_of(rows: list[Item]) -> Iterable[list[Item]]:
    """The rows in groups that can each be converted together. A row that cannot be read fails by itself."""
    first = rows[0][0]
    if first not in UPDATES and all(item[0] is first for item in rows):
        return [rows]
    shaped: list[tuple[object, Item]] = []
    for item in rows:
        try:
            shaped.append((_shape(item[0], item[1]), item))
        except Exception as exc:  # noqa: BLE001 - a user's mapping may raise anything; only its row fails
            fail(item[2], exc)
    by_shape: dict[object, list[Item]] = {}
    for shape, item in shaped:
        by_shape.setdefault(shape, []).append(item)
    if len(by_shape) > 1:
        by_shape = {}
        for shape, item in shaped:
            by_shape.setdefault((item[3], shape), []).append(item)
    return by_shape.values()


def _shape(op: RowOp, row: Row) -> object:
    """A key that is equal for rows that can share a block: whole rows, keys alone, or updates of the same
    columns."""
    if op in INSERTS:
        return "whole"
    if op in DELETES:
        return "keys"
    return frozenset(row)


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """End a caller's future with an error, unless it has ended."""
    if not future.done():
        future.set_exception(error)


def fail_all(futures: Sequence[asyncio.Future[Any]], error: BaseException) -> None:
    """End the futures of several callers with one error."""
    let_go(error)  # its frames may hold the futures
    for future in futures:
        fail(future, error)
