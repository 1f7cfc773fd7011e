"""Reads at followers: no older than asked for, and only what the replica has applied of what its leader says is committed."""

from __future__ import annotations

import asyncio

import pytest

from stele.consensus.replica import Replica
from stele.master.replica_log import ReplicaCatalogLog
from stele.model.errors import Code, Retryable
from stele.model.ids import NodeId
from stele.raft.messages import Message
from stele.rpc.proto.consensus_pb2 import ConfirmPB, FollowPB
from stele.tserver.following import _ANSWER, _ASK
from tests.consensus.cluster import Group, TestNode, rows, table, wait_until
from tests.consensus.conftest import MakeGroup
from tests.consensus.rest import at_rest, resting
from tests.consensus.test_snapshots import Links

_SECOND_US = 1_000_000


class Wire(Links):
    """Remembers the questions of followers, and may lose them."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.silent = False
        self.apart: set[NodeId] = set()  # these nodes hear each other alone

    def follow(self, sender: TestNode, to: NodeId, follow: FollowPB) -> None:
        if follow.asks:
            self.asked.append(len(follow.asks) // 56)
        if not self.silent and self._joined(sender, to):
            super().follow(sender, to, follow)

    def confirm(self, sender: TestNode, to: NodeId, confirm: ConfirmPB) -> None:
        if self._joined(sender, to):
            super().confirm(sender, to, confirm)

    def carries(
        self, sender: TestNode, to: NodeId, tablet: bytes, from_: int, to_: int, message: Message
    ) -> bool:
        return self._joined(sender, to) and super().carries(sender, to, tablet, from_, to_, message)

    def _joined(self, sender: TestNode, to: NodeId) -> bool:
        return (sender.node_id in self.apart) == (to in self.apart)


async def fresh(replica: Replica, max_age_us: int, *, at_once: bool = False) -> int:
    """How old the rows are, in microseconds."""
    since = await replica.following.fresh(replica.host.steady_us() - max_age_us, at_once=at_once)
    return replica.host.steady_us() - since


async def followed(group_of: MakeGroup, size: int = 3) -> tuple[Wire, Group, Replica, Replica]:
    """A group with a row, its leader, and a follower."""
    wire = Wire()
    group, _ = await group_of(size, network=wire)
    await group.write(rows([1]))
    leader = await group.leader()
    follower = next(r for r in group.replicas() if r is not leader)
    await group.caught_up(follower)
    return wire, group, leader, follower


@pytest.mark.parametrize("size", [3, 5])
async def test_a_follower_serves_all_that_was_acknowledged_before_it_asked(
    group_of: MakeGroup, size: int
) -> None:
    _, group, _, follower = await followed(group_of, size)
    for number in range(2, 12):
        await group.write(rows([number]))
        await fresh(follower, 0)
        assert number in table(follower)


async def test_one_answer_serves_the_reads_of_a_while(group_of: MakeGroup) -> None:
    wire, _, leader, follower = await followed(group_of)
    await fresh(follower, 60 * _SECOND_US)
    first = len(wire.asked)
    for _ in range(20):
        assert await fresh(follower, 60 * _SECOND_US) < 60 * _SECOND_US
    assert len(wire.asked) == first, "what was asked a moment ago is new enough"
    await fresh(follower, 60 * _SECOND_US, at_once=True)
    assert len(wire.asked) == first + 1
    await leader.reads.linearizable_read()
    assert len(wire.asked) == first + 1


async def test_tablets_that_are_read_together_share_a_question(group_of: MakeGroup) -> None:
    wire = Wire()
    group, nodes = await group_of(network=wire)
    groups = [group] + [await Group(nodes).create() for _ in range(4)]
    followers = []
    for each in groups:
        await each.write(rows([1]))
        leader = await each.leader()
        assert leader.replica_id == 1, "it is named to lead"
        followers.append(each.replica(2))
    await asyncio.gather(*(fresh(each, 0) for each in followers))
    assert wire.asked == [5]


async def test_a_follower_that_lags_does_not_serve_past_what_it_lacks(group_of: MakeGroup) -> None:
    wire, group, _, late = await followed(group_of)
    wire.passes = lambda sender, to, entries: not (entries and to == late.replica_id)
    await group.write(rows([2]))
    snapshot = int((await group.leader()).writes.timestamps.now())
    of_snapshot = asyncio.create_task(late.reads.snapshot_ready(snapshot, ask=late.following.holds))
    reading = asyncio.create_task(fresh(late, 0))
    await asyncio.sleep(0.2)
    assert not reading.done(), "the leader said up to which index, and that is not here"
    assert not of_snapshot.done()
    wire.passes = lambda sender, to, entries: True
    await asyncio.gather(reading, of_snapshot)
    assert 2 in table(late) and 2 in table(late, snapshot)


async def test_rows_that_are_too_old_are_not_served_while_the_leader_is_silent(group_of: MakeGroup) -> None:
    wire, group, _, follower = await followed(group_of)
    await fresh(follower, 0)
    wire.silent = True
    assert await fresh(follower, 60 * _SECOND_US) < 60 * _SECOND_US, "it was told lately"
    await asyncio.sleep(0.05)
    with pytest.raises(Retryable) as refused:
        await fresh(follower, 40_000)
    assert refused.value.code is Code.SNAPSHOT_NOT_READY and "did not answer" in str(refused.value)
    wire.silent = False
    await group.write(rows([2]))
    await fresh(follower, 0)
    assert 2 in table(follower)


async def test_a_master_that_follows_says_whether_its_catalog_is_fresh(group_of: MakeGroup) -> None:
    wire, _, leader, follower = await followed(group_of)
    catalog = ReplicaCatalogLog(lambda: follower)
    assert await catalog.fresh(60_000)
    wire.silent = True
    await asyncio.sleep(0.05)
    assert not await catalog.fresh(20), "nobody tells it"
    assert not await ReplicaCatalogLog(lambda: leader).fresh(60_000), "a leader asks a majority itself"


async def test_a_leader_that_is_no_majority_with_its_follower_tells_nothing(group_of: MakeGroup) -> None:
    """Two of five hear each other alone. The others may have elected a leader, and may have taken writes."""
    wire, group, leader, follower = await followed(group_of, 5)
    await fresh(follower, 0)
    wire.apart = {leader.host.node_id, follower.host.node_id}
    with pytest.raises(Retryable) as refused:
        await fresh(follower, 0)
    assert refused.value.code is Code.SNAPSHOT_NOT_READY
    others = [r for r in group.replicas() if r not in (leader, follower)]
    await wait_until(lambda: any(r.is_leader for r in others))
    await next(r for r in others if r.is_leader).writes.propose(rows([2]), deadline_ms=20_000)
    with pytest.raises(Retryable):
        await fresh(follower, 0)
    wire.apart = set()
    await wait_until(lambda: 2 in table(follower))
    assert await fresh(follower, 0) < 60 * _SECOND_US


async def test_groups_at_rest_are_read_at_followers_and_rest_on(
    group_of: MakeGroup, rests_soon: None
) -> None:
    group, _, leader = await at_rest(group_of)
    follower = next(r for r in group.replicas() if r is not leader)
    await fresh(follower, 0)
    assert table(follower) == {1: "x1"} and resting(follower) and resting(leader)


async def test_a_follower_learns_that_it_holds_a_snapshot(group_of: MakeGroup) -> None:
    _, group, leader, follower = await followed(group_of)
    snapshot = int(leader.writes.timestamps.now())
    await follower.reads.snapshot_ready(snapshot, ask=follower.following.holds)
    await group.write(rows([2]))
    assert table(follower, snapshot) == {1: "x1"}, "no later write is below it"
    await fresh(follower, 0)
    assert table(follower, snapshot) == {1: "x1"} and 2 in table(follower)


async def test_questions_that_no_node_asks_are_refused(group_of: MakeGroup) -> None:
    """Other nodes' names, incarnations and replicas; too many tablets; bytes that are no question."""
    wire, _, leader, follower = await followed(group_of)
    node = wire.nodes[leader.host.node_id]
    answers: list[FollowPB] = []
    node.following._send = lambda to, follow: answers.append(follow)
    block = leader.superblock
    tablet = bytes.fromhex(leader.tablet_id)
    asker = follower.host.node_id

    def ask(*fields: int, tablet: bytes = tablet, by: NodeId = asker) -> list[tuple[int, int]]:
        answers.clear()
        asks = _ASK.pack(tablet, *fields)
        node.following.told(by, FollowPB(number=7, asks=asks, wait_ms=100))
        return [pair for follow in answers for pair in _ANSWER.iter_unpack(follow.answers)]

    own, of, term = block.replica_id, follower.replica_id, leader.term
    assert ask(0, own, of, term, 0)[0][1] > 0
    assert ask(5, own, of, term, 0) == [(0, 0)], "another incarnation"
    assert ask(0, own, own, term, 0) == [(0, 0)], "that replica is not on the node that asks"
    assert ask(0, own + 40, of, term, 0) == [(0, 0)]
    assert ask(0, own, of, term, 0, tablet=b"\1" * 16) == [(0, 0)]
    assert ask(0, own, of, term, 0, by=NodeId("f" * 32)) == [(0, 0)]
    answers.clear()
    one = _ASK.pack(tablet, 0, own, of, term, 0)
    node.following.told(asker, FollowPB(number=8, asks=one * 1_025))
    node.following.told(asker, FollowPB(number=9, asks=one[:-1]))
    node.following.told(asker, FollowPB(number=10, answers=b"\0" * 33))
    assert answers == []
