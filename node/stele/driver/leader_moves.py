"""Plans the moves that spread leaders over nodes. Called by planner after everything that heals; pure.

Owns which leaders may move, and to which nodes. `leader_balance.py` chooses among these.

Invariants: no leader moves while anything heals, is copied, drains, starts, or has just fallen silent: the
next moment would undo the move. None moves to a node that is silent, lost, low on disk, off by its clock or
not in service. None moves that an administrator moved lately.
"""

from __future__ import annotations

from collections.abc import Sequence

from stele.driver.leader_balance import STEP, Group, Move, choose_moves
from stele.driver.leader_trials import LeaderTrials
from stele.driver.policy import Policy
from stele.driver.situation import Member, Situation
from stele.driver.steps import Blocked, MoveLeader, Step
from stele.driver.view import ClusterView, DataState, NodeState, NodeView, ReplicaState
from stele.model.clock import CLOCK_OFF_MAX_US
from stele.model.config import MemberType
from stele.model.ids import NodeId, TabletId

HEARD_MS = 3_000
"""A node whose last heartbeat is older than this gets no leaders. Nodes send one each second."""
LASTING = frozenset({"NoTarget", "NoRoom", "LostMajority", "Parked"})
"""Codes of blocks that last until somebody adds a machine or brings one back. Leaders move meanwhile."""


def leader_steps(
    view: ClusterView,
    policy: Policy,
    trials: LeaderTrials,
    situations: Sequence[Situation],
    steps: Sequence[Step],
) -> list[Step]:
    """The moves of leaders after a plan of `steps`; none while anything else is under way."""
    if not policy.balance_leaders or _under_way(view, steps):
        return []
    stuck = {step.tablet_id for step in steps if isinstance(step, Blocked)}
    if any(_changes(s, s.tablet.tablet_id in stuck) for s in situations):
        return []
    groups = []
    for s in situations:
        group = _group(s, view, policy, trials)
        if group is not None:
            groups.append(group)
    return [_step(move, view) for move in choose_moves(groups, min(policy.leader_moves_at_once, trials.left))]


def _under_way(view: ClusterView, steps: Sequence[Step]) -> bool:
    """Whether something heals or is copied."""
    return bool(view.intents) or any(not (isinstance(s, Blocked) and s.code in LASTING) for s in steps)


def _changes(s: Situation, stuck: bool) -> bool:
    """Whether a member drains, starts, or was silent for only a short time. It may lead soon, or be replaced.

    `stuck`: the tablet is Blocked, so its draining member stays for now.
    """
    return s.tablet.node_role == "node" and any(
        m.node is None
        or (m.node.state is NodeState.DRAINING and not m.node.given_up and not stuck)
        or m.node.heartbeat_age_ms > HEARD_MS
        or m.report is None
        or (m.report.waits and not m.report.leaderless)
        for m in s.members
        if not m.dead and not m.parked
    )


def _group(s: Situation, view: ClusterView, policy: Policy, trials: LeaderTrials) -> Group | None:
    """The tablet with the nodes that may lead it; None if nobody leads it, or masters do.

    A leader that this driver moved just now counts where it went, since the view may be older.
    """
    leader = s.leader()
    if leader is None or s.tablet.node_role != "node":
        return None
    tablet_id = s.tablet.tablet_id
    node = trials.moved.get(tablet_id, leader.peer.node_id)
    places = {node}
    stays = s.spare < 0 or tablet_id in trials.moved or s.tablet.leader_kept_until_us > view.now_us
    if not stays and may_lead(leader, policy):
        places |= {
            m.peer.node_id
            for m in s.members
            if may_lead(m, policy) and (tablet_id, m.peer.node_id) not in trials.refused
        }
    return Group(tablet_id, s.tablet.table_id, node, tuple(sorted(places)))


def may_lead(m: Member, policy: Policy) -> bool:
    """Whether a leader may move to this member."""
    report = m.report
    return (
        m.peer.member_type is MemberType.VOTER
        and (m.live and m.answers and m.may_lead)
        and (m.node is not None and _serves(m.node, policy))
        and (report is not None and report.state is ReplicaState.RUNNING)
        and (report.data_state is DataState.READY and report.has_data)
    )


def _serves(node: NodeView, policy: Policy) -> bool:
    leaving = (policy.lost, policy.unneeded, policy.retiring or (), policy.parked)
    return (
        node.takes_replicas
        and (node.ever_heard and node.heartbeat_age_ms <= HEARD_MS)
        and not any(node.node_id in nodes for nodes in leaving)
        and not node.disk_low
        and abs(node.clock_ahead_us) <= CLOCK_OFF_MAX_US
    )


def _step(move: Move, view: ClusterView) -> MoveLeader:
    tablet = view.tablet(move.tablet_id)
    epoch = view.claim.epoch if view.claim is not None else 0
    return MoveLeader(
        TabletId(move.tablet_id),
        tablet.config.opid_index if tablet is not None else -1,
        _reason(move, tablet.table_name if tablet is not None else ""),
        NodeId(move.target),
        False,
        cause=f"leaders/{move.source[:8]}-{epoch}",
    )


def _reason(move: Move, table: str) -> str:
    source, target = f"node {move.source[:8]}", f"node {move.target[:8]}"
    if move.leads[0] > move.share:
        return f"{source} leads {_tablets(move.leads[0])}, but its share is {move.share}"
    (leads, of), there = (move.of_table, f" of {table}") if _is_of_table(move) else (move.leads, "")
    return f"{source} leads {_tablets(leads)}{there}, {target} leads {of}"


def _is_of_table(move: Move) -> bool:
    """Whether the table alone explains the move."""
    return move.of_table[0] >= move.of_table[1] + STEP


def _tablets(count: int) -> str:
    return f"{count} tablet{'s' * (count != 1)}"
