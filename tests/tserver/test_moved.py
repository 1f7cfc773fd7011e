"""All nodes of a cluster restart at once under other addresses, as pods do after a power failure of everything."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pyarrow as pa

from stele.client import AsyncClient
from stele.driver.view import ClusterView
from stele.model.errors import Retryable
from tests.harness.processes import Cluster
from tests.master.harness import create_request
from tests.master.test_processes import Caller, all_run


async def test_tablets_find_their_peers(tmp_path: Path) -> None:
    async with Cluster(tmp_path, masters=1, nodes=3) as cluster:
        caller = Caller(cluster)
        await caller.call("CreateTable", create_request("t", buckets=2, rf=3))
        await caller.until(lambda v: all_run(v, 2))
        for node in cluster.nodes:
            cluster.kill(node)
        for number, node in enumerate(cluster.nodes):
            node.host = node.host.rsplit(".", 1)[0] + f".{101 + number}"
            cluster.launch(node)

        def led(view: ClusterView) -> bool:
            """Every node is heard, and every tablet led."""
            return all(t.leader_node for t in view.tablets) and all(
                n.heartbeat_age_ms < 2_000 for n in view.nodes
            )

        await caller.until(led)
        async with AsyncClient(cluster.master_addresses) as client:
            table = await client.open_table("t")
            row = {f.name: 1 if pa.types.is_integer(f.type) else "x" for f in table.arrow_schema}
            deadline = asyncio.get_running_loop().time() + 30
            while True:
                try:
                    await asyncio.wait_for(table.put(row), 10)
                    break
                except (Retryable, TimeoutError) as exc:
                    assert asyncio.get_running_loop().time() < deadline, f"no tablet found its peers: {exc}"
