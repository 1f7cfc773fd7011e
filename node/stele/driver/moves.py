"""Moves of healthy replicas: the moves that an administrator asked for, and when a move is given up. Called
by planner; pure.

A move is an intent of the kind MOVE (for balance) or MOVE_BY_HAND. Its source is `leaving`, so the planner
treats it like a replica on a DRAINING node. The new voter comes first, then the source is removed.

Invariant: a move begins only while every member of its tablet is a healthy voter.
"""

from __future__ import annotations

from collections.abc import Sequence

from stele.driver.causes import move_cause
from stele.driver.judgements import Judgements
from stele.driver.leader_moves import LASTING
from stele.driver.policy import Policy
from stele.driver.situation import Member, Situation, at_rest
from stele.driver.slots import Slots
from stele.driver.steps import BeginIntent, Blocked, Step
from stele.driver.targets import Load, choose_target, tablet_bytes
from stele.driver.view import MOVE, MOVE_BY_HAND, ClusterView, NodeView


def unrest(judged: Judgements, steps: Sequence[Step], view: ClusterView, policy: Policy, load: Load) -> str:
    """Why no move for balance may begin now; "" if it may.

    The reason is a tablet that heals, is new, does not answer, or was placed by hand and goes first.
    """
    if not view.settled:
        return "the leading master has not heard from all nodes yet"
    tablet = view.tablet(min(judged.young)) if judged.young else None
    if tablet is not None:
        return f"tablet {tablet.tablet_id[:8]} of {tablet.table_name} is being created"
    for node in view.nodes:
        if judged.replicas[node.node_id] and node.heartbeat_age_ms > policy.lost_after_ms:
            return f"node {node.node_id[:8]} is silent"
    moving = {s.tablet.tablet_id for s in judged.restless() if _rests_after_move(s)}
    for s in judged.restless():
        may_move = at_rest(s) or (s.intent is not None and s.intent.moves)
        if s.tablet.by_hand and may_move and _choice(s, view, policy, load) is not None:
            return (
                f"tablet {s.tablet.tablet_id[:8]} of {s.tablet.table_name} was placed by hand and moves first"
            )
    for step in steps:
        lasts = isinstance(step, Blocked) and step.code in LASTING
        if step.tablet_id not in moving and not lasts:
            what = f"tablet {step.tablet_id[:8]}" if step.tablet_id else "a node"
            return f"{what} changes first: {step.title}, {step.reason}"
    return ""


def _rests_after_move(s: Situation) -> bool:
    """Whether a move is under way, and the tablet needs nothing else."""
    if s.intent is None or not s.intent.moves or not all(m.live for m in s.voters):
        return False
    return s.needed == (0 if s.joining in s.good else 1)


def no_longer_wanted(s: Situation) -> str:
    """Why to give up the move under way; "" if it continues, or if there is none."""
    intent, hand = s.intent, s.tablet.by_hand
    if intent is None or not intent.moves:
        return ""
    if intent.kind == MOVE and hand:
        return "somebody placed the tablet by hand meanwhile"
    source = s.member(intent.replaces_replica)
    leaves = source is not None and source.peer.node_id in hand.avoided
    if intent.kind == MOVE_BY_HAND and intent.target_node not in hand.pinned and not leaves:
        return "the placement by hand was released"
    if s.joining is None and s.spare <= 0 and any(not m.live for m in s.voters):
        # A heal begins with a witness, which restores the tolerance before any rows are copied.
        return "a voter was lost meanwhile, and its heal goes first"
    return ""


def begin_by_hand(
    s: Situation, view: ClusterView, policy: Policy, load: Load, slots: Slots, epoch: int
) -> Step | None:
    """The first step of the next move that an administrator asked for, or None."""
    if not s.tablet.by_hand or not at_rest(s):
        return None
    choice = _choice(s, view, policy, load)
    if choice is None:
        return None
    source, target = choice
    tablet_id, cas = s.tablet.tablet_id, s.tablet.config.opid_index
    if not slots.begin_move():
        reason = f"placed by hand; waits for one of the {policy.max_moves} moves that may run at once"
        return Blocked(tablet_id, cas, reason, "CopyLimit")
    load.planned(target.node_id, tablet_bytes(s.tablet))
    reason = f"{source.name} moves to node {target.node_id[:8]}: placed by hand"
    return begin_move(s, source, target, reason, MOVE_BY_HAND, epoch)


def begin_move(
    s: Situation, source: Member, target: NodeView, reason: str, kind: str, epoch: int
) -> BeginIntent:
    """The step that begins a move."""
    leader = s.leader() or source
    return BeginIntent(
        s.tablet.tablet_id,
        s.tablet.config.opid_index,
        reason,
        kind,
        target.node_id,
        leader.peer.node_id,
        source.peer.replica_id,
        False,
        cause=move_cause(kind, s.tablet.tablet_id, epoch),
    )


def _choice(s: Situation, view: ClusterView, policy: Policy, load: Load) -> tuple[Member, NodeView] | None:
    """The replica to move and its new node. None: all is as asked for, or no move is possible now.

    A replica on its way to a node counts as being there. The replica that it replaces counts as gone.
    """
    hand = s.tablet.by_hand
    coming, leaving = (s.intent.target_node, s.intent.replaces_replica) if s.intent is not None else ("", 0)
    missing = [n for n in hand.pinned if s.tablet.config.peer_on(n) is None and n != coming]
    # A node that is pinned as well is not avoided: otherwise the replica would go back and forth.
    elsewhere = [m for m in s.members if m.peer.replica_id != leaving]
    unwanted = [m for m in elsewhere if m.peer.node_id in set(hand.avoided) - set(hand.pinned)]
    free = [m for m in elsewhere if m.peer.node_id not in hand.pinned and m not in unwanted]
    target = choose_target(s, view, policy, load, among=missing) if missing else None
    if target is None and unwanted:
        target = choose_target(s, view, policy, load)
        if target is not None and target.node_id in hand.avoided:
            return None
    if target is None:
        return None
    leader = s.tablet.leader_node
    source = min(
        unwanted or free,
        key=lambda m: (m.peer.node_id == leader, -load.of(m.peer.node_id), m.peer.replica_id),
        default=None,
    )
    return (source, target) if source is not None else None
