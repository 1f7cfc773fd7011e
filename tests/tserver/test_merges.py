"""Merges of many tablets on one node: whose turn it is, and what a disk has room for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from threading import Event

import pyarrow as pa
import pytest

from stele.model.errors import Code, Retryable
from stele.tablet.compaction import CompactionJob, CompactionResult
from stele.tablet.compactor import Compactor
from stele.tablet.files import Files
from stele.tablet.store import TabletStore
from stele.tserver import maintenance
from tests.consensus.cluster import wait_until
from tests.tserver.local import SCHEMA, LocalCluster
from tests.tserver.maintaining import anew, at_rest, with_files, with_room

NODES = 1  # of the cluster


class Refusing(Compactor):
    """One whose disk is full for the files of one store."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = str(directory)
        self.refused = 0

    async def run(self, job: CompactionJob) -> CompactionResult:
        if job.directory == self.directory:
            self.refused += 1
            raise Retryable("the disk is full", code=Code.DISK_FULL)
        return await super().run(job)


async def test_a_merge_that_fails_again_and_again_holds_nobody_up(cluster: LocalCluster) -> None:
    """The first store with something to merge was always the next, also where it could only fail."""
    node = cluster.running["node-0"]
    await with_room(node, 0)
    stores = await with_files(cluster, 3)
    compactor = node.maintenance._compactor = Refusing(stores[0].directory)
    await with_room(node, 1 << 30)
    await wait_until(lambda: [len(s.files) for s in stores[1:]] == [1, 1])
    assert len(stores[0].files) == 4
    await wait_until(lambda: compactor.refused > 0)
    assert compactor.refused == 1  # it is left alone for a while


class Lacking(Compactor):
    """One that has no memory for the first answer of its worker."""

    lacked = 0

    async def run(self, job: CompactionJob) -> CompactionResult:
        result = await super().run(job)
        self.lacked += 1
        if self.lacked == 1:
            raise MemoryError
        return result


class LackingFiles(Files):
    """It has no memory when a directory is synced for the first time."""

    lacked = 0

    def sync_directory(self, directory: Path) -> None:
        self.lacked += 1
        if self.lacked == 1:
            raise MemoryError
        super().sync_directory(directory)


@pytest.mark.parametrize("where", ["its worker", "its end"])
async def test_a_merge_that_lacked_memory_is_made_later(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Nobody said to its store that the merge was over: it was never merged again before the node's next start."""
    monkeypatch.setattr(maintenance, "COMPACTION_REST_MS", 0)
    node = cluster.running["node-0"]
    await with_room(node, 0)
    (store,) = await with_files(cluster, 1)
    lacking: Lacking | LackingFiles
    if where == "its worker":
        lacking = node.maintenance._compactor = Lacking()
    else:
        lacking = LackingFiles()
        store._contents.files = lacking
    await with_room(node, 1 << 30)
    await wait_until(lambda: len(store.files) == 1)
    assert lacking.lacked > 1
    await wait_until(lambda: [path.name for path in store.directory.glob("rows-*")] == list(store.files))


async def test_a_merge_waits_until_the_disk_has_room_for_it(cluster: LocalCluster) -> None:
    node = cluster.running["node-0"]
    await with_room(node, 100)
    (store,) = await with_files(cluster, 1)
    plan, rooms = store.plan_compaction, []

    def planned(*, room_bytes: int) -> CompactionJob | None:
        rooms.append(room_bytes)
        return plan(room_bytes=room_bytes)

    store.plan_compaction = planned  # type: ignore[assignment, method-assign]
    await wait_until(lambda: len(rooms) >= 3)
    assert set(rooms) == {100} and len(store.files) == 4
    await with_room(node, 1 << 30)
    await wait_until(lambda: len(store.files) == 1)


async def test_the_next_merge_begins_when_one_has_ended(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        maintenance, "RECLAIM_MS", 0
    )  # all stores are looked at, also those that rest meanwhile
    node = cluster.running["node-0"]
    await with_room(node, 0)
    stores = await with_files(cluster, 3)
    loops = await at_rest(node)
    await with_room(node, 1 << 30)
    await loops.merge_due()
    assert [len(s.files) for s in stores] == [1, 1, 1]
    await loops.close()


async def test_what_was_merged_comes_into_use_before_the_node_is_stopped(cluster: LocalCluster) -> None:
    node = cluster.running["node-0"]
    await with_room(node, 0)
    (store,) = await with_files(cluster, 1)
    loops = await anew(node)
    install, installing, go = store.install_compaction, Event(), Event()

    def slowly(result: CompactionResult) -> None:
        installing.set()
        go.wait()
        install(result)

    store.install_compaction = slowly  # type: ignore[method-assign]
    await with_room(node, 1 << 30)
    await wait_until(installing.is_set)
    asyncio.get_running_loop().call_later(0.3, go.set)
    await loops.close()
    assert len(store.files) == 1


@pytest.mark.parametrize("room", ["enough", "less than its files"])
async def test_the_disk_of_deleted_rows_comes_back_to_a_node_at_rest(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, room: str
) -> None:
    """It never did: told that its disk was full, and to delete rows, its user had a fuller disk for good."""
    monkeypatch.setattr(maintenance, "RECLAIM_MS", 0, raising=False)
    node = cluster.running["node-0"]
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, replication_factor=1)
        (replica,) = [r for r in node.replicas if isinstance(r.machine, TabletStore)]
        store = replica.machine
        assert isinstance(store, TabletStore)
        store._history.default_us = 0
        ids = pa.array(range(8_000), pa.int64())
        rows = pa.table({"id": ids, "name": [f"{n:0800}" for n in range(8_000)]})
        await table.write_arrow(rows)
        await replica.storage.flush()
        full = store.bytes_on_disk
        assert full > 6 << 20
        if room != "enough":
            await with_room(node, full // 2)
        await table.write_arrow(rows.select(["id"]), op="delete")
        await replica.storage.flush()
        await wait_until(lambda: store.bytes_on_disk == 0, timeout_s=60.0)
        assert await table.scan().count() == 0


async def test_a_look_for_dead_rows_holds_up_no_other_merge(cluster: LocalCluster) -> None:
    """A node that has just started may have a thousand stores to look at."""
    node = cluster.running["node-0"]
    await with_room(node, 0)
    (small,) = await with_files(cluster, 1)
    async with cluster.client() as client:
        for name in ("a", "b"):
            table = await client.create_table(name, SCHEMA, replication_factor=1)
            for start in (0, 4_000):
                ids = range(start, start + 4_000)
                rows = {"id": ids, "name": [f"{n:0800}" for n in ids]}
                await table.write_arrow(pa.table(rows))
                for replica in node.replicas:
                    await replica.storage.flush()
    stores = [r.machine for r in node.replicas if isinstance(r.machine, TabletStore)]
    large = [store for store in stores if store is not small]
    for store in large:
        store._history.default_us = 0
    loops = await at_rest(node)
    assert [store.reclaim_due for store in large] == [True, True]
    loops._reclaim_ms = 0
    await loops.merge_due()
    assert [store.reclaim_due for store in large] == [False, True]
    await with_room(node, 1 << 30)
    loops._all_due_ms = 0  # on a busy machine the small one may be at rest by now
    await loops.merge_due()
    assert len(small.files) == 1 and not any(store.reclaim_due for store in large)
    assert [len(store.files) for store in large] == [2, 2]  # nothing in them is dead
    await loops.close()


async def test_a_store_that_fails_before_its_turn_is_not_merged(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "STORES_AT_ONCE", 1)
    node = cluster.running["node-0"]
    await with_room(node, 0)
    first, *_ = await with_files(cluster, 3)
    loops = await at_rest(node)
    await with_room(node, 1 << 30)
    assert first.plan_compaction() is not None  # it is being merged
    failing, last = list(node.replicas)[1:]
    look = asyncio.ensure_future(loops._next_merge())
    await asyncio.sleep(0)
    failing.fail("its disk")
    due = await look
    assert due is not None and due[0] is last
