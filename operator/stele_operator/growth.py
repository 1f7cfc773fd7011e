"""Remembers between passes which volumes the API server refused to grow. Used by reconcile; makes no
decisions and no calls.

Invariant: each entry is a refusal by the API server. A new operator begins with an empty memory and tries
each volume once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from stele_operator.act import Outcome
from stele_operator.plan.actions import GrowClaim
from stele_operator.plan.observation import Observation, RefusedGrowth

_FIRST_S = 10.0
_MAX_S = 300.0


class Growth:
    """The refused growth of one cluster's claims."""

    def __init__(self) -> None:
        self._refused: dict[str, RefusedGrowth] = {}

    def with_refusals(self, o: Observation) -> Observation:
        """The observation with the refusals of earlier passes. Also forgets claims that are gone."""
        uids = {c.uid for c in o.claims}
        self._refused = {uid: refused for uid, refused in self._refused.items() if uid in uids}
        return replace(o, refused_growth=dict(self._refused))

    def learn(self, outcomes: Iterable[Outcome], now_s: float) -> None:
        """Record the outcomes of a pass. The wait of a claim doubles with each refusal, up to five minutes."""
        for outcome in outcomes:
            action = outcome.action
            if not isinstance(action, GrowClaim):
                continue
            before = self._refused.pop(action.uid, None)
            if outcome.refused:
                tries = before.tries + 1 if before is not None and before.size == action.size else 1
                again_s = now_s + min(_MAX_S, _FIRST_S * 2 ** min(tries - 1, 10))
                self._refused[action.uid] = RefusedGrowth(action.size, outcome.error, tries, again_s)
            elif outcome.error and before is not None:
                self._refused[action.uid] = before
