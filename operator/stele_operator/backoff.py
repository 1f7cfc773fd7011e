"""Remembers between passes when to try a failed action again. Used by reconcile and act; plans nothing.

Invariant: an action that is not tried reports its last error. A new operator, or a change of the
TabletCluster's spec, begins with an empty memory, so everything is tried once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stele_operator.act import Outcome
from stele_operator.plan.actions import Action
from stele_operator.plan.order import identity

FIRST_S = 1.0
MAX_S = 15.0
"""The longest wait in seconds. It equals the longest wait after a pass that failed as a whole."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The last failure of an action, and when to try the action again."""

    error: str
    refused: bool
    tries: int
    again_s: float


class Backoff:
    """The failures of one cluster's actions."""

    def __init__(self) -> None:
        self._failed: dict[tuple[str, ...], Failed] = {}
        self._planned: set[tuple[str, ...]] = set()
        """The actions that this pass has planned so far."""
        self._generation = 0

    def of(self, generation: int) -> None:
        """Set the generation of the spec for the next pass. If it changed, forget all failures."""
        if generation != self._generation:
            self._failed.clear()
        self._generation = generation

    def early(self, action: Action, now_s: float) -> Outcome | None:
        """The last outcome of an action that must not be tried yet; None if it may be tried."""
        failed = self._failed.get(identity(action))
        # The second bound matters if the API server's clock was set back.
        if failed is None or not failed.again_s - MAX_S <= now_s < failed.again_s:
            return None
        return Outcome(action, failed.error, refused=failed.refused, held=True)

    def learn(self, outcomes: Iterable[Outcome], now_s: float) -> None:
        """Record the outcomes of a pass. The wait of an action doubles with each failure. There is no wait if
        an object had changed meanwhile.
        """
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
        """End a pass: forget the actions that it did not plan."""
        self._failed = {key: failed for key, failed in self._failed.items() if key in self._planned}
        self._planned.clear()
