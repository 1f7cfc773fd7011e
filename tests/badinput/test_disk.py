"""A disk that is really full: writes are refused with DISK_FULL or go on by the others, nothing is lost, and it recovers."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stele.client import AsyncClient, AsyncTable
from stele.model.errors import Code, Corrupt, Retryable, SteleError
from stele.model.ids import NodeId, ReplicaId, new_id
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from stele.tserver.process import exit_code
from stele.wal import Log, LogOptions
from tests.harness import Cluster, Member
from tests.harness.compare import rows_that_all_replicas_hold
from tests.wal.simfs import SimFiles
from tests.wal.support import open_still, run_all, stream_of

SCHEMA = Schema.make([("id", "int64"), ("s", "string", True)], ["id"])
THREE = PartitionSchema((HashPartition((0,), 3),))
FOUR = PartitionSchema((HashPartition((0,), 4),))
DISK_MIB = 1024


@contextmanager
def small_disk(directory: Path, options: str = f"size={DISK_MIB}m") -> Iterator[None]:
    """A file system of its own at `directory`; skips where that is not allowed."""
    directory.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "stele-test", str(directory)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def fill(path: Path) -> None:
    """To the last byte."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            block = bytes(size)
            try:
                while True:
                    file.write(block)
            except OSError:
                pass


class Writer:
    """Puts rows one by one, from several callers, and counts what became of them."""

    def __init__(self, table: AsyncTable) -> None:
        self.table = table
        self.next = 0
        self.acknowledged: set[int] = set()
        self.unknown: set[int] = set()

    async def put(self, count: int) -> Counter[Code]:
        """How often each answer came."""
        said: Counter[Code] = Counter()

        async def one(number: int) -> None:
            try:
                await self.table.put({"id": number, "s": "x" * 1_000})
                self.acknowledged.add(number)
                said[Code.OK] += 1
            except SteleError as exc:
                said[exc.code] += 1
                if exc.code is Code.UNKNOWN_OUTCOME:
                    self.unknown.add(number)

        numbers = range(self.next, self.next + count)
        self.next += count
        await asyncio.gather(*(one(number) for number in numbers))
        return said

    async def check(self) -> None:
        found = set((await self.table.scan(["id"]).to_table())["id"].to_pylist())
        assert self.acknowledged <= found, f"lost: {sorted(self.acknowledged - found)[:10]}"
        assert found <= self.acknowledged | self.unknown


async def tablets_led_by(table: AsyncTable, node: Member) -> set[str]:
    """As the masters know it."""
    await table.locations.refresh()
    return {t.tablet_id for t in table.locations.tablets if t.target().node_id == node.node_id}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system takes root")
async def test_a_full_disk_loses_nothing_and_recovers(tmp_path: Path) -> None:
    volume = tmp_path / "c" / "node-1"
    with small_disk(volume):
        cluster = Cluster(tmp_path / "c", masters=1, nodes=3)
        async with cluster, AsyncClient(cluster.master_addresses, timeout_s=10.0) as client:
            node = cluster.nodes[1]
            writer = Writer(await client.create_table("t", SCHEMA, FOUR))
            alone = Writer(await client.create_table("alone", SCHEMA, THREE, replication_factor=1))
            assert await writer.put(400) == {Code.OK: 400}
            assert await alone.put(50) == {Code.OK: 50}
            assert len(await tablets_led_by(alone.table, node)) == 1

            fill(volume / "ballast")
            await writer.put(100)  # some of them before the node has seen it
            async with asyncio.timeout(100):
                while not any("nearly full" in line["event"] for line in cluster.log_lines(node)):
                    await asyncio.sleep(0.1)
            async with asyncio.timeout(100):  # its leaders have gone elsewhere, where there are others
                while (await writer.put(50)).keys() != {Code.OK} or await tablets_led_by(writer.table, node):
                    pass
            async with asyncio.timeout(100):  # what is slow has no answer in its time
                while (await alone.put(50)).keys() != {Code.OK, Code.DISK_FULL}:
                    pass
            assert node.running
            await writer.check()

            cluster.kill(node)
            cluster.restart(node)
            assert node.process is not None
            code = await asyncio.to_thread(node.process.wait, 100)
            assert code == 75, node.tail()
            assert node.tail().splitlines()[-1].startswith("stele: the disk is full"), node.tail()

            (volume / "ballast").unlink()
            cluster.restart(node)
            await cluster.wait_ready(node)
            async with asyncio.timeout(100):
                while (await writer.put(50) + await alone.put(50)).keys() != {Code.OK}:
                    pass
            await writer.check()
            await alone.check()
            held = await rows_that_all_replicas_hold(client, writer.table)
            assert len(writer.acknowledged) <= held <= len(writer.acknowledged | writer.unknown)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system takes root")
def test_a_disk_without_inodes_is_nearly_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", f"size={DISK_MIB}m,nr_inodes=400"):
        log = Log.open(tmp_path / "disk" / "wal", LogOptions(prepare=False), NodeId(new_id()), run_all)
        ballast = [tmp_path / "disk" / str(number) for number in range(300)]
        said = [(log.low_space, log.shared.no_space)]
        for some in ballast[:200], ballast[200:]:
            for one in some:
                one.touch()
            log.refresh_space()
            said.append((log.low_space, log.shared.no_space))
        for one in ballast:
            one.unlink()
        log.refresh_space()
        assert [*said, (log.low_space, log.shared.no_space)] == [
            (False, False),
            (True, False),
            (True, True),
            (False, False),
        ]
        log.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system takes root")
def test_a_disk_that_does_not_count_inodes_is_not_full_for_that(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", f"size={DISK_MIB}m,nr_inodes=0"):
        assert (os.statvfs(tmp_path / "disk").f_files, os.statvfs(tmp_path / "disk").f_favail) == (0, 0)
        log = Log.open(tmp_path / "disk" / "wal", LogOptions(prepare=False), NodeId(new_id()), run_all)
        assert not log.low_space and not log.shared.no_space
        log.close()


def refused(call: Callable[[], object]) -> SteleError:
    """What a call to a log that has failed raises."""
    with pytest.raises(Corrupt) as raised:
        call()
    return raised.value


def test_a_vote_that_finds_no_space_ends_the_node_as_a_full_disk_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Past the prepared part of the last segment a vote needs new blocks; an operator would give a damaged disk up."""
    files = SimFiles()
    log = open_still(files)
    stream = stream_of(log)
    log.turn()
    files.free = 0
    for term in range(1, 1000):
        stream.append_vote(term, ReplicaId(1))
        log.turn()
        if log.failed is not None:
            break
    assert isinstance(log.failed, Corrupt)
    later = [refused(lambda: stream.append_vote(2000, ReplicaId(1))), refused(log.checkpoint)]
    assert [exit_code(error) for error in (log.failed, *later)] == [75] * 3
    assert capsys.readouterr().err.count("the disk is full") == 3
    log.close()


def test_a_write_that_fails_ends_the_node_as_a_damaged_disk_does() -> None:
    files = SimFiles()
    log = open_still(files)
    files.write_error = True
    stream_of(log)
    log.turn()
    assert log.failed is not None
    assert [exit_code(error) for error in (log.failed, OSError(errno.EIO, "bad"), Corrupt("x"))] == [5] * 3


@pytest.mark.parametrize(
    "lacks",
    [errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM],
    ids=lambda n: errno.errorcode[n],
)
def test_what_a_node_lacks_never_counts_as_a_damaged_disk(lacks: int) -> None:
    lacking = OSError(lacks, os.strerror(lacks))
    assert exit_code(lacking) == exit_code(Retryable("not now")) == 75
