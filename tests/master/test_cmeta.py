"""Real processes: two of three masters are gone, one with its volume. `stele local cmeta rewrite` makes the third a working
catalog of one; the other returns, and is refused."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from stele.client import AsyncClient
from stele.client.admin import cluster_view, list_replicas
from stele.model.errors import SteleError
from stele.model.ids import CATALOG_TABLET_ID
from stele.model.incarnation import recoveries
from stele.model.schema import Schema
from stele.rpc.proto import common_pb2
from tests.harness import Cluster
from tests.harness.commands import stele

SCHEMA = Schema.make([("id", "int64"), ("n", "int64", True)], ["id"])
WITHIN_S = 120.0


async def test_one_master_left_of_three_becomes_a_working_catalog_of_one(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, masters=3, nodes=3) as cluster,
        AsyncClient(cluster.master_addresses, timeout_s=60) as client,
    ):
        await client.create_table("before", SCHEMA)
        await (await client.open_table("before")).put({"id": 1, "n": 7})
        await asyncio.sleep(2)
        left, returns, gone = (m for m in cluster.members if m.role == "master")
        code, said = await stele(cluster, "local", "cmeta", "rewrite", "--data-dir", str(left.directory))
        assert code == 2 and "another process uses it" in said, said
        for member in (returns, gone, left):
            cluster.kill(member)
        cluster.lose(gone)
        data_dir = str(left.directory)
        code, said = await stele(cluster, "local", "cmeta", "rewrite", "--data-dir", data_dir)
        print(said)
        assert code == 0 and "nothing was changed" in said and "incarnation 0" in said, said
        code, said = await stele(
            cluster, "local", "cmeta", "rewrite", "--data-dir", data_dir, "--tablet", "7" * 32
        )
        assert code == 2 and "holds no replica of tablet" in said, said
        code, said = await stele(
            cluster, "local", "cmeta", "rewrite", "--data-dir", data_dir, "--accept-data-loss"
        )
        print(said)
        assert code == 0 and "is the only voter from entry" in said and "incarnation 1-" in said, said

        began = time.monotonic()
        cluster.launch(left)
        deadline = began + WITHIN_S
        while True:
            try:
                view = await cluster_view(client.masters)
                break
            except SteleError:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.3)
        print(f"a catalog of one after {time.monotonic() - began:.1f} s")
        (catalog,) = [t for t in view.tablets if t.tablet_id.hex() == CATALOG_TABLET_ID]
        assert [p.node_id.hex() for p in catalog.committed_config.peers] == [left.node_id]
        assert recoveries(catalog.committed_config.incarnation) == 1
        await client.create_table("after", SCHEMA)
        await (await client.open_table("after")).put({"id": 2, "n": 14})
        rows = [row async for row in (await client.open_table("before")).scan()]
        assert rows == [{"id": 1, "n": 7}]

        cluster.launch(returns)

        async def refused() -> bool:
            try:
                here = await list_replicas(client.pool, returns.address)
            except SteleError:
                return False
            states = {(r.state, r.data_state) for r in here if r.tablet_id.hex() == CATALOG_TABLET_ID}
            return bool(states) and all(
                state == common_pb2.FAILED or data == common_pb2.TOMBSTONED for state, data in states
            )

        while not await refused():
            assert time.monotonic() < deadline, "the old master is not refused"
            await asyncio.sleep(0.3)
        await client.create_table("at_last", SCHEMA)
        code, said = await stele(cluster, "table", "list")
        assert code == 0 and all(name in said for name in ("before", "after", "at_last")), said
        view = await cluster_view(client.masters)
        (catalog,) = [t for t in view.tablets if t.tablet_id.hex() == CATALOG_TABLET_ID]
        assert [p.node_id.hex() for p in catalog.committed_config.peers] == [left.node_id]
