"""Runs the driver for one cluster, and reports heals by node. Called by reconcile.

Owns the driver's newest records. Invariants: the driver's claim is held only while there is work. Without a
policy (too many nodes lost, cluster paused, spec breaks a rule) nothing is ordered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import structlog

from stele.driver.executor import Report
from stele.driver.known import Known
from stele.driver.planner import plan as plan_steps
from stele.driver.policy import Policy
from stele.driver.progress import Progress, with_names
from stele.driver.steps import WAITS, Blocked
from stele.driver.view import ClusterView
from stele.model.errors import SteleError
from stele_operator import metrics
from stele_operator.heals import Heals, News, compared, works_of
from stele_operator.leaders import LeaderMoves
from stele_operator.masters import MasterLink
from stele_operator.movings import Movings

log = structlog.get_logger("stele.operator.heal")
PASSES_MAX = 8
"""How many rounds of the driver one pass of the operator may have. Pods must not wait for a heal."""
PASS_S = 5.0
"""After this many seconds of a pass no further round begins, so that pods need not wait. After the loss of a
node a round gives thousands of orders.
"""
_PAUSE_S = 0.2
_WAITS = frozenset(step.__name__ for step in WAITS)


class Healer:
    """The driver of one cluster, with its last records. `now_s` is the clock that measures the length of
    heals.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.progress: tuple[Progress, ...] = ()
        self.more = False
        """Whether the next pass should come soon: leaders move or may move in a moment, or copies are being
        compared.
        """
        self._heals = Heals()
        self._leaders = LeaderMoves()
        self._movings = Movings()
        self._news: list[News] = []
        self._now_s = now_s
        self._done = False
        """Whether the last round found nothing to do. False if there is work that may not be done now."""

    def news(self) -> tuple[News, ...]:
        """The events since the last call of this method."""
        fresh, self._news = self._news, []
        return tuple(fresh)

    def rests(self, view: ClusterView | None, policy: Policy | None, known: Known | None = None) -> bool:
        """Whether there is nothing to do, or nothing may be done. Then nothing is under way either.

        `known`: what the driver's earlier plans found out.
        """
        settled = view is not None and policy is not None and view.settled
        if settled and view is not None and policy is not None and plan_steps(view, policy, known=known):
            return False
        self._done = settled
        self.progress = ()
        return True

    async def run(
        self,
        link: MasterLink,
        view: ClusterView | None,
        policy: Policy | None,
        names: Mapping[str, str],
        on_round: Callable[[], Awaitable[None]],
    ) -> str:
        """Let the driver work for a few rounds. Without a view or a policy it releases its claim.

        `names`: member names by the first eight digits of their UUIDs. `on_round` is called after each round.
        Returns why the driver could not work, or "".
        """
        self.more = False
        self._news += compared(link.copies_compared(), names)
        if view is None or policy is None:
            if self._done:
                self._news += self._heals.over(names, self._now_s())
                self._news += self._movings.over(self._now_s())
            self._news += self._leaders.over(names, self._now_s())
            self.more = await link.rest(policy is not None)  # what a comparison finds is told soon
            return ""
        began_s = self._now_s()
        try:
            for _ in range(PASSES_MAX):
                report = await link.driver.run_once(policy)
                # A lost node has thousands of steps, and this loop serves the Lease, probes and watches.
                await asyncio.to_thread(self._take, report, policy, names)
                await on_round()
                # Blocked tablets stay blocked until something else changes, so the next pass is soon enough.
                if all(record.kind == Blocked.__name__ for record in report.progress):
                    break
                if self._now_s() - began_s >= PASS_S:
                    break
                await asyncio.sleep(_PAUSE_S)
        except SteleError as exc:
            log.info("the driver could not continue; the next pass tries again", error=str(exc))
            return str(exc)
        return ""

    def _take(self, report: Report, policy: Policy, names: Mapping[str, str]) -> None:
        """Record what a round of the driver did and what it found."""
        done = works_of(
            replace(report, progress=tuple(r for r in report.progress if r.leaders is None)), policy
        )
        for record in report.progress:
            if record.kind not in _WAITS:
                metrics.STEPS.labels(record.step, "failed" if record.error else "done").inc()
        now_s = self._now_s()
        self._news += self._heals.note(done, names, now_s)
        self._news += self._movings.note(done, names, now_s)
        self._news += self._leaders.note(report.progress, names, now_s)
        # The plan without a memory found work: these passes end with one that has nothing to do, or with other work.
        rest = report.leaders_rest or (report.idle and report.some_rest)
        self.more = rest or any(r.leaders is not None for r in report.progress)
        # Other records without a tablet are about nodes, which status.members shows.
        self.progress = tuple(
            named(r, names) for r in report.progress if r.tablet_id or r.leaders is not None
        )


def named(record: Progress, names: Mapping[str, str]) -> Progress:
    """The record with pod names in place of node ids."""
    return replace(record, reason=with_names(record.reason, names), error=with_names(record.error, names))
