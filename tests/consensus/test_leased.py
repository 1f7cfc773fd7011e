"""Leaders with leases: reads that ask no other node, and when they ask all the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from stele import metrics
from stele.consensus.replica import Replica
from stele.model.cluster_version import LEADER_LEASES_VERSION
from stele.model.errors import Code, Retryable
from stele.raft.messages import Message, UpdateRequest, UpdateResponse
from tests.consensus import cluster
from tests.consensus.cluster import STEADY, Group, Network, TestNode, leads, rows, wait_until
from tests.consensus.conftest import MakeGroup
from tests.consensus.rest import at_rest, resting, rests

LEASE_MS = 60_000
"""Longer than any machine stands still in a test."""


@pytest.fixture(autouse=True)
def leases(steady: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes have leases."""
    raft = replace(STEADY.raft, lease_ms=LEASE_MS, promised_ms=LEASE_MS)
    monkeypatch.setattr(cluster, "OPTIONS", replace(STEADY, raft=raft))


class Wire(Network):
    """Counts what could confirm a leader, and notes whether leases were asked for and promised."""

    def __init__(self) -> None:
        super().__init__()
        self.questions = 0
        self.asked = self.promised = False

    def confirm(self, sender: TestNode, to: str, confirm: object) -> None:
        self.questions += 1
        super().confirm(sender, to, confirm)  # type: ignore[arg-type]

    def carries(
        self, sender: TestNode, to: str, tablet: bytes, from_: int, to_: int, message: Message
    ) -> bool:
        if isinstance(message, UpdateRequest):
            self.questions += bool(message.read_context)
            self.asked |= message.lease_ms > 0
        self.promised |= isinstance(message, UpdateResponse) and message.lease_sent_ms > 0
        return super().carries(sender, to, tablet, from_, to_, message)  # type: ignore[arg-type]


def leased(group: Group, leader: Replica) -> bool:
    """Whether it holds a lease now."""
    return leader.core is not None and leader.core.leased(group.node_of(leader).steady_us())


async def with_lease(group_of: MakeGroup) -> tuple[Group, list[TestNode], Replica, Wire]:
    """A group with a row, its nodes, its leader, which holds a lease, and its network."""
    wire = Wire()
    group, nodes = await group_of(network=wire)
    await group.write(rows([1]))
    leader = await group.leader()
    await wait_until(lambda: leased(group, leader))
    return group, nodes, leader, wire


async def test_reads_under_a_lease_ask_no_other_node(group_of: MakeGroup) -> None:
    _, nodes, leader, wire = await with_lease(group_of)
    wire.questions, before = 0, metrics.leased_reads.cell()[0]
    wire.cut.add(leader.host.node_id)
    for _ in range(10):
        await leader.reads.linearizable_read()
    assert wire.questions == 0 and metrics.leased_reads.cell()[0] == before + 10
    assert await leader.reads.index_by_others(0, 0) == leader.core.commit_index  # type: ignore[union-attr]
    assert len(nodes) == 3


async def test_a_leader_whose_machine_slept_asks_again(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steady clock went on meanwhile; its core's time did not."""
    group, _, leader, wire = await with_lease(group_of)
    await leader.reads.linearizable_read()
    wire.cut.add(leader.host.node_id)
    node, steady_us = group.node_of(leader), group.node_of(leader).steady_us
    monkeypatch.setattr(node, "steady_us", lambda: steady_us() + 3_600_000_000)
    assert not leased(group, leader)
    reading = asyncio.ensure_future(leader.reads.linearizable_read())
    await wait_until(lambda: wire.questions > 0)
    assert not reading.done()
    wire.cut.clear()
    await reading
    await wait_until(lambda: leased(group, leader))


async def test_before_the_cluster_is_finalized_nobody_asks_for_a_lease_or_promises_one(
    group_of: MakeGroup,
) -> None:
    wire = Wire()
    group, nodes = await group_of(network=wire)
    for node in nodes:
        node.told_version = LEADER_LEASES_VERSION - 1
    await group.write(rows([1]))
    leader = await group.leader()
    wire.asked = wire.promised = False
    for number in (2, 3):
        await group.write(rows([number]))
    assert not wire.asked and not wire.promised
    wire.questions = 0
    await leader.reads.linearizable_read()
    nodes[0].told_version = LEADER_LEASES_VERSION
    await group.write(rows([4]))
    assert wire.asked and not wire.promised, "the others have not heard of it yet"
    for node in nodes[1:]:
        node.told_version = LEADER_LEASES_VERSION
    await wait_until(lambda: leased(group, leader))


async def test_who_promised_is_not_promoted_by_force_but_leads_once_the_leader_hands_over(
    group_of: MakeGroup,
) -> None:
    group, _, leader, _ = await with_lease(group_of)
    heir = next(r for r in group.replicas() if r is not leader)
    await group.caught_up(heir)
    with pytest.raises(Retryable, match="has promised its leader a lease") as refused:
        heir.members.promote("an administrator")
    assert refused.value.code is Code.NOT_READY
    await leader.members.transfer_leadership(heir.replica_id)
    await wait_until(lambda: leads(heir))
    assert not leased(group, leader)
    await group.write(rows([2]))


@pytest.mark.usefixtures("rests_soon")
async def test_a_read_wakes_a_group_at_rest_so_that_its_leader_has_a_lease_again(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, _, leader = await at_rest(group_of)
    node, steady_us, slept_us = group.node_of(leader), group.node_of(leader).steady_us, [0]
    monkeypatch.setattr(node, "steady_us", lambda: steady_us() + slept_us[0])
    slept_us[0] += 1_000 * LEASE_MS
    await leader.reads.linearizable_read()
    able = node.confirming._questions.answering
    await wait_until(lambda: len(able) == 2)  # from now on nodes confirm reads, which alone wakes nobody
    await rests(group)
    slept_us[0] += 1_000 * LEASE_MS
    assert resting(leader) and not leased(group, leader)
    await leader.reads.linearizable_read()
    await wait_until(lambda: leased(group, leader))
