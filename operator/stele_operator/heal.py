"""Heal: runs the driver for one cluster, and tells of it in the driver's words. Called by reconcile.

Owns the driver's newest records. Invariant: the driver's claim is held only while there is something to do, and
nothing is ordered without a policy, that is while too many are lost, the cluster is paused or its spec is wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from stele.driver.planner import plan as plan_steps
from stele.driver.policy import Policy
from stele.driver.progress import Progress
from stele.driver.view import ClusterView
from stele.model.errors import SteleError
from stele_operator import metrics
from stele_operator.masters import MasterLink

log = structlog.get_logger("stele.operator.heal")
PASSES_MAX = 8
"""Of the driver, in one of ours: pods must not wait for a heal."""
_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class News:
    """Something the driver did or met that a user should hear of."""

    table: str
    reason: str
    message: str
    warning: bool


class Healer:
    """The driver of one cluster, with what it last said."""

    def __init__(self) -> None:
        self.progress: tuple[Progress, ...] = ()
        self._told: set[tuple[str, str, str]] = set()
        self._news: list[News] = []

    def note(self, record: Progress) -> None:
        """Take up a record of the driver; the same is told once."""
        key = (record.tablet_id, record.kind, record.error or record.reason)
        outcome = "failed" if record.error else "done"
        metrics.STEPS.labels(record.step, outcome).inc()
        if key in self._told or (record.error and not record.tablet_id):
            return
        self._told.add(key)
        where = (
            f"tablet {record.tablet_id[:8]} of {record.table_name or 'the catalog'}: "
            if record.tablet_id
            else ""
        )
        tail = f" (not yet: {record.error})" if record.error else ""
        blocked = record.kind == "Blocked"
        self._news.append(News(record.table_name, record.step, f"{where}{record.reason}{tail}", blocked))

    def news(self) -> tuple[News, ...]:
        """What is new since the last call."""
        fresh, self._news = tuple(self._news), []
        return fresh

    async def run(self, link: MasterLink, view: ClusterView | None, policy: Policy | None) -> str:
        """Let the driver work for a moment. Returns why it could not, or an empty text."""
        if view is None or policy is None or not view.settled or not plan_steps(view, policy):
            await self._rest(link)
            return ""
        try:
            for _ in range(PASSES_MAX):
                report = await link.driver.run_once(policy)
                self.progress = report.progress
                if report.idle:
                    break
                await asyncio.sleep(_PAUSE_S)
        except SteleError as exc:
            log.info("driver could not go on", error=str(exc))
            return str(exc)
        return ""

    async def _rest(self, link: MasterLink) -> None:
        self.progress = ()
        self._told.clear()
        await link.driver.release()


def heals(records: Sequence[Progress]) -> list[Progress]:
    """Records that are about tablets: those of nodes stand with the members."""
    return [r for r in records if r.tablet_id]
