"""What clients ask of leaders: counted by nodes, told to masters when it changes, and never while nothing is asked."""

from __future__ import annotations

import asyncio

import pyarrow as pa

from stele.client.admin import cluster_view
from stele.client.step_down import step_down
from stele.consensus.replica import Replica
from stele.driver.wire import view_from_pb
from stele.model.ids import CATALOG_TABLET_ID
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import master_pb2
from stele.tserver.leader_load import CARRIED_MS, EVERY_MS, TOLD_MAX, LeaderLoad, scan_units, write_units
from stele.tserver.node import Node
from stele.tserver.scan import Scans
from tests.consensus.cluster import wait_until
from tests.tserver.local import HASHED, SCHEMA, LocalCluster, master_of


class Hours:
    """The time by which the loads of a cluster's nodes are worked out: only when a test says so."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.nodes = [node for name, node in cluster.running.items() if name != "master"]
        self.now_ms = 1 << 40
        self.pass_time(0)

    def pass_time(self, ms: int) -> list[Replica]:
        """Nodes look, and report what is due. Returns that."""
        self.now_ms += ms
        found: list[Replica] = []
        for node in self.nodes:
            due = node.load.look(self.now_ms)
            for replica in due:
                node.heartbeater.load_changed(replica.superblock.key)
            found += due
        return found

    def until_rest(self) -> None:
        """Everything is forgotten."""
        for _ in range(200):
            self.pass_time(EVERY_MS)
        assert not any(node.load.total for node in self.nodes)


def leader_on(nodes: list[Node], tablet_id: str) -> tuple[Node, Replica]:
    """The leader of a tablet."""
    return next(
        (node, replica)
        for node in nodes
        for replica in node.replicas
        if replica.tablet_id == tablet_id and replica.is_leader
    )


def asked(nodes: list[Node]) -> dict[str, int]:
    """What was counted since the last look, by tablet."""
    return {r.tablet_id: units for node in nodes for r, units in node.load._work.items() if r.is_leader}


async def test_writes_reads_and_scans_count(cluster: LocalCluster) -> None:
    hours = Hours(cluster)
    nodes = hours.nodes

    def counted() -> int:
        found = sum(asked(nodes).values())
        hours.pass_time(EVERY_MS)
        return found

    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA)
        hours.pass_time(EVERY_MS)
        for number in range(10):
            await table.put({"id": number, "name": "n"})
        assert counted() == 10
        rows = pa.table({"id": list(range(1_000)), "name": ["x" * 100] * 1_000})
        await table.write_arrow(rows)
        assert 25 <= counted() <= 40, "110 KiB in one block"
        assert await table.get({"id": 3}) is not None
        assert counted() == 2
        assert len(await table.get_many([{"id": n} for n in range(100)])) == 100
        assert counted() >= 101
        assert await table.scan().count() == 1_000
        await wait_until(lambda: bool(asked(nodes)))
        assert 1 <= counted() <= 20
        space = await client.create_keyspace("k")
        await asyncio.sleep(0)
        hours.pass_time(EVERY_MS)
        await space.replace("a", b"1")
        assert counted() == 1
        assert await space.read("a") == b"1"
        assert counted() >= 1


async def test_a_scan_that_its_client_ends_early_counts(cluster: LocalCluster) -> None:
    """As with a limit. It counted nothing, however often it was asked for."""
    nodes = Hours(cluster).nodes
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA)
        node, replica = leader_on(nodes, table.locations.tablets[0].tablet_id)
        scans = Scans(node.plans.plan, node.replicas, node.scan_memory, node.load)
        batch = pa.record_batch({"name": ["x" * (100 << 10)]})
        before = node.load._work[replica]
        rows = scans._counted(replica, (batch for _ in range(2)))
        next(rows)
        rows.close()  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        assert node.load._work[replica] - before == 1 + scan_units(batch.nbytes)


async def test_masters_hear_of_a_load_and_of_its_end_and_then_of_nothing(cluster: LocalCluster) -> None:
    hours = Hours(cluster)
    master = master_of(cluster.running["master"])
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, HASHED)
        (tablet_id, *_) = [t.tablet_id for t in table.locations.tablets]
        node, replica = leader_on(hours.nodes, tablet_id)
        hours.pass_time(EVERY_MS)
        node.load.add(replica, 5_000)
        assert hours.pass_time(EVERY_MS) == [replica]
        assert replica.load == node.load.total == 159, "a sixth of 1,000 a second, after 5 s of 20"

        async def told() -> tuple[int, int | None, int]:
            """Of the tablet, of its node, and of all others."""
            view = view_from_pb(await cluster_view(client.masters))
            loads = {t.tablet_id: max((r.load for r in t.replicas), default=0) for t in view.tablets}
            seen = view.node(node.options.node_id)
            mine = loads.pop(tablet_id)
            return mine, seen.load if seen is not None else None, sum(loads.values())

        async def until(wanted: tuple[int, int, int]) -> None:
            async with asyncio.timeout(60):
                while await told() != wanted:
                    await asyncio.sleep(0.05)

        await until((159, 159, 0))
        node.load.add(replica, 900)
        assert hours.pass_time(EVERY_MS) == [], "less than a quarter of it"
        hours.until_rest()
        assert replica.load == 0
        await until((0, 0, 0))

        # At rest nothing of it is sent, and nothing is written.
        lead, changes = master.lead, master.view_changes
        assert lead is not None and changes is not None
        index, place = (
            lead.catalog.opid.index,
            await client.masters.call(
                "GetClusterView",
                master_pb2.GetClusterViewRequest(since=master_pb2.ViewPlacePB(epoch=changes.epoch)),
            ),
        )
        heard = life_sequences(cluster)
        for _ in range(100):
            assert hours.pass_time(EVERY_MS) == []
        await wait_until(lambda: all(now > was + 3 for now, was in zip(life_beats(cluster), heard[1])))
        assert life_sequences(cluster)[0] == heard[0], "a report was sent"
        again = await client.masters.call(
            "GetClusterView", master_pb2.GetClusterViewRequest(since=place.upto)
        )
        assert {t.tablet_id for t in again.tablets} <= {id_to_pb(CATALOG_TABLET_ID)}
        assert lead.catalog.opid.index == index


def life_sequences(cluster: LocalCluster) -> tuple[list[int], list[int]]:
    """The numbers of the last heartbeats with a report, and when the last ones came, by node."""
    lives = [master_of(cluster.running["master"]).liveness.nodes[n] for n in cluster.ids.values()]
    return [life.sequence for life in lives], life_beats(cluster)


def life_beats(cluster: LocalCluster) -> list[int]:
    """When each node was heard last."""
    return [master_of(cluster.running["master"]).liveness.nodes[n].heard_ms for n in cluster.ids.values()]


async def test_a_leader_that_hands_over_tells_its_last_load_for_a_minute(cluster: LocalCluster) -> None:
    """Its successor counts from 0. Otherwise drivers would take its node for an idle one."""
    hours = Hours(cluster)
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA)
        (tablet_id,) = [t.tablet_id for t in table.locations.tablets]
        node, replica = leader_on(hours.nodes, tablet_id)
        for _ in range(20):
            node.load.add(replica, 5_000)
            hours.pass_time(EVERY_MS)
        load = replica.load
        assert load > 700
        other = next(n for n in hours.nodes if n is not node)
        await step_down(client.masters, client.pool, tablet_id, to=other.options.node_id)
        await wait_until(lambda: leader_on(hours.nodes, tablet_id)[0] is other)
        new = leader_on(hours.nodes, tablet_id)[1]
        told: list[tuple[int, int]] = []
        for _ in range(1 + CARRIED_MS // EVERY_MS):
            other.load.add(new, 5_000)
            hours.pass_time(EVERY_MS)
            told.append((replica.status().load, new.status().load))
        assert {before for before, _ in told[:-1]} == {load} and node.load.total == 0
        assert told[-1][0] == 0 and told[-1][1] > load / 2
        assert max(told[-1]) > 0.75 * load


async def test_few_loads_are_told_at_once_and_the_largest_first(cluster: LocalCluster) -> None:
    hours = Hours(cluster)
    async with cluster.client() as client:
        table = await client.create_table("t", SCHEMA, HASHED)
        _, replica = leader_on(hours.nodes, table.locations.tablets[0].tablet_id)
        load = LeaderLoad()
        load.look(0)
        others = [Standing(number) for number in range(2 * TOLD_MAX)]
        for other in others:
            load.add(other, 1_000 + 100 * other.number)  # type: ignore[arg-type]
        load.add(replica, 1 << 20)
        told = load.look(EVERY_MS)
        assert len(told) == TOLD_MAX and told[0] is replica and told[1] is others[-1]  # type: ignore[comparison-overlap]
        assert len(load.look(2 * EVERY_MS)) == TOLD_MAX, "the others are told next"
        replica.load = 0
        assert write_units(0) == 1 and write_units(8_192) == 3


class Standing:
    """A leader that is asked for something."""

    is_leader = running = True

    def __init__(self, number: int) -> None:
        self.number = number
        self.load = 0
