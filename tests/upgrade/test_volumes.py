"""Volumes that release 0.1.0 wrote: this release serves them, writes nothing new until it is finalized, and then alters."""

from __future__ import annotations

from pathlib import Path

import pytest

from stele.client import AsyncClient
from stele.client.admin import cluster_versions, finalize_version
from stele.client.columns import column
from stele.model.cluster_version import CLUSTER_VERSION
from stele.model.errors import Code, Rejected
from tests.upgrade.volumes import KEYS, ROWS, TABLE, expected, row, unpack


async def rows_of(client: AsyncClient) -> dict[int, dict[str, object]]:
    """All rows of the table, by key."""
    table = await client.open_table(TABLE)
    return {r["k"]: r for r in (await table.scan().to_table()).to_pylist()}


@pytest.mark.timeout(900)
async def test_volumes_of_release_0_1_0_are_served_finalized_and_altered(tmp_path: Path) -> None:
    cluster = unpack(tmp_path / "cluster")
    try:
        for member in cluster.members:
            cluster.restart(member)
        await cluster.wait_ready(timeout_s=300.0)
        async with AsyncClient(cluster.master_addresses) as client:
            assert await rows_of(client) == expected()
            space = await client.keyspace("keys")
            assert dict(await space.list()) == KEYS
            table = await client.open_table(TABLE)
            await table.insert(row(ROWS))
            more = [column("more", "int64", default=7)]
            with pytest.raises(Rejected) as failure:
                await table.alter(add=more)
            assert failure.value.code is Code.UNSUPPORTED_VERSION
            with pytest.raises(Rejected, match="this needs cluster version 2, but the cluster has 1"):
                await table.hold("h", timeout_s=60.0)
            versions = await cluster_versions(client.masters)
            assert (versions.finalized, versions.possible) == (1, CLUSTER_VERSION)
            assert await finalize_version(client.masters, timeout_s=60.0) == CLUSTER_VERSION
            await table.alter(add=more, timeout_s=120.0)
            for member in (*cluster.nodes, *cluster.masters):
                assert await cluster.stop(member, 120.0) == 0
            for member in cluster.members:
                cluster.restart(member)
            await cluster.wait_ready(timeout_s=300.0)
            wanted = {k: {**r, "more": 7} for k, r in {**expected(), ROWS: row(ROWS)}.items()}
            await table.refresh()
            assert await rows_of(client) == wanted
            assert not (await table.hold("h", timeout_s=60.0)).broken
            assert (await cluster_versions(client.masters)).finalized == CLUSTER_VERSION
    finally:
        cluster.kill_all()
