"""Writes Arrow data: assigned to tablets by column, cut into blocks, a bounded number of bytes under way.

Used by `Table.write_arrow` and by sessions. Blocks of one tablet are sent one after another, so that of two rows with
the same key the later one wins. Invariant: every input row is counted once, as written or as an error.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from decimal import Decimal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stele.client.cast_values import cast_each, is_text
from stele.client.casts import python_value
from stele.client.results import WriteResult, row_error_from_pb, with_keys
from stele.client.tablet import TabletClient
from stele.model.block import DELETES, INSERTS, Block, RowError, RowOp, encode_block
from stele.model.column import Column, shown
from stele.model.errors import Code, Rejected, Retryable, SteleError, let_go
from stele.model.partition import PartitionSchema, assign, runs
from stele.model.rows import row_faults
from stele.model.schema import Schema
from stele.rpc.proto import tserver_pb2
from stele.rpc.threads import in_thread

BLOCK_ROWS = 8_192
BLOCK_BYTES_MAX = 4 << 20
CHUNK_ROWS = 65_536
"""So many rows are assigned to tablets at once: enough to fill a block of each of eight."""
_LEFT = Retryable(
    "the write was left before there was an answer, and may have been done; read before writing it anew",
    code=Code.UNKNOWN_OUTCOME,
)

Piece = tuple[pa.RecordBatch, npt.NDArray[np.int64]]
"""Rows of one tablet, and their positions in the whole input."""


Refused = dict[int, dict[int, str]]
"""By column id and row: why a value is no value of its column."""


def fit(
    batch: pa.RecordBatch, table: str, schema: Schema, op: RowOp, *, begun: bool = False
) -> tuple[pa.RecordBatch, tuple[int, ...], Refused]:
    """`batch` with exactly the columns that a block of `op` carries, cast to the types of `table`; their ids; and which values
    do not fit, where it has null. `begun`: rows of the same write came before these.

    Raises:
        Rejected: with every fault: unknown columns, missing ones, types that are never made from one another; and text in
            which no value fits, unless the write has begun: it is of another kind.
    """
    faults = [f"unknown column {_named(name)}" for name in batch.schema.names if name not in schema.by_name]
    wanted = schema.key_columns if op in DELETES else schema.columns
    arrays, ids = [], []
    refused: Refused = {}
    for column in wanted:
        position = batch.schema.get_field_index(column.name)
        if position < 0:
            required = column in schema.key_columns or (
                op in INSERTS and not column.nullable and column.default is None
            )
            if required:
                faults.append(f"column {column.name} is missing")
            continue
        array = batch.column(position)
        if array.type != column.arrow:
            try:
                found, reasons = cast_each(array, column.arrow)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:
                faults.append(f"column {column.name}: {array.type} does not fit {column.type} ({exc})")
                continue
            if reasons:
                words = {row: _why_refused(column, array[row], why) for row, why in reasons.items()}
                if not begun and _says_text(array.type) and found.null_count == len(found):
                    first = next(iter(words.values()))
                    faults.append(f"column {column.name}: {array.type} does not fit {column.type} ({first})")
                    continue
                refused[int(column.id)] = words
            array = found
        arrays.append(array)
        ids.append(int(column.id))
    if faults:
        expected = ", ".join(f"{column.name} {column.type}" for column in wanted)
        raise Rejected(f"table {table}: the rows do not fit: {'; '.join(faults)}; expected {expected}")
    return pa.record_batch(arrays, schema=schema.to_arrow(ids)), tuple(ids), refused


def _says_text(type_: pa.DataType) -> bool:
    return is_text(type_.value_type if pa.types.is_dictionary(type_) else type_)


def _why_refused(column: Column, scalar: pa.Scalar, why: str) -> str:
    """Of a number in the words of a session. A session reads no text, and takes no midnight for a date."""
    value = python_value(scalar)
    told = column.fault(value) if isinstance(value, (int, float, Decimal)) else ""
    return told or f"column {column.name}: {shown(value)} is no {column.type} ({why})"


def _named(name: str) -> str:
    """An unknown column's name, with what to do where it is an index that pandas brought along."""
    remedy = (
        " (pandas' index; give pyarrow.Table.from_pandas(frame, preserve_index=False))"
        if name.startswith("__index_level_")
        else ""
    )
    return f"{name!r}{remedy}"


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows of the caller's as they are sent: those of each tablet, and why others are not."""

    column_ids: tuple[int, ...]
    row_bytes: int
    pieces: list[tuple[int, pa.RecordBatch, npt.NDArray[np.int64]]]
    errors: list[RowError]


class BulkWriter:
    """Takes batches, sends blocks. `feed` pushes back once `bytes_max` wait or are under way."""

    def __init__(
        self,
        table: str,
        schema: Schema,
        partitioning: PartitionSchema,
        tablet_of: Callable[[int], TabletClient],
        op: RowOp,
        *,
        timeout_s: float,
        bytes_max: int,
        on_rows: Callable[[int], None] | None = None,
    ) -> None:
        self.result = WriteResult(table)
        self._schema = schema
        self._partitioning = partitioning
        self._tablet_of = tablet_of
        self._op = op
        self._timeout_s = timeout_s
        self._bytes_max = bytes_max
        self._on_rows = on_rows
        self._fed_rows = 0
        self._rows_waiting = 0  # taken in, and not yet answered
        self._row_bytes = 1
        self._block_rows = BLOCK_ROWS
        self._pending: dict[int, deque[Piece]] = {}
        self._pending_rows: dict[int, int] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._under_way: dict[int, npt.NDArray[np.int64]] = {}  # positions of the block that is not answered
        self._ended_by: dict[int, BaseException] = {}  # what became of that block, if it was not cancelled
        self._room = asyncio.Event()
        self._failure: BaseException | None = None
        self._final = False
        self._abandoned = False
        self._column_ids: tuple[int, ...] = ()

    async def feed(self, batch: pa.RecordBatch) -> None:
        """Take in a batch; returns when there is room for the next one.

        Raises:
            Rejected: columns that do not fit.
            SteleError: what became of an earlier block.
        """
        for start in range(0, batch.num_rows, CHUNK_ROWS):
            chunk = batch.slice(start, CHUNK_ROWS)
            prepared = await in_thread(self._prepared, chunk)
            self._column_ids, self._row_bytes = prepared.column_ids, prepared.row_bytes
            self.result.row_errors.extend(prepared.errors)
            self._fed_rows += chunk.num_rows
            for ordinal, rows, where in prepared.pieces:
                self._pending.setdefault(ordinal, deque()).append((rows, where))
                self._pending_rows[ordinal] = self._pending_rows.get(ordinal, 0) + rows.num_rows
                self._rows_waiting += rows.num_rows
                self._start(ordinal)
            await self._wait_for_room()

    def check(self, data: object) -> None:
        """Refuse before anything is sent what can be refused by then: in a list or tuple of batches each one's columns.

        Raises:
            Rejected: columns that do not fit, or that differ from batch to batch; what is no batch.
        """
        if not isinstance(data, (list, tuple)):
            return  # the batches of all else but an iterator have one schema
        ids: tuple[int, ...] = ()
        for batch in batches_of(data):
            _, found, _ = fit(batch.slice(0, 0), self.result.table, self._schema, self._op)
            self._check_same(ids, found)
            ids = found

    async def finish(self) -> WriteResult:
        """Send what is left and wait for every answer.

        Raises:
            SteleError: what became of a block as a whole; rows of other blocks may be written.
        """
        self._final = True
        for ordinal in list(self._pending):
            self._start(ordinal)
        while self._tasks:
            await asyncio.wait(self._tasks.values())
            await asyncio.sleep(0)
        self._raise()
        self.result.row_errors.sort(key=lambda error: error.row)
        return self.result

    async def abandon(self) -> None:
        """Stop sending. Blocks under way may be written."""
        self._abandoned = True
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def unsettled(self, rows: int) -> Iterator[tuple[npt.NDArray[np.int64], BaseException | None]]:
        """After `abandon`: which of so many rows, all that were to be fed, are neither written nor refused, by their
        positions; and what became of their block, None if they were not sent."""
        for ordinal, positions in self._under_way.items():
            yield positions, self._ended_by.get(ordinal, _LEFT)
        for pieces in self._pending.values():
            for _, positions in pieces:
                yield positions, None
        yield np.arange(self._fed_rows, rows), None

    def _check_same(self, before: tuple[int, ...], now: tuple[int, ...]) -> None:
        if before and now != before:
            was, is_ = (", ".join(self._schema.to_arrow(ids).names) for ids in (before, now))
            raise Rejected(
                f"table {self.result.table}: the columns of one write were {was}, then {is_}; expected the same "
                "in each batch"
            )

    def _prepared(self, chunk: pa.RecordBatch) -> _Chunk:
        """The next rows, in a thread: it changes nothing here. Left out, with an error each, are those that hold null where
        the table forbids it, or what is no value of its column."""
        begun = bool(self._column_ids)
        batch, ids, refused = fit(chunk, self.result.table, self._schema, self._op, begun=begun)
        self._check_same(self._column_ids, ids)
        row_bytes = max(1, batch.nbytes // max(1, batch.num_rows))
        positions = np.arange(self._fed_rows, self._fed_rows + batch.num_rows, dtype=np.int64)
        block = Block(int(self._schema.version), ids, batch, self._op, None)
        faults = row_faults(block, self._schema, refused)
        errors = self._placed(faults, batch, positions)
        if faults:
            good = np.delete(np.arange(batch.num_rows), [error.row for error in faults])
            batch, positions = batch.take(pa.array(good)), positions[good]
        pieces = _pieces(batch, positions, self._schema, self._partitioning)
        return _Chunk(ids, row_bytes, pieces, errors)

    def _placed(
        self, errors: list[RowError], batch: pa.RecordBatch, positions: npt.NDArray[np.int64]
    ) -> list[RowError]:
        """Errors of rows of `batch`, which stand at these positions of the input."""
        return [
            replace(error, row=int(positions[error.row])) for error in with_keys(errors, batch, self._schema)
        ]

    @property
    def _full(self) -> bool:
        return self._rows_waiting * self._row_bytes >= self._bytes_max

    def _start(self, ordinal: int) -> None:
        if self._abandoned or self._failure is not None or ordinal in self._tasks:
            return
        enough = self._pending_rows.get(ordinal, 0) >= self._block_rows or self._final or self._full
        if enough and self._pending_rows[ordinal]:
            task = asyncio.get_running_loop().create_task(self._send(ordinal))
            self._tasks[ordinal] = task
            task.add_done_callback(lambda done: self._ended(ordinal, done))

    def _ended(self, ordinal: int, task: asyncio.Task[None]) -> None:
        del self._tasks[ordinal]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            let_go(error)
            self._ended_by[ordinal] = error
            self._failure = self._failure or error
        elif self._pending_rows[ordinal]:
            self._start(ordinal)
        self._room.set()

    async def _send(self, ordinal: int) -> None:
        while self._failure is None:
            rows, positions = self._take_block(ordinal)
            if not len(positions):
                return
            self._under_way[ordinal] = positions
            block = encode_block(self._op, self._column_ids, rows, self._schema.version)
            try:
                answer = await self._tablet_of(ordinal).write(block, timeout_s=self._timeout_s)
            except Rejected as exc:
                if exc.code is not Code.TOO_LARGE:
                    raise
                if len(positions) > 1:
                    self._put_back(ordinal, rows, positions)
                    continue
                answer = tserver_pb2.WriteResponse()
                answer.row_errors.add(row=0, code=int(exc.code), message=str(exc.args[0]))
            refused = [row_error_from_pb(e) for e in answer.row_errors]
            self.result.row_errors.extend(self._placed(refused, rows, positions))
            written = len(positions) - len(answer.row_errors)
            self.result.rows_written += written
            self.result.timestamp = max(self.result.timestamp, answer.timestamp)
            self._rows_waiting -= len(positions)
            del self._under_way[ordinal]
            self._room.set()
            if self._on_rows is not None:
                self._on_rows(written)

    def _put_back(self, ordinal: int, rows: pa.RecordBatch, positions: npt.NDArray[np.int64]) -> None:
        """A block that was too large, which is told before anything is proposed: from now on they have half its rows."""
        self._block_rows = min(self._block_rows, len(positions) // 2)
        self._pending[ordinal].appendleft((rows, positions))
        self._pending_rows[ordinal] += len(positions)
        del self._under_way[ordinal]

    def _take_block(self, ordinal: int) -> Piece:
        """Up to `_block_rows` and BLOCK_BYTES_MAX of what waits for a tablet, one row at least; nothing if that would be a
        small block with more to come."""
        pending = self._pending[ordinal]
        total = self._pending_rows[ordinal]
        if not total or (total < self._block_rows and not self._final and not self._full):
            return pa.record_batch([], names=[]), np.empty(0, np.int64)
        batches, places, have, room = [], [], 0, BLOCK_BYTES_MAX
        while pending and have < self._block_rows and room >= 0:
            rows, where = pending.popleft()
            fits = min(self._block_rows - have, max(_fitting(rows, room), 0 if have else 1))
            if fits < rows.num_rows:
                pending.appendleft((rows.slice(fits), where[fits:]))
                rows, where = rows.slice(0, fits), where[:fits]
                room = -1  # the block ends here
            else:
                room -= rows.nbytes
            if fits:
                batches.append(rows)
                places.append(where)
                have += fits
        self._pending_rows[ordinal] = total - have
        if len(batches) == 1:
            return batches[0], places[0]
        return pa.concat_batches(batches), np.concatenate(places)

    async def _wait_for_room(self) -> None:
        while self._full and self._failure is None:
            if not self._tasks:
                # All that waits would be small blocks: the largest leaves as it is.
                self._start(max(self._pending_rows, key=lambda n: self._pending_rows[n]))
            self._room.clear()
            await self._room.wait()
        self._raise()

    def _raise(self) -> None:
        failure = self._failure
        if isinstance(failure, SteleError):
            # One of its own: what is raised holds this frame, and that this writer with all that waits.
            raise copy(failure)
        if failure is not None:
            raise failure


def _fitting(rows: pa.RecordBatch, room: int) -> int:
    """How many of the first rows take at most `room` bytes."""
    if rows.nbytes <= room:
        return int(rows.num_rows)
    return bisect.bisect_right(range(rows.num_rows + 1), room, key=lambda n: rows.slice(0, n).nbytes) - 1


def _pieces(
    batch: pa.RecordBatch,
    positions: npt.NDArray[np.int64],
    schema: Schema,
    partitioning: PartitionSchema,
) -> list[tuple[int, pa.RecordBatch, npt.NDArray[np.int64]]]:
    """The rows of each tablet, gathered into memory of their own: those of a tablet that gets few may wait long for a full
    block, and must not hold the whole chunk meanwhile."""
    if not batch.num_rows:
        return []
    if partitioning.tablets == 1:
        return [(0, batch, positions)]
    order, found = runs(assign(batch, schema, partitioning))
    return [
        (ordinal, batch.take(pa.array(order[start:end])), positions[order[start:end]])
        for ordinal, start, end in found
    ]


def batches_of(
    data: pa.Table | pa.RecordBatch | pa.RecordBatchReader | Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Record batches of whatever Arrow data a caller has.

    Raises:
        Rejected: something that is not Arrow data.
    """
    if isinstance(data, pa.Table):
        yield from data.to_batches()
        return
    # A pandas frame and a mapping can be iterated over too, and give names.
    several = isinstance(data, Iterable) and not isinstance(data, (pa.RecordBatch, str, bytes, Mapping))
    for batch in data if several and not hasattr(data, "to_dict") else [data]:
        if not isinstance(batch, pa.RecordBatch):
            raise Rejected(_no_arrow_data(batch))
        yield batch


def _no_arrow_data(given: object) -> str:
    kind = type(given)
    expected = "expected a pyarrow Table, RecordBatch, RecordBatchReader or several RecordBatches"
    if kind.__module__.partition(".")[0] == "pandas":
        expected = "give pyarrow.Table.from_pandas(frame)"
    elif isinstance(given, Mapping):
        expected = "give pyarrow.Table.from_pylist([row, ...]) of rows, pyarrow.table({...}) of columns"
    return f"write_arrow: {kind.__name__} is no Arrow data; {expected}"
