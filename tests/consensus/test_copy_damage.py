"""Damage that a copy meets: at its source, which must say so of itself, and on the way to READY."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from stele.consensus.replica import Replica, ReplicaState
from stele.model.errors import Code, Corrupt
from tests.consensus.cluster import Group, TestNode, rows, table, wait_until
from tests.consensus.conftest import MakeGroup
from tests.consensus.test_copy import DirectSource, installed, order, start


async def flushed(group: Group) -> tuple[Replica, TestNode]:
    """The leader, its rows flushed, and its node."""
    await group.write(rows(range(1000)))
    leader = await group.leader()
    await leader.flush()
    return leader, group.node_of(leader)


def unreadable(monkeypatch: pytest.MonkeyPatch, directory: Path, opening: str) -> None:
    """Files whose names begin so cannot be read below `directory`, nor be told the size of."""

    def fail(self: Path) -> None:
        if self.name.startswith(opening) and directory in self.parents:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    open_, stat = Path.open, Path.stat

    def opened(self: Path, *arguments: object, **more: object) -> object:
        fail(self)
        return open_(self, *arguments, **more)  # type: ignore[call-overload]

    def told(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        fail(self)
        return stat(self, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(Path, "stat", told)


async def test_a_source_that_cannot_read_its_files_fails_and_the_next_one_gives_them(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answered INTERNAL for ever, and went on to lead."""
    group, nodes = await group_of(3, spare=1)
    leader, node = await flushed(group)
    session = await node.sessions.begin(leader)
    unreadable(monkeypatch, node.directory / "copies", "rows-")
    name = next(f.name for f in session.files if f.name.startswith("rows-"))
    with pytest.raises(Corrupt, match="the source's replica is damaged") as told:
        list(node.sessions.fetch(session.session_id, name, 0, 1 << 20))
    assert told.value.code is Code.IO_ERROR
    await wait_until(lambda: leader.state is ReplicaState.FAILED)
    assert "copy: IO_ERROR" in leader.error
    copy = await start(group, group.node_of(await group.leader()), nodes[3], 4)
    await installed(copy)
    assert len(table(nodes[3].replicas.get(group.tablet_id))) == 1000


async def test_a_session_over_files_that_cannot_be_read_is_refused(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, nodes = await group_of(3, spare=1)
    leader, node = await flushed(group)
    unreadable(monkeypatch, node.directory / "copies", "rows-")
    copy = await nodes[3].manager.start_copy(order(group, node, 4), DirectSource(node))
    assert copy is not None
    await copy.wait()
    assert copy.failed and "IO_ERROR" in copy.progress.error
    assert leader.state is ReplicaState.FAILED and "making a checkpoint" in leader.error
    assert not len(node.sessions)
