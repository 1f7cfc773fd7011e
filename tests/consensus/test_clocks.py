"""A node whose wall clock is wrong, by what most clocks say: it makes no timestamps, hands over, and stands last."""

from __future__ import annotations

import asyncio
import time

import pytest

from stele.consensus.replica import Replica
from stele.model.clock import from_physical_us, physical_us
from stele.model.errors import Code, Rejected, Retryable
from tests.consensus.cluster import WAIT_S, TestNode, rows, table, wait_until
from tests.consensus.conftest import MakeGroup

HOUR_US = 3_600_000_000
STEPS = pytest.mark.parametrize("step_us", [HOUR_US, -HOUR_US, 60_000_000], ids=["ahead", "behind", "minute"])


def compare_clocks(nodes: list[TestNode]) -> None:
    """Each learns what the clocks of the others say."""
    for node in nodes:
        node.hear_clocks([other for other in nodes if other is not node])


def newest(replica: Replica) -> int:
    """Physical µs of the newest timestamp that a replica has applied."""
    return physical_us(replica.writes.timestamps.applied)


@STEPS
async def test_no_timestamp_is_made_of_a_clock_that_was_set(group_of: MakeGroup, step_us: int) -> None:
    """Its next write was stamped an hour ahead on all replicas; an hour behind, the node refused all new programs."""
    group, nodes = await group_of()
    compare_clocks(nodes)
    await group.write(rows([1]))
    leader = await group.leader()
    group.node_of(leader).skew_us = step_us
    with pytest.raises(
        Retryable, match=f"the clock of node {leader.host.node_id[:8]} says .* most clocks"
    ) as refused:
        await leader.writes.propose(rows([2]))
    assert refused.value.code is Code.NOT_READY
    with pytest.raises(Retryable) as unread:
        await leader.reads.snapshot_ready(from_physical_us(time.time_ns() // 1_000 + 100_000))
    assert unread.value.code is Code.NOT_READY
    assert leader.writes.timestamps.next_ceiling() is None and leader.writes.timestamps.assign() is None
    assert all(newest(r) <= time.time_ns() // 1_000 + 250_000 for r in group.replicas())
    assert table(leader, await leader.reads.latest_snapshot()) == {1: "x1"}
    group.node_of(leader).skew_us = 0
    await group.write(rows([2]))


async def test_writes_that_waited_for_a_ceiling_and_those_behind_them_are_in_order(
    group_of: MakeGroup,
) -> None:
    """Whoever finds a ceiling and nobody that waits goes to the core at once; the others when they can."""
    group, _ = await group_of()
    await group.write(rows([1]))
    leader = await group.leader()
    at_once = leader.writes.submit(rows([2]))
    assert not leader.writes.proposals.waiting
    # Past the ceiling, which runs the further ahead the longer commits take: another has to come first.
    group.node_of(leader).skew_us = (
        physical_us(leader.writes.timestamps._committed) + 1 - time.time_ns() // 1_000
    )
    waiting = [leader.writes.submit(rows([key])) for key in (3, 4)]
    assert len(leader.writes.proposals.waiting) == 2
    group.node_of(leader).skew_us = 0  # below it again: whoever comes waits behind those that do
    waiting.append(leader.writes.submit(rows([5])))
    assert len(leader.writes.proposals.waiting) == 3
    outcomes = await asyncio.wait_for(asyncio.gather(at_once, *waiting), WAIT_S)
    times = [outcome.timestamp for outcome in outcomes]
    assert times == sorted(set(times))
    assert table(leader, await leader.reads.latest_snapshot()) == {key: f"x{key}" for key in range(1, 6)}


async def test_writes_that_wait_when_the_clock_is_set_are_told_to_try_again(group_of: MakeGroup) -> None:
    """They would wait for a timestamp as long as their callers do."""
    group, nodes = await group_of()
    compare_clocks(nodes)
    await group.write(rows([1]))
    leader = await group.leader()
    leader.writes.timestamps._clock.observe(
        leader.writes.timestamps._committed
    )  # another ceiling has to come first
    waiting = leader.writes.submit(rows([2]))
    group.node_of(leader).skew_us = HOUR_US
    with pytest.raises(Retryable) as refused:
        await asyncio.wait_for(waiting, WAIT_S)
    assert refused.value.code is Code.NOT_READY


@STEPS
async def test_a_leader_whose_clock_is_wrong_hands_over_until_it_is_right(
    group_of: MakeGroup, step_us: int
) -> None:
    group, nodes = await group_of()
    compare_clocks(nodes)
    for node in nodes:
        node.watch_clock()
    await group.write(rows([1]))
    old = await group.leader()
    wrong = group.node_of(old)
    wrong.skew_us = step_us
    await wait_until(lambda: any(r.is_leader for r in group.replicas() if r is not old))
    outcome = await group.write(rows([2]))
    assert abs(physical_us(outcome.timestamp) - time.time_ns() // 1_000) < 30_000_000
    with pytest.raises((Retryable, Rejected)):
        await (await group.leader()).members.transfer_leadership(old.replica_id)
    assert not old.is_leader
    wrong.skew_us = 0
    assert not wrong.clock_fault(wrong.wall_us())

    async def lead_again() -> None:
        while not old.is_leader:
            try:
                await (await group.leader()).members.transfer_leadership(old.replica_id)
            except (Retryable, Rejected):
                await asyncio.sleep(0.05)

    await asyncio.wait_for(lead_again(), WAIT_S)
    await group.write(rows([3]))


async def test_leadership_passes_those_whose_clocks_are_wrong_too(group_of: MakeGroup) -> None:
    """The most advanced voter, or the first of equals, may be as wrong as the leader."""
    group, nodes = await group_of(spare=2)
    compare_clocks(nodes)
    await group.write(rows([1]))
    old = await group.leader()
    right = next(r for r in reversed(group.replicas()) if r is not old)
    for replica in group.replicas():
        if replica is not right:
            group.node_of(replica).skew_us = HOUR_US
    for node in nodes:
        node.watch_clock()
    await wait_until(lambda: right.is_leader)
    await group.write(rows([2]))


@pytest.mark.usefixtures("quick_elections")
async def test_one_whose_clock_is_wrong_leads_where_only_it_has_all_entries(group_of: MakeGroup) -> None:
    """It would never end: nobody else can be elected. It ships what it has, and hands over."""
    group, nodes = await group_of()
    compare_clocks(nodes)
    leader = await group.leader()
    with_all, without = (r for r in group.replicas() if r is not leader)
    nodes[0].network.cut.add(without.host.node_id)
    await group.write(rows([1]))
    await group.caught_up(with_all)
    group.node_of(with_all).skew_us = HOUR_US
    with_all.fit_to_lead(False)
    await group.node_of(leader).stop()
    nodes[0].network.cut.clear()
    await wait_until(lambda: with_all.is_leader)
    group.node_of(with_all).watch_clock()
    await wait_until(lambda: without.is_leader)
    await group.write(rows([2]))
    assert table(without) == {1: "x1", 2: "x2"}


async def test_a_replica_without_others_leads_on_and_makes_no_timestamps(group_of: MakeGroup) -> None:
    group, nodes = await group_of(1, spare=2)
    compare_clocks(nodes)
    await group.write(rows([1]))
    leader = await group.leader()
    nodes[0].watch_clock()
    nodes[0].skew_us = HOUR_US
    with pytest.raises(Retryable) as refused:
        await leader.writes.propose(rows([2]))
    assert refused.value.code is Code.NOT_READY
    assert table(leader, await leader.reads.latest_snapshot()) == {1: "x1"}
    nodes[0].skew_us = 0
    await group.write(rows([2]))


async def test_a_replica_that_starts_on_a_node_with_a_wrong_clock_knows_it(group_of: MakeGroup) -> None:
    """It would stand as soon as any other, and at once if it is named to lead."""
    group, nodes = await group_of()
    await group.write(rows([1]))
    for node in nodes:
        await node.stop()
    group.nodes = [TestNode(node.network, node.directory, node.node_id) for node in nodes]
    group.nodes[0].skew_us = HOUR_US
    compare_clocks(group.nodes)
    for node in group.nodes:
        await node.start()
        node.watch_clock()
    patient = [r.core is not None and r.core.leads_if_nobody_can for r in group.replicas()]
    assert patient == [True, False, False]
    outcome = await group.write(rows([2]))
    assert abs(physical_us(outcome.timestamp) - time.time_ns() // 1_000) < 30_000_000
