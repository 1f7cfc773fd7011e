"""Names who holds the change budget now, and who waits for it. A holder takes members out of the cluster or
replaces them. Read by status, and by cluster_plan, which keeps it in the catalog; pure.

This module reads what the plan decided, and decides nothing. Heals come first. The names are heal/MEMBER,
drain/MEMBER, park/MEMBER, masters (their number changes), upgrade and hibernate. Several hold the budget
together if all of them proceed: each lost member is healed, each drain goes on, each parked node may be away.
Hibernation takes the whole cluster: it waits for nobody, and the others go on after waking.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence

from stele.driver.policy import AWAY_MAX, Policy
from stele.driver.view import Away, Holder, Wanted
from stele_operator.plan import together
from stele_operator.plan.fates import Member, State
from stele_operator.plan.findings import PARK_REFUSED, PARK_WAITS, SLEEP, Finding
from stele_operator.plan.observation import Observation

NAMED_MAX = 10
UPGRADE = "upgrade"
"""The holder that makes pods again."""
MASTERS_CHANGING, MASTERS_WAIT = "MastersChanging", "MastersWait"
"""Reasons of findings: the number of masters changes, or waits to."""
_ROLLING = "Rolling"
ROLL = {_ROLLING, "RollWaits", "RollStopped"}
"""Reasons of a cluster whose pods are being made again, or wait for that."""


def holders(
    everyone: Sequence[Member], findings: Sequence[Finding], policy: Policy | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of those who hold the budget, and the names of those who wait. `policy`: what the driver may
    do from this pass on.
    """
    reasons = {f.reason for f in findings}
    retiring = (policy.retiring if policy is not None else None) or {}
    parked = policy.parked if policy is not None else {}
    holding = [*heals(everyone), *drains(everyone, retiring), *_parks(everyone, parked)]
    waiting = [f"park/{f.member}" for f in findings if f.reason in (PARK_WAITS, PARK_REFUSED) and f.member]
    if MASTERS_CHANGING in reasons:
        holding.append("masters")
    if reasons & ROLL:
        # Between two pods it still has its turn, if nobody else has.
        (holding if _ROLLING in reasons or not holding else waiting).append(UPGRADE)
    if MASTERS_WAIT in reasons:
        waiting.append("masters")
    if reasons & set(SLEEP):
        holding, waiting = ["hibernate"], [*holding, *waiting]
    if "HibernateWaits" in reasons:
        (waiting if holding else holding).append("hibernate")
    return tuple(holding), tuple(waiting)


def heals(everyone: Sequence[Member]) -> list[str]:
    """heal/MEMBER for each member that is lost. Also for each that was given up and that tablets still name."""
    return [f"heal/{m.name}" for m in everyone if m.state is State.LOST or (_drains_out(m) and not _asked(m))]


def drains(everyone: Sequence[Member], retiring: Container[str] = ()) -> list[str]:
    """drain/MEMBER for each member that somebody wants to leave and that tablets still name. `retiring`: ids
    of nodes that leave by the policy, also those that begin in this pass.
    """
    return [
        f"drain/{m.name}"
        for m in everyone
        if (_drains_out(m) and _asked(m))
        or (m.node_id in retiring and m.state is not State.LOST and _named(m))
    ]


def _parks(everyone: Sequence[Member], parked: Container[str]) -> list[str]:
    return [
        f"park/{m.name}" for m in everyone if m.parked or (m.node_id in parked and m.state is not State.LOST)
    ]


def for_catalog(
    o: Observation,
    everyone: Sequence[Member],
    names: tuple[Sequence[str], Sequence[str]],
    rolled: Collection[str],
) -> tuple[tuple[Holder, ...], tuple[str, ...]]:
    """The holders and waiters as the catalog keeps them. `names`: both, by name. `rolled`: names of the pods
    that this pass deletes to make them again.

    A node that the catalog lists as away for the upgrade stays listed until it serves or is lost. So a new
    process of the operator, and the masters, know of it too.
    """
    holding, waiting = (tuple(n[:NAMED_MAX]) for n in names)
    standing = o.catalog.standing if o.catalog is not None else None
    holders_before = standing.holding if standing is not None else ()
    before = {a.node_id: a for h in holders_before for a in h.away if h.name == UPGRADE}
    away = tuple(
        found for m in everyone if (found := _away(o, m, before.get(m.node_id), m.name in rolled)) is not None
    )[:AWAY_MAX]
    kept = [Holder(name, away if name == UPGRADE else ()) for name in holding]
    if away and UPGRADE not in holding:
        # Others have the next turn, but what it took away is not back yet.
        kept.append(Holder(UPGRADE, away))
    return tuple(kept), waiting


def _away(o: Observation, m: Member, before: Away | None, rolled: bool) -> Away | None:
    if rolled:
        return Away(m.node_id, m.node.incarnation if m.node is not None else 0)
    return before if m.state in together.COMING and together.is_away(o, m) and not m.parked else None


def _drains_out(m: Member) -> bool:
    return m.state is State.DRAINING and _named(m)


def _named(m: Member) -> bool:
    return m.node is not None and m.node.replicas > 0


def _asked(m: Member) -> bool:
    """Whether somebody asked for the member to leave or be parked. Otherwise, a member that drains was given
    up.
    """
    return m.node is not None and m.node.asked is not Wanted.IN_SERVICE
