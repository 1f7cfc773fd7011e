"""Prepared snapshots: any replica serves them once it has applied the index, and all of them serve the same rows."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from stele.consensus.replica import Replica
from stele.model.errors import Code, NotLeader, Retryable, SteleError
from tests.consensus.cluster import Group, rows, table
from tests.consensus.conftest import MakeGroup
from tests.consensus.test_snapshots import Links


async def _prepared(group: Group) -> tuple[int, int, dict[int, str]]:
    """(snapshot, index, rows) of a snapshot of the present, as the leader sees it."""

    async def ask(leader: Replica) -> tuple[int, int, dict[int, str]]:
        snapshot = int(leader.writes.timestamps.now())
        index = await leader.reads.prepare(snapshot)
        return snapshot, index, table(leader, snapshot)

    return await group.led(ask)


async def test_followers_serve_it_while_they_reach_nobody(group_of: MakeGroup) -> None:
    network = Links()
    group, _ = await group_of(3, network=network)
    await group.write(rows([1, 2], "old"))
    snapshot, index, seen = await _prepared(group)
    assert seen == {1: "old1", 2: "old2"}
    await group.write(rows([1, 3], "new"))
    for replica in group.replicas():
        await group.caught_up(replica)
    network.passes = lambda sender, to, entries: False
    for replica in group.replicas():
        await replica.reads.snapshot_ready(snapshot, prepared=index)
        assert table(replica, snapshot) == seen


async def test_a_fresh_snapshot_is_served_by_followers_only_where_it_was_prepared(
    group_of: MakeGroup,
) -> None:
    group, _ = await group_of(3)
    await group.write(rows([1]))
    leader = await group.leader()
    follower = next(r for r in group.replicas() if r is not leader)
    snapshot, index, seen = await _prepared(group)
    if snapshot > follower.writes.timestamps.applied and not follower.is_leader:
        with pytest.raises(NotLeader):
            await follower.reads.snapshot_ready(snapshot)
    await follower.reads.snapshot_ready(snapshot, prepared=index)
    assert table(follower, snapshot) == seen == {1: "x1"}


async def test_a_replica_that_lags_serves_it_once_it_has_caught_up(group_of: MakeGroup) -> None:
    network = Links()
    group, _ = await group_of(3, network=network)
    await group.write(rows([1]))
    leader = await group.leader()
    late = next(r for r in group.replicas() if r is not leader)
    await group.caught_up(late)
    behind = late.replica_id
    network.passes = lambda sender, to, entries: behind not in (sender, to)
    await group.write(rows([2]))
    snapshot, index, seen = await _prepared(group)
    assert seen == {1: "x1", 2: "x2"} and late.applied_index < index
    with pytest.raises(Retryable) as refused:
        await late.reads.snapshot_ready(snapshot, 100, prepared=index)
    assert refused.value.code is Code.TIMED_OUT
    network.passes = lambda sender, to, entries: True
    await late.reads.snapshot_ready(snapshot, prepared=index)
    assert table(late, snapshot) == seen


async def test_a_write_under_way_below_it_is_waited_for(group_of: MakeGroup) -> None:
    """Its index would be below that of the write, and a follower would serve the snapshot without it."""
    network = Links()
    group, _ = await group_of(3, network=network)
    for _ in range(20):  # a slow machine may depose the leader meanwhile
        network.passes = lambda sender, to, entries: True
        await group.write(rows([1]))
        leader = await group.leader()
        network.passes = lambda sender, to, entries: not entries
        with contextlib.suppress(SteleError):
            leader.writes.submit(rows([777])).add_done_callback(lambda done: done.exception())
            await asyncio.sleep(0.02)
        if not leader.writes.proposals.in_log:
            continue
        (proposal,) = leader.writes.proposals.in_log.values()
        asked = asyncio.create_task(leader.reads.prepare(proposal.timestamp, 30_000))
        await asyncio.wait([asked], timeout=0.2)
        if not asked.done():
            break
    network.passes = lambda sender, to, entries: True
    assert await asked >= proposal.opid.index
    for replica in group.replicas():
        await replica.reads.snapshot_ready(proposal.timestamp, prepared=asked.result())
        assert 777 in table(replica, proposal.timestamp)


@pytest.mark.parametrize("seed", range(3))
async def test_all_replicas_serve_the_same_rows_whoever_led_since(group_of: MakeGroup, seed: int) -> None:
    """One of them lags at times, and serves nothing meanwhile that it lacks."""
    network = Links()
    group, _ = await group_of(3, network=network)
    rng = random.Random(seed)
    prepared: list[tuple[int, int, dict[int, str]]] = []
    lagged = 0
    for step in range(12):
        behind = rng.randrange(4)  # 0: none
        network.passes = lambda sender, to, entries, behind=behind: not entries or to != behind
        await group.write(rows(rng.sample(range(8), 3), f"s{step}-"))
        if not behind:
            with contextlib.suppress(SteleError):
                await (await group.leader()).members.transfer_leadership()
        under_way = [
            asyncio.ensure_future(group.write(rows([rng.randrange(8)], f"w{step}-{n}-"))) for n in range(3)
        ]
        prepared.append(await _prepared(group))
        await asyncio.gather(*under_way)
        for snapshot, index, seen in [prepared[-1], *rng.sample(prepared, min(2, len(prepared)))]:
            for replica in group.replicas():
                try:
                    await replica.reads.snapshot_ready(snapshot, 50, prepared=index)
                except Retryable:
                    lagged += 1
                    continue
                assert table(replica, snapshot) == seen
    network.passes = lambda sender, to, entries: True
    for snapshot, index, seen in prepared:
        for replica in group.replicas():
            await replica.reads.snapshot_ready(snapshot, prepared=index)
            assert table(replica, snapshot) == seen
    assert lagged
