"""A session: one caller's rows, written in the background, in the order in which they were given.

Made by `Table.new_session`. Invariant: rows with the same key are applied in the order of the calls, no more than
`buffer_bytes` of rows wait in memory, and what became of each row is told by a later call, if not by the one that wrote
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from stele.client import arguments
from stele.client.bulk import BulkWriter
from stele.client.results import RowErrors, WriteResult, with_key
from stele.model.block import DELETES, INSERTS, RowOp
from stele.model.rows import batch_from_rows, check_row
from stele.model.schema import Schema

ROWS_MAX = 65_536
_ROW_BYTES_GUESS = 64


class Session:
    """Use as `async with table.new_session() as session:`; leaving it flushes.

    `flush_interval_s`: rows wait at most so long; 0: until the buffer is full or `flush` is called. A datetime without a
    time zone is UTC.
    """

    def __init__(
        self,
        table: str,
        schema: Schema,
        writer_of: Callable[[RowOp], BulkWriter],
        ensure_open: Callable[[], None],
        *,
        flush_interval_s: float,
        buffer_bytes: int,
    ) -> None:
        self._table = table
        self._schema = schema
        self._writer_of = writer_of
        self._ensure_open = ensure_open
        self._interval_s = flush_interval_s
        self._buffer_bytes = buffer_bytes
        self._rows: list[tuple[RowOp, Mapping[str, Any]]] = []
        self._bytes = 0
        self._given = 0  # rows before those that wait
        self._result = WriteResult(table)
        self._failure: Exception | None = None
        self._lock = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._flushes: set[asyncio.Task[None]] = set()

    async def insert(self, row: Mapping[str, Any]) -> None:
        """A whole row whose key must not be present."""
        await self.apply(RowOp.INSERT, row)

    async def insert_ignore(self, row: Mapping[str, Any]) -> None:
        """A whole row, left alone if its key is present."""
        await self.apply(RowOp.INSERT_IGNORE, row)

    async def upsert(self, row: Mapping[str, Any]) -> None:
        """A whole row, replaced if its key is present."""
        await self.apply(RowOp.UPSERT, row)

    async def update(self, row: Mapping[str, Any]) -> None:
        """Some columns of a row whose key must be present."""
        await self.apply(RowOp.UPDATE, row)

    async def delete(self, row: Mapping[str, Any]) -> None:
        """The key of a row to remove, which must be present."""
        await self.apply(RowOp.DELETE, row)

    async def apply(self, op: RowOp | str, row: Mapping[str, Any]) -> None:
        """Take in one row; waits while the buffer is full.

        Raises:
            SteleError: what became of an earlier flush in the background.
            Rejected: it is no mapping, or the client was closed.
        """
        self._raise()
        self._ensure_open()
        check_row(row)
        self._rows.append((arguments.row_op(op), row))
        self._bytes += _ROW_BYTES_GUESS + sum(
            len(value) for value in row.values() if isinstance(value, (str, bytes))
        )
        if self._bytes >= self._buffer_bytes or len(self._rows) >= ROWS_MAX:
            await self._flush()
            self._raise()
        elif self._interval_s > 0 and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._on_timer)

    async def flush(self) -> WriteResult:
        """Write what waits. Returns what was written since the last flush.

        Raises:
            RowErrors: if rows were refused since then; positions count the rows since then. The others are written.
            SteleError: if a block as a whole was not written. The next flush tells of the rows before and after it, counted
                from where this one began.
        """
        await self._flush()
        self._raise()
        result, self._result, self._given = self._result, WriteResult(self._table), 0
        if result.row_errors:
            raise RowErrors(result)
        return result

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel_timer()
        if exc is None:
            await self.flush()

    def _on_timer(self) -> None:
        self._timer = None
        self._begin_flush()

    async def _flush(self) -> None:
        """Write what waits. Whoever is cancelled meanwhile ends the waiting alone: rows that have left cannot be called
        back, and those behind them must not be lost."""
        self._cancel_timer()
        await asyncio.shield(self._begin_flush())

    def _begin_flush(self) -> asyncio.Task[None]:
        """It does not raise: what went wrong is told by whichever call comes next."""
        flush = asyncio.get_running_loop().create_task(self._write_waiting())
        self._flushes.add(flush)
        flush.add_done_callback(self._flushes.discard)
        return flush

    async def _write_waiting(self) -> None:
        try:
            await self._write_runs()
        except Exception as exc:  # noqa: BLE001 - whatever it is, the caller must hear of it
            self._failure = self._failure or exc

    async def _write_runs(self) -> None:
        async with self._lock:
            rows, self._rows, self._bytes = self._rows, [], 0
            first = self._given
            self._given += len(rows)  # those behind one that fails count, too
            for run in _runs(rows):
                await self._write_run(run, first)
                first += len(run)

    async def _write_run(self, run: list[tuple[RowOp, Mapping[str, Any]]], first: int) -> None:
        """Rows of one operation and shape, which may leave together. `first`: the place of the first one."""
        op = run[0][0]
        rows = [row for _, row in run]
        batch, _, kept, errors = batch_from_rows(rows, self._schema, op)
        self._result.row_errors.extend(
            replace(with_key(e, rows[e.row], self._schema), row=first + e.row) for e in errors
        )
        if not batch.num_rows:
            return
        writer = self._writer_of(op)
        try:
            await writer.feed(batch)
            written = await writer.finish()
        except BaseException:
            await writer.abandon()  # what it still sends must not come behind later rows
            raise
        positions = np.asarray(kept)
        self._result.row_errors.extend(
            replace(e, row=first + int(positions[e.row])) for e in written.row_errors
        )
        self._result.rows_written += written.rows_written
        self._result.timestamp = max(self._result.timestamp, written.timestamp)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def _runs(
    rows: list[tuple[RowOp, Mapping[str, Any]]],
) -> list[list[tuple[RowOp, Mapping[str, Any]]]]:
    """Neighbouring rows that one block can carry: one operation, and for updates the same columns."""
    runs: list[list[tuple[RowOp, Mapping[str, Any]]]] = []
    shape: object = None
    for op, row in rows:
        this = op if op in INSERTS or op in DELETES else (op, frozenset(row))
        if this != shape:
            runs.append([])
            shape = this
        runs[-1].append((op, row))
    return runs
