"""Production's planner heals the group: it plans on what nodes report, and its steps become calls on nodes.

This file stands in for the masters: it keeps what is heard of nodes, and the one intent. Plain calls stand in
for gRPC; a leader that was replaced refuses them, too. Invariant: does only what `stele.driver.planner.plan`
says, or cancels a witness that is refused again and again, as the executor does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stele.consensus.superblock import DataState
from stele.driver.planner import plan
from stele.driver.policy import Policy
from stele.driver.situation import judge
from stele.driver.steps import (
    WAITS,
    AddPreFollower,
    AddWitness,
    BeginIntent,
    CancelCopy,
    DemotePeer,
    EndIntent,
    MoveLeader,
    PromoteBack,
    RemovePeer,
    StartCopy,
    Step,
)
from stele.driver.trials import WitnessRefusals
from stele.driver.view import Claim, ClusterView, Intent, NodeView, TabletView
from stele.driver.wire import freshen
from stele.model.config import MemberType, Peer
from stele.model.errors import SteleError
from stele.model.ids import OPID_NONE, OpId, ReplicaId
from stele.raft.events import ChangeType
from stele.rpc.proto.common_pb2 import ReplicaStatusPB
from tests.sim.messenger import node_of
from tests.sim.node import TABLET, SimNode

if TYPE_CHECKING:
    from tests.sim.driver import Driver
    from tests.sim.world import World

_POLICY = Policy(
    dead_after_ms=3_000, unreached_after_ms=5_000, max_lost_nodes=99, min_disk_free_bytes=0, retire=False
)
_EPOCH = 1


class Healer:
    """The healer of one world."""

    def __init__(self, world: World, driver: Driver) -> None:
        self._world = world
        self._driver = driver
        self._intent: Intent | None = None
        self._refusals = WitnessRefusals()
        self._heard: dict[int, float] = {}
        """When each node was last found up."""

    def look(self) -> None:
        """One pass: observe, plan, and give the most urgent order."""
        view = self._view()
        steps = plan(view, _POLICY)
        if steps and not isinstance(steps[0], WAITS):
            self._give(self._refusals.instead(steps[0]), view)

    def content(self) -> bool:
        """Whether the planner finds nothing to do."""
        return self._intent is None and not plan(self._view(), _POLICY)

    # What it observes

    def _view(self) -> ClusterView:
        world = self._world
        named = [world.nodes[peer.replica_id] for peer in world.history.config.peers]
        if self._intent is not None and (brought := world.nodes[self._intent.replica_id]) not in named:
            named.append(brought)
        nodes = [self._node_view(node) for node in named]
        spare = node_of(len(world.nodes) + 1)
        nodes.append(NodeView(spare, "node", spare, "", "spare:1"))
        config = world.history.config
        tablet = TabletView(
            TABLET, named[0].superblock.table_id, "t", "RUNNING", config, 0, "", world.plan.voters
        )
        reports: dict[str, list[ReplicaStatusPB]] = {
            node.node_id: [node.replica.status()] for node in named if node.replica is not None and node.up
        }
        intents = () if self._intent is None else (self._intent,)
        view = ClusterView(tuple(nodes), (tablet,), intents, Claim("sim", _EPOCH, 1 << 60))
        return freshen(view, reports)

    def _node_view(self, node: SimNode) -> NodeView:
        now = self._world.now
        if node.up or not node.formed:  # a process runs without a replica where nothing is formed yet
            self._heard[node.replica_id] = now
        age_ms = int(now - self._heard.setdefault(node.replica_id, now))
        return NodeView(
            node.node_id, "node", node.node_id, "", f"{node.replica_id}:1", heartbeat_age_ms=age_ms
        )

    # What it orders

    def _give(self, step: Step, view: ClusterView) -> None:
        world, tablet = self._world, view.tablets[0]
        world.trace("the planner: {}: {}", type(step).__name__, step.reason)
        world.met[f"planned: {type(step).__name__}"] += 1
        leader = None if tablet.leader is None else world.nodes[tablet.leader.replica_id]
        match step:
            case BeginIntent():
                self._begin(step, view)
            case StartCopy():
                self._start_copy(step)
            case EndIntent():
                self._intent = None
            case _ if leader is None:
                return
            case MoveLeader():
                self._driver.hand_over(leader, None)
            case RemovePeer(replica_id=replica_id):
                self._change(leader, step, ChangeType.REMOVE, _peer(tablet, replica_id))
            case DemotePeer(replica_id=replica_id):
                peer = replace(_peer(tablet, replica_id), member_type=MemberType.NON_VOTER, promote=False)
                self._change(leader, step, ChangeType.MODIFY, peer)
            case PromoteBack(replica_id=replica_id):
                peer = replace(_peer(tablet, replica_id), member_type=MemberType.NON_VOTER, promote=True)
                self._change(leader, step, ChangeType.MODIFY, peer)
            case AddPreFollower(replica_id=replica_id):
                peer = Peer(node_of(replica_id), replica_id, "", MemberType.NON_VOTER, True)
                self._change(leader, step, ChangeType.ADD, peer)
            case AddWitness(replica_id=replica_id):
                # As the executor: the report of a witness whose rows arrived before it was added has no
                # start.
                start = world.nodes[replica_id].superblock.witness_start
                start = step.witness_start if start == OPID_NONE else start
                peer = Peer(node_of(replica_id), replica_id, "", MemberType.WITNESS, witness_start=start)
                self._change(leader, step, ChangeType.ADD, peer)
            case CancelCopy():
                # A change that changes nothing is a fence: late orders find a newer configuration index.
                self._change(leader, step, ChangeType.MODIFY, _peer(tablet, leader.replica_id))

    def _change(self, leader: SimNode, step: Step, change_type: ChangeType, peer: Peer) -> None:
        intent = self._intent

        def ended(error: SteleError | None) -> None:
            self._refusals.count(step, error)
            if (
                error is None
                and isinstance(step, CancelCopy)
                and intent is not None
                and self._intent is intent
            ):
                node = self._world.nodes[intent.replica_id]
                self._intent = None
                node.exits("its intent has ended", again=False)
                node.retired = True

        self._driver.order(leader, change_type, peer, step.cas, ended)

    def _begin(self, step: BeginIntent, view: ClusterView) -> None:
        start = _witness_start(view) if step.witness else OPID_NONE
        if step.witness and start == OPID_NONE:
            return
        node = self._world.add_node(DataState.COPYING if step.witness else DataState.READY)
        assert node.node_id == step.target_node
        node.superblock = replace(node.superblock, witness_start=start)
        self._intent = Intent(
            TABLET,
            node.replica_id,
            node.node_id,
            step.kind,
            _EPOCH,
            step.source_node,
            step.replaces_replica,
            step.witness,
            start,
        )

    def _start_copy(self, step: StartCopy) -> None:
        node = self._world.nodes[step.replica_id]
        source = self._world.nodes[int(step.source_node, 16)]
        if source.replica is None or not source.replica.running:
            return
        if node.formed:
            if step.witness and not step.log_only:
                self._driver.fetch_rows(node, source)
            return
        if step.witness:
            start = node.superblock.witness_start
            node.form(start, source.replica.members.config_at(start.index))
            node.boot()
            return
        checkpoint = source.rows.held_checkpoint()
        if checkpoint is not None:
            node.form(*checkpoint)
            node.boot()
            self._world.met["a copy made"] += 1


def _peer(tablet: TabletView, replica_id: ReplicaId) -> Peer:
    peer = tablet.config.peer(replica_id)
    assert peer is not None
    return peer


def _witness_start(view: ClusterView) -> OpId:
    """The newest OpId that every live data voter knows to be committed, as the executor asks for it.
    OPID_NONE if one of them has nothing."""
    situation = judge(view.tablets[0], view, _POLICY, {node.node_id: node for node in view.nodes})
    told = [OPID_NONE if m.report is None else m.report.last_committed for m in situation.data_voters]
    return min(told, key=lambda opid: opid.index, default=OPID_NONE)
