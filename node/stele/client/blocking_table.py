"""A table of the blocking client. Each method runs the asynchronous method of the same name and
waits.

Invariant: the only state here is the client. A call raises what the asynchronous method raises.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

import pyarrow as pa

from stele.client import reprs
from stele.client.altering import ALTER_TIMEOUT_S
from stele.client.arrow_input import ArrowData, batches_of
from stele.client.block_writes import BULK_BYTES
from stele.client.blocking_scan import Scanner
from stele.client.blocking_session import Session
from stele.client.durability import Durability, Written
from stele.client.holds import TableHold
from stele.client.jobs import JobPart
from stele.client.lookup import Key, Row
from stele.client.nearby import AgedRow
from stele.client.predicates import Predicates
from stele.client.reads import Bound
from stele.client.results import WriteResult
from stele.client.session import AsyncSession
from stele.client.table import AsyncTable
from stele.model.block import RowOp
from stele.model.holds import BYTES_DEFAULT
from stele.model.partitioning import Partitioning
from stele.model.schema import Schema

if TYPE_CHECKING:
    from stele.client.blocking import Client


class Table:
    """An open table. Every method waits for its answer.

    Example:
        >>> table = client.open_table("readings")
        >>> table.get((date(2024, 5, 1), "roof"), ["value"])
        {'value': 21.5}
    """

    def __init__(self, client: Client, table: AsyncTable) -> None:
        self._client = client
        self.asynchronous = table

    def __repr__(self) -> str:
        return reprs.blocking(self.asynchronous)

    @property
    def chosen(self) -> str:
        """How many tablets the masters chose when this client created the table without partitions, and why. Else "".

        Example:
            >>> client.create_table("memos", stele.Schema.make([("n", "int64")], ["n"])).chosen[:10]
            'one tablet'
        """
        return self.asynchronous.chosen

    @property
    def name(self) -> str:
        """The table's name.

        Example:
            >>> table.name
            'readings'
        """
        return self.asynchronous.name

    @property
    def schema(self) -> Schema:
        """The table's schema.

        Example:
            >>> [(column.name, column.type) for column in table.schema.columns]
            [('day', 'date'), ('name', 'string'), ('value', 'double')]
        """
        return self.asynchronous.schema

    @property
    def partitioning(self) -> tuple[Partitioning, ...]:
        """How the table is split, in the form that `create_table` takes. Empty: one tablet.

        Example:
            >>> table.partitioning
            (HashPartitioning(columns=('day', 'name'), buckets=4, seed=0),)
        """
        return self.asynchronous.partitioning

    @property
    def arrow_schema(self) -> pa.Schema:
        """The Arrow schema of all columns.

        Example:
            >>> table.arrow_schema.names
            ['day', 'name', 'value']
        """
        return self.asynchronous.arrow_schema

    def _repr_html_(self) -> str:
        return self.asynchronous._repr_html_()

    def alter(
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

        Example:
            >>> schema = stele.Schema.make([("n", "int64"), ("text", "string", True)], key=["n"])
            >>> notes = client.create_table("notes", schema)
            >>> written_at = notes.put({"n": 1, "text": "first"})
            >>> notes.alter(add=[("stars", "int8", False, "0")], rename={"text": "said"})
            >>> notes.get(1)
            {'n': 1, 'said': 'first', 'stars': 0}
        """
        self._client.run(
            self.asynchronous.alter(
                add=add,
                drop=drop,
                rename=rename,
                defaults=defaults,
                rename_to=rename_to,
                add_ranges=add_ranges,
                drop_ranges=drop_ranges,
                owner=owner,
                comment=comment,
                history_s=history_s,
                timeout_s=timeout_s,
            )
        )

    def refresh(self) -> None:
        """Ask the masters for the table's present columns, which another program may have changed.

        An open table learns of changes by itself when it must. That is when a node refuses a write or a scan,
        and when a row has a column that it does not know.

        Raises:
            Rejected: NOT_FOUND: the table was deleted.
            SteleError: no master answers.

        Example:
            >>> table.refresh()
            >>> table.schema.version
            1
        """
        self._client.run(self.asynchronous.refresh())

    @overload
    def put(self, row: Row, *, durability: None = None) -> int: ...
    @overload
    def put(self, row: Row, *, durability: str) -> Written: ...

    def put(self, row: Row, *, durability: str | None = None) -> int | Written:
        """Upsert one row, columns by name. Returns the hybrid time of the write.

        A datetime without a time zone is UTC, here and wherever a value of a timestamp column is given.

        `durability`: "synced" or "memory", see `stele.Durability`. Then a `Written` says what the write got.
        Rows of concurrent callers share a block. It gets the highest durability that one of them asks for.

        Raises:
            Rejected: the row is wrong, or the durability.
            Retryable: UNKNOWN_OUTCOME: it may have been written. NO_QUORUM and other codes: it was not.
            Closed: the client was closed; nothing was written. Every other call may raise it too.

        Example:
            >>> written_at = table.put({"day": date(2024, 5, 2), "name": "roof", "value": 20.0})
            >>> table.get((date(2024, 5, 2), "roof"), ["value"])
            {'value': 20.0}
        """
        if durability is None:
            return self._client.run(self.asynchronous.put(row))
        return self._client.run(self.asynchronous.put(row, durability=durability))

    upsert = put

    def insert(self, row: Row) -> int:
        """Insert one row. Returns its hybrid time. Raises what `put` raises; Rejected ALREADY_PRESENT if its
        key exists.

        Example:
            >>> try:
            ...     table.insert({"day": date(2024, 5, 1), "name": "roof", "value": 0.0})
            ... except stele.Rejected as error:
            ...     print(error.code)
            ALREADY_PRESENT
        """
        return self._client.run(self.asynchronous.insert(row))

    def update(self, row: Row) -> int:
        """Change the given columns of the row with this key. Returns its hybrid time.

        Raises what `put` raises; Rejected NOT_FOUND if the key does not exist.

        Example:
            >>> written_at = table.update({"day": date(2024, 5, 1), "name": "roof", "value": None})
            >>> table.get((date(2024, 5, 1), "roof"), ["value"])
            {'value': None}
        """
        return self._client.run(self.asynchronous.update(row))

    def delete(self, row: Row) -> int:
        """Delete the row with this key. Returns its hybrid time.

        Raises what `put` raises; Rejected NOT_FOUND if the key does not exist.

        Example:
            >>> written_at = table.delete({"day": date(2024, 5, 1), "name": "roof"})
            >>> table.get((date(2024, 5, 1), "roof")) is None
            True
        """
        return self._client.run(self.asynchronous.delete(row))

    @overload
    def get(
        self,
        key: Key,
        columns: Sequence[str] | None = None,
        *,
        max_staleness: None = None,
        snapshot: int | datetime | None = None,
    ) -> dict[str, Any] | None: ...
    @overload
    def get(self, key: Key, columns: Sequence[str] | None = None, *, max_staleness: float) -> AgedRow: ...

    def get(
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

        Raises Rejected for a key or column that does not fit, Retryable if no leader answered in time.

        Example:
            >>> table.get({"day": date(2024, 5, 1), "name": "cellar"})
            {'day': datetime.date(2024, 5, 1), 'name': 'cellar', 'value': 12.0}
        """
        read = self.asynchronous.reads.get(key, columns, max_staleness, snapshot)
        found: dict[str, Any] | AgedRow | None = self._client.run(read)
        return found

    @overload
    def get_many(
        self,
        keys: Iterable[Key],
        columns: Sequence[str] | None = None,
        *,
        max_staleness: None = None,
        snapshot: int | datetime | None = None,
    ) -> list[dict[str, Any] | None]: ...
    @overload
    def get_many(
        self, keys: Iterable[Key], columns: Sequence[str] | None = None, *, max_staleness: float
    ) -> list[AgedRow]: ...

    def get_many(
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

        Raises Rejected for a key or column that does not fit, Retryable if no leader answered in time.

        Example:
            >>> table.get_many([(date(2024, 5, 1), "cellar"), (date(2024, 5, 1), "attic")], ["value"])
            [{'value': 12.0}, None]
        """
        return self._client.run(self.asynchronous.reads.get_many(keys, columns, max_staleness, snapshot))

    def write_arrow(
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
        """Write Arrow data in blocks. Returns once all are acknowledged. `timeout_s` is for each block. At
        most `buffer_bytes` of rows are queued or in flight.

        `data`: pyarrow's, a frame of pandas or polars, or anything else that gives an Arrow stream, such as a
        scan. A named index of a pandas frame is written as columns.

        `on_rows` is called in the client's thread with the number of rows of each acknowledged block.

        `part`: part of a job, see `stele.Job`. A row whose key an earlier attempt at this part has written counts as
        written, and changes nothing. `durability`: as for `put`, for each block; the result says what they got.

        Raises:
            RowErrors: rows were refused and the others are written; not with `raise_row_errors` False.
            Rejected: columns do not fit the table. Nothing is written, except earlier batches of an iterator.
            SteleError: a whole block was not written; other blocks may be.

        Example:
            >>> rows = pa.table({"day": [date(2024, 5, 3)] * 2, "name": ["roof", "cellar"], "value": [19.0, 12.5]})
            >>> table.write_arrow(rows).rows_written
            2
        """
        writer = self.asynchronous.arrow_writer(
            op,
            timeout_s=timeout_s,
            buffer_bytes=buffer_bytes,
            on_rows=on_rows,
            part=part,
            durability=durability,
        )
        try:
            writer.check(data)
            # A scan's own batches raise its own errors. A stream in C would make other ones of them.
            given = data.batches() if isinstance(data, Scanner) else data
            for batch in batches_of(given):  # in this thread: they may come from another call of this client
                self._client.run(writer.feed(batch))
            result = self._client.run(writer.finish())
        except BaseException:
            self._client.end(writer.abandon())
            raise
        return result.raise_for_errors() if raise_row_errors else result

    def changes(
        self,
        after: int | datetime,
        upto: int | datetime | None = None,
        columns: Sequence[str] | None = None,
        *,
        every: bool = False,
        timeout_s: float | None = None,
    ) -> Scanner:
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

        Example:
            >>> before = table.scan().snapshot
            >>> _ = table.put({"day": date(2024, 5, 1), "name": "roof", "value": 22.5})
            >>> [(row["name"], row["value"], row["_op"]) for row in table.changes(before)]
            [('roof', 22.5, 'upsert')]
        """
        scanner = self.asynchronous.changes(after, upto, columns, every=every, timeout_s=timeout_s)
        return Scanner(self._client, scanner)

    def hold(
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

        Example:
            >>> held = table.hold("copy", expires_in_s=600)
            >>> _ = table.put({"day": date(2024, 5, 1), "name": "roof", "value": 22.5})
            >>> [row["value"] for row in table.changes(held.since)]
            [22.5]
            >>> table.release_hold("copy")
        """
        return self._client.run(
            self.asynchronous.hold(
                name,
                since,
                expires_in_s=expires_in_s,
                max_bytes=max_bytes,
                tablets=tablets,
                timeout_s=timeout_s,
            )
        )

    def renew_hold(
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

        Example:
            >>> held = table.hold("copy", expires_in_s=600)
            >>> read = table.changes(held.since)
            >>> rows = read.to_table()
            >>> table.renew_hold(held, expires_in_s=600, since=read.snapshot).since == read.snapshot
            True
            >>> table.release_hold("copy")
        """
        return self._client.run(
            self.asynchronous.renew_hold(hold, expires_in_s=expires_in_s, since=since, timeout_s=timeout_s)
        )

    def release_hold(self, name: str, *, timeout_s: float | None = None) -> None:
        """End a hold. A hold that does not exist is no error.

        Raises:
            Retryable: some tablets did not answer within `timeout_s`. There the hold expires by itself.

        Example:
            >>> held = table.hold("copy")
            >>> table.release_hold("copy")
            >>> table.holds()
            []
        """
        self._client.run(self.asynchronous.release_hold(name, timeout_s=timeout_s))

    def holds(self, *, timeout_s: float | None = None) -> list[TableHold]:
        """The holds on the table's history, by name. Raises Retryable if not all tablets answered within `timeout_s`.

        Example:
            >>> held = table.hold("copy")
            >>> [(hold.name, hold.broken) for hold in table.holds()]
            [('copy', '')]
            >>> table.release_hold("copy")
        """
        return self._client.run(self.asynchronous.holds(timeout_s=timeout_s))

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
    ) -> Scanner:
        """A scan of all tablets at one snapshot. Read it with `batches`, `to_table`, `to_pandas` or `count`.

        `predicates`: (column, operator, value), or text such as "delay > 30 AND origin IN ('JFK')". One or
        several; all must be true. `lower` (inclusive) and `upper` (exclusive): values of the first key
        columns, in order or by name.

        `snapshot`: a hybrid time or a datetime; default: now. 0, the timestamp of a write that sent nothing,
        means now too. A datetime or time without a zone is UTC, also in predicates and bounds.

        `max_staleness`: read followers first, at a snapshot up to this many seconds old.

        `timeout_s`: how long to wait from one batch of a tablet to the next. Raises Rejected for an unknown column or a
        value that does not fit.

        Example:
            >>> table.scan(["name", "value"], [("value", ">", 20)]).to_table().to_pylist()
            [{'name': 'roof', 'value': 21.5}]
            >>> table.scan(["name"], "value < 20 AND name IN ('cellar', 'roof')").to_table().to_pylist()
            [{'name': 'cellar'}]
        """
        scanner = self.asynchronous.scan(
            columns,
            predicates,
            lower=lower,
            upper=upper,
            limit=limit,
            ordered=ordered,
            snapshot=snapshot,
            max_staleness=max_staleness,
            timeout_s=timeout_s,
        )
        return Scanner(self._client, scanner)

    def new_session(
        self,
        *,
        flush_interval_s: float = 1.0,
        buffer_bytes: int = 8 << 20,
        timeout_s: float | None = None,
        durability: str = Durability.SYNCED,
    ) -> Session:
        """A session for one caller that writes many rows in order. Rows leave every `flush_interval_s`
        seconds, or when `buffer_bytes` wait. `timeout_s` is for each block, and so is `durability`, as for `put`.

        Example:
            >>> with table.new_session() as session:
            ...     session.upsert({"day": date(2024, 5, 4), "name": "roof", "value": 18.0})
            >>> table.scan().count()
            3
        """

        async def make() -> AsyncSession:
            return self.asynchronous.new_session(
                flush_interval_s=flush_interval_s,
                buffer_bytes=buffer_bytes,
                timeout_s=timeout_s,
                durability=durability,
            )

        return Session(self._client, self._client.run(make()))
