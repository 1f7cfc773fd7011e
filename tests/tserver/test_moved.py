"""All nodes of a cluster restart at once under other addresses, as pods do after a power failure of everything."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from stele.client import AsyncClient
from stele.driver.executor import Executor
from stele.driver.view import ClusterView
from stele.model.errors import Retryable, SteleError
from stele.model.ids import CATALOG_TABLET_ID
from stele.rpc.convert import id_to_pb
from stele.rpc.proto import consensus_pb2
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub
from stele_local.dns import SHIM
from tests.harness.processes import MASTER_PORT, Cluster, Member
from tests.master.harness import create_request
from tests.master.test_processes import PATIENT, Caller, all_run, drive

SERVICE = "masters.svc"


class Pods(Cluster):
    """Masters have names, which mean their present addresses. Each process is told, for ever, the names of those masters
    that there were when it first started; nodes also one that means whichever masters there are."""

    def __init__(self, directory: Path, *, masters: int, nodes: int) -> None:
        hosts = directory / "hosts.json"
        path = os.pathsep.join(filter(None, (str(SHIM), os.environ.get("PYTHONPATH"))))
        environment = {"STELE_LOCAL_HOSTS": str(hosts), "PYTHONPATH": path}
        super().__init__(directory, masters=masters, nodes=nodes, environment=environment)
        self._hosts = hosts
        self._told: dict[str, list[str]] = {}
        self._moves = 0

    def named(self, member: Member) -> str:
        """Its name, as its pod's."""
        return f"{member.name}.svc:{MASTER_PORT}"

    def masters_told(self, member: Member) -> list[str]:
        """As in its pod, which lives on."""
        service = [f"{SERVICE}:{MASTER_PORT}"] if member.role == "node" else []
        return self._told.setdefault(member.name, [*super().masters_told(member), *service])

    def launch(self, member: Member, *extra: str) -> None:
        """Its name is known from here on."""
        names = {f"{m.name}.svc": [m.host] for m in self.masters}
        aside = self._hosts.with_suffix(".new")
        aside.write_text(json.dumps({**names, SERVICE: [m.host for m in self.masters]}))
        aside.replace(self._hosts)
        super().launch(member, *extra)

    async def replace_master(self, lost: Member, caller: Caller) -> None:
        """Its machine is lost; the driver puts a new one in its place."""
        view = await caller.until(lambda v: v.settled)
        number = 1 + max(int(m.name.rpartition("-")[2]) for m in self.masters)
        self.lose(lost)
        fresh = self._member("master", number)
        self.masters[self.masters.index(lost)] = fresh
        self.launch(fresh, "--join")
        executor = Executor(caller.pool, self.master_addresses, holder=f"test-{number}", ttl_ms=5_000)
        assert view.node(lost.node_id) is not None
        await drive(executor, caller, {lost.node_id}, replace(PATIENT, lost=frozenset({lost.node_id})))
        await executor.release()
        await self.wait_ready(fresh)

    def switch_off(self) -> None:
        """Everything; from here on every member has another address."""
        self.kill_all()
        self._moves += 1
        for member in self.members:
            network, _, last = member.host.rpartition(".")
            member.host = f"{network}.{int(last) + 60}"


def led(view: ClusterView) -> bool:
    """Every node that is there is heard, and every tablet led."""
    return all(t.leader_node for t in view.tablets) and all(
        n.ever_heard and n.heartbeat_age_ms < 2_000 for n in view.nodes if n.state.name == "ACTIVE"
    )


async def write(cluster: Cluster, value: int) -> None:
    """One more row, and all there are can be read."""
    async with AsyncClient(cluster.master_addresses) as client:
        table = await client.open_table("t")
        row = {f.name: value if pa.types.is_integer(f.type) else "x" for f in table.arrow_schema}
        deadline = asyncio.get_running_loop().time() + 120
        while True:
            try:
                await asyncio.wait_for(table.put(row), 60)
                found = await asyncio.wait_for(table.scan().to_table(), 60)
                break
            except (Retryable, TimeoutError) as exc:
                assert asyncio.get_running_loop().time() < deadline, f"no tablet found its peers: {exc}"
        assert sorted(found["id"].to_pylist()) == list(range(1, value + 1))


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
        await caller.until(led)
        await write(cluster, 1)


async def test_masters_that_took_the_place_of_others_are_found(tmp_path: Path) -> None:
    """They stand in the catalog's configuration under addresses of their time, first masters under names. One cluster for
    all stories: each begins with one more that was replaced."""
    async with Pods(tmp_path, masters=3, nodes=3) as cluster:
        caller = Caller(cluster)
        await caller.call("CreateTable", create_request("t", buckets=2, rf=3))
        await caller.until(lambda v: all_run(v, 2))
        await write(cluster, 1)
        await a_leader_is_found_by_nodes_that_were_told_of_others(cluster)
        await two_find_each_other_without_the_last_first_master(cluster)
        await three_find_each_other(cluster)


async def a_leader_is_found_by_nodes_that_were_told_of_others(cluster: Pods) -> None:
    """Of the first masters, two of which are there and follow it."""
    await cluster.replace_master(cluster.masters[2], Caller(cluster))
    fresh = cluster.masters[2]
    cluster.switch_off()
    for master in cluster.masters:
        cluster.launch(master)
    caller = Caller(cluster)
    request = consensus_pb2.LeaderStepDownRequest(
        tablet_id=id_to_pb(CATALOG_TABLET_ID), target_node=id_to_pb(fresh.node_id)
    )
    while (view := await caller.until(lambda v: v.settled)).leader_master != fresh.node_id:
        leader = cluster.member(view.leader_master)
        try:
            await caller.pool.unary(leader.address, ConsensusServiceStub, "LeaderStepDown", request)
        except SteleError:
            await asyncio.sleep(0.2)
    for node in cluster.nodes:
        cluster.launch(node)
    await caller.until(led)
    await write(cluster, 2)


async def two_find_each_other_without_the_last_first_master(cluster: Pods) -> None:
    await cluster.replace_master(cluster.masters[1], Caller(cluster))
    cluster.switch_off()
    first = cluster.masters.pop(0)
    for member in cluster.members:
        cluster.launch(member)
    await Caller(cluster).until(lambda v: all(t.leader_node for t in v.tablets))
    await write(cluster, 3)
    cluster.masters.insert(0, first)


async def three_find_each_other(cluster: Pods) -> None:
    await cluster.replace_master(cluster.masters[0], Caller(cluster))
    cluster.switch_off()
    for member in cluster.members:
        cluster.launch(member)
    await Caller(cluster).until(led)
    await write(cluster, 4)
