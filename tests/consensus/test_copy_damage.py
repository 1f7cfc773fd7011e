"""Damage that a copy meets: at its source, which must say so of itself, and on the way to READY."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection
from pathlib import Path
from threading import Event

import google_crc32c
import pytest

from stele.consensus import copy_target
from stele.consensus.replica import Replica, ReplicaState
from stele.model.errors import Code, Corrupt, SteleError
from stele.tablet.colfile import ColumnFile
from stele.tablet.colformat import CRC, HEADER, MAGIC, VERSION
from stele.tablet.keyspace import KeySpace
from stele.tablet.store import TabletStore
from tests.consensus.cluster import WAIT_S, Group, TestNode, rows, table, wait_until
from tests.consensus.conftest import MakeGroup
from tests.consensus.copies import DirectSource, installed, order, start
from tests.consensus.test_copy_session import brought


async def flushed(group: Group) -> tuple[Replica, TestNode]:
    """The leader, its rows flushed, and its node."""
    await group.write(rows(range(1000)))
    leader = await group.leader()
    await leader.storage.flush()
    return leader, group.node_of(leader)


def flip(file: Path) -> None:
    """One bit in the middle of it, in place."""
    with file.open("r+b") as f:
        f.seek(file.stat().st_size // 2)
        byte = f.read(1)
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte[0] ^ 1]))


def later_version(file: Path) -> None:
    """As a program to come might write it: another version in its header, another end."""
    head = HEADER.pack(MAGIC, VERSION + 1, bytes(48))
    with file.open("r+b") as f:
        f.write(head + CRC.pack(google_crc32c.value(head)))
        f.seek(-8, os.SEEK_END)
        f.write(b"STLCOLF2")


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
    copy = await start(group, node, nodes[3], 4)
    await copy.wait()
    assert copy.failed and "IO_ERROR" in copy.progress.error
    assert leader.state is ReplicaState.FAILED and "making a checkpoint" in leader.error
    assert not len(node.sessions)


@pytest.mark.parametrize("rotten", ["rows-*", "once-*", "MANIFEST"])
async def test_rot_at_the_source_is_not_handed_on(group_of: MakeGroup, rotten: str) -> None:
    """Its sums of bytes that had turned were right. One damaged replica of three became two: no majority."""
    group, nodes = await group_of(3, spare=1)
    leader, node = await flushed(group)
    flip(next((leader.directory / "store").glob(rotten)))
    copy = await start(group, node, nodes[3], 4)
    await copy.wait()
    assert copy.failed and "CORRUPT" in copy.progress.error, copy.progress
    assert not list((nodes[3].directory / "tablets").glob("*/4/incoming*"))
    await wait_until(lambda: leader.state is ReplicaState.FAILED)
    assert "copy: CORRUPT" in leader.error
    again = await start(group, group.node_of(await group.leader()), nodes[3], 4)
    await installed(again)
    assert len(table(nodes[3].replicas.get(group.tablet_id))) == 1000


async def test_a_file_that_gives_back_other_bytes_is_found(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, nodes = await group_of(3, spare=1)
    leader, node = await flushed(group)
    write = os.pwrite

    def lying(fd: int, data: memoryview, at: int) -> int:
        return write(fd, bytes([data[0] ^ 1]) + bytes(data[1:]), at)

    monkeypatch.setattr(os, "pwrite", lying)
    copy = await start(group, node, nodes[3], 4)
    await copy.wait()
    assert copy.failed and "CORRUPT: data from source:1 is damaged" in copy.progress.error
    monkeypatch.undo()
    await installed(await start(group, node, nodes[3], 4))
    assert leader.running


async def test_what_was_compared_as_it_arrived_is_not_read_again(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, nodes = await group_of(3, spare=1)
    _, node = await flushed(group)

    def read_again(file: ColumnFile, read: object) -> None:
        raise AssertionError(file.name)

    monkeypatch.setattr(ColumnFile, "verify", read_again)
    await installed(await start(group, node, nodes[3], 4))


async def test_a_whole_file_in_the_place_of_another_is_found(group_of: MakeGroup) -> None:
    """All its own checksums are right."""
    group, nodes = await group_of(3, spare=1)
    leader, node = await flushed(group)
    for start_ in (1000, 2000):
        await group.write(rows(range(start_, start_ + 1000)))
        await leader.storage.flush()
    _, one, other = sorted((leader.directory / "store").glob("rows-*"))
    assert one.stat().st_size == other.stat().st_size
    one.write_bytes(other.read_bytes())
    copy = await start(group, node, nodes[3], 4)
    await copy.wait()
    assert copy.failed and "CORRUPT: data from source:1 is damaged" in copy.progress.error


async def test_a_file_of_a_later_version_is_no_damage(group_of: MakeGroup) -> None:
    group, nodes = await group_of(3, spare=1)
    leader, node = await flushed(group)
    later_version(next((leader.directory / "store").glob("rows-*")))
    copy = await start(group, node, nodes[3], 4)
    await copy.wait()
    assert copy.failed and copy.progress.error.startswith("UNSUPPORTED_VERSION")
    assert list((nodes[3].directory / "tablets").glob("*/4/incoming*"))
    await node.sessions.close()
    assert leader.running


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOMEM], ids=errno.errorcode.get)
async def test_an_error_of_the_disk_here_is_not_told_as_damage_of_the_source(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Nor is it asked for more bytes, which would mend nothing."""
    group, nodes = await group_of(3, spare=1)
    leader, node = await flushed(group)

    def fail(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    told, end = list[str](), node.sessions.end

    async def ended(session_id: str, damage: str = "") -> None:
        told.append(damage)
        await end(session_id, damage)

    monkeypatch.setattr(node.sessions, "end", ended)
    monkeypatch.setattr(os, "fdatasync", fail)
    copy = await start(group, node, nodes[3], 4)
    await copy.wait()
    monkeypatch.undo()
    assert copy.failed and os.strerror(number) in copy.progress.error
    assert told == [""] and leader.running


async def test_a_source_is_told_of_damage_also_if_what_it_gave_cannot_be_removed(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, nodes = await group_of(3, spare=1)
    leader, node = await flushed(group)
    flip(next((leader.directory / "store").glob("rows-*")))
    remove = copy_target.remove_tree

    def fail(path: Path) -> None:
        if path.name.startswith("incoming"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        remove(path)

    monkeypatch.setattr(copy_target, "remove_tree", fail)
    copy = await start(group, node, nodes[3], 4)
    await copy.wait()
    assert copy.failed
    await wait_until(lambda: leader.state is ReplicaState.FAILED)


async def test_what_an_earlier_session_brought_is_read_again(group_of: MakeGroup) -> None:
    """It lay on a disk meanwhile."""
    group, nodes = await group_of(3, spare=1)
    await flushed(group)
    leader = await group.leader()
    begun = leader.committed_opid
    await group.write(rows([2000]))
    one = group.node_of(leader)
    await brought(group, DirectSource(one), nodes[3], begun)
    flip(next((nodes[3].directory / "tablets").glob("*/4/incoming*/rows-*")))
    what = order(group, one, 4, witness=True, witness_start=begun)
    copy = await nodes[3].manager.start_copy(what, DirectSource(one))
    assert copy is not None
    await copy.wait()
    assert copy.failed and "is damaged" in copy.progress.error
    assert not list((nodes[3].directory / "tablets").glob("*/4/incoming*")) and leader.running


async def test_a_source_told_of_damage_that_it_does_not_have_goes_on(group_of: MakeGroup) -> None:
    group, _ = await group_of(3)
    leader, node = await flushed(group)
    session = await node.sessions.begin(leader)
    await node.sessions.end(session.session_id, "CORRUPT: a disk far away")
    await node.sessions.close()
    assert leader.running and not len(node.sessions)


async def test_a_source_told_of_damage_again_and_again_looks_once_at_a_time(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look takes minutes where a tablet is large, and receivers come back within seconds."""
    verify, looks, go_on = TabletStore.verify, list[str](), Event()

    def slow(store: TabletStore, read: Callable[[int], None]) -> None:
        looks.append(store.directory.name)
        assert go_on.wait(WAIT_S)
        verify(store, read)

    monkeypatch.setattr(TabletStore, "verify", slow)
    group, _ = await group_of(3)
    leader, node = await flushed(group)
    for _ in range(3):
        session = await node.sessions.begin(leader)
        await node.sessions.end(session.session_id, "CORRUPT: a disk far away")
        await wait_until(lambda: len(looks) == 1)
    go_on.set()
    await node.sessions.close()
    assert len(looks) == 1 and leader.running


async def test_a_source_that_was_told_of_damage_looks_again_the_next_time(group_of: MakeGroup) -> None:
    """What is rotten by then would be given to one receiver after the other."""
    group, nodes = await group_of(1)
    await group.write(rows(range(100)))
    leader, node = await group.leader(), nodes[0]
    for rotten in (False, True):
        session = await node.sessions.begin(leader)
        if rotten:
            flip(next((leader.directory / "store").glob("rows-*")))
        await node.sessions.end(session.session_id, "CORRUPT: a disk far away")
        await wait_until(lambda: not node.sessions._looked_at and not node.sessions._orders._running)
    assert leader.state is ReplicaState.FAILED


async def test_a_copy_that_is_cancelled_verifies_no_longer(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify, ended = TabletStore.verify, list[SteleError]()

    def slow(store: TabletStore, read: Callable[[int], None], compared: Collection[str]) -> None:
        try:
            while True:
                verify(store, read)
        except SteleError as exc:
            ended.append(exc)
            raise

    monkeypatch.setattr(TabletStore, "verify", slow)
    group, nodes = await group_of(3, spare=1)
    leader, node = await flushed(group)
    copy = await start(group, node, nodes[3], 4)
    await wait_until(lambda: copy.progress.state == "Verifying")
    await copy.cancel()
    assert ended and copy.failed and leader.running


async def test_a_key_space_is_verified(tmp_path: Path) -> None:
    store = KeySpace.create(tmp_path / "k")
    sizes = list[int]()
    store.verify(sizes.append)
    assert sum(sizes) > 0
    flip(next((tmp_path / "k").iterdir()))
    with pytest.raises(Corrupt):
        store.verify()
