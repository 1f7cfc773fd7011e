"""A master that accepts calls but never answers must not keep a driver from the masters that do."""

from __future__ import annotations

import asyncio
from pathlib import Path

from stele.driver.executor import Executor
from stele.driver.policy import Policy
from stele.model.errors import SteleError
from stele.rpc.channels import ChannelPool
from stele.rpc.identity import Identity
from tests.harness import Cluster


async def test_a_driver_goes_on_when_the_leader_master_goes_silent(tmp_path: Path) -> None:
    async with Cluster(tmp_path, masters=3, nodes=1) as cluster:
        pool = ChannelPool(Identity(cluster.cluster_id))
        executor = Executor(pool, cluster.master_addresses, holder="test")
        try:
            view = await executor.observe(Policy())
            leader = next(m for m in cluster.masters if m.node_id == view.leader_master)
            cluster.pause(leader)
            try:
                async with asyncio.timeout(120):
                    while True:
                        try:
                            view = await executor.observe(Policy())
                        except SteleError:
                            await asyncio.sleep(0.2)
                            continue
                        break
                assert view.leader_master not in ("", leader.node_id)
            finally:
                cluster.resume(leader)
        finally:
            await pool.close()
