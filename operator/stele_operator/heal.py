"""Heal: runs the driver for one cluster, and tells of it in the driver's words. Called by reconcile.

Owns the driver's newest records. Invariant: the driver's claim is held only while there is something to do, and
nothing is ordered without a policy, that is while too many are lost, the cluster is paused or its spec is wrong.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

import structlog

from stele.driver.planner import plan as plan_steps
from stele.driver.policy import Policy
from stele.driver.progress import Progress, with_names
from stele.driver.steps import WAITS
from stele.driver.view import ClusterView
from stele.model.errors import SteleError
from stele_operator import metrics
from stele_operator.masters import MasterLink
from stele_operator.plan.budgets import some

log = structlog.get_logger("stele.operator.heal")
PASSES_MAX = 8
"""Of the driver, in one of ours: pods must not wait for a heal."""
_PAUSE_S = 0.2
_NAMED_MAX = 5
"""So many tablets of which one thing was done have an event each."""
_WAITS = frozenset(step.__name__ for step in WAITS)
_REPLICA = re.compile(r"\breplica \d+\b")
_SECONDS = re.compile(r"\b\d+ s\b")
_COPIED = re.compile(r"\b\d+ of \d+ bytes\b")
"""What may be another in each pass though the thing is the same: for how long a failed copy's source had given nothing (nothing
tells for how long a node has been silent); how much of a copy has arrived."""


@dataclass(frozen=True, slots=True)
class News:
    """Something the driver did or met that a user should hear of."""

    reason: str
    message: str
    warning: bool


class Healer:
    """The driver of one cluster, with what it last said."""

    def __init__(self) -> None:
        self.progress: tuple[Progress, ...] = ()
        self._told: set[tuple[str, str, str]] = set()
        self._done: dict[tuple[str, str], list[tuple[str, str]]] = {}
        """(step, why whatever the replica's number) of what was done: where, and why."""
        self._waiting: dict[tuple[str, str], list[str]] = {}
        """(step, why) of what is blocked, and which tablets: a lost node may have thousands."""

    def _note(self, record: Progress, names: Mapping[str, str]) -> Progress:
        """Take up a record of the driver; the same is told once, however long it goes on."""
        record = replace(
            record, reason=with_names(record.reason, names), error=with_names(record.error, names)
        )
        if record.kind not in _WAITS:
            metrics.STEPS.labels(record.step, "failed" if record.error else "done").inc()
        where = with_names(record.where, names)
        why = record.reason + (f" (not yet: {record.error})" if record.error else "")
        key = (record.tablet_id, record.kind, _COPIED.sub("", _SECONDS.sub("", f"{where}: {why}")))
        if key not in self._told:
            self._told.add(key)
            if record.kind == "Blocked":
                self._waiting.setdefault((record.step, why), []).append(where)
            else:
                self._done.setdefault((record.step, _REPLICA.sub("", why)), []).append((where, why))
        return record

    def news(self) -> tuple[News, ...]:
        """What is new since the last call. Tablets that are blocked for one reason are told together, and so are many of
        which one thing was done: an event each would hold the healing up, and nobody could read them."""
        fresh = []
        done, self._done = self._done, {}
        for (step, _), found in done.items():
            if len(found) > _NAMED_MAX:
                fresh.append(
                    News(step, f"{some([where for where, _ in found])}; the first: {found[0][1]}", False)
                )
            else:
                fresh += [News(step, f"{where}: {why}", False) for where, why in found]
        waiting, self._waiting = self._waiting, {}
        fresh += [News(step, f"{some(tablets)}: {why}", True) for (step, why), tablets in waiting.items()]
        return tuple(fresh)

    def rests(self, view: ClusterView | None, policy: Policy | None) -> bool:
        """Whether there is nothing to do, or nothing may be done; then nothing is under way either."""
        if view is not None and policy is not None and view.settled and plan_steps(view, policy):
            return False
        self.progress = ()
        self._told.clear()
        return True

    async def run(
        self,
        link: MasterLink,
        view: ClusterView | None,
        policy: Policy | None,
        names: Mapping[str, str],
        on_round: Callable[[], Awaitable[None]],
    ) -> str:
        """Let the driver work for a moment; without view or policy it lets its claim go. Returns why it could not, or
        an empty text.

        `names`: of members, by the first eight digits of their UUIDs. `on_round` tells of each round at once.
        """
        if view is None or policy is None:
            await link.driver.release()
            return ""
        try:
            for _ in range(PASSES_MAX):
                report = await link.driver.run_once(policy)
                records = [self._note(record, names) for record in report.progress]
                # Records without a tablet are about nodes, which stand with the members.
                self.progress = tuple(r for r in records if r.tablet_id)
                await on_round()
                if report.idle:
                    break
                await asyncio.sleep(_PAUSE_S)
        except SteleError as exc:
            log.info("driver could not go on", error=str(exc))
            return str(exc)
        return ""
