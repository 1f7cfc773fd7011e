"""Heartbeats of many tablets share one message to each node; whoever does not follow, or lacks something, gets its own."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter

import pytest

from stele.consensus.replica import Replica
from stele.model.errors import Retryable
from stele.model.ids import NodeId
from stele.raft.messages import Message, UpdateRequest
from stele.rpc.proto.consensus_pb2 import BeatPB
from stele.tserver import beating
from stele.tserver.questions import TABLETS_MAX
from tests.consensus.cluster import WAIT_S, Group, Network, TestNode, rows, table, wait_until
from tests.consensus.conftest import MakeGroup

_BEAT = struct.Struct(">16sQQQQQ")


class Wire(Network):
    """Counts heartbeats and beats, and may lose or refuse beats."""

    def __init__(self) -> None:
        super().__init__()
        self.heartbeats: Counter[bytes] = Counter()
        self.beats: list[tuple[NodeId, BeatPB]] = []
        self.answers: list[tuple[NodeId, BeatPB]] = []
        self.silent = False
        self.refuse_all = False
        self.deaf: tuple[NodeId, bytes] | None = None

    def beat(self, sender: TestNode, to: NodeId, beat: BeatPB) -> None:
        (self.answers if beat.answers else self.beats).append((to, beat))
        if self.refuse_all and beat.answers:
            places = b"".join(struct.pack(">H", at) for at in range(100))
            beat = BeatPB(number=beat.number, answers=True, refused=places)
        if not self.silent:
            super().beat(sender, to, beat)

    def carries(
        self, sender: TestNode, to: NodeId, tablet: bytes, from_: int, to_: int, message: Message
    ) -> bool:
        if isinstance(message, UpdateRequest) and not message.entries:
            self.heartbeats[tablet] += 1
        return self.deaf != (to, tablet) and super().carries(sender, to, tablet, from_, to_, message)

    def forget(self) -> None:
        self.heartbeats.clear()
        self.beats.clear()
        self.answers.clear()

    def sizes(self) -> set[int]:
        return {len(beat.beats) // _BEAT.size for _, beat in self.beats if beat.beats}


async def tablets_of(group_of: MakeGroup, count: int) -> tuple[Wire, list[Group], list[Replica]]:
    """Tablets on the same three nodes, led on the first, with a row each; nothing goes on but beats."""
    wire = Wire()
    first, nodes = await group_of(network=wire)
    groups = [first] + [await Group(nodes).create() for _ in range(count - 1)]
    leaders = []
    for group in groups:
        await group.write(rows([1], "old"))
        leaders.append(await group.leader())
    await wait_until(lambda: len(nodes[0].beating._questions.answering) == 2)
    await calm(wire)
    return wire, groups, leaders


async def calm(wire: Wire) -> None:
    """Wait until only beats are sent."""

    async def rounds(count: int) -> None:
        told = len(wire.beats)
        await wait_until(lambda: len(wire.beats) >= told + count)

    async with asyncio.timeout(WAIT_S):
        while True:
            wire.forget()
            await rounds(12)
            if not wire.heartbeats:
                return


async def test_tablets_share_one_message_to_each_node_and_nothing_else_is_sent(group_of: MakeGroup) -> None:
    wire, groups, leaders = await tablets_of(group_of, 5)
    await wait_until(lambda: 5 in wire.sizes())
    await wait_until(lambda: len(wire.beats) > 60)  # some election timeouts
    assert not wire.heartbeats
    assert all(not beat.refused for _, beat in wire.answers)
    assert all(leader.is_leader and leader.term == 1 for leader in leaders)
    for group in groups:
        assert all(group.replica(n).leader == 1 for n in (1, 2, 3))


async def test_a_follower_learns_of_a_commit_by_a_heartbeat(group_of: MakeGroup) -> None:
    """A beat carries no commit index that is new. A follower that got none would never apply the last write."""
    wire, groups, _ = await tablets_of(group_of, 2)
    await groups[0].write(rows([2], "new"))
    await wait_until(lambda: all(table(groups[0].replica(n)) == {1: "old1", 2: "new2"} for n in (1, 2, 3)))
    await calm(wire)


async def test_a_deposed_leader_hears_of_it_though_its_neighbours_are_followed(group_of: MakeGroup) -> None:
    wire, groups, leaders = await tablets_of(group_of, 3)
    first, second = groups[1].replica(1), groups[1].replica(2)
    wire.forget()
    wire.deaf = first.host.node_id, first.raw_tablet_id
    second.members.promote("test")
    await wait_until(lambda: second.is_leader)
    await wait_until(lambda: not first.is_leader)
    assert any(beat.refused for _, beat in wire.answers)
    assert leaders[0].is_leader and leaders[2].is_leader
    wire.deaf = None
    await wait_until(lambda: first.leader == 2)


async def test_beats_that_are_refused_become_heartbeats(group_of: MakeGroup) -> None:
    wire, _, leaders = await tablets_of(group_of, 2)
    wire.refuse_all = True
    await wait_until(lambda: all(wire.heartbeats[leader.raw_tablet_id] > 10 for leader in leaders))
    assert all(leader.is_leader for leader in leaders)
    wire.refuse_all = False
    await calm(wire)


async def test_a_leader_whose_beats_nobody_answers_steps_down(group_of: MakeGroup) -> None:
    """As with heartbeats: it must not believe that it leads, while a majority may have another leader."""
    wire, groups, leaders = await tablets_of(group_of, 1)
    node_id = leaders[0].host.node_id
    wire.cut.add(node_id)
    await wait_until(lambda: not leaders[0].is_leader)
    await wait_until(lambda: any(groups[0].replica(n).is_leader for n in (2, 3)))


async def test_beats_that_get_lost_do_not_cost_a_leader_its_place(group_of: MakeGroup) -> None:
    """A node of the release before is silent, and so is one that has too much to do. Heartbeats follow in time."""
    wire, _, leaders = await tablets_of(group_of, 1)
    wire.silent = True
    wire.forget()
    await wait_until(lambda: wire.heartbeats[leaders[0].raw_tablet_id] > 20)
    assert leaders[0].is_leader and leaders[0].term == 1
    wire.silent = False
    await calm(wire)


async def test_an_answer_counts_for_its_own_message_and_its_own_sender_alone(group_of: MakeGroup) -> None:
    wire, groups, leaders = await tablets_of(group_of, 1)
    leader = leaders[0]
    node = next(n for n in groups[0].nodes if n.node_id == leader.host.node_id)
    others = [n.node_id for n in groups[0].nodes if n is not node]
    wire.silent = True
    await wait_until(lambda: bool(node.beating._questions.unanswered))
    number, sent = next(iter(node.beating._questions.unanswered.items()))
    progress = leader.core._roles.leader.peers.progress[sent.parts[0].to]  # type: ignore[union-attr]
    heard = progress.heard_ms
    wrong = next(n for n in others if n != sent.node_id)
    node.beating.told(wrong, BeatPB(number=number, answers=True))
    node.beating.told(sent.node_id, BeatPB(number=number + 1_000, answers=True))
    assert progress.heard_ms == heard and number in node.beating._questions.unanswered
    node.beating.told(sent.node_id, BeatPB(number=number, answers=True))
    assert progress.heard_ms > heard and number not in node.beating._questions.unanswered
    wire.silent = False


async def test_a_node_that_is_told_too_much_answers_nothing(group_of: MakeGroup) -> None:
    wire, groups, _ = await tablets_of(group_of, 1)
    node = groups[0].nodes[1]
    asker = groups[0].nodes[0].node_id
    one = _BEAT.pack(b"t" * 16, 0, 1, 2, 1, 1)
    wire.forget()
    node.beating.told(asker, BeatPB(number=7, beats=one * (TABLETS_MAX + 1)))
    assert not [beat for _, beat in wire.answers if beat.number == 7]
    node.beating.told(asker, BeatPB(number=8, beats=one + b"rest"))
    (answer,) = [beat for _, beat in wire.answers if beat.number == 8]
    assert answer.refused == b"\0\0", "no such tablet is here"
    for _ in range(beating._TAKEN_MAX // TABLETS_MAX):
        node.beating.told(asker, BeatPB(number=9, beats=one * TABLETS_MAX))
    wire.forget()
    node.beating.told(asker, BeatPB(number=10, beats=one * TABLETS_MAX))
    assert not [beat for _, beat in wire.answers if beat.number == 10]


async def test_an_answer_from_before_a_reset_does_not_say_that_the_node_takes_beats(
    group_of: MakeGroup,
) -> None:
    """The node may have been rolled back meanwhile, and releases before 0.2.0 take no beats."""
    wire, groups, _ = await tablets_of(group_of, 1)
    node, other = groups[0].nodes[0], groups[0].nodes[1].node_id
    assert node.beating.takes_beats(other)
    beaten = next(beat for to, beat in reversed(wire.beats) if to == other)

    def greeted() -> BeatPB:
        node.beating.lost(other)
        wire.forget()
        assert not node.beating.takes_beats(other)
        ((to, greeting),) = wire.beats
        assert to == other and not greeting.beats
        return greeting

    early, late = greeted(), greeted()
    for beat in (beaten, early):
        node.beating.told(other, BeatPB(number=beat.number, answers=True))
        assert not node.beating.takes_beats(other)
    node.beating.told(other, BeatPB(number=late.number, answers=True))
    assert node.beating.takes_beats(other)


async def test_a_node_that_sends_too_much_leaves_the_others_their_room(group_of: MakeGroup) -> None:
    wire, groups, _ = await tablets_of(group_of, 1)
    node, busy, other = groups[0].nodes
    many = _BEAT.pack(b"t" * 16, 0, 1, 2, 1, 1) * TABLETS_MAX
    for _ in range(beating._TAKEN_MAX // TABLETS_MAX + 1):
        node.beating.told(busy.node_id, BeatPB(number=7, beats=many))
    wire.forget()
    node.beating.told(busy.node_id, BeatPB(number=8, beats=many))
    node.beating.told(other.node_id, BeatPB(number=9, beats=many))
    assert [(to, beat.number) for to, beat in wire.answers] == [(other.node_id, 9)]


async def test_a_write_after_a_lost_follower_is_served_by_the_other(group_of: MakeGroup) -> None:
    """One peer is silent and is probed. The other one still takes beats."""
    wire, groups, leaders = await tablets_of(group_of, 1)
    lost = groups[0].nodes[2]
    wire.cut.add(lost.node_id)
    leaders[0].peer_node_failed(lost.node_id)
    wire.forget()
    await wait_until(lambda: len([1 for to, b in wire.beats if b.beats and to != lost.node_id]) > 10)
    assert leaders[0].is_leader
    try:
        await groups[0].write(rows([5], "x"))
    except Retryable as exc:
        raise AssertionError("two of three are a majority") from exc
    wire.cut.clear()
    await wait_until(lambda: table(groups[0].replica(3)) == {1: "old1", 5: "x5"})


async def test_leaders_alone_hear_that_a_node_is_back(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They probe its replicas. A follower that was told the same would miss a leader that leads."""
    group, nodes = await group_of()
    await group.write(rows([1]))
    leader = await group.leader()
    told: list[tuple[str, int]] = []
    monkeypatch.setattr(
        Replica, "peer_node_failed", lambda self, node_id: told.append((node_id, self.replica_id))
    )
    for node in nodes:
        node.replicas.peer_node_back(nodes[2].node_id)
    assert told == [(nodes[2].node_id, leader.replica_id)]
