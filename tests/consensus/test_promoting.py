"""Forced promotion: a real election that an administrator begins. Its vote is a PROMOTE record."""

from __future__ import annotations

import pytest

from stele.model.errors import Rejected
from stele.model.logrecord import PromoteRecord
from tests.consensus.cluster import leads, rows, table, wait_until
from tests.consensus.conftest import MakeGroup


async def test_a_follower_takes_over_and_its_vote_is_a_promotion_that_stays(group_of: MakeGroup) -> None:
    group, nodes = await group_of()
    await group.write(rows([1]))
    leader = await group.leader()
    heir = next(r for r in group.replicas() if r is not leader)
    await group.caught_up(heir)
    term = heir.term
    heir.members.promote("nobody leads")
    await wait_until(lambda: leads(heir))
    assert heir.term > term and not leader.is_leader
    stream = group.node_of(heir).log.stream(heir.superblock.key)
    await wait_until(lambda: stream.hard_state.promoted)
    assert PromoteRecord(heir.term, heir.replica_id) in list(stream.load())
    await group.write(rows([2]))
    number = heir.replica_id
    nodes[number - 1] = group.nodes[number - 1] = await nodes[number - 1].restart()
    again = group.replica(number)
    await group.caught_up(again)
    assert table(again) == {1: "x1", 2: "x2"}, "a log with a PROMOTE record opens as any other"


@pytest.mark.usefixtures("quick_elections")
async def test_without_a_majority_nobody_is_elected_by_force(group_of: MakeGroup) -> None:
    group, nodes = await group_of()
    await group.write(rows([1]))
    nodes[0].network.cut.update(n.node_id for n in nodes)
    await wait_until(lambda: not any(r.is_leader for r in group.replicas()))
    replica = group.replica(2)
    term = replica.term
    replica.members.promote("in vain")
    await wait_until(lambda: replica.term > term)
    assert not replica.is_leader
    nodes[0].network.cut.clear()
    await group.write(rows([2]))


async def test_who_lacks_committed_entries_is_not_elected(group_of: MakeGroup) -> None:
    group, nodes = await group_of()
    await group.write(rows([1]))
    leader = await group.leader()
    behind = next(r for r in group.replicas() if r is not leader)
    nodes[0].network.cut.add(behind.host.node_id)
    for number in range(2, 6):
        await group.write(rows([number]))
    nodes[0].network.loss = 0.0
    behind.members.promote("too early")
    nodes[0].network.cut.discard(behind.host.node_id)
    await group.write(rows([9]))
    await group.caught_up(group.replica(int(behind.replica_id)))
    assert set(table(await group.leader())) == {1, 2, 3, 4, 5, 9}


async def test_a_replica_that_cannot_lead_is_refused(group_of: MakeGroup) -> None:
    group, _ = await group_of()
    await group.write(rows([1]))
    replica = group.replica(3)
    replica.fail("damaged")
    with pytest.raises(Rejected, match="cannot lead"):
        replica.members.promote("no")
