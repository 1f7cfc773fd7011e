"""Callers that go away: what they began is carried out, or left whole."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from threading import Event

import pytest

from stele.consensus.copy_source import SessionInfo
from stele.consensus.copy_target import TabletCopy
from stele.consensus.superblock import DataState
from stele.model.errors import Code, Rejected
from stele.model.ids import OpId, ReplicaId, StreamKey, TabletId
from tests.consensus.cluster import WAIT_S, Group, Network, TestNode, make_group, rows, table, wait_until
from tests.consensus.conftest import MakeGroup
from tests.consensus.copies import DirectSource, order


async def give_up(work: asyncio.Task[object], turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


async def test_a_flush_whose_caller_went_away_is_finished(group_of: MakeGroup) -> None:
    group, _ = await group_of(1)
    await group.write(rows([1]))
    leader = await group.leader()
    await give_up(asyncio.create_task(leader.storage.flush()), 2)
    await group.write(rows([2]))
    flushed = await leader.storage.flush()
    assert leader.machine is not None and flushed == leader.machine.applied


async def test_a_write_whose_caller_went_away_ends_for_all_that_wait_for_it(group_of: MakeGroup) -> None:
    """A snapshot above its timestamp waits, too: it would be served without the write's rows."""
    group, _ = await group_of(1)
    await group.write(rows([1]))
    leader = await group.leader()
    writes = leader.writes
    future = writes.submit(rows([2]))
    staying = asyncio.create_task(writes.outcome(future, None))
    await give_up(asyncio.create_task(writes.outcome(future, None)), 1)
    assert not future.done() and writes.proposals.outstanding(1 << 63) == [future]
    await asyncio.wait((staying,), timeout=WAIT_S)
    assert not staying.cancelled() and staying.result().code is Code.OK
    assert table(leader) == {1: "x1", 2: "x2"}


@pytest.mark.parametrize("ms", [0, 1, 2, 5, 10, 20])
async def test_a_create_whose_caller_went_away_is_carried_out(tmp_path: Path, ms: int) -> None:
    node = await TestNode(Network(), tmp_path / "n").start()
    try:
        group = Group([node])
        order = asyncio.create_task(node.manager.create(group.superblock(1), group.config))
        await asyncio.sleep(ms / 1000)
        order.cancel()
        await asyncio.gather(order, return_exceptions=True)
        await node.manager.create(group.superblock(1), group.config)
        await group.write(rows([1]))
        assert table(await group.leader()) == {1: "x1"}
    finally:
        await node.stop()


@pytest.mark.parametrize("ms", [0, 1, 2, 5, 10])
async def test_a_delete_whose_caller_went_away_leaves_a_tombstone(tmp_path: Path, ms: int) -> None:
    group, nodes = await make_group(tmp_path, 1)
    node = nodes[0]
    try:
        key = StreamKey(group.tablet_id, ReplicaId(1))
        await group.write(rows([1]))
        order = asyncio.create_task(
            node.manager.delete(group.tablet_id, 1, DataState.TOMBSTONED, 1 << 40, "test")
        )
        await asyncio.sleep(ms / 1000)
        order.cancel()
        await asyncio.gather(order, return_exceptions=True)
        await wait_until(lambda: key in node.replicas.tombstones or node.replicas.by_key(key) is not None)
        await node.manager.delete(group.tablet_id, 1, DataState.TOMBSTONED, 1 << 40, "again")
        assert key in node.replicas.tombstones
    finally:
        await node.stop()


@pytest.mark.parametrize("ms", [0, 1, 2, 3, 5, 8, 12, 20])
@pytest.mark.parametrize("what", ["begin", "end"])
async def test_a_copy_session_whose_caller_went_away_leaves_nothing(
    group_of: MakeGroup, what: str, ms: int
) -> None:
    """The links were made after they had been removed, and held the rows of dropped tables until the next start."""
    group, nodes = await group_of(1)
    for number in range(20):
        await group.write(rows([number], "x" * 100_000))
    leader, node = await group.leader(), nodes[0]
    for _ in range(5):
        if what == "begin":
            asked: asyncio.Task[object] = asyncio.create_task(node.sessions.begin(leader))
        else:
            info = await node.sessions.begin(leader)
            asked = asyncio.create_task(node.sessions.end(info.session_id))
        await asyncio.sleep(ms / 1000)
        asked.cancel()
        (got,) = await asyncio.gather(asked, return_exceptions=True)
        if isinstance(got, SessionInfo):  # it came before
            await node.sessions.end(got.session_id)
    for _ in range(3):  # whatever is under way in threads
        await node.in_thread(time.sleep, 0.05)
    await wait_until(lambda: not node.log.shared.states[leader.superblock.key].anchors)
    await wait_until(lambda: not list((node.directory / "copies").glob("*")))
    await wait_until(lambda: not len(node.sessions))


class Losing(DirectSource):
    """Its first session breaks and is lost, and the copy is given up in the very turn in which `call` ends."""

    def __init__(self, node: TestNode, call: str) -> None:
        super().__init__(node, breaks=1, break_after=0)
        self.call = call
        self.copy: asyncio.Future[TabletCopy] = asyncio.get_running_loop().create_future()
        self.giving_up: asyncio.Task[None] | None = None

    async def begin(self, tablet_id: TabletId, replica_id: ReplicaId, at_least: OpId) -> SessionInfo:
        await self.copy
        if self.begun:
            self.hold = Event()  # for ever, unless the copy ends
        return await super().begin(tablet_id, replica_id, at_least)

    async def keep_alive(self, session_id: str) -> int:
        self._give_up("keep_alive")
        raise Rejected("no such session", code=Code.NOT_FOUND)

    async def end(self, session_id: str, success: bool, damage: str) -> None:
        await super().end(session_id, success, damage)
        self._give_up("end")

    def _give_up(self, call: str) -> None:
        if call == self.call and self.giving_up is None:
            self.giving_up = asyncio.create_task(self.copy.result().cancel())


@pytest.mark.parametrize("call", ["keep_alive", "end"])
async def test_a_copy_that_is_given_up_as_its_session_is_lost_ends(group_of: MakeGroup, call: str) -> None:
    """`asyncio.wait_for` and `asyncio.TaskGroup` of Python 3.11 lost the cancellation, and whoever stopped waited for ever."""
    group, nodes = await group_of(1, spare=1)
    await group.write(rows(range(100)))
    source = Losing(nodes[0], call)
    copy = await nodes[1].manager.start_copy(order(group, nodes[0], 4), source)
    assert copy is not None
    source.copy.set_result(copy)
    await wait_until(lambda: source.giving_up is not None)
    assert source.giving_up is not None
    ended, _ = await asyncio.wait((source.giving_up,), timeout=WAIT_S)
    assert ended and copy.progress.error == "cancelled"
