"""How large replicas are and how far they have come: asked of nodes, which tell the masters of roles and configurations only."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

import pytest

from stele.consensus.replica import Replica
from stele.driver.executor import Executor
from stele.driver.orders import Orders
from stele.driver.policy import Policy
from stele.driver.steps import DrainNode
from stele.driver.witness_starts import WitnessStarts
from stele.model.ids import NodeId, TabletId, new_id
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import consensus_pb2
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub
from tests.client.commands import Run, runner
from tests.consensus.cluster import WAIT_S, wait_until
from tests.tserver.local import SCHEMA, LocalCluster, fill


async def settled(cluster: LocalCluster, tablet_id: str) -> dict[str, Replica]:
    """Its three replicas by the names of their nodes, once all of them have applied and flushed what was written."""

    def there() -> dict[str, Replica]:
        nodes = cluster.running.items()
        return {name: n.replicas.get(tablet_id) for name, n in nodes if n.replicas.holds(tablet_id)}

    def applied() -> bool:
        replicas = there().values()
        last = max((r.applied_index for r in replicas if r.is_leader), default=1 << 63)
        return len(replicas) == 3 and all(r.applied_index >= last for r in replicas)

    await wait_until(applied, timeout_s=60)
    for replica in there().values():
        await replica.storage.flush()
    return there()


async def described(run: Run, tablet_id: str, wanted: Callable[[dict[str, str]], bool]) -> None:
    """Until `stele tablet describe` says so, its rows by their first word: a node that is slow gives no answer in time."""
    give_up = time.monotonic() + WAIT_S
    while True:
        code, out, err = await run("tablet", "describe", tablet_id)
        assert code == 0, err
        if wanted({line.split()[0]: line for line in out.splitlines()[2:]}):
            return
        assert time.monotonic() < give_up, out


async def test_a_tablet_is_described_by_its_nodes_and_of_one_that_is_off_with_the_age_of_its_report(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runner(cluster, monkeypatch)
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA)
        tablet_id = table.locations.tablets[0].tablet_id
        await fill(client, 5000)
        replicas = await settled(cluster, tablet_id)

        def told(rows: dict[str, str], *names: str) -> bool:
            """Whether these are told as they are now."""
            those = [replicas[name].status() for name in names]
            seen = [rows[str(s.replica_id)] for s in those]
            sizes = [f"  {s.bytes_on_disk:,}  " in row for s, row in zip(those, seen)]
            return all(sizes) and all(row.endswith("  now") for row in seen)

        assert all(r.status().bytes_on_disk > 5000 for r in replicas.values())
        await described(run, tablet_id, lambda rows: told(rows, *replicas))
        reports = json.loads((await run("tablet", "describe", tablet_id, "--json"))[1])["replicas"]
        assert {r["nodeId"] for r in reports} == {cluster.ids[name] for name in replicas}
        off = next(name for name, replica in replicas.items() if not replica.is_leader)
        others = [name for name in replicas if name != off]
        row = str(replicas[off].replica_id)
        await cluster.stop(off)
        await described(run, tablet_id, lambda rows: told(rows, *others) and " s ago" in rows[row])


async def test_a_copy_is_described_as_far_as_it_has_come(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA)
        tablet_id = table.locations.tablets[0].tablet_id
        await fill(client, 40_000)
        replicas = await settled(cluster, tablet_id)
        source = cluster.running[next(iter(replicas))]
        cluster.ids["node-3"] = NodeId(new_id())
        fresh = await cluster.launch("node-3")
        await wait_until(lambda: fresh.replicas.opened)
        order = consensus_pb2.StartTabletCopyRequest(
            tablet_id=id_to_pb(tablet_id),
            replica_id=9,
            source_node=id_to_pb(source.node_id),
            source_address=source.address,
            bytes_per_second=1,
        )
        await client.pool.unary(fresh.address, ConsensusServiceStub, "StartTabletCopy", order)
        (copy,) = fresh.replicas.copies.values()
        await wait_until(lambda: copy.progress.bytes_total > 0, timeout_s=60)
        run = runner(cluster, monkeypatch)
        await described(run, tablet_id, lambda rows: "9" in rows)
        while not copy.progress.bytes_done:
            copy.pace(3 - copy.bytes_per_second)  # what waits goes on, and nobody tells the masters
            await asyncio.sleep(0.1)

        def told(rows: dict[str, str]) -> bool:
            progress = copy.progress
            return f"copying, {progress.bytes_done:,}/{progress.bytes_total:,} bytes" in rows["9"]

        await described(run, tablet_id, told)
        assert copy.progress.bytes_done < copy.progress.bytes_total


async def test_a_driver_knows_how_large_a_tablet_is_that_leaves_a_draining_node(
    cluster: LocalCluster,
) -> None:
    """Where it goes there has to be room for it as it is now, not as it was when its leader began to lead."""
    policy = Policy()
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA)
        tablet_id = table.locations.tablets[0].tablet_id
        await fill(client, 5000)
        replicas = await settled(cluster, tablet_id)
        executor = Executor(client.pool, [cluster.master_address], holder="test")
        claim = await executor.ensure_claim()
        drain = DrainNode(TabletId(""), -1, "", cluster.ids[next(iter(replicas))], False)
        orders = Orders(client.pool, executor.masters, claim.epoch, policy, WitnessStarts())
        await orders.give(drain, await executor.observe(policy))
        known = 0
        async with asyncio.timeout(WAIT_S):
            while not known:  # a node that is slow gives no answer in time
                tablet = (await executor.observe(policy)).tablet(TabletId(tablet_id))
                assert tablet is not None
                known = max(r.bytes_on_disk for r in tablet.replicas)
        assert known in {r.status().bytes_on_disk for r in replicas.values()}
