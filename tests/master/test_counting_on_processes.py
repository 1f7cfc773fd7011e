"""Real processes under writes: masters 1, 3, 5, 3. One is killed on the way, and the first one leaves."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from stele.client import AsyncClient
from stele.driver.progress import Progress
from stele.driver.view import ClusterView
from stele.model.config import MemberType
from stele.model.errors import SteleError
from stele.model.ids import CATALOG_TABLET_ID
from stele.model.partition import HashPartition, PartitionSchema
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.proto import master_pb2 as pb
from stele.rpc.proto import tserver_pb2
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub
from tests.driver.test_moves_on_processes import SCHEMA, Writer, driving, until
from tests.harness import Cluster
from tests.harness.commands import stele

HASHED = PartitionSchema((HashPartition((0,), 3),))


def voters(view: ClusterView) -> set[str]:
    """The masters with a vote; none while another member is on its way."""
    (catalog,) = [t for t in view.tablets if t.tablet_id == CATALOG_TABLET_ID]
    peers = catalog.config.peers
    whole = all(p.member_type is MemberType.VOTER for p in peers) and not view.intents
    return {p.node_id for p in peers} if whole else set()


async def set_count(client: AsyncClient, masters: int) -> None:
    """Ask for so many; again until those that were started are heard."""
    deadline = time.monotonic() + 120
    while True:
        try:
            await client.masters.call("SetMasterCount", pb.SetMasterCountRequest(masters=masters))
            return
        except SteleError as exc:
            assert time.monotonic() < deadline, exc
        await asyncio.sleep(0.5)


def start(cluster: Cluster, count: int) -> None:
    """More masters, which wait for the catalog. They are told of those there already."""
    for _ in range(count):
        member = cluster._member("master", len(cluster.masters))
        cluster.masters.append(member)
        cluster.launch(member, "--join")


async def nodes_know(client: AsyncClient, cluster: Cluster, masters: set[str]) -> None:
    """Wait until each node reports to exactly these masters."""
    deadline = time.monotonic() + 120
    for node in cluster.nodes:
        while True:
            answer = await client.pool.unary(
                node.address,
                TabletServerServiceStub,
                "GetNodeStatus",
                tserver_pb2.GetNodeStatusRequest(),
                timeout_s=30,
            )
            if masters <= set(answer.masters):
                break
            assert time.monotonic() < deadline, (node.name, list(answer.masters), masters)
            await asyncio.sleep(0.5)


async def test_one_three_five_three_under_writes(tmp_path: Path) -> None:
    async with Cluster(tmp_path, masters=1, nodes=3) as cluster:
        first = cluster.masters[0]
        given = [first.address]  # all that client, driver and nodes are ever told
        async with AsyncClient(given, timeout_s=120) as client:
            await client.create_table("t", SCHEMA, HASHED, replication_factor=3)
            told: list[Progress] = []
            async with driving(given, told):
                writer = Writer(client, "t")
                start(cluster, 2)
                await set_count(client, 3)
                await until(client, lambda v: len(voters(v)) == 3)
                print(f"1 to 3: longest write {writer.take_longest_ms():.0f} ms")

                start(cluster, 2)
                await set_count(client, 5)
                view = await until(client, lambda v: bool(v.intents) or len(voters(v)) == 5)
                cluster.kill(cluster.member(view.leader_master))
                await asyncio.sleep(3)
                cluster.restart(cluster.member(view.leader_master))
                await until(client, lambda v: len(voters(v)) == 5)
                print(f"3 to 5, the leader killed: longest write {writer.take_longest_ms():.0f} ms")

                leave = pb.WantNodeRequest(node_id=id_to_pb(first.node_id), wanted=pb.WANTED_DRAINED)
                code, out = await stele(cluster, "master", "set-count", "3")
                assert code == 0 and "number of masters: 5 becomes 3" in out, out
                await client.masters.call("WantNode", leave)
                view = await until(client, lambda v: len(voters(v)) == 3 and first.node_id not in voters(v))
                code, out = await stele(cluster, "master", "set-count", "3", "--wait")
                assert code == 0 and "the cluster has 3 masters already" in out, out
                print(f"5 to 3, the first one leaves: longest write {writer.take_longest_ms():.0f} ms")

                staying = {m.address for m in cluster.masters if m.node_id in voters(view)}
                await nodes_know(client, cluster, staying)
                for member in cluster.masters:
                    if member.node_id not in voters(view):
                        await cluster.stop(member)
                await client.create_table("u", SCHEMA, HASHED, replication_factor=3)
                listed = await client.masters.call("ListMasters", pb.ListMastersRequest())
                assert {id_from_pb(m.node_id) for m in listed.masters} == voters(view)
                print(f"without the first one: longest write {writer.take_longest_ms():.0f} ms")
                await writer.stop()
            rows = await (await client.open_table("t")).scan().to_table()
            found = dict(zip(rows["id"].to_pylist(), rows["n"].to_pylist(), strict=True))
            assert all(found.get(i) == i * 7 for i in range(writer.written))
            print(f"{writer.written} rows, all there")
