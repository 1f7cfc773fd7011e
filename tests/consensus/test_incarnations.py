"""The incarnation of a tablet: no message crosses between two of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stele.consensus.incarnations import same_incarnation
from stele.consensus.replica import ReplicaState
from stele.consensus.superblock import write_superblock
from stele.model.errors import Retryable
from stele.model.ids import NodeId, ReplicaId
from stele.model.incarnation import MARK_BITS, RECOVERIES_AHEAD_MAX, raised
from tests.consensus.cluster import Group, TestNode, rows, table, wait_until
from tests.consensus.conftest import MakeGroup

ONCE = raised(0, 42)


async def restarted(group: Group, nodes: list[TestNode], number: int, incarnation: int) -> None:
    """Restart a node with its replica at this incarnation."""
    replica = group.replica(number)
    await nodes[number - 1].stop()
    write_superblock(replica.directory, replace(replica.superblock, tablet_incarnation=incarnation))
    nodes[number - 1] = group.nodes[number - 1] = await nodes[number - 1].restart()


@pytest.mark.usefixtures("quick_elections")
async def test_a_leader_that_hears_of_a_higher_incarnation_neither_commits_nor_answers(
    group_of: MakeGroup,
) -> None:
    group, nodes = await group_of()
    await group.write(rows([1]))
    leader = await group.leader()
    survivor = next(n for n in (1, 2, 3) if n != leader.replica_id)
    await restarted(group, nodes, survivor, ONCE)
    await wait_until(lambda: leader.state is ReplicaState.FAILED)
    assert "recovered as incarnation 1-000000002a" in leader.error and table(leader)[1] == "x1", (
        "its files stay"
    )
    with pytest.raises(Retryable):
        leader.writes.submit(rows([2]))
    with pytest.raises(Retryable):
        await leader.reads.linearizable_read(100)
    assert group.replica(survivor).running, "the lower ones have no effect on it"
    assert group.replica(survivor).leader is None and not group.replica(survivor).is_leader


async def test_only_a_peer_is_believed_and_only_a_small_step(group_of: MakeGroup) -> None:
    """Else one stranger, or one wrong number, would stop every replica."""
    group, nodes = await group_of()
    await group.write(rows([1]))
    replica = group.replica(1)
    peer = replica.config.peers[1]
    assert same_incarnation(replica, peer.node_id, peer.replica_id, 0)
    assert not same_incarnation(replica, NodeId("e" * 32), peer.replica_id, ONCE)
    assert not same_incarnation(replica, peer.node_id, ReplicaId(9), ONCE)
    far = (RECOVERIES_AHEAD_MAX + 1) << MARK_BITS
    assert not same_incarnation(replica, peer.node_id, peer.replica_id, far)
    assert replica.running and [cause for _, cause, _ in nodes[0].drops] == ["incarnation"] * 3
    assert not same_incarnation(replica, peer.node_id, peer.replica_id, ONCE)
    assert replica.state is ReplicaState.FAILED
