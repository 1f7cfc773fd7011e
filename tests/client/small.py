"""A cluster in one event loop: real messages, real streams, real stores, and no consensus; faults on demand.

Each tablet has one store, which whoever `leads` it applies writes to in order, as a replicated group would. It stands
at the servers' side of the port that the client speaks to, so that a test may say: apply this, and lose the answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa

from stele.client import AsyncClient, AsyncTable
from stele.model import writeop
from stele.model.clock import HybridClock
from stele.model.cluster_version import CLUSTER_VERSION
from stele.model.entry import Entry, EntryKind
from stele.model.errors import Code, NotLeader, Rejected, SteleError
from stele.model.ids import ClusterId, NodeId, new_id
from stele.model.kvop import encode_operations
from stele.model.partition import HashPartition, PartitionSchema
from stele.model.schema import Schema
from stele.rpc.budget import ByteBudget
from stele.rpc.client_stream import ClientStreams, Sink
from stele.rpc.convert import id_from_pb, id_to_pb
from stele.rpc.flight import FlightServer
from stele.rpc.flight_plan import Endpoint, Planned
from stele.rpc.frames import pushed_changes
from stele.rpc.identity import Identity, PeerBook
from stele.rpc.listener import StreamListener
from stele.rpc.proto import common_pb2, consensus_pb2, master_pb2, tserver_pb2
from stele.rpc.proto.consensus_pb2_grpc import (
    ConsensusServiceServicer,
    add_ConsensusServiceServicer_to_server,
)
from stele.rpc.proto.master_pb2_grpc import add_MasterServiceServicer_to_server
from stele.rpc.proto.tserver_pb2_grpc import (
    TabletServerServiceServicer,
    add_TabletServerServiceServicer_to_server,
)
from stele.rpc.server import bind, make_server
from stele.rpc.ticket import CopyTicket, ScanCommand, Ticket, with_incarnation
from stele.tablet.view import key_array
from stele.tserver.leases import lost
from stele.tserver.tablet_service import attempt_of, operations_of
from stele.tserver.watching import encoded_changes
from tests.client.small_master import Master
from tests.client.small_tablet import Tablet, maybe_fail

SCHEMA = Schema.make([("id", "int64"), ("name", "string", True), ("n", "int32", True)], ["id"])
EIGHT = PartitionSchema((HashPartition((0,), 8),))
ONE = PartitionSchema()


class SmallCluster:
    """One master and `nodes` nodes, each with a gRPC and a Flight server."""

    def __init__(self, directory: Path, nodes: int = 3) -> None:
        self.directory = directory
        self.cluster_id = ClusterId(new_id())
        self.clock = HybridClock(lambda: time.time_ns() // 1_000)
        self.tables: dict[str, master_pb2.TableInfoPB] = {}
        self.removed: set[bytes] = set()  # table ids
        self.deletes_next = False  # what is created next is deleted by another, and no answer comes
        self.tablets: dict[str, Tablet] = {}
        self.loop = asyncio.get_running_loop()
        self.nodes = [SmallNode(self, number) for number in range(nodes)]
        self.master_address = ""
        self.unreached: deque[int] = deque()  # tablets that are left, by each next answer to DeleteTable
        self.deleted_unheard = 0  # so often a table is deleted, and no answer comes
        self.silent: set[int] = set()  # nodes that the master has not heard for a minute
        self.pods: dict[int, str] = {}  # names that an operator gave to nodes
        self.not_leading = 0  # so many calls to the master are refused
        self.refuses_then = 0  # so many are, once the next table is made
        self.unled = False  # tables that are made from now on have no leaders yet
        self.cluster_version = CLUSTER_VERSION
        self.located = 0  # so often it was asked where a table is
        self._master: grpc.aio.Server | None = None

    async def start(self) -> None:
        identity = Identity(self.cluster_id, NodeId(new_id()), 1)
        self._master = make_server(identity, PeerBook(), ByteBudget())
        add_MasterServiceServicer_to_server(Master(self), self._master)
        self.master_address = f"127.0.0.1:{await bind(self._master, '127.0.0.1:0')}"
        await self._master.start()
        for node in self.nodes:
            await node.start()

    async def stop(self) -> None:
        for node in self.nodes:
            await node.stop()
        if self._master is not None:
            await self._master.stop(0)
        for tablet in self.tablets.values():
            tablet.store.close()

    def elect(self) -> None:
        """All tablets have leaders now."""
        self.unled = False
        for info in self.tables.values():
            info.tablets_running = info.tablets

    def tablets_of(self, name: str) -> list[Tablet]:
        table_id = id_from_pb(self.tables[name].table_id)
        return [t for t in self.tablets.values() if t.table_id == table_id]


class Introductions(TabletServerServiceServicer):
    """The call that a client needs to open its stream, and those that scans make aside. All nodes have the same rows, so
    any of them can serve any snapshot."""

    def __init__(self, clients: ClientStreams, speaks: asyncio.Event) -> None:
        self._clients = clients
        self._speaks = speaks

    async def OpenClientStream(self, request: common_pb2.OpenStreamRequest, context: Any) -> Any:
        await self._speaks.wait()
        return self._clients.introduce(request)

    async def PrepareSnapshot(self, request: tserver_pb2.PrepareSnapshotRequest, context: Any) -> Any:
        tablets = [tserver_pb2.PreparedTabletPB(tablet_id=each, index=1) for each in request.tablet_ids]
        return tserver_pb2.PrepareSnapshotResponse(tablets=tablets)

    async def SplitKeys(self, request: tserver_pb2.SplitKeysRequest, context: Any) -> Any:
        return tserver_pb2.SplitKeysResponse()


class SmallNode:
    """A node: answers client streams and scans for the tablets of the cluster."""

    def __init__(self, cluster: SmallCluster, number: int) -> None:
        self.cluster = cluster
        self.number = number
        self.identity = Identity(cluster.cluster_id, NodeId(new_id()), 1)
        self.address = ""
        self.flight_fault: deque[Callable[[int], SteleError | None]] = deque()
        self.requests = 0
        self.scans = 0
        self.snapshots: deque[int] = deque()  # of the tickets that came
        self.searches = 0  # so often it was asked who leads
        self.delay_s = 0.0  # how long requests wait here
        self.older = False
        """Whether it knows nothing of durability."""
        self.came = asyncio.Event()  # a request has
        self.speaks = asyncio.Event()  # else nothing is answered, and connections stand
        self.speaks.set()
        self.server: grpc.aio.Server | None = None
        self.flight: FlightServer | None = None

    async def start(self, port: int = 0) -> None:
        self.listener = StreamListener()
        self.writes: set[asyncio.Task[Any]] = set()
        self.clients = ClientStreams(self.identity, PeerBook(), ByteBudget(), self.listener, self)
        self.server = make_server(self.identity, PeerBook(), ByteBudget())
        introductions = Introductions(self.clients, self.speaks)
        add_TabletServerServiceServicer_to_server(introductions, self.server)
        add_ConsensusServiceServicer_to_server(_Consensus(self), self.server)
        await self.listener.listen("127.0.0.1", 0)
        port = await bind(self.server, f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{port}"
        await self.server.start()
        if self.flight is None:
            self.flight = FlightServer("127.0.0.1", 0, self.cluster.cluster_id, self, self)

    async def move(self) -> None:
        """Listen at other ports, as a pod that was made again does at another address."""
        before, flight = self.address, self.flight.port if self.flight else 0
        await self.stop()
        await self.start()
        assert self.flight is not None
        assert (self.address, self.flight.port) != (before, flight)

    async def die(self) -> None:
        """No request is answered any more, nor the ones that are being worked on."""
        server, self.server = self.server, None
        if server is not None:
            await self.listener.close()
            for write in self.writes:
                write.cancel()
            await server.stop(0)

    async def stop(self) -> None:
        await self.die()
        if self.flight is not None:
            await asyncio.to_thread(self.flight.close)
            self.flight = None

    def _leading(self, raw: bytes) -> Tablet:
        self.requests += 1
        tablet = self.cluster.tablets.get(id_from_pb(raw))
        if tablet is None:
            raise Rejected("no such tablet here", code=Code.NOT_FOUND)
        if tablet.leader != self.number:
            hint = self.cluster.nodes[tablet.leader].identity.node_id if tablet.leader >= 0 else ""
            raise NotLeader("not the leader", leader_hint=hint)
        return tablet

    async def answer(self, request: tserver_pb2.ClientRequest) -> tserver_pb2.ClientResponse:
        await self._heard()
        return self._read(request.read) if request.HasField("read") else self._kv(request.kv)

    async def watch(self, request: tserver_pb2.KvWatchRequest, sink: Sink) -> tserver_pb2.KvWatchResponse:
        if not request.stop:
            await self._heard()
            tablet = self._leading(request.tablet_id)
            store = tablet.store
            after = store.revision if request.from_now else request.after
            pushing = asyncio.ensure_future(self._push(request, sink, after))
            self.writes.add(pushing)
            pushing.add_done_callback(self.writes.discard)
            return tserver_pb2.KvWatchResponse(
                number=request.number, revision=after, tablet_incarnation=tablet.incarnation
            )
        return tserver_pb2.KvWatchResponse(number=request.number)

    async def _push(self, request: tserver_pb2.KvWatchRequest, sink: Sink, after: int) -> None:
        """Push what a watch asks for, as long as this node leads."""
        while not sink.ended:
            tablet = self.cluster.tablets.get(id_from_pb(request.tablet_id))
            if tablet is None or tablet.leader != self.number:
                code = Code.NOT_FOUND if tablet is None else Code.NOT_LEADER
                ended = tserver_pb2.KvPushPB(number=request.number)
                ended.error.code, ended.error.message = int(code), "not here"
                sink.push(tserver_pb2.ClientResponse(push=ended).SerializeToString())
                return
            for written in list(tablet.store.recent.after(after)):
                after = written.revision
                wanted = [
                    encoded
                    for (key, _), encoded in zip(written.changes, encoded_changes(written))
                    if (key.startswith(request.key) if request.prefix else key == request.key)
                ]
                head = tserver_pb2.KvPushPB(number=request.number, revision=after)
                sink.push(pushed_changes(head.SerializeToString(), wanted))
            await asyncio.sleep(0.01)

    def begin_write(self, request: tserver_pb2.WriteRequest) -> asyncio.Future[Any]:
        write = asyncio.ensure_future(self._write(request))
        self.writes.add(write)
        write.add_done_callback(self.writes.discard)
        return write

    def end_write(self, outcome: tserver_pb2.WriteResponse) -> tserver_pb2.WriteResponse:
        return outcome

    async def _heard(self) -> None:
        self.came.set()
        await self.speaks.wait()
        if self.delay_s:
            await asyncio.sleep(self.delay_s)

    async def _write(self, request: tserver_pb2.WriteRequest) -> tserver_pb2.WriteResponse:
        await self._heard()
        tablet = self._leading(request.tablet_id)
        tablet.attempts.append(request)
        maybe_fail(tablet.before)
        tablet.store.check_block(request.block)
        outcome = self._apply(tablet, request, request.block, writeop.BodyKind.BLOCK)
        maybe_fail(tablet.after)
        answer = tserver_pb2.WriteResponse(timestamp=outcome.timestamp)
        if not self.older:
            answer.durability = request.durability
        for error in outcome.row_errors:
            answer.row_errors.add(row=error.row, code=int(error.code), message=error.message)
        return answer

    def _apply(self, tablet: Tablet, request: Any, body: bytes, kind: writeop.BodyKind) -> Any:
        header = writeop.WriteHeader(
            request.client_id,
            request.sequence,
            request.lowest_unfinished,
            request.first_attempt_us,
            writeop.digest(body),
            tablet.schema.version if tablet.schema else 0,
            kind,
            attempt=attempt_of(request) if isinstance(request, tserver_pb2.WriteRequest) else None,
        )
        tablet.index += 1
        now = int(self.cluster.clock.now())
        entry = Entry(1, tablet.index, EntryKind.WRITE, now, writeop.encode(header, body))
        outcome = tablet.store.apply(entry)
        error = outcome.error()
        if error is not None:
            raise error
        return outcome

    def _read(self, request: tserver_pb2.ReadRequest) -> tserver_pb2.ClientResponse:
        tablet = self._leading(request.tablet_id)
        schema = tablet.schema
        keys = pa.ipc.read_record_batch(pa.py_buffer(request.keys), schema.to_arrow(schema.key_column_ids))
        with tablet.store.view() as view:
            rows, places = view.get(key_array(keys, schema), list(request.column_ids))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_batch(rows)
        answer = tserver_pb2.ReadResponse(
            rows=sink.getvalue().to_pybytes(), snapshot=int(self.cluster.clock.now()), places=places
        )
        return tserver_pb2.ClientResponse(read=answer)

    def _kv(self, request: tserver_pb2.KvRequest) -> tserver_pb2.ClientResponse:
        tablet = self._leading(request.tablet_id)
        answer = tserver_pb2.KvResponse()
        if request.op == tserver_pb2.KV_READ:
            maybe_fail(tablet.before_read)
            value = tablet.store.read(request.key)
            if value is not None:
                answer.pairs.add(key=request.key, value=value, revision=tablet.store.changed_at(request.key))
        elif request.op == tserver_pb2.KV_LIST:
            for key, value in tablet.store.list(request.key):
                answer.pairs.add(key=key, value=value, revision=tablet.store.changed_at(key))
        elif request.op == tserver_pb2.KV_LEASE_KEEP:
            if request.lease not in tablet.store.leases:
                raise lost(request.lease)
            ttl_ms = tablet.store.leases.ttl_ms[request.lease]
            answer.leases.add(lease=request.lease, ttl_ms=ttl_ms, left_ms=ttl_ms)
        elif request.op == tserver_pb2.KV_LEASES:
            for lease, ttl_ms in tablet.store.leases.ttl_ms.items():
                keys = tablet.store.leases.keys_of(lease)
                answer.leases.add(lease=lease, ttl_ms=ttl_ms, left_ms=ttl_ms, keys=keys)
        else:
            body = encode_operations(operations_of(request))
            tablet.attempts.append(request)
            self._apply(tablet, request, body, writeop.BodyKind.KEYSPACE)
            maybe_fail(tablet.after)
        answer.revision = tablet.store.revision
        return tserver_pb2.ClientResponse(kv=answer)

    # ScanProvider

    def fetch(self, ticket: CopyTicket) -> Iterable[pa.RecordBatch]:
        raise Rejected("no copy is read from here", code=Code.NOT_FOUND)

    def plan(self, command: ScanCommand) -> Planned:
        tablet = self.cluster.tablets[command.tablet_id]
        ticket = Ticket(self.cluster.cluster_id, tablet.tablet_id, 0, tablet.schema.version, "{}")
        assert self.flight is not None
        return Planned(tablet.schema.to_arrow(), [Endpoint(ticket, (f"127.0.0.1:{self.flight.port}",))])

    def scan(self, ticket: Ticket) -> tuple[pa.Schema, Iterable[pa.RecordBatch]]:
        self.scans += 1
        self.snapshots.append(ticket.snapshot)
        tablet = self.cluster.tablets.get(ticket.tablet_id)
        if tablet is None:
            raise Rejected("no such tablet here", code=Code.NOT_FOUND)
        spec = ticket.spec(tablet.schema)
        fault = self.flight_fault.popleft() if self.flight_fault else None

        def batches() -> Iterable[pa.RecordBatch]:
            with tablet.store.view(ticket.snapshot) as view:
                for number, batch in enumerate(view.scan(spec)):
                    error = fault(number) if fault is not None else None
                    if error is not None:
                        raise error
                    yield batch

        return with_incarnation(spec.arrow_schema(tablet.schema), tablet.incarnation), batches()


class _Consensus(ConsensusServiceServicer):
    """Who leads, as a node has heard."""

    def __init__(self, node: SmallNode) -> None:
        self._node = node

    async def GetConsensusState(self, request: consensus_pb2.GetConsensusStateRequest, context: Any) -> Any:
        node = self._node
        node.searches += 1
        await node.speaks.wait()
        answer = consensus_pb2.GetConsensusStateResponse()
        for raw in request.tablet_ids:
            tablet = node.cluster.tablets[id_from_pb(raw)]
            term, leader = tablet.heard.get(node.number, (tablet.term, tablet.leader))
            leader_node = id_to_pb(node.cluster.nodes[leader].identity.node_id) if leader >= 0 else b""
            answer.replicas.add(
                tablet_id=raw,
                replica_id=node.number + 1,
                state=common_pb2.RUNNING,
                role=common_pb2.LEADER if node.number == leader else common_pb2.FOLLOWER,
                term=term,
                leader_node=leader_node,
            )
        return answer


@asynccontextmanager
async def small_cluster(
    directory: Path, nodes: int = 3, timeout_s: float = 10.0
) -> AsyncIterator[tuple[SmallCluster, AsyncClient]]:
    """A cluster and a client of it."""
    cluster = SmallCluster(directory, nodes)
    await cluster.start()
    client = AsyncClient([cluster.master_address], timeout_s=timeout_s)
    try:
        yield cluster, client
    finally:
        await client.close()
        await cluster.stop()


@asynccontextmanager
async def one_tablet(
    directory: Path, nodes: int = 3, timeout_s: float = 10.0
) -> AsyncIterator[tuple[SmallCluster, AsyncTable, Tablet]]:
    """A cluster, a client's table `t` on it, and the one tablet that this has."""
    async with small_cluster(directory, nodes, timeout_s) as (cluster, client):
        table = await client.create_table("t", SCHEMA, ONE)
        (tablet,) = cluster.tablets.values()
        yield cluster, table, tablet
