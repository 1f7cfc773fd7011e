"""Carries steps out on a view, as if each succeeded at once. Used by forecasts and by the operator's
rehearsal. Pure.

A step stands for everything that follows from it. A replica that begins is at once a voter with its rows, and
the replica that it replaces is gone. Invariant: only steps of the planner change the view.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from stele.driver.nodes import DRIVER
from stele.driver.policy import Policy
from stele.driver.steps import (
    BeginIntent,
    DemotePeer,
    DrainNode,
    EndWish,
    MoveLeader,
    ParkNode,
    PromoteBack,
    RemovePeer,
    RetireNode,
    ReturnNode,
    Step,
)
from stele.driver.targets import tablet_bytes
from stele.driver.view import ClusterView, Intent, NodeState, NodeView, ReplicaView, TabletView, Wanted
from stele.model.config import MemberType, Peer
from stele.model.ids import NodeId, ReplicaId, TabletId

ALL_AT_ONCE = 1 << 30
"""The limit of copies at once in a rehearsal, which covers all copies. How many run at a time changes only
how long they take.
"""


@dataclass(frozen=True, slots=True)
class NewReplica:
    """A replica that a step makes. `from_node`: the node of the replica that it replaces; "": it replaces
    none.
    """

    tablet_id: TabletId
    table_name: str
    from_node: NodeId
    target_node: NodeId
    size_bytes: int
    first_as_witness: bool
    kind: str
    reason: str


def unhurried(policy: Policy) -> Policy:
    """The policy without limits on how much happens at once."""
    return replace(policy, max_copies=ALL_AT_ONCE, bytes_per_second=0, leader_moves_at_once=ALL_AT_ONCE)


def settled(view: ClusterView) -> ClusterView:
    """The view after the changes under way are done: joining replicas vote, and replaced ones are gone."""
    tablets = tuple(_settled(t, view.intent(t.tablet_id)) for t in view.tablets)
    return replace(view, tablets=tablets, intents=())


def new_replicas(view: ClusterView, steps: Iterable[Step]) -> list[NewReplica]:
    """The replicas that the steps make, in the order of the steps."""
    found = []
    for step in steps:
        tablet = view.tablet(step.tablet_id) if isinstance(step, BeginIntent) else None
        if tablet is None or not isinstance(step, BeginIntent):
            continue
        replaced = tablet.config.peer(step.replaces_replica)
        found.append(
            NewReplica(
                tablet.tablet_id,
                tablet.table_name,
                replaced.node_id if replaced is not None else NodeId(""),
                step.target_node,
                tablet_bytes(tablet),
                step.witness,
                step.kind,
                step.reason,
            )
        )
    return found


def carried_out(view: ClusterView, steps: Collection[Step]) -> ClusterView:
    """The view after the steps, and everything that follows from them, are done. Waits change nothing."""
    of_tablet = {s.tablet_id: s for s in steps if s.tablet_id}
    of_node = {s.node_id: s for s in steps if isinstance(s, _OF_NODES)}
    arrived: Counter[str] = Counter()
    tablets: list[TabletView] = []
    for tablet in view.tablets:
        step = of_tablet.get(tablet.tablet_id)
        after = _after(tablet, step, view) if step is not None else tablet
        if after is not tablet:
            size = tablet_bytes(tablet)
            for sign, peers in ((-size, tablet.config.peers), (size, after.config.peers)):
                for peer in peers:
                    arrived[peer.node_id] += sign
        tablets.append(after)
    held = Counter(p.node_id for t in tablets for p in t.config.peers)
    nodes = tuple(
        _filled(_asked(n, of_node.get(n.node_id)), arrived[n.node_id], held[n.node_id]) for n in view.nodes
    )
    return replace(view, nodes=nodes, tablets=tuple(tablets))


_OF_NODES = (DrainNode, ReturnNode, ParkNode, EndWish, RetireNode)


def _settled(tablet: TabletView, intent: Intent | None) -> TabletView:
    peers = [
        p if p.member_type is MemberType.VOTER else Peer(p.node_id, p.replica_id, p.address, MemberType.VOTER)
        for p in tablet.config.peers
        if (p.votes or p.promote) and not (intent is not None and p.replica_id == intent.replaces_replica)
    ]
    if intent is not None and not any(p.replica_id == intent.replica_id for p in peers):
        peers.append(Peer(intent.target_node, intent.replica_id, "", MemberType.VOTER))
    config = replace(tablet.config, peers=tuple(peers))
    joined = [
        ReplicaView(p.node_id, p.replica_id, bytes_on_disk=tablet_bytes(tablet))
        for p in peers
        if intent is not None and p.replica_id == intent.replica_id
    ]
    kept = [r for r in tablet.replicas if not any(r.replica_id == j.replica_id for j in joined)]
    return replace(tablet, config=config, replicas=(*kept, *joined))


def _after(tablet: TabletView, step: Step, view: ClusterView) -> TabletView:
    match step:
        case BeginIntent():
            return _led(_with_new(tablet, step), view)
        case RemovePeer():
            return _led(
                _with_peers(tablet, [p for p in tablet.config.peers if p.replica_id != step.replica_id]), view
            )
        case DemotePeer():
            return _led(_as(tablet, step.replica_id, MemberType.NON_VOTER), view)
        case PromoteBack():
            return _as(tablet, step.replica_id, MemberType.VOTER)
        case MoveLeader():
            return replace(tablet, leader_node=step.target_node or _heir(tablet, view, tablet.leader_node))
        case _:
            return tablet


def _with_new(tablet: TabletView, step: BeginIntent) -> TabletView:
    new_id = ReplicaId(max(p.replica_id for p in tablet.config.peers) + 1)
    peers = [p for p in tablet.config.peers if p.replica_id != step.replaces_replica]
    peers.append(Peer(step.target_node, new_id, "", MemberType.VOTER))
    report = ReplicaView(step.target_node, new_id, bytes_on_disk=tablet_bytes(tablet))
    return _with_peers(replace(tablet, replicas=(*tablet.replicas, report)), peers)


def _with_peers(tablet: TabletView, peers: Sequence[Peer]) -> TabletView:
    there = {p.replica_id for p in peers}
    config = replace(tablet.config, opid_index=tablet.config.opid_index + 1, peers=tuple(peers))
    reports = tuple(r for r in tablet.replicas if r.replica_id in there)
    return replace(tablet, config=config, replicas=reports)


def _as(tablet: TabletView, replica_id: int, member_type: MemberType) -> TabletView:
    peers = [
        Peer(p.node_id, p.replica_id, p.address, member_type) if p.replica_id == replica_id else p
        for p in tablet.config.peers
    ]
    return _with_peers(tablet, peers)


def _led(tablet: TabletView, view: ClusterView) -> TabletView:
    """The tablet with another leader, if its leader is no longer a voter."""
    leader = tablet.leader
    if not tablet.leader_node or (leader is not None and leader.votes):
        return tablet
    return replace(tablet, leader_node=_heir(tablet, view, tablet.leader_node))


def _heir(tablet: TabletView, view: ClusterView, without: str) -> str:
    """The voter that would lead next: on a node in service if there is one."""
    voters = [p.node_id for p in tablet.config.peers if p.votes and p.node_id != without]

    def away(node_id: str) -> bool:
        node = view.node(node_id)
        return node is None or not node.takes_replicas

    return min(voters, key=away, default=tablet.leader_node)


def _asked(node: NodeView, step: Step | None) -> NodeView:
    match step:
        case DrainNode(given_up=True):
            return replace(node, state=NodeState.DRAINING, given_up=True, wanted=None, wanted_by="")
        case DrainNode():
            return _wished(node, NodeState.DRAINING, Wanted.RETIRED, step.reason)
        case ParkNode():
            return _wished(node, NodeState.ACTIVE, Wanted.PARKED, step.reason, step.for_ms)
        case EndWish():
            return replace(_wished(node, NodeState.ACTIVE, Wanted.IN_SERVICE, ""), wanted_by="")
        case ReturnNode():
            return replace(node, state=NodeState.ACTIVE, given_up=False)
        case RetireNode():
            return replace(node, state=NodeState.RETIRED, given_up=False)
        case _:
            return node


def _wished(node: NodeView, state: NodeState, what: Wanted, reason: str, left_ms: int = 0) -> NodeView:
    return replace(
        node,
        state=state,
        given_up=False,
        wanted=what,
        wanted_by=DRIVER,
        wanted_reason=reason,
        wanted_left_ms=left_ms,
    )


def _filled(node: NodeView, arrived: int, replicas: int) -> NodeView:
    node = replace(node, replicas=replicas) if node.replicas != replicas else node
    if not arrived or not (node.disk_free_bytes or node.disk_used_bytes):  # else it does not report its disk
        return node
    return replace(
        node,
        disk_free_bytes=max(0, node.disk_free_bytes - arrived),
        disk_used_bytes=max(0, node.disk_used_bytes + arrived),
    )
