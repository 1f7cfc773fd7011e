"""Column files over an upgrade: format 1 until it is finalized, so that release 0.1.0 comes back to its volume; then format 2."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stele.client import AsyncClient
from stele.client.admin import finalize_version
from stele.model.cluster_version import CLUSTER_VERSION
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import TabletServerAdminServiceStub
from tests.harness.processes import Cluster
from tests.upgrade.release import unpacked
from tests.upgrade.test_volumes import rows_of
from tests.upgrade.volumes import TABLE, expected, row, unpack

READY_WITHIN_S = 300.0
MERGED_WITHIN_S = 120.0
Rows = dict[int, dict[str, object]]


def formats(cluster: Cluster) -> list[int]:
    """The format of each column file that the node has."""
    files = sorted(cluster.nodes[0].directory.rglob("store/rows-*"))
    return [path.read_bytes()[8] for path in files]


async def run(cluster: Cluster, program: Path | None) -> None:
    """Have all members run that release."""
    for member in (*cluster.nodes, *cluster.masters):
        if member.running:
            assert await cluster.stop(member, 120.0) == 0, member.tail()
        member.program = program
    for member in cluster.members:
        cluster.restart(member)
    await cluster.wait_ready(timeout_s=READY_WITHIN_S)


async def write_and_flush(client: AsyncClient, cluster: Cluster, wanted: Rows) -> None:
    """Add 200 rows, with columns that repeat, and have the node flush its tablets."""
    table = await client.open_table(TABLE)
    first = max(wanted) + 1
    for k in range(first, first + 200):
        wanted[k] = row(k)
        await table.upsert(wanted[k])
    for tablet in table.scan().plan.tablets:
        flush = tserver_pb2.FlushTabletRequest(tablet_id=id_to_pb(tablet.tablet_id))
        await client.pool.unary(
            cluster.nodes[0].address, TabletServerAdminServiceStub, "FlushTablet", flush, timeout_s=60
        )
    assert await rows_of(client) == wanted


@pytest.mark.timeout(900)
async def test_the_release_before_reads_its_volume_until_the_upgrade_is_finalized(tmp_path: Path) -> None:
    cluster, old = unpack(tmp_path / "cluster"), unpacked(tmp_path / "release")
    wanted: Rows = {**expected()}
    try:
        for program in (None, old, None):
            await run(cluster, program)
            async with AsyncClient(cluster.master_addresses, timeout_s=120.0) as client:
                assert await rows_of(client) == wanted
                await write_and_flush(client, cluster, wanted)
            assert set(formats(cluster)) == {1}, program
        async with AsyncClient(cluster.master_addresses, timeout_s=120.0) as client:
            assert await finalize_version(client.masters, timeout_s=60.0) == CLUSTER_VERSION
            async with asyncio.timeout(MERGED_WITHIN_S):
                while 2 not in formats(cluster):  # the node hears it by a heartbeat
                    await write_and_flush(client, cluster, wanted)
            async with asyncio.timeout(MERGED_WITHIN_S):
                while 1 in formats(cluster):
                    await write_and_flush(client, cluster, wanted)
                    await asyncio.sleep(1.0)
            await run(cluster, None)
            assert await rows_of(client) == wanted
            assert set(formats(cluster)) == {2}
    finally:
        cluster.kill_all()
