"""Packs single rows of concurrent callers into one block per tablet. Owned by an open table.

While blocks are in flight, rows wait. Then all that came meanwhile is converted, assigned to tablets and sent
together.

Invariants: each row's future ends exactly once. A row is in one place only: it waits for a tablet, is in
flight, or is a stray, which no known range covers. Of two rows given in different turns of the event loop,
the later one is not written first. So new ranges take effect only once no block for a dropped range is in
flight. Rows of that block may have to go to a new range, ahead of later rows.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from stele.client import durability as durable
from stele.client.dealing import Dealer
from stele.client.durability import Durability
from stele.client.ranges import NO_RANGE, Ranges, RangesInForce
from stele.client.results import row_error_from_pb, with_key, with_keys
from stele.client.tablet import TabletClient, Writing
from stele.client.waiting_rows import Done, Item, Part, Row, fail, fail_all, groups_of
from stele.model.block import RowError, RowOp
from stele.model.errors import Code, Rejected, SteleError, error_for
from stele.model.partition import OUTSIDE, PartitionSchema
from stele.model.schema import Schema
from stele.rpc.proto.tserver_pb2 import WriteResponse

BLOCK_ROWS_MAX = 8_192
BLOCK_BYTES_MAX = 4 << 20
"""A block has at most this many bytes of rows, unless it is a single row."""
GATE_S = 0.05
"""Seconds after which the next round begins although a tablet has not answered. A slow tablet is waited for only once."""
_LOOK_S = 0.5  # how often a close checks whether anybody still waits


class Batcher:
    """Writes the single rows of one open table in rounds, with at most one block per tablet in each round.

    `tablet_of(ordinal)` gives the client of a tablet, or raises a SteleError. The blocks of a round are sent
    together, once those of the round before are answered. So a node handles all its tablets in one turn with
    one sync. A slow tablet delays the others only for GATE_S, and once.
    """

    def __init__(
        self,
        table: str,
        schema: Schema,
        partitioning: PartitionSchema,
        tablet_of: Callable[[int], TabletClient],
        *,
        timeout_s: float,
        ranges: Ranges | None = None,
    ) -> None:
        """`ranges`: the table's partitioning as it becomes known; None: it never changes."""
        self._table = table
        self._schema = schema
        self.in_force = RangesInForce(partitioning, ranges)
        self._ranges = ranges
        self._strays: list[Part] = []  # rows that no range covers, as far as is known
        self._seeking: asyncio.Task[None] | None = None  # asks the masters about them
        self._dealer = Dealer(schema, partitioning)
        self._tablet_of = tablet_of
        self._timeout_s = timeout_s
        self._rows: list[Item] = []
        self._turn = 0
        self._turn_open = False
        self._waiting: dict[int, deque[Part]] = {}
        self._leaving: dict[int, Part] = {}  # by tablet: its block in flight
        self._writes: dict[int, Writing] = {}  # by tablet: the request of that block
        self._round: set[int] = set()  # tablets whose blocks the next round waits for
        self._gate: asyncio.Handle | None = None  # begins the next round; None if nothing waits
        self._quiet: asyncio.Future[None] | None = None  # done when nothing is in flight, for `close`

    def put(self, op: RowOp, row: Row, durability: Durability | None = None) -> Done:
        """Write one row, together with whatever else waits. The future's result is the hybrid time of the
        write; with `durability` a Written.

        The future raises the row's own error (Rejected), or the error of its block.
        """
        loop = asyncio.get_running_loop()
        future: Done = loop.create_future() if durability is None else durable.Row(durability)
        self._rows.append((op, row, future, self._turn))
        if not self._turn_open:
            self._turn_open = True
            loop.call_soon(self._end_turn)
        if self._gate is None:
            self._gate = loop.call_soon(self._begin_round)
        return future

    def adopt(self, schema: Schema) -> None:
        """Use a newer schema from now on. Rows that were already assigned to tablets leave with the earlier
        schema."""
        self._schema = schema
        self._dealer = Dealer(schema, self.in_force.partitioning)

    def adopt_ranges(self) -> None:
        """Use the newest partitioning from the masters, if it differs, and assign waiting rows to tablets
        again.

        While a block for a dropped range is in flight, the present partitioning stays in force."""
        dropped = self.in_force.renew(self._leaving)
        if dropped is None:
            return  # where a block is in flight, `_ended` comes back to it
        self._dealer = Dealer(self._schema, self.in_force.partitioning)
        again, self._strays = self._strays, []
        for ordinal in dropped:
            again += self._waiting.pop(ordinal, ())
        for part in again:
            self._deal_again(part)

    def _deal_again(self, part: Part) -> None:
        """Assign the rows of a part to tablets again, by the present partitioning."""
        try:
            for ordinal, piece in self._dealer.again(part):
                self._place(ordinal, piece)
        except Exception as exc:  # noqa: BLE001 - the waiting callers must get any error
            fail_all(part.futures, exc)
        self._open_gate()

    def _place(self, ordinal: int, part: Part) -> None:
        """Have a part wait for its tablet. If no known range covers its rows, ask the masters about them."""
        if ordinal != OUTSIDE:
            self._waiting.setdefault(ordinal, deque()).append(part)
            return
        self._strays.append(part)
        if self._seeking is None:
            self._seeking = asyncio.get_running_loop().create_task(self._seek())

    async def _seek(self) -> None:
        """Ask the masters for ranges that cover the present strays, and refuse those that no range covers."""
        sought = list(self._strays)
        error: BaseException | None = None
        try:
            if self._ranges is not None:
                await self._ranges.ask(self._timeout_s)
        except BaseException as exc:  # noqa: BLE001 - the waiting callers must get any error
            error = exc
        if error is None:
            self.adopt_ranges()  # those that a range covers now are no strays any more
        kept, self._strays = self._strays, []
        for part in kept:
            if error is not None:
                fail_all(part.futures, error)
            elif self.in_force.dropped or all(part is not one for one in sought):
                self._strays.append(part)  # it came meanwhile, or the new ranges are not in force yet
            else:
                uncovered = [RowError(n, Code.NOT_FOUND, NO_RANGE) for n in range(len(part.futures))]
                self._refuse_rows(part, uncovered)
        self._seeking = None
        if self._strays and not self.in_force.dropped:
            self._seeking = asyncio.get_running_loop().create_task(self._seek())
        self._look_quiet()
        if isinstance(error, asyncio.CancelledError):
            raise error

    def _end_turn(self) -> None:
        self._turn += 1
        self._turn_open = False

    async def close(self) -> None:
        """Wait for rows in flight that somebody still waits for. Cancelling this only ends the waiting."""
        while self._leaving or self._gate is not None or self._strays:
            quiet = self._quiet = self._quiet or asyncio.get_running_loop().create_future()
            self._drop_unwanted()
            await asyncio.wait([quiet], timeout=_LOOK_S)

    def _drop_unwanted(self) -> None:
        """Drop rows that nobody waits for: they are not sent, and their answers are not awaited."""
        self._rows = [item for item in self._rows if not item[2].done()]
        self._strays = [part for part in self._strays if part.wanted]
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
        """Send the waiting rows: a block to each tablet that has none in flight."""
        self._gate = None
        if self._rows:
            self._route()
        busy = self.in_force.dropped.union(self._leaving)
        ready = [ordinal for ordinal in self._waiting if ordinal not in busy]
        self._round = set(ready)
        for ordinal in ready:
            self._send(ordinal)
        if self._round:
            self._gate = asyncio.get_running_loop().call_later(GATE_S, self._begin_round)
        self._look_quiet()

    def _ended(self, ordinal: int) -> None:
        """Note that a tablet's block is no longer in flight."""
        del self._leaving[ordinal]
        self._writes.pop(ordinal, None)
        if ordinal in self.in_force.dropped:
            self.adopt_ranges()
        if ordinal in self._round:
            self._round.remove(ordinal)
            if not self._round:
                if self._gate is not None:
                    self._gate.cancel()
                # By then, answered callers have queued their next row.
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
        """Schedule the next round, if rows wait."""
        if self._gate is None:
            self._gate = asyncio.get_running_loop().call_soon(self._begin_round)

    def _look_quiet(self) -> None:
        if self._quiet is not None and not self._leaving and self._gate is None and not self._strays:
            self._quiet.set_result(None)
            self._quiet = None

    def _route(self) -> None:
        """Turn the waiting rows into parts of blocks. Rows of one shape are joined; rows of different turns
        stay in order."""
        rows, self._rows = self._rows, []
        try:
            groups = list(groups_of(rows))
        except Exception:  # noqa: BLE001 - a row's names cannot be read; handling each alone shows which
            groups = [[item] for item in rows]
        for group in groups:
            self._deal_out(group)

    def _deal_out(self, group: list[Item]) -> None:
        """Assign rows of one shape to tablets. If all fail together, one may be the cause, so each is tried
        alone."""
        try:
            parts, errors = self._dealer.deal(group)
        except Exception as exc:  # noqa: BLE001 - the waiting callers must get any error
            if len(group) == 1:
                fail(group[0][2], exc)
                return
            for item in group:
                if not item[2].done():
                    self._deal_out([item])
            return
        for error in errors:
            _, row, future, _ = group[error.row]
            self._refuse(future, with_key(error, row, self._schema))
        for ordinal, part in parts:
            self._place(ordinal, part)

    def _send(self, ordinal: int) -> None:
        """Send one block of the rows that wait for a tablet."""
        waiting = self._waiting[ordinal]
        parts = [waiting.popleft()]
        first, rows, size = parts[0], len(parts[0].futures), parts[0].arrow_bytes
        while (
            waiting
            and waiting[0].dealer is first.dealer
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
            futures = [each for one in parts for each in one.futures]
            part = Part(first.dealer, first.ops, first.column_ids, [], futures)
        self._leaving[ordinal] = part
        try:
            if len(parts) > 1:
                part.dealer.join(part, parts)
            block = part.dealer.block(part)
            if len(block) > BLOCK_BYTES_MAX and len(part.futures) > 1:
                raise Rejected(f"the block of several rows has {len(block)} bytes", code=Code.TOO_LARGE)
            write = self._tablet_of(ordinal).start_write(
                block,
                self._timeout_s,
                partial(self._answered, ordinal),
                durability=durable.enough_for(part.futures),
            )
            self._writes[ordinal] = write
        except Exception as exc:  # noqa: BLE001 - the waiting callers must get any error
            self._answered(ordinal, exc)

    def _answered(self, ordinal: int, end: WriteResponse | BaseException) -> None:
        """Handle the answer or the error of a tablet's block."""
        part = self._leaving[ordinal]
        try:
            if not isinstance(end, BaseException):
                self._written(part, end)
            elif isinstance(end, asyncio.CancelledError):
                for future in part.futures:
                    future.cancel()
            elif isinstance(end, SteleError) and end.code in (Code.TOO_LARGE, Code.SCHEMA_MISMATCH):
                # It was refused, perhaps for one row alone, before anything was proposed. Send its halves
                # before the rows behind it.
                rows = len(part.futures)
                if rows > 1:
                    waiting = self._waiting.setdefault(ordinal, deque())
                    waiting.extendleft([part.some(rows // 2, rows), part.some(0, rows // 2)])
                else:
                    self._refuse_rows(part, [RowError(0, end.code, str(end.args[0]))])
            elif isinstance(end, Rejected) and end.code is Code.TABLET_DELETED and self._ranges is not None:
                # Their range was dropped, and with it what an earlier attempt wrote. Perhaps there is a new one.
                self.adopt_ranges()
                self._waiting.setdefault(ordinal, deque()).appendleft(part)
            else:
                fail_all(part.futures, end)
        except Exception as exc:  # noqa: BLE001 - the waiting callers must get any error
            fail_all(part.futures, exc)
        self._ended(ordinal)

    def _written(self, part: Part, answer: WriteResponse) -> None:
        if answer.row_errors:
            self._refuse_rows(part, [row_error_from_pb(e) for e in answer.row_errors])
        timestamp = answer.timestamp
        for future in part.futures:
            if not future.done():
                future.set_result(timestamp if type(future) is not durable.Row else durable.written(answer))

    def _refuse_rows(self, part: Part, errors: list[RowError]) -> None:
        for error in with_keys(errors, part.dealer.batch(part), part.dealer.schema):
            self._refuse(part.futures[error.row], error)

    def _refuse(self, future: Done, error: RowError) -> None:
        fail(future, error_for(error.code, f"table {self._table}: {error.message}"))
