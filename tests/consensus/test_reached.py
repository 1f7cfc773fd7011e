"""A leader tells the masters which of its peers do not answer, though their nodes may be heard, or have FAILED, and when
they are well again."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from stele.consensus.replica import Replica
from tests.consensus import cluster
from tests.consensus.cluster import STEADY, WAIT_S, Group, TestNode, rows
from tests.consensus.conftest import MakeGroup
from tests.consensus.rest import at_rest


@pytest.fixture(autouse=True)
def soon(steady: None, monkeypatch: pytest.MonkeyPatch) -> None:
    raft = replace(STEADY.raft, unreached_ms=1_000)
    monkeypatch.setattr(cluster, "OPTIONS", replace(STEADY, raft=raft))


def unreached(leader: Replica) -> list[int]:
    """As its report says it."""
    return [peer.replica_id for peer in leader.status().peers if peer.unreached]


def reports(group: Group, replica: Replica) -> set[int]:
    return {int(n) for n in group.node_of(replica).reports_due}


async def test_a_peer_that_is_cut_off_is_reported_and_so_is_its_return(group_of: MakeGroup) -> None:
    group, nodes = await group_of()
    await group.write(rows([1]))
    leader = await group.leader()
    victim = next(r for r in group.replicas() if r is not leader)
    nodes[0].network.cut.add(victim.host.node_id)

    async def told(expected: list[int]) -> Replica:
        """The leader, whoever it is by now, once it has said so and asked for a report."""
        async with asyncio.timeout(WAIT_S):
            while True:
                leader = await group.leader()
                if unreached(leader) == expected and leader.replica_id in reports(group, leader):
                    return leader
                await asyncio.sleep(0.02)

    leader = await told([victim.replica_id])
    silence_ms = next(p.last_heard_ms for p in leader.status().peers if p.replica_id == victim.replica_id)
    assert silence_ms >= 1_000
    for node in nodes:
        node.reports_due.clear()
    nodes[0].network.cut.clear()
    await told([])


@pytest.mark.usefixtures("rests_soon")
async def test_a_group_at_rest_believes_of_nobody_that_it_does_not_answer(group_of: MakeGroup) -> None:
    """Nobody says anything for much longer than that; and none of the first heartbeats after it is missed."""
    group, _, _ = await at_rest(group_of)
    told: set[int] = set()

    async def watch(seconds: float) -> None:
        for _ in range(int(seconds / 0.02)):
            told.update(n for r in group.replicas() for n in unreached(r))
            await asyncio.sleep(0.02)

    await watch(2.5)
    await group.write(rows([2]))
    await watch(0.5)
    assert told == set()


@pytest.mark.usefixtures("rests_soon")
async def test_a_peer_that_is_cut_off_while_the_group_rests_is_reported(group_of: MakeGroup) -> None:
    group, nodes, leader = await at_rest(group_of)
    victim: TestNode = next(n for n in nodes if n.node_id != leader.host.node_id)
    for node in nodes:
        node.reports_due.clear()
    nodes[0].network.cut.add(victim.node_id)
    gone = [r.replica_id for r in group.replicas() if r.host.node_id == victim.node_id]

    async def look() -> bool:
        leader = await group.leader()
        return unreached(leader) == gone and leader.replica_id in reports(group, leader)

    async with asyncio.timeout(WAIT_S):
        while not await look():
            await asyncio.sleep(0.05)


async def test_a_peer_that_has_failed_is_reported_and_so_is_its_return(group_of: MakeGroup) -> None:
    """Nothing else happened in the group that would have been told: the masters believed for ever that it had FAILED."""
    group, _ = await group_of()
    await group.write(rows([1]))
    leader = await group.leader()
    victim = next(r for r in group.replicas() if r is not leader)
    node = group.node_of(victim)

    async def told(expected: list[int]) -> None:
        """By the leader, whoever it is by now: it says so, and a report of it is due."""
        async with asyncio.timeout(WAIT_S):
            while True:
                leader = await group.leader()
                failed = [peer.replica_id for peer in leader.status().peers if peer.failed]
                if failed == expected and leader.replica_id in reports(group, leader):
                    return
                await asyncio.sleep(0.02)

    group.node_of(leader).reports_due.clear()
    victim.fail("applying: lacks memory")
    await told([victim.replica_id])
    for each in group.nodes:
        each.reports_due.clear()
    group.nodes[group.nodes.index(node)] = await node.restart()
    await told([])
