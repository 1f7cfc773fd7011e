"""What a copy session costs its source, and what a receiver keeps of one that ended."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from threading import Event

import pytest

from stele.consensus import copy_source, copy_target
from stele.consensus.bootstrap import STORE
from stele.consensus.superblock import DataState, decode_superblock
from stele.model.config import MemberType, Peer
from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import OpId
from stele.raft.events import ChangeType
from tests.consensus.cluster import WAIT_S, Group, TestNode, rows, wait_until
from tests.consensus.conftest import MakeGroup
from tests.consensus.copies import DirectFrames, DirectSource, add, installed, order, start


async def test_a_session_stands_before_a_byte_is_read(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It read every file for its checksum: a tablet that took longer than the answer may take was never healed."""
    group, _ = await group_of(3)
    await group.write(rows(range(100)))
    leader = await group.leader()
    node, open_ = group.node_of(leader), Path.open

    def opened(self: Path, *arguments: object, **more: object) -> object:
        assert node.directory / "copies" not in self.parents
        return open_(self, *arguments, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", opened)
    session = await node.sessions.begin(leader)
    assert {f.name[:4] for f in session.files} == {"rows", "once", "MANI"}
    assert all(f.size for f in session.files) and session.files[-1].name == "MANIFEST"


async def test_sessions_that_are_being_made_count(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_source, "SESSIONS_MAX", 2)
    group, _ = await group_of(3)
    await group.write(rows([1]))
    leader = await group.leader()
    begin = group.node_of(leader).sessions.begin
    three = await asyncio.gather(*(begin(leader) for _ in range(3)), return_exceptions=True)
    refused = [answer for answer in three if isinstance(answer, BaseException)]
    assert len(refused) == 1 and isinstance(refused[0], Retryable) and refused[0].code is Code.THROTTLED


async def brought(group: Group, source: DirectSource, target: TestNode, begun: OpId) -> tuple[int, int]:
    """Bytes that it sent for a witness whose log is not there yet, and bytes of all the files; then it is interrupted."""
    what = order(group, source.node, 4, witness=True, witness_start=begun)
    copy = await target.manager.start_copy(what, source)
    assert copy is not None
    await wait_until(lambda: copy.progress.state == "Installing")
    await copy.cancel()
    return source.sent, copy.progress.bytes_total


async def two_sources(
    group_of: MakeGroup,
) -> tuple[Group, list[TestNode], tuple[TestNode, TestNode], OpId]:
    """A group with rows, its nodes (the fourth is a spare one), the leader's and another one, and where a copy begins."""
    group, nodes = await group_of(3, spare=1)
    await group.write(rows(range(1000)))
    leader = await group.leader()
    for replica in group.replicas():
        await group.caught_up(replica)
    begun = leader.committed_opid
    await group.write(rows([2000]))
    # Else a source has nothing behind `begun`, and its copy is installed at once.
    for replica in group.replicas():
        await group.caught_up(replica)
    one = group.node_of(leader)
    return group, nodes, (one, next(node for node in nodes[:3] if node is not one)), begun


async def test_what_has_arrived_is_kept_for_the_same_source_alone(group_of: MakeGroup) -> None:
    """Another replica may have other bytes under the same names."""
    group, nodes, (one, other), begun = await two_sources(group_of)
    sent, total = await brought(group, DirectSource(one), nodes[3], begun)
    assert total < sent < 1.1 * total  # what a file says of its checksums comes before it
    sent, total = await brought(group, DirectSource(one), nodes[3], begun)
    assert 0 < sent < total / 10
    sent, total = await brought(group, DirectSource(other), nodes[3], begun)
    assert total < sent < 1.1 * total


async def test_a_source_that_gives_no_session_is_given_up(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_target, "SILENT_MAX_S", 600.0)
    group, nodes = await group_of(3, spare=1)
    await group.write(rows([1]))
    source = DirectSource(nodes[0])
    nodes[0].replicas.get(group.tablet_id).fail("damaged by a test")
    copy = await nodes[3].manager.start_copy(order(group, nodes[0], 4), source)
    assert copy is not None
    await wait_until(lambda: source.begun > 1)
    assert not copy.failed
    monkeypatch.setattr(copy_target, "SILENT_MAX_S", 0.0)
    await asyncio.wait_for(copy.wait(), WAIT_S)
    assert copy.failed and "no session at source:1" in copy.progress.error
    assert "choose another source" in copy.progress.error


def anchors(group: Group, node: TestNode) -> dict[str, int]:
    """What holds the log of the group's replica at `node` for copies: the entries from there on."""
    (key,) = [key for key in node.log.shared.states if key.tablet_id == group.tablet_id]
    held = node.log.shared.states[key].anchors.items()
    return {name: anchor.index for name, anchor in held if name.startswith("copy-")}


def links(node: TestNode) -> list[Path]:
    """Files that copy sessions of `node` hold."""
    return list((node.directory / "copies").glob("*/*"))


async def test_a_session_lasts_as_long_as_its_lease_is_renewed(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it lets go of the rows and of the log: its receiver is gone, and nobody else would ever end it."""
    group, nodes = await group_of(1)
    await group.write(rows(range(100)))
    leader, node = await group.leader(), nodes[0]
    begun_ms = node.now_ms()
    session = await node.sessions.begin(leader)
    assert anchors(group, node) == {f"copy-{session.session_id}": session.checkpoint.index + 1} and links(
        node
    )
    lease_ms, now_ms = session.lease_ms, node.now_ms
    for passed_ms in (lease_ms // 2, lease_ms, lease_ms * 3 // 2):
        monkeypatch.setattr(node, "now_ms", lambda passed_ms=passed_ms: begun_ms + passed_ms)
        assert node.sessions.keep_alive(session.session_id) == lease_ms
        monkeypatch.setattr(node, "now_ms", lambda passed_ms=passed_ms: begun_ms + passed_ms + lease_ms - 1)
        await node.sessions.expire()
        assert len(node.sessions) == 1 and links(node)
    monkeypatch.setattr(node, "now_ms", lambda: begun_ms + lease_ms * 5 // 2 + 1)
    await node.sessions.expire()
    monkeypatch.setattr(node, "now_ms", now_ms)
    assert not len(node.sessions) and not anchors(group, node) and not links(node)
    with pytest.raises(Rejected) as refused:
        node.sessions.keep_alive(session.session_id)
    assert refused.value.code is Code.NOT_FOUND  # so the receiver begins another one


async def test_a_session_of_a_replica_that_is_gone_ends(group_of: MakeGroup) -> None:
    """Its files would stay on the disk for as long as somebody reads them."""
    group, nodes = await group_of(1)
    await group.write(rows(range(100)))
    leader, node = await group.leader(), nodes[0]
    await node.sessions.begin(leader)
    await node.sessions.expire()
    assert len(node.sessions) == 1
    await node.manager.delete(group.tablet_id, 0, DataState.DELETED, 1 << 40, "table removed")
    await node.sessions.expire()
    assert not len(node.sessions) and not links(node)


async def test_a_session_that_does_not_come_to_be_leaves_nothing(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither files nor a hold of the log, which would stay until the next start; and it takes no other one's place."""
    monkeypatch.setattr(copy_source, "SESSIONS_MAX", 1)
    group, nodes = await group_of(1)
    await group.write(rows(range(100)))
    leader, node = await group.leader(), nodes[0]
    link, held = os.link, list[dict[str, int]]()

    def full(source: Path, target: Path) -> None:
        held.append(anchors(group, node))
        if target.name == "MANIFEST":
            raise OSError(errno.ENOSPC, "No space left on device")
        link(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", full)
        for _ in range(2):
            with pytest.raises(Retryable) as refused:
                await node.sessions.begin(leader)
            assert refused.value.code is Code.DISK_FULL
            assert not anchors(group, node) and not list((node.directory / "copies").iterdir())
    assert all(held), "while files are linked nothing behind them may leave the log"
    await node.sessions.begin(leader)


async def test_a_session_is_refused_until_what_is_asked_for_is_applied(group_of: MakeGroup) -> None:
    """A witness that has its log from there on would have a gap."""
    group, nodes = await group_of(1)
    await group.write(rows([1]))
    leader = await group.leader()
    at = leader.committed_opid
    with pytest.raises(Retryable, match="is needed") as refused:
        await nodes[0].sessions.begin(leader, OpId(at.term, at.index + 1000))
    assert refused.value.code is Code.NOT_READY
    assert (await nodes[0].sessions.begin(leader, at)).checkpoint >= at


async def test_a_session_tells_the_configuration_of_its_checkpoint(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later one stands behind it in the log, and comes with it."""
    group, _ = await group_of(3)
    await group.write(rows([1]))
    leader = await group.leader()
    node, other = group.node_of(leader), next(r for r in group.replicas() if not r.is_leader)
    link, linking, go = os.link, Event(), Event()

    def slowly(source: Path, target: Path) -> None:
        linking.set()
        assert go.wait(WAIT_S)
        link(source, target)

    monkeypatch.setattr(os, "link", slowly)
    before = leader.committed_config
    begun = asyncio.create_task(node.sessions.begin(leader))
    try:
        await wait_until(linking.is_set)
        demoted = Peer(other.host.node_id, other.replica_id, "x:1", MemberType.NON_VOTER)
        await leader.members.change_config(ChangeType.MODIFY, demoted, before.opid_index)
    finally:
        go.set()
    session = await begun
    assert session.config == before and leader.committed_config.opid_index > session.checkpoint.index


class Forgetful(DirectSource):
    """A source that knows no session any more as soon as one is read."""

    def fetch(self, session_id: str, name: str, offset: int, length: int, stop: Event) -> DirectFrames:
        raise Rejected("no such session", code=Code.NOT_FOUND)


async def test_a_source_that_loses_each_session_is_given_up(group_of: MakeGroup) -> None:
    group, nodes = await group_of(3, spare=1)
    await group.write(rows([1]))
    source = Forgetful(nodes[0])
    copy = await nodes[3].manager.start_copy(order(group, nodes[0], 4), source)
    assert copy is not None
    await asyncio.wait_for(copy.wait(), WAIT_S)
    assert copy.failed and "no such session" in copy.progress.error
    assert 1 < source.begun < 10 and not len(nodes[0].sessions)


async def test_a_lease_is_renewed_also_after_a_call_that_failed(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of a large tablet takes many leases."""
    monkeypatch.setattr(copy_target, "_KEEP_ALIVE_S", 0.01)
    group, nodes = await group_of(3, spare=1)
    await group.write(rows([1]))
    source = DirectSource(nodes[0])
    source.hold, renewed, renew = Event(), list[str](), source.keep_alive

    async def keep_alive(session_id: str) -> int:
        renewed.append(session_id)
        if len(renewed) < 3:
            raise Retryable("the connection broke")
        return await renew(session_id)

    monkeypatch.setattr(source, "keep_alive", keep_alive)
    copy = await nodes[3].manager.start_copy(order(group, nodes[0], 4), source)
    assert copy is not None
    await wait_until(lambda: len(renewed) > 5)
    assert copy.progress.state == "Fetching" and len(set(renewed)) == 1
    source.hold.set()
    await installed(copy)
    await copy.cancel()
    ended = len(renewed)
    await asyncio.sleep(0.05)
    assert len(renewed) == ended


async def test_the_source_holds_its_log_until_the_copy_is_a_member(group_of: MakeGroup) -> None:
    """Else the log behind the copy may go before the leader sends it, and it is copied once more, and again."""
    group, nodes = await group_of(3, spare=1)
    await group.write(rows([1]))
    await group.caught_up(nodes[0].replicas.get(group.tablet_id))
    copy = await start(group, nodes[0], nodes[3], 4)
    await installed(copy)
    await asyncio.sleep(3 * copy_target._JOIN_LOOK_S)
    assert anchors(group, nodes[0]) and len(nodes[0].sessions) == 1
    await add(group, nodes[3], 4, member_type=MemberType.NON_VOTER)
    await asyncio.wait_for(copy.wait(), WAIT_S)
    assert not anchors(group, nodes[0]) and not len(nodes[0].sessions)


async def test_what_another_source_brought_does_not_stay(group_of: MakeGroup) -> None:
    """Nobody would remove it as long as the replica lives: half a tablet or more of the disk."""
    group, nodes, (one, other), begun = await two_sources(group_of)
    for source in (one, other):
        await brought(group, DirectSource(source), nodes[3], begun)
        (incoming,) = (nodes[3].directory / "tablets").glob("*/4/incoming*")
        assert incoming.name.endswith(f"-{source.replicas.get(group.tablet_id).replica_id}")


async def test_what_a_ready_copy_names_survives_power_loss(
    group_of: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that no sync of its directory has seen may be gone: READY without its files is a FAILED replica."""
    group, nodes = await group_of(3, spare=1)
    await group.write(rows(range(100)))
    synced, fsync, told = dict[int, dict[str, int]](), os.fsync, list[bool]()

    def inodes(directory: Path) -> dict[str, int]:
        return {entry.name: entry.inode() for entry in os.scandir(directory)}

    def says(superblock: Path) -> DataState:
        return decode_superblock(superblock.read_bytes()).data_state

    def seen(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)
        if path.is_dir():
            synced[path.stat().st_ino] = inodes(path)
        elif path.name == "superblock.new" and path.parent.name == "4" and says(path) is DataState.READY:
            store = path.parent / STORE
            told.append(synced.get(store.stat().st_ino) == inodes(store))
            told.append(synced[path.parent.stat().st_ino].get(STORE) == store.stat().st_ino)

    monkeypatch.setattr(os, "fsync", seen)
    copy = await start(group, nodes[0], nodes[3], 4)
    await installed(copy)
    assert told == [True, True]
