"""A flush that fails is not tried again at once, and one that writes much for little waits longer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest

from stele.consensus.ports import Host
from stele.model.errors import Code, Retryable
from stele.tablet.colformat import NAME
from stele.tablet.files import Files
from stele.tablet.keyspace import KeySpace
from stele.tserver import maintenance, opening
from stele.tserver.maintenance import Maintenance
from stele.tserver.node import Node
from stele.wal import Log
from tests.consensus.cluster import wait_until
from tests.tserver.local import SCHEMA, LocalCluster
from tests.tserver.maintaining import at_rest, log_options, with_files

NODES = 1  # of the cluster


class FullFiles(Files):
    """There is no space for a column file."""

    def __init__(self) -> None:
        self.tried = 0
        self.full = True

    def write_new(self, path: Path, parts: Iterable[bytes | memoryview]) -> int:
        if not path.name.startswith(NAME):  # a merge's manifest
            return super().write_new(path, parts)
        self.tried += 1
        if self.full:
            raise Retryable("the disk is full", code=Code.DISK_FULL)
        return super().write_new(path, parts)


class Counted:
    """The log of a node. It counts the rounds of flushes, each of which asks once what pins it."""

    def __init__(self, node: Node) -> None:
        self._log = node.log
        self.rounds = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def pins(self, of: Any, *, above_bytes: int) -> Any:
        self.rounds += 1
        return self._log.pins(of, above_bytes=above_bytes)


class Clocked:
    """The host of a node, with a clock of its own for maintenance."""

    def __init__(self, node: Node) -> None:
        self._host = node.host
        self.time_ms = node.host.now_ms()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def now_ms(self) -> int:
        return self.time_ms


def clocked(node: Node) -> tuple[Maintenance, Clocked, Counted]:
    """Maintenance of a node by a clock that the test sets."""
    host, log = Clocked(node), Counted(node)
    made = Maintenance(
        node.replicas,
        node.stores,
        cast(Log, log),
        node.log_space,
        node.sessions,
        node.monitor,
        cast(Host, host),
    )
    return made, host, log


@pytest.mark.parametrize("why", ["it is due", "all stores are too large"])
async def test_a_store_whose_flush_failed_is_left_alone_for_a_while(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """On a full disk each round wrote as much of it as there was space for, twice a second."""
    node = cluster.running["node-0"]
    full, *others = await with_files(cluster, 3)
    await at_rest(node)
    full._contents.files = files = FullFiles()
    monkeypatch.setattr(maintenance, "ROUND_S", 0.01)
    async with cluster.client() as client:
        for number in range(3):
            await (await client.open_table(f"t{number}")).put({"id": 9, "name": "n"})
    if why == "it is due":
        monkeypatch.setattr(maintenance, "FLUSH_AGE_MS", -1)
    else:
        node.stores.bytes_max = 0
    loops, clock, log = clocked(node)

    async def some_rounds() -> None:
        enough = log.rounds + 10
        await wait_until(lambda: log.rounds > enough)

    loops.start()
    try:
        for tried in (1, 2):
            await wait_until(lambda tried=tried: files.tried == tried)  # type: ignore[misc]
            await some_rounds()
            assert files.tried == tried
            assert not any(s.memory_bytes for s in others)
            files.full = tried == 1
            clock.time_ms += maintenance.FLUSH_REST_MS - 1
            await some_rounds()
            assert files.tried == tried
            clock.time_ms += 1
        await wait_until(lambda: not full.memory_bytes)
    finally:
        await loops.close()


async def test_a_store_waits_the_longer_for_its_age_the_more_a_flush_writes_again(
    cluster: LocalCluster,
) -> None:
    """A key space of 64 MiB was written as a whole two minutes after any put: half a MiB a second for nothing."""
    node = cluster.running["node-0"]
    await at_rest(node)
    async with cluster.client() as client:
        space = await client.create_keyspace("k", replication_factor=1)
        for number in range(5):
            await space.replace(f"key {number}", b"v" * (maintenance.REWRITTEN_BYTES // 2))
        replica = next(r for r in node.replicas if isinstance(r.machine, KeySpace))
        await replica.storage.flush()
        await space.replace("small", b"1")
    loops, clock, _ = clocked(node)
    begun, age = clock.time_ms, maintenance.FLUSH_AGE_MS
    await loops.flush_due()
    for passed, due in ((2 * age, False), (3 * age, False), (4 * age, True)):
        clock.time_ms = begun + passed
        await loops.flush_due()
        assert (replica.machine.applied == replica.machine.flushed) is due


async def test_a_small_volume_s_log_is_held_by_no_store_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was flushed for the log's sake once it held 256 MiB, however small the volume."""

    options = log_options(segment_bytes=128 << 10, low_space_bytes=1 << 20, anchor_bytes_max=1 << 20)
    monkeypatch.setattr(opening, "LogOptions", options)
    cluster = await LocalCluster(tmp_path, nodes=1).start()
    try:
        node = cluster.running["node-0"]
        async with cluster.client() as client:
            quiet = await client.create_table("quiet", SCHEMA, replication_factor=1)
            await quiet.put({"id": 1, "name": "n"})
            (machine,) = [r.machine for r in node.replicas if r.machine is not None]
            busy = await client.create_table("busy", SCHEMA, replication_factor=1)
            for number in range(8):
                await wait_until(lambda: node.log.shared.wanted_sequence() is None)
                await busy.put({"id": number, "name": "n" * (100 << 10)})
            await (await at_rest(node)).flush_due()
            assert machine.applied == machine.flushed
    finally:
        await cluster.close()
