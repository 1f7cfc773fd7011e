"""Who leads a group, who says so, and how it is handed over."""

from __future__ import annotations

import pytest

from stele.model.errors import NotLeader
from tests.consensus.cluster import rows, table, wait_until
from tests.consensus.conftest import MakeGroup


async def test_the_hinted_replica_leads_first(group_of: MakeGroup) -> None:
    group, _ = await group_of()
    assert (await group.leader()).replica_id == 1


async def test_followers_refuse_and_name_the_leader(group_of: MakeGroup) -> None:
    group, _ = await group_of()
    leader = await group.leader()
    follower = next(r for r in group.replicas() if r is not leader)
    await wait_until(lambda: follower.leader == leader.replica_id)
    with pytest.raises(NotLeader) as refused:
        follower.writes.submit(rows([1]))
    assert refused.value.leader_hint == leader.host.node_id


async def test_leadership_is_handed_over(group_of: MakeGroup) -> None:
    group, _ = await group_of()
    leader = await group.leader()
    other = next(r for r in group.replicas() if r is not leader)
    await group.write(rows([1]))
    await leader.members.transfer_leadership(other.replica_id)
    await wait_until(lambda: other.is_leader)
    await group.write(rows([2]))
    assert table(await group.leader()) == {1: "x1", 2: "x2"}
