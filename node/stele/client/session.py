"""A session: one caller's rows, written in the background, in the order in which they were given.

Made by `Table.new_session`. Invariant: rows with the same key are applied in the order of the calls. At most
`buffer_bytes` of rows, and one more, wait in memory. A call that raises has not queued its row. `flush`, or
the client when it is closed, reports each queued row that was not written.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stele.client import arguments, reprs
from stele.client.bulk import BulkWriter
from stele.client.durability import Durability
from stele.client.results import RowErrors, WriteResult, with_key
from stele.model.block import DELETES, INSERTS, RowError, RowOp
from stele.model.errors import Code, SteleError, error_for
from stele.model.rows import batch_from_rows, check_row
from stele.model.schema import Schema

ROWS_MAX = 65_536
_ROW_BYTES_GUESS = 64
_Made = tuple[pa.RecordBatch, tuple[int, ...], npt.NDArray[np.int64], list[RowError]]


class AsyncSession:
    """Use as `async with table.new_session() as session:`; leaving it flushes.

    `flush_interval_s`: the longest time that rows wait; 0: until the buffer is full or `flush` is called. A
    datetime without a time zone is UTC. `unsettled`: the client's sessions that hold rows, or have unreported
    failures.

    Example:
        >>> async def write(table):
        ...     async with table.new_session() as session:
        ...         await session.upsert({"day": date(2024, 5, 8), "name": "roof", "value": 14.0})
        >>> client.run(write(client.run(client.asynchronous.open_table("readings"))))
    """

    def __init__(
        self,
        table: str,
        schema: Schema,
        writer_of: Callable[[RowOp], BulkWriter],
        ensure_open: Callable[[], None],
        unsettled: set[AsyncSession],
        *,
        cluster_id: str,
        flush_interval_s: float,
        buffer_bytes: int,
    ) -> None:
        self._table = table
        self._cluster_id = cluster_id
        self._schema = schema
        self._writer_of = writer_of
        self._ensure_open = ensure_open
        self._unsettled = unsettled
        self._interval_s = flush_interval_s
        self._buffer_bytes = buffer_bytes
        self._rows: list[tuple[RowOp, Mapping[str, Any]]] = []
        self._bytes = 0
        self._leaving_rows = self._leaving_bytes = 0  # of the running flush
        self._full = False  # whether the buffer is full
        self._turn = asyncio.Lock()  # serves callers that wait for room in their order
        self._queued = 0  # the number of those callers
        self._given = 0  # rows given to flushes since the session was made
        self._ended = 0  # of these, rows of flushes that have ended
        self._told = 0  # and rows that `flush` has reported; its positions count from here
        self._result = WriteResult(table)
        self._failure: Exception | None = None
        self._lock = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._flushes: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        waiting = reprs.many(len(self._rows) + self._leaving_rows, "row")
        return reprs.shown_as(
            self, f"of table {self._table}: {waiting} not acknowledged yet", self._cluster_id
        )

    async def insert(self, row: Mapping[str, Any]) -> None:
        """Queue a whole row whose key must not exist."""
        await self.apply(RowOp.INSERT, row)

    async def insert_ignore(self, row: Mapping[str, Any]) -> None:
        """Queue a whole row that is ignored if its key exists."""
        await self.apply(RowOp.INSERT_IGNORE, row)

    async def upsert(self, row: Mapping[str, Any]) -> None:
        """Queue a whole row that replaces a row with its key."""
        await self.apply(RowOp.UPSERT, row)

    async def update(self, row: Mapping[str, Any]) -> None:
        """Queue some columns of a row whose key must exist."""
        await self.apply(RowOp.UPDATE, row)

    async def delete(self, row: Mapping[str, Any]) -> None:
        """Queue the removal of the row with this key, which must exist."""
        await self.apply(RowOp.DELETE, row)

    async def apply(self, op: RowOp | str, row: Mapping[str, Any]) -> None:
        """Queue one row. Waits while the buffer is full.

        Raises, without queueing the row:
            SteleError: a background flush failed; raised once per failure. `flush` says which rows were not
                written.
            Rejected: the row is not a mapping.
            Closed: the client was closed.
        """
        self._ensure_open()
        operation = arguments.row_op(op)
        check_row(row)
        if self._queued or self._full:
            await self._take_in_turn(operation, row)
        else:
            self._take(operation, row)

    async def _take_in_turn(self, op: RowOp, row: Mapping[str, Any]) -> None:
        """Queue a row once there is room. Awaits nothing afterwards, so a cancelled call has not queued its
        row."""
        self._queued += 1
        try:
            async with self._turn:
                while self._full:
                    await self._flush()
                self._ensure_open()
                self._take(op, row)
        finally:
            self._queued -= 1

    def _take(self, op: RowOp, row: Mapping[str, Any]) -> None:
        self._raise()
        taken = dict(row)  # a copy, because the caller may change its own
        values_bytes = sum(len(value) for value in taken.values() if isinstance(value, (str, bytes)))
        self._rows.append((op, taken))
        self._bytes += _ROW_BYTES_GUESS + values_bytes
        self._unsettled.add(self)
        if self._measure():
            self._cancel_timer()
            self._begin_flush()  # this row is queued, so the next call raises any error
        elif self._interval_s > 0 and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._on_timer)

    def _measure(self) -> bool:
        self._full = (
            self._bytes + self._leaving_bytes >= self._buffer_bytes
            or len(self._rows) + self._leaving_rows >= ROWS_MAX
        )
        return self._full

    async def flush(self) -> WriteResult:
        """Write what is queued. Returns what was written since the last flush.

        Raises:
            RowErrors: rows were refused or not acknowledged since then. Positions count the rows since then.
                The others are written.
        """
        await self._flush()
        failure, self._failure = self._failure, None
        result, self._result = self._result, WriteResult(self._table)
        told, self._told = self._told, self._ended  # set now, because another flush may begin
        self._settle()
        if result.row_errors:
            errors = (replace(error, row=error.row - told) for error in result.row_errors)
            result.row_errors = sorted(errors, key=lambda error: error.row)
            raise RowErrors(result) from failure
        if failure is not None:
            raise failure
        return result

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel_timer()
        if exc is None:
            await self.flush()
        else:
            self._unsettled.discard(self)

    def _on_timer(self) -> None:
        self._timer = None
        self._begin_flush()

    async def _flush(self) -> None:
        """Write what is queued. Cancelling this only ends the waiting: sent rows cannot be called back, and
        the rows after them must not be lost."""
        self._cancel_timer()
        await asyncio.shield(self._begin_flush())

    def _begin_flush(self) -> asyncio.Task[None]:
        """Start a flush. Does not raise: the next call raises the error."""
        flush = asyncio.get_running_loop().create_task(self._write_waiting())
        self._flushes.add(flush)
        flush.add_done_callback(self._flushes.discard)
        return flush

    async def _write_waiting(self) -> None:
        try:
            await self._write_runs()
        except Exception as exc:  # noqa: BLE001 - the next call must raise any error
            self._failure = self._failure or exc
        finally:
            self._settle()

    def _settle(self) -> None:
        if not (self._rows or self._leaving_rows or self._failure or self._result.row_errors):
            self._unsettled.discard(self)

    async def _write_runs(self) -> None:
        async with self._lock:
            rows, self._rows = self._rows, []
            self._leaving_rows, self._leaving_bytes, self._bytes = len(rows), self._bytes, 0
            first = self._given
            self._given += len(rows)
            runs = deque(_runs(rows))
            try:
                while runs:
                    run = runs.popleft()
                    op, given = run[0][0], [row for _, row in run]
                    try:
                        made = batch_from_rows(given, self._schema, op)
                    except Exception as exc:  # noqa: BLE001 - one row cannot be read; bisection shows which
                        half = len(run) // 2
                        if half:
                            runs.extendleft((run[half:], run[:half]))
                        else:
                            self._not_written(given, np.array([first]), _told(exc))
                            first += 1
                        continue
                    try:
                        await self._write_run(given, op, first, made)
                    except BaseException as exc:
                        behind = [row for later in runs for _, row in later]
                        self._not_written(behind, first + len(run) + np.arange(len(behind)), _not_sent(exc))
                        raise
                    first += len(run)
            finally:
                self._ended = self._given
                self._leaving_rows = self._leaving_bytes = 0
                self._measure()

    async def _write_run(self, rows: list[Mapping[str, Any]], op: RowOp, first: int, made: _Made) -> None:
        """Write rows of one operation and shape, which may leave together.

        `first`: the position of the first one. `made`: the result of `batch_from_rows` for them."""
        batch, _, kept, errors = made
        self._result.row_errors.extend(
            replace(with_key(e, rows[e.row], self._schema), row=first + e.row) for e in errors
        )
        if not batch.num_rows:
            return
        writer = self._writer_of(op)
        try:
            await writer.feed(batch)
            await writer.finish()
        except BaseException as exc:
            await writer.abandon()  # it must send nothing more, or later rows could be overtaken
            for positions, error in writer.unsettled(batch.num_rows):
                places = kept[positions]
                why = _told(error) if error is not None else _not_sent(exc)
                self._not_written([rows[n] for n in places.tolist()], first + places, why)
            raise
        finally:
            written = writer.result
            self._result.row_errors.extend(
                replace(e, row=first + int(kept[e.row])) for e in written.row_errors
            )
            self._result.rows_written += written.rows_written
            self._result.timestamp = max(self._result.timestamp, written.timestamp)
            if written.durability is not Durability.SYNCED:
                self._result.durability = written.durability

    def _not_written(
        self, rows: list[Mapping[str, Any]], places: npt.NDArray[np.int64], why: tuple[Code, str]
    ) -> None:
        self._result.row_errors.extend(
            with_key(RowError(place, *why), row, self._schema) for place, row in zip(places.tolist(), rows)
        )

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            code, message = _told(failure)
            raise error_for(
                code,
                f"this row was not queued, because a flush of earlier rows failed; flush() says which: {message}",
            ) from failure


def _told(error: BaseException) -> tuple[Code, str]:
    return (error.code, str(error.args[0])) if isinstance(error, SteleError) else (Code.INTERNAL, repr(error))


def _not_sent(failure: BaseException) -> tuple[Code, str]:
    """The (code, message) for rows that another row's failure held back. Their outcome is known: not
    written."""
    code, _ = _told(failure)
    known = Code.NO_QUORUM if code in (Code.UNKNOWN_OUTCOME, Code.TOO_OLD) else code
    return known, f"not sent, because earlier rows failed with {code.name}; nothing was done"


def _runs(
    rows: list[tuple[RowOp, Mapping[str, Any]]],
) -> list[list[tuple[RowOp, Mapping[str, Any]]]]:
    """Group neighbouring rows that one block can carry: those of one operation; updates only with the same
    columns."""
    runs: list[list[tuple[RowOp, Mapping[str, Any]]]] = []
    shape: object = None
    for op, row in rows:
        this = op if op in INSERTS or op in DELETES else (op, frozenset(row))
        if this != shape:
            runs.append([])
            shape = this
        runs[-1].append((op, row))
    return runs
