"""Masters and nodes as they run, but in the test's own event loop: real sockets on loopback, real files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from stele.client import AsyncClient
from stele.client.admin import form_masters
from stele.consensus.ports import ReplicaOptions
from stele.master.leadership import MasterOptions
from stele.master.master import Master
from stele.master.server import MasterExtension, start_master
from stele.model.errors import Retryable
from stele.model.ids import ClusterId, NodeId, TabletId, new_id
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from stele.tserver.node import Node, start_node
from stele.tserver.options import FirstMaster, NodeOptions
from tests.consensus.cluster import STEADY, WAIT_S, wait_until
from tests.harness.loopback import Loopback
from tests.harness.segments import use_small_segments

SCHEMA = Schema.make([("id", "int64"), ("name", "string")], ["id"])
HASHED = PartitionSchema((HashPartition((0,), 4, 0),), None)

use_small_segments()


class LocalCluster:
    """One master and some nodes."""

    def __init__(
        self,
        directory: Path,
        nodes: int = 3,
        master_options: MasterOptions | None = None,
        *,
        replica: ReplicaOptions = STEADY,
    ) -> None:
        self.directory = directory
        self._replica = replica
        self.master_options = master_options
        self.cluster_id = ClusterId(new_id())
        self.fork_id = ""
        self._loopback = Loopback()
        self.network = self._loopback.prefix
        self.ids = {name: NodeId(new_id()) for name in ("master", *(f"node-{i}" for i in range(nodes)))}
        self.running: dict[str, Node] = {}

    def options(self, name: str, *, first: bool = False) -> NodeOptions:
        number = list(self.ids).index(name) + 1
        host = f"{self.network}.{number}"
        master = f"{self.network}.1:7051"
        address = master if name == "master" else f"{host}:7050"
        return NodeOptions(
            data_dir=self.directory / name,
            node_id=self.ids[name],
            cluster_id=self.cluster_id,
            listen=address,
            advertise=address,
            masters=(master,),
            machine=f"m{number}",
            zone=f"z{number}",
            role="master" if name == "master" else "node",
            http_port=7080,
            flight_port=7052,
            first_masters=(FirstMaster(self.ids["master"], master),) if first else (),
            heartbeat_s=0.2,
            replica=self._replica,
            fork_id=self.fork_id,
        )

    @property
    def master_address(self) -> str:
        return f"{self.network}.1:7051"

    def client(self) -> AsyncClient:
        return AsyncClient([self.master_address], timeout_s=60, first_contact_s=60)

    async def start(self) -> LocalCluster:
        await self.launch("master", first=True)
        await self.form()
        for name in self.ids:
            if name != "master":
                await self.launch(name)
        for node in self.running.values():
            await wait_until(lambda node=node: not node.health.ready())
        return self

    async def form(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    await form_masters([self.master_address], cluster_id=self.cluster_id)
                    return
                except Retryable:
                    await asyncio.sleep(0.05)

    async def launch(self, name: str, *, first: bool = False) -> Node:
        options = self.options(name, first=first)
        if name == "master":
            node = await start_master(options, self.master_options)
        else:
            node = await start_node(options)
        self.running[name] = node
        return node

    async def stop(self, name: str, *, hand_over: bool = False) -> None:
        await self.running.pop(name).stop(hand_over=hand_over)

    async def close(self) -> None:
        for name in list(self.running):
            await self.stop(name)


def master_of(node: Node) -> Master:
    """The master in a node."""
    assert isinstance(node.extension, MasterExtension)
    return node.extension.master


async def machines_of(cluster: LocalCluster, tablet_id: str, replicas: int = 3) -> list[Any]:
    """What the replicas of a tablet have applied, once all of them are there and run."""

    def found() -> list[Any]:
        held = [n.replicas.current(TabletId(tablet_id)) for n in cluster.running.values()]
        return [r.machine for r in held if r is not None and r.running and r.machine is not None]

    await wait_until(lambda: len(found()) == replicas)
    return found()


async def fill(client: AsyncClient, count: int, name: str = "t") -> None:
    """Rows 0 to `count`."""
    table = await client.open_table(name)
    async with table.new_session() as session:
        for i in range(count):
            await session.upsert({"id": i, "name": f"n{i}"})


async def count(client: AsyncClient, name: str = "t") -> int:
    """How many rows a table has."""
    return await (await client.open_table(name)).scan().count()
