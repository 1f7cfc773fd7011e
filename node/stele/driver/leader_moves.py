"""Plans the moves that spread leaders over nodes. Called by planner after everything that heals; pure.

Decides when leaders move. `leader_groups.py` says which may move, and to which nodes; `leader_balance.py`
chooses.

Invariant: no leader moves while anything heals, is copied, drains, starts, or has just fallen silent. Such a
move would soon be undone.
"""

from __future__ import annotations

from collections.abc import Sequence

from stele.driver.judgements import Judgements
from stele.driver.leader_balance import STEP, Move
from stele.driver.leader_groups import HEARD_MS, Groups
from stele.driver.leader_trials import LeaderTrials
from stele.driver.policy import Policy
from stele.driver.situation import Situation, is_dead
from stele.driver.steps import Blocked, MoveLeader, Step
from stele.driver.view import ClusterView, NodeState
from stele.model.ids import NodeId, TabletId

LASTING = frozenset({"NoTarget", "NoRoom", "LostMajority", "Parked"})
"""Codes of blocked steps that last until somebody adds a machine or brings one back. Leaders move meanwhile.
"""


def leader_steps(
    view: ClusterView,
    policy: Policy,
    trials: LeaderTrials,
    judged: Judgements,
    groups: Groups,
    steps: Sequence[Step],
) -> list[Step]:
    """The moves of leaders after a plan of `steps`; none while anything else is under way."""
    most = min(policy.leader_moves_at_once, trials.left)
    if not policy.balance_leaders or most <= 0 or _under_way(view, steps):
        return []
    stuck = {step.tablet_id for step in steps if isinstance(step, Blocked)}
    if _silent_lately(view, policy, judged) or any(
        _changes(s, s.tablet.tablet_id in stuck) for s in judged.restless()
    ):
        return []
    return [_step(move, view) for move in groups.moves(judged.situation, view, trials, most)]


def _under_way(view: ClusterView, steps: Sequence[Step]) -> bool:
    """Whether something heals or is copied."""
    return bool(view.intents) or any(not (isinstance(s, Blocked) and s.code in LASTING) for s in steps)


def _silent_lately(view: ClusterView, policy: Policy, judged: Judgements) -> bool:
    """Whether a node with replicas has just fallen silent."""
    return any(
        n.role == "node"
        and n.heartbeat_age_ms > HEARD_MS
        and judged.replicas[n.node_id] > 0
        and not is_dead(n, policy)
        and not (n.parked and n.node_id not in policy.lost)
        for n in view.nodes
    )


def _changes(s: Situation, stuck: bool) -> bool:
    """Whether a member drains or starts. It may be replaced, or lead, soon.

    `stuck`: the tablet is Blocked, so its draining member stays for now.
    """
    return s.tablet.node_role == "node" and any(
        m.node is None
        or (m.node.state is NodeState.DRAINING and not m.node.given_up and not stuck)
        or m.report is None
        or (m.report.waits and not m.report.leaderless)
        for m in s.members
        if not m.dead and not m.parked
    )


def _step(move: Move, view: ClusterView) -> MoveLeader:
    tablet = view.tablet(move.tablet_id)
    epoch = view.claim.epoch if view.claim is not None else 0
    return MoveLeader(
        TabletId(move.tablet_id),
        tablet.config.opid_index if tablet is not None else -1,
        _reason(move, tablet.table_name if tablet is not None else "", view),
        NodeId(move.target),
        False,
        cause=f"leaders/{move.source[:8]}-{epoch}",
    )


def _reason(move: Move, table: str, view: ClusterView) -> str:
    source, target = f"node {move.source[:8]}", f"node {move.target[:8]}"
    if move.loads is not None:
        return _by_load(move, move.loads, view)
    if move.leads[0] > move.share:
        return f"{source} leads {_tablets(move.leads[0])}, but its share is {move.share}"
    if move.leads[0] < move.leads[1] + STEP and not _is_of_table(move):
        for count, kind in ((move.of_zone, "zone"), (move.of_machine, "machine")):
            first, second = _places(move, kind, view)
            if first != second and count[0] >= count[1] + STEP:
                return f"{first} leads {_tablets(count[0])}, {second} leads {count[1]}"
    (leads, of), there = (move.of_table, f" of {table}") if _is_of_table(move) else (move.leads, "")
    return f"{source} leads {_tablets(leads)}{there}, {target} leads {of}"


def _by_load(move: Move, loads: tuple[int, int], view: ClusterView) -> str:
    source, target = _places(move, move.evens, view)
    told = f"the load of the leaders of {source} is {loads[0]:,}/s, that of {target} {loads[1]:,}/s"
    return f"in exchange for a busier leader: {told}" if move.returns else told


def _places(move: Move, kind: str, view: ClusterView) -> list[str]:
    """Source and target, or their zones or machines, in words."""
    found = []
    for node_id in (move.source, move.target):
        node = view.node(node_id)
        name = "" if node is None else node.zone if kind == "zone" else node.host
        found.append(f"node {node_id[:8]}" if kind == "node" else f"{kind} {name or '(none)'}")
    return found


def _is_of_table(move: Move) -> bool:
    """Whether the leader counts of the move's own table alone justify the move."""
    return move.of_table[0] >= move.of_table[1] + STEP


def _tablets(count: int) -> str:
    return f"{count} tablet{'s' * (count != 1)}"
