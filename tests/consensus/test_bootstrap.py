"""What a replica still knows at its next start: its vote, its term, and the ceilings of the timestamps it may have given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stele.consensus.replica import Replica
from stele.model.config import Configuration, Peer
from stele.model.errors import Code, Retryable
from stele.model.ids import OPID_NONE, NodeId, ReplicaId, new_id
from stele.raft.messages import Message, UpdateRequest, UpdateResponse, VoteRequest, VoteResponse
from tests.consensus.cluster import Group, Network, TestNode, rows, wait_until
from tests.consensus.conftest import MakeGroup

HOUR_US = 3_600_000_000


class Heard(Network):
    """Keeps what left a node for peers that are nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[int, Message]] = []

    def carries(
        self, sender: TestNode, to: NodeId, tablet: bytes, from_: int, to_: int, message: Message
    ) -> bool:
        self.heard.append((to_, message))
        return False


class OneOfThree:
    """Replica 1 of a tablet, on a node that is real. The test speaks for 2 and 3."""

    def __init__(self, node: TestNode, network: Heard) -> None:
        self.node = node
        self.network = network
        self.group = Group([node])
        peers = [
            Peer(NodeId(n), ReplicaId(i), "") for i, n in ((1, node.node_id), (2, new_id()), (3, new_id()))
        ]
        self.config = Configuration(-1, tuple(peers))

    async def create(self) -> OneOfThree:
        block = replace(self.group.superblock(1), leader_hint=None)
        await self.node.manager.create(block, self.config)
        return self

    @property
    def replica(self) -> Replica:
        found = self.node.replicas.current(self.group.tablet_id)
        assert found is not None
        return found

    async def restart(self) -> None:
        self.node = await self.node.restart()

    async def answer(self, sender: int, question: Message, kind: type) -> Any:
        """What `sender` is answered; no sooner than the answer may leave."""
        before = len(self.network.heard)
        peer = self.config.peer(ReplicaId(sender))
        assert peer is not None
        self.replica.on_message(peer.node_id, ReplicaId(sender), question)

        def answers() -> list[Message]:
            return [m for to, m in self.network.heard[before:] if to == sender and isinstance(m, kind)]

        await wait_until(lambda: bool(answers()))
        return answers()[0]


@pytest.fixture
async def one(tmp_path: Path) -> Any:
    network = Heard()
    made = await OneOfThree(await TestNode(network, tmp_path / "n0").start(), network).create()
    yield made
    await made.node.stop()


async def test_who_has_voted_votes_for_nobody_else_after_a_restart(one: OneOfThree) -> None:
    """Else two could lead one term."""
    vote = VoteRequest(5, OPID_NONE)
    assert (await one.answer(2, vote, VoteResponse)).granted
    await one.restart()
    refused = await one.answer(3, vote, VoteResponse)
    assert (refused.granted, refused.term) == (False, 5)
    assert (await one.answer(2, vote, VoteResponse)).granted


async def test_who_has_heard_of_a_term_takes_part_in_none_before_it_after_a_restart(one: OneOfThree) -> None:
    """Its answer of before may have told a leader of that term that it was followed."""
    assert (await one.answer(2, UpdateRequest(7, OPID_NONE, (), 0), UpdateResponse)).success
    await one.restart()
    refused = await one.answer(3, VoteRequest(6, OPID_NONE), VoteResponse)
    assert (refused.granted, refused.term) == (False, 7)
    refused = await one.answer(3, UpdateRequest(6, OPID_NONE, (), 0), UpdateResponse)
    assert (refused.success, refused.term) == (False, 7)


@pytest.mark.parametrize("flushed", [False, True], ids=["in the log", "in the store"])
async def test_no_timestamp_is_given_again_after_a_restart_with_the_clock_set_back(
    group_of: MakeGroup, flushed: bool
) -> None:
    """The ceiling of before tells how far timestamps may have gone. With it in the store nothing of the log is read."""
    group, (node,) = await group_of(1)
    node.skew_us = HOUR_US
    await group.write(rows([1]))
    if flushed:
        await (await group.leader()).storage.flush()
    group.nodes = [await node.restart()]
    leader = await group.leader()
    assert leader.core is not None
    with pytest.raises(Retryable, match="behind the timestamps") as refused:
        await leader.writes.propose(rows([2]), deadline_ms=1_000)
    assert refused.value.code is Code.NOT_READY
