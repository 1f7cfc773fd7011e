"""Forecasts what the loss of nodes would cost. Runs the planner itself on a view in which they are silent.
Pure.

Used by `stele plan`. Invariant: every copy in the forecast is one that the planner would begin.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from stele.driver.planner import plan
from stele.driver.policy import Policy
from stele.driver.rehearsal import NewReplica, carried_out, new_replicas, settled, unhurried
from stele.driver.situation import Situation, judge, majority
from stele.driver.steps import BeginIntent, Blocked, Step
from stele.driver.view import MOVE, MOVE_BY_HAND, ClusterView, NodeView, TabletView
from stele.model.ids import NodeId, TabletId

_SILENT_MS = 1 << 50


@dataclass(frozen=True, slots=True)
class Copy:
    """A new replica. `first_as_witness`: its tablet cannot afford to lose another voter, so it votes before it has its rows."""

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

    - `leaders`: tablets that elect another leader.
    - `stopped`: tablets without a majority. They serve nothing until a node returns or an administrator acts.
    - `at_risk`: tablets that serve, but cannot afford to lose another voter until their new replica votes.
    - `unhealed`: tablets that would stay short of a replica.
    - `copying_s`: the least time for all copies at the policy's rate; None if the policy has no rate.
    - `healing_stops`: why nothing is healed; "" if it is.
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
    """Forecast what the loss of these nodes, all at once and for good, would cost the cluster as it is now.

    The view should have fresh sizes of the tablets concerned. Changes that are under way count as done.
    """
    struck = _without(view, lost)
    bold = replace(
        unhurried(policy),
        lost=policy.lost | frozenset(lost),
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
        order = [begun[t.tablet_id] for t in struck.tablets if t.tablet_id in begun]
        copies += map(_copy, new_replicas(struck, order))
        struck = carried_out(struck, order)
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
        copying_s=copying_s([c.size_bytes for c in copies], policy, policy.max_copies),
        healing_stops=_too_many(view, policy, lost),
    )


def _without(view: ClusterView, lost: Collection[str]) -> ClusterView:
    """The view some time after the loss: the nodes are silent, and tablets with a majority have a leader."""
    nodes = tuple(
        replace(n, heartbeat_age_ms=_SILENT_MS, ever_heard=True) if n.node_id in lost else n
        for n in view.nodes
    )
    view = settled(view)
    return replace(view, nodes=nodes, tablets=tuple(_led(t, lost) for t in view.tablets))


def _led(tablet: TabletView, lost: Collection[str]) -> TabletView:
    if tablet.leader_node not in lost:
        return tablet
    heirs = [p.node_id for p in tablet.config.peers if p.votes and p.node_id not in lost]
    leads = len(heirs) >= majority(sum(p.votes for p in tablet.config.peers))
    return replace(tablet, leader_node=heirs[0] if leads else "")


def _heals(step: Step) -> TypeGuard[BeginIntent]:
    """Whether the step begins a copy for a heal, not for a move."""
    return isinstance(step, BeginIntent) and step.kind not in (MOVE, MOVE_BY_HAND)


def _copy(made: NewReplica) -> Copy:
    return Copy(
        made.tablet_id,
        made.table_name,
        made.from_node,
        made.target_node,
        made.size_bytes,
        made.first_as_witness,
    )


def _few(s: Situation) -> str:
    return f"{len(s.live_voters)} of {len(s.voters)} voters would be left"


def _affected(s: Situation, reason: str) -> Affected:
    return Affected(s.tablet.tablet_id, s.tablet.table_name, reason)


def copying_s(sizes: Sequence[int], policy: Policy, at_once: int) -> float | None:
    """The least time (s) for all copies; None if the policy has no rate.

    It is the larger of two times: all bytes at the rate of `at_once` copies, and the largest copy at the rate
    of one.
    """
    rate = policy.bytes_per_second
    if not rate:
        return None
    return max(sum(sizes) / (rate * at_once), max(sizes, default=0) / rate)


def _too_many(view: ClusterView, policy: Policy, lost: Collection[str]) -> str:
    for role in ("node", "master"):
        named = {p.node_id for t in view.tablets if t.node_role == role for p in t.config.peers}
        gone = sum(n.node_id in lost and n.node_id in named for n in view.nodes)
        if gone > policy.max_lost_nodes:
            return (
                f"{gone} {role}s would be silent at once, more than maxLostNodes ({policy.max_lost_nodes}): "
                "nothing is healed until some return or the limit is raised"
            )
    return ""
