"""Names who holds the budget (takes something out of the cluster) now, and who waits for it. Heals come first.
Read by status; pure.

It reads what the plan decided, and decides nothing. The names are heal/MEMBER, drain/MEMBER, park/MEMBER,
masters (their number changes), upgrade and hibernate. Several hold it together if all of them proceed: each lost
member is healed, each drain goes on, each parked node may be away. Hibernation takes the whole cluster: it waits for
nobody, and the others go on after waking.
"""

from __future__ import annotations

from collections.abc import Sequence

from stele.driver.view import Wanted
from stele_operator.plan.fates import Member, State
from stele_operator.plan.findings import PARK_REFUSED, PARK_WAITS, SLEEP, Finding

NAMED_MAX = 10
MASTERS_CHANGING, MASTERS_WAIT = "MastersChanging", "MastersWait"
"""Reasons of findings: the number of masters changes, or waits to."""
_ROLLING = "Rolling"
ROLL = {_ROLLING, "RollWaits", "RollStopped"}
"""Reasons of a cluster whose pods are being made again, or wait for that."""


def holders(
    everyone: Sequence[Member], findings: Sequence[Finding]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Who holds the budget, and who waits, by name."""
    reasons = {f.reason for f in findings}
    holding = [*heals(everyone), *drains(everyone), *_parks(everyone)]
    waiting = [f"park/{f.member}" for f in findings if f.reason in (PARK_WAITS, PARK_REFUSED) and f.member]
    if MASTERS_CHANGING in reasons:
        holding.append("masters")
    if reasons & ROLL:
        # Between two pods it still has its turn, if nobody else has.
        (holding if _ROLLING in reasons or not holding else waiting).append("upgrade")
    if MASTERS_WAIT in reasons:
        waiting.append("masters")
    if reasons & set(SLEEP):
        holding, waiting = ["hibernate"], [*holding, *waiting]
    if "HibernateWaits" in reasons:
        (waiting if holding else holding).append("hibernate")
    return tuple(holding), tuple(waiting)


def heals(everyone: Sequence[Member]) -> list[str]:
    """Members that are lost, or given up, and still named by tablets."""
    return [f"heal/{m.name}" for m in everyone if m.state is State.LOST or (_drains_out(m) and not _asked(m))]


def drains(everyone: Sequence[Member]) -> list[str]:
    """Members that somebody wants away, and that tablets still name."""
    return [f"drain/{m.name}" for m in everyone if _drains_out(m) and _asked(m)]


def _parks(everyone: Sequence[Member]) -> list[str]:
    return [f"park/{m.name}" for m in everyone if m.parked]


def _drains_out(m: Member) -> bool:
    return m.state is State.DRAINING and m.node is not None and m.node.replicas > 0


def _asked(m: Member) -> bool:
    """Whether somebody asked for it to leave; otherwise it was given up."""
    return m.node is not None and m.node.asked is not Wanted.IN_SERVICE
