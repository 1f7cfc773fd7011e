"""Groups at rest under the node's own watch: whoever rests knows that the others rest too, not only that nodes live."""

from __future__ import annotations

import asyncio
import os

import pytest

from stele.consensus.quiet import begin_quiet
from stele.consensus.replica import Replica, ReplicaState
from stele.consensus.superblock import DataState
from stele.model.config import MemberType, Peer
from stele.raft.events import ChangeType, Persisted
from stele.raft.messages import UpdateResponse
from stele.tablet.exactly_once import IDLE_US
from tests.consensus.cluster import Group, rows, wait_until
from tests.consensus.conftest import MakeGroup
from tests.consensus.rest import at_rest, resting, rests

pytestmark = pytest.mark.usefixtures("rests_soon")


async def another_leads(group: Group, gone: Replica) -> None:
    await wait_until(lambda: any(r.is_leader for r in group.replicas() if r is not gone))
    await group.write(rows([2]))


async def test_a_group_at_rest_stays_at_rest(group_of: MakeGroup) -> None:
    group, _, leader = await at_rest(group_of)
    other = await Group(group.nodes).create()
    await other.write(rows([1]))
    await rests(other)
    terms = [r.term for r in (*group.replicas(), *other.replicas())]
    awake = 0
    for _ in range(40):
        awake += sum(not resting(r) for r in (*group.replicas(), *other.replicas()))
        await asyncio.sleep(0.05)
    # On a stalled machine a node may seem silent for a moment; then its groups wake, and rest again.
    assert awake < 120
    assert [r.term for r in (*group.replicas(), *other.replicas())] == terms
    assert await group.leader() is leader


async def test_a_group_at_rest_forgets_its_idle_clients(group_of: MakeGroup) -> None:
    """All replicas by one entry: each by its own clock, they would differ in what they take for new."""
    group, nodes, leader = await at_rest(group_of)
    await group.write(rows([2], client=os.urandom(16), sequence=1))
    await rests(group)
    await group.all_applied()
    machines = [r.machine for r in group.replicas() if r.machine is not None]
    applied = leader.applied_index
    leader.writes.let_time_pass()
    assert all(m.clients_idle_us is not None for m in machines) and len(machines) == 3
    for node in nodes:
        node.skew_us = IDLE_US + 60_000_000
    for replica in group.replicas():
        replica.writes.let_time_pass()
    await wait_until(lambda: all(m.clients_idle_us is None for m in machines))
    leader.writes.let_time_pass()
    await rests(group)
    assert leader.applied_index == applied + 1 and leader.is_leader


@pytest.mark.usefixtures("quick_elections")
async def test_a_leader_whose_core_fails_at_rest_is_replaced(group_of: MakeGroup) -> None:
    """Its core can no longer send anything, and its node lives and is heard."""
    group, _, leader = await at_rest(group_of)
    assert leader.runtime is not None
    leader.runtime.post(Persisted(1 << 40))
    await wait_until(lambda: leader.state is ReplicaState.FAILED)
    await another_leads(group, leader)


@pytest.mark.usefixtures("quick_elections")
async def test_a_leader_that_fails_at_rest_is_replaced_though_its_last_word_is_lost(
    group_of: MakeGroup,
) -> None:
    group, nodes, leader = await at_rest(group_of)
    network = nodes[0].network
    network.cut.add(leader.host.node_id)
    leader.fail("a scan found damage")
    await asyncio.sleep(0.05)
    network.cut.clear()
    await another_leads(group, leader)


@pytest.mark.usefixtures("quick_elections")
async def test_a_leader_that_is_removed_at_rest_is_replaced(group_of: MakeGroup) -> None:
    group, _, leader = await at_rest(group_of)
    node = group.node_of(leader)
    await node.manager.delete(group.tablet_id, 0, DataState.TOMBSTONED, 1 << 40, "by a test")
    await another_leads(group, leader)


async def test_a_follower_that_fails_at_rest_wakes_its_leader(group_of: MakeGroup) -> None:
    group, _, leader = await at_rest(group_of)
    victim = next(r for r in group.replicas() if r is not leader)
    victim.fail("a scan found damage")
    core = leader.core
    assert core is not None
    await wait_until(lambda: any(p.failed for p in core.status().peers))
    assert leader.is_leader


async def test_an_answer_wakes_a_leader_at_rest(group_of: MakeGroup) -> None:
    """Who rests does not answer: without heartbeats this one would find that nobody leads, and campaign."""
    group, _, leader = await at_rest(group_of)
    follower = next(r for r in group.replicas() if r is not leader)
    core = leader.core
    assert core is not None
    last = core.log.last_opid
    answer = UpdateResponse(leader.term, True, last, has_data=True, preceding_index=last.index)
    leader.on_message(follower.host.node_id, follower.replica_id, answer)
    assert not resting(leader)


async def test_only_the_group_that_lost_its_leader_wakes(group_of: MakeGroup) -> None:
    group, nodes, leader = await at_rest(group_of)
    other = await Group(group.nodes).create()
    await other.write(rows([1]))
    await rests(other)
    network = nodes[0].network
    terms = [r.term for r in other.replicas()]
    network.cut.add(leader.host.node_id)
    leader.fail("a scan found damage")
    await asyncio.sleep(0.02)
    network.cut.clear()
    await another_leads(group, leader)
    assert [r.term for r in other.replicas()] == terms


@pytest.mark.usefixtures("quick_elections")
async def test_a_leader_whose_node_falls_silent_at_rest_is_replaced(group_of: MakeGroup) -> None:
    """Nobody waits for its heartbeats: that its node is not heard is all that the others learn of it."""
    group, nodes, leader = await at_rest(group_of)
    nodes[0].network.cut.add(leader.host.node_id)
    await another_leads(group, leader)


async def test_a_follower_whose_node_falls_silent_wakes_its_leader_and_it_rests_once_that_is_back(
    group_of: MakeGroup,
) -> None:
    """Else nobody would tell the masters that it is gone, and it would not be replaced."""
    group, nodes, leader = await at_rest(group_of)
    core, network = leader.core, nodes[0].network
    assert core is not None
    victim = next(r for r in group.replicas() if r is not leader)
    network.cut.add(victim.host.node_id)
    await wait_until(lambda: any(not p.reachable for p in core.status().peers))
    assert leader.is_leader and not resting(leader)
    network.cut.clear()
    await rests(group)


async def test_a_group_that_is_being_healed_does_not_rest(group_of: MakeGroup) -> None:
    """A copy that waits to be made a voter has nobody who promotes it while its leader's time stands still."""
    group, _, leader = await at_rest(group_of)
    other = next(r for r in group.replicas() if r is not leader)
    demoted = Peer(other.host.node_id, other.replica_id, "x:1", MemberType.NON_VOTER)
    await leader.members.change_config(ChangeType.MODIFY, demoted, leader.committed_config.opid_index)
    await wait_until(lambda: not leader.busy)
    for _ in range(20):
        assert not begin_quiet(leader, lambda node_id: True)
        await asyncio.sleep(0.05)
    assert not resting(leader)
