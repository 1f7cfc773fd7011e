"""Merges of many tablets on one node: whose turn it is, and what a disk has room for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow as pa
import pytest

from stele.consensus import quiet
from stele.model.errors import Code, Retryable
from stele.tablet.compaction import CompactionJob, CompactionResult
from stele.tablet.compactor import Compactor
from stele.tablet.files import Files
from stele.tablet.store import TabletStore
from stele.tserver import maintenance
from stele.tserver import quiet as quiet_groups
from stele.tserver.maintenance import Maintenance, give_memory_back, room_bytes
from stele.tserver.node import Node
from tests.consensus.cluster import wait_until
from tests.tserver.local import SCHEMA, LocalCluster

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


async def with_files(cluster: LocalCluster, tables: int) -> list[TabletStore]:
    """Stores of four files each, in the order in which the node looks at them."""
    node = cluster.running["node-0"]
    async with cluster.client() as client:
        for number in range(tables):
            table = await client.create_table(f"t{number}", SCHEMA, replication_factor=1)
            for at in range(4):
                await table.put({"id": at, "name": "n"})
                for replica in node.replicas:
                    if replica.machine is not None and replica.machine.applied != replica.machine.flushed:
                        await replica.storage.flush()
    return [r.machine for r in node.replicas if isinstance(r.machine, TabletStore)]


async def anew(node: Node) -> Maintenance:
    """The node's maintenance, with the pauses that hold now."""
    await node.maintenance.close()
    node.maintenance.start()
    return node.maintenance


async def at_rest(node: Node) -> Maintenance:
    """The node's maintenance, which does what it is called for and nothing else."""
    await node.maintenance.close()
    return node.maintenance


class HangingFiles(Files):
    """Its writes wait for `go`."""

    def __init__(self) -> None:
        self.writing, self.go = Event(), Event()

    def write_new(self, path: Path, parts: Iterable[bytes | memoryview]) -> int:
        self.writing.set()
        self.go.wait()
        return super().write_new(path, parts)


async def with_room(node: Node, room: int) -> None:
    """From now on the node's disk has so much room for work in the background."""
    options = node.log.options
    free = options.low_space_bytes + 2 * options.segment_bytes + room
    node.volume.disk_bytes = lambda: (free, 0)  # type: ignore[method-assign]
    await wait_until(lambda: room_bytes(node.log, node.monitor) == room)


async def test_a_merge_that_fails_again_and_again_holds_nobody_up(cluster: LocalCluster) -> None:
    """The first store with something to merge was always the next, also where it could only fail."""
    node = cluster.running["node-0"]
    await with_room(node, 0)
    stores = await with_files(cluster, 3)
    compactor = node.maintenance._compactor = Refusing(stores[0].directory)
    await with_room(node, 1 << 30)
    await wait_until(lambda: [len(s.files) for s in stores[1:]] == [1, 1])
    assert len(stores[0].files) == 4
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


async def test_a_flush_that_lasts_holds_up_neither_merges_nor_the_log(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of flushes of a thousand tablets took 25 s: one merge in that time, and a collection in ten of it."""
    node = cluster.running["node-0"]
    await with_room(node, 0)
    slow, *others = await with_files(cluster, 3)
    monkeypatch.setattr(maintenance, "FLUSH_AGE_MS", 0)
    monkeypatch.setattr(maintenance, "COLLECT_S", 0.1)
    collect, expire, done = node.log.collect, node.sessions.expire, Counter[str]()

    def collected() -> Any:
        done["collected"] += 1
        return collect()

    async def expired() -> None:
        done["expired"] += 1
        await expire()

    monkeypatch.setattr(node.log, "collect", collected)
    monkeypatch.setattr(node.sessions, "expire", expired)
    files = HangingFiles()
    slow._contents.files = files
    try:
        async with cluster.client() as client:
            await (await client.open_table("t0")).put({"id": 9, "name": "n"})
        await anew(node)
        await wait_until(files.writing.is_set)
        done.clear()
        await with_room(node, 1 << 30)
        await wait_until(lambda: [len(s.files) for s in others] == [1, 1])
        await wait_until(lambda: done["collected"] > 1 and done["expired"] > 1)
        assert slow.applied != slow.flushed
    finally:
        files.go.set()
    await wait_until(lambda: slow.applied == slow.flushed)


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


async def test_memory_is_given_back_once_for_all_flushes_of_a_round(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = cluster.running["node-0"]
    stores = await with_files(cluster, 3)
    loops = await at_rest(node)
    given_back, in_thread = Counter[Any](), node.host.in_thread

    async def counted(work: Callable[..., Any], *args: Any) -> Any:
        given_back[work] += work is give_memory_back
        return await in_thread(work, *args)

    monkeypatch.setattr(node.host, "in_thread", counted)
    monkeypatch.setattr(maintenance, "FLUSH_AGE_MS", -1)
    async with cluster.client() as client:
        for number in range(3):
            await (await client.open_table(f"t{number}")).put({"id": 9, "name": "n"})
    await loops.flush_due()
    assert all(s.applied == s.flushed for s in stores)
    assert given_back.total() == 1
    await loops.flush_due()
    assert given_back.total() == 1


async def test_of_a_replica_that_is_gone_nothing_is_remembered(cluster: LocalCluster) -> None:
    node = cluster.running["node-0"]
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, replication_factor=1)
        await table.put({"id": 1, "name": "n"})
        loops = await at_rest(node)
        await loops.flush_due()
        assert len(loops._since) == 1
        await client.delete_table("t")
        await wait_until(lambda: not len(node.replicas))
        await loops.flush_due()
        assert not loops._since


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


async def test_all_stores_together_are_bounded(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was judged alone: a hundred of 31 MiB, none of them due, took 3 GiB."""
    node = cluster.running["node-0"]
    loops = await at_rest(node)
    async with cluster.client() as client:
        for number, rows in enumerate((1, 3, 2)):
            table = await client.create_table(f"t{number}", SCHEMA, replication_factor=1)
            await table.write_arrow(pa.table({"id": range(rows), "name": ["n" * 100_000] * rows}))
        stores = [r.machine for r in node.replicas if isinstance(r.machine, TabletStore)]
        await loops.flush_due()
        assert [s.memory_bytes // 100_000 for s in stores] == [1, 3, 2]
        assert node.stores.bytes == sum(s.memory_bytes for s in stores)
        node.stores.bytes_max = node.stores.bytes - 1
        await loops.flush_due()
        assert [s.memory_bytes // 100_000 for s in stores] == [1, 0, 2]
        node.stores.bytes_max = 1
        await loops.flush_due()
        assert [s.memory_bytes for s in stores] == [0, 0, 0]


async def test_writes_wait_while_flushes_lag(cluster: LocalCluster) -> None:
    """They went on, and what they wrote waited in memory, however slow the disk."""
    node = cluster.running["node-0"]
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, replication_factor=1)
        (store,) = [r.machine for r in node.replicas if isinstance(r.machine, TabletStore)]
        files = HangingFiles()
        store._contents.files = files
        node.stores.bytes_max = 100_000
        rows = pa.table({"id": [1, 2], "name": ["n" * 60_000] * 2})
        try:
            await table.write_arrow(rows)
            await wait_until(files.writing.is_set)
            await table.write_arrow(rows)  # twice the bound is not passed yet when it comes
            await wait_until(lambda: node.stores.full)
            waits = asyncio.ensure_future(table.put({"id": 3, "name": "n"}))
            for _ in range(20):  # where the machine stands still so long, nobody answers in time
                with pytest.raises(Retryable) as refused:
                    await table.write_arrow(rows, timeout_s=0.5)
                if "THROTTLED" in str(refused.value):
                    break
            assert "THROTTLED" in str(refused.value)
            assert not waits.done()
        finally:
            files.go.set()
        await waits
        assert (await table.get({"id": 3})) == {"id": 3, "name": "n"}
        await wait_until(lambda: not node.stores.over)


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
        rows = pa.table({"id": ids, "name": ["n" * 800] * 8_000})
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
                rows = {"id": range(start, start + 4_000), "name": ["n" * 800] * 4_000}
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
    await loops.merge_due()
    assert len(small.files) == 1 and not any(store.reclaim_due for store in large)
    assert [len(store.files) for store in large] == [2, 2]  # nothing in them is dead
    await loops.close()


@pytest.mark.parametrize("look", ["for a merge", "for dead rows", "for a flush"])
async def test_a_look_at_many_stores_gives_way_to_all_else(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    """With 1,300 tablets each look held the event loop for 5 ms and more."""
    monkeypatch.setattr(maintenance, "STORES_AT_ONCE", 2)
    node = cluster.running["node-0"]
    await with_room(node, 0)
    await with_files(cluster, 5)
    loops = await at_rest(node)
    loops._reclaim_ms = 0
    step = {"for a merge": loops._next_merge, "for dead rows": loops._next_reclaim}.get(
        look, loops._flush_round
    )
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.ensure_future(others())
    await asyncio.sleep(0)
    assert not await step()
    beside.cancel()
    assert turns == 2


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


class NoMemory(Files):
    """There is none for a file."""

    def write_new(self, path: Path, parts: Any) -> None:
        raise MemoryError


async def test_a_flush_that_lacks_memory_holds_up_no_other_store(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round ended with it: those whose flush gives memory back were never reached."""
    node = cluster.running["node-0"]
    lacking, *others = await with_files(cluster, 3)
    lacking._contents.files = NoMemory()
    async with cluster.client() as client:
        for number in range(3):
            await (await client.open_table(f"t{number}")).put({"id": 9, "name": "n"})
    monkeypatch.setattr(maintenance, "FLUSH_AGE_MS", 0)
    await wait_until(lambda: all(s.applied == s.flushed for s in others))
    assert lacking.applied != lacking.flushed
    assert all(replica.running for replica in node.replicas)


async def test_a_tablet_at_rest_forgets_its_clients(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each program's id stayed until somebody else wrote to the same tablet, in memory and in its files."""
    node = cluster.running["node-0"]
    monkeypatch.setattr(maintenance, "COLLECT_S", 0.05)
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, replication_factor=1)
        (store,) = (r.machine for r in node.replicas if isinstance(r.machine, TabletStore))
        await table.put({"id": 1, "name": "n"})
        assert store.clients_idle_us is not None
        monkeypatch.setattr(store._once, "_idle_us", 0)
        await anew(node)
        await wait_until(lambda: store.clients_idle_us is None)


@pytest.fixture
def rests_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "QUIET_AFTER_MS", 100)
    monkeypatch.setattr(quiet_groups, "_LOOK_MS", 20)


@pytest.mark.usefixtures("rests_soon")
async def test_a_store_at_rest_is_looked_at_while_it_has_something_to_flush(cluster: LocalCluster) -> None:
    node = cluster.running["node-0"]
    await at_rest(node)
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, replication_factor=1)
        (replica,) = node.replicas
        store = replica.machine
        assert isinstance(store, TabletStore)
        await wait_until(lambda: not node.replicas.awake)
        await replica.storage.flush()
        for _ in range(2):
            node.stores.unflushed()
        assert not node.stores.unflushed() and not node.stores.bytes
        await table.put({"id": 1, "name": "n"})
        await wait_until(lambda: not node.replicas.awake)
        for _ in range(3):
            assert node.stores.unflushed() == [replica] and node.stores.bytes == store.memory_bytes > 0
        await replica.storage.flush()
        node.stores.unflushed()
        assert not node.stores.unflushed() and not node.stores.bytes


@pytest.mark.usefixtures("rests_soon")
async def test_a_store_at_rest_is_flushed_when_its_rows_are_old_and_then_merged(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "RECLAIM_MS", 1 << 40)  # no look at all stores after the first
    node = cluster.running["node-0"]
    await with_room(node, 0)
    (store,) = await with_files(cluster, 1)
    await anew(node)
    async with cluster.client() as client:
        await (await client.open_table("t0")).put({"id": 9, "name": "n"})
    await wait_until(lambda: not node.replicas.awake and node.maintenance._all_due_ms > 1 << 40)
    await with_room(node, 1 << 30)
    await asyncio.sleep(3 * maintenance.ROUND_S)
    assert len(store.files) == 4 and store.applied != store.flushed
    monkeypatch.setattr(maintenance, "FLUSH_AGE_MS", -1)
    await wait_until(lambda: len(store.files) == 1)
    assert store.applied == store.flushed and not node.replicas.awake


async def test_metrics_tell_what_is_there_when_they_are_read(cluster: LocalCluster) -> None:
    node = cluster.running["node-0"]
    route = node.servers._http._routes["/metrics"]
    for number in range(1, 4):
        async with cluster.client() as client:
            await client.create_table(f"t{number}", SCHEMA, replication_factor=1)
        await wait_until(lambda: all(replica.is_leader for replica in node.replicas))
        assert f"stele_replicas_leading {number}.0" in (await route()).body.decode()
