"""An open table: write rows, read rows. Made by `AsyncClient.open_table`.

Owns its locations and one client per tablet. Invariant: every row goes to the tablet that the partitioning
names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, overload

import pyarrow as pa

from stele.client import arguments, html, reprs
from stele.client.altering import ALTER_TIMEOUT_S, alter, history_steps, notes_of, range_steps, steps_of
from stele.client.arrow_input import ArrowData
from stele.client.block_writes import BULK_BYTES, BlockWrites, write_all
from stele.client.bulk import BulkWriter, Refusal
from stele.client.durability import Durability, Written, durability_of
from stele.client.holds import TableHold, TableHolds
from stele.client.jobs import JobPart
from stele.client.locations import Locations, TableInfo, WritePlan
from stele.client.lookup import Key, Row
from stele.client.nearby import AgedRow
from stele.client.predicates import Predicates
from stele.client.ranges import Ranges
from stele.client.reads import Bound, TableReads, Wanted
from stele.client.results import WriteResult
from stele.client.row_writes import RowWrites
from stele.client.scan import AsyncScanner
from stele.client.session import AsyncSession
from stele.client.streams import Streams
from stele.client.tablet import Observed, TabletClient
from stele.client.tablet_scan import FlightPool
from stele.model.block import RowOp
from stele.model.errors import Advice, Rejected
from stele.model.holds import BYTES_DEFAULT
from stele.model.partition import PartitionSchema, numbered
from stele.model.partitioning import Partitioning
from stele.model.schema import Schema


class AsyncTable:
    """A table. `timeout_s`: how long one row, block or read may take.

    `reads`: for programs that read tablets themselves, by the `plan` of a scan: Spark, backups.

    Example:
        >>> async def write(table):
        ...     await table.put({"day": date(2024, 5, 8), "name": "roof", "value": 14.0})
        ...     return await table.get((date(2024, 5, 8), "roof"), ["value"])
        >>> client.run(write(client.run(client.asynchronous.open_table("readings"))))
        {'value': 14.0}
    """

    def __init__(
        self,
        locations: Locations,
        streams: Streams,
        flight: FlightPool,
        observed: Observed,
        unsettled: set[AsyncSession],
        timeout_s: float,
    ) -> None:
        info = locations.info
        if info.schema is None:
            raise Rejected(
                f"{info.name} is a key space, not a table", advice=Advice.OPEN_KEYSPACE, name=info.name
            )
        self.locations = locations
        self._ranges = Ranges(locations)
        self._holds = TableHolds(streams.pool, locations, observed.now)
        self._streams = streams
        self._observed = observed
        self._unsettled = unsettled
        self._timeout_s = timeout_s
        self._tablets: dict[int, TabletClient] = {}
        self._blocks = BlockWrites(self, self._ranges, timeout_s)
        self.reads = TableReads(self, self._ranges, streams, flight, observed, timeout_s=timeout_s)
        self._rows = RowWrites(info.schema, self._ranges, streams, self.tablet, timeout_s)

    @property
    def partition_schema(self) -> PartitionSchema:
        """How the table is split, by column ids, as the masters last told it."""
        return self._ranges.now

    @property
    def chosen(self) -> str:
        """How many tablets the masters chose when this client created the table without partitions, and why. Else ""."""
        return self.locations.chosen

    @property
    def name(self) -> str:
        """The table's name, as the masters last told it."""
        return self.locations.info.name

    @property
    def schema(self) -> Schema:
        """The columns and key that this table knows. See `refresh`."""
        return self._rows.schema

    async def refresh(self) -> None:
        """Ask the masters for the table's present columns and tablets.

        An open table learns of changes by itself when it must. That is when a node refuses a write or a scan,
        and when a row has a column that it does not know.

        Raises:
            Rejected: NOT_FOUND: the table was deleted.
            SteleError: no master answers.
        """
        self._streams.ensure_open()
        await self.locations.refresh()
        self._rows.take_news()

    async def alter(
        self,
        *,
        add: Iterable[Sequence[Any]] = (),
        drop: Sequence[str] | str = (),
        rename: Mapping[str, str] = MappingProxyType({}),
        defaults: Mapping[str, str | None] = MappingProxyType({}),
        rename_to: str | None = None,
        add_ranges: Iterable[Sequence[Any]] = (),
        drop_ranges: Iterable[Sequence[Any]] = (),
        owner: str | None = None,
        comment: str | None = None,
        history_s: float | None = None,
        timeout_s: float = ALTER_TIMEOUT_S,
    ) -> None:
        """Change the table's columns, ranges, notes or name, while it is read and written. Returns once all its tablets
        have the change.

        `add`: columns as `Schema.make` takes them: (name, type[, nullable[, default]]). Stored rows get the
        default, else null. `drop`: names of columns; their values are gone. `rename`: new names by present
        names. `defaults`: JSON text by column name, None for no default; stored rows keep what they have.
        `rename_to`: the table's new name. Drops come first, new columns last.

        `add_ranges`, `drop_ranges`: pairs like (0, 1000), from inclusive, to exclusive, None for no bound. Values
        of several range columns are tuples. No later write to a dropped range is acknowledged.

        `owner`, `comment`: other notes for people; "" removes one. `history_s`: how many seconds replaced and deleted
        rows stay readable at older snapshots, 60 to ten years; 0: the default of 15 minutes. Rows that are gone already do
        not come back.

        Raises:
            Rejected: lists all faults; nothing was changed. ALREADY_PRESENT: the new name is used.
            Retryable: NOT_READY: the change is made, but a tablet has not followed within `timeout_s`; it will.
                UNKNOWN_OUTCOME: ranges are dropped, but some nodes did not answer; rows may still be written there.
        """
        self._streams.ensure_open()
        ranges = range_steps(self.partition_schema, self.schema, add_ranges, drop_ranges)
        steps = [*steps_of(add, drop, rename, defaults), *ranges, *history_steps(history_s)]
        notes = notes_of(owner, comment)
        await alter(self.locations, steps, rename_to, notes, arguments.seconds(timeout_s, "timeout_s"))
        self._rows.take_news()

    @property
    def info(self) -> TableInfo:
        """The table as the masters last described it."""
        return self.locations.info

    @property
    def partitioning(self) -> tuple[Partitioning, ...]:
        """How the table is split, in the form that `create_table` takes. Empty: one tablet."""
        return self.info.partitioning

    @property
    def arrow_schema(self) -> pa.Schema:
        """The Arrow schema of all columns."""
        return self.schema.to_arrow()

    def __repr__(self) -> str:
        columns = reprs.many(len(self.schema.columns), "column")
        tablets = reprs.many(self.partition_schema.tablets, "tablet")
        return reprs.shown_as(
            self, f"{self.name}: {columns}, {tablets}", self._streams.pool.identity.cluster_id
        )

    def _repr_html_(self) -> str:
        return html.of_table(self.info)

    @overload
    async def put(self, row: Row, *, durability: None = None) -> int: ...
    @overload
    async def put(self, row: Row, *, durability: str) -> Written: ...

    async def put(self, row: Row, *, durability: str | None = None) -> int | Written:
        """Upsert one row, columns by name. Returns the hybrid time of the write. Concurrent callers share
        messages.

        A datetime without a time zone is UTC, here and wherever a value of a timestamp column is given.

        `durability`: "synced" or "memory", see `stele.Durability`. Then a `Written` says what the write got.
        Rows of concurrent callers share a block. It gets the highest durability that one of them asks for.

        Raises:
            Rejected: the row is wrong, or the durability.
            Retryable: UNKNOWN_OUTCOME: it may have been written. NO_QUORUM and other codes: it was not.
            Closed: the client was closed; nothing was written. Every other call may raise it too.
        """
        enough = None if durability is None else durability_of(durability)
        written: int | Written = await self._rows.put(RowOp.UPSERT, row, enough)
        return written

    upsert = put

    async def insert(self, row: Row) -> int:
        """Insert one row. Raises what `put` raises; ALREADY_PRESENT if its key exists."""
        return int(await self._rows.put(RowOp.INSERT, row))

    async def update(self, row: Row) -> int:
        """Change the given columns of the row with this key. Raises what `put` raises; NOT_FOUND if there is
        none."""
        return int(await self._rows.put(RowOp.UPDATE, row))

    async def delete(self, row: Row) -> int:
        """Delete the row with this key. Raises what `put` raises; NOT_FOUND if there is none."""
        return int(await self._rows.put(RowOp.DELETE, row))

    async def apply(self, op: RowOp | str, row: Row) -> int:
        """Write one row with any operation, also the _ignore ones. Raises what `put` raises."""
        return int(await self._rows.put(arguments.row_op(op), row))

    def new_session(
        self,
        *,
        flush_interval_s: float = 1.0,
        buffer_bytes: int = 8 << 20,
        timeout_s: float | None = None,
        durability: str = Durability.SYNCED,
    ) -> AsyncSession:
        """A session for one caller that writes many rows in order. `durability`: as for `put`, for its blocks."""
        self._streams.ensure_open()
        block_s = arguments.seconds_or(timeout_s, self._timeout_s, "timeout_s")
        schema, enough = self.schema, durability_of(durability)
        return AsyncSession(
            self.name,
            schema,
            lambda op: self._blocks.of(schema, op, block_s, durability=enough),
            self._ensure_usable,
            self._unsettled,
            cluster_id=self._streams.pool.identity.cluster_id,
            flush_interval_s=arguments.seconds(flush_interval_s, "flush_interval_s", zero=True),
            buffer_bytes=arguments.whole_number(buffer_bytes, "buffer_bytes", least=1),
        )

    async def write_arrow(
        self,
        data: ArrowData,
        op: RowOp | str = RowOp.UPSERT,
        *,
        timeout_s: float | None = None,
        buffer_bytes: int = BULK_BYTES,
        on_rows: Callable[[int], None] | None = None,
        raise_row_errors: bool = True,
        part: JobPart | None = None,
        durability: str = Durability.SYNCED,
    ) -> WriteResult:
        """Write Arrow data in blocks: tablets in parallel, the blocks of one tablet one after another.

        `data`: pyarrow's, a frame of pandas or polars, or anything else that gives an Arrow stream. A named
        index of a pandas frame is written as columns. `timeout_s` is for each block. `on_rows` is called with
        the number of rows of each acknowledged block.

        `part`: part of a job, see `stele.Job`. A row whose key an earlier attempt at this part has written counts as
        written, and changes nothing. `durability`: as for `put`, for each block; the result says what they got.

        Raises:
            RowErrors: rows were refused and the others are written; not with `raise_row_errors` False.
            Rejected: columns do not fit the table. Nothing is written, except earlier batches of an iterator.
                JOB_TOO_OLD: a tablet no longer knows what the job has written. UNSUPPORTED_VERSION: a part of a job, and
                an upgrade is not finalized.
            SteleError: a whole block was not written; other blocks may be.
        """
        writer = self.arrow_writer(
            op,
            timeout_s=timeout_s,
            buffer_bytes=buffer_bytes,
            on_rows=on_rows,
            part=part,
            durability=durability,
        )
        result = await write_all(writer, data)
        return result.raise_for_errors() if raise_row_errors else result

    def arrow_writer(
        self,
        op: RowOp | str | None = RowOp.UPSERT,
        *,
        timeout_s: float | None = None,
        buffer_bytes: int = BULK_BYTES,
        on_rows: Callable[[int], None] | None = None,
        part: JobPart | None = None,
        on_refused: Refusal | None = None,
        durability: str = Durability.SYNCED,
    ) -> BulkWriter:
        """The writer behind `write_arrow`, for batches that do not come from the event loop. `op`: None if each row has an
        operation of its own. `on_refused`: see BulkWriter."""
        self._streams.ensure_open()
        return self._blocks.writer(
            op,
            timeout_s=timeout_s,
            buffer_bytes=buffer_bytes,
            on_rows=on_rows,
            part=part,
            on_refused=on_refused,
            durability=durability,
        )

    @property
    def takes_jobs(self) -> bool:
        """Whether parts of jobs can be written: every member of the cluster knows them."""
        return self._blocks.takes_jobs

    @overload
    async def get(
        self,
        key: Key,
        columns: Sequence[str] | None = None,
        *,
        max_staleness: None = None,
        snapshot: int | datetime | None = None,
    ) -> dict[str, Any] | None: ...
    @overload
    async def get(
        self, key: Key, columns: Sequence[str] | None = None, *, max_staleness: float
    ) -> AgedRow: ...

    async def get(
        self,
        key: Key,
        columns: Sequence[str] | None = None,
        *,
        max_staleness: float | None = None,
        snapshot: int | datetime | None = None,
    ) -> dict[str, Any] | AgedRow | None:
        """The present row with this key (linearizable); None if there is none.

        `key`: a mapping of the key columns, their values in order, or a bare value if there is one key
        column. A datetime without a time zone is UTC, and results have UTC. Python has no dates outside the
        years 1 to 9999. Such a date is returned as its number of days since 1970, such a time as
        microseconds.

        `max_staleness`: the row may be up to this many seconds old. Then the nearest replica answers,
        followers first, and an `AgedRow` says how old the row is. The row has all that this client has
        written, and later reads are never older. `snapshot`: the row as it was at that time, from any
        replica.

        Raises:
            Rejected: a key that does not fit, or an unknown column.
            SteleError: no leader answered in time.
        """
        found: dict[str, Any] | AgedRow | None = await self.reads.get(key, columns, max_staleness, snapshot)
        return found

    @overload
    async def get_many(
        self,
        keys: Iterable[Key],
        columns: Sequence[str] | None = None,
        *,
        max_staleness: None = None,
        snapshot: int | datetime | None = None,
    ) -> list[dict[str, Any] | None]: ...
    @overload
    async def get_many(
        self, keys: Iterable[Key], columns: Sequence[str] | None = None, *, max_staleness: float
    ) -> list[AgedRow]: ...

    async def get_many(
        self,
        keys: Iterable[Key],
        columns: Sequence[str] | None = None,
        *,
        max_staleness: float | None = None,
        snapshot: int | datetime | None = None,
    ) -> list[Any]:
        """The present rows with these keys, in the same order; None for each key without a row.

        Each row is as `get` would give it, with all that was acknowledged before this call. The rows may be
        of different moments: use `scan` to read all at one moment. Many keys leave with one request, so this
        is many times faster than one `get` after another.

        `max_staleness`, `snapshot`: as for `get`. With `max_staleness` there is an `AgedRow` for each key.

        Raises:
            Rejected: a key that does not fit, or an unknown column. No rows are returned.
            SteleError: no leader of a tablet answered in time.
        """
        return await self.reads.get_many(keys, columns, max_staleness, snapshot)

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
        max_staleness: float | None = None,
        timeout_s: float | None = None,
    ) -> AsyncScanner:
        """A scan of all tablets at one snapshot. Read it with `batches`, `to_table`, `to_pandas` or `count`.

        `predicates`: ("delay", ">", 30), ("origin", "in", ["JFK"]), ("tailnum", "is_null"), or text such as
        "delay > 30 AND origin IN ('JFK')". One or several; all must be true. `lower` (inclusive) and `upper`
        (exclusive): values of the first key columns, in order or by name.

        `snapshot`: a hybrid time or a datetime; default: now, and never below what this client has seen
        written. 0, the timestamp of a write that sent nothing, means now too. A datetime or time without a
        zone is UTC, also in predicates and bounds. `max_staleness`: read followers first, at a snapshot up to
        this many seconds old. `timeout_s`: how long to wait from one batch of a tablet to the next.

        Raises:
            Rejected: an unknown column, or a value that does not fit.
            Retryable: NOT_READY: the table is being created.
        """
        wanted = Wanted(columns, predicates, lower, upper, limit, ordered, snapshot, max_staleness)
        return self.reads.scan(wanted, timeout_s)

    def changes(
        self,
        after: int | datetime,
        upto: int | datetime | None = None,
        columns: Sequence[str] | None = None,
        *,
        every: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncScanner:
        """What was written to the table after one time and up to another (default: now), deletes too.

        Rows have the key columns and these `columns` (default: all), then `_op`, "upsert" or "delete", and `_ts`, the
        hybrid time of the write. In deletes all columns but the key are null. Of each row only the newest change is
        returned; with `every`, all changes, oldest first. Each tablet's rows come in key order.

        `after`, `upto`: hybrid times or datetimes, as `scan` takes them. Begin with the snapshot of a scan, then give the
        `snapshot` of the last call. `timeout_s`: as for `scan`.

        Raises:
            Rejected: an unknown column, or times in the wrong order. While rows are read: CURSOR_LOST, the table's history
                (`history_s`) no longer reaches back to `after`. Begin again with a scan.
            Retryable: NOT_READY: the table is being created.
        """
        return self.reads.changes(after, upto, columns, every=every, timeout_s=timeout_s)

    async def hold(
        self,
        name: str,
        since: int | datetime | None = None,
        *,
        expires_in_s: float = 3600.0,
        max_bytes: int = BYTES_DEFAULT,
        tablets: Collection[str] | None = None,
        timeout_s: float | None = None,
    ) -> TableHold:
        """Keep the table's history from a time on, so that all later snapshots and changes stay readable.

        It lasts until it expires, is released, or keeps more than `max_bytes` of old rows in a replica of a
        tablet. Then it is broken, and `changes` from its time on raises CURSOR_LOST. If it is taken again
        under the same name, a new hold begins.

        `name`: letters, digits, dots, dashes and underscores. `since`: a hybrid time or a datetime within the
        table's history; default: now. `tablets`: ids of some of its tablets; default: all. Ranges that are
        added later are not held. A tablet has 16 holds at most.

        Raises:
            Rejected: CURSOR_LOST: history from `since` on is gone in part. TOO_LARGE: there are too many holds.
                UNSUPPORTED_VERSION: an upgrade is not finalized.
            Retryable: not all tablets answered within `timeout_s`. Take it again; what was taken expires by itself.
        """
        self._streams.ensure_open()
        seconds = arguments.seconds_or(timeout_s, self._timeout_s, "timeout_s")
        return await self._holds.take(name, since, expires_in_s, max_bytes, tablets, seconds)

    async def renew_hold(
        self,
        hold: TableHold | str,
        *,
        expires_in_s: float = 3600.0,
        since: int | datetime | None = None,
        timeout_s: float | None = None,
    ) -> TableHold:
        """Have a hold expire later; with `since`, also keep history only from this later time on.

        `hold`: what `hold` or `holds` returned, or a name. If it is a name, every tablet of the table must
        have the hold.

        Raises:
            Rejected: CURSOR_LOST: it is gone or broken in some tablet, so some changes may be gone. Begin again with a scan.
            Retryable: not all tablets answered within `timeout_s`.
        """
        self._streams.ensure_open()
        seconds = arguments.seconds_or(timeout_s, self._timeout_s, "timeout_s")
        return await self._holds.renew(hold, expires_in_s, since, seconds)

    async def release_hold(self, name: str, *, timeout_s: float | None = None) -> None:
        """End a hold. A hold that does not exist is no error.

        Raises:
            Retryable: some tablets did not answer within `timeout_s`. There the hold expires by itself.
        """
        self._streams.ensure_open()
        await self._holds.release(name, arguments.seconds_or(timeout_s, self._timeout_s, "timeout_s"))

    async def holds(self, *, timeout_s: float | None = None) -> list[TableHold]:
        """The holds on the table's history, by name. Raises Retryable if not all tablets answered within `timeout_s`."""
        self._streams.ensure_open()
        return await self._holds.all(arguments.seconds_or(timeout_s, self._timeout_s, "timeout_s"))

    def plan_write(self) -> WritePlan:
        """A plan with which `AsyncClient.open_planned` opens this table in another process.

        Raises:
            Retryable: NOT_READY: the table is being created.
        """
        tablets = self.locations.by_ordinal([ordinal for ordinal, _ in numbered(self.partition_schema)])
        identity, version = self._streams.pool.identity, self.locations.cluster_version
        return WritePlan(identity.cluster_id, self.info, tuple(tablets), identity.fork_id, version)

    async def wait_ready(self, *, timeout_s: float = 30.0) -> None:
        """Wait until every tablet has a leader.

        Raises:
            Retryable: NOT_READY after `timeout_s`, also if no master answers.
        """
        await self.locations.wait_led(timeout_s)

    async def close(self) -> None:
        """Wait for single rows in flight that somebody still waits for."""
        await self._rows.close()

    def _ensure_usable(self) -> None:
        """Raises Closed if the client was closed; Rejected NOT_FOUND if the table is known to be deleted."""
        self._streams.ensure_open()
        self.locations.ensure_there()

    def tablet(self, ordinal: int) -> TabletClient:
        """The client of one tablet. Raises SteleError."""
        (place,) = self.locations.by_ordinal([ordinal])
        client = self._tablets.get(ordinal)
        if client is None or client.place is not place:
            client = self._tablets[ordinal] = TabletClient(
                place, self.locations, self._streams, self._observed
            )
        return client
