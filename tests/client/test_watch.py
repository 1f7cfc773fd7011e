"""Watches on key spaces of real processes, while each node is killed and comes back: no change missed, none twice."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from stele.client import AsyncClient, AsyncKeySpace
from stele.model.errors import Code, Rejected
from tests.client.small import small_cluster
from tests.consensus.cluster import WAIT_S
from tests.harness import Cluster
from tests.linear.keys import END, History, given
from tests.linear.watched import Pairs, faults_of
from tests.tserver.local import LocalCluster


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
        watched = list[tuple[int, Pairs]]()
        watching = asyncio.create_task(given(await afar.watch(after=0), watched))
        turning = asyncio.create_task(_by_turns(afar))
        work = [asyncio.create_task(history.write(space, f"w{n}")) for n in range(3)]
        work.append(asyncio.create_task(history.read(afar)))
        await cluster.kill_each()
        history.stop.set()
        await asyncio.gather(*work)
        assert await history.one(space, {END: b""})
        async with asyncio.timeout(WAIT_S):
            await watching
            by_turns = await turning
        assert watched == by_turns
        assert faults_of(history.writes, history.reads, watched) == []
        assert len(watched) > 50 and len(history.reads) > 10


async def test_a_watch_begins_anew_where_an_attempt_without_an_answer_still_runs(tmp_path: Path) -> None:
    """Found by tests/linear, seed 22: the node took the new attempt for the old one, and refused it for good."""
    cluster = LocalCluster(tmp_path)
    try:
        await cluster.start()
        async with cluster.client() as client:
            space = await client.create_keyspace("s")
            async with await space.watch() as watch:
                await watch.begin()
                await space.replace("k", "v")
                assert [change.key for change in (await anext(watch)).changes] == [b"k"]
    finally:
        await cluster.close()


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


async def test_a_key_space_that_was_recovered_is_read_anew(tmp_path: Path) -> None:
    """Revisions that were lost are given again, so the watch cannot tell what it has seen."""
    async with small_cluster(tmp_path) as (cluster, client):
        space = await client.create_keyspace("s")
        watch = await space.watch()
        await space.replace("a", "1")
        assert (await anext(watch)).changes[0].key == b"a"
        (tablet,) = cluster.tablets.values()
        tablet.leader = 1
        await space.replace("a", "2")
        assert (await anext(watch)).changes[0].value == b"2", "another leader alone is no reason"
        tablet.incarnation, tablet.leader = 7, 2
        with pytest.raises(Rejected, match="was recovered from one replica") as ended:
            async with asyncio.timeout(WAIT_S):
                await anext(watch)
        assert ended.value.code is Code.COMPACTED


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


async def test_a_command_says_when_no_change_can_come_and_when_they_can_again(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, masters=1, nodes=3) as cluster,
        AsyncClient(cluster.master_addresses) as client,
    ):
        space = await client.create_keyspace("s")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "stele.cli", "kv", "watch", "s", "--after", "0"),
            *("--masters", ",".join(cluster.master_addresses)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None and process.stderr is not None
        try:
            first = await space.replace("colour", "blue")
            assert await process.stdout.readline() == b"%d\tput\tcolour\tblue\n" % first
            for node in cluster.nodes[:2]:
                cluster.kill(node)
            said = (await process.stderr.readline()).decode()
            assert said.startswith("stele: no change can come at the moment: ")
            assert said.endswith("; still trying\n")
            for node in cluster.nodes[:2]:
                cluster.restart(node)
            second = await space.replace("colour", "red")
            assert await process.stdout.readline() == b"%d\tput\tcolour\tred\n" % second
            assert await process.stderr.readline() == b"stele: watching again; no change was left out\n"
        finally:
            process.kill()
            await process.wait()
