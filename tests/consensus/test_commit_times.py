"""How long writes wait until they are committed, as /metrics tells it: each counts once, at the leader that proposed it."""

from __future__ import annotations

import asyncio
import time

from tests.consensus.cluster import rows, wait_until
from tests.consensus.conftest import MakeGroup
from tests.harness.histograms import Durations, here


def commits() -> Durations:
    return here("stele_commit_seconds")


async def test_each_write_counts_once_although_three_replicas_apply_it(group_of: MakeGroup) -> None:
    group, _ = await group_of()
    leader = await group.leader()
    before, begun_s = commits(), time.perf_counter()
    outcomes = await asyncio.gather(*(leader.writes.propose(rows([i])) for i in range(50)))
    for replica in group.replicas():
        await group.caught_up(replica)
    took = commits().since(before)
    assert len(outcomes) == took.count == 50
    assert 0 < took.sum_s < 50 * (time.perf_counter() - begun_s)


async def test_a_write_that_waits_for_its_followers_counts_until_they_have_it(group_of: MakeGroup) -> None:
    """Its own log has it at once."""
    group, nodes = await group_of()
    leader = await group.leader()
    loop, network = asyncio.get_running_loop(), nodes[0].network
    before = commits()
    network.cut.update(n.node_id for n in nodes if n.node_id != leader.host.node_id)
    write = asyncio.ensure_future(leader.writes.propose(rows([1])))
    begun = loop.time()
    await wait_until(lambda: loop.time() - begun > 0.12)
    assert commits().since(before).count == 0 and not write.done()
    network.cut.clear()
    await write
    took = commits().since(before)
    assert (took.count, took.over(0.1)) == (1, 1)


async def test_entries_of_others_and_writes_that_were_lost_count_nothing(group_of: MakeGroup) -> None:
    """A leader alone; then its successor, in whose term other entries have the place of what it proposed."""
    group, nodes = await group_of()
    leader = await group.leader()
    network = nodes[0].network
    before = commits()
    network.cut.add(leader.host.node_id)
    lost = [leader.writes.submit(rows([n])) for n in range(5)]
    await wait_until(lambda: not leader.is_leader)
    successor = await group.leader()
    await successor.writes.propose(rows([9]), deadline_ms=30_000)  # once: a second attempt would count, too
    network.cut.clear()
    await group.caught_up(leader)
    ends = await asyncio.gather(*lost, return_exceptions=True)
    assert all(isinstance(end, Exception) for end in ends)
    assert commits().since(before).count == 1
