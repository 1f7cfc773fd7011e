"""The reads of an open table: rows by key, scans, changes, and plans for programs that read tablets themselves.

Owned by table.py. Knows the table only as an `OpenTable`. Invariant: an argument that does not fit the table
is refused before any server is asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from stele.client import arguments
from stele.client.change_plan import change_plan, change_times
from stele.client.key_order import key_bound
from stele.client.locations import TabletPlace
from stele.client.lookup import Key, ids_of
from stele.client.nearby import How, Nearby, NearTablet, aged
from stele.client.point_reads import PointReads
from stele.client.predicates import Predicates, parse_predicates
from stele.client.preparing import prepare
from stele.client.ranges import Ranges
from stele.client.scan import AsyncScanner, read_tablet
from stele.client.splitting import split
from stele.client.staleness import how_of
from stele.client.streams import Streams
from stele.client.tablet import Observed, TabletClient
from stele.client.tablet_scan import FlightPool, ScanPlan
from stele.model.clock import snapshot_for
from stele.model.predicate import ScanSpec
from stele.model.schema import Schema

T = TypeVar("T")
Bound = Mapping[str, Any] | Sequence[Any] | Any

_ROWS_MAX = (1 << 63) - 1  # Arrow cannot count further
_WAYS_MAX = 8


class OpenTable(Protocol):
    """What reads need of their table."""

    @property
    def schema(self) -> Schema:
        """The columns that the table knows now."""

    async def refresh(self) -> None:
        """Ask the masters for the present columns. Raises SteleError."""

    def tablet(self, ordinal: int) -> TabletClient:
        """The client of one tablet. Raises SteleError."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The arguments of a scan, as the caller gave them. `AsyncTable.scan` tells what each one means."""

    columns: Sequence[str] | None = None
    predicates: Predicates = ()
    lower: Bound = None
    upper: Bound = None
    limit: int | None = None
    ordered: bool = False
    snapshot: int | datetime | None = None
    max_staleness: float | None = None


class TableReads:
    """Reads one table. Each method that plans raises Rejected for wrong arguments, and NOT_READY while the table is being
    created."""

    def __init__(
        self,
        table: OpenTable,
        ranges: Ranges,
        streams: Streams,
        flight: FlightPool,
        observed: Observed,
        *,
        timeout_s: float,
    ) -> None:
        self._table = table
        self._ranges = ranges
        self._locations = ranges.locations
        self._streams = streams
        self._flight = flight
        self._observed = observed
        self._timeout_s = timeout_s
        self._near: dict[int, Nearby] = {}
        self._ways: dict[How, PointReads] = {}  # the latest last
        self._points = PointReads(
            lambda: self._name, lambda: table.schema, ranges, table.tablet, timeout_s=timeout_s
        )

    @property
    def _name(self) -> str:
        return self._locations.info.name

    async def get(
        self,
        key: Key,
        columns: Sequence[str] | None,
        max_staleness: float | None = None,
        snapshot: int | datetime | None = None,
    ) -> Any:
        """Return the row with this key: the present one, one of a snapshot, or an AgedRow. `AsyncTable.get`
        has the details."""
        self._streams.ensure_open()
        points = self._points_for(max_staleness, snapshot)
        return await points.get(key, ids_of(self._name, self._table.schema, columns))

    async def get_many(
        self,
        keys: Iterable[Key],
        columns: Sequence[str] | None,
        max_staleness: float | None = None,
        snapshot: int | datetime | None = None,
    ) -> list[Any]:
        """The rows with these keys. `AsyncTable.get_many` has the details."""
        self._streams.ensure_open()
        points = self._points_for(max_staleness, snapshot)
        return await points.get_many(keys, ids_of(self._name, self._table.schema, columns))

    def _points_for(self, max_staleness: float | None, snapshot: int | datetime | None) -> PointReads:
        """Return the PointReads for this staleness or snapshot, whose reads share requests. The last few that
        were used are kept."""
        how = how_of(max_staleness, snapshot, self._locations.info)
        if how is None:
            return self._points
        points = self._ways.pop(how, None) or self._read_by(how)
        self._ways[how] = points  # as the newest
        if len(self._ways) > _WAYS_MAX:
            del self._ways[next(iter(self._ways))]
        return points

    def _read_by(self, how: How) -> PointReads:
        return PointReads(
            lambda: self._name,
            lambda: self._table.schema,
            self._ranges,
            lambda ordinal: NearTablet(self._nearby(ordinal), how),
            timeout_s=self._timeout_s,
            **({"result": aged} if how.max_staleness_us is not None else {}),
        )

    def _nearby(self, ordinal: int) -> Nearby:
        tablet = self._table.tablet(ordinal)
        found = self._near.get(ordinal)
        if found is None or found.tablet is not tablet:
            found = self._near[ordinal] = Nearby(tablet, self._flight.zone)
        return found

    def scan(self, wanted: Wanted, timeout_s: float | None) -> AsyncScanner:
        """A scan of all tablets at one snapshot. Its `plan` has the tablets to read."""
        return self._scanner(lambda: self._plan(wanted), bool(wanted.ordered), timeout_s)

    def changes(
        self,
        after: int | datetime,
        upto: int | datetime | None,
        columns: Sequence[str] | None,
        *,
        every: bool,
        timeout_s: float | None,
    ) -> AsyncScanner:
        """A scan of what was written between two times. `AsyncTable.changes` has the details."""
        self._streams.ensure_open()
        begin, end = change_times(after, upto, self._observed.now)
        wanted = Wanted(columns, snapshot=end)

        def plan() -> ScanPlan:
            return change_plan(self._plan(wanted), begin, every=bool(every))

        return self._scanner(plan, False, timeout_s)

    async def prepare(self, plan: ScanPlan) -> None:
        """Have the leaders prepare the snapshot of a plan, so that all replicas can serve it: one request to each node.

        Scans do it themselves where they take long. What cannot be prepared is read from leaders."""
        await prepare(self._streams.pool, plan)

    async def split(self, plan: ScanPlan, part_bytes: int) -> list[ScanPlan]:
        """Cut a plan into parts of about `part_bytes` of files, for parallel readers. Together the parts give
        its rows.

        Each part is a range of keys of one tablet. If the plan has a limit, each part has it."""
        self._streams.ensure_open()
        return await split(
            self._streams.pool, plan, arguments.whole_number(part_bytes, "part_bytes", least=1)
        )

    async def read_tablet(
        self,
        plan: ScanPlan,
        tablet: TabletPlace,
        read: Callable[[Iterator[pa.RecordBatch]], T],
        *,
        timeout_s: float | None = None,
    ) -> T:
        """Call `read(batches)` in a thread of its own, with the rows of one tablet of an ordered plan.
        Returns its result.

        The batches come in key order, with one in memory at a time. If this call is cancelled, `read` gets an error with
        its next batch, and is waited for.

        Raises:
            SteleError: no replica of the tablet can serve it. And what `read` raises.
        """
        self._streams.ensure_open()
        seconds = self._seconds(timeout_s)
        return await read_tablet(self._flight, self._locations, plan, tablet, seconds, read)

    def _seconds(self, timeout_s: float | None) -> float:
        return arguments.seconds_or(timeout_s, self._timeout_s, "timeout_s")

    def _plan(self, wanted: Wanted) -> ScanPlan:
        self._streams.ensure_open()
        schema, limit = self._table.schema, wanted.limit
        lower_key = key_bound(wanted.lower, schema, "lower")
        upper_key = key_bound(wanted.upper, schema, "upper")
        rows_max = None if limit is None else min(arguments.whole_number(limit, "limit", least=0), _ROWS_MAX)
        if wanted.upper is not None and not upper_key:
            rows_max = 0  # the bound is an empty string, the lowest key of all; b"" would mean no bound
        spec = ScanSpec(
            # All by id: the table may have more columns when it is read.
            column_ids=ids_of(self._name, schema, wanted.columns) or schema.column_ids,
            predicates=tuple(parse_predicates(wanted.predicates, schema)),
            lower_key=lower_key,
            upper_key=upper_key,
            limit=rows_max,
            ordered=bool(wanted.ordered),
        )
        identity = self._streams.pool.identity
        if wanted.max_staleness is None:
            # With 0 in its ticket, each tablet would be read at its own latest time.
            snapshot = arguments.snapshot(wanted.snapshot) or int(self._observed.now())
        else:
            how = how_of(wanted.max_staleness, wanted.snapshot, self._locations.info)
            late_us = (how and how.max_staleness_us) or 0
            snapshot = snapshot_for(late_us, int(self._observed.now()), self._observed.timestamp)
        return ScanPlan(
            identity.cluster_id,
            schema,
            spec,
            snapshot,
            self._ranges.places(schema, spec),
            identity.fork_id,
            any_replica=wanted.max_staleness is not None,
        )

    def _scanner(self, plan: Callable[[], ScanPlan], ordered: bool, timeout_s: float | None) -> AsyncScanner:
        planned, seconds = plan(), self._seconds(timeout_s)

        async def replan() -> ScanPlan:
            """Wait for a newer schema, and plan again with its columns. While a table is ALTERING, the
            masters still give the earlier schema."""
            until = time.monotonic() + seconds
            while self._table.schema.version <= planned.schema.version and time.monotonic() < until:
                await self._table.refresh()
            return plan()

        async def tablets(gone: bool) -> tuple[TabletPlace, ...]:
            return await self._ranges.places_now(planned.schema, planned.spec, gone, seconds)

        return AsyncScanner(
            self._flight,
            planned,
            self._locations,
            ordered=ordered,
            timeout_s=seconds,
            replan=replan,
            tablets=tablets,
            prepare=self.prepare,
        )
