"""Packs what concurrent callers write, one row each, into one block per tablet. Owned by an open table.

Rows of one turn of the event loop are converted and assigned to tablets together; while blocks are under way, rows
wait and leave as the next ones. Invariant: each row's future ends exactly once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from stele.client.tablet import TabletClient
from stele.model.block import DELETES, INSERTS, RowOp, encode_block
from stele.model.errors import Code, SteleError, error_for
from stele.model.partition import PartitionSchema, assign, split
from stele.model.rows import batch_from_rows
from stele.model.schema import Schema
from stele.rpc.errors import error_from

BLOCK_ROWS_MAX = 8_192
GATE_S = 0.05
"""How long one tablet's block may keep the blocks for other tablets waiting, once."""

Row = Mapping[str, Any]
Done = asyncio.Future[int]


class _Part:
    """Rows of one tablet with the same columns, waiting to leave."""

    __slots__ = ("batch", "column_ids", "futures", "ops")

    def __init__(
        self, ops: np.ndarray, column_ids: tuple[int, ...], batch: pa.RecordBatch, futures: list[Done]
    ) -> None:
        self.ops = ops
        self.column_ids = column_ids
        self.batch = batch
        self.futures = futures


class Batcher:
    """One per open table. `tablet_of(ordinal)` gives the client of a tablet, or raises a SteleError."""

    def __init__(
        self,
        schema: Schema,
        partitioning: PartitionSchema,
        tablet_of: Callable[[int], TabletClient],
        *,
        timeout_s: float,
    ) -> None:
        self._schema = schema
        self._partitioning = partitioning
        self._tablet_of = tablet_of
        self._timeout_s = timeout_s
        self._rows: list[tuple[RowOp, Row, Done]] = []
        self._waiting: dict[int, deque[_Part]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._gate: asyncio.Task[None] | None = None

    def put(self, op: RowOp, row: Row) -> Done:
        """Write one row with whatever else this turn of the loop writes. The future gives its hybrid time.

        It raises the row's own error (Rejected), or what became of its block.
        """
        loop = asyncio.get_running_loop()
        future: Done = loop.create_future()
        if not self._rows:
            loop.call_soon(self._route)
        self._rows.append((op, row, future))
        return future

    async def close(self) -> None:
        """Wait for what is under way."""
        while self._rows or self._tasks or self._gate:
            gate = (self._gate,) if self._gate is not None else ()
            await asyncio.gather(*self._tasks.values(), *gate, return_exceptions=True)
            await asyncio.sleep(0)

    def _route(self) -> None:
        """Turn the rows of this turn into parts of blocks, and start the tablets that rest."""
        rows, self._rows = self._rows, []
        groups: dict[object, list[tuple[RowOp, Row, Done]]] = {}
        for item in rows:
            groups.setdefault(_shape(item[0], item[1]), []).append(item)
        for group in groups.values():
            try:
                self._route_group(group)
            except SteleError as exc:
                for _, _, future in group:
                    _fail(future, exc)

    def _route_group(self, group: list[tuple[RowOp, Row, Done]]) -> None:
        batch, column_ids, kept, errors = batch_from_rows(
            [row for _, row, _ in group], self._schema, group[0][0]
        )
        for error in errors:
            _fail(group[error.row][2], error_for(error.code, error.message))
        ops = np.fromiter((group[i][0] for i in kept.tolist()), np.uint8, len(kept))
        futures = [group[i][2] for i in kept.tolist()]
        pieces = list(split(batch, assign(batch, self._schema, self._partitioning)))
        if len(pieces) > 1:  # one gather for all; a tablet's rows are a slice of it
            order = np.concatenate([positions for _, positions in pieces])
            batch = batch.take(pa.array(order))
            ops = ops[order]
            futures = [futures[i] for i in order.tolist()]
        start = 0
        for ordinal, positions in pieces:
            end = start + len(positions)
            part = _Part(ops[start:end], column_ids, batch.slice(start, end - start), futures[start:end])
            start = end
            self._waiting.setdefault(ordinal, deque()).append(part)
            self._open_gate()

    def _open_gate(self) -> None:
        """See that somebody sends what waits."""
        if self._gate is None:
            self._gate = asyncio.get_running_loop().create_task(self._send_all())

    async def _send_all(self) -> None:
        """Send what waits, a block to each tablet at once, until nothing waits.

        The next blocks leave together when these are answered, so that the nodes work on all tablets in one turn and
        with one sync. A tablet that takes long holds the others up for GATE_S only, and once.
        """
        try:
            while ready := [o for o in self._waiting if o not in self._tasks]:
                for ordinal in ready:
                    self._tasks[ordinal] = asyncio.get_running_loop().create_task(self._send(ordinal))
                await asyncio.wait([self._tasks[ordinal] for ordinal in ready], timeout=GATE_S)
        finally:
            self._gate = None

    async def _send(self, ordinal: int) -> None:
        """Send one block of what waits for a tablet."""
        waiting = self._waiting[ordinal]
        parts = [waiting.popleft()]
        rows = len(parts[0].futures)
        while (
            waiting
            and waiting[0].column_ids == parts[0].column_ids
            and rows + len(waiting[0].futures) <= BLOCK_ROWS_MAX
        ):
            rows += len(waiting[0].futures)
            parts.append(waiting.popleft())
        if not waiting:
            del self._waiting[ordinal]
        try:
            await self._send_block(ordinal, parts)
        finally:
            del self._tasks[ordinal]
            if ordinal in self._waiting:
                self._open_gate()

    async def _send_block(self, ordinal: int, parts: list[_Part]) -> None:
        futures = [future for part in parts for future in part.futures]
        ops = parts[0].ops if len(parts) == 1 else np.concatenate([part.ops for part in parts])
        batch = parts[0].batch if len(parts) == 1 else pa.concat_batches([part.batch for part in parts])
        one_op = RowOp(int(ops[0])) if (ops == ops[0]).all() else None
        try:
            block = encode_block(one_op or ops, parts[0].column_ids, batch, self._schema.version)
            answer = await self._tablet_of(ordinal).write(block, timeout_s=self._timeout_s)
        except SteleError as exc:
            if exc.code is Code.TOO_LARGE and len(futures) > 1:  # refused before anything was proposed
                half = len(futures) // 2
                for some in (slice(0, half), slice(half, None)):
                    rows = batch.slice(some.start, len(futures[some]))
                    part = _Part(ops[some], parts[0].column_ids, rows, futures[some])
                    await self._send_block(ordinal, [part])
                return
            for future in futures:
                _fail(future, exc)
            return
        except asyncio.CancelledError:
            for future in futures:
                future.cancel()
            raise
        for error in answer.row_errors:
            _fail(futures[error.row], error_from(error.code, error.message))
        for future in futures:
            if not future.done():
                future.set_result(answer.timestamp)


def _shape(op: RowOp, row: Row) -> object:
    """Rows of one shape can stand in one block: whole rows, keys alone, or updates of the same columns."""
    if op in INSERTS:
        return "whole"
    if op in DELETES:
        return "keys"
    return frozenset(row)


def _fail(future: Done, error: SteleError) -> None:
    if not future.done():
        future.set_exception(error)
