"""Where a table's tablets are, and which replica is presumed to lead each. Owned by an open table.

Invariant: everything here is a hint. A wrong one costs a round trip, never a wrong answer, because nodes
check tablet and leadership themselves.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from stele.model.bounds import HISTORY_DEFAULT_MS
from stele.model.cluster_version import FIRST_CLUSTER_VERSION, told
from stele.model.errors import Closed, Code, Rejected, Retryable
from stele.model.ids import ClusterId
from stele.model.partition import PartitionSchema, numbered
from stele.model.partitioning import Partitioning, by_names
from stele.model.schema import Schema
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.convert_schema import partition_from_pb, partitioning_from_pb, schema_from_pb
from stele.rpc.identity import NO_CLUSTER, Identity
from stele.rpc.masters import Masters
from stele.rpc.proto import common_pb2, master_pb2

REFRESH_INTERVAL_S = 0.2
"""The least time between two questions to the masters, per open table. `_PAUSE_PER_TABLET_S` is added."""
_PAUSE_PER_TABLET_S = 0.001
"""A question about a thousand tablets costs the masters and this process some 40 ms each. After a node's death they have
better things to do, and its tablets' new leaders are named by other nodes."""
_SPREAD_S = 0.1
"""The longest random delay before a question. Without it, all clients of a dead node would ask the masters at one moment."""
_REFRESH_TIMEOUT_S = 5.0
_MADE_PER_S = 500
"""How many tablets of a new table a cluster can make in a second, at most. Nobody asks more often than that makes useful:
an answer costs the masters some 40 µs for each tablet of the table."""
_WAIT_MAX_S = 2.0
"""The longest wait between two questions for a new table."""
MOVED = frozenset((Code.UNAVAILABLE, Code.TIMED_OUT))
"""Codes that may mean that a leader's node has a new address. The other replicas still name it as leader, so only the masters
know the address."""


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """One replica of a tablet: its node and that node's addresses."""

    node_id: str
    address: str
    flight_address: str
    zone: str = ""


@dataclass(slots=True)
class TabletPlace:
    """The tablet of one partition. `leader` is an index of `replicas`: the presumed leader, else the next one
    to ask."""

    tablet_id: str
    ordinal: int
    replicas: tuple[ReplicaPlace, ...]
    incarnation: int = 0
    leader: int = 0
    dropped: str = ""
    """The message for a tablet whose range was dropped; "" while it is part of the table."""

    def target(self, beside: int = 0) -> ReplicaPlace:
        """The replica to ask. `beside`: how many places after the presumed leader, if other replicas may
        serve too.

        Raises:
            Retryable: NOT_READY: the tablet has no replicas yet.
        """
        replicas = self.replicas  # read once: scans call this from other threads
        if not replicas:
            raise Retryable(f"tablet {self.tablet_id[:8]} has no replicas yet", code=Code.NOT_READY)
        return replicas[(self.leader + beside) % len(replicas)]

    def led_by(self, node_id: str) -> bool:
        """Accept a hint about the leader. False if that node has no known replica."""
        for position, replica in enumerate(self.replicas):
            if replica.node_id == node_id:
                self.leader = position
                return True
        return False

    def ask_next(self, failed: ReplicaPlace) -> None:
        """`failed` does not lead, or is gone: ask another replica next, unless a leader was found
        meanwhile."""
        replicas = self.replicas
        if replicas and replicas[self.leader % len(replicas)] == failed:
            self.leader = (self.leader + 1) % len(replicas)

    def update(self, fresh: TabletPlace) -> None:
        """Replace this by what the masters say now.

        The tablet may be another one: a tablet that nobody leads in time is REPLACED. Its replicas were never
        published, so nothing was asked of it. If the presumed leader is still a replica, it stays: nodes'
        hints are newer than what the masters know.
        """
        previous = self.target().node_id if self.replicas else ""
        self.tablet_id = fresh.tablet_id  # set before the replicas, because scans read from other threads
        self.replicas = fresh.replicas
        self.incarnation = fresh.incarnation
        self.leader = 0
        self.led_by(previous)


@dataclass(slots=True)
class TableInfo:
    """A table or key space as the masters describe it. Returned by `client.describe` and
    `client.list_tables`.

    Attributes:
        table_id: 32 hex digits, never used again.
        name: Its present name.
        state: PREPARING, RUNNING or ALTERING.
        kind: "table" or "keyspace".
        schema: Columns and key; None for a key space.
        partition_schema: How it is split, by column ids. `partitioning` gives it by names.
        replication_factor: The number of voters of each tablet.
        tablets: The number of its tablets.
        tablets_running: How many of them have had a leader.
        owner: Who the table belongs to, for people; "" if nobody said.
        comment: What it is for; "" if nobody said.

    Example:
        >>> info = client.describe("readings")
        >>> info.kind, info.tablets, [column.name for column in info.schema.key_columns]
        ('table', 4, ['day', 'name'])
    """

    table_id: str
    name: str
    state: str
    kind: str
    schema: Schema | None
    partition_schema: PartitionSchema
    replication_factor: int
    tablets: int
    tablets_running: int
    owner: str = ""
    comment: str = ""

    @property
    def history_s(self) -> float:
        """How many seconds replaced and deleted rows stay readable at older snapshots. 0 for a key space, which has none.

        Example:
            >>> client.describe("readings").history_s
            900.0
        """
        return 0.0 if self.schema is None else (self.schema.history_ms or HISTORY_DEFAULT_MS) / 1000

    @property
    def partitioning(self) -> tuple[Partitioning, ...]:
        """How the table is split, in the form that `create_table` takes. Empty: one tablet.

        Example:
            >>> client.describe("readings").partitioning
            (HashPartitioning(columns=('day', 'name'), buckets=4, seed=0),)
        """
        return () if self.schema is None else by_names(self.partition_schema, self.schema)


@dataclass(frozen=True, slots=True)
class WritePlan:
    """A table and where its tablets were, for a process that writes to it. Spark sends it to its tasks."""

    cluster_id: str
    info: TableInfo
    tablets: tuple[TabletPlace, ...]
    fork_id: str | None = None
    """The copy of the cluster that the table is in; None: not known."""
    cluster_version: int = FIRST_CLUSTER_VERSION
    """The finalized cluster version, as the masters told it."""

    def identity_for(self, mine: Identity) -> Identity:
        """The identity of a client that opens this plan: that of `mine`, in the plan's cluster.

        Raises:
            Rejected: WRONG_CLUSTER: `mine` has met another cluster, or another copy of it.
        """
        if mine.cluster_id not in (NO_CLUSTER, self.cluster_id):
            raise Rejected(
                f"table {self.info.name} is in cluster {self.cluster_id[:8]}, "
                f"but this client is connected to {mine.cluster_id[:8]}; use a client of the plan's cluster",
                code=Code.WRONG_CLUSTER,
            )
        if None not in (self.fork_id, mine.fork_id) and self.fork_id != mine.fork_id:
            raise Rejected(
                f"table {self.info.name} is in another copy of cluster {self.cluster_id[:8]} than this client; "
                "use a client of the plan's copy",
                code=Code.WRONG_CLUSTER,
            )
        fork_id = mine.fork_id if self.fork_id is None else self.fork_id
        return replace(mine, cluster_id=ClusterId(self.cluster_id), fork_id=fork_id)


def table_info_from_pb(pb: master_pb2.TableInfoPB) -> TableInfo:
    """A table from a master's answer."""
    return TableInfo(
        table_id=id_from_pb(pb.table_id),
        name=pb.name,
        state=pb.state,
        kind=pb.kind or "table",
        schema=schema_from_pb(pb.schema) if pb.schema.columns else None,
        partition_schema=partitioning_from_pb(pb.partitioning),
        replication_factor=pb.replication_factor,
        tablets=pb.tablets,
        tablets_running=pb.tablets_running,
        owner=pb.owner,
        comment=pb.comment,
    )


@dataclass(slots=True, eq=False, weakref_slot=True)
class Locations:
    """The tablets of one table, by ordinal."""

    masters: Masters
    table_id: str
    info: TableInfo
    tablets: list[TabletPlace] = field(default_factory=list)
    complete: bool = False
    """Whether every partition of the table has a tablet."""
    schemas: dict[int, Schema] = field(default_factory=dict)
    """The schemas that the masters have told, by version."""
    newest_schema: Schema | None = None
    """The schema that the table has, or is being altered to."""
    outdated: bool = False
    """Whether a node has refused a block because its columns were dropped: take the newest schema."""
    chosen: str = ""
    """Why the masters chose this number of tablets, in words. "" if they did not choose it, or not for this client."""
    gone: str = ""
    """The message for a table that is gone; "" while it exists."""
    cluster_version: int = FIRST_CLUSTER_VERSION
    """The finalized cluster version, as the masters told it last. It only rises."""
    _by_ordinal: dict[int, TabletPlace] = field(default_factory=dict)
    _refreshed_at: float = 0.0
    _refreshing: asyncio.Task[None] | None = None
    _closed: bool = False

    def __post_init__(self) -> None:
        self._by_ordinal = {tablet.ordinal: tablet for tablet in self.tablets}
        self._note_schemas(self.info.schema)

    def _note_schemas(self, *told: Schema | None) -> None:
        for schema in told:
            if schema is not None:
                self.schemas[int(schema.version)] = self.newest_schema = schema

    async def close(self) -> None:
        """Stop asking the masters."""
        self._closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)

    async def refresh(self, *, timeout_s: float = 2 * _REFRESH_TIMEOUT_S) -> None:
        """Ask the masters again. Concurrent callers share one question.

        Raises:
            Rejected: NOT_FOUND: the table is gone.
            Retryable: TIMED_OUT: no answer came within `timeout_s`; the question goes on.
            SteleError: no master answers.
            Closed: after `close`.
        """
        asking = self.refresh_soon()
        await asyncio.wait([asking], timeout=timeout_s)
        if not asking.done():
            raise Retryable(
                f"the masters did not say within {timeout_s:.1f} s where the tablets of {self.info.name} are; try again",
                code=Code.TIMED_OUT,
            )
        if asking.cancelled():
            raise Closed()
        asking.result()

    async def ask_anew(self, *, timeout_s: float) -> None:
        """As `refresh`, but never share a question that was asked before this call."""
        until = time.monotonic() + timeout_s
        if self._refreshing is not None and not self._refreshing.done():
            await asyncio.wait([self._refreshing], timeout=timeout_s)
        await self.refresh(timeout_s=max(0.0, until - time.monotonic()))

    @property
    def led(self) -> bool:
        """Whether every tablet had a leader when the masters last answered."""
        return self.complete and self.info.tablets_running >= self.info.partition_schema.tablets

    async def wait_led(self, timeout_s: float) -> None:
        """Wait until the masters say that every tablet has a leader. Keeps asking, also while no master
        leads.

        Raises:
            Rejected: NOT_FOUND: the table is gone.
            Retryable: NOT_READY after `timeout_s`.
            Closed: after `close`.
        """
        deadline = time.monotonic() + timeout_s
        unanswered = ""
        while (rest_s := deadline - time.monotonic()) > 0:
            try:
                await self.refresh(timeout_s=rest_s)
            except Retryable as exc:
                # Our own deadline ended this question, so it says nothing about the masters.
                unanswered = str(exc.args[0]) if time.monotonic() < deadline else unanswered
            else:
                unanswered = ""
                if self.led:
                    return
                missing = self.info.partition_schema.tablets - self.info.tablets_running
                wait_s = min(missing / _MADE_PER_S, _WAIT_MAX_S, deadline - time.monotonic())
                await asyncio.sleep(max(0.0, wait_s))
        info = self.info
        kind = "key space" if info.kind == "keyspace" else info.kind
        raise Retryable(
            f"{kind} {info.name}: {info.tablets_running} of {info.partition_schema.tablets} tablets have a leader after "
            f"{timeout_s:.0f} s; {unanswered or '`stele ksck` says why'}",
            code=Code.NOT_READY,
        )

    def refresh_soon(self) -> asyncio.Task[None]:
        """Ask the masters again in the background. Only a caller that awaits the task learns of a failure."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.get_running_loop().create_task(self._refresh())
            self._refreshing.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._refreshing

    async def _refresh(self) -> None:
        if self._closed:
            raise Closed()
        pause_s = REFRESH_INTERVAL_S + len(self.tablets) * _PAUSE_PER_TABLET_S
        rest_s = self._refreshed_at + pause_s - time.monotonic()
        await asyncio.sleep(max(rest_s, random.random() * _SPREAD_S))
        self._refreshed_at = time.monotonic()
        try:
            answer = await self.masters.call(
                "GetTableLocations",
                master_pb2.GetTableLocationsRequest(table_id=id_to_pb(self.table_id)),
                timeout_s=_REFRESH_TIMEOUT_S,
            )
            self.take(answer)
        except Rejected as exc:
            if exc.code is Code.NOT_FOUND:
                self.gone = str(exc.args[0])
            raise

    def end(self, how: str) -> None:
        """Stop asking for the table, and accept no more answers, because this client has "deleted" or
        "dropped" it (`how`)."""
        kind = "key space" if self.info.kind == "keyspace" else self.info.kind
        self.gone = f"{kind} {self.info.name} was {how}"

    def ensure_there(self) -> None:
        """Check that the table exists according to the masters' last answer. Asks nobody.

        Raises:
            Rejected: NOT_FOUND: the table was deleted.
        """
        if self.gone:
            raise Rejected(self.gone, code=Code.NOT_FOUND)

    def take(self, answer: master_pb2.GetTableLocationsResponse) -> None:
        """Accept an answer of the masters. TabletPlace objects stay the same, so that their users see the
        change.

        Raises:
            Rejected: NOT_FOUND: the table was removed.
        """
        info = table_info_from_pb(answer.table)
        if info.partition_schema == self.info.partition_schema:
            info.partition_schema = (
                self.info.partition_schema
            )  # users see by its identity that it has changed
        self.info = info
        self.cluster_version = max(self.cluster_version, told(answer.cluster_version))
        newest = answer.table.newest_schema
        self._note_schemas(self.info.schema, schema_from_pb(newest) if newest.columns else None)
        if self.info.state == "REMOVED":
            raise Rejected(f"table {self.info.name} was deleted", code=Code.NOT_FOUND)
        ordinals = {part: n for n, part in numbered(info.partition_schema)}
        known, there = self._by_ordinal, set(ordinals.values())
        for left in [n for n in known if n not in there]:
            known.pop(left).dropped = f"table {info.name}: the range of these rows was dropped"
        for pb in answer.tablets:
            if pb.state in ("REPLACED", "DELETED"):
                continue
            ordinal = ordinals.get(partition_from_pb(pb.partition))
            if ordinal is None:
                continue
            fresh = _place(pb, ordinal)
            tablet = known.get(ordinal)
            if tablet is None:
                known[ordinal] = fresh
            else:
                tablet.update(fresh)
        self.tablets = [known[n] for n in sorted(known)]
        self.complete = len(self.tablets) == info.partition_schema.tablets

    def by_ordinal(self, ordinals: Sequence[int]) -> list[TabletPlace]:
        """Return the tablets with these ordinals.

        Raises:
            Rejected: NOT_FOUND: the table was deleted. TABLET_DELETED: the range of one was dropped.
            Retryable: NOT_READY: one is still being created.
        """
        self.ensure_there()
        if not self.complete:
            raise Retryable(
                f"table {self.info.name}: only {len(self.tablets)} of {self.info.partition_schema.tablets} "
                "tablets exist so far; the others are being made: try again",
                code=Code.NOT_READY,
            )
        try:
            return [self._by_ordinal[n] for n in ordinals]
        except KeyError:
            raise Rejected(
                f"table {self.info.name}: the range of these rows was dropped", code=Code.TABLET_DELETED
            ) from None


def _place(pb: master_pb2.TabletLocationsPB, ordinal: int) -> TabletPlace:
    # Learners and witnesses have no rows to serve, so only voters are asked.
    voters = [r for r in pb.replicas if r.peer.member_type == common_pb2.VOTER]
    voters.sort(key=lambda r: (r.role != common_pb2.LEADER, not r.alive))
    return TabletPlace(
        tablet_id=id_from_pb(pb.tablet_id),
        ordinal=ordinal,
        replicas=tuple(
            ReplicaPlace(id_from_pb(r.peer.node_id), r.peer.address, r.flight_address, r.zone) for r in voters
        ),
        incarnation=pb.tablet_incarnation,
    )
