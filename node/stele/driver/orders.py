"""Carries out single steps over gRPC. A step becomes one order, or a few that are safe to repeat together.

Called by executor. Remembers nothing. Invariant: every order carries the claim's epoch. An order to a leader
also carries the configuration index on which it was planned. So a late order changes nothing.
"""

from __future__ import annotations

from typing import Any

from stele.driver.policy import Policy
from stele.driver.steps import (
    AddPreFollower,
    AddWitness,
    BeginIntent,
    CancelCopy,
    DemotePeer,
    DrainNode,
    EndIntent,
    EndWish,
    MoveLeader,
    ParkNode,
    PromoteBack,
    RemovePeer,
    RetireNode,
    ReturnNode,
    StartCopy,
    Step,
    TakeOverIntent,
)
from stele.driver.view import ClusterView, Intent, NodeView, TabletView
from stele.driver.wire import intent_to_pb
from stele.driver.witness_starts import WitnessStarts
from stele.model.bounds import cut
from stele.model.config import Configuration, MemberType, Peer
from stele.model.errors import Code, Retryable
from stele.model.ids import OPID_NONE, NodeId, OpId, ReplicaId, TabletId
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import (
    config_from_pb,
    config_to_pb,
    id_to_pb,
    opid_from_pb,
    opid_to_pb,
    peer_to_pb,
)
from stele.rpc.masters import Masters
from stele.rpc.proto import consensus_pb2, master_pb2
from stele.rpc.proto.consensus_pb2_grpc import ConsensusServiceStub

CHANGE_TIMEOUT_S = 5.0
INTENT_TTL_US = 60_000_000


class Orders:
    """Gives orders under one claim."""

    def __init__(
        self, pool: ChannelPool, masters: Masters, epoch: int, policy: Policy, starts: WitnessStarts
    ) -> None:
        self._pool = pool
        self._starts = starts
        self._masters = masters
        self._epoch = epoch
        self._policy = policy

    async def give(self, step: Step, view: ClusterView) -> None:
        """Carry out one step. Waits and blocks need no order.

        Raises:
            SteleError: the error that the master or node answered. The next round plans the step again.
        """
        match step:
            case BeginIntent():
                await self._begin(step, view)
            case TakeOverIntent():
                await self._take_over(step, view)
            case StartCopy():
                await self._start_copy(step, view)
            case AddWitness():
                await self._add_witness(step, view)
            case AddPreFollower():
                peer = self._new_peer(step.target_node, step.replica_id, view)
                await self._change(step, view, consensus_pb2.ADD_PEER, peer)
            case DemotePeer():
                peer = _member(step.tablet_id, step.replica_id, view)
                demoted = Peer(peer.node_id, peer.replica_id, peer.address, MemberType.NON_VOTER)
                await self._change(step, view, consensus_pb2.MODIFY_PEER, demoted)
            case PromoteBack():
                peer = _member(step.tablet_id, step.replica_id, view)
                back = Peer(peer.node_id, peer.replica_id, peer.address, MemberType.NON_VOTER, promote=True)
                await self._change(step, view, consensus_pb2.MODIFY_PEER, back)
            case RemovePeer():
                gone = _member(step.tablet_id, step.replica_id, view)
                await self._change(step, view, consensus_pb2.REMOVE_PEER, gone)
            case MoveLeader():
                await self._move_leader(step, view)
            case CancelCopy():
                await self._cancel(step, view)
            case EndIntent():
                tablet = _tablet(step.tablet_id, view)
                await self._end(step.tablet_id, step.replica_id, tablet.config, tablet.term)
            case DrainNode():
                await self._node_state(step.node_id, master_pb2.DRAINING, step.reason, step.given_up)
            case ReturnNode():
                await self._node_state(step.node_id, master_pb2.ACTIVE, step.reason)
            case ParkNode():
                await self._want(step.node_id, master_pb2.WANTED_PARKED, step.reason, step.for_ms)
            case EndWish():
                await self._want(step.node_id, master_pb2.WANTED_IN_SERVICE, step.reason)
            case RetireNode():
                await self._node_state(step.node_id, master_pb2.RETIRED, step.reason)
            case _:
                return

    async def _begin(self, step: BeginIntent, view: ClusterView) -> None:
        start = self._starts.of(step.tablet_id) if step.witness else OPID_NONE
        intent = Intent(
            step.tablet_id,
            ReplicaId(0),
            step.target_node,
            step.kind,
            self._epoch,
            step.source_node,
            step.replaces_replica,
            step.witness,
            start,
            view.now_us + INTENT_TTL_US,
            step.reason,
            step.cause,
        )
        request = master_pb2.BeginIntentRequest(epoch=self._epoch, intent=intent_to_pb(intent))
        await self._masters.call("BeginIntent", request)

    async def _take_over(self, step: TakeOverIntent, view: ClusterView) -> None:
        intent = view.intent(step.tablet_id)
        if intent is None or intent.replica_id != step.replica_id:
            raise Retryable(
                f"tablet {step.tablet_id[:8]}: its intent has ended meanwhile; the next round plans anew",
                code=Code.CAS_FAILED,
            )
        pb = intent_to_pb(intent)
        pb.expires_us = view.now_us + INTENT_TTL_US
        pb.epoch = self._epoch
        await self._masters.call("BeginIntent", master_pb2.BeginIntentRequest(epoch=self._epoch, intent=pb))

    async def _start_copy(self, step: StartCopy, view: ClusterView) -> OpId:
        """Order a copy. Returns the `witness_start` in force."""
        tablet = _tablet(step.tablet_id, view)
        source = _node(step.source_node, view)
        request = consensus_pb2.StartTabletCopyRequest(
            tablet_id=id_to_pb(step.tablet_id),
            replica_id=step.replica_id,
            source_node=id_to_pb(source.node_id),
            source_address=source.address,
            caller_term=tablet.term,
            driver_epoch=self._epoch,
            witness=step.witness,
            witness_start=opid_to_pb(step.witness_start) if step.witness else None,
            bytes_per_second=self._policy.bytes_per_second,
            table_id=id_to_pb(tablet.table_id),
            log_only=step.log_only,
            reason=cut(step.because),
        )
        answer = await self._to_node(_node(step.target_node, view), "StartTabletCopy", request)
        told = opid_from_pb(answer.witness_start)
        return told if told != OPID_NONE else step.witness_start

    async def _add_witness(self, step: AddWitness, view: ClusterView) -> None:
        tablet = _tablet(step.tablet_id, view)
        report = tablet.report(step.replica_id, step.target_node)
        copy = report.copy if report is not None else None
        leader = tablet.leader or tablet.config.peers[0]
        prepared = StartCopy(
            step.tablet_id,
            step.cas,
            step.reason,
            step.replica_id,
            step.target_node,
            # Keep the source of a running copy: with another one it would start again.
            NodeId(copy.source_node) if copy is not None and copy.source_node else leader.node_id,
            True,
            step.witness_start,
            log_only=True,  # a running copy continues
            cause=step.cause,
        )
        start = await self._start_copy(prepared, view)
        plain = self._new_peer(step.target_node, step.replica_id, view)
        peer = Peer(plain.node_id, plain.replica_id, plain.address, MemberType.WITNESS, witness_start=start)
        await self._change(step, view, consensus_pb2.ADD_PEER, peer)

    def _new_peer(self, node_id: str, replica_id: ReplicaId, view: ClusterView) -> Peer:
        node = _node(node_id, view)
        return Peer(node.node_id, replica_id, node.address, MemberType.NON_VOTER, promote=True)

    async def _change(
        self,
        step: Step,
        view: ClusterView,
        change_type: consensus_pb2.ChangeTypePB.ValueType,
        peer: Peer,
    ) -> Configuration:
        tablet = _tablet(step.tablet_id, view)
        request = consensus_pb2.BulkChangeConfigRequest(
            tablet_id=id_to_pb(step.tablet_id),
            type=change_type,
            peer=peer_to_pb(peer),
            cas_config_opid_index=step.cas,
            driver_epoch=self._epoch,
            reason=cut(step.because),
            tablet_incarnation=tablet.config.incarnation,
        )
        answer = await self._to_node(_node(tablet.leader_node, view), "BulkChangeConfig", request)
        return config_from_pb(answer.committed)

    async def _move_leader(self, step: MoveLeader, view: ClusterView) -> None:
        """Order a transfer of leadership. The term fences a late order: by then the leader was elected again,
        or another one leads.
        """
        tablet = _tablet(step.tablet_id, view)
        request = consensus_pb2.LeaderStepDownRequest(
            tablet_id=id_to_pb(step.tablet_id),
            target_node=id_to_pb(step.target_node),
            driver_epoch=self._epoch,
            reason=cut(step.because),
            term=tablet.term,
        )
        await self._to_node(_node(tablet.leader_node, view), "LeaderStepDown", request)

    async def _cancel(self, step: CancelCopy, view: ClusterView) -> None:
        """Fence late orders, then end the intent. The fence rewrites the leader's own peer entry, so that
        late orders meet a newer configuration index.
        """
        tablet = _tablet(step.tablet_id, view)
        leader = tablet.leader
        if leader is None:
            raise Retryable(
                f"tablet {step.tablet_id[:8]} has no leader that could fence the cancelled copy; "
                "the next round tries again"
            )
        committed = await self._change(step, view, consensus_pb2.MODIFY_PEER, leader)
        await self._end(step.tablet_id, step.replica_id, committed, tablet.term)

    async def _end(
        self, tablet_id: TabletId, replica_id: ReplicaId, committed: Configuration, term: int
    ) -> None:
        request = master_pb2.EndIntentRequest(
            epoch=self._epoch,
            tablet_id=id_to_pb(tablet_id),
            replica_id=replica_id,
            committed_config=config_to_pb(committed),
            term=term,
        )
        await self._masters.call("EndIntent", request)

    async def _node_state(
        self, node_id: str, state: master_pb2.NodeStatePB.ValueType, reason: str, given_up: bool = False
    ) -> None:
        request = master_pb2.SetNodeStateRequest(
            epoch=self._epoch, node_id=id_to_pb(node_id), state=state, reason=cut(reason), given_up=given_up
        )
        await self._masters.call("SetNodeState", request)

    async def _want(
        self, node_id: str, wanted: master_pb2.WantedPB.ValueType, reason: str, for_ms: int = 0
    ) -> None:
        request = master_pb2.WantNodeRequest(
            epoch=self._epoch, node_id=id_to_pb(node_id), wanted=wanted, reason=cut(reason), for_ms=for_ms
        )
        await self._masters.call("WantNode", request)

    async def _to_node(self, node: NodeView, method: str, request: Any) -> Any:
        return await self._pool.unary(
            node.address,
            ConsensusServiceStub,
            method,
            request,
            timeout_s=CHANGE_TIMEOUT_S,
            to_node=node.node_id,
        )


def _tablet(tablet_id: str, view: ClusterView) -> TabletView:
    tablet = view.tablet(tablet_id)
    if tablet is not None:
        return tablet
    raise Retryable(
        f"tablet {tablet_id[:8]} is not in the masters' view any more; the next round plans anew",
        code=Code.NOT_READY,
    )


def _node(node_id: str, view: ClusterView) -> NodeView:
    node = view.node(node_id)
    if node is None or not node.address:
        raise Retryable(
            f"node {node_id[:8] or '(none)'} has no known address yet; the next round tries again",
            code=Code.UNAVAILABLE,
        )
    return node


def _member(tablet_id: str, replica_id: int, view: ClusterView) -> Peer:
    peer = _tablet(tablet_id, view).config.peer(replica_id)
    if peer is None:
        raise Retryable(
            f"tablet {tablet_id[:8]}: replica {replica_id} is not a member any more; the next round plans anew",
            code=Code.CAS_FAILED,
        )
    return peer
