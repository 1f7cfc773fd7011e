"""How many pods of a role may be evicted at once, and if none, why. Called by cluster_plan; read by
member_objects and status; pure.

Invariants: at most `spec.budget.maxUnavailable` pods of a role may be away at a time, whichever they are. The
number is lower where a tablet of the role could lose its majority. While a claim of a role is being deleted,
no pod of the role may be evicted, because the volume goes with the pod. While the state of a tablet is
unknown, no pod may be evicted, and an existing budget is not changed. A parked node counts as away, since it
may stop at any moment; its own pod may always be evicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stele.driver.view import TabletView
from stele.model.ids import CATALOG_TABLET_ID
from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.plan import naming
from stele_operator.plan.fates import Member, State
from stele_operator.plan.health import going, masters_wanted, may_be_away, needless, without_spare
from stele_operator.plan.observation import ROLES, Observation, Role

_NAMED_MAX = 5
"""The most tablets, or pods, that a message names."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The disruption budget of a role. `min_available`: how many of its pods must stay. `reason` and
    `message` say why none may be evicted; if they are empty, `at_once` pods may. `bound` says why `at_once`
    is less than the spec allows.
    """

    role: Role
    min_available: int
    reason: str = ""
    message: str = ""
    at_once: int = 1
    bound: str = ""


def plan_budgets(o: Observation, spec: TabletClusterSpec, everyone: Sequence[Member]) -> tuple[Budget, ...]:
    """The budgets to write, at most one for each role. While no master leads, the state of tablets is
    unknown, so a role keeps its existing budget. The exception is a role with a claim that is being deleted:
    its budget then forbids evictions, because the volume would go with the pod.
    """
    there = {e.name for e in o.existing if e.kind == "PodDisruptionBudget"}
    return tuple(
        _budget(o, spec, role, everyone)
        for role in ROLES
        if o.catalog is not None
        or naming.disruption_budget(o.cluster.name, role) not in there
        or _going(role, everyone)
    )


def _budget(o: Observation, spec: TabletClusterSpec, role: Role, everyone: Sequence[Member]) -> Budget:
    names = _names(o, role, everyone)
    wanted = masters_wanted(o, spec) if role == "master" else spec.nodes.replicas
    # Count more pods than the spec asks for, too, such as a retired one: otherwise one more could be evicted.
    pods = max(wanted, len(names))
    # This comes first, because the checks below assume that pods return on their volumes.
    leaving = _going(role, everyone)
    if leaving:
        names_of = some([m.name for m in leaving])
        why = (
            "these claims are being deleted, and each is gone, with its volume, once its pod has ended (the condition Stalled says "
            f"what to do): {names_of}"
        )
        return _blocked(role, pods, "ClaimsGoing", why)
    if o.catalog is None:
        why = f"no master leads, so the state of the tablets is unknown: {o.catalog_problem}"
        return _blocked(role, pods, "MastersUnavailable", why)
    needed = [t for t in without_spare(o, role) if not needless(o, t)]
    single = [t for t in needed if t.replication_factor == 1]
    if single:
        return _blocked(role, pods, "SingleReplica", _single(single, {m.node_id: m.name for m in everyone}))
    if needed:
        why = "some tablets lack a voter or a leader; wait until they are healed (status.healing, stele ksck)"
        return _blocked(role, pods, "VoterLost", f"{why}: {some([tablet_name(t) for t in needed])}")
    parked = sorted(m.name for m in everyone if m.role == role and m.node is not None and m.node.parked)
    ready = {p.name for p in o.pods if p.role == role and p.ready and not p.deleting and p.name not in parked}
    most, bound = _most(o, spec, role, pods, [m.node_id for m in everyone if m.name in names - ready])
    # The budget of Kubernetes counts the pods without the label, and parked nodes take their places from them.
    counted = pods - sum(m.pod is None or m.pod.parked for m in everyone if m.name in parked)
    more = max(0, most - len(parked))
    if parked and not more:
        why = (
            f"{some(parked)} {'is' if len(parked) == 1 else 'are'} parked, and only {_number(most)} may be away at a "
            "time; the pod of a parked node may itself be evicted"
        )
        return _blocked(role, counted, "NodeParked", why)
    if len(ready) <= pods - most:
        why = f"{len(ready)} of {pods} pods are ready, and only {_number(most)} may be away at a time"
        away = some(sorted(names - ready)) or "pods that are still to be created"
        return _blocked(role, counted - more, "PodsNotReady", f"{why}; evictions wait for {away}")
    return Budget(role, counted - more, at_once=more, bound=bound)


def _most(
    o: Observation, spec: TabletClusterSpec, role: Role, pods: int, absent: Sequence[str]
) -> tuple[int, str]:
    """How many pods may be away at once, and why this is less than the spec allows ("" if it is not). At
    least one: the caller has checked that every tablet can lose a voter.
    """
    most = min(spec.budget.maxUnavailable, pods)
    if most <= 1 or (limit := may_be_away(o, role, absent)) is None or limit[0] >= most:
        return max(1, most), ""
    names = some([tablet_name(t) for t in limit[1]])
    return max(1, limit[0]), f"with more {role}s away, these tablets could lose their majority: {names}"


def _number(count: int) -> str:
    return "one" if count == 1 else str(count)


def drainable(budgets: Sequence[Budget]) -> str:
    """A sentence that says how many pods may be evicted at a time, for budgets that all allow it."""
    count = {b.role: b.at_once for b in budgets}
    parts = [
        f"{_number(n)} {role}{'' if n == 1 else 's'}" for role in reversed(ROLES) if (n := count.get(role))
    ]
    bounds = "".join(f"; {b.bound}" for b in budgets if b.bound)
    return f"{' and '.join(parts)} may be evicted at a time{bounds}"


def _blocked(role: Role, min_available: int, reason: str, why: str) -> Budget:
    return Budget(role, min_available, reason, f"no {role} may be evicted: {why}")


def _going(role: Role, everyone: Sequence[Member]) -> tuple[Member, ...]:
    return going([m for m in everyone if m.role == role])


def _names(o: Observation, role: Role, everyone: Sequence[Member]) -> set[str]:
    """Names of pods that are ready, or may become ready before the next pass."""
    kept = {
        m.name for m in everyone if m.role == role and m.claim is not None and m.state is not State.RETIRED
    }
    return kept | {p.name for p in o.pods if p.role == role and not p.deleting}


def _single(tablets: Sequence[TabletView], pods: Mapping[str, str]) -> str:
    where = some([f"{tablet_name(t)} on {_pods(t, pods)}" for t in tablets])
    if tablets[0].tablet_id == CATALOG_TABLET_ID:
        return (
            "masters.replicas is 1: while the only master is away, no table can be created and nothing is healed. To drain its "
            "machine all the same, delete its pod (kubectl delete pod); it is created again on its volume. To avoid this, set "
            f"masters.replicas to 3: {where}"
        )
    return (
        "a table with replicationFactor 1 cannot be read or written while its node is away. To drain a machine all the "
        "same, delete its pod (kubectl delete pod); it is created again on its volume. To avoid this, give the table "
        f"replicationFactor 3, or drop it: {where}"
    )


def tablet_name(tablet: TabletView) -> str:
    """The tablet's name in events and messages: the first digits of its id, and its table."""
    if tablet.tablet_id == CATALOG_TABLET_ID:
        return "the catalog"
    return f"{tablet.tablet_id[:8]} of {tablet.table_name}"


def _pods(tablet: TabletView, pods: Mapping[str, str]) -> str:
    return " and ".join(pods.get(p.node_id, f"node {p.node_id[:8]}") for p in tablet.config.voters)


def some(texts: Sequence[str]) -> str:
    """The first few texts and the number of the rest, like "a, b and 3 more"."""
    more = f" and {len(texts) - _NAMED_MAX} more" if len(texts) > _NAMED_MAX else ""
    return ", ".join(texts[:_NAMED_MAX]) + more
