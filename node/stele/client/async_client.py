"""The asynchronous client: tables, key spaces and the cluster, through any master.

Imports model and rpc only. Invariant: there is one stream to each node, however many tables and callers there
are.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from stele.client import arguments, dropping, reprs
from stele.client.dropping import DroppedTable
from stele.client.kv import AsyncKeySpace
from stele.client.locations import Locations, TableInfo, WritePlan, table_info_from_pb
from stele.client.nearby import Nearby
from stele.client.partitioning import Partitionings, partition_schema
from stele.client.session import AsyncSession
from stele.client.streams import Streams
from stele.client.table import AsyncTable
from stele.client.tablet import Observed, TabletClient, is_far
from stele.client.tablet_scan import FlightPool
from stele.model.errors import Advice, Code, Rejected, Retryable
from stele.model.ids import HybridTime, new_id
from stele.model.schema import Schema
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_to_pb
from stele.rpc.convert_schema import partitioning_to_pb, schema_to_pb
from stele.rpc.first_contact import FIRST_CONTACT_S
from stele.rpc.identity import Identity
from stele.rpc.masters import Masters, parse_masters
from stele.rpc.proto import master_pb2
from stele.rpc.threads import in_thread

TIMEOUT_S = 30.0
DELETE_TIMEOUT_S = 15.0
_LOCATE_AT_LEAST_S = 0.1
_NEXT_STEPS = {"table": ("table", Advice.LIST_TABLES), "keyspace": ("key space", Advice.CREATE_KEYSPACE)}
"""For each kind of name: what to call it, and what to do if there is none."""
_pandas_sought = threading.Event()


class AsyncClient:
    """A client of one cluster: `async with AsyncClient(["10.0.0.1:7051"]) as client:`.

    `masters`: HOST:PORT of some of them, or "A,B,C". `timeout_s`: how long a write or read may take by
    default. `first_contact_s`: how long to look for a master before any has ever answered; a fifth of it if
    no name resolves. Use it from one event loop. `zone`: where this program runs; scans read replicas there first.

    Example:
        >>> import asyncio
        >>> async def main():
        ...     async with stele.connect_async(masters) as client:
        ...         table = await client.open_table("readings")
        ...         return await table.scan().count()
        >>> asyncio.run(main())
        2
    """

    def __init__(
        self,
        masters: str | Iterable[str],
        *,
        timeout_s: float = TIMEOUT_S,
        first_contact_s: float = FIRST_CONTACT_S,
        zone: str = "",
    ) -> None:
        timeout_s = arguments.seconds(timeout_s, "timeout_s")
        first_contact_s = arguments.seconds(first_contact_s, "first_contact_s", zero=True)
        self.pool = ChannelPool(Identity())
        self._given = parse_masters(masters)
        self.masters = Masters(
            self.pool, self._given, first_contact_s=first_contact_s, nodes=self._node_addresses
        )
        self._timeout_s = timeout_s
        self._streams = Streams(self.pool)
        self._flight = FlightPool(arguments.zone(zone))
        self._observed = Observed()
        self._observed_of = WeakValueDictionary[str, Observed]()  # by table id, while such a table is open
        # Tables and sessions that nobody holds and that have no work are freed: some programs open a table
        # per write.
        self._tables: WeakSet[AsyncTable] = WeakSet()
        self._locations: WeakSet[Locations] = WeakSet()
        self._unsettled: set[AsyncSession] = set()  # these are kept, because their rows would be lost

    def __repr__(self) -> str:
        closed = " (closed)" if self._streams.closing else ""
        return reprs.shown_as(
            self, f"of masters {reprs.named(self._given)}{closed}", self.identity.cluster_id
        )

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with unmasked(exc):
            await self.close()

    async def close(self) -> None:
        """Write what sessions hold, finish single rows that somebody waits for, then close all connections.

        Later calls raise Closed.

        Raises:
            RowErrors: rows of a session were not written, and its `flush` has not reported them. The client
                is closed.
        """
        self._streams.closing = True
        untold = await self._flush_sessions()
        for table in list(self._tables):
            await table.close()
        for locations in list(self._locations):
            await locations.close()
        await self._streams.close()
        await self.pool.close()
        await in_thread(self._flight.close)
        if untold is not None:
            raise untold

    async def _flush_sessions(self) -> Exception | None:
        """Flush all sessions. Return the error to raise for rows that were not written; None if all were."""
        flushes = [session.flush() for session in self._unsettled]
        ends = await asyncio.gather(*flushes, return_exceptions=True)
        untold = [end for end in ends if isinstance(end, Exception)]
        for other in untold[1:]:
            untold[0].add_note(f"Another session failed too: {other}")
        return untold[0] if untold else None

    @property
    def identity(self) -> Identity:
        """The identity that this client sends, with the cluster that has answered it."""
        return self.pool.identity

    def now(self) -> HybridTime:
        """A snapshot token at or above all writes that this client has seen, and not below the wall clock.

        A write whose timestamp is a minute or more ahead of this machine's clock counts only for its own
        table."""
        return self._observed.now()

    def observe(self, timestamp: int) -> None:
        """Record another client's token, so that later scans here see what that client had seen.

        Raises:
            Rejected: it is not a token, or is a minute or more ahead of this machine's clock. No table can be
                read at such a time.
        """
        token = arguments.whole_number(timestamp, "timestamp", least=0)
        if is_far(token):
            expected = (
                "a token from now() of a client; this one is a minute or more ahead of this machine's clock"
            )
            raise arguments.refusal("timestamp", timestamp, expected)
        self._observed.saw(token)

    async def create_table(
        self,
        name: str,
        schema: Schema,
        partitioning: Partitionings = None,
        *,
        replication_factor: int = 3,
        owner: str = "",
        comment: str = "",
        history_s: float | None = None,
        wait: bool = True,
        timeout_s: float = 60.0,
    ) -> AsyncTable:
        """Create a table. With `wait`, return once every tablet has a leader. `timeout_s` bounds the whole
        call.

        `partitioning`: how it is split into tablets. (): one tablet. None: the masters choose, by the number of nodes; `chosen` of
        the table says what and why.

        `owner`, `comment`: notes for people. `history_s`: how many seconds replaced and deleted rows stay readable at
        older snapshots, 60 to ten years; None: 15 minutes.

        Raises:
            Rejected: ALREADY_PRESENT: the name is used. INVALID_ARGUMENT: lists all faults. NOT_FOUND: it was
                created, but somebody has already deleted it.
            Retryable: no master leads; NOT_READY: it was created, but tablets have no leaders after
                `timeout_s`.
        """
        arguments.of_kind(schema, Schema, "schema", "a Schema, as Schema.make returns")
        partitions = partition_schema(partitioning, schema)
        request = master_pb2.CreateTableRequest(
            name=arguments.text(name, "table name"),
            schema=schema_to_pb(
                replace(schema, history_ms=arguments.history_ms(history_s, none=True) or schema.history_ms)
            ),
            partitioning=partitioning_to_pb(partitions),
            replication_factor=arguments.replication_factor(replication_factor),
            table_id=id_to_pb(new_id()),
            owner=arguments.note(owner, "owner"),
            comment=arguments.note(comment, "comment"),
            choose_tablets=partitioning is None,
        )
        locations = await self._make(request, wait, timeout_s)
        await _seek_pandas()
        return self._opened(locations)

    async def create_keyspace(
        self, name: str, *, replication_factor: int = 3, wait: bool = True, timeout_s: float = 60.0
    ) -> AsyncKeySpace:
        """Create a key space. Raises what `create_table` raises."""
        request = master_pb2.CreateTableRequest(
            name=arguments.text(name, "key space name"),
            replication_factor=arguments.replication_factor(replication_factor),
            kind="keyspace",
            table_id=id_to_pb(new_id()),
        )
        return self._space(await self._make(request, wait, timeout_s))

    async def _make(self, request: master_pb2.CreateTableRequest, wait: bool, timeout_s: float) -> Locations:
        timeout_s = arguments.seconds(timeout_s, "timeout_s")
        deadline, why = time.monotonic() + timeout_s, ""
        try:
            why = (await self._ask("CreateTable", request, timeout_s=timeout_s)).why
        except Rejected as exc:
            # TABLET_DELETED: an attempt whose answer was lost created it, and somebody has deleted it since.
            if exc.code is not Code.TABLET_DELETED:
                raise
        locations = await self._find(
            request.name, request.kind or "table", max(deadline - time.monotonic(), _LOCATE_AT_LEAST_S)
        )
        locations.chosen = why
        if wait and not locations.led:
            await locations.wait_led(deadline - time.monotonic())
        return locations

    async def delete_table(
        self, name: str, *, table_id: str = "", timeout_s: float = DELETE_TIMEOUT_S
    ) -> None:
        """Delete a table or key space for good. Its name is free as soon as the masters have deleted it. A
        dropped one is named by its id, or by the first 8 digits of its id. `table_id`: delete nothing if the
        name means another table than this one.

        Once this has returned, no later write to the table is acknowledged, whoever sends it. So the call waits until
        a majority of each tablet's replicas are gone. `timeout_s`: how long to wait for the next node that answers.
        From then on, open tables, sessions and key spaces of this client that use it raise Rejected NOT_FOUND.

        Raises:
            Rejected: NOT_FOUND: there is none of this name, or it has another id.
            Retryable: UNKNOWN_OUTCOME: it is deleted, but some nodes did not answer in time. A program that
                reaches them may still write to it. They delete their replicas when the masters hear them
                again.
        """
        deadline = time.monotonic() + arguments.seconds(timeout_s, "timeout_s")
        info = await dropping.deletable(self, name)
        if table_id and info.table_id != table_id:
            raise Rejected(
                f"{name} now names table {info.table_id[:8]}, not {table_id[:8]}; nothing was deleted: look again",
                code=Code.NOT_FOUND,
            )
        await dropping.delete(
            self._ask, info, timeout_s, deadline, lambda: self._end(info.table_id, "deleted")
        )

    def _end(self, table_id: str, how: str) -> None:
        for locations in list(self._locations):
            if locations.table_id == table_id:
                locations.end(how)

    async def drop_table(
        self, name: str, *, keep_s: float | None = None, timeout_s: float = DELETE_TIMEOUT_S
    ) -> DroppedTable:
        """Drop a table or key space. Its name is free at once, it serves nobody, and it can be recalled for a
        time.

        `keep_s`: for how long, in seconds; None: as long as the cluster's setting says (24 h at first). Until
        then its replicas use disk, and are healed like those of other tables. Afterwards they are deleted.
        From then on, open tables, sessions and key spaces of this client that use it raise Rejected
        NOT_FOUND. `timeout_s`: how long to wait for the nodes.

        Raises:
            Rejected: NOT_FOUND: there is none of this name. UNSUPPORTED_VERSION: an upgrade is not finalized.
            Retryable: UNKNOWN_OUTCOME: it is dropped, but some nodes did not answer in time. A program that reaches
                them may still use it, until the masters hear them again.
        """
        timeout_s = arguments.seconds(timeout_s, "timeout_s")
        kept_s = None if keep_s is None else arguments.seconds(keep_s, "keep_s")
        info = await self.describe(name)
        try:
            found = await dropping.drop(self._ask, info, kept_s, timeout_s)
        except Retryable as exc:
            if exc.code is Code.UNKNOWN_OUTCOME:
                self._end(info.table_id, "dropped")
            raise
        self._end(info.table_id, "dropped")
        return found

    async def dropped_tables(self) -> list[DroppedTable]:
        """The tables and key spaces that were dropped and can be recalled, by name."""
        return await dropping.dropped(self._ask)

    async def recall_table(
        self, name: str, *, new_name: str | None = None, timeout_s: float = DELETE_TIMEOUT_S
    ) -> TableInfo:
        """Take a dropped table or key space back, with all its rows. `name`: its name before the drop, its id, or the first
        8 digits of the id. `new_name`: its name from now on, for when another table has the old one.

        Tables that programs opened before the drop stay closed. Open them again.

        Raises:
            Rejected: NOT_FOUND: no such table is kept, perhaps because its time is over. ALREADY_PRESENT: the name is
                used. INVALID_ARGUMENT: several dropped tables have this name; the message has their ids.
        """
        called = arguments.text(name, "name")
        wanted = None if new_name is None else arguments.text(new_name, "new name")
        return await dropping.recall(self._ask, called, wanted, arguments.seconds(timeout_s, "timeout_s"))

    async def set_replication_factor(self, name: str, replication_factor: int) -> TableInfo:
        """Set the number of replicas of each tablet: 1, 3, 5 or 7. Returns the table as it is now described.

        It returns at once. A driver, such as the operator, then adds or removes replicas one at a time, and the table is
        read and written meanwhile. Where a TabletGroup describes the table, change that instead.

        Raises:
            Rejected: NOT_FOUND; INVALID_ARGUMENT: another number, or too few machines for it.
            Retryable: too few nodes answer now.
        """
        arguments.text(name, "table name")
        request = master_pb2.SetReplicationFactorRequest(
            name=name, replication_factor=arguments.replication_factor(replication_factor)
        )
        with _advised(f"no table {name}", Advice.LIST_TABLES, name):
            answer = await self._ask("SetReplicationFactor", request)
        return table_info_from_pb(answer.table)

    async def list_tables(self) -> list[TableInfo]:
        """All tables and key spaces, by name. Raises Retryable if no master leads within 15 s."""
        answer = await self._ask("ListTables", master_pb2.ListTablesRequest())
        found = [table_info_from_pb(table) for table in answer.tables]
        return sorted(found, key=lambda info: info.name)

    async def describe(self, name: str) -> TableInfo:
        """Describe one table. Raises Rejected NOT_FOUND."""
        arguments.text(name, "table name")
        with _advised(f"no table {name}", Advice.LIST_TABLES, name):
            answer = await self._ask("GetTable", master_pb2.GetTableRequest(name=name))
        return table_info_from_pb(answer.table)

    async def open_table(self, name: str) -> AsyncTable:
        """Open a table to write and read. Raises Rejected NOT_FOUND; also for a key space."""
        locations = await self._find(name, "table", self._timeout_s)
        await _seek_pandas()
        return self._opened(locations)

    def open_planned(self, plan: WritePlan) -> AsyncTable:
        """Open the table of a plan without asking the masters. They are asked once its tablets have moved.

        Whoever made the plan has reached the masters, so they exist. This client looks for them as long as
        each call may take, not only for `first_contact_s`.

        Raises:
            Rejected: WRONG_CLUSTER: this client has met another cluster.
        """
        self._streams.ensure_open()
        self.pool.identity = plan.identity_for(self.identity)
        self.masters.met = True
        tablets = [replace(tablet) for tablet in plan.tablets]
        locations = Locations(
            self.masters,
            plan.info.table_id,
            plan.info,
            tablets,
            complete=True,
            cluster_version=plan.cluster_version,
        )
        self._locations.add(locations)
        return self._opened(locations)

    def _opened(self, locations: Locations) -> AsyncTable:
        table = AsyncTable(
            locations,
            self._streams,
            self._flight,
            self._observed_of.setdefault(locations.info.table_id, Observed(self._observed)),
            self._unsettled,
            self._timeout_s,
        )
        self._tables.add(table)
        return table

    async def keyspace(self, name: str) -> AsyncKeySpace:
        """Open a key space. Raises Rejected NOT_FOUND; also for a table."""
        arguments.text(name, "key space name")
        return self._space(await self._find(name, "keyspace", self._timeout_s))

    def _space(self, locations: Locations) -> AsyncKeySpace:
        name = locations.info.name
        if locations.info.kind != "keyspace":
            raise Rejected(f"{name} is a table, not a key space", advice=Advice.OPEN_TABLE, name=name)
        (place,) = locations.by_ordinal([0])
        tablet = TabletClient(place, locations, self._streams, self._observed)
        near = Nearby(tablet, self._flight.zone)
        return AsyncKeySpace(name, tablet, self._timeout_s, self.identity.cluster_id, near)

    async def _ask(self, method: str, request: Any, **patience: Any) -> Any:
        """Call a master. Raises what `Masters.call` raises; Closed once the client was closed."""
        self._streams.ensure_open()
        return await self.masters.call(method, request, **patience)

    def _node_addresses(self) -> set[str]:
        """Last known addresses of the nodes with tablets of open tables."""
        tablets = (tablet for locations in list(self._locations) for tablet in locations.tablets)
        return {replica.address for tablet in tablets for replica in tablet.replicas if replica.address}

    async def _find(self, name: str, kind: str, timeout_s: float) -> Locations:
        what, advice = _NEXT_STEPS[kind]
        with _advised(f"no {what} {name}", advice, name):
            return await self.locate(name, timeout_s)

    async def locate(self, name: str, timeout_s: float) -> Locations:
        """Return the places of a table's tablets. Raises Rejected NOT_FOUND."""
        arguments.text(name, "table name")
        answer = await self._ask(
            "GetTableLocations", master_pb2.GetTableLocationsRequest(name=name), timeout_s=timeout_s
        )
        info = table_info_from_pb(answer.table)
        locations = Locations(self.masters, info.table_id, info)
        self._locations.add(locations)
        locations.take(answer)
        return locations


async def _seek_pandas() -> None:
    """Import pandas in a thread, if it is installed, so that the event loop goes on.

    pyarrow imports it with its first array, which takes up to seconds."""
    if not _pandas_sought.is_set():
        await in_thread(_import_pandas)


def _import_pandas() -> None:
    with suppress(Exception):  # pyarrow meets the same error later and handles it
        importlib.import_module("pandas")
        importlib.import_module("pyarrow.pandas_compat")
    _pandas_sought.set()


@contextmanager
def unmasked(exc: BaseException | None) -> Iterator[None]:
    """Run the cleanup at the end of a `with` block. If `exc` ended the block, an error of the cleanup is added
    to `exc` as a note, so that it does not hide `exc`."""
    try:
        yield
    except Exception as error:
        if exc is None:
            raise
        exc.add_note(f"Closing the client failed too: {error}")


@contextmanager
def _advised(message: str, advice: Advice, name: str) -> Iterator[None]:
    """Replace a NOT_FOUND that the block raises by one with `message` and `advice`, the next step."""
    try:
        yield
    except Rejected as exc:
        if exc.code is not Code.NOT_FOUND:
            raise
        raise Rejected(message, code=Code.NOT_FOUND, advice=advice, name=name) from exc
