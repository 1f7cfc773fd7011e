"""Whether the cluster is healthy, from the masters' view. For `stele ksck`, the demo and the tests. Pure;
asks nobody.

Invariant: `healthy` is true only if every table can lose a node and still be written, as far as its
replication factor allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stele.client.copies import copies_in, differing
from stele.driver.progress import with_names
from stele.driver.view import LEADERLESS_MS
from stele.model.clock import CLOCK_OFF_MAX_US
from stele.rpc.convert import id_from_pb
from stele.rpc.proto import common_pb2, master_pb2

_WANTED = {
    master_pb2.WANTED_DRAINED: "drained",
    master_pb2.WANTED_PARKED: "parked",
    master_pb2.WANTED_FENCED: "fenced",
    master_pb2.WANTED_RETIRED: "retired",
}
SILENT_MS = 5_000
"""A node whose last heartbeat is older than this counts as silent."""


@dataclass(slots=True)
class TabletHealth:
    """One tablet: "healthy", "under-replicated" (a majority is left), "unavailable" or "creating"."""

    tablet_id: str
    table_id: str
    table_name: str
    state: str
    leader: str
    voters_wanted: int
    voters_healthy: int
    reasons: list[str] = field(default_factory=list)
    members: list[str] = field(default_factory=list)
    """The nodes in its configuration."""
    load: int = 0
    """What clients ask of its leader a second."""

    @property
    def led(self) -> bool:
        """Whether it can be read and written: it has a leader that is heard, and a majority."""
        return self.state in ("healthy", "under-replicated")


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """How many of some tablets have the wanted replicas, and how many have too few or too many."""

    tablets: int
    short: int
    over: int

    @classmethod
    def of(cls, tablets: Sequence[TabletHealth]) -> ReplicaCounts:
        """Count these tablets."""
        short = sum(t.voters_healthy < t.voters_wanted for t in tablets)
        over = sum(t.voters_healthy >= t.voters_wanted and len(t.members) > t.voters_wanted for t in tablets)
        return cls(len(tablets), short, over)

    @property
    def done(self) -> bool:
        """Whether all of them have exactly the replicas that are wanted."""
        return not self.short and not self.over

    def __str__(self) -> str:
        parts = [
            f"{self.tablets - self.short - self.over} of {self.tablets} tablets have the wanted replicas"
        ]
        if self.short:
            parts.append(f"{self.short} wait for more")
        if self.over:
            parts.append(f"{self.over} have one to remove")
        return "; ".join(parts)


@dataclass(slots=True)
class NodeHealth:
    """The state of one node or master.

    - `state`: "alive", "silent", "retired" or "new". A new one is on record but was never heard.
    - `wanted`: "" if it is wanted in service, else "drained", "parked", "fenced" or "retired".
    - `name`: its pod's name; "" without an operator.
    - `disk_free_bytes`: None if it did not report it. `disk_low`: it refuses writes for lack of space.
    - `clock_ahead_ms`: how far its wall clock is ahead of most clocks of the cluster, by its last report. It is
      negative if the clock is behind, and None if unknown.
    """

    node_id: str
    name: str
    role: str
    address: str
    machine: str
    zone: str
    state: str
    heartbeat_age_ms: int
    ever_heard: bool
    formed: bool
    replicas: int
    disk_free_bytes: int | None
    disk_low: bool
    clock_ahead_ms: int | None = None
    wanted: str = ""

    @property
    def clock_fault(self) -> str:
        """What is wrong with its wall clock; "" if no fault is known."""
        ahead_ms = self.clock_ahead_ms or 0
        if self.state != "alive" or abs(ahead_ms) * 1_000 <= CLOCK_OFF_MAX_US:
            return ""
        where = "ahead of" if ahead_ms > 0 else "behind"
        return f"its clock is {abs(ahead_ms) / 1_000:.1f} s {where} what most clocks of the cluster say"

    @property
    def label(self) -> str:
        """Its name for people: name or short id, with its address."""
        where = f" ({self.address})" if self.address else ""
        return f"{self.name or self.node_id[:8]}{where}"

    @property
    def heard(self) -> str:
        """When the leading master last heard it. A new leader does not know what an earlier one heard."""
        age_s = self.heartbeat_age_ms / 1_000
        if self.ever_heard:
            return f"{age_s:.1f} s ago"
        return f"not for {age_s:.0f} s" if self.formed else "never"


@dataclass(slots=True)
class ClusterHealth:
    """The result of `examine`."""

    cluster_id: str
    leader_master: str
    nodes: list[NodeHealth]
    tablets: list[TabletHealth]
    intents: list[str]
    settled: bool
    holding: list[str] = field(default_factory=list)
    """Who holds the change budget, in words, such as "upgrade (flights-node-0 is away)"."""
    waiting: list[str] = field(default_factory=list)
    """Who waits for the change budget."""
    held: str = ""
    """Why healing is paused, in words: the cluster hibernates or wakes. "" if it is not paused."""
    differing: list[str] = field(default_factory=list)
    """Replicas that heals and moves made and that hold other rows than another voter, in words."""

    @property
    def healthy(self) -> bool:
        """Whether every tablet is healthy, and the leading master had time to hear from every node."""
        return self.settled and all(t.state == "healthy" for t in self.tablets)

    @property
    def silent(self) -> list[NodeHealth]:
        """Nodes and masters on record that are neither retired nor heard."""
        return [node for node in self.nodes if node.state == "silent"]

    @property
    def new(self) -> list[NodeHealth]:
        """Nodes and masters on record that have never started. No tablet counts on them."""
        return [node for node in self.nodes if node.state == "new"]

    @property
    def low_on_disk(self) -> list[NodeHealth]:
        """Nodes and masters that refuse writes for lack of space."""
        return [node for node in self.nodes if node.state == "alive" and node.disk_low]

    @property
    def wrong_clocks(self) -> list[NodeHealth]:
        """Nodes and masters whose clock is wrong: they lead only if no other can, and make no timestamps."""
        return [node for node in self.nodes if node.clock_fault]

    def replicas_of(self, table_id: str) -> ReplicaCounts:
        """How many of a table's tablets have the wanted replicas."""
        return ReplicaCounts.of([t for t in self.tablets if t.table_id == table_id])

    def ready(self, table_id: str) -> int:
        """The number of this table's tablets that can be read and written."""
        return sum(t.led for t in self.tablets if t.table_id == table_id)

    def count(self, state: str) -> int:
        """The number of tablets in this state."""
        return sum(t.state == state for t in self.tablets)


def examine(view: master_pb2.GetClusterViewResponse) -> ClusterHealth:
    """Examine the view tablet by tablet. Replicas on silent nodes count as lost."""
    nodes = [_node(pb) for pb in view.nodes]
    known = {node.node_id: node for node in nodes}
    labels = {node.node_id: node.label for node in nodes}
    return ClusterHealth(
        cluster_id=id_from_pb(view.cluster_id),
        leader_master=id_from_pb(view.leader),
        nodes=nodes,
        tablets=[_tablet(pb, known) for pb in view.tablets],
        intents=[_intent(pb, known) for pb in view.intents],
        settled=view.settled,
        holding=[_holder(pb, known) for pb in view.policy.holding],
        waiting=list(view.policy.waiting),
        held=view.policy.held,
        differing=[
            f"tablet {copy.tablet_id[:8]} of {copy.table_name}: {copy.in_words(labels)}"
            for copy in differing(copies_in(view))
        ],
    )


def _holder(pb: master_pb2.BudgetHolderPB, known: Mapping[str, NodeHealth]) -> str:
    away = [_label(id_from_pb(a.node_id), known) for a in pb.away]
    return f"{pb.holder} ({', '.join(away)} {'is' if len(away) == 1 else 'are'} away)" if away else pb.holder


def _node(pb: master_pb2.NodeViewPB) -> NodeHealth:
    state = "alive"
    if pb.state == master_pb2.RETIRED:
        state = "retired"
    elif not pb.formed:
        state = "new"
    elif pb.heartbeat_age_ms > SILENT_MS:
        state = "silent"
    return NodeHealth(
        node_id=id_from_pb(pb.node_id),
        name=pb.name,
        role=pb.registration.role or "node",
        address=pb.registration.address,
        machine=pb.registration.machine,
        zone=pb.registration.zone,
        state=state,
        heartbeat_age_ms=pb.heartbeat_age_ms,
        ever_heard=pb.ever_heard,
        formed=pb.formed,
        replicas=pb.replicas,
        disk_free_bytes=pb.disk_free_bytes if pb.disk_free_bytes or pb.disk_used_bytes else None,
        disk_low=pb.disk_low,
        clock_ahead_ms=pb.wall_ahead_us // 1_000 if pb.HasField("wall_ahead_us") else None,
        wanted=_WANTED.get(pb.wanted, ""),
    )


def _label(node_id: str, known: Mapping[str, NodeHealth]) -> str:
    node = known.get(node_id)
    return node.label if node is not None else node_id[:8]


def _tablet(pb: master_pb2.TabletViewPB, known: Mapping[str, NodeHealth]) -> TabletHealth:
    alive = {node.node_id for node in known.values() if node.state == "alive"}
    peers = pb.committed_config.peers
    voters = [p for p in peers if p.member_type in (common_pb2.VOTER, common_pb2.WITNESS)]
    faults = member_faults(pb, known)
    reasons: list[str] = []
    healthy = with_data = 0
    for peer in peers:
        where = f"replica {peer.replica_id} on {_label(id_from_pb(peer.node_id), known)}"
        fault = faults.get(peer.replica_id)
        if peer.member_type == common_pb2.NON_VOTER:
            reasons.append(f"{where} does not vote{' yet' if peer.promote else ''}")
        elif fault:
            reasons.append(f"{where} {fault}")
        else:
            healthy += 1
            with_data += peer.member_type == common_pb2.VOTER
            if peer.member_type == common_pb2.WITNESS:
                reasons.append(f"{where} is a witness whose rows are being copied")
    leader = id_from_pb(pb.leader_node)
    wanted = pb.replication_factor or len(voters)
    if pb.state in ("PREPARING", "CREATING"):
        state = "creating"
    elif healthy < len(voters) // 2 + 1 or not leader or leader not in alive:
        state = "unavailable"
        if leader not in alive:
            reasons.append("no leader" if not leader else f"its leader {_label(leader, known)} is silent")
    elif with_data < wanted or healthy - (len(voters) // 2 + 1) < (wanted - 1) // 2:
        # A surplus voter is no fault, as long as it is healthy: a replica is being moved.
        state = "under-replicated"
        if not reasons:
            reasons.append(f"{with_data} of {wanted} voters")
    else:
        state = "healthy"
    ids = (id_from_pb(pb.tablet_id), id_from_pb(pb.table_id))
    members = [id_from_pb(p.node_id) for p in peers]
    load = max((r.status.load for r in pb.replicas if id_from_pb(r.node_id) in alive), default=0)
    return TabletHealth(*ids, pb.table_name, state, leader, wanted, with_data, reasons, members, load)


def member_faults(pb: master_pb2.TabletViewPB, known: Mapping[str, NodeHealth]) -> dict[int, str]:
    """Why members of a tablet's configuration cannot be counted on, by replica_id. `known`: nodes by id."""
    reports = {(r.node_id, r.status.replica_id): r for r in pb.replicas}
    leaderless: dict[int, str] = {}
    by_leader: dict[int, str] = {}
    faults: dict[int, str] = {}
    for peer in pb.committed_config.peers:
        report = reports.get((peer.node_id, peer.replica_id))
        if report is not None and peer.node_id == pb.leader_node:
            by_leader = {
                p.replica_id: fault for p in report.status.peers if (fault := _by_leader(p, report.age_ms))
            }
        node = known.get(id_from_pb(peer.node_id))
        if fault := _fault(node, report):
            faults[peer.replica_id] = fault
        elif report is not None and _leaderless(report):
            leaderless[peer.replica_id] = f"has found no leader for {report.age_ms / 1_000:.0f} s"
        if node is not None and node.wanted == "fenced" and peer.replica_id not in faults:
            faults[peer.replica_id] = "serves nobody, because its node is fenced"
    return {**leaderless, **by_leader, **faults}


def _by_leader(peer: common_pb2.PeerHealthPB, age_ms: int) -> str:
    """What is wrong with a peer according to its leader's report, which is `age_ms` old."""
    if peer.needs_copy:
        return "lacks entries that its leader's log no longer has, and waits for a copy"
    if peer.unreached:
        silent_s = (peer.last_heard_ms + age_ms) / 1_000
        return f"cannot be reached by its leader: no answer for {silent_s:.0f} s, although its node is alive"
    return ""


def _fault(node: NodeHealth | None, report: master_pb2.ReplicaReportPB | None) -> str:
    if node is None or node.state != "alive":
        return "is on a silent node"
    if report is None:
        return "has not been reported yet"
    status = report.status
    if status.state == common_pb2.FAILED:
        return f"FAILED: {status.error}"
    if status.state == common_pb2.REPLICA_STATE_UNSPECIFIED:
        return f"is gone: {status.error}"
    if status.state not in (common_pb2.RUNNING, common_pb2.CONFIGURING):
        return f"is {state_name(status)}"
    return ""


def _leaderless(report: master_pb2.ReplicaReportPB) -> bool:
    return report.status.state == common_pb2.CONFIGURING and report.age_ms > LEADERLESS_MS


def state_name(status: common_pb2.ReplicaStatusPB) -> str:
    """A replica's state as a word; a number if only a newer version knows it."""
    names = common_pb2.ReplicaStatePB.items()
    return next((name for name, number in names if number == status.state), str(status.state))


def _intent(pb: master_pb2.IntentPB, known: Mapping[str, NodeHealth]) -> str:
    names = {node.node_id[:8]: node.name for node in known.values() if node.name}
    reason = f": {with_names(pb.reason, names)}" if pb.reason else ""
    return (
        f"{pb.kind or 'change'} of tablet {id_from_pb(pb.tablet_id)[:8]}, replica {pb.replica_id} on "
        f"{_label(id_from_pb(pb.target_node), known)}{reason}"
    )
