"""Dropped tables serve nobody: what a node makes of the masters' answers, and how it holds through restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stele.model.errors import Code, Rejected, SteleError
from stele.model.ids import CATALOG_TABLET_ID, OpId
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import master_pb2 as pb
from stele.tserver.node import Node
from stele.tserver.node_record import Dropped
from stele.tserver.replicas import Replicas
from stele.tserver.withdrawal import Withdrawal
from tests.consensus.cluster import wait_until
from tests.tserver.local import HASHED, SCHEMA, LocalCluster, count, fill

A, B = "a" * 32, "b" * 32
NONE = Dropped()


def named(*tables: str) -> int:
    """How a leader names this list. Nodes do not look into it."""
    return sum(int(t[0], 16) for t in tables)


class World:
    """A node's part, a disk that may be slow or fail, and what it holds."""

    def __init__(self, disk: Dropped = NONE) -> None:
        self.replicas = Replicas()
        self.disk = disk
        self.fails = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.told = 0
        self.withdrawal = Withdrawal(
            self.replicas, dropped=disk, remember=self._remember, in_thread=self._in_thread
        )

    def _remember(self, dropped: Dropped) -> None:
        if self.fails:
            raise OSError("the disk is full")
        self.disk = dropped

    async def _in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        await self.gate.wait()
        return work(*args)

    def answer(self, term: int, index: int, *tables: str, told: int | None = None) -> None:
        """What a leader answers to a heartbeat that `told` a digest: by default this node's newest."""
        answer = pb.TSHeartbeatResponse(term=term, catalog_index=index, dropped_digest=named(*tables))
        if answer.dropped_digest != (self.withdrawal.digest if told is None else told):
            answer.dropped_tables.extend(id_to_pb(t) for t in tables)
        self.withdrawal.told(answer, self._then)

    def _then(self) -> None:
        self.told += 1

    @property
    def refused(self) -> frozenset[str]:
        return self.replicas._withdrawn


async def test_a_list_is_obeyed_at_once_and_told_once_it_is_on_the_disk() -> None:
    w = World()
    w.gate.clear()
    w.answer(1, 1, A)
    assert w.refused == {A} and w.withdrawal.digest == 0
    w.gate.set()
    await wait_until(lambda: w.told == 1)
    assert w.disk == Dropped((A,), named(A), OpId(1, 1)) and w.withdrawal.digest == named(A)
    assert World(w.disk).refused == {A}
    w.answer(1, 2)
    await wait_until(lambda: w.told == 2)
    assert w.disk == Dropped((), 0, OpId(1, 2)) and not w.refused and w.withdrawal.digest == 0


async def test_answers_of_before_change_nothing() -> None:
    """A master that does not know yet that it leads no more may have an older list."""
    w = World()
    w.answer(2, 7, A)
    await wait_until(lambda: w.told == 1)
    for term, index in ((1, 9), (2, 6)):
        w.answer(term, index)
        await asyncio.sleep(0)
        assert w.refused == {A} and w.disk.tables == (A,)
        again = World(w.disk)  # a start does not forget how new its list is
        again.answer(term, index)
        assert again.refused == {A}
    w.answer(3, 1)
    await wait_until(lambda: w.told == 2)
    assert not w.refused


async def test_answers_to_heartbeats_of_before_a_list_came() -> None:
    """They have no list where the heartbeat told the present digest; that is no empty list."""
    w = World()
    w.answer(1, 1, A)
    await wait_until(lambda: w.told == 1)
    w.answer(1, 2, A, B)
    await wait_until(lambda: w.told == 2)
    w.answer(1, 3, A, told=named(A))
    assert w.refused == {A, B}
    w.answer(1, 3, A)
    assert w.refused == {A}
    await wait_until(lambda: w.told == 3)
    assert w.disk == Dropped((A,), named(A), OpId(1, 3))


async def test_what_is_taken_back_while_it_is_written() -> None:
    """Dropped, recalled and dropped again: the last word counts, in memory at once, and on the disk at the end."""
    w = World(Dropped((A,), named(A), OpId(1, 0)))
    w.gate.clear()
    w.answer(1, 1)
    assert not w.refused
    w.answer(1, 2, A)
    assert w.refused == {A}
    w.gate.set()
    await wait_until(lambda: w.told == 1)
    assert w.disk.tables == (A,) and w.withdrawal.digest == named(A)


async def test_a_disk_that_fails_is_tried_again_with_the_next_answer() -> None:
    w = World()
    w.fails = True
    w.answer(1, 1, A)
    await asyncio.sleep(0.01)
    assert w.refused == {A} and w.withdrawal.digest == 0 and not w.told
    w.fails = False
    w.answer(1, 2, A)
    await wait_until(lambda: w.told == 1)
    assert w.disk.tables == (A,)


def refuses(node: Node) -> bool:
    """Whether all replicas of tables here refuse clients."""
    ids = [r.tablet_id for r in node.replicas if r.tablet_id != CATALOG_TABLET_ID]
    codes = []
    for tablet_id in ids:
        try:
            node.replicas.of_request(id_to_pb(tablet_id))
        except SteleError as exc:
            codes.append(exc.code)
    return bool(ids) and codes == [Code.TABLET_DELETED] * len(ids)


async def test_a_dropped_table_serves_nobody_through_restarts_and_comes_back_whole(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    try:
        await cluster.start()
        async with cluster.client() as client, cluster.client() as other:
            await client.create_table("t", SCHEMA, HASHED)
            await fill(client, 100)
            old = await other.open_table("t")
            assert await old.get(1) == {"id": 1, "name": "n1"}
            gone = await client.drop_table("t")
            nodes = [node for name, node in cluster.running.items() if name != "master"]
            assert all(refuses(node) for node in nodes)
            for use in (
                old.put({"id": 1_000, "name": "late"}),
                old.get(1),
                old.scan().count(),
            ):
                with pytest.raises(Rejected) as caught:
                    await use
                assert caught.value.code is Code.NOT_FOUND and "was dropped" in str(caught.value)

            # The name is of use meanwhile, and rows of the two do not mix.
            await client.create_table("t", SCHEMA, replication_factor=1)
            await fill(client, 3)

            # A node that starts while no master answers knows it all the same.
            await cluster.stop("master")
            await cluster.stop("node-1")
            node = await cluster.launch("node-1")
            await wait_until(lambda: node.replicas.opened)
            assert any(r.superblock.table_id == gone.table_id for r in node.replicas)
            assert node.replicas._withdrawn == {gone.table_id}
            await cluster.launch("master")

            info = await client.recall_table(gone.table_id, new_name="old")
            assert (info.name, info.state) == ("old", "RUNNING")
            assert await count(client, "old") == 100 and await count(client, "t") == 3
            await fill(client, 120, "old")
            assert await count(client, "old") == 120
    finally:
        await cluster.close()
