"""The blocking client: runs the asynchronous one in a thread with its own event loop. For scripts, notebooks
and Spark.

Invariant: every call waits for its coroutine and raises what it raises. No result is lost when the client is
closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Coroutine, Iterable
from types import TracebackType
from typing import Any, TypeVar

from stele.client import reprs
from stele.client.async_client import DELETE_TIMEOUT_S, TIMEOUT_S, AsyncClient, unmasked
from stele.client.blocking_kv import KeySpace
from stele.client.blocking_table import Table
from stele.client.dropping import DroppedTable
from stele.client.locations import TableInfo, WritePlan
from stele.client.partitioning import Partitionings
from stele.client.table import AsyncTable
from stele.client.thread_call import ThreadCall
from stele.model.errors import Closed, Rejected
from stele.model.ids import HybridTime
from stele.model.schema import Schema
from stele.rpc import forks
from stele.rpc.first_contact import FIRST_CONTACT_S
from stele.rpc.threads import main_thread_ended

T = TypeVar("T")
_CLOSE_TIMEOUT_S = 30.0
_LAST_WORDS_S = 3.0
_INSIDE = (
    "a call of the blocking client from its own thread, such as in on_rows, would wait for itself; "
    "call it from another thread"
)


class Client:
    """A client of one cluster: `with Client(["10.0.0.1:7051"]) as client:`. Several threads may share it.

    `masters`: HOST:PORT of some of them, or "A,B,C". `timeout_s`: how long a write or read may take by
    default. `first_contact_s`: how long to look for a master before any has ever answered; a fifth of it if
    no name resolves. `zone`: where this program runs; scans read replicas there first.

    Example:
        >>> with stele.connect(masters) as other:
        ...     table = other.open_table("readings")
    """

    def __init__(
        self,
        masters: str | Iterable[str],
        *,
        timeout_s: float = TIMEOUT_S,
        first_contact_s: float = FIRST_CONTACT_S,
        zone: str = "",
    ) -> None:
        forks.ensure_own()
        self._loop = asyncio.new_event_loop()
        # Reentrant: the garbage collector may end a scan at any memory allocation, also in here.
        self._lock = threading.RLock()
        self._closing = False
        self._over = self._loop.create_future()  # only for the client's thread
        self._thread = threading.Thread(
            target=_serve, args=(self._loop, self._over), name="stele-client", daemon=True
        )
        self._thread.start()
        try:
            self.asynchronous = self.run(_make(masters, timeout_s, first_contact_s, zone))
        except BaseException:
            self._end_loop()
            raise

    def __repr__(self) -> str:
        return reprs.blocking(self.asynchronous)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the asynchronous client in the client's loop, and wait for it. An interrupt
        cancels it.

        Raises:
            Rejected: on the client's own thread, as in `on_rows`, where it would wait for itself. Also when
                the interpreter ends, and in a process forked from the client's.
            Closed: after `close`.

        Example:
            >>> client.run(client.asynchronous.describe("readings")).name
            'readings'
        """
        call: ThreadCall[T] | None = None
        try:
            if self._inside:
                raise Rejected(_INSIDE)
            call = ThreadCall(lambda: coroutine, self._loop)
            self._submit(call)
            return call.wait()
        except BaseException:
            if call is None:
                coroutine.close()
            else:
                call.abandon()  # interrupted, for example by Ctrl-C: nobody waits for the result
            raise

    def end(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine that ends something, and wait for it. On the client's own thread it does not wait.

        The garbage collector may call this on that thread, or while the interpreter ends. After `close` it
        does nothing."""
        if sys.is_finalizing() or forks.forked():
            coroutine.close()
            return
        with contextlib.suppress(Closed):
            if not self._inside:
                self.run(coroutine)
                return
            call = ThreadCall(lambda: coroutine, self._loop)
            try:
                self._submit(call)
            except BaseException:
                call.abandon()
                raise

    @property
    def _inside(self) -> bool:
        return threading.current_thread() is self._thread

    def _submit(self, call: ThreadCall[Any]) -> None:
        if sys.is_finalizing():  # the client's thread no longer runs
            raise main_thread_ended()
        forks.ensure_own()  # nor in a forked child
        with self._lock:
            if self._closing:
                raise Closed()
            call.submit()

    def close(self) -> None:
        """Write what sessions hold, then close all connections and end the thread. Calls of other threads end
        too.

        Later calls raise Closed. Raises Rejected on the client's own thread. Raises RowErrors if rows of a
        session were not written and its `flush` has not reported them; the client is closed then.

        Example:
            >>> other = stele.connect(masters)
            >>> other.close()
        """
        if self._inside:
            raise Rejected(_INSIDE)
        if sys.is_finalizing() or forks.forked():  # its thread has ended, or belongs to the parent
            return
        first = False
        try:
            with self._lock:
                first, self._closing = not self._closing, True
            if first:
                call = ThreadCall(self._close, self._loop)
                call.submit()
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
        """A snapshot token (hybrid time) at or above all writes that this client has seen, and not below the
        wall clock.

        Example:
            >>> before = client.now()
            >>> written = table.put({"day": date(2024, 5, 9), "name": "roof", "value": 20.0})
            >>> table.scan(snapshot=before).count(), table.scan().count()
            (2, 3)
        """
        return self.asynchronous.now()

    def observe(self, timestamp: int) -> None:
        """Record another client's token, so that later scans here see what that client had seen.

        Raises:
            Rejected: it is not a token, or is a minute or more ahead of this machine's clock.

        Example:
            >>> with stele.connect(masters) as other:
            ...     other.observe(client.now())
            ...     other.open_table("readings").scan().count()
            2
        """
        self.asynchronous.observe(timestamp)

    def create_table(
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
    ) -> Table:
        """Create a table. With `wait`, return once every tablet has a leader, after at most `timeout_s`
        seconds.

        `partitioning`: how it is split into tablets. (): one tablet. None: the masters choose, by the number of nodes; `chosen` of
        the table says what and why.

        `owner`, `comment`: notes for people. `history_s`: how many seconds replaced and deleted rows stay readable at
        older snapshots, 60 to ten years; None: 15 minutes.

        Raises:
            Rejected: ALREADY_PRESENT: the name is used. INVALID_ARGUMENT: lists all faults.
            Retryable: no master leads, or the tablets have no leaders in time.

        Example:
            >>> schema = stele.Schema.make([("n", "int64"), ("text", "string")], key=["n"])
            >>> client.create_table("notes", schema, stele.hash("n", buckets=2)).name
            'notes'
        """
        coroutine = self.asynchronous.create_table(
            name,
            schema,
            partitioning,
            replication_factor=replication_factor,
            owner=owner,
            comment=comment,
            history_s=history_s,
            wait=wait,
            timeout_s=timeout_s,
        )
        return Table(self, self.run(coroutine))

    def delete_table(self, name: str, *, table_id: str = "", timeout_s: float = DELETE_TIMEOUT_S) -> None:
        """Delete a table or key space with all its rows, for good.

        `table_id`: delete nothing if the name means another table than this one.

        Once this has returned, no later write to it is acknowledged, whoever sends it.

        Raises:
            Rejected: NOT_FOUND: there is none of this name, or it has another id.
            Retryable: UNKNOWN_OUTCOME: it is deleted, but nodes that did not answer within `timeout_s` may
                still accept rows.

        Example:
            >>> space = client.create_keyspace("scratch")
            >>> client.delete_table("scratch")
        """
        self.run(self.asynchronous.delete_table(name, table_id=table_id, timeout_s=timeout_s))

    def drop_table(
        self, name: str, *, keep_s: float | None = None, timeout_s: float = DELETE_TIMEOUT_S
    ) -> DroppedTable:
        """Drop a table or key space. Its name is free at once, it serves nobody, and it can be recalled for a time.

        `keep_s`: for how long, in seconds; None: as long as the cluster's setting says (24 h at first). Until
        then its replicas use disk, and are healed like those of other tables. Afterwards they are deleted.

        Raises:
            Rejected: NOT_FOUND: there is none of this name. UNSUPPORTED_VERSION: an upgrade is not finalized.
            Retryable: UNKNOWN_OUTCOME: it is dropped, but nodes that did not answer within `timeout_s` may still
                serve it.

        Example:
            >>> space = client.create_keyspace("marks")
            >>> client.drop_table("marks", keep_s=3600).name
            'marks'
            >>> client.recall_table("marks").state
            'RUNNING'
            >>> client.delete_table("marks")
        """
        return self.run(self.asynchronous.drop_table(name, keep_s=keep_s, timeout_s=timeout_s))

    def dropped_tables(self) -> list[DroppedTable]:
        """The tables and key spaces that were dropped and can be recalled, by name.

        Example:
            >>> [(gone.name, gone.left_s) for gone in client.dropped_tables()]
            []
        """
        return self.run(self.asynchronous.dropped_tables())

    def recall_table(
        self, name: str, *, new_name: str | None = None, timeout_s: float = DELETE_TIMEOUT_S
    ) -> TableInfo:
        """Take a dropped table or key space back, with all its rows. `name`: its name before the drop, its id, or the first
        8 digits of the id. `new_name`: its name from now on, for when another table has the old one.

        Tables that programs opened before the drop stay closed. Open them again.

        Raises:
            Rejected: NOT_FOUND: no such table is kept, perhaps because its time is over. ALREADY_PRESENT: the name is
                used. INVALID_ARGUMENT: several dropped tables have this name; the message has their ids.

        Example:
            >>> space = client.create_keyspace("marks")
            >>> gone = client.drop_table("marks")
            >>> client.recall_table(gone.table_id, new_name="old_marks").name
            'old_marks'
            >>> client.delete_table("old_marks")
        """
        return self.run(self.asynchronous.recall_table(name, new_name=new_name, timeout_s=timeout_s))

    def set_replication_factor(self, name: str, replication_factor: int) -> TableInfo:
        """Set the number of replicas of each tablet of a table or key space: 1, 3, 5 or 7.

        It returns at once. A driver, such as the operator, then adds or removes replicas one at a time, and the table is
        read and written meanwhile. Where a TabletGroup describes the table, change that instead.

        Raises:
            Rejected: NOT_FOUND; INVALID_ARGUMENT: another number, or too few machines for it.
            Retryable: too few nodes answer now.

        Example:
            >>> space = client.create_keyspace("settings")
            >>> client.set_replication_factor("settings", 1).replication_factor
            1
        """
        return self.run(self.asynchronous.set_replication_factor(name, replication_factor))

    def list_tables(self) -> list[TableInfo]:
        """All tables and key spaces, by name. Raises Retryable if no master leads within 15 s.

        Example:
            >>> [(info.name, info.kind) for info in client.list_tables()]
            [('readings', 'table')]
        """
        return self.run(self.asynchronous.list_tables())

    def describe(self, name: str) -> TableInfo:
        """State, schema, partitioning and tablets of one table. Raises Rejected NOT_FOUND.

        Example:
            >>> info = client.describe("readings")
            >>> info.state, info.replication_factor, info.tablets
            ('RUNNING', 3, 4)
        """
        return self.run(self.asynchronous.describe(name))

    def open_table(self, name: str) -> Table:
        """Open a table to write and read. Raises Rejected: NOT_FOUND; INVALID_ARGUMENT for a key space.

        Example:
            >>> client.open_table("readings").get((date(2024, 5, 1), "roof"))
            {'day': datetime.date(2024, 5, 1), 'name': 'roof', 'value': 21.5}
        """
        return Table(self, self.run(self.asynchronous.open_table(name)))

    def open_planned(self, plan: WritePlan) -> Table:
        """Open the table of a plan that another process made with `table.asynchronous.plan_write()`. Asks no
        server.

        Raises Rejected WRONG_CLUSTER.

        Example:
            >>> plan = table.asynchronous.plan_write()
            >>> client.open_planned(plan).name
            'readings'
        """

        async def opened() -> AsyncTable:
            return self.asynchronous.open_planned(plan)

        return Table(self, self.run(opened()))

    def create_keyspace(
        self, name: str, *, replication_factor: int = 3, wait: bool = True, timeout_s: float = 60.0
    ) -> KeySpace:
        """Create a key space. Raises what `create_table` raises.

        Example:
            >>> space = client.create_keyspace("settings")
            >>> revision = space.replace("colour", "blue")
        """
        coroutine = self.asynchronous.create_keyspace(
            name, replication_factor=replication_factor, wait=wait, timeout_s=timeout_s
        )
        return KeySpace(self, self.run(coroutine))

    def keyspace(self, name: str) -> KeySpace:
        """Open a key space. Raises Rejected: NOT_FOUND; INVALID_ARGUMENT for a table.

        Example:
            >>> space = client.create_keyspace("settings")
            >>> client.keyspace("settings").list()
            []
        """
        return KeySpace(self, self.run(self.asynchronous.keyspace(name)))

    async def _close(self) -> None:
        try:
            await self.asynchronous.close()
        finally:
            self._end()  # the caller may have been interrupted twice, before it could end the loop

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _end_loop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end)
        self._thread.join()


def _serve(loop: asyncio.AbstractEventLoop, over: asyncio.Future[None]) -> None:
    """The client's thread. It closes the loop itself, because a thread that closes the client may be
    interrupted."""
    _run(loop, over)
    _run(loop, loop.create_task(_end_tasks()))
    loop.close()


def _run(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    """Run the loop until `future` is done.

    asyncio passes a SystemExit, which `on_rows` may raise, to the task's waiter, and also out of the loop.
    Other callers still need the loop, so it is run again."""
    while not future.done():
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_until_complete(future)


async def _end_tasks() -> None:
    """Let calls of other threads end. Without connections most end at once; the rest, such as a watch, is
    cancelled."""
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        _, rest = await asyncio.wait(tasks, timeout=_LAST_WORDS_S)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


async def _make(
    masters: str | Iterable[str], timeout_s: float, first_contact_s: float, zone: str
) -> AsyncClient:
    return AsyncClient(masters, timeout_s=timeout_s, first_contact_s=first_contact_s, zone=zone)
