"""After `delete_table` has returned nobody is told that a row of that table was written; see docs/python.md."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from stele.client import AsyncClient, AsyncTable
from stele.model.errors import Code, Rejected, Retryable, SteleError
from tests.tserver.local import HASHED, SCHEMA, LocalCluster, count

ROW = {"id": 1, "name": "n"}


@asynccontextmanager
async def writing(table: AsyncTable, acknowledged: list[int]) -> AsyncIterator[asyncio.Event]:
    """Within: single rows are put all the time, on all tablets. Set what is yielded once `delete_table` has returned."""
    returned, stop = asyncio.Event(), asyncio.Event()

    async def write(number: int) -> None:
        while not stop.is_set():
            begun_after = returned.is_set()
            try:
                await table.put({"id": number, "name": "n"})
            except SteleError:
                if begun_after:
                    return
            else:
                if begun_after:
                    acknowledged.append(number)
            number += 8
            await asyncio.sleep(0)

    writers = [asyncio.create_task(write(number)) for number in range(8)]
    try:
        yield returned
    finally:
        stop.set()
        await asyncio.gather(*writers)


async def refused(call: Awaitable[Any]) -> str:
    with pytest.raises(Rejected) as told:
        await call
    assert told.value.code is Code.NOT_FOUND
    return str(told.value)


async def test_no_handle_of_any_client_is_told_that_a_row_of_a_deleted_table_was_written(
    cluster: LocalCluster,
) -> None:
    async with cluster.client() as client, cluster.client() as other:
        await client.create_table("t", SCHEMA, HASHED)
        table = await other.open_table("t")
        await table.put(ROW)
        space = await client.create_keyspace("k")
        theirs = await other.keyspace("k")
        acknowledged: list[int] = []
        async with writing(table, acknowledged) as returned:
            await client.delete_table("t")
            returned.set()
            await refused(table.put(ROW))
        assert not acknowledged
        await refused(table.get({"id": 1}))
        await client.delete_table("k")
        await refused(theirs.replace("a", "b"))
        assert "k was deleted" in await refused(space.replace("a", "b"))


async def test_what_is_made_under_the_name_of_a_deleted_table_takes_nothing_from_older_handles(
    cluster: LocalCluster,
) -> None:
    async with cluster.client() as client, cluster.client() as other:
        mine = await client.create_table("t", SCHEMA, HASHED)
        theirs = await other.open_table("t")
        sessions = [mine.new_session(flush_interval_s=0), theirs.new_session(flush_interval_s=0)]
        for session in sessions:
            await session.upsert(ROW)
        await client.delete_table("t")
        await client.create_table("t", SCHEMA, HASHED)
        assert "t was deleted" in await refused(mine.put(ROW))
        assert "t was deleted" in await refused(sessions[0].upsert(ROW))
        await refused(theirs.put(ROW))
        for session in sessions:
            await refused(session.flush())
        assert await count(client) == 0


async def test_where_a_majority_cannot_be_told_the_caller_hears_of_it(cluster: LocalCluster) -> None:
    """One silent node of three takes no part in any majority: nothing is to be told of it."""
    async with cluster.client() as client:
        for name in ("one", "two"):
            await client.create_table(name, SCHEMA, HASHED)
        await cluster.stop("node-2")
        await client.delete_table("one")
        await cluster.stop("node-1")
        with pytest.raises(Retryable, match=r"table two is deleted, but 2 nodes .* do not answer") as told:
            await client.delete_table("two", timeout_s=0.5)
        assert told.value.code is Code.UNKNOWN_OUTCOME
        assert await client.list_tables() == []


async def test_whoever_asks_again_is_told_once_the_nodes_have_answered(cluster: LocalCluster) -> None:
    """The operator asks by the table's id, without waiting, and so may an administrator who was told that nodes are away."""
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, HASHED)
        await cluster.stop("node-1")
        await cluster.stop("node-2")
        unreached = await _delete(client, table.info.table_id, wait_ms=0)
        assert len(unreached) >= 2
        await cluster.launch("node-1")
        async with asyncio.timeout(60):
            while await _delete(client, table.info.table_id, wait_ms=500):
                pass


async def _delete(client: AsyncClient, table_id: str, *, wait_ms: int) -> list[str]:
    from stele.rpc.convert import id_to_pb
    from stele.rpc.proto import master_pb2

    request = master_pb2.DeleteTableRequest(table_id=id_to_pb(table_id), wait_ms=wait_ms)
    return list((await client.masters.call("DeleteTable", request)).unreached)
