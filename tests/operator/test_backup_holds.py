"""What the hold of a backup costs, as the operator asks the nodes for it: real masters, nodes and files."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from stele.driver.keeping import pages_of
from stele.tablet.store import TabletStore
from stele_operator.held import EVERY_S, Held
from stele_operator.masters import MasterLink
from tests.tserver.history import settled, without_history
from tests.tserver.local import HASHED, SCHEMA, LocalCluster

ROWS = 2_000


async def test_the_cost_of_a_hold_is_that_of_all_replicas_and_unknown_while_a_leader_is_silent(
    tmp_path: Path,
) -> None:
    cluster, now = LocalCluster(tmp_path), [0.0]
    link = MasterLink(cluster.cluster_id, "test")
    held = Held(lambda namespace, name: link if name == "flights" else None, lambda: now[0])
    try:
        await cluster.start()
        async with cluster.client() as client:
            await client.create_keyspace("settings")
            table = await client.create_table("t", SCHEMA, HASHED, replication_factor=3)
            stores = await without_history(cluster, table)
            await table.write_arrow(pa.table({"id": range(ROWS), "name": ["before"] * ROWS}))
            mine = await table.hold("chain-b1", expires_in_s=600)
            assert await held.of("default", "flights", ["chain-b1"]) == {}, "nobody has seen the cluster yet"
            link.learn([cluster.master_address])
            view = await link._keeper.renew(pages_of(link._masters))
            link._catalog(view)
            young = await held.of("default", "flights", ["chain-b1", "chain-b0"])
            assert young["chain-b0"] is None and young["chain-b1"] is not None
            assert young["chain-b1"].bytes == 0

            await table.write_arrow(pa.table({"id": range(ROWS), "name": ["later"] * ROWS}))
            await settled(cluster, table)
            leaders = [led for node in cluster.running.values() for led in node.replicas if led.is_leader]
            costs = []
            for store in [led.machine for led in leaders if led.machine in stores]:
                assert isinstance(store, TabletStore)
                store.measure_holds()
                costs.append(sum(store.hold_costs.values()))
            assert all(costs) and len(costs) > 1, "each tablet keeps the rows from before"
            assert await held.of("default", "flights", ["chain-b1"]) == {"chain-b1": young["chain-b1"]}
            now[0] += EVERY_S
            (found,) = (await held.of("default", "flights", ["chain-b1"])).values()
            assert found is not None and found.bytes == 3 * sum(costs)
            assert abs(found.until_s - mine.expires.timestamp()) < 1 and not found.broken

            leader = next(name for name, node in cluster.running.items() if any(r.is_leader for r in node.replicas) and name != "master")  # fmt: skip
            await cluster.stop(leader)
            now[0] += EVERY_S
            assert await held.of("default", "flights", ["chain-b1"]) == {}, "its leader does not answer"
            assert await held.of("default", "another", ["chain-b1"]) == {}
    finally:
        await link.close()
        await cluster.close()
