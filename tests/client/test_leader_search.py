"""One that was asked is silent: who is asked instead, when, and what becomes of the requests it was sent.

Attempts, dialling and pings last longer than any test here, so that nothing but the search ends the waiting.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stele.client import AsyncTable, Client
from stele.client.leader_search import SLOW_S
from stele.model.errors import Closed, Code, Retryable, SteleError
from stele.model.partition import PartitionSchema
from stele.model.schema import Schema
from tests.client.small import SmallCluster, small_cluster
from tests.client.small_tablet import Tablet

SCHEMA = Schema.make([("id", "int64"), ("n", "int32", True)], ["id"])
ONE = PartitionSchema()


@pytest.fixture(autouse=True)
def _long_attempts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("stele.client.attempts.ATTEMPT_TIMEOUT_S", 300.0)
    monkeypatch.setattr("stele.client.streams._DIAL_TIMEOUT_S", 300.0)
    monkeypatch.setattr("stele.rpc.connection.KEEPALIVE_TIME_MS", 300_000)
    yield


async def _table(cluster: SmallCluster, table: AsyncTable) -> Tablet:
    """The table's tablet, whose leader is node 0 and has a stream already."""
    (tablet,) = cluster.tablets.values()
    await table.put({"id": 0})
    tablet.attempts.clear()
    return tablet


async def test_a_silent_leader_is_left_for_the_one_that_the_others_name(tmp_path: Path) -> None:
    async with small_cluster(tmp_path, timeout_s=60) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        tablet = await _table(cluster, table)
        cluster.nodes[0].speaks.clear()
        tablet.leader, tablet.term = 2, 2
        async with asyncio.timeout(60):
            await asyncio.gather(*(table.insert({"id": 1 + n}) for n in range(50)))
        assert await table.get({"id": 50}) == {"id": 50, "n": None}
        assert cluster.nodes[1].requests == 0  # nobody was tried in turn


async def test_one_that_is_slow_and_leads_is_sent_nothing_twice(tmp_path: Path) -> None:
    """Also where another request, or a scan, turns to the next replica meanwhile."""
    async with small_cluster(tmp_path, timeout_s=60) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        tablet = await _table(cluster, table)
        cluster.nodes[0].delay_s = 3 * SLOW_S
        put = asyncio.ensure_future(table.put({"id": 1}))
        await asyncio.sleep(SLOW_S / 2)
        (place,) = table.locations.by_ordinal([0])
        place.ask_next(place.target())
        await put
        assert len(tablet.attempts) == 1
        assert 1 <= cluster.nodes[1].searches <= 20


async def test_however_many_wait_there_is_one_search_at_a_time(tmp_path: Path) -> None:
    async with small_cluster(tmp_path, timeout_s=60) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        await _table(cluster, table)
        cluster.nodes[0].delay_s = 6 * SLOW_S
        await asyncio.gather(*(table.get({"id": n}) for n in range(500)))
        assert 1 <= cluster.nodes[1].searches <= 50


async def test_whoever_knows_the_newest_term_is_believed(tmp_path: Path) -> None:
    """Two of five are silent; one led in an older term, and has not heard of its end."""
    async with small_cluster(tmp_path, nodes=5, timeout_s=60) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        tablet = await _table(cluster, table)
        cluster.nodes[0].speaks.clear()
        cluster.nodes[1].speaks.clear()
        tablet.leader, tablet.term = 3, 3
        tablet.heard[2] = tablet.heard[4] = (2, 4)
        async with asyncio.timeout(60):
            await table.put({"id": 1})
        assert cluster.nodes[2].requests == cluster.nodes[4].requests == 0


async def test_thousands_that_never_left_end_once_each(tmp_path: Path) -> None:
    """The node does not even open a stream."""
    async with small_cluster(tmp_path, timeout_s=60) as (cluster, client):
        space = await client.create_keyspace("s")
        (tablet,) = cluster.tablets.values()
        cluster.nodes[0].speaks.clear()
        tablet.leader, tablet.term = 2, 2
        async with asyncio.timeout(60):
            await asyncio.gather(*(space.replace(f"{n}", "1") for n in range(4_000)))
        assert [node.requests for node in cluster.nodes] == [0, 0, 4_000] and tablet.index == 4_000


async def test_a_client_that_closes_ends_what_waits_and_asks_nobody_any_more(tmp_path: Path) -> None:
    async with small_cluster(tmp_path, timeout_s=60) as (cluster, client):
        space = await client.create_keyspace("s")
        (tablet,) = cluster.tablets.values()
        await space.replace("a", "1")
        cluster.nodes[0].speaks.clear()
        tablet.leader, tablet.term = -1, 2
        waiting = asyncio.ensure_future(space.replace("a", "2"))
        await asyncio.sleep(2 * SLOW_S)
        await client.close()
        with pytest.raises(Retryable, match="client was closed") as caught:
            async with asyncio.timeout(60):
                await waiting
        assert caught.value.code is Code.UNKNOWN_OUTCOME
        searches = cluster.nodes[1].searches
        with pytest.raises(Closed, match="this client was closed; create another one"):
            await space.replace("a", "3")
        await asyncio.sleep(2 * SLOW_S)
        assert cluster.nodes[1].searches == searches
        cluster.nodes[0].speaks.set()
        tablet.leader = 0


async def test_a_blocking_client_that_closes_leaves_no_thread_waiting(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, first):
        await first.create_keyspace("s")
        client = await asyncio.to_thread(Client, cluster.master_address, timeout_s=60)
        space = await asyncio.to_thread(client.keyspace, "s")
        await asyncio.to_thread(space.replace, "a", "1")
        cluster.nodes[0].speaks.clear()
        cluster.nodes[0].came.clear()
        ended: list[BaseException] = []

        def write() -> None:
            """Again and again, as a thread does that knows of no end."""
            for _ in range(3):
                try:
                    space.replace("a", "2")
                except BaseException as exc:  # noqa: BLE001 - whatever it is, the call has ended
                    ended.append(exc)

        threads = [threading.Thread(target=write, daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        await cluster.nodes[0].came.wait()
        closing = [asyncio.to_thread(client.close) for _ in range(2)]
        await asyncio.gather(*closing)
        for thread in threads:
            await asyncio.to_thread(thread.join, 60)
        assert len(ended) == 24 and all(isinstance(exc, SteleError) for exc in ended)
        cluster.nodes[0].speaks.set()
