"""`python -m tests.power.workload FD FOLDER SEED SECONDS STORY`: a cluster on recorded files, under all that makes it write.

Rows, blocks, a key space, tables that come and go, nodes and a master that stop and start, copies to where they are missed.
Called by __main__, which serves FD; the story goes to the file STORY.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stele.client import AsyncClient, AsyncTable
from stele.client.tablet import TabletClient
from stele.driver.main import run as drive
from stele.driver.policy import Policy
from stele.master.leadership import MasterOptions
from stele.model.block import RowOp, decode_block
from stele.model.errors import Code, Rejected, SteleError
from stele.model.ids import ReplicaId
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from stele.raft.messages import UpdateRequest, UpdateResponse, VoteResponse
from stele.tserver import log_space, maintenance, opening
from stele.tserver.manager import TabletManager
from stele.tserver.messenger import Messenger
from stele.tserver.node import Node
from tests.consensus.cluster import OPTIONS
from tests.power.recorder import mount
from tests.power.story import Deed, Dropped, Promise, Sent, Story
from tests.tserver.local import LocalCluster
from tests.tserver.maintaining import log_options

NODES = 4
TABLES = {"one": 1, "three": 3, "whole": 3, "quiet": 3}
"""With their replication factors; `one` and `three` have two tablets."""
SPACE = "space"
SCHEMA = Schema.make([("id", "int64"), ("v", "int64", True), ("pad", "string", True)], ["id"])
_POLICY = Policy(dead_after_ms=1_000, lost_after_ms=700, min_disk_free_bytes=1 << 20)
_BLOCK_ROWS = 300
_INSERTERS = 4
_ANSWER_S_MAX = 1.5
_MASTER = MasterOptions(missing_after_ms=2_000, order_retry_ms=300, sweep_ms=300, disk_free_bytes_min=1 << 20)
_SMALL = {
    "ROUND_S": 0.15,
    "COLLECT_S": 0.4,
    "QUIET_MS": 300,
    "QUIET_BYTES": 1,
    "FLUSH_AGE_MS": 800,
    "RECLAIM_MS": 1_000,
}
"""Of `maintenance`: flushes, merges and collections of the log within seconds."""
_HELD_BYTES = 200 << 10
"""Of `log_space`: what holds more is flushed, or written again at the log's end where a replica has no rows to flush."""


@contextmanager
def small() -> Iterator[None]:
    """Segments and pauses so small that a few seconds have all that happens to nodes in days."""
    options = log_options(segment_bytes=128 << 10, keeper_interval_ms=100, low_space_bytes=1 << 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "LogOptions", options)
        for name, value in _SMALL.items():
            patch.setattr(maintenance, name, value)
        patch.setattr(log_space, "HELD_BYTES", _HELD_BYTES)
        yield


def cluster_on(directory: Path, story: Story | None = None) -> LocalCluster:
    """A cluster whose volumes are below `directory`; the one of a story, if there is one."""
    cluster = LocalCluster(directory, nodes=NODES, master_options=_MASTER, replica=OPTIONS)
    if story is not None:
        cluster.cluster_id, cluster.network, cluster.ids = story.cluster_id, story.network, story.ids
    return cluster


def _listen(story: Story, rng: random.Random) -> None:
    """Note what nodes tell each other, what they are ordered to remove, and what clients number to send it again. Answers to
    inserts are long on their way: what was done for a client is flushed by the time it has heard of it."""
    send, delete, start = Messenger.send, TabletManager.delete, TabletClient._start
    names = {node_id: name for name, node_id in story.ids.items()}

    def sent(self: Messenger, replica: Any, node_id: Any, to: ReplicaId, message: Any, **more: Any) -> None:
        promise = partial(
            Promise,
            time.monotonic(),
            names[self._transport.identity.node_id],
            replica.superblock.tablet_id,
            replica.superblock.replica_id,
        )
        match message:
            case UpdateRequest():
                story.promises.append(promise(message.term))
            case UpdateResponse(success=True):
                story.promises.append(promise(message.term, received=message.last_received))
            case VoteResponse(granted=True, pre_vote=False):
                story.promises.append(promise(message.request_term, to))
        send(self, replica, node_id, to, message, **more)

    async def deleted(self: TabletManager, tablet_id: Any, *more: Any) -> None:
        story.dropped.append(Dropped(time.monotonic(), self._files.directory.parent.name, tablet_id))
        await delete(self, tablet_id, *more)

    def started(
        self: TabletClient, request: Any, timeout_s: float, ended: Callable[[Any], None], sequencer: Any
    ) -> Any:
        write = request.write
        if not write.block:
            return start(self, request, timeout_s, ended, sequencer)
        place = self._way.locations.info.name, self.place.tablet_id
        number = write.client_id, write.first_attempt_us, write.sequence
        story.sent.append(note := Sent(time.monotonic(), *place, *number, write.block))
        insert = decode_block(write.block, SCHEMA).op is RowOp.INSERT

        def told(end: Any) -> None:
            if not isinstance(end, BaseException):
                note.timestamp = end.write.timestamp
            note.ended_s = time.monotonic()
            ended(end)

        def answered(end: Any) -> None:
            if insert and not isinstance(end, BaseException):
                asyncio.get_running_loop().call_later(rng.random() * _ANSWER_S_MAX, told, end)
            else:
                told(end)

        return start(self, request, timeout_s, answered, sequencer)

    Messenger.send, TabletManager.delete = sent, deleted  # type: ignore[assignment, method-assign]
    TabletClient._start = started  # type: ignore[method-assign]


class Workload:
    """What is done to a cluster for some seconds."""

    def __init__(
        self, cluster: LocalCluster, client: AsyncClient, inserting: AsyncClient, story: Story, seed: int
    ) -> None:
        self._cluster, self._client, self._inserting, self._story = cluster, client, inserting, story
        self._rng = random.Random(f"power/{seed}")
        self._values = count(1)
        self._until_s = 0.0

    async def run(self, seconds: float) -> None:
        """All of it at once."""
        tables = {name: await self._create(name, rf) for name, rf in TABLES.items()}
        await self._client.create_keyspace(SPACE, replication_factor=3)
        inserted = {name: await self._inserting.open_table(name) for name in ("one", "three")}
        self._story.ready_s = time.monotonic()
        self._until_s = self._story.ready_s + seconds
        async with asyncio.TaskGroup() as group:
            for name in ("one", "three"):
                group.create_task(self._singles(name, tables[name], 0))
                group.create_task(self._singles(name, tables[name], 100))
                keys = count(10_000)
                for _ in range(_INSERTERS):
                    group.create_task(self._inserts(name, inserted[name], keys))
                group.create_task(self._blocks(name, tables[name]))
            group.create_task(self._singles("whole", tables["whole"], 0))
            group.create_task(self._pairs())
            group.create_task(self._tables())
            group.create_task(self._restarts())

    def _going_on(self) -> bool:
        return time.monotonic() < self._until_s

    async def _create(self, name: str, replication_factor: int, tablets: int = 2) -> AsyncTable:
        deed = self._story.created[name] = Deed(time.monotonic())
        partition = PartitionSchema((HashPartition((0,), tablets, 0),), None) if tablets > 1 else None
        table = await self._client.create_table(
            name, SCHEMA, partition, replication_factor=replication_factor
        )
        deed.told_s = time.monotonic()
        return table

    async def _write(self, deeds: list[Deed], write: Awaitable[Any]) -> None:
        try:
            await write
        except Rejected as exc:
            if exc.code is not Code.NOT_FOUND:  # a delete of what is not there
                raise
        except SteleError as exc:  # what became of it nobody knows
            self._story.notes.append(f"{time.monotonic():.3f} {exc}")
            return
        for deed in deeds:
            deed.told_s = time.monotonic()

    def _begin(self, table: str, key: int, value: int | None) -> Deed:
        deed = Deed(time.monotonic(), value)
        self._story.rows.setdefault((table, key), []).append(deed)
        return deed

    async def _singles(self, name: str, table: AsyncTable, lowest: int) -> None:
        while self._going_on():
            key, value = lowest + self._rng.randrange(60), next(self._values)
            if self._rng.random() < 0.2:
                await self._write([self._begin(name, key, None)], table.delete({"id": key}))
            else:
                row = {"id": key, "v": value, "pad": "x" * self._rng.randrange(400)}
                await self._write([self._begin(name, key, value)], table.put(row))
            await asyncio.sleep(self._rng.random() * 0.03)

    async def _inserts(self, name: str, table: AsyncTable, keys: Iterator[int]) -> None:
        """Each key once: done twice, its own first insert refuses the second."""
        while time.monotonic() < self._until_s - _ANSWER_S_MAX:
            key, value = next(keys), next(self._values)
            await self._write([self._begin(name, key, value)], table.insert({"id": key, "v": value}))

    async def _blocks(self, name: str, table: AsyncTable) -> None:
        while self._going_on():
            keys, value = (
                self._rng.sample(range(1000, 1000 + 3 * _BLOCK_ROWS), _BLOCK_ROWS),
                next(self._values),
            )
            pads = [self._rng.randbytes(60).hex() for _ in keys]
            rows = pa.table({"id": keys, "v": [value] * len(keys), "pad": pads})
            await self._write([self._begin(name, key, value) for key in keys], table.write_arrow(rows))
            await asyncio.sleep(0.1 + self._rng.random() * 0.3)

    async def _pairs(self) -> None:
        space = await self._client.keyspace(SPACE)
        while self._going_on():
            key, value = self._rng.randrange(20), next(self._values)
            await self._write([self._begin(SPACE, key, value)], space.replace(f"k{key}", str(value)))
            await asyncio.sleep(self._rng.random() * 0.15)

    async def _tables(self) -> None:
        for number in count(1):
            if not self._going_on():
                return
            name = f"passing-{number}"
            try:
                table = await self._create(name, 3, tablets=1)
                await self._write([self._begin(name, 1, number)], table.put({"id": 1, "v": number}))
                await asyncio.sleep(0.5)
                if number % 3:
                    deed = self._story.deleted[name] = Deed(time.monotonic())
                    await self._client.delete_table(name)
                    deed.told_s = time.monotonic()
            except SteleError as exc:
                self._story.notes.append(f"{time.monotonic():.3f} {name}: {exc}")
            await asyncio.sleep(0.5)

    async def _restarts(self) -> None:
        """Each node away for long enough that its replicas are copied to the others, and the master for a moment."""
        await asyncio.sleep(1)
        for number in count():
            if time.monotonic() > self._until_s - 4:
                return
            name = f"node-{(number + 1) % NODES}"
            await self._cluster.stop(name)
            driver = asyncio.create_task(drive([self._cluster.master_address], _POLICY))
            await asyncio.sleep(3)
            await self._launch(name)
            await asyncio.sleep(1)
            driver.cancel()
            await asyncio.wait((driver,))
            if number % 2:
                await self._cluster.stop("master")
                await self._launch("master")

    async def _launch(self, name: str) -> None:
        note_incarnation(self._story, name, await self._cluster.launch(name))


def note_incarnation(story: Story, name: str, node: Node) -> None:
    """That it runs, and says so under this number."""
    story.incarnations.append((time.monotonic(), name, node.volume.record.incarnation))


async def _record(directory: Path, seed: int, seconds: float, told: Path) -> None:
    cluster = cluster_on(directory)
    story = Story(cluster.cluster_id, cluster.network, cluster.ids)
    _listen(story, random.Random(f"power/{seed}/answers"))
    await cluster.start()
    for name, node in cluster.running.items():
        note_incarnation(story, name, node)
    async with cluster.client() as client, cluster.client() as inserting:
        await Workload(cluster, client, inserting, story, seed).run(seconds)
    told.write_bytes(pickle.dumps(story))
    os._exit(0)  # as by kill -9: what nodes write when they are stopped is another story


def main(fd: str, folder: str, seed: str, seconds: str, told: str) -> None:
    """See above."""
    mount(int(fd), Path(folder))
    with small():
        asyncio.run(_record(Path(folder), int(seed), float(seconds), Path(told)))


if __name__ == "__main__":
    main(*sys.argv[1:])
