"""Flushes of many tablets on one node: what is due, what they hold up, and how much memory waits for them."""

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
from stele.model.errors import Retryable
from stele.tablet.files import Files
from stele.tablet.store import TabletStore
from stele.tserver import maintenance
from stele.tserver import quiet as quiet_groups
from stele.tserver.maintenance import give_memory_back
from tests.consensus.cluster import wait_until
from tests.tserver.local import SCHEMA, LocalCluster
from tests.tserver.maintaining import anew, at_rest, with_files, with_room

NODES = 1  # of the cluster


@pytest.fixture
def rests_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "QUIET_AFTER_MS", 100)
    monkeypatch.setattr(quiet_groups, "_LOOK_MS", 20)


class HangingFiles(Files):
    """Its writes wait for `go`."""

    def __init__(self) -> None:
        self.writing, self.go = Event(), Event()

    def write_new(self, path: Path, parts: Iterable[bytes | memoryview]) -> int:
        self.writing.set()
        self.go.wait()
        return super().write_new(path, parts)


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
