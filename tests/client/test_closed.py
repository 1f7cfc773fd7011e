"""A client that was closed: whatever is called says so at once, as an error that no loop retries, and nothing is dialled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stele.client import AsyncClient, AsyncKeySpace, AsyncTable, Client, Closed
from stele.model.block import RowOp
from stele.model.errors import Code, Rejected, Retryable
from stele.model.schema import Schema
from stele.rpc.channels import ChannelPool
from stele.rpc.identity import Identity
from stele.rpc.proto import master_pb2
from stele.rpc.proto.master_pb2_grpc import MasterServiceStub
from tests.client.small import SmallCluster, small_cluster

SCHEMA = Schema.make([("id", "int64"), ("n", "int32", True)], ["id"])
DATA = pa.table({"id": np.arange(10)})


@asynccontextmanager
async def opened(
    directory: Path, **settings: Any
) -> AsyncIterator[tuple[SmallCluster, AsyncClient, AsyncTable, AsyncKeySpace]]:
    """A cluster, and a client of it that has opened and used everything."""
    async with small_cluster(directory, **settings) as (cluster, client):
        table = await client.create_table("t", SCHEMA)
        space = await client.create_keyspace("s")
        await table.put({"id": 1})
        await space.replace("a", "1")
        yield cluster, client, table, space


def after_close(
    client: Any, table: Any, space: Any, scanner: Any, session: Any
) -> dict[str, Callable[[], Any]]:
    """All that a client may be asked, asynchronous or blocking."""
    return {
        "open_table": lambda: client.open_table("t"),
        "keyspace": lambda: client.keyspace("s"),
        "list_tables": lambda: client.list_tables(),
        "describe": lambda: client.describe("t"),
        "create_table": lambda: client.create_table("u", SCHEMA),
        "delete_table": lambda: client.delete_table("t"),
        "put": lambda: table.put({"id": 2}),
        "update": lambda: table.update({"id": 2, "n": 1}),
        "delete": lambda: table.delete({"id": 2}),
        "get": lambda: table.get(1),
        "write_arrow": lambda: table.write_arrow(DATA),
        "scan": lambda: table.scan(),
        "to_table": lambda: scanner.to_table(),
        "count": lambda: scanner.count(),
        "new_session": lambda: table.new_session(),
        "session": lambda: session.upsert({"id": 2}),
        "replace": lambda: space.replace("a", "2"),
        "read": lambda: space.read("a"),
        "list": lambda: space.list(),
        "snapshot": lambda: space.snapshot(),
        "watch": lambda: space.watch(),
        "lease": lambda: space.lease(),
        "leases": lambda: space.leases(),
    }


async def test_every_call_of_a_closed_client_says_so(tmp_path: Path) -> None:
    async with opened(tmp_path) as (cluster, client, table, space):
        scanner, session = table.scan(), table.new_session()
        await client.close()
        await client.close()
        requests = [node.requests for node in cluster.nodes]
        for name, call in after_close(client, table, space, scanner, session).items():
            with pytest.raises(Closed, match="CLOSED: this client was closed; create another one"):
                async with asyncio.timeout(60):
                    answer = call()
                    if isinstance(answer, Awaitable):
                        await answer
                    raise AssertionError(name)
        with pytest.raises(Closed):
            async for _ in scanner.batches():
                pass
        with pytest.raises(Closed):
            await client.masters.call("ListTables", master_pb2.ListTablesRequest())
        assert [node.requests for node in cluster.nodes] == requests


async def test_every_call_of_a_closed_blocking_client_says_so(tmp_path: Path) -> None:
    async with opened(tmp_path) as (cluster, *_):

        def use() -> None:
            client = Client(cluster.master_address)
            table, space = client.open_table("t"), client.keyspace("s")
            scanner, session = table.scan(), table.new_session()
            batches = scanner.batches()
            next(batches)
            client.close()
            for name, call in after_close(client, table, space, scanner, session).items():
                with pytest.raises(Closed, match="this client was closed"):
                    call()
                    raise AssertionError(name)
            batches.close()
            with pytest.raises(ZeroDivisionError), session:
                raise ZeroDivisionError  # what went wrong is not hidden by the session's own end

        await asyncio.to_thread(use)


async def test_a_watch_ends_with_its_client(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, client, _, space):
        watching = asyncio.ensure_future(space.changed("a", b"1"))
        await asyncio.sleep(0.1)
        await client.close()
        with pytest.raises(Closed):
            async with asyncio.timeout(60):
                await watching


async def test_a_row_under_way_is_finished_while_new_ones_are_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as (cluster, client, table, _):
        cluster.nodes[0].delay_s = 0.3
        under_way = asyncio.ensure_future(table.put({"id": 7}))
        await asyncio.sleep(0.1)
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0)
        with pytest.raises(Closed):
            await table.put({"id": 8})
        assert await under_way > 0
        await closing


async def test_a_write_whose_outcome_is_not_known_is_never_called_undone(tmp_path: Path) -> None:
    async with opened(tmp_path, timeout_s=60) as (cluster, client, _, space):
        cluster.nodes[0].came.clear()
        cluster.nodes[0].speaks.clear()
        waiting = asyncio.ensure_future(space.replace("a", "2"))
        await cluster.nodes[0].came.wait()
        await client.close()
        with pytest.raises(Retryable, match="the write may have been done") as caught:
            await waiting
        assert caught.value.code is Code.UNKNOWN_OUTCOME
        cluster.nodes[0].speaks.set()


async def test_nor_is_one_while_the_masters_are_asked_where_its_tablet_is(tmp_path: Path) -> None:
    async with opened(tmp_path, timeout_s=60) as (cluster, client, table, _), asyncio.timeout(60):
        (tablet,) = cluster.tablets_of("t")
        tablet.after.append(lambda: Retryable("the answer is lost", code=Code.UNAVAILABLE))
        tablet.before.extend([lambda: None, lambda: Rejected("it moved", code=Code.NOT_FOUND)])
        cluster.not_leading = 1_000_000
        writing = asyncio.ensure_future(table.write_arrow(DATA))
        while tablet.before or table.locations._refreshing is None:
            await asyncio.sleep(0.01)
        await client.close()
        with pytest.raises(Retryable, match="the write may have been done") as caught:
            await writing
        assert caught.value.code is Code.UNKNOWN_OUTCOME


async def test_a_scan_that_waits_for_a_thread_ends(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, client, table, _):
        held = threading.Event()
        pool = table.reads._flight
        for _ in range(8):
            asyncio.get_running_loop().run_in_executor(pool._threads, held.wait)

        waiting = asyncio.ensure_future(table.scan().to_table())
        await asyncio.sleep(0.1)
        await client.close()
        with pytest.raises(Closed):
            async with asyncio.timeout(60):
                await waiting
        held.set()


async def test_a_client_that_is_closed_before_it_met_a_master_does_not_go_on_looking(tmp_path: Path) -> None:
    client = AsyncClient("127.0.0.1:1", first_contact_s=60)
    looking = asyncio.ensure_future(client.list_tables())
    await asyncio.sleep(0.2)
    await client.close()
    with pytest.raises(Closed):
        async with asyncio.timeout(60):
            await looking


async def test_a_pool_that_is_closed_while_it_dials_keeps_no_channel() -> None:
    pool = ChannelPool(Identity())
    dialling = asyncio.ensure_future(pool.stub("localhost:1", MasterServiceStub))
    await asyncio.sleep(0)  # it waits for the name
    await pool.close()
    with pytest.raises(Closed):
        await dialling
    assert not pool._channels


async def test_a_close_that_nobody_waits_for_any_more_leaves_rows_to_end_as_they_do(tmp_path: Path) -> None:
    """Rows of which nobody had asked to be left, and a second close, which waits for them."""
    async with small_cluster(tmp_path) as (cluster, client):
        table = await client.create_table("t", SCHEMA)
        await table.put({"id": 0})
        cluster.nodes[0].came.clear()
        cluster.nodes[0].speaks.clear()
        first = asyncio.ensure_future(table.put({"id": 1}))
        await asyncio.wait_for(cluster.nodes[0].came.wait(), 60)
        second = asyncio.ensure_future(table.put({"id": 2}))
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.close(), 0.05)
        cluster.nodes[0].speaks.set()
        await asyncio.wait_for(client.close(), 60)
        assert await asyncio.wait_for(asyncio.gather(first, second), 60)


@pytest.mark.parametrize("turns", range(4))
async def test_tasks_that_are_cancelled_before_they_begin_leave_a_table_as_it_was(
    tmp_path: Path, turns: int
) -> None:
    """As at the end of asyncio.run: those of a row that is asked for again, wherever they are then."""
    async with opened(tmp_path) as (cluster, client, table, _), asyncio.timeout(60):
        (tablet,) = cluster.tablets_of("t")
        tablet.before.append(lambda: Retryable("wait", code=Code.THROTTLED))
        row = table._rows.put(RowOp.UPSERT, {"id": 2})
        while not (again := asking_again()):
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in again:
            task.cancel()
        assert await table.put({"id": 3}) > 0
        await client.close()
        assert row.cancelled()


async def test_a_loop_that_ends_begins_nothing_for_a_row_under_way(tmp_path: Path) -> None:
    """Its tasks are cancelled, those of the streams too; what is begun then is destroyed with the loop."""
    async with opened(tmp_path) as (cluster, client, table, _), asyncio.timeout(60):
        node = cluster.nodes[0]
        node.came.clear()
        node.speaks.clear()
        row = table._rows.put(RowOp.UPSERT, {"id": 2})
        await node.came.wait()
        for stream in client._streams._streams.values():
            assert stream._task is not None
            stream._task.cancel()
        with pytest.raises(Retryable) as caught:
            await row
        assert caught.value.code is Code.UNKNOWN_OUTCOME and not asking_again()
        node.speaks.set()


async def test_a_client_is_of_use_though_all_tasks_of_its_loop_were_cancelled(tmp_path: Path) -> None:
    """As before a program's last words, which its loop outlives."""
    async with opened(tmp_path) as (cluster, client, table, _), asyncio.timeout(60):
        node = cluster.nodes[0]
        node.came.clear()
        node.speaks.clear()
        row = table._rows.put(RowOp.UPSERT, {"id": 2})
        await node.came.wait()
        streams = list(client._streams._streams.values())
        ended = [stream._task for stream in streams if stream._task is not None]
        for task in ended:
            task.cancel()
        await asyncio.wait(ended)
        with pytest.raises(Retryable):
            await row
        last = table._rows.put(RowOp.UPSERT, {"id": 3})
        node.speaks.set()
        assert await last > 0
        assert list(client._streams._streams.values()) == streams


def asking_again() -> list[asyncio.Task[Any]]:
    """Tasks of requests whose first attempt has failed."""
    return [task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == "Way.go_on"]


async def test_a_block_that_is_given_up_after_it_was_cut_is_not_waited_for(tmp_path: Path) -> None:
    async with opened(tmp_path, timeout_s=600) as (cluster, client, table, _):
        (tablet,) = cluster.tablets_of("t")
        node = cluster.nodes[0]

        def refuse() -> Rejected:
            node.speaks.clear()
            node.came.clear()
            return Rejected("too large", code=Code.TOO_LARGE)

        tablet.before.append(refuse)
        rows = [asyncio.ensure_future(table.put({"id": number})) for number in range(4)]
        while node.speaks.is_set():
            await asyncio.sleep(0.01)
        await node.came.wait()  # the first half has
        for row in rows:
            row.cancel()
        async with asyncio.timeout(60):
            await client.close()
        node.speaks.set()


async def test_a_block_is_waited_for_while_anybody_waits_for_one_of_its_rows(tmp_path: Path) -> None:
    """Rows that came one after another, and left together."""
    async with opened(tmp_path, timeout_s=600) as (cluster, client, table, _), asyncio.timeout(60):
        node = cluster.nodes[0]
        node.came.clear()
        node.speaks.clear()
        ahead = asyncio.ensure_future(table.put({"id": 1}))
        await node.came.wait()
        rows = []
        for number in (2, 3):
            rows.append(asyncio.ensure_future(table.put({"id": number})))
            while sum(map(len, table._rows._batcher._waiting.values())) < len(rows):
                await asyncio.sleep(0.01)
        node.speaks.set()
        await ahead
        node.speaks.clear()
        while not any(len(part.futures) == 2 for part in table._rows._batcher._leaving.values()):
            await asyncio.sleep(0)
        rows[0].cancel()
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0)
        node.speaks.set()
        assert await rows[1] > 0
        await closing


async def test_a_close_does_not_wait_for_rows_that_nobody_waits_for_any_more(tmp_path: Path) -> None:
    """Under way or behind, given up before the close or during it; whoever still waits is waited for."""
    async with opened(tmp_path, timeout_s=600) as (cluster, client, table, _):
        node = cluster.nodes[0]
        node.came.clear()
        node.speaks.clear()
        under_way = asyncio.ensure_future(table.put({"id": 1}))
        await node.came.wait()
        behind = [asyncio.ensure_future(table.put({"id": number})) for number in range(2, 5)]
        await asyncio.sleep(0.1)
        under_way.cancel()
        behind[0].cancel()
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0.1)
        behind[1].cancel()
        await asyncio.sleep(0.1)
        assert not closing.done() and not behind[2].done()
        behind[2].cancel()
        async with asyncio.timeout(60):
            await closing
        node.speaks.set()
