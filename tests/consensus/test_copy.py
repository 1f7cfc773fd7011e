"""Copying a tablet: as a learner, as a witness, interrupted anywhere, over what was there before."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from stele.consensus.bootstrap import STORE
from stele.consensus.copy_target import TabletCopy
from stele.consensus.replica import Replica, ReplicaState
from stele.consensus.superblock import DataState
from stele.model.config import MemberType, Peer
from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import OPID_NONE, OpId, ReplicaId, StreamKey
from stele.raft.effects import Role
from stele.raft.events import ChangeType
from tests.consensus.cluster import WAIT_S, Group, TestNode, rows, table, wait_until
from tests.consensus.conftest import MakeGroup
from tests.consensus.copies import DirectSource, add, installed, member_type, order, start, young_member


async def test_a_copy_joins_as_pre_follower_and_is_promoted(group_of: MakeGroup) -> None:
    group, nodes = await group_of(3, spare=1)
    await group.write(rows(range(1000)))
    await group.caught_up(nodes[1].replicas.get(group.tablet_id))
    copy = await start(group, nodes[1], nodes[3], 4)
    await installed(copy)
    assert copy.progress.bytes_done == copy.progress.bytes_total > 0
    replica = nodes[3].replicas.get(group.tablet_id)
    assert replica.role is Role.NON_PARTICIPANT and len(table(replica)) == 1000
    await group.write(rows([5000]))
    await add(group, nodes[3], 4, member_type=MemberType.NON_VOTER, promote=True)
    leader = await group.leader()
    await wait_until(lambda: member_type(leader, 4) is MemberType.VOTER)
    await group.caught_up(replica)
    assert 5000 in table(replica)
    await asyncio.wait_for(copy.wait(), WAIT_S)
    assert not list((nodes[1].directory / "copies").iterdir())


async def test_the_same_order_again_reports_the_copy(group_of: MakeGroup) -> None:
    group, nodes = await group_of(3, spare=1)
    await group.write(rows([1]))
    copy = await start(group, nodes[0], nodes[3], 4)
    assert await nodes[3].manager.start_copy(order(group, nodes[0], 4), DirectSource(nodes[0])) is copy
    await installed(copy)
    restarted = await nodes[3].restart()
    assert await restarted.manager.start_copy(order(group, nodes[0], 4), DirectSource(nodes[0])) is None


async def test_a_witness_logs_and_votes_before_its_rows_arrive(group_of: MakeGroup) -> None:
    group, nodes = await group_of(3, spare=1)
    await group.write(rows(range(500)))
    leader = await group.leader()
    lost = next(r for r in group.replicas() if r is not leader)
    for replica in group.replicas():
        await group.caught_up(replica)
    await group.node_of(lost).stop()
    index = leader.committed_config.opid_index
    demoted = Peer(lost.host.node_id, lost.replica_id, "x:1", MemberType.NON_VOTER)
    config = await leader.members.change_config(ChangeType.MODIFY, demoted, index)
    status = leader.core.status()  # type: ignore[union-attr]
    at = min(p.match_index for p in status.peers if p.replica_id != lost.replica_id)
    source = DirectSource(group.node_of(leader))
    source.hold = Event()
    started = OpId(leader.term, at)
    copy = await nodes[3].manager.start_copy(
        order(group, source.node, 4, witness=True, witness_start=started), source
    )
    assert copy is not None and await copy.wait_prepared(WAIT_S) and copy.witness_start == started
    witness = nodes[3].replicas.get(group.tablet_id)
    assert witness.running and witness.machine is None
    peer = Peer(nodes[3].node_id, ReplicaId(4), "n:1", MemberType.WITNESS, witness_start=started)
    await leader.members.change_config(ChangeType.ADD, peer, config.opid_index)
    # With the witness there is a majority without the third voter: that one may go silent too.
    third = next(r for r in group.replicas() if r is not leader)
    nodes[0].network.cut.add(third.host.node_id)
    await group.write(rows([1000]))
    source.hold.set()
    await wait_until(lambda: member_type(leader, 4) is MemberType.VOTER)
    await group.caught_up(witness)
    assert len(table(witness)) == 501
    assert nodes[3].replicas.get(group.tablet_id) is witness


async def test_a_broken_connection_is_resumed(group_of: MakeGroup) -> None:
    group, nodes = await group_of(3, spare=1)
    await group.write(rows(range(3000), "a long name to have some bytes "))
    await group.caught_up(nodes[0].replicas.get(group.tablet_id))
    source = DirectSource(nodes[0], breaks=3, damage=True)
    copy = await nodes[3].manager.start_copy(order(group, nodes[0], 4), source)
    assert copy is not None
    await installed(copy)
    assert source.breaks == 0 and source.begun == 1
    assert len(table(nodes[3].replicas.get(group.tablet_id))) == 3000


async def test_a_lost_session_is_begun_anew(group_of: MakeGroup) -> None:
    group, nodes = await group_of(3, spare=1)
    await group.write(rows(range(3000)))
    await group.caught_up(nodes[0].replicas.get(group.tablet_id))
    source = DirectSource(nodes[0])
    source.hold = Event()
    copy = await nodes[3].manager.start_copy(order(group, nodes[0], 4), source)
    assert copy is not None
    await wait_until(lambda: copy.progress.state == "Fetching")
    await nodes[0].sessions.close()
    source.hold.set()
    await installed(copy)
    assert source.begun == 2


@pytest.mark.parametrize("witness", [False, True])
@pytest.mark.parametrize("step", ["Starting", "Fetching", "Installing"])
async def test_a_crash_leaves_the_old_or_the_new(group_of: MakeGroup, step: str, witness: bool) -> None:
    group, nodes = await group_of(3, spare=1)
    await group.write(rows(range(100)))
    leader = await group.leader()
    source = DirectSource(group.node_of(leader))
    source.hold = Event()
    begun = leader.committed_opid if witness else OPID_NONE
    what = order(group, source.node, 4, witness=witness, witness_start=begun)
    copy = await nodes[3].manager.start_copy(what, source)
    assert copy is not None
    if step != "Starting":
        await wait_until(lambda: copy.progress.state == "Fetching")
    if step == "Installing":
        source.hold.set()
        await wait_until(lambda: copy.progress.state != "Fetching")
    await copy.cancel()
    node = await nodes[3].restart()
    here = node.replicas.current(group.tablet_id)
    if here is not None:
        assert here.running
        assert here.superblock.data_state is DataState.READY or here.superblock.young_witness
        if here.machine is not None:
            assert len(table(here)) == 100
    else:
        directory = node.manager.replica_directory(StreamKey(group.tablet_id, ReplicaId(4)))
        assert (not directory.exists() and not witness) or step == "Starting"
    again = await node.manager.start_copy(what, DirectSource(source.node))
    if again is not None:
        await installed(again)
    replica = node.replicas.get(group.tablet_id)
    assert replica.running and len(table(replica)) == 100


class NoStream:
    """CopyHome of a node whose power goes when a witness's stream is to be made."""

    def __init__(self, node: TestNode) -> None:
        self._manager = node.manager
        self.asked = asyncio.Event()

    async def create_stream(self, *wanted: Any) -> None:
        self.asked.set()
        await asyncio.Event().wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


async def test_a_crash_before_a_witness_has_a_stream_leaves_nothing(group_of: MakeGroup) -> None:
    """It left a superblock that promised a stream: a replica that FAILED at every start, and stood in its copy's way."""
    group, nodes = await group_of(3, spare=1)
    await group.write(rows(range(100)))
    leader = await group.leader()
    source, target = group.node_of(leader), nodes[3]
    what = order(group, source, 4, witness=True, witness_start=leader.committed_opid)
    home = NoStream(target)
    copy = TabletCopy(what, DirectSource(source), home, target.in_thread)  # type: ignore[arg-type]
    await asyncio.wait_for(home.asked.wait(), WAIT_S)
    await copy.cancel()
    node = await target.restart()
    assert node.replicas.current(group.tablet_id) is None
    again = await node.manager.start_copy(what, DirectSource(source))
    assert again is not None
    await installed(again)
    assert len(table(node.replicas.get(group.tablet_id))) == 100


async def test_a_copy_goes_over_a_failed_replica_but_not_over_a_live_one(group_of: MakeGroup) -> None:
    group, nodes = await group_of(3)
    await group.write(rows([1]))
    leader = await group.leader()
    victim = next(r for r in group.replicas() if r is not leader)
    node = group.node_of(victim)
    source = group.node_of(leader)
    with pytest.raises(Rejected) as refused:
        await node.manager.start_copy(order(group, source, 4), DirectSource(source))
    assert refused.value.code is Code.ALREADY_PRESENT
    victim.fail("damaged by a test")
    copy = await start(group, source, node, 4)
    await installed(copy)
    fresh = node.replicas.get(group.tablet_id)
    assert fresh.replica_id == 4 and fresh.state is not ReplicaState.FAILED
    await node.manager.delete(group.tablet_id, int(victim.replica_id), DataState.TOMBSTONED, 10**9, "test")
    node = await node.restart()
    assert node.replicas.get(group.tablet_id).replica_id == 4
    assert StreamKey(group.tablet_id, victim.replica_id) in node.replicas.tombstones
    assert nodes


async def test_tombstones(group_of: MakeGroup) -> None:
    group, _nodes = await group_of(3)
    await group.write(rows([1]))
    leader = await group.leader()
    victim = next(r for r in group.replicas() if r is not leader)
    node = group.node_of(victim)
    peer = Peer(victim.host.node_id, victim.replica_id, "")
    config = await leader.members.change_config(ChangeType.REMOVE, peer, leader.committed_config.opid_index)
    tombstone = (group.tablet_id, int(victim.replica_id), DataState.TOMBSTONED)
    victim.standing.configured(config, True, "as its leader says")
    with pytest.raises(Rejected) as refused:
        await node.manager.delete(*tombstone, config.opid_index - 1, "too old")
    assert refused.value.code is Code.CAS_FAILED
    await node.manager.delete(*tombstone, config.opid_index, "evicted")
    await node.manager.delete(*tombstone, config.opid_index, "evicted")
    with pytest.raises(Rejected) as gone:
        node.replicas.get(group.tablet_id)
    assert gone.value.code is Code.TABLET_DELETED
    node = await node.restart()
    assert list(node.replicas.tombstones)
    with pytest.raises(Rejected):
        await node.manager.create(group.superblock(int(victim.replica_id)), group.config)
    source = group.node_of(leader)
    with pytest.raises(Rejected, match="a replica_id is never used again"):
        await node.manager.start_copy(order(group, source, int(victim.replica_id)), DirectSource(source))
    await node.manager.delete(group.tablet_id, 0, DataState.DELETED, -1, "table removed")
    directory: Path = node.manager.replica_directory(victim.superblock.key)
    assert not directory.exists()
    assert len(await asyncio.gather(group.write(rows([2])))) == 1


async def young_witness(group: Group, target: TestNode, *, rows_after: int) -> tuple[TabletCopy, OpId]:
    """A witness copy whose checkpoint holds `rows_after` rows more than the witness's start."""
    leader = await group.leader()
    source = DirectSource(group.node_of(leader))
    source.hold = Event()
    for replica in group.replicas():
        await group.caught_up(replica)
    start = leader.committed_opid
    await group.write(rows(range(10_000, 10_000 + rows_after)))
    copy = await target.manager.start_copy(
        order(group, source.node, 4, witness=True, witness_start=start), source
    )
    assert copy is not None and await copy.wait_prepared(WAIT_S)
    source.hold.set()
    return copy, start


async def test_a_witness_is_ready_only_once_its_log_has_reached_the_checkpoint(group_of: MakeGroup) -> None:
    """A crash just after it became READY would leave a store ahead of its log: FAILED, copied anew."""
    group, nodes = await group_of(3, spare=1)
    await group.write(rows(range(50)))
    copy, start = await young_witness(group, nodes[3], rows_after=50)
    await wait_until(lambda: copy.progress.state == "Installing")
    await asyncio.sleep(0.3)  # no leader sends it anything: it is in no configuration yet
    node = await nodes[3].restart()
    witness = node.replicas.get(group.tablet_id)
    assert witness.running and witness.superblock.young_witness, witness.error
    leader = await group.leader()
    again = await node.manager.start_copy(
        order(group, group.node_of(leader), 4, witness=True), DirectSource(group.node_of(leader))
    )
    assert again is not None and again.witness_start == start
    await wait_until(lambda: again.progress.state == "Installing")
    victim = next(r for r in group.replicas() if r is not leader)
    demoted = Peer(victim.host.node_id, victim.replica_id, "x:1", MemberType.NON_VOTER)
    config = await leader.members.change_config(
        ChangeType.MODIFY, demoted, leader.committed_config.opid_index
    )
    peer = Peer(node.node_id, ReplicaId(4), "n:1", MemberType.WITNESS, witness_start=start)
    await leader.members.change_config(ChangeType.ADD, peer, config.opid_index)
    await installed(again)
    await wait_until(lambda: member_type(leader, 4) is MemberType.VOTER)
    await group.caught_up(witness)
    assert len(table(witness)) == 100


async def test_a_witness_that_waits_for_its_log_can_be_taken_back(group_of: MakeGroup) -> None:
    """Nobody may ever send it what it lacks (the leader's log is gone): the driver removes it, and nothing hangs."""
    group, nodes = await group_of(3, spare=1)
    await group.write(rows(range(50)))
    copy, _ = await young_witness(group, nodes[3], rows_after=50)
    await wait_until(lambda: copy.progress.state == "Installing")
    deleted = nodes[3].manager.delete(group.tablet_id, 4, DataState.TOMBSTONED, 10**9, "evicted")
    await asyncio.wait_for(deleted, WAIT_S)
    assert copy.failed and StreamKey(group.tablet_id, ReplicaId(4)) in nodes[3].replicas.tombstones
    leader = await group.leader()
    fresh = await start(group, group.node_of(leader), nodes[3], 5)
    await installed(fresh)
    assert len(table(nodes[3].replicas.get(group.tablet_id))) == 100


async def test_a_witness_that_fails_while_it_waits_ends_its_copy(group_of: MakeGroup) -> None:
    group, nodes = await group_of(3, spare=1)
    await group.write(rows(range(50)))
    copy, _ = await young_witness(group, nodes[3], rows_after=50)
    await wait_until(lambda: copy.progress.state == "Installing")
    nodes[3].replicas.get(group.tablet_id).fail("damaged by a test")
    await wait_until(lambda: copy.failed)
    assert "damaged by a test" in copy.progress.error


async def test_rows_that_do_not_meet_the_log_at_once_are_brought_again(group_of: MakeGroup) -> None:
    """A disk that fails to read the log back once must not leave a witness that says READY and never gets rows."""
    group, nodes = await group_of(3, spare=1)
    await group.write(rows(range(100)))
    leader = await group.leader()
    source, copy, begun = await young_member(group, leader, nodes[3])
    await group.write(rows([1000]))
    witness = nodes[3].replicas.get(group.tablet_id)
    await wait_until(lambda: witness.committed_opid >= leader.committed_opid)
    in_thread, faults = nodes[3].in_thread, [Retryable("the disk did not answer")]

    async def failing(work: Callable[..., object], *arguments: object) -> object:
        if getattr(work, "__name__", "") == "read_entries" and faults:
            raise faults.pop()
        return await in_thread(work, *arguments)

    nodes[3].in_thread = failing  # type: ignore[assignment, method-assign]
    source.hold.set()
    await wait_until(lambda: copy.failed)
    again = await nodes[3].manager.start_copy(
        order(group, source.node, 4, witness=True, witness_start=begun), DirectSource(source.node)
    )
    assert again is not None
    await wait_until(lambda: member_type(leader, 4) is MemberType.VOTER)
    await group.caught_up(witness)
    assert len(table(witness)) == 101 and witness.superblock.data_state is DataState.READY


async def test_a_crash_while_rows_are_brought_again_leaves_a_witness(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said READY from the first time, and had no store from the moment that this was removed to the next rename."""
    group, nodes = await group_of(3, spare=1)
    await group.write(rows(range(100)))
    leader = await group.leader()
    for replica in group.replicas():
        await group.caught_up(replica)
    source = DirectSource(group.node_of(leader))
    begun = leader.committed_opid
    what = order(group, source.node, 4, witness=True, witness_start=begun)
    power = ["on"]

    async def unread(self: Replica, superblock: object, machine: object) -> None:
        raise Retryable("the disk did not answer")

    with monkeypatch.context() as patch:
        patch.setattr(Replica, "rows_arrived", unread)
        first = await nodes[3].manager.start_copy(what, source)
        assert first is not None and await first.wait_prepared(WAIT_S)
        victim = next(r for r in group.replicas() if r is not leader)
        demoted = Peer(victim.host.node_id, victim.replica_id, "x:1", MemberType.NON_VOTER)
        config = await leader.members.change_config(
            ChangeType.MODIFY, demoted, leader.committed_config.opid_index
        )
        peer = Peer(nodes[3].node_id, ReplicaId(4), "n:1", MemberType.WITNESS, witness_start=begun)
        await leader.members.change_config(ChangeType.ADD, peer, config.opid_index)
        await first.wait()
    assert first.failed and "did not answer" in first.progress.error
    assert nodes[3].replicas.get(group.tablet_id).superblock.young_witness
    rename = os.rename

    def goes_off(source: Path, target: Path) -> None:
        if Path(target).name == STORE:
            power[0] = "off"
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", goes_off)
        second = await nodes[3].manager.start_copy(what, DirectSource(source.node))
        assert second is not None
        await second.wait()
    assert second.failed and power == ["off"]
    node = await nodes[3].restart()
    witness = node.replicas.get(group.tablet_id)
    assert witness.running and witness.superblock.young_witness, witness.error
    third = await node.manager.start_copy(what, DirectSource(source.node))
    assert third is not None
    await installed(third)
    await group.caught_up(witness)
    assert len(table(witness)) == 100


async def test_a_witness_that_waits_for_its_turn_logs_and_votes_and_fetches_nothing(
    group_of: MakeGroup,
) -> None:
    """Its rows are fetched when it is ordered again; also after a restart, which forgets that it waits."""
    group, nodes = await group_of(3, spare=1)
    await group.write(rows(range(500)))
    leader = await group.leader()
    for replica in group.replicas():
        await group.caught_up(replica)
    begun = leader.committed_opid
    source = DirectSource(group.node_of(leader))
    waits = order(group, source.node, 4, witness=True, witness_start=begun, log_only=True)
    copy = await nodes[3].manager.start_copy(waits, source)
    assert copy is not None and copy.progress.state == "Waiting", "no driver takes it for a copy that runs"
    assert await copy.wait_prepared(WAIT_S)
    await copy.wait()
    assert copy.progress.state == "Waiting" and copy.witness_start == begun
    assert source.sent == 0 and not len(source.node.sessions), "nothing is held at its source"
    victim = next(r for r in group.replicas() if r is not leader)
    demoted = Peer(victim.host.node_id, victim.replica_id, "x:1", MemberType.NON_VOTER)
    config = await leader.members.change_config(
        ChangeType.MODIFY, demoted, leader.committed_config.opid_index
    )
    peer = Peer(nodes[3].node_id, ReplicaId(4), "n:1", MemberType.WITNESS, witness_start=begun)
    await leader.members.change_config(ChangeType.ADD, peer, config.opid_index)
    third = next(r for r in group.replicas() if r not in (leader, victim) and r.replica_id != 4)
    nodes[0].network.cut.add(third.host.node_id)
    await group.write(rows([1000]))  # committed with the witness's vote
    nodes[0].network.cut.clear()
    assert await nodes[3].manager.start_copy(waits, source) is copy, "again: nothing"

    fetches = replace(waits, log_only=False)
    copy = await nodes[3].manager.start_copy(fetches, source)
    assert copy is not None
    await installed(copy)
    await wait_until(lambda: member_type(leader, 4) is MemberType.VOTER)
    witness = nodes[3].replicas.get(group.tablet_id)
    await group.caught_up(witness)
    assert len(table(witness)) == 501


async def test_a_witness_that_waited_is_ordered_to_wait_again_after_a_restart(group_of: MakeGroup) -> None:
    group, nodes = await group_of(3, spare=1)
    await group.write(rows(range(100)))
    leader = await group.leader()
    for replica in group.replicas():
        await group.caught_up(replica)
    source = DirectSource(group.node_of(leader))
    begun = leader.committed_opid
    waits = order(group, source.node, 4, witness=True, witness_start=begun, log_only=True)
    copy = await nodes[3].manager.start_copy(waits, source)
    assert copy is not None and await copy.wait_prepared(WAIT_S)
    await copy.wait()
    node = await nodes[3].restart()
    again = await node.manager.start_copy(waits, source)
    assert again is not None and await again.wait_prepared(WAIT_S)
    await again.wait()
    assert again.progress.state == "Waiting" and again.witness_start == begun and source.begun == 1
    copy = await node.manager.start_copy(replace(waits, log_only=False), source)
    assert copy is not None
    await installed(copy)
    assert len(table(node.replicas.get(group.tablet_id))) == 100
