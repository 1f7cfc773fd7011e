"""How many pods of a role may be evicted, and why none may. Called by planner; read by upkeep and status; pure.

Invariant: one pod may go while every tablet that its role holds keeps a majority without any one of its voters, and no
volume would go with a pod, else none. What is not known of a tablet lets nobody go, and a budget that stands is changed only by who knows better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stele.driver.view import TabletView
from stele.model.ids import CATALOG_TABLET_ID
from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.plan import naming
from stele_operator.plan.fates import Member, State
from stele_operator.plan.health import going, masters_wanted, without_spare
from stele_operator.plan.observation import ROLES, Observation, Role

_NAMED_MAX = 5
"""Of tablets, and of pods: a condition's message is short."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How many pods of a role must stay. `reason` and `message` say why none may go; empty: one may."""

    role: Role
    min_available: int
    reason: str = ""
    message: str = ""


def plan_budgets(o: Observation, spec: TabletClusterSpec, everyone: Sequence[Member]) -> tuple[Budget, ...]:
    """The budget of each role. While no master leads nothing is known of tablets: a budget that exists stays, unless a
    volume would go with its pod."""
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
    # More pods than are asked for, such as one that is on its way out, would be room for one more eviction.
    pods = max(wanted, len(names))
    # First of all: what is said below of pods that come back on their volumes does not hold for these.
    leaving = _going(role, everyone)
    if leaving:
        names_of = some([m.name for m in leaving])
        why = f"claims are being deleted, and each goes with its volume as soon as its pod does (what to do: condition Stalled): {names_of}"
        return _blocked(role, pods, "ClaimsGoing", why)
    if o.catalog is None:
        why = f"no master leads, so nothing is known of tablets: {o.catalog_problem}"
        return _blocked(role, pods, "MastersUnavailable", why)
    needed = without_spare(o, role)
    single = [t for t in needed if t.replication_factor == 1]
    if single:
        return _blocked(role, pods, "SingleReplica", _single(single, {m.node_id: m.name for m in everyone}))
    if needed:
        why = "some tablets lack a voter or a leader; wait, they are healed (status.healing, stele ksck)"
        return _blocked(role, pods, "VoterLost", f"{why}: {some([tablet_name(t) for t in needed])}")
    ready = {p.name for p in o.pods if p.role == role and p.ready and not p.deleting}
    if len(ready) < pods:
        why = f"{len(ready)} of {pods} pods are ready, and one may be away at a time"
        away = some(sorted(names - ready)) or "those that are still to be made"
        return _blocked(role, pods - 1, "PodsNotReady", f"{why}; it waits for {away}")
    return Budget(role, pods - 1)


def _blocked(role: Role, min_available: int, reason: str, why: str) -> Budget:
    return Budget(role, min_available, reason, f"no {role} may be evicted: {why}")


def _going(role: Role, everyone: Sequence[Member]) -> tuple[Member, ...]:
    return going([m for m in everyone if m.role == role])


def _names(o: Observation, role: Role, everyone: Sequence[Member]) -> set[str]:
    """Pods that are ready, or may be before the budget is looked at again."""
    kept = {
        m.name for m in everyone if m.role == role and m.claim is not None and m.state is not State.RETIRED
    }
    return kept | {p.name for p in o.pods if p.role == role and not p.deleting}


def _single(tablets: Sequence[TabletView], pods: Mapping[str, str]) -> str:
    where = some([f"{tablet_name(t)} on {_pods(t, pods)}" for t in tablets])
    if tablets[0].tablet_id == CATALOG_TABLET_ID:
        return (
            "masters.replicas is 1: while the only master is away no table can be made and nothing is healed; to drain its "
            f"machine all the same: kubectl delete pod, which is made again on its volume: {where}"
        )
    return (
        "a table with replicationFactor 1 cannot be read or written while its node is away; to drain a machine all the "
        "same: kubectl delete pod, which is made again on its volume; to be rid of it: make the table anew with "
        f"replicationFactor 3, or drop it: {where}"
    )


def tablet_name(tablet: TabletView) -> str:
    """As events and `stele tablet list` name it."""
    if tablet.tablet_id == CATALOG_TABLET_ID:
        return "the catalog"
    return f"{tablet.tablet_id[:8]} of {tablet.table_name}"


def _pods(tablet: TabletView, pods: Mapping[str, str]) -> str:
    return " and ".join(pods.get(p.node_id, f"node {p.node_id[:8]}") for p in tablet.config.voters)


def some(texts: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(texts) - _NAMED_MAX} more" if len(texts) > _NAMED_MAX else ""
    return ", ".join(texts[:_NAMED_MAX]) + more
