"""Replicas that had FAILED on a node that is started again: nobody gives them up before it has told how they are."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from stele.client.admin import cluster_view
from stele.consensus.superblock import SUPERBLOCK
from stele.driver.executor import Executor
from stele.driver.policy import Policy
from stele.driver.steps import Blocked
from stele.driver.view import ClusterView, TabletView
from stele.driver.wire import view_from_pb
from stele.model.ids import TabletId
from stele.rpc.channels import ChannelPool
from stele.rpc.identity import Identity
from tests.consensus.cluster import wait_until
from tests.tserver.local import SCHEMA, LocalCluster, count, fill

NODES = 4  # of the cluster

POLICY = Policy(dead_after_ms=600_000, unreached_after_ms=600_000)


class HeldFile:
    """A file whose readers get its content only once it is let go: meanwhile it is a pipe."""

    def __init__(self, path: Path) -> None:
        self._path, self._pipe, self._aside = path, path.with_name("pipe"), path.with_name("aside")
        shutil.copyfile(path, self._aside)
        os.mkfifo(self._pipe)
        path.unlink()
        os.link(self._pipe, path)

    def let_go(self) -> None:
        """Those that read it now, and all later ones, get what it holds."""
        os.replace(self._aside, self._path)
        pipe = os.open(self._pipe, os.O_RDWR)  # waits for no reader, where there is none
        os.write(pipe, self._path.read_bytes())
        os.close(pipe)
        self._pipe.unlink()


@asynccontextmanager
async def driver(cluster: LocalCluster) -> AsyncIterator[Executor]:
    pool = ChannelPool(Identity(cluster.cluster_id))
    executor = Executor(pool, [cluster.master_address], holder="test")
    try:
        yield executor
    finally:
        await executor.release()
        await pool.close()


async def seen(cluster: LocalCluster, tablet_id: str) -> tuple[ClusterView, TabletView]:
    """By the masters alone."""
    async with cluster.client() as client:
        view = view_from_pb(await cluster_view(client.masters))
    tablet = view.tablet(TabletId(tablet_id))
    assert tablet is not None
    return view, tablet


async def test_a_sound_replica_is_not_given_up_while_its_node_opens_others(cluster: LocalCluster) -> None:
    """Its leader still said that it has FAILED: a replacement was begun, and it was demoted."""
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA)
        tablet_id = table.locations.tablets[0].tablet_id
        await fill(client, 10)
    name, victim = next(
        (name, replica)
        for name, node in cluster.running.items()
        for replica in node.replicas
        if replica.tablet_id == tablet_id and not replica.is_leader
    )

    async def leader_says_failed() -> bool:
        _, tablet = await seen(cluster, tablet_id)
        return any(victim.replica_id in r.failed_peers for r in tablet.replicas)

    victim.fail("applying: lacks memory")
    async with asyncio.timeout(60):
        while not await leader_says_failed():
            await asyncio.sleep(0.05)
    superblock = victim.directory / SUPERBLOCK
    await cluster.stop(name)
    held = HeldFile(superblock)
    node = await cluster.launch(name)
    try:
        async with asyncio.timeout(60):
            while True:
                view, tablet = await seen(cluster, tablet_id)
                told = view.node(node.node_id)
                if told is not None and told.incarnation == node.incarnation:
                    break
                await asyncio.sleep(0.05)
        assert tablet.report(victim.replica_id, node.node_id) is None and not node.replicas.opened
        async with driver(cluster) as executor:
            for _ in range(5):
                report = await executor.run_once(POLICY)
                # Where another leads by now it knows of no failure.
                assert all(isinstance(o.step, Blocked) for o in report.outcomes), report.outcomes
    finally:
        held.let_go()
    await wait_until(lambda: node.replicas.opened, timeout_s=60)
    async with driver(cluster) as executor, asyncio.timeout(60):
        while not (await executor.run_once(POLICY)).idle:
            await asyncio.sleep(0.05)
        view, after = await seen(cluster, tablet_id)
        assert after.config == tablet.config and not view.intents
    async with cluster.client() as client:
        assert await count(client) == 10
