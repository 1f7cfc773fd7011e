"""Begins replacements: chooses a target and makes an intent for each missing voter. Pure; used by planner.py.

Invariant: an intent is begun only for a tablet without one, on a machine without a replica of the tablet.
"""

from __future__ import annotations

from stele.driver.joining import Joining, at, blocked
from stele.driver.moves import begin_by_hand
from stele.driver.policy import Policy
from stele.driver.removing import remove
from stele.driver.situation import Member, Situation
from stele.driver.slots import Slots
from stele.driver.steps import (
    BeginIntent,
    DemotePeer,
    Step,
    WaitPromotion,
)
from stele.driver.targets import Load, choose_target, tablet_bytes
from stele.driver.view import (
    ClusterView,
)


class Beginning:
    """Begins the replacements of one plan. Each one leaves less room and fewer copies for the tablets that
    come later.

    `reserved`: who holds the change budget and has a node away, in words. If it is not empty, only heals
    begin.
    """

    def __init__(
        self,
        view: ClusterView,
        policy: Policy,
        load: Load,
        slots: Slots,
        joining: Joining,
        epoch: int,
        reserved: str = "",
    ) -> None:
        self._view = view
        self._policy = policy
        self._load = load
        self._slots = slots
        self._joining = joining
        self._epoch = epoch
        self._reserved = reserved

    def begin(self, s: Situation) -> Step | None:
        """If the tablet lacks a voter, return the step that records the intent to add one."""
        if s.needed <= 0 or s.intent is not None:
            return None
        if waits := waits_for_parked(s):
            return waits
        replaced = _to_replace(s)
        if self._reserved and replaced is not None and replaced.live:
            return blocked(s, "BudgetHeld", f"{replaced.name}: {replaced.fault}; waits, as {self._reserved}")
        # The group tolerates no fault, so the new vote is needed before the rows are copied
        # (docs/healing.md). With only one live voter a witness would not help.
        witness = s.spare == 0 and len(s.live_voters) >= 2
        target = choose_target(s, self._view, self._policy, self._load)
        if target is None:
            return self._no_target(s, replaced)
        if not witness and not self._slots.begin():
            return blocked(s, "CopyLimit", f"waits for {self._joining.turn}")
        self._load.planned(target.node_id, tablet_bytes(s.tablet))
        what = f"{replaced.name}: {replaced.fault}" if replaced is not None else ""
        short = f"{len(s.good)} of {s.tablet.replication_factor} healthy voters"
        reason = f"{what or short}; new replica on node {target.node_id[:8]}" + (
            ", first as a witness because the group tolerates no fault now" if witness else ""
        )
        leader = s.leader()
        return BeginIntent(
            *at(s, reason),
            "replace" if replaced is not None else "add",
            target.node_id,
            (leader or s.data_voters[0]).peer.node_id,
            replaced.peer.replica_id if replaced is not None else 0,
            witness,
        )

    def begin_by_hand(self, s: Situation) -> Step | None:
        """Begin the next move that was asked for by hand. This check is the last: the tablet needs nothing
        else.
        """
        step = begin_by_hand(s, self._view, self._policy, self._load, self._slots, self._epoch)
        if step is not None and self._reserved:
            return blocked(s, "BudgetHeld", f"placed by hand; waits, as {self._reserved}")
        return step

    def _no_target(self, s: Situation, replaced: Member | None) -> Step | None:
        """The step if no other machine can take the replica.

        The machine of a bad member can take it, once the configuration no longer names that member. So the
        step removes or demotes such a member. Otherwise the tablet is blocked.
        """
        for m in s.members:
            if (
                m.kept
                or m.live
                or choose_target(s, self._view, self._policy, self._load, without=m.peer) is None
            ):
                continue
            reason = f"{m.fault}; its machine is the only place left for a new replica"
            if not m.peer.votes:
                return remove(s, m, reason)
            if s.can_demote(m):
                return DemotePeer(*at(s, f"{m.name}: {reason}"), m.peer.replica_id, m.peer.node_id)
        for m in s.members:
            if m.peer.promote and m.live:
                return WaitPromotion(*at(s, f"{m.name} is back"), m.peer.replica_id, m.peer.node_id)
        why = (
            f"{replaced.name}: {replaced.fault}" if replaced is not None else f"{s.needed} voters are missing"
        )
        role = s.tablet.node_role
        if choose_target(s, self._view, self._policy, self._load, any_room=True) is not None:
            return blocked(
                s,
                "NoRoom",
                f"{why}; no ACTIVE {role} on another machine has room for it beside the copies under way; "
                f"enlarge the volumes or add a {role}",
            )
        return blocked(s, "NoTarget", f"{why}; waits for an ACTIVE {role} with room on another machine")


def _to_replace(s: Situation) -> Member | None:
    """The member that a new replica replaces: a dead or FAILED voter first, then another dead member, then a
    draining one. None if there is none.
    """
    poor = [m for m in s.members if not (m.live and m.active) and not m.kept]
    return min(poor, key=lambda m: (m.live, not m.peer.votes, m.peer.replica_id), default=None)


def waits_for_parked(s: Situation) -> Step | None:
    """A blocked step if no voter can be added and only parked members are away. The tablet waits for them.
    Else None.
    """
    away = [m for m in s.voters if not m.live]
    if s.can_grow() or not away or not all(m.kept for m in away):
        return None
    names = ", ".join(m.name for m in away)
    return blocked(s, "Parked", f"{names}: away on a parked node; no replica can be added until it is back")
