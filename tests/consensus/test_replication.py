"""A group of three: writes and restarts. Real logs and stores, an in-memory network."""

from __future__ import annotations

import asyncio
import os

import pytest

from stele.consensus.replica import ReplicaState
from stele.model.block import RowOp
from stele.model.errors import Code, Rejected, Retryable
from tests.consensus.cluster import OPTIONS, pairs, rows, table, wait_until
from tests.consensus.conftest import MakeGroup


async def test_writes_reach_all(group_of: MakeGroup) -> None:
    group, _ = await group_of()
    outcomes = await asyncio.gather(*(group.write(rows([i])) for i in range(50)))
    assert len({o.timestamp for o in outcomes}) == 50
    for replica in group.replicas():
        await group.caught_up(replica)
        assert table(replica) == {i: f"x{i}" for i in range(50)}


@pytest.mark.usefixtures("quick_elections")
async def test_exactly_once_over_a_leader_change(group_of: MakeGroup) -> None:
    group, nodes = await group_of()
    client = os.urandom(16)
    first = await group.write(rows([1, 2], op=RowOp.INSERT, client=client, sequence=1))
    assert not first.row_errors
    leader = await group.leader()
    nodes[0].network.cut.add(leader.host.node_id)
    await wait_until(lambda: not leader.is_leader)
    again = await group.write(rows([1, 2], op=RowOp.INSERT, client=client, sequence=1))
    assert again.duplicate and not again.row_errors and again.timestamp == first.timestamp
    nodes[0].network.cut.clear()
    await group.caught_up(leader)
    assert table(leader) == {1: "x1", 2: "x2"}


@pytest.mark.usefixtures("quick_elections")
async def test_a_minority_leader_answers_unknown_then_no_quorum(group_of: MakeGroup) -> None:
    group, nodes = await group_of()
    leader = await group.leader()
    await group.write(rows([1]))
    nodes[0].network.cut.update(n.node_id for n in nodes)
    with pytest.raises(Retryable) as waited:
        await leader.writes.propose(rows([2]), deadline_ms=50)
    assert waited.value.code is Code.UNKNOWN_OUTCOME
    await wait_until(lambda: not leader.is_leader)

    def refusal() -> Code:
        with pytest.raises(Retryable) as refused:
            leader.writes.submit(rows([3]))
        return refused.value.code

    await wait_until(lambda: refusal() is Code.NO_QUORUM)
    nodes[0].network.cut.clear()
    await group.write(rows([4]))
    assert 4 in table(await group.leader())


async def test_a_write_whose_waiter_left_is_still_done(group_of: MakeGroup) -> None:
    group, _ = await group_of()
    leader = await group.leader()
    task = asyncio.create_task(leader.writes.propose(rows([7])))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await wait_until(lambda: table(leader) == {7: "x7"})


async def test_restart_of_everything_keeps_everything(group_of: MakeGroup) -> None:
    group, nodes = await group_of()
    await group.write(rows(range(100)))
    await (await group.leader()).storage.flush()
    await group.write(rows(range(100, 120)))
    term = (await group.leader()).term
    group.nodes = [await n.restart() for n in nodes]
    leader = await group.leader()
    assert leader.term > term
    await leader.reads.linearizable_read()
    assert sorted(table(leader)) == list(range(120))
    await group.write(rows([200]))


async def test_one_restarted_follower_needs_no_new_entry(group_of: MakeGroup) -> None:
    group, _nodes = await group_of()
    await group.write(rows([1]))
    leader = await group.leader()
    follower = next(r for r in group.replicas() if r is not leader)
    await group.caught_up(follower)
    assert leader.core is not None
    before = leader.core.status().last_logged
    node = group.node_of(follower)
    group.nodes[group.nodes.index(node)] = await node.restart()
    back = group.replica(follower.replica_id)
    await wait_until(lambda: back.state is ReplicaState.RUNNING)
    assert (await group.leader()) is leader
    assert back.core is not None
    assert leader.core.status().last_logged == back.core.status().last_logged == before


async def test_a_lossy_network_loses_no_write(group_of: MakeGroup) -> None:
    group, nodes = await group_of()
    nodes[0].network.loss = 0.1
    client = os.urandom(16)
    for i in range(40):
        outcome = await group.write(rows([i], op=RowOp.INSERT, client=client, sequence=i + 1))
        assert not outcome.row_errors
    nodes[0].network.loss = 0.0
    for replica in group.replicas():
        await group.caught_up(replica)
        assert sorted(table(replica)) == list(range(40))


async def test_a_quiet_tablet_writes_nothing(group_of: MakeGroup) -> None:
    group, _ = await group_of()
    await group.write(rows([1]))
    await asyncio.sleep(0.5)
    for _ in range(10):  # where this machine stands still another may be elected, and writes one entry
        before = (await group.leader()).core.status().last_logged  # type: ignore[union-attr]
        await asyncio.sleep(0.6)
        after = (await group.leader()).core.status().last_logged  # type: ignore[union-attr]
        if after == before:
            break
    assert after == before


async def test_too_large_and_disk_full_are_refused_before_the_log(group_of: MakeGroup) -> None:
    group, _ = await group_of()
    leader = await group.leader()
    with pytest.raises(Rejected) as large:
        leader.writes.submit(bytes(OPTIONS.write_bytes_max + 1))
    assert large.value.code is Code.TOO_LARGE
    group.node_of(leader).low = True
    with pytest.raises(Retryable) as full:
        leader.writes.submit(rows([1]))
    assert full.value.code is Code.DISK_FULL


async def test_a_key_space_on_the_same_replica_code(group_of: MakeGroup) -> None:
    group, nodes = await group_of(kind="keyspace")
    await group.write(pairs(b"a", b"1"))
    group.nodes = [await n.restart() for n in nodes]
    leader = await group.leader()
    await leader.reads.linearizable_read()
    assert leader.machine.read(b"a") == b"1"  # type: ignore[union-attr]


async def test_single_replica_group(group_of: MakeGroup) -> None:
    group, nodes = await group_of(1)
    await group.write(rows([1]))
    group.nodes = [await nodes[0].restart()]
    await group.write(rows([2]))
    assert table(await group.leader()) == {1: "x1", 2: "x2"}
