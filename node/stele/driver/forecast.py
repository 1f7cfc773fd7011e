"""Forecasts what the loss of nodes would cost. It runs the planner itself on a view in which they are silent.
Pure.

Used by `stele plan`. Invariant: every copy in the forecast is one that the planner would begin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeGuard

from stele.driver.planner import plan
from stele.driver.policy import Policy
from stele.driver.situation import Situation, judge, majority
from stele.driver.steps import BeginIntent, Blocked, Step
from stele.driver.targets import tablet_bytes
from stele.driver.view import MOVE, MOVE_BY_HAND, ClusterView, Intent, NodeView, ReplicaView, TabletView
from stele.model.config import MemberType, Peer
from stele.model.ids import NodeId, ReplicaId, TabletId

_SILENT_MS = 1 << 50
_ALL_AT_ONCE = 1 << 30
"""Copies at once. The forecast covers all copies; how many run at a time changes only their duration."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A new replica. `first_as_witness`: its tablet could lose no more voter, so its vote comes before its rows."""

    tablet_id: TabletId
    table_name: str
    lost_node: NodeId
    target_node: NodeId
    size_bytes: int
    first_as_witness: bool


@dataclass(frozen=True, slots=True)
class Affected:
    """A tablet and what is wrong with it, as text."""

    tablet_id: TabletId
    table_name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Forecast:
    """The effects of the loss.

    `leaders`: tablets that elect another leader. `stopped`: tablets without a majority, which serve nothing until
    a node returns or an administrator acts. `at_risk`: tablets that serve, but could lose no more voter until
    their new replica votes. `unhealed`: tablets that would stay short of a replica. `copying_s`: the least time
    for all copies at the policy's rate; None if the policy has no rate. `healing_stops`: why nothing is healed;
    "" if it is.
    """

    lost: tuple[NodeView, ...]
    replicas: int
    leaders: int
    stopped: tuple[Affected, ...]
    at_risk: tuple[Affected, ...]
    copies: tuple[Copy, ...]
    unhealed: tuple[Affected, ...]
    copying_s: float | None
    healing_stops: str

    @property
    def bytes_copied(self) -> int:
        """The bytes of all copies."""
        return sum(copy.size_bytes for copy in self.copies)

    @property
    def harmless(self) -> bool:
        """Whether every tablet keeps serving and becomes whole again on its own."""
        return not (self.stopped or self.unhealed or self.healing_stops)


def tablets_on(view: ClusterView, nodes: Collection[str]) -> list[TabletView]:
    """The tablets with a member on one of these nodes."""
    return [
        t for t in view.tablets if t.state == "RUNNING" and any(p.node_id in nodes for p in t.config.peers)
    ]


def foretell(view: ClusterView, policy: Policy, lost: Collection[NodeId]) -> Forecast:
    """What the loss of these nodes, all at once and for good, would cost the cluster as it is now.

    The view should have fresh sizes of the tablets concerned. Changes that are under way already are taken as done.
    """
    struck = _without(view, lost)
    bold = replace(
        policy,
        lost=policy.lost | frozenset(lost),
        max_copies=_ALL_AT_ONCE,
        bytes_per_second=0,
        retire=False,
        rebalance=False,
        balance_leaders=False,
    )
    concerned = tablets_on(struck, lost)
    wanted = {t.tablet_id for t in concerned}
    by_id: dict[str, NodeView] = {n.node_id: n for n in struck.nodes}
    judged = [judge(t, struck, bold, by_id) for t in struck.tablets if t.tablet_id in wanted]
    copies: list[Copy] = []
    while begun := {s.tablet_id: s for s in plan(struck, bold) if _heals(s) and s.tablet_id in wanted}:
        copies += [_copy(t, begun[t.tablet_id]) for t in struck.tablets if t.tablet_id in begun]
        struck = _healed(struck, begun)
    after = {s.tablet_id: s for s in plan(struck, bold) if isinstance(s, Blocked)}
    return Forecast(
        lost=tuple(n for n in view.nodes if n.node_id in lost),
        replicas=sum(p.node_id in lost for t in concerned for p in t.config.peers),
        leaders=sum(t.leader_node in lost for t in view.tablets),
        stopped=tuple(_affected(s, _few(s)) for s in judged if s.spare < 0 or not s.data_voters),
        at_risk=tuple(
            _affected(s, _few(s)) for s in judged if s.spare == 0 and s.data_voters and len(s.voters) > 1
        ),
        copies=tuple(copies),
        unhealed=tuple(
            _affected(s, after[s.tablet.tablet_id].reason)
            for s in judged
            if s.tablet.tablet_id in after and s.spare >= 0 and s.data_voters
        ),
        copying_s=_duration_s([c.size_bytes for c in copies], policy),
        healing_stops=_too_many(view, policy, lost),
    )


def _without(view: ClusterView, lost: Collection[str]) -> ClusterView:
    """The view some time after the loss: the nodes are silent, and tablets with a majority have a leader."""
    nodes = tuple(
        replace(n, heartbeat_age_ms=_SILENT_MS, ever_heard=True) if n.node_id in lost else n
        for n in view.nodes
    )
    tablets = tuple(_led(_settled(t, view.intent(t.tablet_id)), lost) for t in view.tablets)
    return replace(view, nodes=nodes, tablets=tablets, intents=())


def _settled(tablet: TabletView, intent: Intent | None) -> TabletView:
    """The tablet once the change under way is done: the joining replica is a voter, the replaced one gone."""
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


def _led(tablet: TabletView, lost: Collection[str]) -> TabletView:
    if tablet.leader_node not in lost:
        return tablet
    heirs = [p.node_id for p in tablet.config.peers if p.votes and p.node_id not in lost]
    leads = len(heirs) >= majority(sum(p.votes for p in tablet.config.peers))
    return replace(tablet, leader_node=heirs[0] if leads else "")


def _heals(step: Step) -> TypeGuard[BeginIntent]:
    """Whether the step begins a copy that a heal needs, and not a move."""
    return isinstance(step, BeginIntent) and step.kind not in (MOVE, MOVE_BY_HAND)


def _copy(tablet: TabletView, step: BeginIntent) -> Copy:
    replaced = tablet.config.peer(step.replaces_replica)
    return Copy(
        tablet.tablet_id,
        tablet.table_name,
        replaced.node_id if replaced is not None else NodeId(""),
        step.target_node,
        tablet_bytes(tablet),
        step.witness,
    )


def _healed(view: ClusterView, begun: Mapping[TabletId, BeginIntent]) -> ClusterView:
    """The view once each new replica has taken the old one's place."""
    tablets, arrived = [], Counter[str]()
    for tablet in view.tablets:
        step = begun.get(tablet.tablet_id)
        if step is not None:
            arrived[step.target_node] += tablet_bytes(tablet)
            tablet = _with_new(tablet, step)
        tablets.append(tablet)
    nodes = tuple(
        replace(
            n,
            disk_free_bytes=max(0, n.disk_free_bytes - arrived[n.node_id]),
            disk_used_bytes=n.disk_used_bytes + arrived[n.node_id],
        )
        if n.disk_free_bytes or n.disk_used_bytes  # else it does not report its disk
        else n
        for n in view.nodes
    )
    return replace(view, nodes=nodes, tablets=tuple(tablets))


def _with_new(tablet: TabletView, step: BeginIntent) -> TabletView:
    new_id = ReplicaId(max(p.replica_id for p in tablet.config.peers) + 1)
    peers = [p for p in tablet.config.peers if p.replica_id != step.replaces_replica]
    peers.append(Peer(step.target_node, new_id, "", MemberType.VOTER))
    report = ReplicaView(step.target_node, new_id, bytes_on_disk=tablet_bytes(tablet))
    config = replace(tablet.config, opid_index=tablet.config.opid_index + 1, peers=tuple(peers))
    return replace(tablet, config=config, replicas=(*tablet.replicas, report))


def _few(s: Situation) -> str:
    return f"{len(s.live_voters)} of {len(s.voters)} voters would be left"


def _affected(s: Situation, reason: str) -> Affected:
    return Affected(s.tablet.tablet_id, s.tablet.table_name, reason)


def _duration_s(sizes: list[int], policy: Policy) -> float | None:
    """The least time that all copies take: the rate of all copies together bounds their sum, that of one
    bounds the largest."""
    if not policy.bytes_per_second:
        return None
    rate = policy.bytes_per_second
    return max(sum(sizes) / (rate * policy.max_copies), max(sizes, default=0) / rate)


def _too_many(view: ClusterView, policy: Policy, lost: Collection[str]) -> str:
    for role in ("node", "master"):
        named = {p.node_id for t in view.tablets if t.node_role == role for p in t.config.peers}
        gone = sum(n.node_id in lost and n.node_id in named for n in view.nodes)
        if gone > policy.max_lost_nodes:
            return (
                f"{gone} {role}s would be silent at once, more than maxLostNodes ({policy.max_lost_nodes}): "
                f"nothing is "
                "healed until some return or the limit is raised"
            )
    return ""
