"""The health of one tablet, judged once. Called by planner; pure, decides nothing.

Invariant: a replica is `live` only if its node sends heartbeats and the replica has not failed. All counts
follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stele.driver.policy import Policy
from stele.driver.view import (
    ClusterView,
    DataState,
    Intent,
    NodeState,
    NodeView,
    ReplicaState,
    ReplicaView,
    TabletView,
)
from stele.model.config import MemberType, Peer


def majority(voters: int) -> int:
    """The number of voters in a majority of `voters`."""
    return voters // 2 + 1


def is_dead(node: NodeView | None, policy: Policy) -> bool:
    """Whether a node counts as gone: unknown, RETIRED, silent too long, or declared lost and silent."""
    if node is None or node.state is NodeState.RETIRED:
        return True
    if node.heartbeat_age_ms > policy.dead_after_ms:
        return True
    return node.node_id in policy.lost and node.heartbeat_age_ms > policy.lost_after_ms


def is_back(node: NodeView, policy: Policy) -> bool:
    """Whether a node that was given up as silent sends heartbeats again."""
    heard = node.ever_heard and node.heartbeat_age_ms <= policy.lost_after_ms and not is_dead(node, policy)
    return node.state is NodeState.DRAINING and node.given_up and heard and node.node_id not in policy.lost


def in_service(node: NodeView | None, policy: Policy) -> bool:
    """Whether the node's replicas should stay there: it is ACTIVE, or will be again soon."""
    return node is not None and (node.state is NodeState.ACTIVE or is_back(node, policy))


def replica_failed(report: ReplicaView | None) -> bool:
    """Whether a replica's own node says that it cannot serve again: FAILED, deleted, or not there."""
    if report is None:
        return False
    return report.state in (ReplicaState.FAILED, ReplicaState.UNKNOWN) or report.data_state in (
        DataState.TOMBSTONED,
        DataState.DELETED,
    )


def leader_report(tablet: TabletView) -> ReplicaView | None:
    """The leader's own report, or None."""
    # Match the replica id too: the leader's node may also report a tombstone of the same tablet.
    leader = tablet.leader
    return tablet.report(leader.replica_id, leader.node_id) if leader is not None else None


def in_doubt(tablet: TabletView) -> frozenset[int]:
    """Members that the leader reports as FAILED, but that may be healthy now.

    Their restarted node has not reported them yet, or they report that they know no leader yet. So the
    leader's report may be outdated. Demoted members do not count; they are given up already.
    """
    leader = leader_report(tablet)
    if leader is None or not leader.failed_peers:
        return frozenset()
    wanted = (p for p in tablet.config.peers if p.votes or p.promote)
    said = {
        p.replica_id: tablet.report(p.replica_id, p.node_id)
        for p in wanted
        if p.replica_id in leader.failed_peers and p.replica_id not in leader.lacking_peers
    }
    return frozenset(n for n, report in said.items() if report is None or report.waits)


def failed_replicas(tablet: TabletView) -> frozenset[int]:
    """Members that cannot serve again. Each matches one of three cases:

    - Its own node says so.
    - The leader says so, and the member is not in doubt.
    - The leader's log lacks entries that the member needs.
    """
    leader = leader_report(tablet)
    by_leader: frozenset[int] = frozenset()
    if leader is not None:
        by_leader = frozenset(leader.failed_peers) - in_doubt(tablet) | frozenset(leader.lacking_peers)
    return frozenset(
        p.replica_id
        for p in tablet.config.peers
        if p.replica_id in by_leader or replica_failed(tablet.report(p.replica_id, p.node_id))
    )


def unreached_ms(tablet: TabletView, view: ClusterView) -> dict[int, int]:
    """Members that do not answer their leader, and for how long. Heartbeats of their nodes make no
    difference.
    """
    leader = leader_report(tablet)
    node = view.node(tablet.leader_node)
    if leader is None or node is None:
        return {}
    # The leader reports each change. Nothing is known of the time since its own node was last heard.
    return {n: max(0, ms - node.heartbeat_age_ms) for n, ms in leader.unreached_ms.items()}


@dataclass(frozen=True, slots=True)
class Member:
    """A peer and its state.

    - `in_doubt`: it had FAILED, and its node was restarted since.
    - `answers`: its leader does not report it as unreached.
    - `unreached`: its leader has reported it as unreached for a long time.
    - `active`: its node is not DRAINING, and it is not `leaving`.
    - `leaving`: a move under way replaces it.
    - `parked`: its node may be away.
    """

    peer: Peer
    node: NodeView | None
    report: ReplicaView | None
    dead: bool
    failed: bool
    in_doubt: bool
    answers: bool
    unreached: bool
    active: bool
    parked: bool = False
    leaving: bool = False
    live: bool = field(init=False)
    """Whether its node sends heartbeats, it is not FAILED, and it is not out of its leader's reach for long.
    """

    def __post_init__(self) -> None:
        live = not (self.dead or self.failed or self.unheard or self.unreached)
        object.__setattr__(self, "live", live)

    @property
    def unheard(self) -> bool:
        """Whether it is not known to be dead or alive. A new leading master has not heard the node yet, or
        the node has not reported the replica since its start.
        """
        if self.dead:
            return False
        return self.untold or (self.node is not None and not self.node.ever_heard)

    @property
    def untold(self) -> bool:
        """Whether its state is in doubt, and its leader has not reported it as unreached for long."""
        return self.in_doubt and not self.unreached

    @property
    def kept(self) -> bool:
        """Whether it is away and expected back: a voter with its rows, on a parked node. It is not live, but
        nothing replaces it.
        """
        away = (self.dead or self.unreached) and not self.failed
        return self.parked and away and self.peer.member_type is MemberType.VOTER

    @property
    def astray(self) -> bool:
        """Whether it is away, and nobody has parked its node."""
        return (self.dead or self.unreached) and not self.parked

    @property
    def may_lead(self) -> bool:
        """Whether its node is in service, so that leaders may stay there."""
        return self.active and not self.parked

    @property
    def rowless(self) -> bool:
        """Whether it logs without its rows: it is a witness whose rows have not come, or it was demoted
        before they came.
        """
        if self.report is None:
            return self.peer.member_type is MemberType.WITNESS
        if self.peer.member_type is MemberType.WITNESS:
            return not self.report.has_data
        return not self.report.has_data and self.report.data_state is DataState.COPYING

    @property
    def name(self) -> str:
        """The member's name in reasons."""
        return f"replica {self.peer.replica_id} on node {self.peer.node_id[:8]}"

    @property
    def fault(self) -> str:
        """Why it is not live, in words."""
        if self.dead:
            if self.node is None:
                return "its node is unknown to the catalog"
            if self.node.state is NodeState.RETIRED:
                return "its node is RETIRED"
            if self.parked:
                return "its node is parked or fenced, and does not answer"
            return "its node is silent"  # without the duration, so that the reason is the same in each round
        if self.failed:
            error = self.report.error if self.report is not None else ""
            return f"it has FAILED: {error}" if error else "it has FAILED"
        if self.unreached:
            return "its leader does not reach it, although its node sends heartbeats"
        return "its node is DRAINING" if not (self.active or self.leaving) else ""


@dataclass(frozen=True, slots=True)
class Situation:
    """A tablet, its members in configuration order, and the intent on it."""

    tablet: TabletView
    members: tuple[Member, ...]
    intent: Intent | None
    target: NodeView | None
    """The node that is the intent's target."""
    target_dead: bool
    # Computed once, because the checks of a tablet ask for them dozens of times.
    voters: tuple[Member, ...] = field(init=False)
    """VOTERs and WITNESSes."""
    live_voters: tuple[Member, ...] = field(init=False)
    """VOTERs and WITNESSes that are live."""
    data_voters: tuple[Member, ...] = field(init=False)
    """Live VOTERs, which hold the rows."""
    good: tuple[Member, ...] = field(init=False)
    """Live VOTERs on ACTIVE nodes that no move replaces. Their number is compared with the replication
    factor.
    """
    spare: int = field(init=False)
    """How many more voters may fail before the group stops. Negative: it has stopped."""
    needed: int = field(init=False)
    """How many good voters are missing for the replication factor. A voter that is away on a parked node is
    waited for, so it is not missing.
    """

    def __post_init__(self) -> None:
        voters = _chosen(self.members, [m.peer.votes for m in self.members])
        live = _chosen(voters, [m.live for m in voters])
        data = _chosen(live, [m.peer.member_type is MemberType.VOTER for m in live])
        good = _chosen(data, [m.active for m in data])
        kept = sum(m.kept for m in self.members)
        for name, value in (
            ("voters", voters),
            ("live_voters", live),
            ("data_voters", data),
            ("good", good),
            ("spare", len(live) - majority(len(voters))),
            ("needed", self.tablet.replication_factor - len(good) - kept),
        ):
            object.__setattr__(self, name, value)

    @property
    def joining(self) -> Member | None:
        """The intent's replica, if the configuration names it. The same id on another node is a different
        replica.
        """
        if self.intent is None:
            return None
        member = self.member(self.intent.replica_id)
        return member if member is not None and member.peer.node_id == self.intent.target_node else None

    @property
    def target_report(self) -> ReplicaView | None:
        """The target node's report of the intent's replica."""
        if self.intent is None:
            return None
        return self.tablet.report(self.intent.replica_id, self.intent.target_node)

    @property
    def at_fault(self) -> Member | None:
        """The member that is replaced, or that cannot serve. None if only the joining one has a fault."""
        replaced = self.member(self.intent.replaces_replica) if self.intent is not None else None
        if replaced is not None and replaced.fault:
            return replaced
        joining = self.joining
        return next((m for m in self.members if m.fault and not m.kept and m is not joining), None)

    def member(self, replica_id: int) -> Member | None:
        """The member with this replica_id, or None."""
        for member in self.members:
            if member.peer.replica_id == replica_id:
                return member
        return None

    def leader(self) -> Member | None:
        """The live voter that leads, or None."""
        for member in self.live_voters:
            if member.peer.node_id == self.tablet.leader_node:
                return member
        return None

    def can_remove(self, member: Member) -> bool:
        """Whether the tablet keeps a majority of live voters without this member.

        Of a voter: the voters left must have a live majority even if only those that hold the rows count. Of a
        non-voter: the live voters must be a majority now, and one of them must hold the rows.
        """
        if not member.peer.votes:
            return self.spare >= 0 and bool(self.data_voters)
        left = [m for m in self.voters if m is not member]
        live = [m for m in left if m.live and m.answers]
        data = [m for m in live if m.peer.member_type is MemberType.VOTER]
        return bool(left) and len(live) >= majority(len(left)) and len(data) >= majority(len(left))

    def can_demote(self, member: Member) -> bool:
        """Whether the remaining live voters are a majority, and at least one of them holds the rows."""
        left = [m for m in self.voters if m is not member]
        live = [m for m in left if m.live and m.answers]
        data = [m for m in live if m.peer.member_type is MemberType.VOTER]
        return bool(data) and len(live) >= majority(len(left))

    def can_grow(self) -> bool:
        """Whether raft would accept one more voter, which itself does not count as reachable. True for a
        single voter.
        """
        return len(self.voters) == 1 or len(self.live_voters) >= majority(len(self.voters) + 1)


def _chosen(members: tuple[Member, ...], which: list[bool]) -> tuple[Member, ...]:
    """The members for which `which` is true. The same tuple if it is true for all, which saves memory."""
    return members if all(which) else tuple(m for m, chosen in zip(members, which, strict=True) if chosen)


def at_rest(s: Situation) -> bool:
    """Whether a tablet has exactly the replicas that are wanted, all healthy, and nothing is under way."""
    if s.intent is not None or s.leader() is None or len(s.members) != s.tablet.replication_factor:
        return False
    return all(
        m.peer.member_type is MemberType.VOTER and m.live and m.answers and m.active and not m.in_doubt
        for m in s.members
    )


def judge(tablet: TabletView, view: ClusterView, policy: Policy, nodes: dict[str, NodeView]) -> Situation:
    """The situation of one tablet."""
    failed, doubtful = failed_replicas(tablet), in_doubt(tablet)
    # A failed replica does not answer either, but its node may be healthy.
    unreached = {n: ms for n, ms in unreached_ms(tablet, view).items() if n not in failed}
    patience_ms = max(policy.unreached_after_ms, policy.dead_after_ms)
    intent = view.intent(tablet.tablet_id)
    left = intent.replaces_replica if intent is not None and intent.moves else 0
    members = []
    for peer in tablet.config.peers:
        node = nodes.get(peer.node_id)
        members.append(
            Member(
                peer=peer,
                node=node,
                report=tablet.report(peer.replica_id, peer.node_id),
                dead=is_dead(node, policy),
                failed=peer.replica_id in failed,
                in_doubt=peer.replica_id in doubtful,
                answers=peer.replica_id not in unreached,
                unreached=unreached.get(peer.replica_id, 0) > patience_ms,
                active=in_service(node, policy) and peer.replica_id != left,
                parked=node is not None and node.parked and node.node_id not in policy.lost,
                leaving=peer.replica_id == left,
            )
        )
    target = nodes.get(intent.target_node) if intent is not None else None
    return Situation(tablet, tuple(members), intent, target, intent is not None and is_dead(target, policy))


def judge_all(view: ClusterView, policy: Policy) -> list[Situation]:
    """The situations of the running tablets, those with the least to spare first. A driver keeps situations
    instead (judgements.py).
    """
    nodes: dict[str, NodeView] = {n.node_id: n for n in view.nodes}
    running = (t for t in view.tablets if t.state == "RUNNING")
    return sorted(
        (judge(t, view, policy, nodes) for t in running), key=lambda s: (s.spare, s.tablet.tablet_id)
    )
