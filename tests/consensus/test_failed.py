"""Damage: a replica that is damaged says so, serves nothing, keeps its files, and the node and the group go on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stele.consensus.bootstrap import initial_state
from stele.consensus.replica import Replica, ReplicaState
from stele.consensus.superblock import SUPERBLOCK, DataState, Superblock, decode_superblock, encode_superblock
from stele.model.config import Configuration, MemberType, Peer
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Corrupt, SteleError
from stele.model.ids import OPID_NONE, OpId, ReplicaId, TableId, TabletId, new_id
from stele.raft.effects import HardState, Role
from stele.raft.events import ChangeType, Persisted
from stele.raft.ports import LoadedLog
from stele.rpc.proto import common_pb2
from tests.consensus.cluster import Group, TestNode, rows, table, wait_until
from tests.consensus.conftest import MakeGroup


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


async def damaged_follower(group: Group, relative: str) -> tuple[TestNode, Replica]:
    """Stop a follower's node, damage a file of its replica, start it again."""
    leader = await group.leader()
    victim = next(r for r in group.replicas() if r is not leader)
    await group.caught_up(victim)
    await victim.storage.flush()
    node = group.node_of(victim)
    await node.stop()
    found = sorted(victim.directory.glob(relative))
    assert found, relative
    flip(found[0])
    fresh = await node.restart()
    group.nodes[group.nodes.index(node)] = fresh
    return fresh, group.replica(victim.replica_id)


@pytest.mark.parametrize("relative", ["store/MANIFEST", SUPERBLOCK, "store/once-*"])
async def test_a_damaged_file_fails_its_replica_alone(group_of: MakeGroup, relative: str) -> None:
    group, _ = await group_of(3)
    other = await Group(group.nodes).create()
    await group.write(rows(range(10)))
    await other.write(rows(range(5)))
    node, victim = await damaged_follower(group, relative)
    assert victim.state is ReplicaState.FAILED and victim.error
    assert victim.status().error == victim.error
    assert victim.directory.exists()
    with pytest.raises(SteleError):
        victim.writes.submit(rows([1]))
    with pytest.raises(SteleError):
        await victim.reads.snapshot_ready(1)
    other.nodes = group.nodes
    sound = node.replicas.get(other.tablet_id)
    await other.caught_up(sound)
    assert len(table(sound)) == 5
    await group.write(rows([100]))


async def test_a_replica_that_fails_at_work_abstains_and_is_replaced(group_of: MakeGroup) -> None:
    group, nodes = await group_of(3, spare=1)
    await group.write(rows(range(10)))
    leader = await group.leader()
    leader.fail("a scan met a damaged block")
    await wait_until(lambda: any(r.is_leader for r in group.replicas()))
    await group.write(rows([11]))
    lead = await group.leader()
    assert lead is not leader
    core = lead.core
    assert core is not None
    await wait_until(lambda: any(p.failed for p in core.status().peers))
    failed = next(p for p in core.status().peers if p.failed)
    assert failed.replica_id == leader.replica_id
    gone = Peer(leader.host.node_id, leader.replica_id, "", MemberType.VOTER)
    config = await lead.members.change_config(ChangeType.REMOVE, gone, lead.committed_config.opid_index)
    assert config.peer(leader.replica_id) is None
    assert nodes


async def test_a_leader_whose_core_has_ended_leads_no_more_in_its_own_word(group_of: MakeGroup) -> None:
    """Nothing that its core says comes any more, and so no change of role: who listens was never told."""
    group, _ = await group_of(3)
    await group.write(rows([1]))
    leader = await group.leader()
    told: list[tuple[Role, ReplicaId | None]] = []
    leader.add_role_listener(lambda role, term, leads: told.append((role, leads)))
    assert leader.runtime is not None
    leader.runtime.post(Persisted(1 << 40))  # its core refuses to go on
    await wait_until(lambda: leader.state is ReplicaState.FAILED)
    assert told[-1] == (Role.NON_PARTICIPANT, None)
    status = leader.status()
    assert status.role == common_pb2.NON_PARTICIPANT and not status.leader_node and not status.peers
    await group.write(rows([2]))
    assert await group.leader() is not leader


EMPTY = Configuration(-1, ())
LOST = [("all of it", "create it first"), ("its end", "the log lost acknowledged entries")]


@pytest.mark.parametrize(("lost", "why"), LOST)
async def test_a_store_ahead_of_its_log_is_failed(group_of: MakeGroup, lost: str, why: str) -> None:
    group, nodes = await group_of(1)
    await group.write(rows(range(10)))
    await nodes[0].stop()
    wal, earlier = nodes[0].directory / "wal", nodes[0].directory / "wal.earlier"
    if lost == "its end":
        shutil.copytree(wal, earlier)
    else:
        earlier.mkdir()
    group.nodes = [await nodes[0].restart()]
    await group.write(rows(range(10, 20)))
    await (await group.leader()).storage.flush()
    await group.nodes[0].stop()
    shutil.rmtree(wal)
    earlier.rename(wal)
    again = (await group.nodes[0].restart()).replicas.get(group.tablet_id)
    assert again.state is ReplicaState.FAILED and why in str(again.error)


def log_of(start: OpId, *terms: int) -> LoadedLog:
    """A log by the terms of its entries."""
    entries = tuple(Entry(t, start.index + n, EntryKind.WRITE, 0, b"") for n, t in enumerate(terms, 1))
    return LoadedLog(HardState(9, None), start, EMPTY, entries)


MEETS = [
    # the log; up to where the store goes; why they do not meet
    (log_of(OpId(1, 4), 1, 2), OpId(2, 6), ""),
    (log_of(OpId(1, 4), 1, 2), OpId(1, 4), ""),
    (log_of(OpId(1, 4), 1, 2), OpId(1, 3), "entries between are missing"),
    (log_of(OpId(1, 4), 1, 2), OpId(2, 7), "the log lost acknowledged entries"),
    (log_of(OPID_NONE), OpId(2, 7), "the log lost acknowledged entries"),
    (log_of(OpId(1, 4), 1, 3), OpId(2, 6), "the log has 3.6, but the store has 2.6"),
]


@pytest.mark.parametrize(("loaded", "flushed", "why"), MEETS)
def test_a_store_and_its_log_meet_or_the_replica_is_failed(
    loaded: LoadedLog, flushed: OpId, why: str
) -> None:
    if not why:
        initial = initial_state(loaded, EMPTY, flushed, None, witness=False)
        assert initial.commit_index == flushed.index
        return
    with pytest.raises(Corrupt, match=why):
        initial_state(loaded, EMPTY, flushed, None, witness=False)


def test_superblocks_round_trip_and_refuse_damage() -> None:
    block = Superblock(
        TabletId(new_id()),
        ReplicaId(3),
        TableId(new_id()),
        "naïve name",
        "table",
        DataState.COPYING,
        schema="{}",
        partition=b"\x00\xff",
        witness_start=OpId(2, 9),
        leader_hint=ReplicaId(1),
    )
    data = encode_superblock(block)
    assert decode_superblock(data) == block and block.young_witness
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 0x01
        with pytest.raises(Corrupt):
            decode_superblock(bytes(broken))
    for cut in range(len(data)):
        with pytest.raises(Corrupt):
            decode_superblock(data[:cut])


async def write_much(group: Group) -> None:
    """Some segments, flushed by all who can."""
    await group.fill_segments()
    for replica in group.replicas():
        if replica.running:
            await group.caught_up(replica)
            await replica.storage.flush()


@pytest.mark.parametrize("when", ["at work", "at start"])
async def test_a_failed_replica_lets_go_of_a_log_that_a_majority_holds_without_it(
    group_of: MakeGroup, when: str
) -> None:
    """Until a driver removed it, which may be never, all that its node's other tablets wrote stayed in the log."""
    group, _ = await group_of(3)
    await group.write(rows(range(10)))
    if when == "at start":
        node, victim = await damaged_follower(group, "store/MANIFEST")
    else:
        leader = await group.leader()
        victim = next(r for r in group.replicas() if r is not leader)
        await group.caught_up(victim)
        node = group.node_of(victim)
        victim.fail("damaged by a test")
    held = node.log.stream(victim.superblock.key)
    first = node.log.shared.states[held.key].extents[0].sequence
    other = await Group([node]).create()
    await write_much(other)
    await node.log_space.collect()
    assert (
        first in node.log.shared.segments and held.last_opid.index > 0
    )  # it may be one of those who made the majority
    await group.write(rows([100]))
    await wait_until(lambda: victim.committed_elsewhere > held.last_opid.index)
    await node.log_space.collect()
    assert first not in node.log.shared.segments
    fresh = await node.restart()
    group.nodes[group.nodes.index(node)] = fresh
    again = group.replica(victim.replica_id)
    assert again.state is ReplicaState.FAILED  # never started with less than it acknowledged
    assert fresh.replicas.get(other.tablet_id).running


async def test_a_failed_replica_that_nobody_stands_in_for_keeps_its_log(group_of: MakeGroup) -> None:
    group, nodes = await group_of(1)
    other = await Group(nodes).create()
    await group.write(rows(range(10)))
    replica = await group.leader()
    replica.fail("a disk had no space for a moment")
    first = nodes[0].log.shared.states[replica.superblock.key].extents[0].sequence
    await write_much(other)
    await nodes[0].log_space.collect()
    assert first in nodes[0].log.shared.segments
    group.nodes = [await nodes[0].restart()]
    again = await group.leader()
    await wait_until(lambda: len(table(again)) == 10)  # it leads before it has applied its log again
