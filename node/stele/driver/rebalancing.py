"""The next round of moves for balance, of replicas and of leaders, for `stele rebalance` and tests. Pure;
starts no move.

Each tablet moves at most once in a round. Another, smaller round may follow.
"""

from __future__ import annotations

from dataclasses import replace

from stele.driver.known import Known
from stele.driver.moves import unrest
from stele.driver.planner import plan
from stele.driver.policy import Policy
from stele.driver.progress import spreads_leaders
from stele.driver.replica_balance import Move, ReplicaBalance
from stele.driver.steps import MoveLeader
from stele.driver.targets import Load
from stele.driver.trials import NO_TRIALS, Trials
from stele.driver.view import ClusterView


def rebalancing(view: ClusterView, policy: Policy, trials: Trials = NO_TRIALS) -> tuple[list[Move], str]:
    """The moves in their order, as if nothing else happened. Also why none may begin now; "" if they may."""
    heals = plan(view, replace(policy, rebalance=False, balance_leaders=False), trials)
    known = Known()
    known.renew(view, policy)
    load = Load(view, trials.avoid)
    why_not = unrest(known.judged, heals, view, policy, load)
    return list(ReplicaBalance(view, policy, known.places, load).moves()), why_not


def leaders_to_move(view: ClusterView, policy: Policy) -> list[MoveLeader]:
    """The leaders that would move now, all at once; none while anything heals."""
    alone = replace(policy, rebalance=False, balance_leaders=True, leader_moves_at_once=len(view.tablets))
    return [step for step in plan(view, alone) if isinstance(step, MoveLeader) and spreads_leaders(step)]
