"""Masters on the in-memory catalog port, and nodes that exist only as heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from stele.master.leadership import Leadership, MasterOptions
from stele.master.master import Master
from stele.master.records import TabletRecord
from stele.master.service import MasterService
from stele.model.cluster_version import CLUSTER_VERSION
from stele.model.config import Configuration
from stele.model.errors import Code, Rejected, Retryable, SteleError
from stele.model.ids import ClusterId, NodeId, TabletId
from stele.model.schema import Schema
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import config_to_pb, id_from_pb, id_to_pb
from stele.rpc.convert_schema import partitioning_to_pb, schema_to_pb
from stele.rpc.identity import Identity, PeerBook
from stele.rpc.proto import common_pb2
from stele.rpc.proto import master_pb2 as pb
from stele.tablet.keyspace import BYTES_MAX
from stele.tserver.ticker import ReplicaClock
from tests.consensus.cluster import WAIT_S
from tests.master.memory_log import MemoryGroup

MASTERS = [f"{0xA0 + i:032x}" for i in range(3)]
CLUSTER = "c" * 32
OPTIONS = MasterOptions(heartbeat_interval_ms=20, sweep_ms=30, order_retry_ms=50)
SCHEMA = Schema.make([("id", "int64"), ("name", "string", True)], ["id"])
_EPOCH_US = 1_700_000_000_000_000
"""What the wall clock adds to a steady one, which begins at 0 with the machine."""


class Call:
    """What gRPC hands to a service: who calls. Nobody in particular by default."""

    def __init__(self, node_id: str = "", incarnation: int = 0) -> None:
        self._identity = Identity(ClusterId(CLUSTER), NodeId(node_id), incarnation)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """As an interceptor sees it."""
        return self._identity.metadata()


async def heartbeat(service: MasterService, request: pb.TSHeartbeatRequest) -> pb.TSHeartbeatResponse:
    """A heartbeat of its own node, which registers first where the leader says that nobody has."""
    call = Call(id_from_pb(request.node_id), request.incarnation)
    try:
        return await service.TSHeartbeat(request, call)
    except Rejected as exc:
        if exc.code is not Code.NOT_FOUND:
            raise
    await service.RegisterNode(pb.RegisterNodeRequest(node_id=request.node_id), call)
    return await service.TSHeartbeat(request, call)


class World:
    """Three masters; their clocks go no faster than the test does, and are moved by hand where a test needs it."""

    def __init__(self, directory: Path, options: MasterOptions, bytes_max: int = BYTES_MAX) -> None:
        self.shift_ms = 0
        self.wall_ahead_ms = 0
        self.group = MemoryGroup(directory, MASTERS, bytes_max)
        self.pool = ChannelPool(Identity())
        self._clock = ReplicaClock()
        self.masters = {
            n: Master(
                n,
                CLUSTER,
                self.group.members[n],
                self.pool,
                options,
                now_ms=self._now_ms,
                wall=lambda: _EPOCH_US + (self._now_ms() + self.wall_ahead_ms) * 1000,
            )
            for n in MASTERS
        }
        self.services = {n: MasterService(m, no_formation, PeerBook()) for n, m in self.masters.items()}
        self.nodes: dict[str, Node] = {}
        self._sequence = itertools.count(1)

    def _now_ms(self) -> int:
        return self._clock.now_ms() + self.shift_ms

    @property
    def leader(self) -> MasterService:
        """The service of the master that leads."""
        return self.services[self.group.leader]

    async def leader_call(self, method: str, request: object) -> object:
        """Call the master that leads now."""
        return await getattr(self.leader, method)(request, Call())

    @property
    def lead(self) -> Leadership:
        """The leadership of the master that leads now."""
        lead = self.masters[self.group.leader].lead
        assert lead is not None
        return lead

    async def move(self, node_id: str, state: pb.NodeStatePB.ValueType, *, epoch: int = 0) -> None:
        """Have a node become DRAINING, RETIRED or ACTIVE."""
        request = pb.SetNodeStateRequest(epoch=epoch, node_id=id_to_pb(node_id), state=state)
        await self.leader.SetNodeState(request, None)

    async def elect(self, node_id: str) -> None:
        """Elect, and wait until that master answers as the leader."""
        self.group.elect(node_id)
        await until(lambda: self.masters[node_id].lead is not None)

    def add_nodes(self, count: int) -> None:
        """Nodes on a machine each, over two zones."""
        for i in range(len(self.nodes) + 1, len(self.nodes) + count + 1):
            self.nodes[f"{i:032x}"] = Node(f"{i:032x}", f"m{i}", f"z{i % 2}")

    async def tick(self) -> None:
        """Time passes; a machine that stands still makes nobody silent."""
        while True:
            await asyncio.sleep(0.01)
            self._clock.tick()

    async def beat(self, *, silent: tuple[str, ...] = ()) -> None:
        """One full heartbeat of each node to each master."""
        for node in self.nodes.values():
            if node.node_id in silent:
                continue
            for service in self.services.values():
                with contextlib.suppress(Retryable):  # a follower learns of the node a moment later
                    node.told(await heartbeat(service, node.heartbeat(next(self._sequence))))

    async def beat_until(self, done: Callable[[], bool], *, silent: tuple[str, ...] = ()) -> None:
        """Heartbeats until `done()`; nodes make the replicas that rows give them."""
        async with asyncio.timeout(WAIT_S):
            while True:
                self.create_replicas(silent)
                await self.beat(silent=silent)
                if done():
                    return
                await asyncio.sleep(0.01)

    def create_replicas(self, silent: tuple[str, ...] = ()) -> None:
        """What CreateTablet orders would have done."""
        for row in self.catalog.tablets.values():
            for peer in row.config.peers if row.state == "CREATING" else ():
                node = self.nodes.get(peer.node_id)
                if node is not None and node.node_id not in silent:
                    leads = row.leader == node.node_id
                    node.replicas.setdefault((row.tablet_id, peer.replica_id), leads)

    @property
    def catalog(self):  # type: ignore[no-untyped-def]
        """The leader's catalog."""
        return self.masters[self.group.leader].catalog


class Node:
    """A node as the masters hear it. `replicas`: (tablet, replica_id) → whether it leads."""

    def __init__(self, node_id: str, machine: str, zone: str) -> None:
        self.node_id = node_id
        self.machine = machine
        self.zone = zone
        self.incarnation = 1
        self.disk_free_bytes = 0
        self.disk_low = False
        self.replicas: dict[tuple[TabletId, int], bool] = {}
        self.configs: dict[TabletId, common_pb2.ConfigurationPB] = {}
        self.pending: dict[TabletId, common_pb2.ConfigurationPB] = {}
        self.versions: dict[TabletId, int] = {}
        """Of the schema of its replicas, if it is not the first."""
        self.version = ""
        self.incarnations: dict[TabletId, int] = {}
        """Of its replicas, if their tablets were recovered."""
        self.role = "node"
        self.cluster_version = CLUSTER_VERSION
        self.withdrawn: set[str] = set()
        """Tables that it serves to nobody."""
        self.withdrawn_digest = 0
        self.obeys = True
        """Whether it takes a new list of them."""

    def told(self, answer: pb.TSHeartbeatResponse) -> None:
        """Do what the leader's answer says."""
        if answer.is_leader and self.obeys and answer.dropped_digest != self.withdrawn_digest:
            self.withdrawn = {hex_of(raw) for raw in answer.dropped_tables}
            self.withdrawn_digest = answer.dropped_digest

    def heartbeat(self, sequence: int) -> pb.TSHeartbeatRequest:
        """A full report with registration."""
        return pb.TSHeartbeatRequest(
            node_id=id_to_pb(self.node_id),
            incarnation=self.incarnation,
            disk_free_bytes=self.disk_free_bytes,
            disk_low=self.disk_low,
            dropped_digest=self.withdrawn_digest,
            sequence=sequence,
            registration=pb.NodeRegistrationPB(
                cluster_version=self.cluster_version,
                address="127.0.0.1:1",
                machine=self.machine,
                zone=self.zone,
                role=self.role,
                version=self.version,
            ),
            has_report=True,
            tablets=[self.status(t, r) for t, r in self.replicas],
        )

    def status(self, tablet_id: TabletId, replica_id: int) -> common_pb2.ReplicaStatusPB:
        """One replica, RUNNING."""
        leads = self.replicas[(tablet_id, replica_id)]
        return common_pb2.ReplicaStatusPB(
            tablet_id=id_to_pb(tablet_id),
            replica_id=replica_id,
            state=common_pb2.RUNNING,
            data_state=common_pb2.READY,
            role=common_pb2.LEADER if leads else common_pb2.FOLLOWER,
            term=1,
            has_data=True,
            schema_version=self.versions.get(tablet_id, 1),
            committed_config=self.configs.get(tablet_id, common_pb2.ConfigurationPB(opid_index=-1)),
            pending_config=self.pending.get(tablet_id),
            tablet_incarnation=self.incarnations.get(tablet_id, 0),
        )


async def no_formation(request: pb.ConfirmFormationRequest) -> None:
    """Nothing is formed here."""
    raise AssertionError("not asked for")


async def until(done: Callable[[], bool]) -> None:
    """Wait for a state that must come soon."""
    async with asyncio.timeout(WAIT_S):
        while not done():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def world(
    directory: Path, options: MasterOptions = OPTIONS, *, bytes_max: int = BYTES_MAX
) -> AsyncIterator[World]:
    """Three masters, the first of them leading. `bytes_max`: of the catalog."""
    w = World(directory, options, bytes_max)
    for master in w.masters.values():
        master.start()
    ticking = asyncio.create_task(w.tick())
    try:
        await w.elect(MASTERS[0])
        yield w
    finally:
        ticking.cancel()
        for master in w.masters.values():
            await master.stop()
        await w.pool.close()


def create_request(name: str, *, rf: int = 3, buckets: int = 0, table_id: str = "") -> pb.CreateTableRequest:
    """A create request of a small table."""
    from stele.model.partition import HashPartition, PartitionSchema

    hashes = (HashPartition((0,), buckets),) if buckets else ()
    return pb.CreateTableRequest(
        name=name,
        schema=schema_to_pb(SCHEMA),
        partitioning=partitioning_to_pb(PartitionSchema(hashes)),
        replication_factor=rf,
        table_id=id_to_pb(table_id),
    )


def hex_of(raw: bytes) -> str:
    """32 hex digits."""
    return id_from_pb(raw)


async def made(w: World, name: str = "t", *, rf: int = 3, buckets: int = 4) -> str:
    """A table whose tablets all run; its id."""
    answer = await w.leader.CreateTable(create_request(name, rf=rf, buckets=buckets), None)
    table_id = hex_of(answer.table_id)

    def runs() -> bool:
        rows = w.catalog.current_tablets(table_id)
        return bool(rows) and all(r.state == "RUNNING" for r in rows)

    await w.beat_until(runs)
    return table_id


async def one_tablet(w: World) -> TabletRecord:
    """The row of a tablet that runs, which is all that its table has."""
    (row,) = w.catalog.current_tablets(await made(w, buckets=0))
    return row


async def ordered(w: World, *, buckets: int = 0) -> str:
    """A table whose tablets nodes were ordered to make, and have not made; its id."""
    answer = await w.leader.CreateTable(create_request("t", buckets=buckets), None)
    table_id = hex_of(answer.table_id)
    await until(lambda: {t.state for t in w.catalog.current_tablets(table_id)} == {"CREATING"})
    return table_id


async def in_force(w: World, tablet_id: TabletId, config: Configuration, *, says: str) -> None:
    """Let this node say that the tablet has this configuration, until the catalog knows it."""
    w.nodes[says].configs[tablet_id] = config_to_pb(config)
    await w.beat_until(lambda: w.catalog.tablets[tablet_id].config.opid_index == config.opid_index)


async def refused(call: object) -> SteleError:
    """The error that a call ends with."""
    with pytest.raises(SteleError) as caught:
        await call  # type: ignore[misc]
    return caught.value


async def ready(w: World, nodes: int = 5) -> None:
    """Nodes registered and the leader settled."""
    w.add_nodes(nodes)
    await w.beat_until(lambda: sum(n.role == "node" and n.formed for n in w.catalog.nodes.values()) == nodes)
    lead = w.masters[w.group.leader].lead
    await w.beat_until(lambda: lead is not None and lead.settled)


async def ready_again(w: World) -> None:
    """The leader settled, after another was elected."""
    lead = w.masters[w.group.leader].lead
    await w.beat_until(lambda: lead is not None and lead.settled)


async def claimed(w: World) -> int:
    """A driver's claim; its epoch."""
    answer = await w.leader.ClaimDriver(pb.ClaimDriverRequest(holder="d1", ttl_ms=60_000), None)
    return int(answer.claim.epoch)
