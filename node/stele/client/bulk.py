"""Writes Arrow data: assigns rows to tablets by column, cuts them into blocks, and bounds the bytes in
flight.

Used by `Table.write_arrow` and by sessions.

Invariants: every input row is counted once, as written or as an error. Of two rows with the same key the
later one wins. Blocks of one tablet are sent one after another, and all waiting rows are dealt out by one
partitioning. So new ranges take effect only once no block for a dropped range is in flight. Rows of that
block may have to go to a new range, ahead of later rows.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import deque
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stele.client.arrow_input import batches_of, fit
from stele.client.durability import Durability, got
from stele.client.ranges import NO_RANGE, Ranges, RangesInForce
from stele.client.results import WriteResult, row_error_from_pb, with_keys
from stele.client.tablet import TabletClient
from stele.model.block import Block, RowError, RowOp, encode_block
from stele.model.errors import Code, Rejected, Retryable, SteleError, let_go
from stele.model.job import Attempt
from stele.model.partition import OUTSIDE, PartitionSchema, assign, rows_by_tablet
from stele.model.rows import missing_fault, row_faults
from stele.model.schema import Schema
from stele.rpc.proto import tserver_pb2
from stele.rpc.threads import in_thread

BLOCK_ROWS = 8_192
BLOCK_BYTES_MAX = 4 << 20
CHUNK_ROWS = 65_536
"""Rows that are assigned to tablets at once: enough to fill a block for each of eight tablets."""
_ABANDONED = Retryable(
    "the write was abandoned before an answer came, and may have been done; read before writing it again",
    code=Code.UNKNOWN_OUTCOME,
)

Piece = tuple[pa.RecordBatch, npt.NDArray[np.int64]]
"""Rows of one tablet, and their positions in the whole input. If each row has its own operation, the last
column has the operations."""
Ops = npt.NDArray[np.uint8]
Refusal = Callable[[pa.RecordBatch, list[RowError]], None]
_OP = pa.field("\0op", pa.uint8(), nullable=False)
"""No column of a table has such a name."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some of the caller's rows as they are sent: those of each tablet, and the errors of refused ones."""

    column_ids: tuple[int, ...]
    row_bytes: int
    pieces: list[tuple[int, pa.RecordBatch, npt.NDArray[np.int64]]]
    refused: pa.RecordBatch
    errors: list[RowError]


class BulkWriter:
    """Takes batches and sends blocks. `feed` waits while `bytes_max` are queued or in flight."""

    def __init__(
        self,
        table: str,
        schema: Schema,
        partitioning: PartitionSchema,
        tablet_of: Callable[[int], TabletClient],
        op: RowOp | None,
        *,
        timeout_s: float,
        bytes_max: int,
        on_rows: Callable[[int], None] | None = None,
        ranges: Ranges | None = None,
        attempt: Attempt | None = None,
        on_refused: Refusal | None = None,
        durability: Durability = Durability.SYNCED,
    ) -> None:
        """`op`: the operation of all rows; None: `feed` gets one for each row. `ranges`: the table's
        partitioning as it becomes known; None: it never changes. `attempt`: the attempt at a part of a job;
        rows that another attempt at it has written count as written. `on_refused`: called with refused rows
        and their errors, which the result then lacks. `durability`: what is enough for each block."""
        self._attempt = attempt
        self._durability = durability
        self._on_refused = on_refused
        self.result = WriteResult(table)
        self._ranges = ranges
        self._schema = schema
        self._in_force = RangesInForce(partitioning, ranges)
        self._tablet_of = tablet_of
        self._op = op
        self._timeout_s = timeout_s
        self._bytes_max = bytes_max
        self._on_rows = on_rows
        self._fed_rows = 0
        self._rows_waiting = 0  # accepted but not answered yet
        self._row_bytes = 1
        self._block_rows = BLOCK_ROWS
        self._pending: dict[int, deque[Piece]] = {}
        self._pending_rows: dict[int, int] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._under_way: dict[int, npt.NDArray[np.int64]] = {}  # by tablet: positions of its unanswered block
        self._ended_by: dict[
            int, BaseException
        ] = {}  # by tablet: the error of that block, if it was not cancelled
        self._room = asyncio.Event()
        self._failure: BaseException | None = None
        self._final = False
        self._abandoned = False
        self._column_ids: tuple[int, ...] = ()

    async def feed(self, batch: pa.RecordBatch, ops: Ops | None = None) -> None:
        """Accept a batch. Returns when there is room for the next one. `ops`: the operation of each row.

        Raises:
            Rejected: columns that do not fit.
            SteleError: the error of an earlier block.
        """
        for start in range(0, batch.num_rows, CHUNK_ROWS):
            chunk = batch.slice(start, CHUNK_ROWS)
            while True:
                partitioning = self._in_force.partitioning
                each = None if ops is None else ops[start : start + chunk.num_rows]
                prepared = await in_thread(self._prepared, chunk, each, partitioning)
                if partitioning is self._in_force.partitioning:
                    break  # else new ranges took effect meanwhile
            self._column_ids, self._row_bytes = prepared.column_ids, prepared.row_bytes
            self._note(prepared.refused, prepared.errors)
            self._fed_rows += chunk.num_rows
            for ordinal, rows, where in prepared.pieces:
                self._rows_waiting += rows.num_rows
                self._place(ordinal, rows, where)
            await self._wait_for_room()

    def check(self, data: object) -> None:
        """Check, before anything is sent, what can be checked: for a list or tuple of batches, the columns of
        each.

        Raises:
            Rejected: columns that do not fit, or that differ between batches; something that is not a batch.
        """
        if not isinstance(data, (list, tuple)):
            return  # other data have one schema; an iterator cannot be checked
        ids: tuple[int, ...] = ()
        for batch in batches_of(data):
            _, found, _ = fit(batch.slice(0, 0), self.result.table, self._schema, self._op or RowOp.UPDATE)
            self._check_same(ids, found)
            ids = found

    async def finish(self) -> WriteResult:
        """Send the rest and wait for all answers.

        Raises:
            SteleError: the error of a whole block; rows of other blocks may be written.
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
        """Stop sending. Blocks in flight may be written."""
        self._abandoned = True
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def unsettled(self, rows: int) -> Iterator[tuple[npt.NDArray[np.int64], BaseException | None]]:
        """After `abandon`: which of the first `rows` rows are neither written nor refused, with the reason.

        Yields (positions, the error of their block); the error is None for rows that were not sent."""
        for ordinal, positions in self._under_way.items():
            yield positions, self._ended_by.get(ordinal, _ABANDONED)
        for pieces in self._pending.values():
            for _, positions in pieces:
                yield positions, None
        yield np.arange(self._fed_rows, rows), None

    def _check_same(self, before: tuple[int, ...], now: tuple[int, ...]) -> None:
        if before and now != before:
            was, is_ = (", ".join(self._schema.to_arrow(ids).names) for ids in (before, now))
            raise Rejected(
                f"table {self.result.table}: the columns of one write were {was}, then {is_}; "
                "all batches must have the same columns"
            )

    def _prepared(self, chunk: pa.RecordBatch, ops: Ops | None, partitioning: PartitionSchema) -> _Chunk:
        """Prepare the next rows, in a thread; changes no state. Rows with a forbidden null, or with a value
        that does not fit, are left out, with an error each."""
        begun = bool(self._column_ids)
        # A row that is updated needs the least columns.
        op = self._op or RowOp.UPDATE
        batch, ids, refused = fit(chunk, self.result.table, self._schema, op, begun=begun)
        self._check_same(self._column_ids, ids)
        row_bytes = max(1, batch.nbytes // max(1, batch.num_rows))
        positions = np.arange(self._fed_rows, self._fed_rows + batch.num_rows, dtype=np.int64)
        block = Block(int(self._schema.version), ids, batch, None if ops is not None else op, ops)
        if ops is not None:
            if missing := missing_fault(block, self._schema):
                raise Rejected(f"table {self.result.table}: rows to insert or upsert: {missing}")
            batch = pa.record_batch([*batch.columns, pa.array(ops)], schema=batch.schema.append(_OP))
        faults = row_faults(block, self._schema, refused)
        errors = self._placed(faults, batch, positions)
        bad = batch.slice(0, 0)
        if faults:
            places = [error.row for error in faults]
            bad, good = batch.take(pa.array(places)), np.delete(np.arange(batch.num_rows), places)
            batch, positions = batch.take(pa.array(good)), positions[good]
        return _Chunk(ids, row_bytes, _pieces(batch, positions, self._schema, partitioning), bad, errors)

    def _note(self, rows: pa.RecordBatch, errors: list[RowError]) -> None:
        """Report refused rows, one for each error."""
        if errors and self._on_refused is not None:
            self._on_refused(rows, errors)
        else:
            self.result.row_errors.extend(errors)

    def _refuse(
        self, refused: list[RowError], rows: pa.RecordBatch, positions: npt.NDArray[np.int64]
    ) -> None:
        """Report the errors of rows of a block."""
        if refused:
            bad = rows.take(pa.array([error.row for error in refused]))
            self._note(bad, self._placed(refused, rows, positions))

    def _placed(
        self, errors: list[RowError], batch: pa.RecordBatch, positions: npt.NDArray[np.int64]
    ) -> list[RowError]:
        """Errors of rows of `batch`, with their positions in the input."""
        return [
            replace(error, row=int(positions[error.row])) for error in with_keys(errors, batch, self._schema)
        ]

    @property
    def _full(self) -> bool:
        return self._rows_waiting * self._row_bytes >= self._bytes_max

    def _place(self, ordinal: int, rows: pa.RecordBatch, positions: npt.NDArray[np.int64]) -> None:
        """Have rows wait for their tablet; for OUTSIDE, until the masters have said whether a range covers them."""
        self._pending.setdefault(ordinal, deque()).append((rows, positions))
        self._pending_rows[ordinal] = self._pending_rows.get(ordinal, 0) + rows.num_rows
        self._start(ordinal)

    def _start(self, ordinal: int) -> None:
        if self._abandoned or self._failure is not None or ordinal in self._tasks:
            return
        if self._in_force.dropped and (ordinal == OUTSIDE or ordinal in self._in_force.dropped):
            return  # `_adopt` will deal its rows out anew
        rows = self._pending_rows.get(ordinal, 0)
        enough = rows >= self._block_rows or self._final or self._full or ordinal == OUTSIDE
        if enough and rows:
            sending = self._seek() if ordinal == OUTSIDE else self._send(ordinal)
            task = asyncio.get_running_loop().create_task(sending)
            self._tasks[ordinal] = task
            task.add_done_callback(lambda done: self._ended(ordinal, done))

    def _ended(self, ordinal: int, task: asyncio.Task[None]) -> None:
        del self._tasks[ordinal]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            let_go(error)
            self._ended_by[ordinal] = error
            self._failure = self._failure or error
        elif self._failure is None:
            if ordinal in self._in_force.dropped:
                self._adopt()
            self._start(ordinal)
        self._room.set()

    def _adopt(self) -> None:
        """Use the newest partitioning from the masters, if it differs, and assign waiting rows to tablets
        again.

        While a block for a dropped range is in flight, the present partitioning stays in force."""
        dropped = self._in_force.renew(self._tasks)
        if dropped is None:
            return  # where a block is in flight, `_ended` comes back to it
        again: list[Piece] = []
        for ordinal in (*sorted(dropped), OUTSIDE):
            again += self._pending.pop(ordinal, ())
            self._pending_rows.pop(ordinal, None)
        try:
            for rows, positions in again:
                for ordinal, piece, where in _pieces(
                    rows, positions, self._schema, self._in_force.partitioning
                ):
                    self._place(ordinal, piece, where)
        except Exception as exc:  # noqa: BLE001 - `feed` and `finish` must raise any error
            self._failure = exc

    async def _seek(self) -> None:
        """Ask the masters for ranges that cover the rows outside all known ones, and refuse those that no
        range covers."""
        sought, partitioning = len(self._pending[OUTSIDE]), self._in_force.partitioning
        if self._ranges is not None:
            await self._ranges.ask(self._timeout_s)
            self._adopt()
        if self._in_force.dropped or self._in_force.partitioning is not partitioning:
            return  # others may be outside now; `_ended` asks again about those
        waiting = self._pending[OUTSIDE]
        for rows, positions in [waiting.popleft() for _ in range(sought)]:
            refused = [RowError(n, Code.NOT_FOUND, NO_RANGE) for n in range(len(positions))]
            self._refuse(refused, rows, positions)
            self._pending_rows[OUTSIDE] -= len(positions)
            self._rows_waiting -= len(positions)

    async def _send(self, ordinal: int) -> None:
        while self._failure is None and ordinal not in self._in_force.dropped:
            rows, positions = self._take_block(ordinal)
            if not len(positions):
                return
            self._under_way[ordinal] = positions
            block = self._encoded(rows)
            try:
                answer = await self._tablet_of(ordinal).write(
                    block, timeout_s=self._timeout_s, attempt=self._attempt, durability=self._durability
                )
            except Rejected as exc:
                if exc.code is Code.TABLET_DELETED and self._ranges is not None:
                    # Its range was dropped, with what an earlier attempt wrote. Perhaps there is a new one.
                    self._put_back(ordinal, rows, positions)
                    self._adopt()
                    continue
                if exc.code is not Code.TOO_LARGE:
                    raise
                if len(positions) > 1:
                    # That is known before a proposal. From now on blocks have half its rows.
                    self._block_rows = min(self._block_rows, len(positions) // 2)
                    self._put_back(ordinal, rows, positions)
                    continue
                answer = tserver_pb2.WriteResponse()
                answer.row_errors.add(row=0, code=int(exc.code), message=str(exc.args[0]))
            refused = [row_error_from_pb(e) for e in answer.row_errors]
            self._refuse(refused, rows, positions)
            written = len(positions) - len(answer.row_errors)
            self.result.rows_written += written
            self.result.timestamp = max(self.result.timestamp, answer.timestamp)
            if answer.durability:
                self.result.durability = got(answer)
            self._rows_waiting -= len(positions)
            del self._under_way[ordinal]
            self._room.set()
            if self._on_rows is not None:
                self._on_rows(written)

    def _encoded(self, rows: pa.RecordBatch) -> bytes:
        ops: RowOp | Ops
        if self._op is not None:
            ops = self._op
        else:
            last = rows.num_columns - 1
            ops, rows = np.asarray(rows.column(last)), rows.select(list(range(last)))
        return encode_block(ops, self._column_ids, rows, self._schema.version)

    def _put_back(self, ordinal: int, rows: pa.RecordBatch, positions: npt.NDArray[np.int64]) -> None:
        """Have the rows of a block that was not written wait again, ahead of the others."""
        self._pending[ordinal].appendleft((rows, positions))
        self._pending_rows[ordinal] += len(positions)
        del self._under_way[ordinal]

    def _take_block(self, ordinal: int) -> Piece:
        """Take a block from the rows that wait for a tablet: up to `_block_rows` rows and BLOCK_BYTES_MAX; at
        least one row.

        Empty if the block would be small and more rows will come."""
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
                # Only small blocks could be sent: send the largest as it is. No range waits: it would have a task.
                self._start(max(self._pending_rows, key=lambda n: self._pending_rows[n]))
            self._room.clear()
            await self._room.wait()
        self._raise()

    def _raise(self) -> None:
        failure = self._failure
        if isinstance(failure, SteleError):
            # Raise a copy: the error holds this frame, which holds this writer and all its rows.
            raise copy(failure)
        if failure is not None:
            raise failure


def _fitting(rows: pa.RecordBatch, room: int) -> int:
    """How many of the first rows fit into `room` bytes."""
    if rows.nbytes <= room:
        return int(rows.num_rows)
    return bisect.bisect_right(range(rows.num_rows + 1), room, key=lambda n: rows.slice(0, n).nbytes) - 1


def _pieces(
    batch: pa.RecordBatch,
    positions: npt.NDArray[np.int64],
    schema: Schema,
    partitioning: PartitionSchema,
) -> list[tuple[int, pa.RecordBatch, npt.NDArray[np.int64]]]:
    """The rows of each tablet, copied into memory of their own. Rows of a tablet that gets few may wait long
    for a full block, and must not hold the whole chunk meanwhile."""
    if not batch.num_rows:
        return []
    if partitioning.tablets == 1 and (partitioning.range is None or not partitioning.range.numbers):
        return [(0, batch, positions)]
    order, found = rows_by_tablet(assign(batch, schema, partitioning))
    return [
        (ordinal, batch.take(pa.array(order[start:end])), positions[order[start:end]])
        for ordinal, start, end in found
    ]
