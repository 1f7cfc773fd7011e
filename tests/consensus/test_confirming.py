"""Reads of many tablets share one question to each node; whoever does not answer it, or has another leader, confirms nothing."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence

import pytest

from stele.consensus.replica import Replica
from stele.model.errors import Code, Retryable
from stele.model.ids import NodeId, new_id
from stele.raft.messages import Message, UpdateRequest
from stele.rpc.proto.consensus_pb2 import ConfirmPB
from stele.tserver import confirming
from stele.tserver.questions import TABLETS_MAX
from tests.consensus.cluster import WAIT_S, Group, Network, TestNode, rows, table, wait_until
from tests.consensus.conftest import MakeGroup
from tests.consensus.rest import resting

_ASK_BYTES = 48


class Wire(Network):
    """Remembers the questions and answers, may hold answers back, and may keep a tablet's messages from a node."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[NodeId, NodeId, ConfirmPB]] = []
        self.asked_by_cores = 0
        self.silent = False
        self.deaf: tuple[NodeId, bytes] | None = None
        self.holds: Callable[[ConfirmPB], bool] = lambda confirm: False
        self.held: list[tuple[TestNode, NodeId, ConfirmPB]] = []

    def confirm(self, sender: TestNode, to: NodeId, confirm: ConfirmPB) -> None:
        self.said.append((sender.node_id, to, confirm))
        if self.holds(confirm):
            self.held.append((sender, to, confirm))
        elif not self.silent:
            super().confirm(sender, to, confirm)

    def carries(
        self, sender: TestNode, to: NodeId, tablet: bytes, from_: int, to_: int, message: Message
    ) -> bool:
        self.asked_by_cores += isinstance(message, UpdateRequest) and bool(message.read_context)
        return self.deaf != (to, tablet) and super().carries(sender, to, tablet, from_, to_, message)

    def questions(self) -> list[int]:
        """Of how many tablets each question was, but greetings."""
        return [len(c.asks) // _ASK_BYTES for _, _, c in self.said if c.asks and not c.answers]

    def forget(self) -> None:
        self.said.clear()
        self.asked_by_cores = 0


async def tablets_of(group_of: MakeGroup, count: int) -> tuple[Wire, list[Group], list[Replica]]:
    """Tablets on the same three nodes, led on the first, with a row each; the nodes have greeted each other."""
    wire = Wire()
    first, nodes = await group_of(network=wire)
    groups = [first] + [await Group(nodes).create() for _ in range(count - 1)]
    leaders = []
    for group in groups:
        await group.write(rows([1], "old"))
        leader = await group.leader()
        assert leader.replica_id == 1, "it is named to lead"
        leaders.append(leader)
        await leaders[-1].reads.linearizable_read()
    able = nodes[0].confirming._questions.answering
    await wait_until(lambda: len(able) == 2)
    for leader in leaders:
        await leader.reads.linearizable_read()
    wire.forget()
    return wire, groups, leaders


async def read(leaders: Sequence[Replica]) -> None:
    await asyncio.gather(*(leader.reads.linearizable_read() for leader in leaders))


async def depose(wire: Wire, group: Group) -> Replica:
    """Another replica leads, and writes; the first has not heard of it. Returns who leads."""
    first, second = group.replica(1), group.replica(2)
    wire.deaf = first.host.node_id, first.raw_tablet_id
    second.members.promote("test")
    await wait_until(lambda: second.is_leader)
    await second.writes.propose(rows([1], "new"), deadline_ms=30_000)
    assert first.is_leader and table(first) == {1: "old1"} and table(second) == {1: "new1"}
    return second


async def test_reads_of_many_tablets_share_one_question_to_each_node(group_of: MakeGroup) -> None:
    wire, _, leaders = await tablets_of(group_of, 4)
    for _ in range(3):
        wire.forget()
        await read(leaders * 5)
        assert wire.questions() == [4, 4] and not wire.asked_by_cores


async def test_a_deposed_leader_is_confirmed_by_nobody_though_its_neighbours_are(group_of: MakeGroup) -> None:
    wire, groups, leaders = await tablets_of(group_of, 3)
    await depose(wire, groups[1])
    wire.forget()
    ends = await asyncio.gather(
        *(leader.reads.linearizable_read(1_500) for leader in leaders), return_exceptions=True
    )
    assert wire.questions() == [3, 3]
    assert ends[0] is None and ends[2] is None
    assert isinstance(ends[1], Retryable) and ends[1].code in (Code.TIMED_OUT, Code.NO_QUORUM)


async def test_an_answer_from_before_the_read_confirms_nothing(group_of: MakeGroup) -> None:
    wire, groups, leaders = await tablets_of(group_of, 1)
    wire.holds = lambda confirm: confirm.answers
    early = asyncio.create_task(leaders[0].reads.linearizable_read())
    await wait_until(lambda: len(wire.held) == 2)
    await early  # by its core
    await depose(wire, groups[0])
    late = asyncio.create_task(leaders[0].reads.linearizable_read(1_500))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(wire.questions()) == 4, "the read asked anew"
    for sender, to, confirm in wire.held[:2]:
        Network.confirm(wire, sender, to, confirm)
    with pytest.raises(Retryable):
        await late


async def test_a_voter_that_stands_for_election_confirms_nothing(group_of: MakeGroup) -> None:
    """What it answered before that counts: then the leader was not yet deposed."""
    _, groups, leaders = await tablets_of(group_of, 1)
    follower = groups[0].replica(2)
    leader, term = leaders[0], leaders[0].term
    assert follower.vouches(leader.host.node_id, leader.replica_id, term)
    assert not follower.vouches(follower.host.node_id, leader.replica_id, term)
    assert not follower.vouches(leader.host.node_id, leader.replica_id, term + 1)
    assert not follower.vouches(leader.host.node_id, groups[0].replica(3).replica_id, term)
    assert not leader.vouches(leader.host.node_id, leader.replica_id, term)
    follower.fail("test")
    assert not follower.vouches(leader.host.node_id, leader.replica_id, term)
    await leader.members.transfer_leadership(groups[0].replica(3).replica_id)
    await wait_until(lambda: groups[0].replica(3).is_leader)
    assert not leader.vouches(leader.host.node_id, leader.replica_id, term)


async def test_one_answer_is_no_majority_of_five(group_of: MakeGroup) -> None:
    wire = Wire()
    group, nodes = await group_of(5, network=wire)
    await group.write(rows([1]))
    leader = await group.leader()
    node = group.node_of(leader)
    await leader.reads.linearizable_read()
    await wait_until(lambda: len(node.confirming._questions.answering) == 4)
    first = next(n for n in nodes if n is not node)
    wire.cut.update(n.node_id for n in nodes if n not in (node, first))
    wire.forget()
    with pytest.raises(Retryable):
        await leader.reads.linearizable_read(1_000)
    assert wire.questions() == [1] * 4


async def test_nodes_of_an_earlier_release_are_asked_by_heartbeats(group_of: MakeGroup) -> None:
    wire, _, leaders = await tablets_of(group_of, 2)
    wire.silent = True
    node = wire.nodes[leaders[0].host.node_id]
    for other in list(node.confirming._questions.answering):
        node.confirming.lost(other)  # they were replaced
    for _ in range(3):
        await read(leaders)
    assert not wire.questions() and wire.asked_by_cores >= 3
    assert all(not c.asks for _, _, c in wire.said), "greetings alone"
    wire.silent = False
    async with asyncio.timeout(WAIT_S):
        while len(node.confirming._questions.answering) < 2:
            await read(leaders)


async def test_what_is_not_answered_is_left_to_the_core(group_of: MakeGroup) -> None:
    wire, _, leaders = await tablets_of(group_of, 2)
    wire.holds = lambda confirm: confirm.answers
    await read(leaders)
    assert wire.questions() == [2, 2] and wire.asked_by_cores
    node = wire.nodes[leaders[0].host.node_id]
    await wait_until(lambda: not node.confirming._questions.unanswered)


async def test_one_node_of_three_is_enough(group_of: MakeGroup) -> None:
    wire, groups, leaders = await tablets_of(group_of, 2)
    wire.cut.add(groups[0].nodes[2].node_id)
    await read(leaders)
    assert wire.questions() == [2, 2] and not wire.asked_by_cores


async def test_the_only_voter_asks_nobody(group_of: MakeGroup) -> None:
    wire = Wire()
    group, _ = await group_of(1, network=wire)
    await group.write(rows([1]))
    await read([await group.leader()] * 3)
    assert not wire.said


@pytest.mark.usefixtures("rests_soon")
async def test_a_read_does_not_wake_a_group_at_rest(group_of: MakeGroup) -> None:
    wire, groups, leaders = await tablets_of(group_of, 1)
    for node in groups[0].nodes:
        node.watch_quiet()
    await wait_until(lambda: all(resting(r) for r in groups[0].replicas()))
    wire.forget()
    await read(leaders)
    assert all(resting(r) for r in groups[0].replicas())
    assert wire.questions() == [1, 1] and not wire.asked_by_cores
    wire.silent = True
    await read(leaders)
    assert wire.asked_by_cores, "its core asked, and so it is awake"


async def test_a_leader_that_ends_refuses_the_reads_that_wait(group_of: MakeGroup) -> None:
    wire, groups, leaders = await tablets_of(group_of, 1)
    wire.holds = lambda confirm: True
    waiting = asyncio.create_task(leaders[0].reads.linearizable_read())
    await wait_until(lambda: len(wire.held) == 2)
    leaders[0].fail("test")
    with pytest.raises(Retryable) as refused:
        await waiting
    assert refused.value.code is Code.NOT_LEADER
    wire.holds = lambda confirm: False
    for sender, to, confirm in wire.held:
        Network.confirm(wire, sender, to, confirm)
    await wait_until(lambda: not groups[0].nodes[0].confirming._questions.unanswered)


async def test_answers_that_nobody_asked_for_confirm_nothing(group_of: MakeGroup) -> None:
    wire, groups, leaders = await tablets_of(group_of, 2)
    node, stranger = groups[0].nodes[0], NodeId(new_id())
    wire.holds = lambda confirm: True
    waiting = [asyncio.create_task(leader.reads.linearizable_read(1_500)) for leader in leaders]
    await wait_until(lambda: len(wire.held) == 2)
    numbers = sorted(node.confirming._questions.unanswered)
    for number in (0, numbers[0] - 1, numbers[-1] + 1, (1 << 64) - 1):
        for sender in (stranger, *(n.node_id for n in groups[0].nodes)):
            node.confirming.told(sender, ConfirmPB(number=number, answers=True))
    for number in numbers:
        node.confirming.told(stranger, ConfirmPB(number=number, answers=True))
    assert sorted(node.confirming._questions.unanswered) == numbers
    assert not any(task.done() for task in waiting)
    # Places that were not asked for, and half a place, refuse nothing and break nothing.
    to = node.confirming._questions.unanswered[numbers[0]].node_id
    node.confirming.told(to, ConfirmPB(number=numbers[0], answers=True, refused=struct.pack(">HHB", 0, 9, 1)))
    await asyncio.wait_for(waiting[1], 30)
    assert not waiting[0].done() or waiting[0].exception() is None
    wire.holds = lambda confirm: False
    await asyncio.wait_for(waiting[0], 30)


async def test_a_turn_answers_a_bounded_part_of_what_each_other_node_asks(group_of: MakeGroup) -> None:
    wire, groups, _ = await tablets_of(group_of, 1)
    node, first, second = groups[0].nodes

    def answers() -> int:
        return sum(c.answers for sender, _, c in wire.said if sender == node.node_id)

    def ask(tablets: int, by: TestNode = first) -> None:
        node.confirming.told(by.node_id, ConfirmPB(number=7, asks=bytes(_ASK_BYTES * tablets + 5)))

    ask(TABLETS_MAX + 1)
    assert answers() == 0
    rounds = confirming._ANSWERED_MAX // TABLETS_MAX
    for _ in range(rounds + 2):
        ask(TABLETS_MAX)
    assert answers() == rounds
    ask(TABLETS_MAX, by=second)
    assert answers() == rounds + 1
    await asyncio.sleep(0)
    ask(TABLETS_MAX)
    assert answers() == rounds + 2
    assert all(len(c.refused) == 2 * TABLETS_MAX for _, _, c in wire.said if c.answers)
