"""Disks on which little is left: log that is kept for a replica which does not come keeps nobody from writing."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from stele.consensus import storage
from stele.consensus.superblock import DataState
from stele.model.config import MemberType
from stele.model.ids import ReplicaId
from stele.raft.events import ChangeType
from stele.wal.files import OsFiles
from tests.consensus import cluster
from tests.consensus.cluster import LOG_OPTIONS, WAIT_S, TestNode, rows, table, wait_until
from tests.consensus.conftest import MakeGroup
from tests.consensus.copies import add, installed, member_type, start

LEFT_BYTES = 64 << 20
NEEDED = replace(LOG_OPTIONS, low_space_bytes=4 << 20, pool_segments_max=1)
ROUNDS = 34
"""Of a megabyte each: there is space for the rows, and not for the rows and all the log."""


class LittleLeft(OsFiles):
    """A volume on which there are LEFT_BYTES for a node."""

    def free_bytes(self, directory: Path) -> int:
        used = 0
        for path in directory.parent.rglob("*"):
            with suppress(FileNotFoundError):  # it went meanwhile
                used += path.stat().st_size if path.is_file() else 0
        return LEFT_BYTES - used


async def maintain(node: TestNode) -> None:
    """What a node does again and again."""
    for held in node.replicas:
        await held.storage.flush()
    await node.log_space.collect()
    node.log.refresh_space()
    node.low = node.log.low_space


async def test_writes_go_on_without_a_replica_and_it_is_copied_when_it_comes(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "LOG_OPTIONS", NEEDED)
    group, nodes = await group_of()
    for node in nodes:
        node.log.shared.files = LittleLeft()
        node.log.shared.pool._files = node.log.shared.files
    await group.write(rows([1]))
    await group.caught_up(nodes[2].replicas.get(group.tablet_id))
    await nodes[2].stop()
    for number in range(ROUNDS):
        await group.write(rows(range(5), f"{number:03d}" + "x" * 200_000))
        for node in nodes[:2]:
            await maintain(node)
    for node in nodes[:2]:  # what follows is the copy's: these find no more reason to give anything up
        node.log.shared.files = node.log.shared.pool._files = OsFiles()
        await maintain(node)
    back = nodes[2] = await nodes[2].restart()
    leader = await group.leader()
    await wait_until(lambda: ReplicaId(3) in leader.members.needs_copy)
    index = leader.committed_config.opid_index
    gone = leader.committed_config.peer(ReplicaId(3))
    assert gone is not None
    config = await leader.members.change_config(ChangeType.REMOVE, gone, index)
    await back.manager.delete(group.tablet_id, 3, DataState.TOMBSTONED, config.opid_index, "copied anew")
    copy = await start(group, group.node_of(leader), back, 4)
    await installed(copy)
    await add(group, back, 4, member_type=MemberType.NON_VOTER, promote=True)
    await wait_until(lambda: member_type(leader, 4) is MemberType.VOTER)
    copied = back.replicas.get(group.tablet_id)
    await group.write(rows([7]))
    await wait_until(lambda: 7 in table(copied))
    assert len(table(copied)) == 6 and table(copied)[7] == "x7"
    await asyncio.wait_for(copy.wait(), WAIT_S)


async def test_where_there_is_space_the_log_waits_for_a_replica_that_is_away(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than it waits for a copy: nothing has to be copied when it is back."""
    monkeypatch.setattr(storage, "LOG_KEPT_MS", 0)
    group, nodes = await group_of()
    await group.write(rows([1]))
    await group.caught_up(nodes[2].replicas.get(group.tablet_id))
    await nodes[2].stop()
    for number in range(6):
        await group.write(rows(range(5), f"{number:03d}" + "x" * 200_000))
        for node in nodes[:2]:
            await maintain(node)
    nodes[2] = await nodes[2].restart()
    await group.caught_up(nodes[2].replicas.get(group.tablet_id))
    assert not (await group.leader()).members.needs_copy
