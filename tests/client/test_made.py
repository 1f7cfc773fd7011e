"""How long it is waited for the leaders of what is made: as long as the caller says, whatever the masters go through."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from stele.client import AsyncClient, locations
from stele.client.locations import table_info_from_pb
from stele.model.errors import Code, Rejected, Retryable
from stele.model.partition import partitions
from stele.rpc.channels import ChannelPool
from stele.rpc.convert_schema import partition_to_pb, partitioning_to_pb, schema_to_pb
from stele.rpc.identity import Identity
from stele.rpc.masters import Masters
from stele.rpc.proto import common_pb2, master_pb2
from tests.client.small import EIGHT, SCHEMA, SmallCluster, small_cluster

VOTER = common_pb2.VOTER
Make = Callable[[AsyncClient, float], Awaitable[Any]]


def table(client: AsyncClient, timeout_s: float) -> Awaitable[Any]:
    return client.create_table("made", SCHEMA, EIGHT, timeout_s=timeout_s)


def keyspace(client: AsyncClient, timeout_s: float) -> Awaitable[Any]:
    return client.create_keyspace("made", timeout_s=timeout_s)


both = pytest.mark.parametrize("make", [table, keyspace])


async def outlasts_refusals(cluster: SmallCluster, making: asyncio.Future[Any]) -> None:
    """The master refuses whatever it is asked five times more, then leads, as all tablets do; and all is made."""
    left = cluster.not_leading - 5
    async with asyncio.timeout(60):
        while cluster.not_leading > left and not making.done():
            await asyncio.sleep(0.02)
    cluster.elect()
    cluster.not_leading = 0
    await making


@both
async def test_masters_that_have_no_leader_for_a_while_are_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    """They fail over while tablets elect: one question to them had 5 s, and its failure was the caller's."""
    monkeypatch.setattr(locations, "_REFRESH_TIMEOUT_S", 0.2)
    async with small_cluster(tmp_path) as (cluster, client):
        cluster.unled = True
        making = asyncio.ensure_future(make(client, 60))
        async with asyncio.timeout(60):
            while cluster.located < 2:
                await asyncio.sleep(0.02)
        cluster.not_leading = 1_000_000
        await outlasts_refusals(cluster, making)


@both
async def test_the_callers_time_counts_and_not_the_clients(tmp_path: Path, make: Make) -> None:
    """A client that gives up rows soon may wait long for what it makes."""
    async with small_cluster(tmp_path, timeout_s=0.2) as (cluster, client):
        cluster.refuses_then = 1_000_000
        making = asyncio.ensure_future(make(client, 60))
        async with asyncio.timeout(60):
            while not cluster.not_leading:
                await asyncio.sleep(0.02)
        await outlasts_refusals(cluster, making)


@both
async def test_who_waits_no_longer_is_told_that_it_is_made(tmp_path: Path, make: Make) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        cluster.unled = True
        for timeout_s in (
            0.5,
            2.0,
            8.0,
            32.0,
        ):  # where the machine stands still so long, nothing is made in that time
            with pytest.raises(Retryable) as caught:
                await make(client, timeout_s)
            if caught.value.code is Code.NOT_READY:
                break
            for info in await client.list_tables():
                await client.delete_table(info.name)
        assert caught.value.code is Code.NOT_READY
        assert re.search(r"0 of \d tablets have a leader after", str(caught.value))
        assert [info.name for info in await client.list_tables()] == ["made"]


async def test_the_masters_are_asked_less_often_about_a_table_of_many_tablets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of a thousand tablets that lost its leader has the whole table asked for. That took a quarter of a core of the master."""
    async with small_cluster(tmp_path) as (cluster, client):
        place = (await table(client, 60)).locations
        await place.refresh_soon()
        monkeypatch.setattr(locations, "_PAUSE_PER_TABLET_S", 1_000.0)
        asked, again = cluster.located, place.refresh_soon()
        await asyncio.sleep(2 * (locations.REFRESH_INTERVAL_S + locations._SPREAD_S))
        assert cluster.located == asked and not again.done()


def test_of_what_masters_say_the_tablets_and_replicas_that_serve_are_taken() -> None:
    """Not a tablet that was given up or dropped, nor one that logs only; who leads first, who is not heard last."""
    learner, witness = common_pb2.NON_VOTER, common_pb2.WITNESS
    kinds = [(1, learner, True), (2, witness, True), (3, VOTER, False), (4, VOTER, True), (5, VOTER, True)]
    table = master_pb2.TableInfoPB(
        table_id=bytes(16),
        name="t",
        state="RUNNING",
        schema=schema_to_pb(SCHEMA),
        partitioning=partitioning_to_pb(EIGHT),
    )
    answer = master_pb2.GetTableLocationsResponse(table=table)
    part, other, *_ = map(partition_to_pb, partitions(EIGHT))
    for number, (of, state) in enumerate(
        ((part, "RUNNING"), (part, "REPLACED"), (part, "DELETED"), (other, "REPLACED"))
    ):
        pb = answer.tablets.add(tablet_id=bytes([number] * 16), partition=of, state=state)
        for node, kind, alive in kinds:
            role = common_pb2.LEADER if node == 5 else common_pb2.FOLLOWER
            peer = common_pb2.PeerPB(node_id=bytes([node] * 16), member_type=kind)
            pb.replicas.add(peer=peer, role=role, alive=alive)
    found = locations.Locations(
        Masters(ChannelPool(Identity()), ["127.0.0.1:1"]), "", table_info_from_pb(table)
    )
    found.take(answer)
    (tablet,) = found.tablets
    assert tablet.tablet_id == "00" * 16 and not found.complete
    assert [replica.node_id[:2] for replica in tablet.replicas] == ["05", "04", "03"]
    with pytest.raises(Retryable, match="only 1 of 8 tablets exist so far"):
        found.by_ordinal([0])
    answer.table.state = "REMOVED"
    with pytest.raises(Rejected, match="table t was deleted"):
        found.take(answer)
