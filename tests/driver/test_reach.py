"""A node that its peers cannot reach while the masters hear it. It is reported, and its replicas are made
elsewhere."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from stele.client import AsyncClient
from stele.client.admin import cluster_view
from stele.client.health import ClusterHealth, examine
from stele.driver.executor import Executor
from stele.driver.policy import Policy
from stele.model.errors import SteleError
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from stele.rpc.channels import ChannelPool
from stele.rpc.identity import Identity
from tests.harness import Cluster
from tests.harness.processes import STREAM_PORT, Member
from tests.linear.network import unavailable

SCHEMA = Schema.make([("id", "int64"), ("v", "string", True)], ["id"])


@contextmanager
def no_streams(cluster: Cluster, member: Member) -> Iterator[None]:
    """Nothing reaches this member's port of streams, and nothing from it reaches the others' ports. Its other
    ports work."""
    table = f"stele_reach_{cluster.network.replace('.', '_')}"
    rules = [
        f"add table inet {table}",
        f"add chain inet {table} cut {{ type filter hook output priority raw; }}",
        f"add rule inet {table} cut ip daddr {member.host} tcp dport {STREAM_PORT} drop",
        f"add rule inet {table} cut meta skgid {member.group} ip daddr {cluster.network}.0/24 tcp dport "
        f"{STREAM_PORT} drop",
    ]
    subprocess.run(["nft", "-f", "-"], input="\n".join(rules) + "\n", text=True, check=True)
    try:
        yield
    finally:
        subprocess.run(["nft", "delete", "table", "inet", table], check=True)


async def until(client: AsyncClient, true: Callable[[ClusterHealth], bool]) -> ClusterHealth:
    async with asyncio.timeout(300):
        while True:
            try:
                health = examine(await cluster_view(client.masters, timeout_s=10))
            except SteleError:
                health = None
            if health is not None and true(health):
                return health
            await asyncio.sleep(0.2)


def told_of(health: ClusterHealth) -> set[str]:
    """The tablets that have such a replica and could lose no other. A silent node is not reported so."""
    weak = (t for t in health.tablets if t.state == "under-replicated")
    return {t.tablet_id for t in weak if any("cannot be reached by its leader" in why for why in t.reasons)}


@pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "the network can be cut")
async def test_a_node_that_only_the_masters_hear_is_told_of_and_replaced(tmp_path: Path) -> None:
    async with Cluster(tmp_path, masters=1, nodes=4, groups=True) as cluster:
        client = AsyncClient(cluster.master_addresses)
        pool = ChannelPool(Identity(cluster.cluster_id))
        executor = Executor(pool, cluster.master_addresses, holder="test")
        soon = Policy(dead_after_ms=5_000, unreached_after_ms=6_000)
        try:
            table = await client.create_table("t", SCHEMA, PartitionSchema((HashPartition((0,), 2),)))
            for number in range(20):
                await table.put({"id": number, "v": "x"})
            health = await until(client, lambda health: health.healthy)
            on = {n for t in health.tablets if t.table_name == "t" for n in t.members}
            victim = next(n for n in cluster.nodes if n.node_id in on)
            mine = {t.tablet_id for t in health.tablets if victim.node_id in t.members}

            with no_streams(cluster, victim):
                await until(client, lambda health: told_of(health) == mine and not health.healthy)
            # Nobody writes, so only the leader's report shows it.
            await until(client, lambda health: health.healthy)

            with no_streams(cluster, victim):
                async with asyncio.timeout(300):
                    while any(victim.node_id in t.members for t in health.tablets) or not health.healthy:
                        with suppress(SteleError):  # repeat a pass that fails because the machine is busy
                            await executor.run_once(soon)
                            health = examine(await cluster_view(client.masters, timeout_s=10))
                        await asyncio.sleep(0.2)
                for number in range(20):
                    assert (await table.get({"id": number})) == {"id": number, "v": "x"}
        finally:
            await executor.release()
            await pool.close()
            await client.close()
