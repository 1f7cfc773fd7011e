"""One tablet of a scan, read over Arrow Flight in a thread, from any replica that serves it. Used by scan.py
and Spark.

Invariant: whichever replicas a scan reads, each row is returned once, at the plan's single snapshot. All rows
of a tablet are of one incarnation of it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Event
from typing import TypeVar

import pyarrow as pa

from stele.client.locations import MOVED, ReplicaPlace, TabletPlace
from stele.model import keys
from stele.model.errors import Closed, Code, Rejected, SteleError, error_for
from stele.model.incarnation import shown
from stele.model.key_bounds import KeyRange, key_ranges, within
from stele.model.predicate import ScanSpec
from stele.model.schema import Schema
from stele.rpc.flight_client import FlightConnections, FlightStream
from stele.rpc.threads import begin
from stele.rpc.ticket import Ticket, incarnation_of

T = TypeVar("T")
PARALLEL_TABLETS = 4
"""The number of tablets of a scan that are read at once."""
_BACKOFF_S, _BUSY_BACKOFF_MAX_S = 0.05, 1.0
_BUSY_TIMES = 10
"""A node without a place for another scan is healthy, so a scan keeps asking for this many times the
timeout."""
_WAIT_MS, _PREPARED_WAIT_MS = 5_000, 1_000
"""How long a replica may wait until it can serve the snapshot. The wait for a prepared one is shorter, since
another replica may serve it earlier."""
_DEFINITE = frozenset(
    (
        Code.INVALID_ARGUMENT,
        Code.SCHEMA_MISMATCH,
        Code.CLOCK_AHEAD,
        Code.UNSUPPORTED_VERSION,
        Code.PERMISSION_DENIED,
        Code.CLOSED,
    )
)
_TOO_OLD = frozenset((Code.SNAPSHOT_TOO_OLD, Code.CURSOR_LOST))
"""Codes of a replica that no longer has the rows of that time. Replicas drop history at moments of their own, so another
one may have them."""
_NOT_HERE = frozenset((Code.NOT_FOUND, Code.TABLET_DELETED, Code.WRONG_NODE))
"""Codes of a replica that has moved. Only the masters know whether the table itself is gone."""
_GONE = MOVED | _NOT_HERE | {Code.WRONG_CLUSTER}
_WELL = frozenset((Code.THROTTLED, Code.NOT_LEADER, Code.NOT_READY, Code.SNAPSHOT_NOT_READY)) | _TOO_OLD


class _OtherHistory(Rejected):
    """The tablet was recovered since the scan gave its first rows, so no replica can go on with them."""


class FlightPool:
    """A client's Flight connections, and the threads that read its scans.

    Scans read by batches have threads of their own, because they wait for their reader. `zone`: where the reader is;
    "": not said."""

    def __init__(self, zone: str = "") -> None:
        self.connections = FlightConnections()
        self.zone = zone
        self._threads = ThreadPoolExecutor(PARALLEL_TABLETS * 2, "stele-scan")

    async def run(
        self, read: Callable[[TabletScan], T], scan: TabletScan, threads: Executor | None = None
    ) -> T:
        """Run `read(scan)` in one of these threads, or in one of `threads` if given.

        Raises:
            Closed: after `close`, also if it came before a thread was free.
            Rejected: the program's main thread has ended.
        """
        try:
            reading = begin(threads or self._threads, read, scan)
        except (Rejected, RuntimeError):  # the threads were told to end
            if self.connections.closed:
                raise Closed() from None
            raise
        try:
            return await reading
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.connections.closed and (
                task is None or not task.cancelling()
            ):  # nobody cancelled this task
                raise Closed() from None
            raise

    def close(self) -> None:
        """Close all connections for good. Readers in progress fail."""
        self.connections.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Prepared:
    """From which log index on a replica of a tablet can serve the plan's snapshot.

    - `index`: the replica must have applied the log up to here.
    - `incarnation`: of the tablet. Replicas of another incarnation cannot use `index`.
    """

    index: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class ScanPlan:
    """A scan of some tablets of a table. Spark sends it to its workers.

    `prepared`: by tablet id; filled in while the scan runs (preparing.py)."""

    cluster_id: str
    schema: Schema
    spec: ScanSpec
    snapshot: int
    tablets: tuple[TabletPlace, ...]
    fork_id: str | None = None
    """The copy of the cluster that the tablet is in; None: not known."""
    prepared: dict[str, Prepared] = field(default_factory=dict)
    any_replica: bool = False
    """Whether followers are asked before leaders. They ask their leaders, where they do not know that they hold the snapshot."""

    @property
    def ranges(self) -> list[KeyRange]:
        """The ranges of keys that nodes read."""
        spec, schema = self.spec, self.schema
        found = key_ranges(schema.key_column_ids, schema, spec.predicates)
        return within(found, spec.lower_key, spec.upper_key)

    @property
    def arrow_schema(self) -> pa.Schema:
        """The schema of the batches."""
        return self.spec.arrow_schema(self.schema)


class _Patience:
    """How long a scan goes on after its last batch: `timeout_s`; longer while nodes answer that they have no
    place.

    Each such answer gives `timeout_s` more, up to _BUSY_TIMES `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.renew()

    def renew(self) -> None:
        """A batch arrived."""
        self._since = time.monotonic()
        self._busy_backoff_s = _BACKOFF_S
        self.allowed_s = self._timeout_s
        self.busy = False

    def ends_with(self, code: Code) -> bool:
        """Whether time was up when a node answered with this code."""
        waited_s = time.monotonic() - self._since
        if code is Code.THROTTLED:
            self.busy = True
            self.allowed_s = min(waited_s + self._timeout_s, _BUSY_TIMES * self._timeout_s)
        return waited_s > self.allowed_s

    def backoff_s(self, code: Code) -> float:
        """Seconds to wait after such an answer."""
        if code is not Code.THROTTLED:
            return _BACKOFF_S
        self._busy_backoff_s = min(2 * self._busy_backoff_s, _BUSY_BACKOFF_MAX_S, self._timeout_s / 4)
        return self._busy_backoff_s * (0.5 + random.random())


class TabletScan:
    """One tablet of a scan, read in the calling thread: `for batch in TabletScan(...)`.

    A scan in key order resumes at another replica after its last row. A scan without order starts again and
    yields None: discard what came before. `locate` is called in the same thread after a replica did not
    answer. It asks the masters for the replicas' addresses, and may return before they answer. An exception
    from it ends the scan.
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
        self._incarnation = 0  # of the rows given
        self._beside = 0  # how many replicas to skip, because they have no place
        self._near = 0  # how many replicas of the reader's zone to skip, because they failed

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
        """The batches; None where the scan begins again, so that those before do not count.

        Raises SteleError if no replica served the rest within `timeout_s` of the last batch. While nodes have no place for
        the scan, the limit is ten times as long."""
        wanted = len(self._plan.arrow_schema)
        spec = (with_key_columns(self._plan) if self._plan.spec.ordered else self._plan).spec
        arrow = spec.arrow_schema(self._plan.schema)
        patience = _Patience(self._timeout_s)
        said: dict[str, str] = {}
        asked: set[str] = set()
        too_old: SteleError | None = None
        while True:
            replica: ReplicaPlace | None = None
            try:
                replica = next(iter(self._nearby()), None) or self._tablet.target(self._beside)
                for read in self._read(replica, spec):
                    batch = _named(read, arrow)
                    if batch.num_rows:
                        self._ensure_same_history(incarnation_of(read.schema))
                        spec = self._behind(spec, batch)
                        self._given += batch.num_rows
                        yield batch if batch.num_columns == wanted else batch.select(range(wanted))
                    patience.renew()
                    said.clear()
                    if self._stop.is_set():
                        return
                return
            except _OtherHistory:
                raise
            except SteleError as exc:
                code = exc.code
                if self._stop.is_set():
                    return
                if code in _DEFINITE:
                    raise
                if code in _TOO_OLD:
                    too_old = exc
                if replica is not None:
                    asked.add(replica.node_id)
                if too_old is not None and asked.issuperset(r.node_id for r in self._tablet.replicas):
                    raise too_old from exc
                if replica is not None:
                    address = replica.flight_address
                    said[replica.node_id] = f"{address} ({str(exc.args[0]).removeprefix(f'{address}: ')})"
                if patience.ends_with(code):
                    raise self._given_up(exc, said, patience) from exc
            if replica is not None:
                self._ask_another(replica, code)
            if replica is None or code in _GONE:
                self._locate()
            if self._tablet.dropped:
                raise Rejected(self._tablet.dropped, code=Code.TABLET_DELETED)
            if self._stop.wait(patience.backoff_s(code)):
                return
            if self._given and not spec.ordered:
                self._given = 0
                yield None

    def _prepared(self) -> Prepared | None:
        """Return the prepared snapshot of the tablet for this plan. None if it has none, or was recovered
        since."""
        prepared = self._plan.prepared.get(self._tablet.tablet_id)
        return None if prepared is None or prepared.incarnation != self._tablet.incarnation else prepared

    def _nearby(self) -> list[ReplicaPlace]:
        """The replicas in the reader's zone that are still to be asked, the presumed leader first. With `any_replica`: all followers,
        those of the zone first."""
        zone, replicas = self._pool.zone, self._tablet.replicas
        if self._plan.any_replica and replicas:
            leader = self._tablet.target()
            followers = [replica for replica in replicas if replica != leader]
            return sorted(followers, key=lambda replica: not zone or replica.zone != zone)[self._near :]
        if not zone or not replicas or self._prepared() is None:
            return []
        leader = self._tablet.target()
        near = [replica for replica in replicas if replica.zone == zone]
        return sorted(near, key=lambda replica: replica != leader)[self._near :]

    def _ensure_same_history(self, incarnation: int) -> None:
        """Refuse rows of another incarnation than the rows given so far. A recovery after a lost majority may
        have given up some of the latter."""
        if self._given and incarnation != self._incarnation:
            raise _OtherHistory(
                f"tablet {self._tablet.tablet_id[:8]} lost its majority and was recovered as incarnation "
                f"{shown(incarnation)} while it was scanned at {shown(self._incarnation)}; scan again",
                code=Code.SNAPSHOT_TOO_OLD,
            )
        self._incarnation = incarnation

    def _ask_another(self, asked: ReplicaPlace, code: Code) -> None:
        if asked in self._nearby():
            self._near += 1
        elif (
            code is Code.THROTTLED
            or code in _TOO_OLD
            or self._beside % len(self._tablet.replicas or (asked,))
        ):
            self._beside += 1  # only this scan skips it: writers go on with the leader
        else:
            self._tablet.ask_next(asked)
        if code not in _WELL:
            self._pool.connections.drop(asked.flight_address)

    def _given_up(self, last: SteleError, said: Mapping[str, str], patience: _Patience) -> SteleError:
        """An error with what each replica said: the last one asked may be down while another explains the
        failure."""
        reasons = ", ".join(sorted(said.values())) or str(last.args[0])
        code = Code.UNAVAILABLE if last.code in _NOT_HERE else last.code
        return error_for(
            Code.THROTTLED if patience.busy else code,
            f"tablet {self._tablet.tablet_id[:8]}: no replica could be read for {patience.allowed_s:.1f} s: {reasons}",
        )

    def _behind(self, spec: ScanSpec, batch: pa.RecordBatch) -> ScanSpec:
        """Return the spec of a scan of the rows after `batch`."""
        if not spec.ordered:
            return spec
        last = keys.encode_keys(batch.slice(batch.num_rows - 1), self._plan.schema)[0].as_py()
        limit = None if spec.limit is None else spec.limit - batch.num_rows
        if spec.changes is not None and spec.changes.every:  # other versions of this key may follow
            changes = replace(spec.changes, seen=batch.column(batch.num_columns - 1)[-1].as_py())
            return replace(spec, lower_key=last, limit=limit, changes=changes)
        # Not `resume_after`: an empty string may be a whole key, but an empty `resume_after` means that
        # nothing was read.
        return replace(spec, lower_key=last + b"\x00", limit=limit)

    def _read(self, replica: ReplicaPlace, spec: ScanSpec) -> Iterator[pa.RecordBatch]:
        if spec.limit is not None and spec.limit <= 0:
            return
        plan, prepared = self._plan, self._prepared()
        ticket = Ticket(
            plan.cluster_id,
            self._tablet.tablet_id,
            plan.snapshot,
            plan.schema.version,
            spec.to_json(plan.schema),
            fork_id=plan.fork_id,
            incarnation=self._tablet.incarnation,
            wait_ms=_WAIT_MS if prepared is None and replica not in self._nearby() else _PREPARED_WAIT_MS,
            prepared=0 if prepared is None else prepared.index,
            any_replica=plan.any_replica,
        )
        self._stream = FlightStream(
            self._pool.connections, replica.flight_address, ticket.encode(), self._stop
        )
        try:
            yield from self._stream
        finally:
            self._stream = None


def _named(batch: pa.RecordBatch, arrow: pa.Schema) -> pa.RecordBatch:
    """Return the batch with the plan's names for its columns, and without metadata."""
    if batch.schema.metadata:
        batch = batch.replace_schema_metadata(None)
    if batch.schema.names == arrow.names or batch.schema.types != arrow.types:
        return batch
    return pa.RecordBatch.from_arrays(batch.columns, schema=arrow)


def with_key_columns(plan: ScanPlan) -> ScanPlan:
    """The same scan with all key columns; missing ones are added after the others."""
    wanted = plan.spec.column_ids or plan.schema.column_ids
    extra = tuple(int(c.id) for c in plan.schema.key_columns if c.id not in wanted)
    return replace(plan, spec=replace(plan.spec, column_ids=(*wanted, *extra)))
