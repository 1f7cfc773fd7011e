"""Scans: a table's rows at one snapshot, from several tablets at once, as batches, an Arrow table or a pandas
frame.

Made by an open table. Each tablet is read in a thread (tablet_scan.py). Invariant: all tablets are read at
one snapshot, and a bounded number of batches is in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import replace
from threading import Semaphore
from typing import Any, TypeVar

import pyarrow as pa

from stele.client import html, reprs
from stele.client.key_order import in_key_order
from stele.client.locations import Locations, TabletPlace
from stele.client.preparing import PREPARE_AFTER_S
from stele.client.tablet_scan import PARALLEL_TABLETS, FlightPool, ScanPlan, TabletScan, with_key_columns
from stele.model.clock import physical_us
from stele.model.errors import Code, Rejected
from stele.model.rows import python_rows
from stele.rpc.threads import ReaderThreads, in_thread, main_thread_ended

T = TypeVar("T")
_QUEUE_BATCHES = 8
_LOOK_S = 0.5  # how often a thread that waits for room checks whether the reader is still there


class AsyncScanner:
    """A scan, ready to be read any number of times: by batches, as an Arrow table, or as a pandas frame.

    Example:
        >>> async def names(table):
        ...     return sorted([row["name"] async for row in table.scan()])
        >>> client.run(names(client.run(client.asynchronous.open_table("readings"))))
        ['cellar', 'roof']
    """

    def __init__(
        self,
        pool: FlightPool,
        plan: ScanPlan,
        locations: Locations,
        *,
        ordered: bool,
        timeout_s: float,
        replan: Callable[[], Awaitable[ScanPlan]] | None = None,
        tablets: Callable[[bool], Awaitable[tuple[TabletPlace, ...]]] | None = None,
        prepare: Callable[[ScanPlan], Awaitable[None]] | None = None,
    ) -> None:
        """`replan`: makes the plan again if the table's columns have changed since; raises an error if it
        cannot.

        `tablets(gone)`: returns the tablets to read now, since ranges may have been added. `gone`: a range
        was dropped.

        `prepare(plan)`: has the leaders prepare the snapshot, so that other replicas can serve it, too."""
        self._tablets = tablets
        self._prepare = prepare
        self.plan = plan
        self._replan = replan
        self._pool = pool
        self._locations = locations
        self._ordered = ordered
        self._timeout_s = timeout_s
        self._made_us = time.time_ns() // 1_000

    @property
    def age_s(self) -> float:
        """How old the snapshot was when this scan was made, in seconds by this machine's clock; 0 if it was not in the past."""
        return max(0, self._made_us - physical_us(self.plan.snapshot)) / 1e6

    @property
    def snapshot(self) -> int:
        """The hybrid time at which the scan reads. A scan of changes reads up to it: give it to the next call of
        `changes` as `after`."""
        return self.plan.snapshot

    async def __aiter__(self) -> AsyncGenerator[dict[str, Any], None]:
        """Row after row, as dicts with the values that `get` returns. Raises what `batches` raises."""
        async with contextlib.aclosing(self.batches()) as batches:
            async for batch in batches:
                for row in python_rows(batch):
                    yield row

    def __repr__(self) -> str:
        plan, name = self.plan, self._locations.info.name
        columns, tablets = reprs.named(plan.arrow_schema.names), reprs.read(len(plan.tablets), plan.ranges)
        what = f"of table {name}: columns {columns}; {tablets} at {reprs.at(plan.snapshot)}"
        return reprs.shown_as(self, what, plan.cluster_id)

    def _repr_html_(self) -> str:
        return html.of_scan(self.plan)

    async def batches(self) -> AsyncGenerator[pa.RecordBatch, None]:
        """Record batches as they arrive, from several tablets at once, with a bounded number in memory.

        In key order if the scan is ordered. A hash-partitioned table's tablets are then first merged in
        memory.

        Raises:
            SteleError: no replica of a tablet can serve it.
        """
        given = False
        await self._take_ranges(gone=False)
        try:
            async with contextlib.aclosing(self._read_batches()) as batches:
                async for batch in batches:
                    given = True
                    yield batch
        except Rejected as exc:
            if given:
                raise
            await self._plan_again(exc)
        else:
            return
        async with contextlib.aclosing(self._read_batches()) as batches:
            async for batch in batches:
                yield batch

    async def _plan_again(self, error: Rejected) -> None:
        """Plan again after a node refused the scan because columns or ranges have changed. Raises `error` if
        they are not the cause."""
        if error.code is Code.TABLET_DELETED and self._tablets is not None:
            await self._take_ranges(gone=True)
            return
        if error.code is not Code.SCHEMA_MISMATCH or self._replan is None:
            raise error
        self.plan = await self._replan()

    async def _take_ranges(self, *, gone: bool) -> None:
        if self._tablets is not None:
            self.plan = replace(self.plan, tablets=await self._tablets(gone))
        if self._prepare is not None and self._pool.zone and not self.plan.any_replica:
            await self._prepare(self.plan)

    async def _read_batches(self) -> AsyncGenerator[pa.RecordBatch, None]:
        """As `batches`, by the present plan."""
        if self._ordered and len(self.plan.tablets) > 1:
            for batch in (await self._read_table()).to_batches():
                yield batch
            return
        # Batches are passed on as they arrive, so a broken scan must be able to resume, which needs key
        # order.
        plan = replace(self.plan, spec=replace(self.plan.spec, ordered=True))
        queue: asyncio.Queue[pa.RecordBatch | BaseException | None] = asyncio.Queue()
        room, places = Semaphore(_QUEUE_BATCHES), asyncio.Semaphore(PARALLEL_TABLETS)
        scans = self._scans(plan)
        loop = asyncio.get_running_loop()

        def stop() -> None:
            for scan in scans:
                scan.stop()
                room.release()  # let its thread check whether to stop

        def hand(scan: TabletScan, batch: pa.RecordBatch | None) -> bool:
            """Called in a reading thread: pass a batch to the reader. False if the reader wants no more.

            The thread must not wait for a coroutine: a loop that ends with an unclosed scan runs no more of
            them.
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
                if scan.stopped:  # not stopped by the reader, which would not wait any more
                    end = main_thread_ended()
            except Exception as exc:  # noqa: BLE001 - raised to the reader of the batches
                end = exc
            queue.put_nowait(end)

        threads = ReaderThreads("stele-batches", stop)

        tasks = [asyncio.create_task(run(scan)) for scan in scans]
        left, limit = len(scans), self.plan.spec.limit
        preparing = self._prepare_soon(plan)
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
            preparing.cancel()
            await asyncio.gather(*tasks, preparing, return_exceptions=True)

    async def to_table(self) -> pa.Table:
        """All rows as one Arrow table. Raises what `batches` raises."""
        await self._take_ranges(gone=False)
        try:
            return await self._read_table()
        except Rejected as exc:
            await self._plan_again(exc)
        return await self._read_table()

    async def _read_table(self) -> pa.Table:
        """As `to_table`, by the present plan."""
        merge = self._ordered and len(self.plan.tablets) > 1
        plan = with_key_columns(self.plan) if merge else self.plan
        places = asyncio.Semaphore(PARALLEL_TABLETS)
        scans = self._scans(plan)

        left = None if merge else plan.spec.limit

        async def run(scan: TabletScan) -> list[pa.RecordBatch]:
            nonlocal left
            async with places:
                if scan.stopped:
                    return []
                found = await self._pool.run(_collect, scan)
                if left is not None:
                    left -= sum(batch.num_rows for batch in found)
                    if left <= 0:  # the others may end where they are
                        for other in scans:
                            other.stop()
                return found

        tasks = [asyncio.create_task(run(scan)) for scan in scans]
        preparing = self._prepare_soon(plan)
        try:
            collected = await asyncio.gather(*tasks)
        except BaseException:
            for scan in scans:
                scan.stop()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        finally:
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)
        table = pa.Table.from_batches([b for part in collected for b in part], plan.arrow_schema)
        if merge:
            table = await in_thread(in_key_order, table, plan.schema)
            table = table.select(range(len(self.plan.arrow_schema)))
        return table if plan.spec.limit is None else table.slice(0, plan.spec.limit)

    async def to_pandas(self) -> Any:
        """All rows as a pandas frame.

        Raises:
            Rejected: Python has no value for a date outside the years 1 to 9999; use `to_table`.
        """
        return await in_thread(as_pandas, await self.to_table())

    async def count(self) -> int:
        """The number of rows. Reads one narrow column."""
        key = tuple(int(column_id) for column_id in self.plan.schema.key_column_ids)
        changes = (
            self.plan.spec.changes is not None
        )  # they are read in key order, and a broken scan goes on by the key
        spec = replace(self.plan.spec, column_ids=key if changes else key[:1])
        narrow = AsyncScanner(
            self._pool,
            replace(self.plan, spec=spec),
            self._locations,
            ordered=False,
            timeout_s=self._timeout_s,
            tablets=self._tablets,
            prepare=self._prepare,
        )
        return int((await narrow.to_table()).num_rows)

    def _prepare_soon(self, plan: ScanPlan) -> asyncio.Task[None]:
        """Have the snapshot prepared if the scan still runs after PREPARE_AFTER_S. Then any replica can serve it, so the
        scan does not wait for an election if a leader is lost. The caller cancels this task when the scan ends."""

        async def later() -> None:
            await asyncio.sleep(PREPARE_AFTER_S)
            if self._prepare is not None:
                await self._prepare(plan)

        return asyncio.create_task(later())

    def _scans(self, plan: ScanPlan) -> list[TabletScan]:
        """A TabletScan for each tablet of `plan`. Threads read them."""
        locate = _locator(self._locations)
        return [TabletScan(self._pool, plan, tablet, self._timeout_s, locate) for tablet in plan.tablets]


def _locator(locations: Locations) -> Callable[[], None]:
    """Return a function that scans in other threads call. It has the masters asked where the tablets are."""
    loop = asyncio.get_running_loop()

    def locate() -> None:
        locations.ensure_there()
        with contextlib.suppress(RuntimeError):  # the client was closed meanwhile, and its loop with it
            loop.call_soon_threadsafe(locations.refresh_soon)

    return locate


async def read_tablet(
    pool: FlightPool,
    locations: Locations,
    plan: ScanPlan,
    tablet: TabletPlace,
    timeout_s: float,
    read: Callable[[Iterator[pa.RecordBatch]], T],
) -> T:
    """Return the result of `read(batches)` for one tablet of an ordered plan. `TableReads.read_tablet` has
    the details."""
    scan = TabletScan(pool, plan, tablet, timeout_s, _locator(locations))

    def batches() -> Iterator[pa.RecordBatch]:
        yield from (batch for batch in scan if batch is not None)
        if scan.stopped:  # a stopped scan ends as one that is complete
            raise main_thread_ended()

    threads = ReaderThreads("stele-tablet", scan.stop)
    reading = asyncio.ensure_future(pool.run(lambda _: read(batches()), scan, threads))
    try:
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        scan.stop()
        await asyncio.wait([reading])
        if not reading.cancelled():
            reading.exception()  # that it was stopped
        raise


def as_pandas(table: pa.Table) -> Any:
    """A pandas frame of a table's rows. Raises Rejected; see `AsyncScanner.to_pandas`."""
    try:
        return table.to_pandas()
    except ValueError as exc:
        names = ", ".join(field.name for field in table.schema if pa.types.is_date(field.type))
        raise Rejected(
            f"columns {names}: Python has no value for one of their dates ({exc}); "
            "use to_table().to_pandas(date_as_object=False)"
        ) from exc


def _collect(scan: TabletScan) -> list[pa.RecordBatch]:
    found: list[pa.RecordBatch] = []
    for batch in scan:
        if batch is None:
            found.clear()
        else:
            found.append(batch)
    return found
