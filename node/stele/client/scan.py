"""Scans: rows of a table at one snapshot, straight from the tablets over Arrow Flight.

Used by an open table. Blocking reads run in threads; each tablet is read from its leader, else from another replica.
Invariant: all tablets are read at one snapshot, and a row comes out once, whichever replicas it took.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Event, Semaphore
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stele.client import html
from stele.client.locations import MOVED, Locations, ReplicaPlace, TabletPlace
from stele.model import keys
from stele.model.column import shown
from stele.model.errors import Closed, Code, Rejected, SteleError, error_for
from stele.model.predicate import ScanSpec
from stele.model.rows import python_rows
from stele.model.schema import Schema
from stele.rpc.flight_client import FlightConnections, FlightStream
from stele.rpc.threads import ReaderThreads, begin, in_thread, main_thread_ended
from stele.rpc.ticket import Ticket

T = TypeVar("T")
PARALLEL_TABLETS = 4
_QUEUE_BATCHES = 8
_BACKOFF_S, _BUSY_BACKOFF_MAX_S = 0.05, 1.0
_BUSY_TIMES = 10
"""A node that has no place for another scan is well: it is asked for so many times the timeout."""
_TAKE_BYTES_MAX = 512 << 20
"""More of a column is put in order in parts: Arrow joins a column to take rows from it, and an array holds 2 GiB."""
_LOOK_S = 0.5  # how often a thread that waits for room looks whether anybody is left to make it
_DEFINITE = frozenset(
    (
        Code.INVALID_ARGUMENT,
        Code.SCHEMA_MISMATCH,
        Code.SNAPSHOT_TOO_OLD,
        Code.CLOCK_AHEAD,
        Code.UNSUPPORTED_VERSION,
        Code.PERMISSION_DENIED,
        Code.CLOSED,
    )
)
_NOT_HERE = frozenset((Code.NOT_FOUND, Code.TABLET_DELETED, Code.WRONG_NODE))
"""What a replica says that has moved: that the table itself is gone the masters alone can tell."""
_GONE = MOVED | _NOT_HERE | {Code.WRONG_CLUSTER}
_WELL = frozenset((Code.THROTTLED, Code.NOT_LEADER, Code.NOT_READY, Code.SNAPSHOT_NOT_READY))


class FlightPool(FlightConnections):
    """Flight connections of a client, with the threads that its scans are read in, but for those by batches: these wait for
    their reader, and have threads of their own."""

    def __init__(self) -> None:
        super().__init__()
        self._threads = ThreadPoolExecutor(PARALLEL_TABLETS * 2, "stele-scan")

    async def run(
        self, read: Callable[[TabletScan], T], scan: TabletScan, threads: Executor | None = None
    ) -> T:
        """`read(scan)` in one of the threads, or of `threads`.

        Raises:
            Closed: after `close`, and if it came before a thread was free.
            Rejected: the program's main thread has ended.
        """
        try:
            reading = begin(threads or self._threads, read, scan)
        except (Rejected, RuntimeError):  # the threads have been told to end
            if self.closed:
                raise Closed() from None
            raise
        try:
            return await reading
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.closed and (task is None or not task.cancelling()):  # nobody cancelled us
                raise Closed() from None
            raise

    def close(self) -> None:
        """Close all, for good. Readers under way fail."""
        super().close()
        self._threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class ScanPlan:
    """A scan of some tablets of a table. What Spark ships to its workers."""

    cluster_id: str
    schema: Schema
    spec: ScanSpec
    snapshot: int
    tablets: tuple[TabletPlace, ...]
    fork_id: str | None = None
    """Which copy of the cluster it is of; None: not known."""

    @property
    def arrow_schema(self) -> pa.Schema:
        """Schema of the batches."""
        return self.schema.to_arrow(self.spec.column_ids or None)


class _Patience:
    """How long a scan goes on since its last batch: `timeout_s`, and as long again from each answer of a node that has no
    place for it, within _BUSY_TIMES `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.renew()

    def renew(self) -> None:
        """A batch came."""
        self._since = time.monotonic()
        self._busy_backoff_s = _BACKOFF_S
        self.allowed_s = self._timeout_s
        self.busy = False

    def ends_with(self, code: Code) -> bool:
        """Whether it was over when a node answered so."""
        waited_s = time.monotonic() - self._since
        if code is Code.THROTTLED:
            self.busy = True
            self.allowed_s = min(waited_s + self._timeout_s, _BUSY_TIMES * self._timeout_s)
        return waited_s > self.allowed_s

    def backoff_s(self, code: Code) -> float:
        """How long to wait after such an answer."""
        if code is not Code.THROTTLED:
            return _BACKOFF_S
        self._busy_backoff_s = min(2 * self._busy_backoff_s, _BUSY_BACKOFF_MAX_S, self._timeout_s / 4)
        return self._busy_backoff_s * (0.5 + random.random())


class TabletScan:
    """One tablet of a scan, read in the calling thread: `for batch in TabletScan(...)`.

    A scan in key order resumes at another replica behind the last row it gave. One without order starts again, and
    says so by yielding None: throw away what came before. `locate` is called, in the same thread, after a replica gave
    no answer: it asks the masters where the replicas listen now, and may return before they say. What it raises ends
    the scan.
    """

    def __init__(
        self,
        pool: FlightPool,
        plan: ScanPlan,
        tablet: TabletPlace,
        timeout_s: float,
        locate: Callable[[], object],
    ) -> None:
        self._pool = pool
        self._plan = plan
        self._tablet = tablet
        self._timeout_s = timeout_s
        self._locate = locate
        self._stop = Event()
        self._stream: FlightStream | None = None
        self._given = 0
        self._beside = 0  # replicas are asked in turn while those before them have no place

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stop.is_set()

    def stop(self) -> None:
        """End the scan from another thread, before its next batch."""
        self._stop.set()
        stream = self._stream
        if stream is not None:
            stream.cancel()

    def __iter__(self) -> Iterator[pa.RecordBatch | None]:
        """Raises SteleError if no replica could serve the rest within `timeout_s` of the last batch; ten times as long while
        nodes have no place for it."""
        wanted = len(self._plan.arrow_schema)
        spec = (_with_key_columns(self._plan) if self._plan.spec.ordered else self._plan).spec
        patience = _Patience(self._timeout_s)
        said: dict[str, str] = {}
        while True:
            replica: ReplicaPlace | None = None
            try:
                replica = self._tablet.target(self._beside)
                for batch in self._read(replica, spec):
                    if batch.num_rows:
                        spec = self._behind(spec, batch)
                        self._given += batch.num_rows
                        yield batch if batch.num_columns == wanted else batch.select(range(wanted))
                    patience.renew()
                    said.clear()
                    if self._stop.is_set():
                        return
                return
            except SteleError as exc:
                code = exc.code
                if self._stop.is_set():
                    return
                if code in _DEFINITE:
                    raise
                if replica is not None:
                    address = replica.flight_address
                    said[replica.node_id] = f"{address} ({str(exc.args[0]).removeprefix(f'{address}: ')})"
                if patience.ends_with(code):
                    raise self._given_up(exc, said, patience) from exc
            if replica is not None:
                self._ask_another(replica, code)
            if replica is None or code in _GONE:
                self._locate()
            if self._stop.wait(patience.backoff_s(code)):
                return
            if self._given and not spec.ordered:
                self._given = 0
                yield None

    def _ask_another(self, asked: ReplicaPlace, code: Code) -> None:
        if code is Code.THROTTLED or self._beside % len(self._tablet.replicas or (asked,)):
            self._beside += 1  # who else asks the leader, as writers do, goes on doing so
        else:
            self._tablet.ask_next(asked)
        if code not in _WELL:
            self._pool.drop(asked.flight_address)

    def _given_up(self, last: SteleError, said: Mapping[str, str], patience: _Patience) -> SteleError:
        """What each replica said: the last one asked may be one that is down, beside one that tells what is wrong."""
        reasons = ", ".join(sorted(said.values())) or str(last.args[0])
        code = Code.UNAVAILABLE if last.code in _NOT_HERE else last.code
        return error_for(
            Code.THROTTLED if patience.busy else code,
            f"tablet {self._tablet.tablet_id}: no replica could be read for {patience.allowed_s:.1f} s: {reasons}",
        )

    def _behind(self, spec: ScanSpec, batch: pa.RecordBatch) -> ScanSpec:
        """What is left to read once `batch` has been given."""
        if not spec.ordered:
            return spec
        last = keys.encode_keys(batch.slice(batch.num_rows - 1), self._plan.schema)[0].as_py()
        limit = None if spec.limit is None else spec.limit - batch.num_rows
        # Not `resume_after`: an empty string may be a whole key, and an empty one there means that nothing was read.
        return replace(spec, lower_key=last + b"\x00", limit=limit)

    def _read(self, replica: ReplicaPlace, spec: ScanSpec) -> Iterator[pa.RecordBatch]:
        if spec.limit is not None and spec.limit <= 0:
            return
        plan = self._plan
        ticket = Ticket(
            plan.cluster_id,
            self._tablet.tablet_id,
            plan.snapshot,
            plan.schema.version,
            spec.to_json(plan.schema),
            fork_id=plan.fork_id,
        )
        self._stream = FlightStream(self._pool, replica.flight_address, ticket.encode(), self._stop)
        try:
            yield from self._stream
        finally:
            self._stream = None


class AsyncScanner:
    """A scan ready to be read, once or again: by batches, as an Arrow table, or as a pandas frame.

    Example:
        >>> async def names(table):
        ...     return sorted([row["name"] async for row in table.scan()])
        >>> client.run(names(client.run(client.asynchronous.open_table("readings"))))
        ['cellar', 'roof']
    """

    def __init__(
        self, pool: FlightPool, plan: ScanPlan, locations: Locations, *, ordered: bool, timeout_s: float
    ) -> None:
        self.plan = plan
        self._pool = pool
        self._locations = locations
        self._ordered = ordered
        self._timeout_s = timeout_s

    async def __aiter__(self) -> AsyncGenerator[dict[str, Any], None]:
        """Row after row, columns by name, with the values that `get` gives. Raises as `batches`."""
        async with contextlib.aclosing(self.batches()) as batches:
            async for batch in batches:
                for row in python_rows(batch):
                    yield row

    def _repr_html_(self) -> str:
        return html.of_scan(self.plan)

    async def batches(self) -> AsyncGenerator[pa.RecordBatch, None]:
        """Record batches as they come, from several tablets at once, with a bounded number in memory.

        In key order if the scan is ordered (then tablets of a hashed table are merged in memory first).

        Raises:
            SteleError: if no replica of a tablet can serve it.
        """
        if self._ordered and len(self.plan.tablets) > 1:
            for batch in (await self.to_table()).to_batches():
                yield batch
            return
        # Batches are handed on as they come, so a scan that breaks must be able to resume: key order.
        plan = replace(self.plan, spec=replace(self.plan.spec, ordered=True))
        queue: asyncio.Queue[pa.RecordBatch | BaseException | None] = asyncio.Queue()
        room, places = Semaphore(_QUEUE_BATCHES), asyncio.Semaphore(PARALLEL_TABLETS)
        scans = self._scans(plan)
        loop = asyncio.get_running_loop()

        def stop() -> None:
            for scan in scans:
                scan.stop()
                room.release()  # its thread looks whether it may stop

        def hand(scan: TabletScan, batch: pa.RecordBatch | None) -> bool:
            """In a reading thread: give the reader of the batches another; False if it will take no more.

            The thread waits for no coroutine: a loop that ends, with a scan that nobody closed, runs no more of them.
            """
            while not scan.stopped and not loop.is_closed():
                if room.acquire(timeout=_LOOK_S):
                    with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                        loop.call_soon_threadsafe(queue.put_nowait, batch)
                        return True
            return False

        def pump(scan: TabletScan) -> None:
            for batch in scan:
                if not hand(scan, batch):
                    return

        async def run(scan: TabletScan) -> None:
            end: Exception | None = None
            try:
                async with places:
                    if not scan.stopped:
                        await self._pool.run(pump, scan, threads)
                if scan.stopped:  # not by the reader, who would not wait any more
                    end = main_thread_ended()
            except Exception as exc:  # noqa: BLE001 - told to whoever reads the batches
                end = exc
            queue.put_nowait(end)

        threads = ReaderThreads("stele-batches", stop)

        tasks = [asyncio.create_task(run(scan)) for scan in scans]
        left, limit = len(scans), self.plan.spec.limit
        try:
            while left and (limit is None or limit > 0):
                item = await queue.get()
                if item is None:
                    left -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    room.release()
                    if limit is not None:
                        item = item.slice(0, limit)
                        limit -= item.num_rows
                    yield item
        finally:
            stop()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def to_table(self) -> pa.Table:
        """All rows as one Arrow table. Raises as `batches` does."""
        merge = self._ordered and len(self.plan.tablets) > 1
        plan = _with_key_columns(self.plan) if merge else self.plan
        places = asyncio.Semaphore(PARALLEL_TABLETS)
        scans = self._scans(plan)

        async def run(scan: TabletScan) -> list[pa.RecordBatch]:
            async with places:
                return await self._pool.run(_collect, scan)

        tasks = [asyncio.create_task(run(scan)) for scan in scans]
        try:
            collected = await asyncio.gather(*tasks)
        except BaseException:
            for scan in scans:
                scan.stop()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        table = pa.Table.from_batches([b for part in collected for b in part], plan.arrow_schema)
        if merge:
            table = await in_thread(_in_key_order, table, plan.schema)
            table = table.select(range(len(self.plan.arrow_schema)))
        return table if plan.spec.limit is None else table.slice(0, plan.spec.limit)

    async def to_pandas(self) -> Any:
        """All rows as a pandas frame.

        Raises:
            Rejected: a date outside of the years 1 to 9999, which Python has no value for; `to_table` gives it.
        """
        return await in_thread(as_pandas, await self.to_table())

    async def count(self) -> int:
        """How many rows there are; reads one narrow column."""
        first = self.plan.schema.key_column_ids[0]
        spec = replace(self.plan.spec, column_ids=(int(first),))
        narrow = AsyncScanner(
            self._pool,
            replace(self.plan, spec=spec),
            self._locations,
            ordered=False,
            timeout_s=self._timeout_s,
        )
        return int((await narrow.to_table()).num_rows)

    def _scans(self, plan: ScanPlan) -> list[TabletScan]:
        """One for each tablet of `plan`; threads read them."""
        loop = asyncio.get_running_loop()

        def locate() -> None:
            self._locations.ensure_there()
            with contextlib.suppress(RuntimeError):  # the client was closed meanwhile, and its loop with it
                loop.call_soon_threadsafe(self._locations.refresh_soon)

        return [TabletScan(self._pool, plan, tablet, self._timeout_s, locate) for tablet in plan.tablets]


def as_pandas(table: pa.Table) -> Any:
    """A frame of a table's rows. Raises Rejected as `AsyncScanner.to_pandas`."""
    try:
        return table.to_pandas()
    except ValueError as exc:
        names = ", ".join(field.name for field in table.schema if pa.types.is_date(field.type))
        raise Rejected(
            f"columns {names}: Python has no value for a date of one of them ({exc}); "
            "to_table().to_pandas(date_as_object=False) gives it"
        ) from exc


def _collect(scan: TabletScan) -> list[pa.RecordBatch]:
    found: list[pa.RecordBatch] = []
    for batch in scan:
        if batch is None:
            found.clear()
        else:
            found.append(batch)
    return found


def _in_key_order(table: pa.Table, schema: Schema) -> pa.Table:
    names = table.schema.names  # one that is asked for twice stands there twice
    keyed = pa.table({column.name: table.column(names.index(column.name)) for column in schema.key_columns})
    order = pc.sort_indices(keyed, sort_keys=[(name, "ascending") for name in keyed.schema.names])
    if all(column.nbytes <= _TAKE_BYTES_MAX for column in table.columns):
        return table.take(order)
    return pa.Table.from_batches(_taken_in_parts(table, order.to_numpy()), table.schema)


def _taken_in_parts(table: pa.Table, order: npt.NDArray[np.uint64]) -> Iterator[pa.RecordBatch]:
    """Rows of a table in this order, as batches of bounded size; no column of the table is joined."""
    lengths = np.zeros(table.num_rows, np.int64)
    for column in table.columns:
        if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
            lengths += pc.fill_null(pc.binary_length(column), 0).to_numpy()
    ends = np.cumsum(lengths[order])
    batches = table.to_batches()
    starts = np.cumsum([0, *(batch.num_rows for batch in batches[:-1])])
    begin = 0
    while begin < len(order):
        before = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + _TAKE_BYTES_MAX, "right")))
        rows = order[begin:end].astype(np.int64)
        by_place = np.argsort(rows)
        cuts = np.searchsorted(rows, starts[1:], sorter=by_place)
        found = [
            batch.take(pa.array(rows[members] - start))
            for batch, start, members in zip(batches, starts, np.split(by_place, cuts))
        ]
        joined = pa.concat_batches(found)
        del found
        yield joined.take(pa.array(np.argsort(by_place)))
        begin = end


def _with_key_columns(plan: ScanPlan) -> ScanPlan:
    """The same scan, with the key columns behind the others where they are not among them."""
    wanted = plan.spec.column_ids or plan.schema.column_ids
    extra = tuple(int(c.id) for c in plan.schema.key_columns if c.id not in wanted)
    return replace(plan, spec=replace(plan.spec, column_ids=(*wanted, *extra)))


def key_bound(bound: Any, schema: Schema, what: str) -> bytes:
    """Encoded bytes of a bound of a key range: values of the first key columns, in their order or by name; of the first
    one alone, also bare.

    Raises:
        Rejected: names that are not the first key columns, or values that do not fit.
    """
    if bound is None:
        return b""
    columns = schema.key_columns
    names = [column.name for column in columns]
    if isinstance(bound, Mapping):
        wanted = names[: len(bound)]
        if set(wanted) != set(bound):
            raise Rejected(f"{what}: expected values of the first key columns {wanted}, got {list(bound)}")
        values = [bound[name] for name in wanted]
    else:
        values = list(bound) if isinstance(bound, (tuple, list)) else [bound]
    if not 0 < len(values) <= len(columns):
        raise Rejected(f"{what} {shown(bound)}: {len(values)} values; expected those of {', '.join(names)}")
    for column, value in zip(columns, values):
        why = column.fault(value) if value is not None else f"column {column.name} is None"
        if why:
            raise Rejected(f"{what}: {why}; expected {column.a_type}")
    types = [column.arrow for column in columns[: len(values)]]
    if len(values) == len(columns):
        return keys.encode_tuple(values, types)
    # A string that more columns follow is encoded with its end marked: let one follow, and cut it off again.
    return keys.encode_tuple([*values, 0], [*types, pa.int8()])[:-1]
