"""An older copy of a volume, put back by hand or from a storage snapshot: refused before it votes or acknowledges."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from stele.client import AsyncClient, AsyncTable
from stele.client.admin import cluster_view
from stele.model.errors import SteleError
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from stele.tserver.options import EXIT_VOLUME_OLD
from tests.harness import Cluster, Member
from tests.harness.commands import stele
from tests.harness.compare import rows_that_all_replicas_hold

SCHEMA = Schema.make([("id", "int64"), ("s", "string", True)], ["id"])
TWO = PartitionSchema((HashPartition((0,), 2),))
HEARTBEATS_S = 1.5
"""After this long every master has heard what a node logged before, where machines do not stand still."""
AWAY_MS = 10_000
"""Of a node that is silent for longer nothing is waited for."""


@asynccontextmanager
async def cluster_and_table(
    directory: Path, masters: int
) -> AsyncIterator[tuple[Cluster, AsyncClient, AsyncTable]]:
    """Three nodes with a table of two tablets, and its first hundred rows."""
    async with (
        Cluster(directory / "c", masters=masters, nodes=3) as cluster,
        AsyncClient(cluster.master_addresses) as client,
    ):
        table = await client.create_table("t", SCHEMA, TWO)
        await write(table, 0)
        yield cluster, client, table


async def write(table: AsyncTable, first: int) -> None:
    """100 rows."""
    ids = range(first, first + 100)
    await table.write_arrow(pa.table({"id": pa.array(ids, pa.int64()), "s": [f"row {i}" for i in ids]}))


async def write_and_tell(client: AsyncClient, table: AsyncTable, first: int) -> None:
    """100 rows, and time for a heartbeat to tell of them."""
    await write(table, first)
    written = time.monotonic()
    await asyncio.sleep(HEARTBEATS_S)
    with contextlib.suppress(SteleError):  # masters that are away are told of nothing
        while True:
            view = await cluster_view(client.masters, timeout_s=5)
            ages = [node.heartbeat_age_ms for node in view.nodes if node.heartbeat_age_ms < AWAY_MS]
            if max(ages, default=0) < (time.monotonic() - written) * 1_000:
                break
            await asyncio.sleep(0.1)


def starts_on_record(master: Member, node: Member) -> int:
    """How many starts of the node this master has put into its catalog."""
    lines = master.log_path.read_text(errors="replace").splitlines()
    return sum('"event": "node"' in line and f'"node": "{node.node_id}"' in line for line in lines)


async def restart_on_record(cluster: Cluster, master: Member, node: Member) -> None:
    """Start the node, and wait until the master has put this start into its catalog: on a busy machine that takes longer
    than a heartbeat."""
    before = starts_on_record(master, node)
    cluster.restart(node)
    await cluster.wait_ready(node)
    async with asyncio.timeout(60):
        while starts_on_record(master, node) == before:
            await asyncio.sleep(0.1)


def keep_copy(member: Member) -> Path:
    """The volume as it is now, as a snapshot of running storage would have it."""
    copy = member.directory.with_name(f"{member.name}.copy")
    shutil.rmtree(copy, ignore_errors=True)
    assert member.process is not None
    member.process.send_signal(signal.SIGSTOP)  # files that come and go meanwhile are in no snapshot
    try:
        return Path(shutil.copytree(member.directory, copy))
    finally:
        member.process.send_signal(signal.SIGCONT)


def put_in_place(member: Member, copy: Path) -> Path:
    """The copy becomes the volume; where the newest one is now."""
    newest = member.directory.with_name(f"{member.name}.newest")
    shutil.rmtree(newest, ignore_errors=True)
    member.directory.rename(newest)
    shutil.copytree(copy, member.directory)
    return newest


async def ended(member: Member, timeout_s: float = 100.0) -> int:
    """Its exit code."""
    assert member.process is not None
    return await asyncio.to_thread(member.process.wait, timeout_s)


async def refused(cluster: Cluster, member: Member) -> None:
    """Twice: the second start does not even ask."""
    for _ in range(2):
        cluster.restart(member)
        assert await ended(member) == EXIT_VOLUME_OLD, member.tail()
        assert "VolumeOld" in member.tail() and "older copy" in member.tail()
    assert json.loads((member.directory / "node.json").read_text())["refused"]


async def test_a_node_is_refused_and_healed(tmp_path: Path) -> None:
    async with cluster_and_table(tmp_path, masters=1) as (cluster, client, table):
        node = cluster.nodes[0]
        copy = keep_copy(node)
        await write_and_tell(client, table, 100)
        cluster.kill(node)
        newest = put_in_place(node, copy)
        await refused(cluster, node)
        assert await table.scan().count() == 200

        # The newest one is as good as ever.
        shutil.rmtree(node.directory)
        newest.rename(node.directory)
        cluster.restart(node)
        await cluster.wait_ready(node)
        await write(table, 200)
        assert await rows_that_all_replicas_hold(client, table) == 300

        # Masters that were started anew have it on record: what it told when it registered.
        copy = keep_copy(node)
        cluster.kill(node)
        (master,) = cluster.masters
        await restart_on_record(cluster, master, node)
        await write_and_tell(client, table, 300)
        cluster.kill(master)
        cluster.kill(node)
        put_in_place(node, copy)
        cluster.restart(master)
        await cluster.wait_ready(master)
        await refused(cluster, node)

        await cluster.wait_ready(cluster.add_node())
        code, out = await stele(cluster, "driver", "run", "--until-healthy", "--dead-after", "3")
        assert code == 0, out
        await write(table, 400)
        assert await rows_that_all_replicas_hold(client, table) == 500


async def test_a_master_is_refused(tmp_path: Path) -> None:
    async with cluster_and_table(tmp_path, masters=3) as (cluster, client, _):
        master = cluster.masters[1]
        copy = keep_copy(master)
        await write_and_tell(client, await client.create_table("u", SCHEMA, TWO), 0)
        cluster.kill(master)
        put_in_place(master, copy)
        await refused(cluster, master)
        assert {t.name for t in await client.list_tables()} == {"t", "u"}


async def test_without_masters_a_node_serves_until_they_refuse_it(tmp_path: Path) -> None:
    async with cluster_and_table(tmp_path, masters=1) as (cluster, client, table):
        one, other = cluster.nodes[:2]
        copy = keep_copy(one)
        await write_and_tell(client, table, 100)
        (master,) = cluster.masters
        cluster.pause(master)
        cluster.kill(one)
        cluster.kill(other)
        put_in_place(one, copy)
        cluster.restart(other)
        await write(table, 200)
        for _ in range(2):  # each start begins a segment of the log; the first one's end is what counts
            cluster.kill(one)
            one.log_path.unlink()
            cluster.restart(one)
            async with asyncio.timeout(100):
                while "without the masters' answer on" not in one.tail():
                    await asyncio.sleep(0.1)
        await write_and_tell(client, table, 300)
        cluster.resume(master)
        # What it logged without them does not make up for what it lost: the end that its start found counts.
        assert await ended(one) == EXIT_VOLUME_OLD, one.tail()
        assert await table.scan().count() == 400


@pytest.mark.parametrize("role", ["node", "master"])
async def test_the_newest_volume_is_welcome_after_an_older_copy_was_refused(
    tmp_path: Path, role: str
) -> None:
    """All are started at once, and masters that cannot judge yet hear the copy: they must not remember it."""
    async with cluster_and_table(tmp_path, masters=3) as (cluster, client, table):
        member = cluster.nodes[0] if role == "node" else cluster.masters[0]
        copy = keep_copy(member)
        # It registers after the copy was made, so the catalog knows more than the copy.
        await cluster.stop(member)
        cluster.restart(member)
        await cluster.wait_ready(member)
        await write_and_tell(client, table, 100)
        await write_and_tell(client, await client.create_table("u", SCHEMA, TWO), 0)
        for one in cluster.members:
            cluster.kill(one)
        newest = put_in_place(member, copy)
        for one in cluster.members:
            cluster.restart(one)
        assert await ended(member) == EXIT_VOLUME_OLD, member.tail()
        shutil.rmtree(member.directory)
        newest.rename(member.directory)
        cluster.restart(member)
        await cluster.wait_ready()
        await write(table, 200)
        assert await rows_that_all_replicas_hold(client, table) == 300


async def test_a_first_master_that_lost_its_volume_before_formation_is_formed(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "c", masters=3, nodes=0)
    cluster.directory.mkdir()
    first = ",".join(f"{m.node_id}={m.address}" for m in cluster.masters)
    try:
        for _ in range(2):  # two lives each, so that the new volume's first is not their second
            for master in cluster.masters:
                cluster.kill(master)
                cluster.launch(master, "--first-masters", first)
            await asyncio.sleep(HEARTBEATS_S)
        lost = cluster.masters[2]
        cluster.lose(lost)
        cluster.launch(lost, "--first-masters", first)
        await cluster.form()
        await cluster.wait_ready()
    finally:
        cluster.kill_all()
