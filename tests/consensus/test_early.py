"""Writes whose callers are content with memory: who is answered before the commit, with what, and what reads see."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from stele.consensus.replica import Replica
from stele.model import writeop
from stele.model.block import RowOp
from stele.model.errors import Code, Retryable
from stele.model.schema import Schema
from stele.raft.messages import Message, UpdateResponse
from stele.tablet.machine import Outcome
from tests.consensus.cluster import SCHEMA, Group, Network, TestNode, pairs, rows, table, wait_until
from tests.consensus.conftest import MakeGroup

CLIENT = b"c" * 16


class Slow(Network):
    """A network that carries no word of what is synced while `holds`."""

    def __init__(self) -> None:
        super().__init__()
        self.holds = False
        self.early = 0

    def carries(
        self, sender: TestNode, to: str, tablet: bytes, from_: int, to_: int, message: Message
    ) -> bool:
        if isinstance(message, UpdateResponse):
            self.early += bool(message.written_index)
            if self.holds and not message.written_index:
                return False
        return super().carries(sender, to, tablet, from_, to_, message)  # type: ignore[arg-type]


def plain(payload: bytes) -> bytes:
    """The same, checked by a leader to upsert whole rows."""
    header, body = writeop.decode(payload)
    return writeop.encode(replace(header, plain=True), bytes(body))


def submit(leader: Replica, payload: bytes, *, rows_only: bool = True) -> asyncio.Future[Outcome]:
    early: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    leader.writes.submit(payload, rows_only=rows_only, early=early)
    return early


async def begun(group_of: MakeGroup) -> tuple[Group, Replica, Slow]:
    """A group with a row of a known client, its leader, and its network, which says nothing of syncs from now on."""
    wire = Slow()
    group, _ = await group_of(network=wire)
    await group.write(plain(rows([1], client=CLIENT, sequence=1)))
    leader = await group.leader()
    await leader.reads.linearizable_read()
    await group.all_applied()  # so that the term is on each disk: before that, followers say nothing early
    wire.holds = True
    return group, leader, wire


def row(number: int, sequence: int, **more: Any) -> bytes:
    return plain(rows([number], client=CLIENT, sequence=sequence, **more))


async def test_it_is_answered_before_its_commit_and_reads_wait_for_that(group_of: MakeGroup) -> None:
    group, leader, wire = await begun(group_of)
    outcome = await submit(leader, row(2, 2))
    assert outcome.in_memory and outcome.code is Code.OK and outcome.timestamp
    assert leader.core is not None and leader.core.commit_index < leader.core.log.last_index
    assert 2 not in table(leader)
    reading = asyncio.ensure_future(leader.reads.linearizable_read())
    scanning = asyncio.ensure_future(leader.reads.snapshot_ready(outcome.timestamp))
    await asyncio.wait((reading, scanning), timeout=0.1)
    assert not reading.done() and not scanning.done()
    wire.holds = False
    await asyncio.gather(reading, scanning)
    assert table(leader)[2] == "x2"
    await group.all_applied()


async def test_a_follower_that_is_read_waits_for_it_too(group_of: MakeGroup) -> None:
    group, leader, wire = await begun(group_of)
    await submit(leader, row(2, 2))
    follower = next(r for r in group.replicas() if r is not leader)
    reading = asyncio.ensure_future(follower.following.fresh(0, at_once=True))
    await asyncio.wait((reading,), timeout=0.1)
    assert not reading.done() or isinstance(reading.exception(), Retryable)
    wire.holds = False
    await follower.following.fresh(0, at_once=True)
    assert table(follower)[2] == "x2"


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(rows([2], client=CLIENT, sequence=2, op=RowOp.INSERT), id="an insert may be refused"),
        pytest.param(plain(rows([2], client=b"n" * 16, sequence=1)), id="a client that is new"),
        pytest.param(row(1, 1), id="a retry of what is done"),
        pytest.param(row(2, 2, lowest=3), id="a number that its client has given up"),
    ],
)
async def test_what_has_no_certain_outcome_waits_for_its_commit(group_of: MakeGroup, payload: bytes) -> None:
    _, leader, wire = await begun(group_of)
    answer = submit(leader, payload)
    before = wire.early
    await wait_until(lambda: wire.early >= before + 2)
    await asyncio.sleep(0)
    assert not answer.done()
    wire.holds = False
    assert not (await answer).in_memory


async def test_a_repetition_under_way_gets_the_first_ones_outcome(group_of: MakeGroup) -> None:
    _, leader, wire = await begun(group_of)
    first = await submit(leader, row(2, 2))
    again = submit(leader, row(2, 2))
    third = await submit(leader, row(3, 3))
    assert third.in_memory and not again.done()
    wire.holds = False
    repeated = await again
    assert repeated.duplicate and repeated.timestamp == first.timestamp


@pytest.mark.parametrize("used", [False, True], ids=["the first in memory", "one of many"])
async def test_a_repetition_of_a_synced_write_under_way_gets_its_outcome(
    group_of: MakeGroup, used: bool
) -> None:
    """Its caller was told the timestamp of the repetition, under which nothing is stored."""
    group, leader, wire = await begun(group_of)
    if used:
        assert (await submit(leader, row(4, 4))).in_memory
    first = leader.writes.submit(row(2, 2), rows_only=True)
    again = submit(leader, row(2, 2))
    third = await submit(leader, row(3, 3))
    assert third.in_memory and not again.done()
    wire.holds = False
    repeated = await again
    assert repeated.duplicate and repeated.timestamp == (await first).timestamp
    await wait_until(lambda: not leader.writes.proposals.in_log)
    assert not leader.writes.proposals.early._numbers
    await group.all_applied()
    wire.holds = True
    assert (await submit(leader, row(5, 5))).in_memory


async def test_behind_a_change_of_the_schema_nothing_is_certain(group_of: MakeGroup) -> None:
    _, leader, wire = await begun(group_of)
    newer = Schema.from_json(SCHEMA.to_json())
    change = leader.writes.submit(writeop.schema_change(newer))
    answer = submit(leader, row(2, 2))
    before = wire.early
    await wait_until(lambda: wire.early >= before + 2)
    await asyncio.sleep(0)
    assert not answer.done()
    wire.holds = False
    await change
    assert not (await answer).in_memory


async def test_a_leader_that_ends_says_unknown(group_of: MakeGroup) -> None:
    group, leader, wire = await begun(group_of)
    wire.cut.add(leader.host.node_id)
    answer = submit(leader, row(2, 2))
    await group.node_of(leader).stop()
    with pytest.raises(Retryable) as told:
        await answer
    assert told.value.code is Code.UNKNOWN_OUTCOME


async def test_a_key_space_answers_nothing_early(group_of: MakeGroup) -> None:
    wire = Slow()
    group, _ = await group_of(network=wire, kind="keyspace")
    await group.write(pairs(b"a", b"1"))
    leader = await group.leader()
    assert not (await submit(leader, pairs(b"b", b"2"))).in_memory
