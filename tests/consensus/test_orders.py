"""Orders to a tablet manager: what must end, what must not be forgotten, what comes too late."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import pytest

from stele.consensus.files import make_directory, remove_if_empty
from stele.consensus.replica import ReplicaState
from stele.consensus.superblock import SUPERBLOCK, DataState, write_superblock
from stele.model.errors import Code, Corrupt, Rejected, Retryable, SteleError
from stele.model.ids import NodeId, ReplicaId, StreamKey, new_id
from stele.raft.ports import LoadedLog
from stele.tserver.reports import report_one
from tests.consensus.cluster import WAIT_S, Group, Network, TestNode, rows, wait_until
from tests.consensus.conftest import MakeGroup
from tests.consensus.copies import DirectSource, order, start
from tests.wal.simfs import SimFiles

T = TypeVar("T")


class HeldNode(TestNode):
    """Its replicas have read their logs, and go no further before `go`."""

    def __init__(self, network: Network, directory: Path, node_id: NodeId) -> None:
        super().__init__(network, directory, node_id)
        self.read, self.go = asyncio.Event(), asyncio.Event()

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        found = await super().in_thread(work, *args)
        if isinstance(found, LoadedLog):
            self.read.set()
            await self.go.wait()
        return found


class UnreadNode(TestNode):
    """Its directories have not been looked through before `go`."""

    def __init__(self, network: Network, directory: Path, node_id: NodeId) -> None:
        super().__init__(network, directory, node_id)
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        if getattr(work, "__name__", "") == "_scan":
            self.asked.set()
            await self.go.wait()
        return await super().in_thread(work, *args)


class FullNode(TestNode):
    """Once, a step of that name finds no space for a replica."""

    fails = ""

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        concerns_a_replica = not args or "/tablets/" in str(args[0])
        if self.fails and getattr(work, "__name__", "") == self.fails and concerns_a_replica:
            self.fails = ""
            raise OSError(errno.ENOSPC, "No space left on device")
        return await super().in_thread(work, *args)


@pytest.mark.parametrize("what", ["create", "delete"])
async def test_an_order_ends_when_the_log_fails(tmp_path: Path, what: str) -> None:
    """What the log was asked for will never be durable, and it calls nobody back."""
    node = TestNode(Network(), tmp_path / "n")
    node.files = SimFiles()
    await node.start()
    try:
        group = await Group([node]).create()
        await group.write(rows([1]))
        node.files.sync_error = True
        if what == "create":
            other = Group([node])
            asked = node.manager.create(other.superblock(1), other.config)
        else:
            asked = node.manager.delete(group.tablet_id, 1, DataState.TOMBSTONED, 1 << 40, "a test")
        with pytest.raises(Corrupt):
            await asyncio.wait_for(asked, WAIT_S)
    finally:
        await node.stop()


async def test_a_replica_that_lost_its_superblock_is_failed_and_kept(group_of: MakeGroup) -> None:
    """Its log says that it voted and acknowledged: it is damage, not what a crash left half-made."""
    group, _ = await group_of(3)
    await group.write(rows([1]))
    leader = await group.leader()
    victim = next(r for r in group.replicas() if r is not leader)
    node = group.node_of(victim)
    await node.stop()
    (victim.directory / SUPERBLOCK).unlink()
    fresh = await node.restart()
    found = fresh.replicas.get(group.tablet_id)
    assert found.state is ReplicaState.FAILED and "superblock" in found.error
    assert (victim.directory / "store").exists()
    term = victim.term
    await fresh.manager.delete(group.tablet_id, int(victim.replica_id), DataState.TOMBSTONED, 1 << 40, "test")
    assert fresh.log.stream(victim.superblock.key).hard_state.term >= term
    again = await fresh.restart()
    assert victim.superblock.key in again.replicas.tombstones


async def test_a_late_order_to_copy_leaves_a_failed_replica_its_vote(group_of: MakeGroup) -> None:
    """Copied anew under the same replica_id it would forget how it voted."""
    group, _ = await group_of(3)
    await group.write(rows([1]))
    leader = await group.leader()
    victim = next(r for r in group.replicas() if r is not leader)
    node, source = group.node_of(victim), group.node_of(leader)
    victim.fail("damaged by a test")
    copy = await start(group, source, node, 4)
    await wait_until(lambda: copy.progress.state in ("Done", "Failed"))
    node.replicas.get(group.tablet_id).fail("damaged by a test, too")
    with pytest.raises(SteleError) as late:
        await node.manager.start_copy(order(group, source, int(victim.replica_id)), DirectSource(source))
    assert isinstance(late.value, Rejected) and late.value.code is Code.ALREADY_PRESENT
    assert (victim.directory / SUPERBLOCK).exists()
    assert node.log.stream(StreamKey(group.tablet_id, ReplicaId(victim.replica_id))).hard_state.term > 0


async def test_a_replica_removed_while_it_starts_stays_removed(tmp_path: Path) -> None:
    """It began to run on a closed directory, and would have voted: its order to go came between two of its reads."""
    node = await TestNode(Network(), tmp_path / "n").start()
    group = await Group([node]).create()
    await group.write(rows([1]))
    replica = group.replica(1)
    await replica.storage.flush()
    await node.stop()
    slow = HeldNode(node.network, node.directory, node.node_id)
    starting = asyncio.create_task(slow.start())
    try:
        await asyncio.wait_for(slow.read.wait(), WAIT_S)
        coming = slow.replicas.by_key(replica.superblock.key)
        assert coming is not None
        await slow.manager.delete(group.tablet_id, 1, DataState.TOMBSTONED, 1 << 40, "a test")
        slow.go.set()
        await starting
        assert coming.state is ReplicaState.STOPPED and coming.machine is None and coming.core is None
        assert slow.replicas.current(group.tablet_id) is None
    finally:
        await slow.stop()


async def test_a_start_ends_the_burial_that_a_crash_broke_off(tmp_path: Path) -> None:
    """Only its superblock says that it is dead: its rows stood for ever, and its entries held the node's log."""
    node = await TestNode(Network(), tmp_path / "n").start()
    dead, alive = await Group([node]).create(), await Group([node]).create()
    await dead.write(rows(range(10)))
    replica = dead.replica(1)
    await node.stop()
    write_superblock(replica.directory, replace(replica.superblock, data_state=DataState.TOMBSTONED))
    node = await node.restart()
    alive.nodes = [node]
    try:
        assert list(node.replicas.tombstones) == [replica.superblock.key]
        assert [p.name for p in replica.directory.iterdir()] == [SUPERBLOCK]
        stream = node.log.stream(replica.superblock.key)
        assert stream.tombstoned and stream.hard_state.term > 0
        first = min(node.log.shared.segments)
        await alive.fill_segments()
        await alive.replica(1).storage.flush()
        assert not node.log.pins()
        await node.in_thread(node.log.collect)
        assert first not in node.log.shared.segments
        again = await node.restart()
        assert again.log.stream(replica.superblock.key).tombstoned
        await again.stop()
    finally:
        await node.stop()


@pytest.mark.parametrize("replica_id", [0, 1])
@pytest.mark.parametrize("target", [DataState.TOMBSTONED, DataState.DELETED])
async def test_an_order_to_delete_waits_until_the_node_knows_its_replicas(
    tmp_path: Path, target: DataState, replica_id: int
) -> None:
    """It was told that nothing was there, and the replica began to serve a moment later."""
    node = await TestNode(Network(), tmp_path / "n").start()
    group = await Group([node]).create()
    await group.write(rows([1]))
    await node.stop()
    again = UnreadNode(node.network, node.directory, node.node_id)
    starting = asyncio.create_task(again.start())
    try:
        await asyncio.wait_for(again.asked.wait(), WAIT_S)
        with pytest.raises(Retryable) as early:
            await again.manager.delete(group.tablet_id, replica_id, target, 1 << 40, "a test")
        assert early.value.code is Code.NOT_READY
        again.go.set()
        await starting
        await again.manager.delete(group.tablet_id, replica_id, target, 1 << 40, "a test")
        assert again.replicas.current(group.tablet_id) is None
    finally:
        again.go.set()
        await starting
        await again.stop()


@pytest.mark.parametrize(
    ("target", "fails"),
    [
        (DataState.TOMBSTONED, "write_superblock"),
        (DataState.TOMBSTONED, "remove"),
        (DataState.DELETED, "remove_tree"),
    ],
)
async def test_an_order_to_delete_that_was_cut_short_is_carried_out_when_it_is_given_again(
    tmp_path: Path, target: DataState, fails: str
) -> None:
    """The second one was told that nothing was there: rows and log stayed, on a disk that was full, until a restart."""
    node = FullNode(Network(), tmp_path / "n")
    await node.start()
    try:
        group = await Group([node]).create()
        await group.write(rows([1]))
        replica = await group.leader()
        await replica.storage.flush()
        key = replica.superblock.key
        node.fails = fails
        with pytest.raises(OSError, match="No space"):
            await node.manager.delete(group.tablet_id, 1, target, 1 << 40, "a test")
        assert not replica.running
        await node.manager.delete(group.tablet_id, 1, target, 1 << 40, "a test")
        assert not (replica.directory / "store").exists()
        assert node.replicas.by_key(key) is None
        assert (key in node.replicas.tombstones) == (target is DataState.TOMBSTONED)
        assert key not in node.log.shared.states or node.log.stream(key).tombstoned
        again = await node.restart()
        assert (key in again.replicas.tombstones) == (target is DataState.TOMBSTONED)
        await again.stop()
    finally:
        await node.stop()


@pytest.mark.parametrize("was", ["ready", "tombstone", "witness", "damaged"])
async def test_a_removal_that_a_crash_cut_short_is_ended_by_the_next_start(tmp_path: Path, was: str) -> None:
    """Its log was forgotten and its superblock still said READY: FAILED, as if it had lost what it had acknowledged."""
    network = Network()
    source, node = await TestNode(network, tmp_path / "a").start(), FullNode(network, tmp_path / "b")
    await node.start()
    again: TestNode = node
    try:
        group = await Group([source]).create()
        await group.write(rows([1]))
        given = DirectSource(source)
        if was == "witness":
            given.hold = Event()
        copy = await node.manager.start_copy(order(group, source, 2, witness=was == "witness"), given)
        assert copy is not None
        key = copy.key
        await wait_until(lambda: node.replicas.by_key(key) is not None)
        if was == "tombstone":
            await node.manager.delete(group.tablet_id, 2, DataState.TOMBSTONED, 1 << 40, "a test")
        if was == "damaged":
            (node.manager.replica_directory(key) / SUPERBLOCK).write_bytes(b"rot")
        node.fails = "remove_tree"
        with pytest.raises(OSError, match="No space"):
            await node.manager.delete(group.tablet_id, 2, DataState.DELETED, 1 << 40, "a test")
        assert key not in node.log.shared.states
        again = await node.restart()
        assert not again.replicas.keys() and not again.replicas.tombstones
        assert not list((again.directory / "tablets").iterdir())
    finally:
        await again.stop()
        await source.stop()


async def test_a_disk_without_a_byte_left_is_no_reason_to_keep_what_is_deleted(tmp_path: Path) -> None:
    """Tables are dropped to make room."""
    node = FullNode(Network(), tmp_path / "n")
    await node.start()
    try:
        group = await Group([node]).create()
        directory = (await group.leader()).directory
        node.fails = "mark"
        await node.manager.delete(group.tablet_id, 1, DataState.DELETED, 1 << 40, "a test")
        assert not node.fails and not directory.exists()
    finally:
        await node.stop()


async def test_a_copy_whose_removal_was_cut_short_is_removed_when_it_is_ordered_again(tmp_path: Path) -> None:
    network = Network()
    source, target = await TestNode(network, tmp_path / "a").start(), FullNode(network, tmp_path / "b")
    await target.start()
    try:
        group = await Group([source]).create()
        await group.write(rows([1]))
        stalled = DirectSource(source)
        stalled.hold = Event()
        copy = await target.manager.start_copy(order(group, source, 2), stalled)
        assert copy is not None
        await wait_until(lambda: (target.manager.replica_directory(copy.key) / SUPERBLOCK).exists())
        target.fails = "remove_tree"
        with pytest.raises(OSError, match="No space"):
            await target.manager.delete(group.tablet_id, 2, DataState.TOMBSTONED, 1 << 40, "a test")
        await target.manager.delete(group.tablet_id, 2, DataState.TOMBSTONED, 1 << 40, "a test")
        assert not target.manager.replica_directory(copy.key).exists()
        assert not target.replicas.copies
    finally:
        await target.stop()
        await source.stop()


@pytest.mark.parametrize("what", ["replica", "tombstone", "copy"])
async def test_masters_are_told_once_something_is_gone(tmp_path: Path, what: str) -> None:
    """Of a tombstone they were not: they ordered it deleted for ever, as their newest report still showed it."""
    network = Network()
    source, node = await TestNode(network, tmp_path / "a").start(), TestNode(network, tmp_path / "b")
    await node.start()
    try:
        group = await Group([source]).create()
        await group.write(rows([1]))
        stalled = DirectSource(source)
        if what == "copy":
            stalled.hold = Event()
        copy = await node.manager.start_copy(order(group, source, 2), stalled)
        assert copy is not None
        if what != "copy":
            await wait_until(lambda: copy.progress.state == "Done")
        if what == "tombstone":
            await node.manager.delete(group.tablet_id, 2, DataState.TOMBSTONED, 1 << 40, "a test")
        node.changed_keys.clear()
        await node.manager.delete(group.tablet_id, 2, DataState.DELETED, 1 << 40, "a test")
        assert node.changed_keys[-1:] == [copy.key]
        assert report_one(node.replicas, copy.key) is None
    finally:
        await node.stop()
        await source.stop()


@pytest.mark.parametrize("sick", ["superblock", "tombstone", "debris"])
async def test_files_that_a_sick_disk_does_not_give_or_let_go_concern_their_replica_alone(
    tmp_path: Path, sick: str
) -> None:
    """The node ended, at this start and at every one after it."""
    node = await TestNode(Network(), tmp_path / "n").start()
    group, other = await Group([node]).create(), await Group([node]).create()
    await other.write(rows([1]))
    directory = (await group.leader()).directory
    await node.stop()
    if sick == "superblock":
        (directory / SUPERBLOCK).unlink()
        (directory / SUPERBLOCK).mkdir()
    else:
        state = DataState.TOMBSTONED if sick == "tombstone" else DataState.COPYING
        write_superblock(directory, group.superblock(1).with_state(state))
    again = FullNode(node.network, node.directory, node.node_id)
    again.fails = {"tombstone": "remove", "debris": "remove_tree"}.get(sick, "")
    await again.start()
    try:
        assert not again.fails
        key = group.superblock(1).key
        found = again.replicas.by_key(key)
        assert (found is not None and found.state is ReplicaState.FAILED) == (sick == "superblock")
        assert (key in again.replicas.tombstones) == (sick == "tombstone")
        other.nodes = [again]
        await other.write(rows([2]))
    finally:
        await again.stop()


async def test_of_a_deleted_tablet_no_directory_stays(group_of: MakeGroup) -> None:
    """Each left one behind, and their disk ran out of inodes while bytes were free."""
    group, nodes = await group_of(3, spare=1)
    await group.write(rows([1]))
    source, target, key = nodes[0], nodes[3], StreamKey(group.tablet_id, ReplicaId(4))
    await start(group, source, target, 4)
    await wait_until(lambda: target.replicas.by_key(key) is not None)
    for node in nodes:
        assert (node.directory / "tablets" / group.tablet_id).is_dir()
        await node.manager.delete(group.tablet_id, 0, DataState.DELETED, 1 << 40, "a test")
        assert not list((node.directory / "tablets").iterdir())


async def test_beside_a_replica_that_goes_a_tombstone_stays(tmp_path: Path) -> None:
    node, source = [await TestNode(Network(), tmp_path / name).start() for name in "ns"]
    try:
        group = await Group([node]).create()
        await group.write(rows([1]))
        await node.manager.delete(group.tablet_id, 1, DataState.TOMBSTONED, 1 << 40, "a test")
        await start(group, source, node, 2)
        await node.manager.delete(group.tablet_id, 2, DataState.DELETED, 1 << 40, "a test")
        assert [p.name for p in (node.directory / "tablets" / group.tablet_id).iterdir()] == ["1"]
        node = await node.restart()
        assert list(node.replicas.tombstones) == [StreamKey(group.tablet_id, ReplicaId(1))]
        await node.manager.delete(group.tablet_id, 1, DataState.DELETED, 1 << 40, "a test")
        assert not list((node.directory / "tablets").iterdir())
    finally:
        await node.stop()
        await source.stop()


async def test_a_start_removes_what_deleted_tablets_left(tmp_path: Path) -> None:
    left, half_made = new_id(), new_id()
    (tmp_path / "n" / "tablets" / left).mkdir(parents=True)
    (tmp_path / "n" / "tablets" / half_made / "1").mkdir(parents=True)
    node = await TestNode(Network(), tmp_path / "n").start()
    try:
        assert not list((node.directory / "tablets").iterdir())
    finally:
        await node.stop()


def test_a_replica_is_made_where_another_ones_directory_goes(tmp_path: Path) -> None:
    """Two threads of a node: the one that makes it never finds its own parent gone."""
    tablet, over = tmp_path / "tablet", Event()

    def remove() -> None:
        while not over.is_set():
            remove_if_empty(tablet)

    with ThreadPoolExecutor(1) as pool:
        removing = pool.submit(remove)
        try:
            for number in range(300):
                replica = tablet / str(number)
                make_directory(replica)
                assert replica.is_dir()
                replica.rmdir()
        finally:
            over.set()
        removing.result()


async def test_a_node_holds_one_replica_of_a_tablet(tmp_path: Path) -> None:
    """Two would be one machine that counts twice."""
    node = await TestNode(Network(), tmp_path / "n").start()
    try:
        group = await Group([node]).create()
        with pytest.raises(Rejected) as refused:
            await node.manager.create(group.superblock(2), group.config)
        assert refused.value.code is Code.ALREADY_PRESENT
        assert [replica.replica_id for replica in node.replicas] == [1]
    finally:
        await node.stop()
