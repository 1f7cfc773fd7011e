"""Names who holds the budget (takes something out of the cluster) now, and who waits for it. One at a time;
heals first. Read by status; pure.

It reads what the plan decided, and decides nothing. The names are heal/MEMBER, drain/MEMBER, park/MEMBER,
upgrade and hibernate. Hibernation takes the whole cluster: it waits for nobody, and the others go on after waking.
"""

from __future__ import annotations

from collections.abc import Sequence

from stele.driver.view import Wanted
from stele_operator.plan.fates import Member, State
from stele_operator.plan.findings import SLEEP, Finding

WAITING_MAX = 10
_ROLL = {"Rolling", "RollWaits", "RollStopped"}


def holder(everyone: Sequence[Member], findings: Sequence[Finding]) -> tuple[str, tuple[str, ...]]:
    """Who holds the budget, "" if nobody does, and who waits, by name."""
    parts = [*_heals(everyone), *_drains(everyone), *_parks(everyone)]
    if any(f.reason in _ROLL for f in findings):
        parts.append("upgrade")
    if any(f.reason in SLEEP for f in findings):
        parts.insert(0, "hibernate")
    if any(f.reason == "HibernateWaits" for f in findings):
        parts.append("hibernate")
    return (parts[0], tuple(parts[1:])) if parts else ("", ())


def _heals(everyone: Sequence[Member]) -> list[str]:
    """Members that are lost, or given up, and still named by tablets."""
    return [f"heal/{m.name}" for m in everyone if m.state is State.LOST or (_drains_out(m) and not _asked(m))]


def _drains(everyone: Sequence[Member]) -> list[str]:
    return [f"drain/{m.name}" for m in everyone if _drains_out(m) and _asked(m)]


def _parks(everyone: Sequence[Member]) -> list[str]:
    return [f"park/{m.name}" for m in everyone if m.state is State.PARKED]


def _drains_out(m: Member) -> bool:
    return m.state is State.DRAINING and m.node is not None and m.node.replicas > 0


def _asked(m: Member) -> bool:
    """Whether somebody asked for it to leave; otherwise it was given up."""
    return m.node is not None and m.node.asked is not Wanted.IN_SERVICE
