"""Watches on key spaces of real processes, while each node is killed and comes back: no change missed, none twice."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path

import pytest

from stele.client import AsyncClient, AsyncKeySpace, AsyncWatch
from stele.model.errors import Code, Rejected, SteleError
from tests.client.small import small_cluster
from tests.consensus.cluster import WAIT_S
from tests.harness import Cluster
from tests.linear.watched import Pairs, Read, Write, faults_of
from tests.tserver.local import LocalCluster

END = b"end"


class History:
    """What clients wrote and read, until told to stop."""

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.reads: list[Read] = []
        self.stop = asyncio.Event()

    async def write(self, space: AsyncKeySpace, name: str) -> None:
        rng, count = random.Random(name), 0
        while not self.stop.is_set():
            count += 1
            keys = rng.sample([b"k0", b"k1", b"k2", name.encode()], rng.randint(1, 3))
            values: dict[bytes, bytes | None] = {key: f"{name}-{count}".encode() for key in keys}
            begun = time.monotonic()
            try:
                revision = await space.write(values)
            except SteleError as exc:
                assert exc.code in (Code.CHANGE_IN_PROGRESS, Code.UNKNOWN_OUTCOME, Code.NO_QUORUM), exc
                if exc.code is Code.UNKNOWN_OUTCOME:
                    self.writes.append(Write(values, begun))
                await asyncio.sleep(0.01)
            else:
                self.writes.append(Write(values, begun, time.monotonic(), revision))

    async def read(self, space: AsyncKeySpace) -> None:
        while not self.stop.is_set():
            begun = time.monotonic()
            state = await space.snapshot()
            values = {each.key: each.value for each in state.keys}
            self.reads.append(Read(values, state.revision, begun, time.monotonic()))
            await asyncio.sleep(0.05)


async def _watched(watch: AsyncWatch) -> list[tuple[int, Pairs]]:
    """All writes up to the last one."""
    found = list[tuple[int, Pairs]]()
    async for write in watch:
        found.append((write.revision, {change.key: change.value for change in write.changes}))
        if write.changes[0].key == END:
            break
    return found


async def _by_turns(space: AsyncKeySpace) -> list[tuple[int, Pairs]]:
    """The same by many watches, each of which begins where the one before ended."""
    found, revision = list[tuple[int, Pairs]](), 0
    while not found or END not in found[-1][1]:
        async with await space.watch(after=revision) as watch:
            for _ in range(7):
                write = await anext(watch)
                found.append((write.revision, {change.key: change.value for change in write.changes}))
                if write.changes[0].key == END:
                    break
            revision = watch.revision
    return found


async def test_each_change_comes_once_while_leaders_are_killed(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, masters=1, nodes=3) as cluster,
        AsyncClient(cluster.master_addresses) as client,
        AsyncClient(cluster.master_addresses) as other,
    ):
        space = await client.create_keyspace("s")
        afar = await other.keyspace("s")
        history = History()
        watchers = [
            asyncio.create_task(_watched(await afar.watch(after=0))),
            asyncio.create_task(_by_turns(afar)),
        ]
        work = [asyncio.create_task(history.write(space, f"w{n}")) for n in range(3)]
        work.append(asyncio.create_task(history.read(afar)))
        await cluster.kill_each()
        history.stop.set()
        await asyncio.gather(*work)
        begun = time.monotonic()
        last = await space.replace(END, "")
        history.writes.append(Write({END: b""}, begun, time.monotonic(), last))
        async with asyncio.timeout(WAIT_S):
            watched, by_turns = await asyncio.gather(*watchers)
        assert watched == by_turns
        assert faults_of(history.writes, history.reads, watched) == []
        assert len(watched) > 50 and len(history.reads) > 10


async def test_an_upgrade_is_finalized_first(tmp_path: Path) -> None:
    async with small_cluster(tmp_path) as (cluster, client):
        cluster.cluster_version = 1
        space = await client.create_keyspace("s")
        for call in (space.watch("k"), space.snapshot()):
            with pytest.raises(Rejected, match="`stele cluster finalize` allows it") as refused:
                await call
            assert refused.value.code is Code.UNSUPPORTED_VERSION
        for call in (space.watch("k", prefix="k"), space.watch(after=-1)):
            with pytest.raises(Rejected) as wrong:
                await call
            assert wrong.value.code is Code.INVALID_ARGUMENT


async def test_from_the_command_line(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    try:
        await cluster.start()
        async with cluster.client() as client:
            space = await client.create_keyspace("s")
            first = await space.replace("colour", "blue")
            second = await space.write({"colour": None, "count": b"\xff", "owner": "me"})
            lines = {
                (): [b"%d\tput\tcolour\tblue" % first, b"%d\tdelete\tcolour" % second],
                ("--json",): [
                    {"revision": first, "key": "colour", "value": "blue"},
                    {"revision": second, "key": "colour", "deleted": True},
                    {"revision": second, "key": "count", "valueHex": "ff"},
                ],
            }
            for options, expected in lines.items():
                masters = ("--masters", cluster.master_address)
                process = await asyncio.create_subprocess_exec(
                    *(
                        sys.executable,
                        "-m",
                        "stele.cli",
                        "kv",
                        "watch",
                        "s",
                        "--prefix",
                        "co",
                        "--after",
                        "0",
                    ),
                    *(*masters, *options),
                    stdout=asyncio.subprocess.PIPE,
                )
                assert process.stdout is not None
                try:
                    for each in expected:
                        line = (await process.stdout.readline()).strip()
                        assert (json.loads(line) if options else line) == each
                finally:
                    process.kill()
                    await process.wait()
    finally:
        await cluster.close()
