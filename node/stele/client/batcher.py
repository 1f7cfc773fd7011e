"""Packs what concurrent callers write, one row each, into one block per tablet. Owned by an open table.

While blocks are under way, rows wait; then all that came meanwhile is converted, assigned to tablets and sent together.

Invariants: each row's future ends exactly once; of two rows given in different turns of the event loop, the later one
is not written first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from stele.client.attempts import Asking
from stele.client.results import row_error_from_pb, with_key, with_keys
from stele.client.tablet import TabletClient
from stele.model.block import DELETES, INSERTS, UPDATES, RowError, RowOp, encode_block
from stele.model.errors import Code, Rejected, SteleError, error_for, let_go
from stele.model.partition import PartitionSchema, assign, assign_few, runs
from stele.model.plain import Values, plain_rows
from stele.model.rows import batch_from_rows
from stele.model.schema import Schema
from stele.rpc.proto.tserver_pb2 import WriteResponse

BLOCK_ROWS_MAX = 8_192
BLOCK_BYTES_MAX = 4 << 20
"""Rows of more bytes are not sent in one block, unless it is one row."""
_PLAIN_ROWS_MAX = 512
"""More rows at once are for Arrow."""
GATE_S = 0.05
"""How long one tablet's block may keep the blocks for other tablets waiting, once."""
_LOOK_S = 0.5  # how often a close looks whether anybody waits still

Row = Mapping[str, Any]
Done = asyncio.Future[int]
_Item = tuple[RowOp, Row, Done, int]
"""What to do, the row, its future, the turn of the loop in which it was given."""


class _Part:
    """Rows of one tablet with the same columns, waiting to leave. `ops`: one for all of them, or one per row. `rows`: an Arrow
    batch, or the values of plain rows. `alone`: the block that had them was too large, and they are not to be joined with
    others again."""

    __slots__ = ("alone", "column_ids", "futures", "ops", "rows")

    def __init__(
        self,
        ops: RowOp | np.ndarray,
        column_ids: tuple[int, ...],
        rows: pa.RecordBatch | list[Values],
        futures: list[Done],
        alone: bool = False,
    ) -> None:
        self.ops = ops
        self.column_ids = column_ids
        self.rows = rows
        self.futures = futures
        self.alone = alone

    @property
    def wanted(self) -> bool:
        """Whether anybody waits for one of the rows still."""
        return not all(future.done() for future in self.futures)

    @property
    def arrow_bytes(self) -> int:
        """Of rows in Arrow; plain ones are some hundred small ones at most."""
        return 0 if isinstance(self.rows, list) else int(self.rows.nbytes)

    def some(self, start: int, end: int) -> _Part:
        """Some of the rows, to be sent alone."""
        ops = self.ops if isinstance(self.ops, RowOp) else self.ops[start:end]
        rows = self.rows[start:end]
        return _Part(ops, self.column_ids, rows, self.futures[start:end], alone=True)


class Batcher:
    """One per open table. `tablet_of(ordinal)` gives the client of a tablet, or raises a SteleError.

    The blocks of a round are made and leave together when those of the one before are answered, so that the nodes work on
    all tablets in one turn and with one sync. A tablet that takes long holds the others up for GATE_S only, and once.
    """

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
        self._plain = plain_rows(schema)
        self._rows: list[_Item] = []
        self._turn = 0
        self._turn_open = False
        self._waiting: dict[int, deque[_Part]] = {}
        self._leaving: dict[int, _Part] = {}  # by tablet: its block under way
        self._writes: dict[int, Asking] = {}  # and its request
        self._round: set[int] = set()  # tablets whose blocks the next round waits for
        self._gate: asyncio.Handle | None = None  # what begins the next round; none if nothing waits for one
        self._quiet: asyncio.Future[None] | None = None  # done when nothing is under way, for who closes

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
        if self._gate is None:
            self._gate = loop.call_soon(self._begin_round)
        return future

    def _end_turn(self) -> None:
        self._turn += 1
        self._turn_open = False

    async def close(self) -> None:
        """Wait for what is under way, as far as somebody waits for it. Whoever is cancelled meanwhile ends the waiting
        alone."""
        while self._leaving or self._gate is not None:
            quiet = self._quiet = self._quiet or asyncio.get_running_loop().create_future()
            self._drop_unwanted()
            await asyncio.wait([quiet], timeout=_LOOK_S)

    def _drop_unwanted(self) -> None:
        """Rows that nobody waits for any more are not sent, and no answer is waited for."""
        self._rows = [item for item in self._rows if not item[2].done()]
        for ordinal, parts in list(self._waiting.items()):
            wanted = deque(part for part in parts if part.wanted)
            if wanted:
                self._waiting[ordinal] = wanted
            else:
                del self._waiting[ordinal]
        for ordinal, leaving in list(self._leaving.items()):
            if not leaving.wanted:
                self._writes[ordinal].cancel()

    def _begin_round(self) -> None:
        """Send what waits, a block to each tablet that has none under way."""
        self._gate = None
        if self._rows:
            self._route()
        ready = [ordinal for ordinal in self._waiting if ordinal not in self._leaving]
        self._round = set(ready)
        for ordinal in ready:
            self._send(ordinal)
        if self._round:
            self._gate = asyncio.get_running_loop().call_later(GATE_S, self._begin_round)
        self._look_quiet()

    def _ended(self, ordinal: int) -> None:
        """A tablet's block is no longer under way."""
        del self._leaving[ordinal]
        self._writes.pop(ordinal, None)
        if ordinal in self._round:
            self._round.remove(ordinal)
            if not self._round:
                if self._gate is not None:
                    self._gate.cancel()
                # Who was answered just now has given his next row by then.
                self._gate = asyncio.get_running_loop().call_soon(self._end_round)
        elif ordinal in self._waiting:
            self._open_gate()
        self._look_quiet()

    def _end_round(self) -> None:
        self._gate = None
        if self._rows or self._waiting:
            self._open_gate()
        self._look_quiet()

    def _open_gate(self) -> None:
        """See that what waits is sent."""
        if self._gate is None:
            self._gate = asyncio.get_running_loop().call_soon(self._begin_round)

    def _look_quiet(self) -> None:
        if self._quiet is not None and not self._leaving and self._gate is None:
            self._quiet.set_result(None)
            self._quiet = None

    def _route(self) -> None:
        """Turn the rows that wait into parts of blocks: rows of one shape together, those of other turns in order."""
        rows, self._rows = self._rows, []
        try:
            groups = list(_groups(rows))
        except Exception:  # noqa: BLE001 - a row whose names cannot be read: which one, shows where each is alone
            groups = [[item] for item in rows]
        for group in groups:
            self._deal_out(group)

    def _deal_out(self, group: list[_Item]) -> None:
        """Rows of one shape. What fails on all of them together may be the fault of one: then each is dealt out alone."""
        try:
            if not self._route_plain(group):
                self._route_group(group)
        except Exception as exc:  # noqa: BLE001 - whatever it is, whoever waits must hear of it
            if len(group) == 1:
                _fail(group[0][2], exc)
                return
            for item in group:
                if not item[2].done():
                    self._deal_out([item])

    def _route_plain(self, group: list[_Item]) -> bool:
        """Deal out some dozens of plain rows without Arrow, which takes several times as long for so few. False: they are not
        such rows, and go the way of all others."""
        op = group[0][0]
        if self._plain is None or len(group) > _PLAIN_ROWS_MAX or op not in INSERTS:
            return False
        each, rows, futures, _ = zip(*group)
        if any(other is not op for other in each):
            return False
        found = self._plain.values(rows)
        if found is None:
            return False
        values, columns = found
        ordinals = assign_few(columns, self._schema, self._partitioning)
        parts: dict[int, _Part] = {}
        for ordinal, row, future in zip(ordinals, values, futures):
            part = parts.get(ordinal)
            if part is None:
                part = parts[ordinal] = _Part(op, self._schema.column_ids, [], [])
            part.rows.append(row)
            part.futures.append(future)
        for ordinal, part in parts.items():
            self._waiting.setdefault(ordinal, deque()).append(part)
        return True

    def _route_group(self, group: list[_Item]) -> None:
        each, rows, futures, _ = map(list, zip(*group))
        ops: RowOp | np.ndarray = each[0]
        batch, column_ids, kept, errors = batch_from_rows(rows, self._schema, each[0])
        for error in errors:
            self._refuse(futures[error.row], with_key(error, rows[error.row], self._schema))
        if errors:
            each, futures = ([column[i] for i in kept.tolist()] for column in (each, futures))
        if any(op is not ops for op in each):
            ops = np.array(each, np.uint8)
        order, pieces = runs(assign(batch, self._schema, self._partitioning))
        if len(pieces) > 1:  # one gather for all; a tablet's rows are a slice of it
            batch = batch.take(pa.array(order))
            if not isinstance(ops, RowOp):
                ops = ops[order]
            futures = [futures[i] for i in order.tolist()]
        for ordinal, start, end in pieces:
            part_ops = ops if isinstance(ops, RowOp) else ops[start:end]
            part = _Part(part_ops, column_ids, batch.slice(start, end - start), futures[start:end])
            self._waiting.setdefault(ordinal, deque()).append(part)

    def _send(self, ordinal: int) -> None:
        """Send one block of what waits for a tablet."""
        waiting = self._waiting[ordinal]
        parts = [waiting.popleft()]
        first, rows, size = parts[0], len(parts[0].futures), parts[0].arrow_bytes
        while (
            waiting
            and waiting[0].column_ids == first.column_ids
            and rows + len(waiting[0].futures) <= BLOCK_ROWS_MAX
            and size + waiting[0].arrow_bytes <= BLOCK_BYTES_MAX
            and not first.alone
        ):
            rows += len(waiting[0].futures)
            size += waiting[0].arrow_bytes
            parts.append(waiting.popleft())
        if not waiting:
            del self._waiting[ordinal]
        part = first
        if len(parts) > 1:
            part = _Part(first.ops, first.column_ids, [], [each for one in parts for each in one.futures])
        self._leaving[ordinal] = part
        try:
            if len(parts) > 1:
                self._join(part, parts)
            block = self._block(part)
            if len(block) > BLOCK_BYTES_MAX and len(part.futures) > 1:
                raise Rejected(f"{len(block)} bytes of several rows", code=Code.TOO_LARGE)
            write = self._tablet_of(ordinal).start_write(
                block, self._timeout_s, partial(self._answered, ordinal)
            )
            self._writes[ordinal] = write
        except Exception as exc:  # noqa: BLE001 - whatever it is, whoever waits must hear of it
            self._answered(ordinal, exc)

    def _join(self, whole: _Part, parts: list[_Part]) -> None:
        """Make one of several with the same columns."""
        whole.ops = _joined_ops(parts)
        plain = [part.rows for part in parts if isinstance(part.rows, list)]
        if len(plain) == len(parts) and isinstance(whole.ops, RowOp):
            whole.rows = list(chain.from_iterable(plain))
        else:
            whole.rows = pa.concat_batches([self._batch(part) for part in parts])

    def _batch(self, part: _Part) -> pa.RecordBatch:
        if not isinstance(part.rows, list):
            return part.rows
        assert self._plain is not None
        return self._plain.batch(part.rows)

    def _block(self, part: _Part) -> bytes:
        ops, rows = part.ops, part.rows
        if (
            self._plain is not None
            and isinstance(ops, RowOp)
            and isinstance(rows, list)
            and len(rows) <= self._plain.rows_max
        ):
            return self._plain.encode(ops, rows)
        return encode_block(ops, part.column_ids, self._batch(part), self._schema.version)

    def _answered(self, ordinal: int, end: WriteResponse | BaseException) -> None:
        """What a tablet's block ended with."""
        part = self._leaving[ordinal]
        try:
            if not isinstance(end, BaseException):
                self._written(part, end)
            elif isinstance(end, asyncio.CancelledError):
                for future in part.futures:
                    future.cancel()
            elif isinstance(end, SteleError) and end.code is Code.TOO_LARGE:
                # Refused before anything was sent or proposed. Its halves leave before what waits behind it.
                rows = len(part.futures)
                if rows > 1:
                    waiting = self._waiting.setdefault(ordinal, deque())
                    waiting.extendleft([part.some(rows // 2, rows), part.some(0, rows // 2)])
                else:
                    self._refuse_rows(part, [RowError(0, end.code, str(end.args[0]))])
            else:
                _fail_all(part.futures, end)
        except Exception as exc:  # noqa: BLE001 - whatever it is, whoever waits must hear of it
            _fail_all(part.futures, exc)
        self._ended(ordinal)

    def _written(self, part: _Part, answer: WriteResponse) -> None:
        if answer.row_errors:
            self._refuse_rows(part, [row_error_from_pb(e) for e in answer.row_errors])
        timestamp = answer.timestamp
        for future in part.futures:
            if not future.done():
                future.set_result(timestamp)

    def _refuse_rows(self, part: _Part, errors: list[RowError]) -> None:
        for error in with_keys(errors, self._batch(part), self._schema):
            self._refuse(part.futures[error.row], error)

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


def _groups(rows: list[_Item]) -> Iterable[list[_Item]]:
    first = rows[0][0]
    if first not in UPDATES and all(item[0] is first for item in rows):
        return [rows]
    shaped: list[tuple[object, _Item]] = []
    for item in rows:
        try:
            shaped.append((_shape(item[0], item[1]), item))
        except Exception as exc:  # noqa: BLE001 - whatever kind of mapping it is, it is its own fault
            _fail(item[2], exc)
    groups: dict[object, list[_Item]] = {}
    for shape, item in shaped:
        groups.setdefault(shape, []).append(item)
    if len(groups) > 1:
        groups = {}
        for shape, item in shaped:
            groups.setdefault((item[3], shape), []).append(item)
    return groups.values()


def _shape(op: RowOp, row: Row) -> object:
    """Rows of one shape can stand in one block: whole rows, keys alone, or updates of the same columns."""
    if op in INSERTS:
        return "whole"
    if op in DELETES:
        return "keys"
    return frozenset(row)


def _fail(future: Done, error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _fail_all(futures: list[Done], error: BaseException) -> None:
    let_go(error)  # its frames may hold the futures
    for future in futures:
        _fail(future, error)
