"""Tables whose replicas keep no history of their own, and drop at once what they may. For tests of what holds keep."""

from __future__ import annotations

import asyncio

from stele.client import AsyncTable
from stele.model.ids import TabletId
from stele.tablet.compaction import run_job
from stele.tablet.store import TabletStore
from tests.consensus.cluster import wait_until
from tests.tserver.local import LocalCluster, machines_of


async def without_history(cluster: LocalCluster, table: AsyncTable) -> list[TabletStore]:
    """The stores of all replicas of a table, which from here on keep only what holds say."""
    found: list[TabletStore] = []
    for tablet in table.scan().plan.tablets:
        found += await machines_of(cluster, tablet.tablet_id)
    for store in found:
        store._history.default_us = 0
    return found


async def settled(cluster: LocalCluster, table: AsyncTable) -> None:
    """Flush and merge all replicas of a table. They drop what they may."""
    for tablet in table.scan().plan.tablets:
        for node in cluster.running.values():
            replica = node.replicas.current(TabletId(tablet.tablet_id))
            store = replica.machine if replica is not None else None
            if replica is None or not isinstance(store, TabletStore):
                continue
            await replica.storage.flush()
            await wait_until(lambda store=store: not store._merges._under_way)
            job = store.plan_compaction(full=True)
            if job is not None:
                store.install_compaction(await asyncio.to_thread(run_job, job))
