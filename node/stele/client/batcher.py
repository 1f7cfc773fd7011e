"""Packs what concurrent callers write, one row each, into one block per tablet. Owned by an open table.

While blocks are under way, rows wait; then all that came meanwhile is converted, assigned to tablets and sent together.

Invariants: each row's future ends exactly once; of two rows given in different turns of the event loop, the later one
is not written first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from stele.client.results import row_error_from_pb, with_key, with_keys
from stele.client.tablet import TabletClient
from stele.model.block import DELETES, INSERTS, RowError, RowOp, encode_block
from stele.model.errors import Code, SteleError, error_for, let_go
from stele.model.partition import PartitionSchema, assign, split
from stele.model.rows import batch_from_rows
from stele.model.schema import Schema

BLOCK_ROWS_MAX = 8_192
GATE_S = 0.05
"""How long one tablet's block may keep the blocks for other tablets waiting, once."""
_LOOK_S = 0.5  # how often a close looks whether anybody waits still

Row = Mapping[str, Any]
Done = asyncio.Future[int]
_Item = tuple[RowOp, Row, Done, int]
"""What to do, the row, its future, the turn of the loop in which it was given."""


class _Part:
    """Rows of one tablet with the same columns, waiting to leave. `ops`: one for all of them, or one per row."""

    __slots__ = ("batch", "column_ids", "futures", "ops")

    def __init__(
        self,
        ops: RowOp | np.ndarray,
        column_ids: tuple[int, ...],
        batch: pa.RecordBatch,
        futures: list[Done],
    ) -> None:
        self.ops = ops
        self.column_ids = column_ids
        self.batch = batch
        self.futures = futures

    @property
    def wanted(self) -> bool:
        """Whether anybody waits for one of the rows still."""
        return not all(future.done() for future in self.futures)


class Batcher:
    """One per open table. `tablet_of(ordinal)` gives the client of a tablet, or raises a SteleError."""

    def __init__(
        self,
        table: str,
        schema: Schema,
        partitioning: PartitionSchema,
        tablet_of: Callable[[int], TabletClient],
        *,
        timeout_s: float,
    ) -> None:
        self._table = table
        self._schema = schema
        self._partitioning = partitioning
        self._tablet_of = tablet_of
        self._timeout_s = timeout_s
        self._rows: list[_Item] = []
        self._turn = 0
        self._turn_open = False
        self._waiting: dict[int, deque[_Part]] = {}
        self._leaving: dict[int, list[_Part]] = {}  # by tablet: those of its task
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._gate: asyncio.Task[None] | None = None

    def put(self, op: RowOp, row: Row) -> Done:
        """Write one row with whatever else waits. The future gives its hybrid time.

        It raises the row's own error (Rejected), or what became of its block.
        """
        loop = asyncio.get_running_loop()
        future: Done = loop.create_future()
        self._rows.append((op, row, future, self._turn))
        if not self._turn_open:
            self._turn_open = True
            loop.call_soon(self._end_turn)
        self._open_gate()
        return future

    def _end_turn(self) -> None:
        self._turn += 1
        self._turn_open = False

    async def close(self) -> None:
        """Wait for what is under way, as far as somebody waits for it. Whoever is cancelled meanwhile ends the waiting
        alone."""
        while under_way := [*self._tasks.values(), *((self._gate,) if self._gate is not None else ())]:
            self._drop_unwanted()
            await asyncio.wait(under_way, timeout=_LOOK_S)

    def _drop_unwanted(self) -> None:
        """Rows that nobody waits for any more are not sent, and no answer is waited for."""
        self._rows = [item for item in self._rows if not item[2].done()]
        for ordinal, parts in list(self._waiting.items()):
            wanted = deque(part for part in parts if part.wanted)
            if wanted:
                self._waiting[ordinal] = wanted
            else:
                del self._waiting[ordinal]
        for ordinal, leaving in self._leaving.items():
            if not any(part.wanted for part in leaving):
                self._tasks[ordinal].cancel()

    def _open_gate(self) -> None:
        """See that somebody sends what waits."""
        if self._gate is None:
            self._gate = asyncio.get_running_loop().create_task(self._send_all())
            self._gate.add_done_callback(self._gate_ended)

    def _gate_ended(self, gate: asyncio.Task[None]) -> None:
        if self._gate is gate:  # cancelled, perhaps before its first step
            self._gate = None
            if self._rows or self._waiting:
                self._open_gate()

    async def _send_all(self) -> None:
        """Send what waits, a block to each tablet at once, until nothing waits.

        The next blocks are made and leave together when these are answered, so that the nodes work on all tablets in
        one turn and with one sync. A tablet that takes long holds the others up for GATE_S only, and once.
        """
        while True:
            if self._rows:
                self._route()
            ready = [ordinal for ordinal in self._waiting if ordinal not in self._tasks]
            if not ready and not self._rows:
                self._gate = None
                return
            for ordinal in ready:
                task = self._tasks[ordinal] = asyncio.get_running_loop().create_task(self._send(ordinal))
                task.add_done_callback(partial(self._ended, ordinal))
            if ready:
                await asyncio.wait([self._tasks[ordinal] for ordinal in ready], timeout=GATE_S)

    def _route(self) -> None:
        """Turn the rows that wait into parts of blocks: rows of one shape together, those of other turns in order."""
        rows, self._rows = self._rows, []
        groups: dict[object, list[_Item]] = {}
        for item in rows:
            groups.setdefault(_shape(item[0], item[1]), []).append(item)
        if len(groups) > 1:
            groups = {}
            for item in rows:
                groups.setdefault((item[3], _shape(item[0], item[1])), []).append(item)
        for group in groups.values():
            try:
                self._route_group(group)
            except Exception as exc:  # noqa: BLE001 - whatever it is, whoever waits must hear of it
                for item in group:
                    _fail(item[2], exc)

    def _route_group(self, group: list[_Item]) -> None:
        batch, column_ids, kept, errors = batch_from_rows(
            [item[1] for item in group], self._schema, group[0][0]
        )
        for error in errors:
            _, row, future, _ = group[error.row]
            self._refuse(future, with_key(error, row, self._schema))
        positions = kept.tolist()
        futures = [group[i][2] for i in positions]
        ops: RowOp | np.ndarray = group[0][0]
        if any(item[0] is not ops for item in group):
            ops = np.fromiter((group[i][0] for i in positions), np.uint8, len(kept))
        pieces = list(split(batch, assign(batch, self._schema, self._partitioning)))
        if len(pieces) > 1:  # one gather for all; a tablet's rows are a slice of it
            order = np.concatenate([members for _, members in pieces])
            batch = batch.take(pa.array(order))
            if not isinstance(ops, RowOp):
                ops = ops[order]
            futures = [futures[i] for i in order.tolist()]
        start = 0
        for ordinal, members in pieces:
            end = start + len(members)
            part_ops = ops if isinstance(ops, RowOp) else ops[start:end]
            part = _Part(part_ops, column_ids, batch.slice(start, end - start), futures[start:end])
            start = end
            self._waiting.setdefault(ordinal, deque()).append(part)

    async def _send(self, ordinal: int) -> None:
        """Send one block of what waits for a tablet."""
        waiting = self._waiting.get(ordinal)
        if not waiting:
            return  # nobody waits for them any more
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
        self._leaving[ordinal] = parts
        try:
            await self._send_block(ordinal, parts)
        except Exception as exc:  # noqa: BLE001 - whatever it is, whoever waits must hear of it
            for part in parts:
                for future in part.futures:
                    _fail(future, exc)

    def _ended(self, ordinal: int, task: asyncio.Task[None]) -> None:
        del self._tasks[ordinal]
        leaving = self._leaving.pop(ordinal, ())  # none before its first step: what was to leave waits still
        if task.cancelled():
            for part in leaving:
                for future in part.futures:
                    future.cancel()
        if ordinal in self._waiting:
            self._open_gate()

    async def _send_block(self, ordinal: int, parts: list[_Part]) -> None:
        futures = [future for part in parts for future in part.futures]
        ops = parts[0].ops if len(parts) == 1 else _joined_ops(parts)
        batch = parts[0].batch if len(parts) == 1 else pa.concat_batches([part.batch for part in parts])
        try:
            block = encode_block(ops, parts[0].column_ids, batch, self._schema.version)
            answer = await self._tablet_of(ordinal).write(block, timeout_s=self._timeout_s)
        except SteleError as exc:
            if exc.code is Code.TOO_LARGE and len(futures) > 1:  # refused before anything was proposed
                half = len(futures) // 2
                for some in (slice(0, half), slice(half, None)):
                    rows = batch.slice(some.start, len(futures[some]))
                    part_ops = ops if isinstance(ops, RowOp) else ops[some]
                    part = _Part(part_ops, parts[0].column_ids, rows, futures[some])
                    await self._send_block(ordinal, [part])
                return
            let_go(exc)  # this frame holds the futures
            for future in futures:
                _fail(future, exc)
            return
        refused = [row_error_from_pb(e) for e in answer.row_errors]
        for error in with_keys(refused, batch, self._schema):
            self._refuse(futures[error.row], error)
        for future in futures:
            if not future.done():
                future.set_result(answer.timestamp)

    def _refuse(self, future: Done, error: RowError) -> None:
        _fail(future, error_for(error.code, f"table {self._table}: {error.message}"))


def _joined_ops(parts: list[_Part]) -> RowOp | np.ndarray:
    first = parts[0].ops
    if isinstance(first, RowOp) and all(part.ops is first for part in parts):
        return first
    each = [
        np.full(len(part.futures), int(part.ops), np.uint8) if isinstance(part.ops, RowOp) else part.ops
        for part in parts
    ]
    return np.concatenate(each)


def _shape(op: RowOp, row: Row) -> object:
    """Rows of one shape can stand in one block: whole rows, keys alone, or updates of the same columns."""
    if op in INSERTS:
        return "whole"
    if op in DELETES:
        return "keys"
    return frozenset(row)


def _fail(future: Done, error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
