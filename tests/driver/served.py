"""The model of a cluster behind real gRPC: it answers the executor's orders as masters and nodes would. Only
the wire is real."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from stele.driver.steps import (
    AddPreFollower,
    AddWitness,
    BeginIntent,
    DemotePeer,
    DrainNode,
    EndIntent,
    MoveLeader,
    PromoteBack,
    RemovePeer,
    RetireNode,
    ReturnNode,
    StartCopy,
    Step,
    TakeOverIntent,
)
from stele.driver.view import ReplicaView, TabletView
from stele.driver.wire import intent_from_pb, intent_to_pb
from stele.model.config import MemberType
from stele.model.errors import Code, NotLeader, Rejected, SteleError, error_for
from stele.model.ids import NodeId, OpId, ReplicaId, TabletId
from stele.rpc.convert import config_to_pb, id_from_pb, id_to_pb, opid_to_pb, peer_from_pb
from stele.rpc.errors import abort_with
from stele.rpc.proto import common_pb2
from stele.rpc.proto import consensus_pb2 as cpb
from stele.rpc.proto import master_pb2 as mpb
from stele.rpc.proto.consensus_pb2_grpc import (
    ConsensusServiceServicer,
    add_ConsensusServiceServicer_to_server,
)
from stele.rpc.proto.master_pb2_grpc import MasterServiceServicer, add_MasterServiceServicer_to_server
from tests.driver.model import Cluster
from tests.driver.model_parts import ModelTablet, Refused

START_IN_FORCE = OpId(1, 8)


def answering(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A servicer's method whose errors become statuses."""

    async def call(self: Any, request: Any, context: Any) -> Any:
        self.served.calls.append(type(request).__name__)
        try:
            return await method(self, request, context)
        except Refused as exc:
            name = str(exc)
            code = Code[name] if name in Code.__members__ else Code.CAS_FAILED
            await abort_with(context, error_for(code, name))
        except SteleError as exc:
            await abort_with(context, exc)

    return call


class Served:
    """`address` answers for all masters and nodes. `claims` and `leads` are the masters' own state.
    `failed_peers`: peers that leaders now call FAILED; `reported_failed`: those in their last reports.
    `lacking`: whether these peers lack entries that the leader's log no longer has."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.address = ""
        self.leads = True
        self.holder = ""
        self.calls: list[str] = []
        self.asked: set[str] = set()
        """Tablets of which a node was asked for its report."""
        self.witness_starts: list[OpId] = []
        self.sources: list[tuple[int, NodeId]] = []
        """For each order to copy: the new replica, and the node to copy from."""
        self.failed_peers: tuple[int, ...] = ()
        self.reported_failed: tuple[int, ...] = ()
        self.lacking = False
        self.behind: mpb.GetClusterViewResponse | None = None
        """What the masters still say, since nodes have not reported since."""
        self.too_old: set[int] = set()
        """New replicas whose start as a witness is no longer in their leader's log."""

    def check(self, epoch: int) -> None:
        """Refuse a stale driver."""
        if epoch != self.cluster.epoch:
            raise Rejected(f"epoch {epoch}, in force {self.cluster.epoch}", code=Code.STALE_EPOCH)

    def tablet(self, raw: bytes) -> ModelTablet:
        """The model's tablet."""
        return self.cluster.tablets[id_from_pb(raw)]

    def status(self, t: TabletView, r: ReplicaView, failed: tuple[int, ...]) -> common_pb2.ReplicaStatusPB:
        """A replica's report."""
        leads = t.leader_node == r.node_id and t.config.peer(r.replica_id) is not None
        status = common_pb2.ReplicaStatusPB(
            tablet_id=id_to_pb(t.tablet_id),
            replica_id=r.replica_id,
            state=int(r.state),  # type: ignore[arg-type]
            data_state=int(r.data_state),  # type: ignore[arg-type]
            role=common_pb2.LEADER if leads else common_pb2.FOLLOWER,
            term=t.term,
            has_data=r.has_data,
            last_committed=opid_to_pb(OpId(1, 12) if leads else r.last_committed),  # it learns of it first
            bytes_on_disk=r.bytes_on_disk,
            committed_config=config_to_pb(t.config),
        )
        if leads:
            lacking = self.lacking
            status.peers.extend(
                common_pb2.PeerHealthPB(replica_id=n, failed=not lacking, needs_copy=lacking) for n in failed
            )
        if r.copy is not None:
            status.copy.state = r.copy.state
            status.copy.bytes_done, status.copy.bytes_total = r.copy.bytes_done, r.copy.bytes_total
            source = dict(self.sources).get(r.replica_id)
            if source is not None:
                status.copy.source_node = id_to_pb(source)
        return status

    def view(self) -> mpb.GetClusterViewResponse:
        """The model's view as a message."""
        view = self.cluster.view()
        return mpb.GetClusterViewResponse(
            nodes=[
                mpb.NodeViewPB(
                    formed=True,
                    node_id=id_to_pb(n.node_id),
                    registration=mpb.NodeRegistrationPB(
                        address=self.address, machine=n.machine, zone=n.zone, role=n.role
                    ),
                    state=int(n.state),  # type: ignore[arg-type]
                    heartbeat_age_ms=n.heartbeat_age_ms,
                    ever_heard=n.ever_heard,
                    given_up=n.given_up,
                )
                for n in view.nodes
            ],
            tablets=[
                mpb.TabletViewPB(
                    tablet_id=id_to_pb(t.tablet_id),
                    table_id=id_to_pb(t.table_id),
                    table_name=t.table_name,
                    state=t.state,
                    committed_config=config_to_pb(t.config),
                    term=t.term,
                    leader_node=id_to_pb(t.leader_node),
                    replication_factor=t.replication_factor,
                    replicas=[
                        mpb.ReplicaReportPB(
                            node_id=id_to_pb(r.node_id), status=self.status(t, r, self.reported_failed)
                        )
                        for r in t.replicas
                    ],
                )
                for t in view.tablets
            ],
            intents=[intent_to_pb(i) for i in view.intents],
            claim=mpb.DriverClaimPB(holder=self.holder, epoch=self.cluster.epoch),
            settled=True,
        )


class Masters(MasterServiceServicer):
    """The masters' side."""

    def __init__(self, served: Served) -> None:
        self.served = served

    def _lead(self) -> None:
        if not self.served.leads:
            raise NotLeader("not the leader")

    @answering
    async def ClaimDriver(self, request: mpb.ClaimDriverRequest, context: Any) -> Any:
        self._lead()
        cluster = self.served.cluster
        if request.epoch:
            self.served.check(request.epoch)
        else:
            cluster.epoch += 1
        self.served.holder = "" if request.release else request.holder
        return mpb.ClaimDriverResponse(claim=mpb.DriverClaimPB(holder=request.holder, epoch=cluster.epoch))

    @answering
    async def GetClusterView(self, request: Any, context: Any) -> Any:
        self._lead()
        return self.served.behind or self.served.view()

    @answering
    async def BeginIntent(self, request: mpb.BeginIntentRequest, context: Any) -> Any:
        self.served.check(request.epoch)
        asked, cluster = intent_from_pb(request.intent), self.served.cluster
        if asked.replica_id:
            cluster.apply(
                TakeOverIntent(asked.tablet_id, -1, asked.reason, asked.replica_id, asked.target_node)
            )
        else:
            assert not asked.witness or asked.witness_start == OpId(1, 9), "asked of every live voter"
            step = BeginIntent(
                asked.tablet_id,
                -1,
                asked.reason,
                asked.kind,
                asked.target_node,
                NodeId(asked.source_node),
                asked.replaces_replica,
                asked.witness,
                cause=asked.cause,
            )
            cluster.apply(step)
        return mpb.BeginIntentResponse(intent=intent_to_pb(cluster.intents[asked.tablet_id]))

    @answering
    async def EndIntent(self, request: mpb.EndIntentRequest, context: Any) -> Any:
        self.served.check(request.epoch)
        t = self.served.tablet(request.tablet_id)
        replica_id = ReplicaId(request.replica_id)
        assert request.committed_config.opid_index == t.config.opid_index
        if t.config.peer(replica_id) is None:
            self.served.cluster.orders.end(t.tablet_id, replica_id, cancelled=True)
        else:
            self.served.cluster.apply(EndIntent(t.tablet_id, -1, "", replica_id))
        return mpb.EndIntentResponse()

    @answering
    async def SetNodeState(self, request: mpb.SetNodeStateRequest, context: Any) -> Any:
        self.served.check(request.epoch)
        node_id, none = NodeId(id_from_pb(request.node_id)), TabletId("")
        match request.state:
            case mpb.ACTIVE:
                step: Step = ReturnNode(none, -1, "", node_id)
            case mpb.DRAINING:
                step = DrainNode(none, -1, "", node_id, request.given_up)
            case _:
                step = RetireNode(none, -1, "", node_id)
        self.served.cluster.apply(step)
        return mpb.SetNodeStateResponse()


class Nodes(ConsensusServiceServicer):
    """The nodes' side."""

    def __init__(self, served: Served) -> None:
        self.served = served

    @answering
    async def BulkChangeConfig(self, request: cpb.BulkChangeConfigRequest, context: Any) -> Any:
        self.served.check(request.driver_epoch)
        t = self.served.tablet(request.tablet_id)
        peer, cas, reason = peer_from_pb(request.peer), request.cas_config_opid_index, request.reason
        at = (t.tablet_id, cas, reason)
        cluster = self.served.cluster
        step: Step
        if request.type == cpb.ADD_PEER:
            if peer.member_type is MemberType.WITNESS:
                if peer.replica_id in self.served.too_old:
                    raise Rejected("the log begins after its start", code=Code.UNSAFE_CHANGE)
                self.served.witness_starts.append(peer.witness_start)
                step = AddWitness(*at, peer.replica_id, peer.node_id, peer.witness_start)
            else:
                assert peer.promote and peer.member_type is MemberType.NON_VOTER
                step = AddPreFollower(*at, peer.replica_id, peer.node_id)
        elif request.type == cpb.REMOVE_PEER:
            step = RemovePeer(*at, peer.replica_id, peer.node_id)
        elif peer.member_type is MemberType.NON_VOTER:
            change = PromoteBack if peer.promote else DemotePeer
            step = change(*at, peer.replica_id, peer.node_id)
        else:
            assert t.config.peer_on(t.leader) == peer, "a fence repeats the leader's own entry"
            cluster.orders.change(t.tablet_id, cas, t.config.peers, added=None)
            return cpb.BulkChangeConfigResponse(committed=config_to_pb(t.config))
        cluster.apply(step)
        return cpb.BulkChangeConfigResponse(committed=config_to_pb(t.config))

    @answering
    async def StartTabletCopy(self, request: cpb.StartTabletCopyRequest, context: Any) -> Any:
        self.served.check(request.driver_epoch)
        t = self.served.tablet(request.tablet_id)
        intent = self.served.cluster.intents[t.tablet_id]
        source = NodeId(id_from_pb(request.source_node))
        assert request.source_address == self.served.address
        step = StartCopy(
            t.tablet_id,
            -1,
            "",
            ReplicaId(request.replica_id),
            intent.target_node,
            source,
            request.witness,
            log_only=request.log_only,
        )
        self.served.cluster.apply(step)
        self.served.sources.append((step.replica_id, source))
        start = opid_to_pb(START_IN_FORCE) if request.witness else None
        return cpb.StartTabletCopyResponse(progress=common_pb2.CopyProgressPB(), witness_start=start)

    @answering
    async def LeaderStepDown(self, request: cpb.LeaderStepDownRequest, context: Any) -> Any:
        self.served.check(request.driver_epoch)
        t = self.served.tablet(request.tablet_id)
        assert request.term == 1, "the term fences late orders"
        target = NodeId(id_from_pb(request.target_node))
        self.served.cluster.apply(MoveLeader(t.tablet_id, -1, "", target))
        return cpb.LeaderStepDownResponse()

    @answering
    async def GetConsensusState(self, request: cpb.GetConsensusStateRequest, context: Any) -> Any:
        node_id = dict(context.invocation_metadata())["stele-to-node"]
        self.served.asked |= {id_from_pb(raw) for raw in request.tablet_ids}
        found = [
            self.served.status(t, r, self.served.failed_peers)
            for t in self.served.cluster.view().tablets
            for r in t.replicas
            if r.node_id == node_id and id_to_pb(t.tablet_id) in request.tablet_ids
        ]
        return cpb.GetConsensusStateResponse(node_id=id_to_pb(node_id), replicas=found)


@asynccontextmanager
async def serve(cluster: Cluster) -> AsyncIterator[Served]:
    """Serve the model on its own port."""
    served = Served(cluster)
    server = grpc.aio.server()
    add_MasterServiceServicer_to_server(Masters(served), server)
    add_ConsensusServiceServicer_to_server(Nodes(served), server)
    served.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield served
    finally:
        await server.stop(None)
