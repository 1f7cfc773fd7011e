"""When an action that failed is tried again, remembered from pass to pass. Used by reconcile and act; plans nothing.

Invariant: what is not tried is told with what was said the last time. An operator that starts knows of nothing, and a
change of the TabletCluster's spec makes it forget: either tries everything once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stele_operator.act import Outcome
from stele_operator.plan.actions import Action
from stele_operator.plan.order import identity

FIRST_S = 1.0
MAX_S = 15.0
"""As long as a pass that fails as a whole waits at most."""


@dataclass(frozen=True, slots=True)
class Failed:
    """What became of an action the last time, and when it is tried again."""

    error: str
    refused: bool
    tries: int
    again_s: float


class Backoff:
    """The failures of one cluster's actions."""

    def __init__(self) -> None:
        self._failed: dict[tuple[str, ...], Failed] = {}
        self._planned: set[tuple[str, ...]] = set()
        """What this pass planned so far."""
        self._generation = 0

    def of(self, generation: int) -> None:
        """The spec that the next pass works on, by its generation."""
        if generation != self._generation:
            self._failed.clear()
        self._generation = generation

    def early(self, action: Action, now_s: float) -> Outcome | None:
        """What to say of an action that failed a moment ago and is not to be tried yet; None: it may be tried."""
        failed = self._failed.get(identity(action))
        # The API server's clock may have been set back since.
        if failed is None or not failed.again_s - MAX_S <= now_s < failed.again_s:
            return None
        return Outcome(action, failed.error, refused=failed.refused, held=True)

    def learn(self, outcomes: Iterable[Outcome], now_s: float) -> None:
        """What became of some actions of a pass. Each try waits twice as long as the last; an action that failed because its
        object changed meanwhile is tried again at once."""
        for outcome in outcomes:
            key = identity(outcome.action)
            self._planned.add(key)
            if outcome.held:
                continue
            before = self._failed.pop(key, None)
            if outcome.error and not outcome.changed_under:
                tries = before.tries + 1 if before is not None else 1
                wait_s = min(MAX_S, FIRST_S * 2 ** min(tries - 1, 10))
                self._failed[key] = Failed(outcome.error, outcome.refused, tries, now_s + wait_s)

    def end_pass(self) -> None:
        """All calls of a pass were made: what none of them planned is forgotten."""
        self._failed = {key: failed for key, failed in self._failed.items() if key in self._planned}
        self._planned.clear()
