"""Plans moves of leaders away from nodes that drain or are parked. Called by planner after the checks of a
tablet; pure.

A tablet without its leader takes no writes for an election timeout. So leaders leave first, and do not wait
for copies. Invariants: a leader moves only if the tablet's own step is to wait, so no heal is delayed. It
goes only to a voter on a node in service, and not to one that refused it lately.
"""

from __future__ import annotations

from collections import Counter

from stele.driver.joining import at
from stele.driver.kept_steps import Asked
from stele.driver.leader_groups import may_lead
from stele.driver.policy import Policy
from stele.driver.situation import Situation, in_service
from stele.driver.steps import WAITS, Blocked, MoveLeader, Step
from stele.driver.trials import Trials
from stele.model.ids import OPID_NONE

UNKNOWN = frozenset({"NotHeard", "NoLeader", "LostMajority"})
"""Codes of blocked steps whose leader is unknown, or for which no voter could take over."""


class LeaderLeaves:
    """The moves of leaders away from nodes in one round. `leads`: how many tablets each node leads."""

    def __init__(self, leads: Counter[str], policy: Policy, trials: Trials, asked: Asked) -> None:
        self._policy = policy
        self._asked = asked
        self._trials = trials.leaders
        self._leads = Counter(leads)
        self._left = policy.leader_moves_at_once

    def instead(self, s: Situation, step: Step | None) -> Step | None:
        """The tablet's step, or the move of its leader if the tablet only waits."""
        leader, tablet_id = s.leader(), s.tablet.tablet_id
        # A replica that a move replaces keeps leading until its successor votes.
        if leader is None or (in_service(leader.node, self._policy) and not leader.parked):
            return step
        self._asked.others = True
        if tablet_id in self._trials.moved or not self._left:
            return step
        if step is not None and not isinstance(step, WAITS):
            return step
        if isinstance(step, Blocked) and step.code in UNKNOWN:
            return step
        heirs = [
            m
            for m in s.members
            if may_lead(m, self._policy) and (tablet_id, m.peer.node_id) not in self._trials.refused
        ]
        heir = min(
            heirs,
            key=lambda m: (
                self._leads[m.peer.node_id],
                -(m.report.last_committed if m.report is not None else OPID_NONE).index,
                m.peer.replica_id,
            ),
            default=None,
        )
        if heir is None:
            return step
        self._leads[heir.peer.node_id] += 1
        self._left -= 1
        state = "is parked" if leader.parked else "is to be drained"
        reason = f"node {leader.peer.node_id[:8]} {state}; leaders leave it first"
        return MoveLeader(*at(s, reason), heir.peer.node_id, False)
