"""Is the cluster as it should be? A pure reading of the masters' view, for `stele ksck`, the demo and the tests.

Asks nobody. Invariant: `healthy` is true only if every table can lose a node and still be written, as far as its
replication factor promises.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stele.rpc.convert import id_from_pb
from stele.rpc.proto import common_pb2, master_pb2

SILENT_MS = 5_000
"""A node whose last heartbeat is older is called silent."""


@dataclass(slots=True)
class TabletHealth:
    """One tablet: "healthy", "under-replicated" (a majority is left), "unavailable", or "creating"."""

    tablet_id: str
    table_name: str
    state: str
    leader: str
    voters_wanted: int
    voters_healthy: int
    reasons: list[str] = field(default_factory=list)


@dataclass(slots=True)
class NodeHealth:
    """One node or master: "alive", "silent" or "retired"."""

    node_id: str
    role: str
    address: str
    machine: str
    zone: str
    state: str
    heartbeat_age_ms: int
    replicas: int


@dataclass(slots=True)
class ClusterHealth:
    """What `examine` found."""

    cluster_id: str
    leader_master: str
    nodes: list[NodeHealth]
    tablets: list[TabletHealth]
    intents: list[str]
    settled: bool

    @property
    def healthy(self) -> bool:
        """Whether every tablet is healthy and the masters have heard from everyone."""
        return self.settled and all(t.state == "healthy" for t in self.tablets)

    def count(self, state: str) -> int:
        """How many tablets are in this state."""
        return sum(t.state == state for t in self.tablets)


def examine(view: master_pb2.GetClusterViewResponse) -> ClusterHealth:
    """What the view says, tablet by tablet. Replicas on silent nodes count as lost."""
    nodes = [_node(pb) for pb in view.nodes]
    alive = {node.node_id for node in nodes if node.state == "alive"}
    return ClusterHealth(
        cluster_id=id_from_pb(view.cluster_id),
        leader_master=id_from_pb(view.leader),
        nodes=nodes,
        tablets=[_tablet(pb, alive) for pb in view.tablets],
        intents=[_intent(pb) for pb in view.intents],
        settled=view.settled,
    )


def _node(pb: master_pb2.NodeViewPB) -> NodeHealth:
    state = "alive"
    if pb.state == master_pb2.RETIRED:
        state = "retired"
    elif pb.heartbeat_age_ms > SILENT_MS:
        state = "silent"
    elif pb.state == master_pb2.DRAINING:
        state = "alive"
    return NodeHealth(
        node_id=id_from_pb(pb.node_id),
        role=pb.registration.role or "node",
        address=pb.registration.address,
        machine=pb.registration.machine,
        zone=pb.registration.zone,
        state=state,
        heartbeat_age_ms=pb.heartbeat_age_ms,
        replicas=pb.replicas,
    )


def _tablet(pb: master_pb2.TabletViewPB, alive: set[str]) -> TabletHealth:
    peers = pb.committed_config.peers
    voters = [p for p in peers if p.member_type in (common_pb2.VOTER, common_pb2.WITNESS)]
    reports = {(r.node_id, r.status.replica_id): r for r in pb.replicas}
    reasons: list[str] = []
    healthy = with_data = 0
    for peer in peers:
        node_id = id_from_pb(peer.node_id)
        report = reports.get((peer.node_id, peer.replica_id))
        fault = _fault(node_id, report, alive)
        if peer.member_type == common_pb2.NON_VOTER:
            reasons.append(
                f"replica {peer.replica_id} on {node_id[:8]} does not vote{' yet' if peer.promote else ''}"
            )
        elif fault:
            reasons.append(f"replica {peer.replica_id} on {node_id[:8]} {fault}")
        else:
            healthy += 1
            with_data += peer.member_type == common_pb2.VOTER
            if peer.member_type == common_pb2.WITNESS:
                reasons.append(
                    f"replica {peer.replica_id} on {node_id[:8]} is a witness, its rows are being copied"
                )
    leader = id_from_pb(pb.leader_node)
    wanted = pb.replication_factor or len(voters)
    if pb.state in ("PREPARING", "CREATING"):
        state = "creating"
    elif healthy < len(voters) // 2 + 1 or not leader or leader not in alive:
        state = "unavailable"
        if leader not in alive:
            reasons.append("no leader" if not leader else f"its leader {leader[:8]} is silent")
    elif with_data < wanted or len(voters) != wanted:
        state = "under-replicated"
        if not reasons:
            reasons.append(f"{with_data} of {wanted} voters")
    else:
        state = "healthy"
    return TabletHealth(id_from_pb(pb.tablet_id), pb.table_name, state, leader, wanted, with_data, reasons)


def _fault(node_id: str, report: master_pb2.ReplicaReportPB | None, alive: set[str]) -> str:
    if node_id not in alive:
        return "is on a silent node"
    if report is None:
        return "was not reported yet"
    if report.status.state == common_pb2.FAILED:
        return f"FAILED: {report.status.error}"
    if report.status.state not in (common_pb2.RUNNING, common_pb2.CONFIGURING):
        return f"is {common_pb2.ReplicaStatePB.Name(report.status.state)}"
    return ""


def _intent(pb: master_pb2.IntentPB) -> str:
    reason = f": {pb.reason}" if pb.reason else ""
    return (
        f"{pb.kind or 'change'} of tablet {id_from_pb(pb.tablet_id)[:8]}, replica {pb.replica_id} on "
        f"{id_from_pb(pb.target_node)[:8]}{reason}"
    )
