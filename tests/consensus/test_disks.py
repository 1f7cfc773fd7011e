"""Groups on disks that are nearly full, slow, or stand still."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from stele.model.config import MemberType, Peer
from stele.model.errors import Code, Retryable
from stele.model.ids import ReplicaId
from stele.raft.effects import Role
from stele.raft.events import ChangeType
from stele.wal.files import OsFile, OsFiles
from tests.consensus import cluster
from tests.consensus.cluster import OPTIONS, STEADY, Group, Network, TestNode, rows, table, wait_until
from tests.consensus.conftest import MakeGroup


class ScarceFiles(OsFiles):
    """A volume with 700 MiB free."""

    def free_bytes(self, directory: Path) -> int:
        return 700 << 20


async def test_a_group_whose_disks_are_all_nearly_full_elects_and_is_read(group_of: MakeGroup) -> None:
    """A node hands its leaders over when its disk fills: nobody could lead, where the first entry was refused."""
    group, nodes = await group_of(spare=1)
    await group.write(rows([1]))
    term = (await group.leader()).term
    for node in nodes:
        node.log.shared.files = ScarceFiles()
        node.log.shared.options = replace(node.log.shared.options, low_space_bytes=1 << 30)
        node.log.refresh_space()
        node.low = node.log.low_space
        assert node.low
    while (await group.leader()).term == term:
        with contextlib.suppress(Retryable):
            await (await group.leader()).members.transfer_leadership()
    await group.led(lambda leader: leader.reads.linearizable_read())
    await group.led(lambda leader: leader.reads.snapshot_ready(leader.writes.timestamps.now()))
    assert table(await group.leader()) == {1: "x1"}
    with pytest.raises(Retryable) as full:
        await group.led(lambda leader: leader.writes.propose(rows([2])))
    assert full.value.code is Code.DISK_FULL
    added = Peer(nodes[3].node_id, ReplicaId(4), "n4:1", MemberType.NON_VOTER)
    config = await group.led(
        lambda leader: leader.members.change_config(ChangeType.ADD, added, leader.committed_config.opid_index)
    )
    assert config.peer(ReplicaId(4)) == added


class StallingFile(OsFile):
    """Its syncs wait for `go`."""

    def __init__(self, fd: int, go: Event) -> None:
        super().__init__(fd)
        self._go = go

    def data_sync(self) -> None:
        self._go.wait()
        super().data_sync()

    def full_sync(self) -> None:
        self._go.wait()
        super().full_sync()


class StallingFiles(OsFiles):
    """A disk that stands still while `go` is cleared."""

    def __init__(self) -> None:
        self.go = Event()
        self.go.set()

    def create(self, path: Path) -> StallingFile:
        return StallingFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), self.go)

    def open(self, path: Path) -> StallingFile:
        return StallingFile(os.open(path, os.O_RDWR), self.go)


class SlowFile(OsFile):
    """Its syncs take some time more."""

    def data_sync(self) -> None:
        time.sleep(0.03)
        super().data_sync()


class SlowFiles(OsFiles):
    """A disk that is slow, and moves."""

    def create(self, path: Path) -> SlowFile:
        return SlowFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC))

    def open(self, path: Path) -> SlowFile:
        return SlowFile(os.open(path, os.O_RDWR))


async def test_writes_proceed_where_commits_take_longer_than_clocks_may_be_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each ceiling lay in the past when it was committed: nothing got a timestamp, ever."""
    monkeypatch.setattr(cluster, "OPTIONS", replace(STEADY, clock_error_max_ms=20))
    network = Network()
    nodes: list[TestNode] = []
    try:
        for number in range(3):
            node = TestNode(network, tmp_path / f"n{number}")
            node.files = SlowFiles()
            nodes.append(await node.start())
        group = await Group(nodes).create()
        for number in range(5):
            await group.write(rows([number]))
        leader = await group.leader()
        assert set(table(leader, await leader.reads.latest_snapshot())) == set(range(5))
    finally:
        for node in nodes:
            await node.stop()


@pytest.mark.usefixtures("quick_elections")
async def test_who_waits_for_its_disk_does_not_campaign_however_long_it_lasts(tmp_path: Path) -> None:
    """It campaigned again an election timeout after it was told, and raised its term again and again."""
    node = TestNode(Network(), tmp_path / "n")
    files = node.files = StallingFiles()
    await node.start()
    try:
        group = await Group([node]).create()
        leader = await group.leader()
        term = leader.term
        files.go.clear()
        leader.writes.submit(rows([2]))
        await wait_until(lambda: leader.role is not Role.LEADER)
        await asyncio.sleep(8 * OPTIONS.raft.election_max_ms / 1000)
        assert leader.core is not None and leader.core.term == term
        files.go.set()
        await group.write(rows([3]))
    finally:
        files.go.set()
        await node.stop()


async def test_a_follower_whose_disk_hangs_knows_that_what_it_has_applied_is_old(tmp_path: Path) -> None:
    """It hears its leader on: that was taken for being up to date."""
    network, files = Network(), StallingFiles()
    nodes = [TestNode(network, tmp_path / f"n{number}") for number in range(3)]
    nodes[2].files = files
    try:
        for node in nodes:
            await node.start()
        group = await Group(nodes).create()
        await group.write(rows([1]))
        follower = nodes[2].replicas.get(group.tablet_id)
        await group.caught_up(follower)
        await follower.following.fresh(follower.host.steady_us() - 200_000, at_once=False)
        files.go.clear()
        await group.led(lambda leader: leader.writes.propose(rows([2])))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await follower.following.fresh(0, at_once=True)
        assert follower.leader is not None and len(table(follower)) == 1
        files.go.set()
        await follower.following.fresh(0, at_once=True)
        assert len(table(follower)) == 2
    finally:
        files.go.set()
        for node in nodes:
            await node.stop()
