"""What a driver worked out in earlier passes, so that a pass costs only what has changed since. Pure; used by
planner.

One for each driver. All of it can be worked out again from a view: without it the planner gives the same steps.
Invariant: it holds what follows from the view and the policy of the last `renew`.
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
    """What the planner keeps between passes: judgements, leader groups, places, steps. Hold `lock` from `renew` to the
    last query, since passes run in threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._policy: Policy | None = None

    def forget(self) -> None:
        """Work out everything anew in the next pass: an error may have left something half renewed."""
        self._policy = None

    def renew(self, view: ClusterView, policy: Policy) -> None:
        """Work out what changed with this view. Under another policy, work out everything."""
        if policy != self._policy:
            self.judged, self.groups, self.places = Judgements(policy), Groups(policy), Places()
            self.steps = KeptSteps()
        self._policy = None  # an error in between leaves it half renewed: the next call begins anew
        for tablet_id, situation in self.judged.renew(view):
            self.groups.take(tablet_id, situation)
            self.places.take(tablet_id, situation)
            self.steps.forget(tablet_id)
        self._policy = policy
