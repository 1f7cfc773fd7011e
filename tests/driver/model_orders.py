"""What the model does with the driver's orders, as leaders and the catalog would.

Invariant: a late, stale or unsafe order is refused and changes nothing; after every change any two majorities of
neighbouring configurations meet.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

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
from stele.driver.view import (
    MOVE,
    MOVE_BY_HAND,
    Intent,
    NodeState,
    Wanted,
)
from stele.model.config import Configuration, MemberType, Peer
from stele.model.ids import NodeId, ReplicaId, TabletId
from tests.driver.model_parts import (
    ModelNode,
    ModelReplica,
    Refused,
)

if TYPE_CHECKING:
    from tests.driver.model import Cluster


class Orders:
    """Carries out orders on one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def apply(self, step: Step) -> None:
        """Carry a step out as real servers would, or refuse it."""
        match step:
            case BeginIntent():
                self._begin(step)
            case TakeOverIntent():
                intent = self.cluster.intents[step.tablet_id]
                self.cluster.intents[step.tablet_id] = replace(intent, epoch=self.cluster.epoch)
            case StartCopy():
                self._start_copy(step)
            case DemotePeer():
                self._check_kept(step.tablet_id, step.replica_id)
                self._modify(step, step.replica_id, member_type=MemberType.NON_VOTER, promote=False)
            case PromoteBack():
                self._modify(step, step.replica_id, member_type=MemberType.NON_VOTER, promote=True)
            case AddWitness():
                peer = Peer(step.target_node, step.replica_id, "", MemberType.WITNESS)
                self._add(step, peer)
            case AddPreFollower():
                peer = Peer(step.target_node, step.replica_id, "", MemberType.NON_VOTER, promote=True)
                self._add(step, peer)
            case RemovePeer():
                self._remove(step)
            case CancelCopy():
                self.change(
                    step.tablet_id, step.cas, self.cluster.tablets[step.tablet_id].config.peers, added=None
                )
                self.end(step.tablet_id, step.replica_id, cancelled=True)
            case EndIntent():
                self.end(step.tablet_id, step.replica_id, cancelled=False)
            case MoveLeader():
                self._move_leader(step)
            case DrainNode():
                self._drain(step)
            case ParkNode():
                node = self.cluster.nodes[step.node_id]
                node.state, node.given_up = NodeState.ACTIVE, False
                node.wanted, node.wanted_by = Wanted.PARKED, self._by_driver(node)
            case EndWish():
                node = self.cluster.nodes[step.node_id]
                assert self._by_driver(node) == node.wanted_by, "took back a state that nobody wanted"
                node.state, node.given_up, node.wanted, node.wanted_by = NodeState.ACTIVE, False, None, ""
            case ReturnNode():
                self._return(self.cluster.nodes[step.node_id])
            case RetireNode():
                self._retire(step.node_id)
            case _:
                pass

    def _begin(self, step: BeginIntent) -> None:
        t = self.cluster.tablets[step.tablet_id]
        target = self.cluster.nodes[step.target_node]
        if step.tablet_id in self.cluster.intents or target.state is not NodeState.ACTIVE or target.parked:
            raise Refused("intent")
        self._check_kept(step.tablet_id, step.replaces_replica)
        if step.kind in (MOVE, MOVE_BY_HAND):
            source = t.config.peer(ReplicaId(step.replaces_replica))
            assert source is not None and self.cluster.live(t, source), "only a healthy replica is moved"
            assert len(self.cluster.live_voters(t)) == len(t.config.voters), (
                "a move begins while a voter is lost"
            )
            self.cluster.moves.append((step.kind, t.tablet_id, source.node_id, step.target_node))
        rid = ReplicaId(t.next_replica_id)
        t.next_replica_id += 1
        self.cluster.intents[step.tablet_id] = Intent(
            step.tablet_id,
            rid,
            step.target_node,
            step.kind,
            self.cluster.epoch,
            step.source_node,
            step.replaces_replica,
            step.witness,
            cause=step.cause,
        )

    def _start_copy(self, step: StartCopy) -> None:
        t = self.cluster.tablets[step.tablet_id]
        if not self.cluster.nodes[step.target_node].alive:
            raise Refused("target does not answer")
        held = t.replicas.get(step.replica_id)
        if held is not None and held.tombstoned:
            raise Refused("a replica_id is never used again")
        if held is None:
            t.replicas[step.replica_id] = ModelReplica(
                step.target_node, has_data=False, copied=0, waiting=step.log_only
            )
        elif not step.log_only:
            held.waiting = False

    def _move_leader(self, step: MoveLeader) -> None:
        t = self.cluster.tablets[step.tablet_id]
        heirs = [p.node_id for p in self.cluster.data_voters(t)]
        if not step.target_node:
            t.leader = next((n for n in heirs if n not in {*t.behind, t.leader}), t.leader)
            return
        if not t.leader:
            raise Refused("NOT_LEADER")
        if step.target_node not in heirs:
            raise Refused("UNSAFE_CHANGE")
        if step.target_node in t.behind:
            raise Refused("NOT_READY")
        if step.target_node != t.leader:
            self.cluster.leader_moves[t.tablet_id] += 1
        t.leader = step.target_node

    def _modify(self, step: Step, replica_id: int, *, member_type: MemberType, promote: bool) -> None:
        t = self.cluster.tablets[step.tablet_id]
        peers = tuple(
            replace(p, member_type=member_type, promote=promote) if p.replica_id == replica_id else p
            for p in t.config.peers
        )
        self.change(step.tablet_id, step.cas, peers, added=None)

    def _add(self, step: Step, peer: Peer) -> None:
        t = self.cluster.tablets[step.tablet_id]
        if t.config.peer(peer.replica_id) is not None:
            raise Refused("there already")
        self.change(step.tablet_id, step.cas, (*t.config.peers, peer), added=peer)
        replica = t.replicas.get(peer.replica_id)
        assert replica is not None, "added before it was prepared"
        assert not replica.tombstoned, "a late order added a replica whose intent had ended"

    def _remove(self, step: RemovePeer) -> None:
        t = self.cluster.tablets[step.tablet_id]
        left = tuple(p for p in t.config.peers if p.replica_id != step.replica_id)
        if t.leader == step.node_id and self.cluster.nodes[step.node_id].alive:
            raise Refused("STEPPING_DOWN")
        self.change(step.tablet_id, step.cas, left, added=None)
        after = t.config
        assert len(self.cluster.data_voters(t)) >= after.majority, (
            f"no majority of {after} holds the rows after {step}"
        )

    def change(self, tablet_id: str, cas: int, peers: tuple[Peer, ...], *, added: Peer | None) -> None:
        """Commit another configuration, as a leader would. Raises Refused."""
        t = self.cluster.tablets[tablet_id]
        before = t.config
        if cas != before.opid_index:
            raise Refused("CAS_FAILED")
        if not self.cluster.has_quorum(t):
            raise Refused("NO_QUORUM")
        t.log_index += 1
        after = Configuration(t.log_index, peers)
        reachable = [p for p in self.cluster.live_voters(t, after) if p != added]
        if len(before.voters) > 1 and len(reachable) < after.majority:
            raise Refused("UNSAFE_CHANGE")
        self.check_step(before, after)
        t.config = after
        self.cluster.history.append(f"{tablet_id[-2:]} {after.opid_index}: {[_short(p) for p in peers]}")
        if t.leader not in [p.node_id for p in self.cluster.data_voters(t)]:
            t.leader = ""

    def check_step(self, before: Configuration, after: Configuration) -> None:
        """Check that any two majorities of neighbouring configurations meet, and that no machine has two
        replicas."""
        old = {p.replica_id for p in before.voters}
        new = {p.replica_id for p in after.voters}
        assert len(old ^ new) <= 1, f"more than one voter changed: {before} to {after}"
        for left in combinations(sorted(old), before.majority):
            for right in combinations(sorted(new), after.majority):
                assert set(left) & set(right), f"two majorities might not meet: {before} to {after}"
        machines = [self.cluster.nodes[p.node_id].machine for p in after.peers]
        assert len(set(machines)) == len(machines), f"two replicas on one machine: {after}"
        witnesses = sum(p.member_type is MemberType.WITNESS for p in after.peers)
        assert witnesses < after.majority, f"witnesses alone could be a majority: {after}"

    def end(self, tablet_id: str, replica_id: int, *, cancelled: bool) -> None:
        """End the intent of a tablet. Raises Refused."""
        t = self.cluster.tablets[tablet_id]
        intent = self.cluster.intents.get(tablet_id)
        if intent is None or intent.replica_id != replica_id:
            raise Refused("no such intent")
        member = t.config.peer(replica_id)
        if not cancelled and member is None:
            raise Refused("its replica is not in the configuration")
        assert not (cancelled and member is not None), "cancelled although a member"
        del self.cluster.intents[tablet_id]

    def _check_kept(self, tablet_id: str, replica_id: int) -> None:
        """A voter on a parked node is not replaced while its node is only away."""
        peer = self.cluster.tablets[TabletId(tablet_id)].config.peer(replica_id)
        if peer is None or peer.member_type is not MemberType.VOTER:
            return
        node = self.cluster.nodes[peer.node_id]
        failed = node.gone or self.cluster.tablets[TabletId(tablet_id)].replicas[replica_id].failed
        assert failed or not node.parked, f"replica {replica_id} on a parked node goes"

    def _by_driver(self, node: ModelNode) -> str:
        if node.wanted_by == "administrator":
            raise Refused("an administrator asked for it")
        return "driver"

    def _drain(self, step: DrainNode) -> None:
        node = self.cluster.nodes[step.node_id]
        by = "" if step.given_up else self._by_driver(node)
        node.state, node.given_up = NodeState.DRAINING, step.given_up
        node.wanted, node.wanted_by = None, by

    def _retire(self, node_id: NodeId) -> None:
        named = {p.node_id for t in self.cluster.tablets.values() for p in t.config.peers}
        named |= {i.target_node for i in self.cluster.intents.values()}
        assert node_id not in named, "retired a node that a configuration or an intent names"
        node = self.cluster.nodes[node_id]
        assert node.wanted is not Wanted.DRAINED or not node.alive, "retired a node that was to stay"
        node.state, node.wanted = NodeState.RETIRED, None

    def _return(self, node: ModelNode) -> None:
        if node.state is not NodeState.DRAINING or not node.given_up:
            raise Refused("it was not given up as silent")
        node.state, node.given_up = NodeState.ACTIVE, False


def _short(p: Peer) -> str:
    return f"{p.replica_id}@{p.node_id[-2:]}{'' if p.member_type is MemberType.VOTER else p.member_type.name}"
