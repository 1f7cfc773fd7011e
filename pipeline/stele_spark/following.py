"""Follows a table in the driver of a stream: decides where batches end, and what is in them. Used by
stream.py.

A batch ends at a *settled* time: all leaders have prepared a snapshot there, so every later write has a
higher time. The masters are asked for the columns after that. So no row of a batch has a value in a column
that the stream does not know.

Invariant: batches follow each other without gap or overlap, even where ranges are added to the table
meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from stele.client import Client
from stele.client.change_plan import change_plan
from stele.client.locations import TabletPlace
from stele.client.tablet_scan import Prepared, ScanPlan
from stele.model.clock import LOGICAL_BITS, ahead_of, physical_us, utc
from stele.model.errors import Code, Rejected, Retryable
from stele.model.incarnation import recoveries
from stele.model.schema import Schema
from stele_spark.cursor import CLOCKS_APART, Cursor, patiently
from stele_spark.offset import Offset
from stele_spark.options import EARLIEST, LATEST, TABLE, Options
from stele_spark.slices import Slices

_PATIENCE_S = 60.0
_OF_HISTORY = 0.9
"""The share of the table's history that "earliest" reads. Older changes might be gone before they are read."""


class Follower:
    """One stream's view of its table. `names`: the table's columns that the stream has. `inferred`: whether
    these are all columns of the table.
    """

    def __init__(self, options: Options, names: Sequence[str], *, inferred: bool) -> None:
        self._options = options
        self._following = options.following
        self._names = list(names)
        self._inferred = inferred
        self._client = Client(options.masters, timeout_s=_PATIENCE_S)
        try:
            self._table = self._client.open_table(options.table)
            self._schema = self._table.schema
            self._ids = {column.name: int(column.id) for column in self._schema.columns}
            self._check_columns(self._schema)
        except BaseException:
            self._client.close()
            raise
        self._cursor = Cursor(self._table, self._following)
        self._slices = Slices()
        self._target: int | None = None

    def close(self) -> None:
        """Close all connections. The cursor stays."""
        self._cursor.close()
        self._client.close()

    def initial(self) -> Offset:
        """The offset at which a new stream starts.

        Raises:
            Rejected: CURSOR_LOST, the history does not reach back so far; or CLOCK_AHEAD, the time is in the
                future.
        """
        start = self._following.start
        if start == TABLE:
            self._ask()
            return self._offset(0)
        now = int(self._client.now())
        if start == LATEST:
            ts = self._settled()
        elif start == EARLIEST:
            history_us = self._table.asynchronous.info.history_s * 1e6
            ts = now - (int(history_us * _OF_HISTORY) << LOGICAL_BITS)
            self._ask()
        else:
            ts = int(start)
            if ts > now:
                ahead = ahead_of("the start of the stream,", ts, physical_us(now), "this machine's clock")
                raise Rejected(
                    f"table {self._options.table}: {ahead}; give an earlier time", code=Code.CLOCK_AHEAD
                )
            self._ask()
        self._cursor.keep(ts)
        return self._offset(ts)

    def stop_at_present(self) -> None:
        """Let no batch end later than the present moment."""
        self._target = self._settled()

    def latest(self, start: Offset, rows_max: int) -> Offset:
        """The offset at which the batch ends that begins at `start`. It is `start` itself if there is nothing
        new. `rows_max`: the most changes of a batch; 0 for no limit.

        Raises:
            Rejected: CURSOR_LOST, history was dropped before it was read; SCHEMA_MISMATCH, the columns have
                changed; NOT_FOUND, the table is gone.
            Retryable: a tablet had no leader for a minute.
        """
        if start.ts:
            self._cursor.keep(start.ts)
        end = self._settled() if self._target is None else self._target
        self._check_same(start)
        if not start.ts:
            self._cursor.keep(end)
            return self._offset(end)
        if end <= start.ts:  # this machine's clock is behind that of the one before
            return start
        ts = self._slices.end(self._client, self._table, start.ts, end, rows_max)
        now = self._offset(end)
        if ts is None:
            # Other columns, or another range, make a batch of their own.
            return start if (now.schema, now.tablets) == (start.schema, start.tablets) else now
        return replace(now, ts=ts)

    def plans(self, start: Offset, end: Offset) -> list[ScanPlan]:
        """The scans that the tasks of a batch run, each of one tablet. Each call for the same batch gives the
        same rows.
        """
        if start == end:
            return []
        self._cursor.keep(start.ts or end.ts)
        self._check_same(end)
        if not start.ts:
            plan = self._bounded(self._scan(end.ts), end)
            self._prepare(plan)
            return self._client.run(self._table.asynchronous.reads.split(plan, self._options.split_bytes))
        old = self._bounded(self._scan(end.ts), start)
        every = self._bounded(self._scan(end.ts), end)
        self._prepare(every)
        known = {tablet.tablet_id for tablet in old.tablets}

        def of(tablet: TabletPlace) -> ScanPlan:
            after = start.ts if tablet.tablet_id in known else start.ts - CLOCKS_APART
            one = replace(every, tablets=(tablet,), prepared=_only(every, tablet))
            return change_plan(one, after, every=self._following.every)

        return [of(tablet) for tablet in every.tablets]

    def commit(self, end: Offset) -> None:
        """Let the cursor move to `end`, because Spark does not need the changes up to there again."""
        if end.ts:
            self._cursor.move(end.ts)

    def _scan(self, snapshot: int) -> ScanPlan:
        names = list(dict.fromkeys((*(c.name for c in self._schema.key_columns), *self._names)))
        return patiently(lambda: self._table.asynchronous.scan(names, ordered=True, snapshot=snapshot).plan)

    @staticmethod
    def _bounded(plan: ScanPlan, by: Offset) -> ScanPlan:
        return replace(plan, tablets=tuple(tablet for tablet in plan.tablets if tablet.ordinal < by.tablets))

    def _settled(self) -> int:
        """The present time, once no later write can get a time at or below it. Also asks the masters again,
        so the known tablets and columns are not older than this time.

        Raises:
            Retryable: UNAVAILABLE, the leader of a tablet did not prepare the snapshot within a minute.
        """
        end = int(self._client.now())
        until = time.monotonic() + _PATIENCE_S
        plan = self._scan(end)
        while True:
            self._prepare(plan)
            self._ask()
            plan = replace(self._scan(end), prepared=plan.prepared)
            left = [tablet for tablet in plan.tablets if tablet.tablet_id not in plan.prepared]
            if not left:
                return end
            for tablet in left:  # the presumed leader is gone, or leads no more
                tablet.ask_next(tablet.target())
            if time.monotonic() > until:
                raise Retryable(
                    f"table {self._options.table}: {len(left)} of {len(plan.tablets)} tablets, among them {left[0].tablet_id}, cannot be "
                    f"read at {utc(physical_us(end))}: they have no leader, or this machine's clock is ahead; `stele ksck` says "
                    "more",
                    code=Code.UNAVAILABLE,
                )

    def _prepare(self, plan: ScanPlan) -> None:
        self._client.run(self._table.asynchronous.reads.prepare(plan))

    def _ask(self) -> None:
        """Ask the masters for the present columns and tablets."""
        locations = self._table.asynchronous.locations
        patiently(lambda: self._client.run(locations.ask_anew(timeout_s=_PATIENCE_S)))

    @property
    def _now(self) -> Schema:
        """The table's schema, as the masters told it last."""
        schema = self._table.asynchronous.info.schema
        assert schema is not None
        return schema

    def _offset(self, ts: int) -> Offset:
        places = self._table.asynchronous.locations.tablets
        there = [place for place in places if not place.dropped]
        return Offset(
            ts,
            int(self._now.version),
            self._table.asynchronous.info.table_id,
            max((place.ordinal for place in there), default=-1) + 1,
            sum(recoveries(place.incarnation) for place in there),
        )

    def _check_same(self, start: Offset) -> None:
        """Refuse to continue from an offset if the table was created again, recovered or altered since.

        Raises:
            Rejected: NOT_FOUND, CURSOR_LOST or SCHEMA_MISMATCH.
        """
        now, name = self._offset(0), self._options.table
        if start.table != now.table:
            raise Rejected(
                f"table {name} was deleted and created again since the checkpoint was made; start the stream with a new "
                "checkpoint",
                code=Code.NOT_FOUND,
            )
        if now.recoveries > start.recoveries:
            raise Rejected(
                f"table {name}: a tablet lost its majority and was recovered, so rows that this stream has given may be gone "
                "without a delete; start the stream with a new checkpoint, and compare its result with the table",
                code=Code.CURSOR_LOST,
            )
        self._check_columns(self._now)

    def _check_columns(self, now: Schema) -> None:
        """Refuse to continue if the table's columns are no longer those of the stream.

        Raises:
            Rejected: SCHEMA_MISMATCH. It names the columns.
        """
        faults = []
        for name in self._names:
            column = now.by_id.get(self._ids.get(name, -1))
            if column is None:
                faults.append(f"column {name} was dropped")
            elif column.name != name:
                faults.append(f"column {name} is now called {column.name}")
        if self._inferred:
            mine = {self._ids[name] for name in self._names if name in self._ids}
            faults += [
                f"column {column.name} was added" for column in now.columns if int(column.id) not in mine
            ]
        if faults:
            raise Rejected(
                f"table {self._options.table} was altered: {', '.join(faults)}; the stream has given all rows of its last "
                "batch, and none of later ones; load() the table again, and start the stream with the same checkpoint"
                + ("; or name its columns with .schema(...)" if self._inferred else ""),
                code=Code.SCHEMA_MISMATCH,
            )


def _only(plan: ScanPlan, tablet: TabletPlace) -> dict[str, Prepared]:
    found = plan.prepared.get(tablet.tablet_id)
    return {} if found is None else {tablet.tablet_id: found}
