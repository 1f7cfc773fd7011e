"""Reads rows by key, many with one request. Used by the reads of an open table.

Keys that are asked for in one turn of the event loop leave together, a request for each tablet. While such a round is
under way, further keys wait and leave with the next one. So requests have many keys, and a node gets the requests for all
its tablets in one frame. A request that is full leaves at once.

Invariants: each key's future ends exactly once. A request leaves after all its keys were asked for, so a row is as new
as its caller's call. A slow tablet delays the others once, for GATE_S at most. It delays no key for longer
than its caller waits.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import pyarrow as pa

from stele.client.lookup import Key, key_row, rows_of
from stele.client.plain_keys import Values, message_of, plain_keys
from stele.client.ranges import Ranges
from stele.client.waiting_rows import fail, fail_all
from stele.model.block import RowOp
from stele.model.column import shown
from stele.model.errors import Code, Corrupt, Rejected, Retryable, SteleError
from stele.model.partition import OUTSIDE, assign
from stele.model.rows import batch_from_rows
from stele.model.schema import Schema
from stele.rpc.proto import tserver_pb2

KEYS_MAX, VALUES_MAX = 512, 32_768
"""The most keys of one request, and the most keys times columns. A node reads them in one thread. Its own limits are twice as
high."""
_SLACK = 0.1
"""A key is not asked for again once only this part of its caller's time is left."""
GATE_S = 0.05
"""Seconds after which the next round begins although a tablet has not answered. A slow tablet is waited for only once."""
WINDOW_KEYS = 8_192
"""How many keys of one call are asked for at once. So other callers' keys wait behind this many at most."""

Row = dict[str, Any] | None
ColumnIds = tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Sought:
    """One key that a caller waits for, until a moment of the monotonic clock."""

    key: Key
    future: asyncio.Future[Row]
    until: float


@dataclass(slots=True, eq=False)
class _Part:
    """Keys of one tablet that leave together. `keys`: one for each caller, as plain values or in Arrow. `alone`: a request
    of these and other keys was too large, so they are not joined with others again."""

    schema: Schema
    column_ids: ColumnIds
    keys: list[Values] | pa.RecordBatch
    sought: list[_Sought]
    alone: bool = False

    def some(self, places: Sequence[int], *, alone: bool = False) -> _Part:
        """Return a part with the keys at these places."""
        if isinstance(self.keys, list):
            keys = [self.keys[at] for at in places]
        else:
            keys = self.keys.take(pa.array(places, pa.int64()))
        return _Part(self.schema, self.column_ids, keys, [self.sought[at] for at in places], alone)

    @property
    def batch(self) -> pa.RecordBatch:
        """The keys in Arrow."""
        plain = plain_keys(self.schema)
        return plain.batch(self.keys) if plain is not None and isinstance(self.keys, list) else self.keys

    @property
    def message(self) -> bytes:
        """Encode the keys for a request."""
        plain = plain_keys(self.schema)
        if plain is not None and isinstance(self.keys, list):
            return plain.encode(self.keys)
        return message_of(self.batch)

    @property
    def full(self) -> bool:
        """Whether a request takes no more keys."""
        return len(self.sought) >= _keys_max(self.schema, self.column_ids)


def _joined(parts: Sequence[_Part]) -> _Part:
    """One part with the keys of all these, which have the same columns."""
    first = parts[0]
    if len(parts) == 1:
        return first
    lists = [part.keys for part in parts if isinstance(part.keys, list)]
    if len(lists) == len(parts):
        keys: list[Values] | pa.RecordBatch = list(chain.from_iterable(lists))
    else:
        keys = pa.Table.from_batches([part.batch for part in parts]).combine_chunks().to_batches()[0]
    return _Part(first.schema, first.column_ids, keys, [one for part in parts for one in part.sought])


class ReadsRows(Protocol):
    """A tablet, as its rows are read: at its leader (TabletClient), or at the nearest replica."""

    def read(self, request: tserver_pb2.ReadRequest, *, timeout_s: float) -> Awaitable[Any]:
        """An answer with `rows` and `places`. Raises SteleError."""


class PointReads:
    """One per open table and way to read. `name()` and `schema()` give the table's present name and columns.
    `tablet_of(ordinal)` gives the client of a tablet. `result(row, answer)`: what a caller gets for a row of
    a tablet's answer; for a key of no tablet, both are None."""

    def __init__(
        self,
        name: Callable[[], str],
        schema: Callable[[], Schema],
        ranges: Ranges,
        tablet_of: Callable[[int], ReadsRows],
        *,
        timeout_s: float,
        result: Callable[[Row, Any], Any] = lambda row, answer: row,
    ) -> None:
        self._result = result
        self._name = name
        self._schema = schema
        self._ranges = ranges
        self._tablet_of = tablet_of
        self._timeout_s = timeout_s
        self._asked: dict[ColumnIds, list[_Sought]] = {}  # in this turn
        self._waiting: dict[int, deque[_Part]] = {}
        self._busy: set[int] = set()  # tablets with a request under way
        self._round: set[int] = set()  # tablets whose requests the next round waits for
        self._gate: asyncio.Handle | None = None  # begins the next round
        self._tasks: set[asyncio.Task[None]] = set()

    async def get(self, key: Key, column_ids: ColumnIds) -> Row:
        """Read the present row with this key; None if there is none. `column_ids`: () for all.

        Raises:
            Rejected: the key does not fit. SteleError: no leader answered in time.
        """
        return await self._ask(key, column_ids)

    async def get_many(self, keys: Iterable[Key], column_ids: ColumnIds) -> list[Row]:
        """Read the rows with these keys, in their order. Raises what `get` raises, for the first key that
        fails."""
        found: list[Row] = []
        window: list[asyncio.Future[Row]] = []
        every = iter(keys)
        try:
            while True:
                window = [self._ask(key, column_ids) for _, key in zip(range(WINDOW_KEYS), every)]
                if not window:
                    return found
                for future in window:
                    found.append(await future)
        finally:
            for future in window:
                if not future.cancel() and not future.cancelled():
                    future.exception()  # only the first one is raised

    def _ask(self, key: Key, column_ids: ColumnIds) -> asyncio.Future[Row]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Row] = loop.create_future()
        if not self._asked:
            loop.call_soon(self._end_turn)
        sought = _Sought(key, future, time.monotonic() + self._timeout_s)
        self._asked.setdefault(column_ids, []).append(sought)
        return future

    def _end_turn(self) -> None:
        asked, self._asked = self._asked, {}
        for column_ids, sought in asked.items():
            self._deal(column_ids, sought)

    def _deal(self, column_ids: ColumnIds, sought: Sequence[_Sought], *, asked: bool = False) -> None:
        """Have keys wait for their tablets. `asked`: the masters have just told the ranges, so a key that no range covers
        has no row."""
        try:
            for ordinal, part in self._parts(column_ids, sought):
                if ordinal != OUTSIDE:
                    self._waiting.setdefault(ordinal, deque()).append(part)
                    if part.full:
                        self._send(ordinal)
                elif asked:
                    for one in part.sought:
                        _end(one, self._result(None, None))
                else:
                    self._begin(self._seek(part))
        except Exception as exc:  # noqa: BLE001 - the waiting callers must get any error
            fail_all([one.future for one in sought], exc)
        if self._gate is None:
            self._begin_round()

    def _begin_round(self) -> None:
        """Send the waiting keys: a request to each tablet that has none under way."""
        self._gate = None
        self._round = set(self._waiting) - self._busy
        for ordinal in list(self._round):
            self._send(ordinal)
        if self._round:
            self._gate = asyncio.get_running_loop().call_later(GATE_S, self._begin_round)

    def _ended(self, ordinal: int) -> None:
        """Note that a tablet's request is no longer under way."""
        self._busy.discard(ordinal)
        waiting = self._waiting.get(ordinal)
        if waiting and (waiting[0].full or waiting[0].alone):
            self._send(ordinal)
        elif ordinal in self._round:
            self._round.remove(ordinal)
            if not self._round and self._gate is not None:
                self._gate.cancel()
                self._gate = asyncio.get_running_loop().call_soon(self._end_round)
        elif waiting and self._gate is None:
            self._begin_round()

    def _end_round(self) -> None:
        """Schedule the next round. Answered callers ask for their next keys first, so these leave with it."""
        self._gate = asyncio.get_running_loop().call_soon(self._begin_round)

    def _parts(self, column_ids: ColumnIds, sought: Sequence[_Sought]) -> list[tuple[int, _Part]]:
        """Keys by tablet, in parts that one request takes. Keys that do not fit are refused."""
        schema = self._schema()
        plain = plain_keys(schema)
        values = None if plain is None else plain.values([one.key for one in sought])
        if plain is not None and values is not None:
            whole = _Part(schema, column_ids, values, list(sought))
            return _split(whole, plain.assign(values, self._ranges.now))
        rows, fitting = [], []
        for one in sought:
            try:
                rows.append(key_row(schema, one.key))
                fitting.append(one)
            except Exception as exc:  # noqa: BLE001 - a caller's own mapping may raise anything
                fail(one.future, exc)
        if not rows:
            return []
        keys, _, kept, errors = batch_from_rows(rows, schema, RowOp.DELETE)
        for error in errors:
            one = fitting[error.row]
            fail(one.future, Rejected(f"table {self._name()}: key {shown(one.key)}: {error.message}"))
        whole = _Part(schema, column_ids, keys, [fitting[at] for at in kept.tolist()])
        return _split(whole, assign(keys, schema, self._ranges.now).tolist())

    async def _seek(self, part: _Part) -> None:
        """Ask the masters for a range that covers these keys."""
        try:
            first = min(one.until for one in part.sought)
            await self._ranges.ask(max(0.001, first - time.monotonic()))
        except Exception as exc:  # noqa: BLE001 - the waiting callers must get any error
            fail_all([one.future for one in part.sought], exc)
            return
        self._deal(part.column_ids, part.sought, asked=True)

    # --- one tablet

    def _send(self, ordinal: int) -> None:
        """Send a request for the keys that wait for a tablet, if none is under way."""
        waiting = self._waiting.get(ordinal)
        if not waiting or ordinal in self._busy:
            return
        parts = [waiting.popleft()]
        first, count = parts[0], len(parts[0].sought)
        most = _keys_max(first.schema, first.column_ids)
        while (
            waiting
            and not (first.alone or waiting[0].alone)
            and waiting[0].schema is first.schema
            and waiting[0].column_ids == first.column_ids
            and count + len(waiting[0].sought) <= most
        ):
            count += len(waiting[0].sought)
            parts.append(waiting.popleft())
        if not waiting:
            del self._waiting[ordinal]
        self._busy.add(ordinal)
        self._begin(self._read(ordinal, _joined(parts)))

    async def _read(self, ordinal: int, part: _Part) -> None:
        try:
            if not all(one.future.done() for one in part.sought):
                await self._answer(ordinal, part)
        except asyncio.CancelledError:
            for one in part.sought:
                one.future.cancel()
            raise
        except Exception as exc:  # noqa: BLE001 - the waiting callers must get any error
            self._failed(ordinal, part, exc)
        finally:
            self._ended(ordinal)

    async def _answer(self, ordinal: int, part: _Part) -> None:
        request = tserver_pb2.ReadRequest(
            keys=part.message,
            column_ids=part.column_ids,
            schema_version=part.schema.version,
        )
        first = min(one.until for one in part.sought)
        tablet = self._tablet_of(ordinal)
        answer = await tablet.read(request, timeout_s=max(0.001, first - time.monotonic()))
        rows, places = rows_of(self._name(), answer.rows), answer.places
        if len(part.sought) == 1:
            _end(part.sought[0], self._result(rows[0] if rows else None, answer))
            return
        if rows and not places:  # a node of release 0.1.0 does not say which keys it found
            raise Rejected("ask for fewer keys at once", code=Code.TOO_LARGE)
        if len(places) != len(rows) or any(place >= len(part.sought) for place in places):
            raise Corrupt(
                f"table {self._name()}: a node answered a read with rows of unknown keys; report this as a bug in Stele"
            )
        found = dict(zip(places, rows))
        for place, one in enumerate(part.sought):
            _end(one, self._result(found.get(place), answer))

    def _failed(self, ordinal: int, part: _Part, exc: Exception) -> None:
        count = len(part.sought)
        if isinstance(exc, Rejected) and exc.code is Code.TABLET_DELETED:
            # The masters have just said that its range was dropped. Perhaps there is a new one.
            self._deal(part.column_ids, part.sought, asked=True)
        elif isinstance(exc, SteleError) and exc.code is Code.TOO_LARGE and count > 1:
            halves = [part.some(each, alone=True) for each in (range(count // 2), range(count // 2, count))]
            self._waiting.setdefault(ordinal, deque()).extendleft(reversed(halves))
        elif isinstance(exc, Retryable):
            self._give_up(ordinal, part, exc)
        else:
            fail_all([one.future for one in part.sought], exc)

    def _give_up(self, ordinal: int, part: _Part, exc: Retryable) -> None:
        """Fail the keys whose callers have no time left, in this request and in those that wait behind it.
        Ask for the other keys again. If no key of the request has run out of time, the request failed for
        another reason, and all its keys fail."""
        soon, kept = time.monotonic() + _SLACK * self._timeout_s, deque[_Part]()
        for each in (part, *self._waiting.pop(ordinal, ())):
            later = [at for at, one in enumerate(each.sought) if one.until > soon]
            if each is part and len(later) == len(part.sought):
                later = []  # it failed for another reason than time
            rest = set(later)
            fail_all([one.future for at, one in enumerate(each.sought) if at not in rest], exc)
            if later:
                kept.append(each.some(later, alone=each.alone))
        if kept:
            self._waiting[ordinal] = kept

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _keys_max(schema: Schema, column_ids: ColumnIds) -> int:
    """The most keys of one request for these columns."""
    return min(KEYS_MAX, max(1, VALUES_MAX // (len(column_ids) or len(schema.columns))))


def _split(whole: _Part, ordinals: Sequence[int]) -> list[tuple[int, _Part]]:
    """The keys of each tablet, in parts that one request takes."""
    by_tablet: dict[int, list[int]] = {}
    for at, ordinal in enumerate(ordinals):
        by_tablet.setdefault(ordinal, []).append(at)
    most = _keys_max(whole.schema, whole.column_ids)
    return [
        (ordinal, whole.some(places[start : start + most]))
        for ordinal, places in by_tablet.items()
        for start in range(0, len(places), most)
    ]


def _end(sought: _Sought, row: Row) -> None:
    if not sought.future.done():
        sought.future.set_result(row)
