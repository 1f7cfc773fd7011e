"""Merges of many tablets on one node: whose turn it is, and what a disk has room for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stele.model.errors import Code, Retryable
from stele.model.schema import Schema
from stele.tablet.compaction import CompactionJob, CompactionResult
from stele.tablet.compactor import Compactor
from stele.tablet.store import TabletStore
from stele.tserver.maintenance import room_bytes
from stele.tserver.node import Node
from tests.consensus.cluster import wait_until
from tests.tserver.local import LocalCluster

SCHEMA = Schema.make([("id", "int64"), ("name", "string")], ["id"])


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    made = LocalCluster(tmp_path, nodes=1)
    try:
        yield await made.start()
    finally:
        await made.close()


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
                        await replica.flush()
    return [r.machine for r in node.replicas if isinstance(r.machine, TabletStore)]


async def with_room(node: Node, room: int) -> None:
    """From now on the node's disk has so much room for work in the background."""
    options = node.log.options
    free = options.low_space_bytes + 2 * options.segment_bytes + room
    node.volume.disk_bytes = lambda: (free, 0)  # type: ignore[method-assign]
    await wait_until(lambda: room_bytes(node) == room)


async def test_a_merge_that_fails_again_and_again_holds_nobody_up(cluster: LocalCluster) -> None:
    """The first store with something to merge was always the next, also where it could only fail."""
    node = cluster.running["node-0"]
    await with_room(node, 0)
    stores = await with_files(cluster, 3)
    assert node._maintenance is not None
    compactor = node._maintenance._compactor = Refusing(stores[0].directory)
    await with_room(node, 1 << 30)
    await wait_until(lambda: [len(s.files) for s in stores[1:]] == [1, 1], timeout_s=30.0)
    assert len(stores[0].files) == 4
    assert compactor.refused == 1  # it is left alone for a while


async def test_a_merge_waits_until_the_disk_has_room_for_it(cluster: LocalCluster) -> None:
    node = cluster.running["node-0"]
    await with_room(node, 100)
    (store,) = await with_files(cluster, 1)
    plan, rooms = store.plan_compaction, []

    def planned(*, room_bytes: int) -> CompactionJob | None:
        rooms.append(room_bytes)
        return plan(room_bytes=room_bytes)

    store.plan_compaction = planned  # type: ignore[assignment, method-assign]
    await wait_until(lambda: len(rooms) == 3)
    assert rooms == [100] * 3 and len(store.files) == 4
    await with_room(node, 1 << 30)
    await wait_until(lambda: len(store.files) == 1, timeout_s=30.0)
