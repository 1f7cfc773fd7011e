"""ConsensusService: membership, hand-over, state, orders to copy a tablet here, and how peers open their
streams.

Messages between nodes are handled by stele.rpc.peers and inbound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stele.consensus.copy_order import CopyOrder
from stele.consensus.fetch import CopySource
from stele.consensus.recovering import SoleVoter
from stele.model.bounds import cut
from stele.model.errors import Code, Rejected, Retryable
from stele.model.ids import NodeId, ReplicaId, StreamKey, TabletId
from stele.raft.events import ChangeType
from stele.rpc.convert import config_to_pb, id_from_pb, id_to_pb, opid_from_pb, opid_to_pb, peer_from_pb
from stele.rpc.identity import Identity
from stele.rpc.proto import common_pb2
from stele.rpc.proto import consensus_pb2 as pb
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceServicer
from stele.tserver.fences import Fences
from stele.tserver.manager import TabletManager
from stele.tserver.messenger import Messenger
from stele.tserver.reads import check_incarnation
from stele.tserver.replicas import Replicas
from stele.tserver.reports import all_reports, copy_progress, report_one

_PREPARE_TIMEOUT_S = 20.0


class ConsensusService(ConsensusServiceServicer):
    """Served by every node and master.

    `copy_source(node_id, address)` makes the source of a copy. `changed(key)` is called when the replica
    under that key differs from its last report.
    """

    def __init__(
        self,
        identity: Identity,
        messenger: Messenger,
        replicas: Replicas,
        manager: TabletManager,
        fences: Fences,
        *,
        copy_source: Callable[[NodeId, str], CopySource],
        changed: Callable[[StreamKey], None],
    ) -> None:
        self._identity = identity
        self._messenger = messenger
        self._replicas = replicas
        self._manager = manager
        self._fences = fences
        self._copy_source = copy_source
        self._changed = changed

    async def OpenPeerStream(self, request: common_pb2.OpenStreamRequest, context: Any) -> Any:
        """Tell a peer where to open its stream, and the key to begin with."""
        return self._messenger.introduce(request)

    async def BulkChangeConfig(self, request: pb.BulkChangeConfigRequest, context: Any) -> Any:
        """Change one member; answered once the change is committed."""
        order = self._fences.of_driver(request.driver_epoch)
        if request.type == pb.CHANGE_TYPE_UNSPECIFIED or not request.HasField("peer"):
            raise Rejected("a change must name its type and its peer")
        replica = self._replicas.get(id_from_pb(request.tablet_id))
        # The log of a survivor may repeat the index of a configuration that was given up.
        check_incarnation(replica, request.tablet_incarnation, exact=True)
        change, peer = ChangeType(request.type), peer_from_pb(request.peer)
        with order:
            config = await replica.members.change_config(
                change, peer, request.cas_config_opid_index, _cause(request.driver_epoch, request.reason)
            )
            await order.carried_out()
        return pb.BulkChangeConfigResponse(committed=config_to_pb(config))

    async def LeaderStepDown(self, request: pb.LeaderStepDownRequest, context: Any) -> Any:
        """Hand leadership to a node that is caught up, or to the best voter. Does nothing if that node leads
        already.

        Raises:
            Retryable: NOT_LEADER. TIMED_OUT, this replica still leads. NOT_READY, the node lacks much of the
                log.
            Rejected: the node cannot lead. CAS_FAILED, this replica leads in another term than the caller
                thinks.
        """
        order = self._fences.of_driver(request.driver_epoch)
        replica = self._replicas.get(id_from_pb(request.tablet_id))
        replica.check_leader()
        if request.term not in (0, replica.term):
            raise Rejected(
                f"replica {replica.replica_id} leads in term {replica.term}, not {request.term}: it was "
                f"elected again; read the state and try again",
                code=Code.CAS_FAILED,
            )
        target: ReplicaId | None = None
        if request.target_node:
            peer = replica.config.peer_on(id_from_pb(request.target_node))
            if peer is None:
                raise Rejected(
                    f"node {id_from_pb(request.target_node)} holds no replica of this tablet; choose one that does"
                )
            if peer.replica_id == replica.replica_id:
                return pb.LeaderStepDownResponse()
            target = peer.replica_id
        cause = _cause(request.driver_epoch, request.reason)
        with order:
            await self._replicas.transfer(replica, target, cause=cause, at_once=True)
            await order.carried_out()
        return pb.LeaderStepDownResponse()

    async def RunLeaderElection(self, request: pb.RunLeaderElectionRequest, context: Any) -> Any:
        """Have the replica here stand for election at once. Does nothing if it leads.

        Raises:
            Rejected: the replica cannot lead. STALE_INCARNATION.
        """
        replica = self._replicas.get(id_from_pb(request.tablet_id))
        check_incarnation(replica, request.tablet_incarnation)
        if not replica.is_leader:
            replica.members.promote(_cause(0, request.reason))
        return pb.RunLeaderElectionResponse()

    async def UnsafeChangeConfig(self, request: pb.UnsafeChangeConfigRequest, context: Any) -> Any:
        """Make the replica here the only voter of its tablet, after a lost majority. Only the catalog's leader asks."""
        tablet_id = TabletId(id_from_pb(request.tablet_id))
        with self._fences.of_catalog(tablet_id, opid_from_pb(request.catalog_opid)) as fenced:
            order = SoleVoter(
                StreamKey(tablet_id, ReplicaId(request.replica_id)),
                request.tablet_incarnation,
                request.term,
                opid_from_pb(request.at_least),
                cut(request.reason),
            )
            config, changed = await self._manager.make_sole_voter(order)
            if changed:
                await fenced.carried_out()
        return pb.UnsafeChangeConfigResponse(config=config_to_pb(config))

    async def GetConsensusState(self, request: pb.GetConsensusStateRequest, context: Any) -> Any:
        """The state of the replicas here; all replicas if the request names no tablet."""
        replicas = self._replicas
        reports: list[common_pb2.ReplicaStatusPB]
        if request.tablet_ids:
            keys = [key for raw in request.tablet_ids for key in replicas.keys_of(id_from_pb(raw))]
            maybe = [report_one(replicas, key) for key in keys]
            reports = [r for r in maybe if r is not None]
        else:
            reports = all_reports(replicas)
        return pb.GetConsensusStateResponse(
            node_id=id_to_pb(self._identity.node_id),
            incarnation=self._identity.incarnation,
            replicas=reports,
        )

    async def StartTabletCopy(self, request: pb.StartTabletCopyRequest, context: Any) -> Any:
        """Begin a copy to this node, or report its progress. For a witness, the answer comes once it logs and
        votes.
        """
        fenced = self._fences.of_driver(request.driver_epoch)
        order = CopyOrder(
            tablet_id=TabletId(id_from_pb(request.tablet_id)),
            replica_id=ReplicaId(request.replica_id),
            source_node=NodeId(id_from_pb(request.source_node)),
            source_address=request.source_address,
            witness=request.witness,
            witness_start=opid_from_pb(request.witness_start),
            bytes_per_second=request.bytes_per_second,
            caller_term=request.caller_term,
            log_only=request.log_only,
            cause=_cause(request.driver_epoch, request.reason),
        )
        if order.log_only and not order.witness:
            raise Rejected("log_only needs witness: only a witness has a log before it has rows")
        if not order.replica_id or not order.source_node or not order.source_address:
            raise Rejected(
                "the request to copy lacks the replica_id, the source node or the source's address"
            )
        source = self._copy_source(order.source_node, order.source_address)
        with fenced:
            copy = await self._manager.start_copy(order, source)
            await fenced.carried_out()
        if copy is None:
            done = common_pb2.CopyProgressPB(
                replica_id=order.replica_id, source_node=id_to_pb(order.source_node), state="Done"
            )
            return pb.StartTabletCopyResponse(progress=done)
        if order.witness and not await copy.wait_prepared(_PREPARE_TIMEOUT_S):
            raise Retryable("the witness is not ready yet; ask again")
        self._changed(copy.key)
        return pb.StartTabletCopyResponse(
            progress=copy_progress(copy), witness_start=opid_to_pb(copy.witness_start)
        )


def _cause(driver_epoch: int, reason: str) -> str:
    """Why an order is carried out, for the log. If the order has no epoch, the text says that an
    administrator gave it.
    """
    return cut(reason if driver_epoch else f"an administrator's order: {reason or 'no reason was given'}")
