"""Builds statuses from the observation, the findings and the actions. Called by report; pure.

Conditions follow kstatus: Ready is true if the resource serves; Reconciling, Degraded and Stalled are true if
something is wrong or under way. DrainBlocked, which kstatus does not have, is true while the disruption
budgets allow no eviction. Invariant: a status stays below 64 KiB, whatever the size of the cluster; tablets
are counted, not listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stele.driver.progress import Progress
from stele_operator.api.cluster import DeletionPolicy
from stele_operator.plan import naming
from stele_operator.plan.budgets import drainable
from stele_operator.plan.cluster_plan import Plan, asked_again
from stele_operator.plan.compared import copies_equal
from stele_operator.plan.fates import Member, State
from stele_operator.plan.findings import HIBERNATED, RESTING, SLEEP, WAKING, Finding, Kind
from stele_operator.plan.health import (
    TabletCounts,
    catalog_tablet,
    going,
    live_voters,
    patience_s,
)
from stele_operator.plan.holder import NAMED_MAX, holders
from stele_operator.plan.majorities import MAJORITY_LOST
from stele_operator.plan.observation import Condition, GroupObject, Observation
from stele_operator.plan.rolling import outdated
from stele_operator.plan.tables import may_record, table_of

Json = dict[str, Any]
MEMBERS_MAX = 100
HEALS_MAX = 20
WORST_MAX = 10
DRAIN_BLOCKED = "DrainBlocked"
_MESSAGE_MAX = 1_000
_TEXT_MAX = 300

_TROUBLE = (
    State.LOST,
    State.SILENT,
    State.PARKED,
    State.DRAINING,
    State.PENDING,
    State.STARTING,
    State.HIBERNATED,
    State.READY,
    State.RETIRED,
)


def cluster_status(
    o: Observation, plan: Plan, heals: Sequence[Progress], now: str, answer: Json | None = None
) -> Json:
    """The status of a TabletCluster. `heals`: the driver's newest records. `now`: the time in Kubernetes'
    format. `answer`: the answer to the question in the annotation; None if there is no question.
    """
    status: Json = {
        "observedGeneration": o.cluster.generation,
        "selector": f"{naming.LABEL_CLUSTER}={o.cluster.name},{naming.LABEL_ROLE}=node",
        "replicas": sum(m.role == "node" and m.active and m.claim is not None for m in plan.members),
        "readyReplicas": sum(m.role == "node" and m.state is State.READY for m in plan.members),
        "readyMasters": _serving_masters(o, plan),
        "conditions": written(o.cluster.conditions, _cluster_conditions(o, plan), o.cluster.generation, now),
        "members": [_member(m) for m in _unhealthy_first(plan.members)[:MEMBERS_MAX]],
    }
    if answer is not None:
        status["plan"] = answer
    if o.identity is not None:
        status["clusterUUID"] = o.identity.cluster_id
    kept = [c for c in o.claims if c.released_s is None]  # a released one keeps its owner until it is deleted
    if kept:
        # A claim that somebody deleted is gone when its pod ends, whoever owns it.
        owned = any(c.owned for c in kept) or bool(going(plan.members))
        status["deletionPolicy"] = (DeletionPolicy.DELETE if owned else DeletionPolicy.RETAIN).value
    if o.catalog is not None:
        status["tablets"] = _counts(plan.tablets)
        status["healing"] = healing_status(heals)
        holding, waiting = holders(plan.members, plan.about(""), plan.policy)
        status["budget"] = {
            "holder": ", ".join(holding[:NAMED_MAX]),
            "waiting": list(waiting[:NAMED_MAX]),
        }
    return status


def _serving_masters(o: Observation, plan: Plan) -> int:
    catalog = catalog_tablet(o)
    named = {p.node_id for p in catalog.config.voters} if catalog is not None else set()
    return sum(m.role == "master" and m.state is State.READY and m.node_id in named for m in plan.members)


def _unhealthy_first(members: Sequence[Member]) -> list[Member]:
    return sorted(members, key=lambda m: _TROUBLE.index(m.state))


def _member(m: Member) -> Json:
    entry: Json = {
        "name": m.name,
        "role": m.role,
        "nodeUUID": m.node_id,
        "state": m.state.value,
        "machine": (m.pod.machine if m.pod else "") or (m.node.machine if m.node else ""),
        "zone": (m.claim.zone if m.claim else "") or (m.node.zone if m.node else ""),
        "fate": m.fate.value,
        "message": m.why[:_TEXT_MAX],
    }
    if m.node is not None:
        entry["replicas"] = m.node.replicas
    return {key: value for key, value in entry.items() if value != ""}


def healing_status(heals: Sequence[Progress]) -> Json:
    """The part of a TabletCluster's status that shows the driver's work."""
    return {"active": [_heal(p) for p in heals[:HEALS_MAX]], "total": len(heals)}


def _heal(p: Progress) -> Json:
    reason = f"{p.reason}; not done: {p.error}" if p.error else p.reason
    entry: Json = {"step": p.step, "reason": reason[:_TEXT_MAX]}
    if p.tablet_id:
        entry |= {"tablet": p.tablet_id, "table": p.table_name}
    if p.bytes_total:
        entry |= {"bytesDone": p.bytes_done, "bytesTotal": p.bytes_total}
    if p.eta_s is not None:
        entry["etaSeconds"] = round(p.eta_s)
    if p.next:
        entry["next"] = p.next
    if p.cause:
        entry["cause"] = p.cause
    return entry


def _counts(counts: TabletCounts) -> Json:
    return {
        "total": counts.total,
        "healthy": counts.healthy,
        "underReplicated": counts.under_replicated,
        "unavailable": counts.unavailable,
    }


def _cluster_conditions(o: Observation, plan: Plan) -> list[Condition]:
    found = plan.about("")
    stalled = _first(found, Kind.STALLED)
    sleep = next((f for f in found if f.reason in SLEEP), None)
    not_ready = _first(found, Kind.NOT_READY) or _not_writable(o, plan)
    if not_ready and sleep is not None and sleep.reason == WAKING:
        not_ready = sleep.reason, sleep.message
    degraded = _first(found, Kind.DEGRADED) or (None if sleep is not None else _weak(o, plan))
    reconciling = _reconciling(o, plan, found)
    return [
        _condition(
            "Ready",
            not not_ready,
            not_ready or ("Writable", "every tablet has a leader; tables can be created"),
        ),
        _condition(
            "Reconciling",
            bool(reconciling),
            reconciling or _at_rest(o, found, degraded or stalled or not_ready),
        ),
        _condition(
            "Degraded", bool(degraded), degraded or _untroubled(sleep) or _well(o.catalog is not None)
        ),
        _condition("Stalled", bool(stalled), stalled or ("NotStalled", "nothing waits for a human")),
        _drains(o, plan, sleep),
        _majority(o, found),
        copies_equal(o.catalog is not None, plan.copies, plan.members, o.cluster.conditions),
    ]


Why = tuple[str, str]


def _untroubled(sleep: Finding | None) -> Why | None:
    """Reason and message of conditions that are False because the cluster hibernates or wakes; None for any
    other cluster.
    """
    return (sleep.reason, sleep.message) if sleep is not None else None


def _drains(o: Observation, plan: Plan, sleep: Finding | None) -> Condition:
    """The condition DrainBlocked: whether some pods must not be evicted. If no budget is written, the
    condition stays as it was.
    """
    if sleep is not None and sleep.reason == HIBERNATED:
        return _condition(DRAIN_BLOCKED, False, (HIBERNATED, "there are no pods, so machines can be drained"))
    before = next((c for c in o.cluster.conditions if c.type == DRAIN_BLOCKED), None)
    told = [b for b in plan.budgets if o.catalog is not None or b.reason != "MastersUnavailable"]
    if before is not None and not told:
        return before
    blocked = [b for b in plan.budgets if b.reason]
    if blocked:
        return _condition(DRAIN_BLOCKED, True, (blocked[0].reason, "; ".join(b.message for b in blocked)))
    if not plan.budgets:
        return _condition(DRAIN_BLOCKED, False, ("Unknown", "the disruption budgets are not created yet"))
    return _condition(DRAIN_BLOCKED, False, ("Drainable", drainable(plan.budgets)))


def _majority(o: Observation, found: Sequence[Finding]) -> Condition:
    """The condition MajorityLost: whether tablets lost their majority for good. While no master leads, it
    stays as it was.
    """
    before = next((c for c in o.cluster.conditions if c.type == MAJORITY_LOST), None)
    lost = next((f for f in found if f.reason == MAJORITY_LOST), None)
    if lost is not None:
        return _condition(MAJORITY_LOST, True, ("RecoverOrRestore", lost.message))
    if o.catalog is not None:
        return _condition(
            MAJORITY_LOST, False, ("NoneLost", "every tablet has a majority, or may get it back")
        )
    return before or _condition(
        MAJORITY_LOST, False, ("Unknown", "the state of the tablets is not known yet")
    )


def _well(known: bool) -> Why:
    return (
        ("Healthy", "every tablet has all its voters")
        if known
        else ("Unknown", "the state of the tablets is not known yet")
    )


def _first(findings: Sequence[Finding], kind: Kind) -> Why | None:
    """The reason of the first finding of this kind, and the messages of all of them; None if there are none."""
    chosen = [f for f in findings if f.kind is kind]
    if not chosen:
        return None
    return chosen[0].reason, "; ".join(dict.fromkeys(f.message for f in chosen))


def _not_writable(o: Observation, plan: Plan) -> Why | None:
    if o.cluster.spec is None:
        return "InvalidSpec", "the spec breaks a rule"
    if o.identity is None or not o.identity.formed:
        return "Forming", "the first masters are being started"
    if o.catalog is None:
        return "MastersUnavailable", f"no master leads: {o.catalog_problem}"
    leaderless = plan.tablets.unavailable - plan.tablets.creating
    if leaderless:
        return "NoLeader", f"{leaderless} of {plan.tablets.total} tablets have no leader"
    nodes = sum(m.role == "node" and m.state is State.READY for m in plan.members)
    if nodes * 2 <= o.cluster.spec.nodes.replicas:
        return "NodesStarting", f"{nodes} of {o.cluster.spec.nodes.replicas} nodes are ready"
    return None


def _weak(o: Observation, plan: Plan) -> Why | None:
    counts = plan.tablets
    if counts.ailing:
        return "UnderReplicated", f"{counts.ailing} of {counts.total} tablets lack a voter or a leader"
    catalog = catalog_tablet(o)
    if catalog is not None and o.cluster.spec is not None and o.identity is not None and o.identity.formed:
        # Until all new masters have a vote, the identity has the number before.
        wanted = min(catalog.replication_factor, o.identity.masters)
        alive = live_voters(o, catalog, patience_s(o))
        if alive < wanted:
            return "MasterLost", f"{alive} of {wanted} masters hold the catalog"
    return None


def _reconciling(o: Observation, plan: Plan, found: Sequence[Finding]) -> Why | None:
    first = _first(found, Kind.RECONCILING)
    if first is not None:
        return None if first[0] in RESTING else first
    # To repeat a refused request is no progress: Reconciling would never end.
    doing = [a for a in plan.actions if not asked_again(o, a)]
    if doing:
        return "Acting", "; ".join(dict.fromkeys(a.reason for a in doing))
    if o.catalog is not None and o.catalog.view.intents:
        return "Healing", f"{len(o.catalog.view.intents)} tablets are being healed"
    return None


def _at_rest(o: Observation, found: Sequence[Finding], problem: Why | None) -> Why:
    rest = next((f for f in found if f.reason in RESTING), None)
    if rest is not None:
        return rest.reason, rest.message
    notes = [why for why in (_first(found, Kind.REMARK), _stale(o)) if why is not None]
    if notes:
        return notes[0][0], "; ".join(message for _, message in notes)
    return _idle(problem)


def _stale(o: Observation) -> Why | None:
    stale = restart_pending(o)
    if not stale:
        return None
    return "RestartPending", f"these pods keep an older spec until they are created again: {', '.join(stale)}"


def _idle(problem: Why | None) -> Why:
    if problem is not None:
        return "Waiting", f"nothing can be done about this now: {problem[1]}"
    return "AsAskedFor", "nothing is left to do"


def restart_pending(o: Observation) -> tuple[str, ...]:
    """Names of pods with an older spec. They keep it until they are created again."""
    spec = o.cluster.spec
    if spec is None:
        return ()
    return tuple(p.name for p in o.pods if outdated(o, spec, p) and not p.deleting)


def group_status(o: Observation, plan: Plan, group: GroupObject, now: str, refusal: str = "") -> Json:
    """The status of a TabletGroup. `refusal`: why the masters did not create its table."""
    table = table_of(o, group)
    found = plan.about(group.name)
    status: Json = {"observedGeneration": group.generation}
    counts = TabletCounts()
    if table is not None:
        health = plan.health.of(table.table_id)
        counts = health.counts
        if may_record(o, group, table):
            status |= {
                "tableID": table.table_id,
                "clusterUUID": o.identity.cluster_id if o.identity is not None else "",
            }
        status |= {
            "tablets": _counts(counts),
            "worst": [{"tablet": t.tablet_id, "reason": t.reason} for t in health.ailing[:WORST_MAX]],
        }
    elif group.recorded_table:
        status |= {"tableID": group.recorded_table, "clusterUUID": group.recorded_cluster}
    serves = table is not None and counts.total > 0 and not counts.unavailable
    stalled, degraded = _first(found, Kind.STALLED), _first(found, Kind.DEGRADED)
    refused = ("Refused", refusal) if refusal else None
    waiting = refused or _first(found, Kind.NOT_READY)
    not_ready = (
        None
        if serves
        else waiting or stalled or ("Waiting", "the operator has not looked at this resource yet")
    )
    rests = not_ready is not None and not_ready[0] == HIBERNATED
    waits = None if stalled or rests else waiting or _first(found, Kind.RECONCILING)
    conditions = [
        _condition("Ready", serves, not_ready or ("Writable", f"all {counts.total} tablets have leaders")),
        _condition(
            "Reconciling",
            bool(waits),
            waits
            or (not_ready if rests else None)
            or _first(found, Kind.REMARK)
            or _idle(degraded or stalled),
        ),
        _condition("Degraded", bool(degraded), degraded or _well(serves)),
        _condition("Stalled", bool(stalled), stalled or ("NotStalled", "nothing waits for a human")),
        copies_equal(
            table is not None,
            [c for c in plan.copies if table is not None and c.tablet.table_id == table.table_id],
            plan.members,
            group.conditions,
        ),
    ]
    status["conditions"] = written(group.conditions, conditions, group.generation, now)
    return status


def orphan_status(group: GroupObject, cluster: str, now: str) -> Json:
    """The status of a TabletGroup whose TabletCluster does not exist. It keeps the table id, but shows no
    tablets.
    """
    why = (
        "ClusterNotFound",
        f"there is no TabletCluster {cluster} in this namespace: create it, or correct clusterRef",
    )
    conditions = [
        _condition("Ready", False, why),
        _condition("Reconciling", True, why),
        _condition("Degraded", False, ("Unknown", "the state of its tablets is not known")),
        _condition("Stalled", False, ("NotStalled", "work continues as soon as the TabletCluster exists")),
    ]
    status: Json = {
        "observedGeneration": group.generation,
        "conditions": written(group.conditions, conditions, group.generation, now),
    }
    if group.recorded_table:
        status |= {"tableID": group.recorded_table, "clusterUUID": group.recorded_cluster}
    return status


def _condition(kind: str, holds: bool, why: Why) -> Condition:
    return Condition(kind, "True" if holds else "False", why[0], why[1][:_MESSAGE_MAX])


def written(there: Sequence[Condition], wanted: Sequence[Condition], generation: int, now: str) -> list[Json]:
    """The conditions as JSON. A condition whose status is unchanged keeps the time of its last transition."""
    known = {c.type: c for c in there}
    result = []
    for condition in wanted:
        before = known.get(condition.type)
        same = before is not None and before.status == condition.status and before.last_transition
        result.append(
            {
                "type": condition.type,
                "status": condition.status,
                "reason": condition.reason,
                "message": condition.message,
                "lastTransitionTime": before.last_transition if same and before is not None else now,
                "observedGeneration": generation,
            }
        )
    return result
