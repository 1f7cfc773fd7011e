"""Entries that no majority commits, and those of replicas that cannot flush, hold no more of their node's log than they must."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from stele.consensus import storage
from stele.consensus.replica import Replica, ReplicaState
from stele.model.errors import Retryable
from stele.raft.effects import Role
from stele.tserver import log_space
from stele.wal.cache import EntryCache
from stele.wal.format import GROUP_HEADER_BYTES
from tests.consensus.cluster import Group, TestNode, rows, table, wait_until
from tests.consensus.conftest import MakeGroup
from tests.consensus.copies import installed, young_member

HELD = 4 << 20
"""Four segments."""
ROUND_BYTES = 200_000
ROUNDS = 60
"""Three times what may be held."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_space, "HELD_BYTES", HELD)
    monkeypatch.setattr(storage, "LOG_KEPT_MS", 0)


async def maintain(node: TestNode) -> None:
    """What a node does again and again."""
    for held in node.replicas:
        if held.running and held.machine is not None:
            await held.storage.flush()
    await node.log_space.collect()


async def busy(node: TestNode, other: Group) -> int:
    """Other tablets of a node write, and are flushed: the most that its log took meanwhile."""
    most = 0
    for number in range(ROUNDS):
        # Else the last segment is overrun, and the whole of it is held.
        await wait_until(lambda: node.log.shared.wanted_sequence() is None)
        await other.write(rows([number], "x" * ROUND_BYTES))
        await maintain(node)
        most = max(most, node.log.bytes_on_disk)
    return most


async def without_majority(group: Group) -> tuple[TestNode, Replica]:
    """The leader, cut off, with entries that nobody else has."""
    leader = await group.leader()
    node = group.node_of(leader)
    await maintain(node)
    last = leader.storage.stream.last_opid.index
    node.network.cut |= {n.node_id for n in group.nodes if n is not node}
    for number in range(100, 104):
        with suppress(Retryable):
            await leader.writes.propose(rows([number], "y" * 100_000), deadline_ms=1)
    await wait_until(lambda: leader.storage.stream.last_opid.index > last)
    return node, leader


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_tail_that_nobody_commits_holds_no_log_but_itself(
    group_of: MakeGroup, restarted: bool
) -> None:
    """All that the node's other tablets wrote stayed in its log until the majority was back, or the volume full."""
    group, _ = await group_of(3)
    await group.write(rows(range(10)))
    node, leader = await without_majority(group)
    await wait_until(lambda: leader.role is not Role.LEADER)
    last, committed = leader.storage.stream.last_opid, leader.committed_opid
    assert last.index > committed.index
    tail = leader.storage.stream.read_entries(committed.index + 1, 1 << 30)
    other = await Group([node]).create()
    assert await busy(node, other) < HELD + (5 << 20)
    assert leader.storage.stream.last_opid == last
    start = leader.storage.stream.start
    await wait_until(lambda: leader.core.log.start == start)  # told of what was collected
    assert start.index > 0
    assert leader.storage.stream.read_entries(committed.index + 1, 1 << 30) == tail
    if restarted:
        group.nodes[group.nodes.index(node)] = node = await node.restart()
        leader = group.replica(leader.replica_id)
        assert leader.running
        assert leader.storage.stream.read_entries(committed.index + 1, 1 << 30)[: len(tail)] == tail
    node.network.cut.clear()
    await group.write(rows([7], "z"))
    for each in group.replicas():
        await group.caught_up(each)
        assert table(each)[7] == "z7" and table(each).keys() >= set(range(10))


async def test_a_tail_that_the_disk_changed_is_told_once_and_healed(group_of: MakeGroup) -> None:
    """It was read, and complained of, every few seconds, and the replica went on as if it still had what it acknowledged."""
    group, _ = await group_of(3)
    await group.write(rows(range(10)))
    for held in group.nodes:
        held.log.shared.cache = EntryCache(0)
    node, leader = await without_majority(group)
    await wait_until(lambda: leader.role is not Role.LEADER)
    run = node.log.shared.states[leader.superblock.key].extents
    place = run[run.find(leader.storage.stream.last_opid.index)]
    with node.log.shared.segments[place.sequence].path.open("r+b") as file:
        file.seek(place.offset + GROUP_HEADER_BYTES)  # the last entry may be a ceiling, of a few bytes
        file.write(b"rot")
    with capture_logs() as told:
        await busy(node, await Group([node]).create())
    assert leader.state is ReplicaState.FAILED and "damaged" in leader.error
    assert (
        len(
            [
                line
                for line in told
                if line["event"] == "entries that pin old segments could not be written again"
            ]
        )
        == 1
    )


async def test_a_failed_replica_that_may_be_needed_holds_no_log_but_its_own(group_of: MakeGroup) -> None:
    group, nodes = await group_of(1)
    other = await Group(nodes).create()
    await group.write(rows(range(10)))
    replica = await group.leader()
    replica.fail("a disk had no space for a moment")
    assert await busy(nodes[0], other) < HELD + (5 << 20)
    group.nodes = [await nodes[0].restart()]
    again = await group.leader()
    await wait_until(lambda: len(table(again)) == 10)


async def test_a_witness_without_rows_holds_no_log_but_its_own_and_brings_them_up_from_there(
    group_of: MakeGroup,
) -> None:
    group, nodes = await group_of(3, spare=1)
    await group.write(rows(range(100)))
    leader = await group.leader()
    source, copy, _ = await young_member(group, leader, nodes[3])
    for number in range(1000, 1010):
        await group.write(rows([number]))
    witness = nodes[3].replicas.get(group.tablet_id)
    await wait_until(lambda: witness.committed_opid >= leader.committed_opid)
    assert await busy(nodes[3], await Group([nodes[3]]).create()) < HELD + (5 << 20)
    assert witness.running and witness.machine is None
    source.hold.set()
    await installed(copy)
    await group.caught_up(witness)
    assert table(witness).keys() == {*range(100), *range(1000, 1010)}


async def test_a_log_most_of_which_has_to_stay_is_not_written_round_and_round(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_space, "HELD_BYTES", 1 << 20)
    _, nodes = await group_of(1)
    for _ in range(5):
        group = await Group(nodes).create()
        for number in range(3):
            await group.write(rows([number], "x" * ROUND_BYTES))
        (await group.leader()).fail("a disk had no space for a moment")
    node_log = nodes[0].log
    before = node_log.stats.bytes_written
    for kept in (
        1 << 60,
        node_log.shared.options.low_space_bytes,
    ):  # where the disk has no space, it is tried again
        assert node_log.stats.bytes_written - before < ROUND_BYTES
        node_log.shared.options = replace(node_log.shared.options, low_space_bytes=kept)
        node_log.refresh_space()
        await nodes[0].log_space.collect()
    for _ in range(10):
        await maintain(nodes[0])
    # What others wrote, which counts up to HELD_BYTES, and the last of them whole.
    assert 3 * ROUND_BYTES < node_log.stats.bytes_written - before < 2 << 20


async def test_more_than_is_written_again_stays_where_it_is(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_space, "WRITE_AGAIN_BYTES", 100_000)
    group, nodes = await group_of(1)
    other = await Group(nodes).create()
    await group.write(rows([1], "x" * 200_000))
    replica = await group.leader()
    replica.fail("a disk had no space for a moment")
    first = nodes[0].log.shared.states[replica.superblock.key].extents[0].sequence
    with capture_logs() as told:
        await busy(nodes[0], other)
    assert first in nodes[0].log.shared.segments
    assert (
        len(
            [
                line
                for line in told
                if line["event"] == "entries that pin old segments could not be written again"
            ]
        )
        == 1
    )
