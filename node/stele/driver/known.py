"""Keeps what a driver computed in earlier rounds, so that a round costs only what has changed since. Pure;
used by planner.

Each driver has one. All of it can be computed again from a view: without it the planner gives the same steps.
Invariant: its content follows from the view and the policy of the last `renew`.
"""

from __future__ import annotations

import threading

from stele.driver.judgements import Judgements
from stele.driver.kept_steps import KeptSteps
from stele.driver.leader_groups import Groups
from stele.driver.policy import Policy
from stele.driver.replica_places import Places
from stele.driver.view import ClusterView


class Known:
    """The planner's results that are kept between rounds: judgements, leader groups, places, steps.

    Hold `lock` from `renew` to the last query, since rounds run in threads.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._policy: Policy | None = None

    def forget(self) -> None:
        """Compute everything anew in the next round. Used after an error, which may have left something half
        renewed.
        """
        self._policy = None

    def renew(self, view: ClusterView, policy: Policy) -> None:
        """Compute what changed with this view. Under another policy, compute everything."""
        if policy != self._policy:
            self.judged, self.groups, self.places = Judgements(policy), Groups(policy), Places()
            self.steps = KeptSteps()
        self._policy = None  # an error in between leaves it half renewed: the next call begins anew
        for tablet_id, situation in self.judged.renew(view):
            self.groups.take(tablet_id, situation)
            self.places.take(tablet_id, situation)
            self.steps.forget(tablet_id)
        self._policy = policy
