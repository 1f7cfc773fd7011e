"""The plain client: the asynchronous one on a thread with an event loop of its own. For scripts, notebooks and Spark.

Invariant: every call waits for its coroutine and raises what it raises; no result is lost when the client is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, TypeVar

import pyarrow as pa

from stele.client import html
from stele.client.async_client import DELETE_TIMEOUT_S, TIMEOUT_S, AsyncClient, unmasked
from stele.client.bulk import batches_of
from stele.client.handover import Handover
from stele.client.kv import AsyncKeySpace
from stele.client.locations import TableInfo, WritePlan
from stele.client.partitioning import Partitionings
from stele.client.predicates import Predicates
from stele.client.results import WriteResult
from stele.client.scan import AsyncScanner, as_pandas
from stele.client.session import AsyncSession
from stele.client.table import AsyncTable, Bound, Key
from stele.model.block import RowOp
from stele.model.errors import Closed, Rejected
from stele.model.ids import HybridTime
from stele.model.rows import python_rows
from stele.model.schema import Schema
from stele.rpc import forks
from stele.rpc.first_contact import FIRST_CONTACT_S
from stele.rpc.threads import main_thread_ended

T = TypeVar("T")
_CLOSE_TIMEOUT_S = 30.0
_LAST_WORDS_S = 3.0
_INSIDE = "a call of the blocking client from its own thread, as within on_rows, would wait for itself; make it from another one"


class Client:
    """`with Client(["10.0.0.1:7051"]) as client:`. May be used from several threads.

    `masters`: HOST:PORT of some of them, or "A,B,C". `timeout_s`: how long a write or read may take by default.
    `first_contact_s`: how long to look for a master before any has ever answered; a fifth of it if none of their names
    resolves.
    """

    def __init__(
        self,
        masters: str | Iterable[str],
        *,
        timeout_s: float = TIMEOUT_S,
        first_contact_s: float = FIRST_CONTACT_S,
    ) -> None:
        forks.ensure_own()
        self._loop = asyncio.new_event_loop()
        # Entered again by whom it holds: the garbage collector may end a scan wherever memory is taken, in here too.
        self._lock = threading.RLock()
        self._closing = False
        self._over = self._loop.create_future()  # of its thread alone
        self._thread = threading.Thread(
            target=_serve, args=(self._loop, self._over), name="stele-client", daemon=True
        )
        self._thread.start()
        try:
            self.asynchronous = self.run(_make(masters, timeout_s, first_contact_s))
        except BaseException:
            self._end_loop()
            raise

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the asynchronous client on the client's loop, and wait for it. An interrupt cancels it.

        Raises:
            Rejected: on the client's own thread, as in `on_rows`, where it would wait for itself; once the interpreter ends; in a
                process forked from the client's.
            Closed: after `close`.
        """
        call: Handover[T] | None = None
        try:
            if self._inside:
                raise Rejected(_INSIDE)
            call = Handover(lambda: coroutine, self._loop)
            self._hand_over(call)
            return call.wait()
        except BaseException:
            if call is None:
                coroutine.close()
            else:
                call.give_up()  # interrupted, as by Ctrl-C: nobody would learn what becomes of it
            raise

    def end(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run what ends something, and wait for it unless this is the client's own thread, where the garbage collector may
        ask for it. Once the client was closed all has ended, and with the interpreter, which may ask as well."""
        if sys.is_finalizing() or forks.forked():
            coroutine.close()
            return
        with contextlib.suppress(Closed):
            if not self._inside:
                self.run(coroutine)
                return
            call = Handover(lambda: coroutine, self._loop)
            try:
                self._hand_over(call)
            except BaseException:
                call.give_up()
                raise

    @property
    def _inside(self) -> bool:
        return threading.current_thread() is self._thread

    def _hand_over(self, call: Handover[Any]) -> None:
        if sys.is_finalizing():  # the client's thread runs no more
            raise main_thread_ended()
        forks.ensure_own()  # nor does it in a child
        with self._lock:
            if self._closing:
                raise Closed()
            call.hand_over()

    def close(self) -> None:
        """Write what sessions hold, then end all connections and the thread. What other threads wait for ends as well;
        whatever is called from now on raises Closed. Raises Rejected on the client's own thread, and RowErrors if rows of
        a session were not written and its `flush` has not told of them; the client is closed then."""
        if self._inside:
            raise Rejected(_INSIDE)
        if sys.is_finalizing() or forks.forked():  # its thread has ended, or is the parent's
            return
        first = False
        try:
            with self._lock:
                first, self._closing = not self._closing, True
            if first:
                call = Handover(self._close, self._loop)
                call.hand_over()
                call.wait()
            else:
                self._thread.join(_CLOSE_TIMEOUT_S)
        finally:
            if first:
                self._end_loop()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with unmasked(exc):
            self.close()

    def now(self) -> HybridTime:
        """A snapshot token (hybrid time): at or above all that this client has seen written, and not below the wall clock."""
        return self.asynchronous.now()

    def observe(self, timestamp: int) -> None:
        """Take note of another client's token, so that later scans here see what that client had seen.

        Raises:
            Rejected: it is no token, or a minute ahead of this machine's clock, or more.
        """
        self.asynchronous.observe(timestamp)

    def create_table(
        self,
        name: str,
        schema: Schema,
        partitioning: Partitionings = None,
        *,
        replication_factor: int = 3,
        wait: bool = True,
        timeout_s: float = 60.0,
    ) -> Table:
        """Create a table; with `wait`, until every tablet has a leader, at most `timeout_s` seconds.

        Raises:
            Rejected: ALREADY_PRESENT if there is one of this name; INVALID_ARGUMENT with every fault.
            Retryable: no master leads, or the tablets have no leaders in time.
        """
        coroutine = self.asynchronous.create_table(
            name,
            schema,
            partitioning,
            replication_factor=replication_factor,
            wait=wait,
            timeout_s=timeout_s,
        )
        return Table(self, self.run(coroutine))

    def delete_table(self, name: str, *, timeout_s: float = DELETE_TIMEOUT_S) -> None:
        """Delete a table or key space with all its rows, for good. Once this has returned, no write to it that begins later
        is acknowledged, whoever sends it.

        Raises:
            Rejected: NOT_FOUND if there is none of this name.
            Retryable: UNKNOWN_OUTCOME: it is deleted, but nodes that did not answer within `timeout_s` may still take rows.
        """
        self.run(self.asynchronous.delete_table(name, timeout_s=timeout_s))

    def list_tables(self) -> list[TableInfo]:
        """All tables and key spaces, by name. Raises Retryable if no master leads within 15 s."""
        return self.run(self.asynchronous.list_tables())

    def describe(self, name: str) -> TableInfo:
        """State, schema, partitioning and tablets of one table. Raises Rejected NOT_FOUND."""
        return self.run(self.asynchronous.describe(name))

    def open_table(self, name: str) -> Table:
        """A table to write and read. Raises Rejected NOT_FOUND, or INVALID_ARGUMENT if it is a key space."""
        return Table(self, self.run(self.asynchronous.open_table(name)))

    def open_planned(self, plan: WritePlan) -> Table:
        """The table of a plan that another process made with `table.asynchronous.plan_write()`. Asks nobody. Raises Rejected
        WRONG_CLUSTER."""

        async def opened() -> AsyncTable:
            return self.asynchronous.open_planned(plan)

        return Table(self, self.run(opened()))

    def create_keyspace(
        self, name: str, *, replication_factor: int = 3, wait: bool = True, timeout_s: float = 60.0
    ) -> KeySpace:
        """Create a key space. Raises as `create_table`."""
        coroutine = self.asynchronous.create_keyspace(
            name, replication_factor=replication_factor, wait=wait, timeout_s=timeout_s
        )
        return KeySpace(self, self.run(coroutine))

    def keyspace(self, name: str) -> KeySpace:
        """An open key space. Raises Rejected NOT_FOUND, or INVALID_ARGUMENT if it is a table."""
        return KeySpace(self, self.run(self.asynchronous.keyspace(name)))

    async def _close(self) -> None:
        try:
            await self.asynchronous.close()
        finally:
            self._end()  # whoever waited for it may have been interrupted, and once more before it could end the loop

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _end_loop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end)
        self._thread.join()


def _serve(loop: asyncio.AbstractEventLoop, over: asyncio.Future[None]) -> None:
    """The client's thread. What ends with the loop does so here: whoever closes the client may be interrupted."""
    _run(loop, over)
    _run(loop, loop.create_task(_end_tasks()))
    loop.close()


def _run(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    """Until it is done. SystemExit, as `on_rows` may raise it, asyncio gives to whoever waits for its task, and lets it out of
    the loop as well, which others need."""
    while not future.done():
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_until_complete(future)


async def _end_tasks() -> None:
    """Let end what other threads still wait for, and what that begins: without connections most of it does at once. What
    goes on, as a watch does, is cancelled."""
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        _, rest = await asyncio.wait(tasks, timeout=_LAST_WORDS_S)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


class Table:
    """An open table. Every method waits for its answer."""

    def __init__(self, client: Client, table: AsyncTable) -> None:
        self._client = client
        self.asynchronous = table

    @property
    def name(self) -> str:
        """Its name."""
        return self.asynchronous.name

    @property
    def schema(self) -> Schema:
        """Its schema."""
        return self.asynchronous.schema

    @property
    def arrow_schema(self) -> pa.Schema:
        """Arrow schema of all columns."""
        return self.asynchronous.arrow_schema

    def _repr_html_(self) -> str:
        return self.asynchronous._repr_html_()

    def put(self, row: Mapping[str, Any]) -> int:
        """Upsert one row, columns by name; the hybrid time it was written at.

        A datetime without a time zone is taken as UTC, here and wherever else a value of a timestamp column is given.

        Raises:
            Rejected: the row itself is at fault.
            Retryable: NO_QUORUM and the like: not done. UNKNOWN_OUTCOME: it may have been done.
            Closed: the client was closed, as with every other call; nothing was done.
        """
        return self._client.run(self.asynchronous.put(row))

    upsert = put

    def insert(self, row: Mapping[str, Any]) -> int:
        """Insert one row; its hybrid time. Raises as `put`; Rejected ALREADY_PRESENT if its key is there."""
        return self._client.run(self.asynchronous.insert(row))

    def update(self, row: Mapping[str, Any]) -> int:
        """Change the columns given, of the row with this key; its hybrid time. Raises as `put`; Rejected NOT_FOUND."""
        return self._client.run(self.asynchronous.update(row))

    def delete(self, row: Mapping[str, Any]) -> int:
        """Delete the row with this key; its hybrid time. Raises as `put`; Rejected NOT_FOUND if it is not there."""
        return self._client.run(self.asynchronous.delete(row))

    def get(self, key: Key, columns: Sequence[str] | None = None) -> dict[str, Any] | None:
        """The row with this key as of now (linearizable), None if there is none.

        `key`: a mapping of the key columns, their values in order, or the value alone where there is one key column; a
        datetime without a time zone is UTC. What comes back has UTC as its time zone; a date or time outside of the
        years 1 to 9999, which Python has no value for, comes as its number of days or microseconds since 1970.
        Raises Rejected for a key or column that does not fit, Retryable if no leader answered in time.
        """
        return self._client.run(self.asynchronous.get(key, columns))

    def write_arrow(
        self,
        data: pa.Table | pa.RecordBatch | pa.RecordBatchReader | Iterable[pa.RecordBatch],
        op: RowOp | str = RowOp.UPSERT,
        *,
        timeout_s: float | None = None,
        on_rows: Callable[[int], None] | None = None,
        raise_row_errors: bool = True,
    ) -> WriteResult:
        """Write Arrow data in blocks; returns once all are acknowledged. `timeout_s` is for each block; `on_rows` is told,
        on the client's thread, how many rows were acknowledged.

        Raises:
            RowErrors: rows were refused (the others are written), unless `raise_row_errors` is False.
            Rejected: columns that do not fit the table; nothing is written, but for batches that an iterator gave before.
            SteleError: a block as a whole was not written; other blocks may be.
        """
        writer = self.asynchronous.arrow_writer(op, timeout_s=timeout_s, on_rows=on_rows)
        try:
            writer.check(data)
            for batch in batches_of(data):  # in this thread: they may come from another call of this client
                self._client.run(writer.feed(batch))
            result = self._client.run(writer.finish())
        except BaseException:
            self._client.end(writer.abandon())
            raise
        return result.raise_for_errors() if raise_row_errors else result

    def scan(
        self,
        columns: Sequence[str] | None = None,
        predicates: Predicates = (),
        *,
        lower: Bound = None,
        upper: Bound = None,
        limit: int | None = None,
        ordered: bool = False,
        snapshot: int | datetime | None = None,
    ) -> Scanner:
        """A scan of all tablets at one snapshot; read it with `batches`, `to_table`, `to_pandas` or `count`.

        `predicates`: (column, operator, value), or text like "delay > 30 AND origin IN ('JFK')"; one or several, all must
        be true. `lower` (inclusive) and `upper` (exclusive): values of the first key columns, in order or by name.
        `snapshot`: a hybrid time or a datetime, by default now; so is 0, the timestamp of a write that sent nothing. A datetime without a
        time zone, in a predicate, in such a text or in a bound, is UTC. Raises Rejected for an unknown column or a value that does not fit.
        """
        scanner = self.asynchronous.scan(
            columns, predicates, lower=lower, upper=upper, limit=limit, ordered=ordered, snapshot=snapshot
        )
        return Scanner(self._client, scanner)

    def new_session(self, *, flush_interval_s: float = 1.0, buffer_bytes: int = 8 << 20) -> Session:
        """A session for one caller that writes many rows in order; they leave every `flush_interval_s` seconds, or once
        `buffer_bytes` wait."""

        async def make() -> AsyncSession:
            return self.asynchronous.new_session(flush_interval_s=flush_interval_s, buffer_bytes=buffer_bytes)

        return Session(self._client, self._client.run(make()))


class Scanner:
    """A scan ready to be read, once or again."""

    def __init__(self, client: Client, scanner: AsyncScanner) -> None:
        self._client = client
        self.asynchronous = scanner

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Record batches as they come, a bounded number in memory; in key order if the scan is ordered. Raises
        SteleError if no replica of a tablet can serve it."""
        source = self.asynchronous.batches()
        turn = asyncio.Lock()  # a read that was interrupted may end a moment after it was left
        try:
            while True:
                try:
                    yield self._client.run(_next(source, turn))
                except StopAsyncIteration:
                    return
        finally:
            self._client.end(_close(source, turn))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Row after row, columns by name, with the values that `get` gives. Raises as `batches`."""
        for batch in self.batches():
            yield from python_rows(batch)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """A stream of the record batches for other programs' libraries, as DuckDB, Polars and pandas read them: each call reads
        anew, at the same snapshot."""
        schema = self.asynchronous.plan.arrow_schema
        return pa.RecordBatchReader.from_batches(schema, self.batches()).__arrow_c_stream__(requested_schema)

    def _repr_html_(self) -> str:
        return html.of_scan(self.asynchronous.plan)

    def to_table(self) -> pa.Table:
        """All rows as one Arrow table. Raises as `batches`."""
        return self._client.run(self.asynchronous.to_table())

    def to_pandas(self) -> Any:
        """All rows as a pandas frame. Raises as `batches`, and ImportError without pandas."""
        return as_pandas(self.to_table())

    def count(self) -> int:
        """How many rows there are; reads one narrow column. Raises as `batches`."""
        return self._client.run(self.asynchronous.count())


class Session:
    """One caller's rows, written in the background in the order given. Leaving it flushes."""

    def __init__(self, client: Client, session: AsyncSession) -> None:
        self._client = client
        self._session = session

    def insert(self, row: Mapping[str, Any]) -> None:
        """A whole row whose key must not be present; written later. A fault of its own is raised by `flush`."""
        self.apply(RowOp.INSERT, row)

    def upsert(self, row: Mapping[str, Any]) -> None:
        """A whole row, replaced if its key is present; as `insert`."""
        self.apply(RowOp.UPSERT, row)

    def update(self, row: Mapping[str, Any]) -> None:
        """Some columns of a row whose key must be present; as `insert`."""
        self.apply(RowOp.UPDATE, row)

    def delete(self, row: Mapping[str, Any]) -> None:
        """The key of a row to remove, which must be present; as `insert`."""
        self.apply(RowOp.DELETE, row)

    def apply(self, op: RowOp | str, row: Mapping[str, Any]) -> None:
        """Take in one row of any operation; waits while the buffer is full. Raises SteleError if an earlier flush failed:
        this row was not taken in then, and `flush` tells which of the others were not written."""
        self._client.run(self._session.apply(op, row))

    def flush(self) -> WriteResult:
        """Write what waits; what was written since the last flush. Raises RowErrors if rows were refused since then, or
        not acknowledged; the others are written."""
        return self._client.run(self._session.flush())

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(Closed) if kind is not None else contextlib.nullcontext():
            self._client.run(self._session.__aexit__(kind, exc, trace))


class KeySpace:
    """A key space. Keys and values are bytes; str is taken as UTF-8."""

    def __init__(self, client: Client, keyspace: AsyncKeySpace) -> None:
        self._client = client
        self._keyspace = keyspace

    def replace(self, key: bytes | str, value: bytes | str) -> None:
        """Set a key, whatever was there. str is taken as UTF-8. Raises Retryable if no leader answered in time."""
        self._client.run(self._keyspace.replace(key, value))

    def insert(self, key: bytes | str, value: bytes | str) -> None:
        """Set a key that must not be there. Raises Rejected ALREADY_PRESENT, and as `replace`."""
        self._client.run(self._keyspace.insert(key, value))

    def read(self, key: bytes | str) -> bytes | None:
        """The value of a key as of now (linearizable), None if it is not there. Raises as `replace`."""
        return self._client.run(self._keyspace.read(key))

    def delete(self, key: bytes | str) -> None:
        """Remove a key, present or not. Raises as `replace`."""
        self._client.run(self._keyspace.delete(key))

    def list(self, prefix: bytes | str = b"") -> list[tuple[bytes, bytes]]:
        """Keys that begin with `prefix` and their values, in order. Raises as `replace`."""
        return self._client.run(self._keyspace.list(prefix))

    def elect(self, name: str, candidate: str) -> str:
        """Stand for `name`: become its holder if nobody is. Returns who holds it now. Raises as `replace`."""
        return self._client.run(self._keyspace.elect(name, candidate))

    def changed(self, key: bytes | str, known: bytes | None) -> bytes | None:
        """Wait until the value of a key is another than `known`; returns it. Looks twice a second."""
        return self._client.run(self._keyspace.changed(key, known))


async def _make(masters: str | Iterable[str], timeout_s: float, first_contact_s: float) -> AsyncClient:
    return AsyncClient(masters, timeout_s=timeout_s, first_contact_s=first_contact_s)


async def _next(source: Any, turn: asyncio.Lock) -> pa.RecordBatch:
    async with turn:
        return await anext(source)


async def _close(source: Any, turn: asyncio.Lock) -> None:
    async with turn:
        await source.aclose()
