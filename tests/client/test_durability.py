"""What a write is content with, and what it says that it got."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pyarrow as pa
import pytest

import stele
from stele.client import Durability, durability
from stele.model.errors import Code, Rejected
from stele.rpc.proto import tserver_pb2
from tests.client.small import EIGHT, ONE, SCHEMA, one_tablet, small_cluster
from tests.tserver.local import HASHED, LocalCluster


async def test_a_put_says_what_it_got(tmp_path: Path) -> None:
    async with one_tablet(tmp_path) as (_, table, tablet):
        written = await table.put({"id": 1}, durability="memory")
        assert written.durability is Durability.MEMORY and written.durability == "memory"
        assert tablet.attempts[-1].durability == tserver_pb2.MEMORY
        written = await table.put({"id": 2}, durability=Durability.SYNCED)
        assert written.durability is Durability.SYNCED and written.timestamp > 0
        assert tablet.attempts[-1].durability == tserver_pb2.SYNCED
        assert isinstance(await table.put({"id": 3}), int), "who does not ask gets the hybrid time alone"
        assert tablet.attempts[-1].durability == tserver_pb2.SYNCED


async def test_rows_of_one_block_get_the_most_that_one_of_them_asks_for(tmp_path: Path) -> None:
    async with one_tablet(tmp_path) as (_, table, tablet):
        await table.put({"id": 0})
        before = len(tablet.attempts)
        memory, synced, plain = await asyncio.gather(
            table.put({"id": 1}, durability="memory"),
            table.put({"id": 2}, durability="synced"),
            table.put({"id": 3}),
        )
        assert [a.durability for a in tablet.attempts[before:]] == [tserver_pb2.SYNCED]
        assert memory.durability is synced.durability is Durability.SYNCED
        assert plain == memory.timestamp


async def test_blocks_of_arrow_and_sessions_say_the_least_that_they_got(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await client.create_table("t", SCHEMA, EIGHT)
        rows = pa.table({"id": range(100)})
        assert (await table.write_arrow(rows)).durability == "synced"
        assert (await table.write_arrow(rows, durability="memory")).durability == "memory"
        session = table.new_session(durability="memory")
        await session.upsert({"id": 7})
        assert (await session.flush()).durability is Durability.MEMORY


async def test_a_leader_of_an_earlier_release_has_synced_it(tmp_path: Path) -> None:
    """It does not know what it is asked, and answers after the commit."""
    async with small_cluster(tmp_path, nodes=1) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        for node in cluster.nodes:
            node.older = True
        assert (await table.put({"id": 1}, durability="memory")).durability is Durability.SYNCED


@pytest.mark.parametrize("wrong", ["disk", "", 1, "MEMORY"])
async def test_an_unknown_durability_is_refused_before_anything_is_sent(
    tmp_path: Path, wrong: object
) -> None:
    async with one_tablet(tmp_path) as (_, table, tablet):
        for call in (
            lambda: table.put({"id": 1}, durability=wrong),
            lambda: table.write_arrow(pa.table({"id": [1]}), durability=wrong),
        ):
            with pytest.raises(Rejected, match='expected "synced" or "memory"'):
                await call()
        with pytest.raises(Rejected, match='expected "synced" or "memory"'):
            table.new_session(durability=wrong)  # type: ignore[arg-type]
        assert not tablet.attempts


async def test_a_node_refuses_a_durability_that_it_does_not_know(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(durability.ASKED, Durability.MEMORY, 7)
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, ONE)
        with pytest.raises(Rejected, match="durability 7: this program knows 0"):
            await table.put({"id": 1}, durability="memory")
        assert await table.get(1) is None


async def test_nodes_answer_such_writes_and_reads_see_them(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        table = await client.create_table(
            "t", stele.Schema.make([("id", "int64"), ("n", "int64")], ["id"]), HASHED
        )
        for n in range(50):
            written = await table.put({"id": n % 5, "n": n}, durability="memory")
            assert written.durability in ("memory", "synced")
            assert await table.get(n % 5, ["n"]) == {"n": n}
        found = await table.scan(snapshot=written.timestamp).to_table()
        assert sorted(found["n"].to_pylist()) == [45, 46, 47, 48, 49]
        with pytest.raises(Rejected) as told:
            await table.insert({"id": 1, "n": 0})
        assert told.value.code is Code.ALREADY_PRESENT
