"""Rows by key: many keys share a request, and each caller gets its own row or its own error."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stele.client import AsyncTable, point_reads
from stele.model.errors import Code, Corrupt, Rejected, Retryable
from stele.rpc.proto import tserver_pb2
from tests.client.small import EIGHT, ONE, SCHEMA, SmallCluster, small_cluster

ROWS = 1_000


async def filled(client: Any, partitioning: Any = EIGHT) -> AsyncTable:
    table: AsyncTable = await client.create_table("t", SCHEMA, partitioning)
    ids = range(0, 2 * ROWS, 2)
    await table.write_arrow(
        pa.table({"id": ids, "name": [f"name {n}" for n in ids], "n": pa.array(ids, pa.int32())})
    )
    return table


def row(n: int) -> dict[str, Any] | None:
    return {"id": n, "name": f"name {n}", "n": n} if n % 2 == 0 and 0 <= n < 2 * ROWS else None


def requests(cluster: SmallCluster) -> int:
    return sum(node.requests for node in cluster.nodes)


async def test_many_keys_are_read_in_their_order_with_few_requests(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        table = await filled(client)
        assert await table.get(4) == row(4)  # the leaders are known
        assert await table.get_many([]) == []
        wanted = [7, 6, 2_000, 6, -2, *range(1_998, -1, -1)]
        before = requests(cluster)
        assert await table.get_many(wanted) == [row(n) for n in wanted]
        most = -(-len(wanted) // point_reads.KEYS_MAX) + 8
        assert requests(cluster) - before <= 2 * most
        found = await table.get_many(({"id": n} for n in (8, 9, 10)), ["n"])
        assert found == [{"n": 8}, None, {"n": 10}]


async def test_gets_of_one_turn_share_a_request(tmp_path: Path) -> None:
    async with small_cluster(tmp_path, nodes=1) as (cluster, client):
        table = await filled(client, ONE)
        await table.get(0)
        before = requests(cluster)
        found = await asyncio.gather(*(table.get(n) for n in range(100)))
        assert found == [row(n) for n in range(100)]
        assert requests(cluster) - before == 1
        some = await asyncio.gather(
            *(table.get(n, ["n"]) for n in range(4)), *(table.get(n) for n in range(4))
        )
        assert some[:4] == [{"n": 0}, None, {"n": 2}, None] and some[4:] == [row(n) for n in range(4)]
        assert requests(cluster) - before == 3, "other columns are another request"


async def test_gets_that_come_while_others_are_under_way_wait_and_see_later_writes(tmp_path: Path) -> None:
    """Their request leaves after they were made, so it sees what was written before."""
    async with small_cluster(tmp_path, nodes=1, timeout_s=60) as (cluster, client):
        table = await filled(client, ONE)
        await table.get(0)
        (node,) = cluster.nodes
        node.speaks.clear()
        under_way = asyncio.ensure_future(table.get(0))
        await asyncio.sleep(0.05)
        write = asyncio.ensure_future(table.put({"id": 1, "n": 77}))
        node.speaks.set()
        await write
        node.speaks.clear()
        before = requests(cluster)
        late = [asyncio.ensure_future(table.get(1, ["n"])) for _ in range(50)]
        await asyncio.sleep(0.05)
        node.speaks.set()
        assert await asyncio.gather(*late) == [{"n": 77}] * 50
        assert requests(cluster) - before <= 2
        await under_way


async def test_keys_wait_for_the_round_under_way_and_leave_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request for each tablet, although the keys came in turns of their own and their tablets were idle."""
    async with small_cluster(tmp_path, nodes=1, timeout_s=60) as (cluster, client):
        table = await filled(client)
        await table.get_many(range(100))
        monkeypatch.setattr(point_reads, "GATE_S", 60.0)
        (node,) = cluster.nodes
        node.speaks.clear()
        before = requests(cluster)
        gets = [asyncio.ensure_future(table.get(0))]
        await asyncio.sleep(0.05)
        for n in range(1, 100):
            gets.append(asyncio.ensure_future(table.get(n)))
            await asyncio.sleep(0)
        node.speaks.set()
        assert await asyncio.gather(*gets) == [row(n) for n in range(100)]
        assert requests(cluster) - before <= 1 + 8


async def test_a_key_that_does_not_fit_fails_alone(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (_, client):
        table = await filled(client)
        wrong: list[Any] = ["four", None, (1, 2), {"name": "x"}, 1 << 70]
        found = await asyncio.gather(*(table.get(key) for key in (2, *wrong, 4)), return_exceptions=True)
        assert found[0] == row(2) and found[-1] == row(4)
        for key, error in zip(wrong, found[1:-1]):
            assert isinstance(error, Rejected) and error.code is Code.INVALID_ARGUMENT, (key, error)
        with pytest.raises(Rejected, match="table t: key 'four'"):
            await table.get_many([2, "four", 4])
        with pytest.raises(Rejected, match="expected columns of table t"):
            await table.get_many([2], ["colour"])


async def test_a_node_that_does_not_say_which_keys_it_found_is_asked_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of release 0.1.0."""
    async with small_cluster(tmp_path, nodes=1) as (cluster, client):
        table = await filled(client, ONE)
        (node,) = cluster.nodes
        read = node._read

        def silent(request: tserver_pb2.ReadRequest) -> tserver_pb2.ClientResponse:
            answer = read(request)
            del answer.read.places[:]
            return answer

        monkeypatch.setattr(node, "_read", silent)
        assert await table.get_many(range(20)) == [row(n) for n in range(20)]


async def test_rows_that_are_too_large_together_are_asked_for_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with small_cluster(tmp_path, nodes=1) as (cluster, client):
        table = await filled(client, ONE)
        (node,) = cluster.nodes
        read, asked = node._read, []

        def small(request: tserver_pb2.ReadRequest) -> tserver_pb2.ClientResponse:
            answer = read(request)
            asked.append(len(answer.read.places))
            if len(answer.read.places) > 2:
                raise Rejected("too large", code=Code.TOO_LARGE)
            return answer

        monkeypatch.setattr(node, "_read", small)
        assert await table.get_many(range(0, 32, 2)) == [row(n) for n in range(0, 32, 2)]
        assert max(asked) == 16 and asked[-1] <= 2
        monkeypatch.setattr(node, "_read", lambda request: _raise(Rejected("row", code=Code.TOO_LARGE)))
        with pytest.raises(Rejected, match="row"):
            await table.get_many([2, 4])


def _raise(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize("places", [[0], [0, 5], [0, 1, 2]])
async def test_an_answer_with_rows_of_unknown_keys_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: list[int]
) -> None:
    async with small_cluster(tmp_path, nodes=1) as (cluster, client):
        table = await filled(client, ONE)
        (node,) = cluster.nodes
        read = node._read

        def lying(request: tserver_pb2.ReadRequest) -> tserver_pb2.ClientResponse:
            answer = read(request)
            answer.read.places[:] = places
            return answer

        monkeypatch.setattr(node, "_read", lying)
        with pytest.raises(Corrupt, match="rows of unknown keys"):
            await table.get_many([2, 4])


async def test_a_silent_tablet_delays_its_own_keys_only_and_none_for_longer_than_its_caller_waits(
    tmp_path: Path,
) -> None:
    async with small_cluster(tmp_path, timeout_s=2) as (cluster, client):
        table = await filled(client)
        cluster.tablets_of("t")[3].leader = 1
        assert await table.get_many(range(100)) == [row(n) for n in range(100)]
        cluster.nodes[0].speaks.clear()
        loop = asyncio.get_running_loop()
        begun, ends = loop.time(), []

        async def one(n: int, after_s: float) -> str:
            await asyncio.sleep(after_s)
            start = loop.time()
            try:
                assert await table.get(n) == row(n)
            except Retryable as exc:
                ends.append(loop.time() - start)
                assert exc.code in (Code.TIMED_OUT, Code.NO_QUORUM)
                return "late"
            assert loop.time() - begun < 1.9, "it waited for another tablet"
            return "read"

        told = await asyncio.gather(*(one(n, n % 10 / 10) for n in range(100)))
        assert set(told) == {"late", "read"}
        assert all(1.5 < waited < 8 for waited in ends), ends
        cluster.nodes[0].speaks.set()
        assert await table.get_many(range(100)) == [row(n) for n in range(100)]


async def test_a_caller_that_leaves_takes_nobody_with_it(tmp_path: Path) -> None:
    async with small_cluster(tmp_path, nodes=1, timeout_s=60) as (cluster, client):
        table = await filled(client, ONE)
        (node,) = cluster.nodes
        node.speaks.clear()
        gets = [asyncio.ensure_future(table.get(n)) for n in range(10)]
        many = asyncio.ensure_future(table.get_many(range(10)))
        await asyncio.sleep(0.1)
        gets[3].cancel()
        many.cancel()
        await asyncio.sleep(0)
        node.speaks.set()
        found = await asyncio.gather(*gets, return_exceptions=True)
        assert isinstance(found[3], asyncio.CancelledError) and many.cancelled()
        assert [one for n, one in enumerate(found) if n != 3] == [row(n) for n in range(10) if n != 3]
