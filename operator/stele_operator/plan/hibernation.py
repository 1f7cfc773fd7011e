"""Puts a cluster to sleep and wakes it, as spec.hibernate says. Called by cluster_plan; pure.

The identity ConfigMap says `asleep` from before the first pod is deleted until every member is back. Nodes
stop before masters; masters start before nodes. All claims are kept.

Invariants: while `asleep` is on record there is no policy, so neither the operator nor the masters heal, and
no silence counts. Waking waits for each member, at most as long as healing would wait; then healing goes on.
A member's time runs from when its pod was made. If it has no pod, the time runs from when the pods of all
members had been asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stele.model.ids import NodeId
from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.api.scalars import seconds
from stele_operator.plan import diagnosis, formation, member_objects, tables
from stele_operator.plan.actions import Action
from stele_operator.plan.budgets import Budget, some
from stele_operator.plan.counting import Count
from stele_operator.plan.fates import SILENT_S, Fate, Member, State
from stele_operator.plan.findings import HIBERNATED, HIBERNATING, WAKING, Finding, Kind
from stele_operator.plan.health import catalog_tablet, going
from stele_operator.plan.observation import Identity, Observation, Role

_NO_PODS = (
    "spec.hibernate is true: there are no pods, and all claims are kept; set it to false to wake the cluster"
)


@dataclass(frozen=True, slots=True)
class Step:
    """What a pass does to a cluster that hibernates or wakes. `at_rest`: nothing is left to do.
    `keeps_budgets`: the status shows the disruption budgets, because some pods stay.
    """

    actions: tuple[Action, ...]
    findings: tuple[Finding, ...]
    at_rest: bool = False
    keeps_budgets: bool = False


def plan_unborn(o: Observation, spec: TabletClusterSpec) -> Step | None:
    """The step of a cluster that is to hibernate before anything was made for it; None for any other cluster."""
    if not spec.hibernate or o.identity is not None or o.claims:
        return None
    message = "spec.hibernate is true: nothing is created; set it to false to create the cluster"
    actions, of_groups = tables.plan_sleeping(o, HIBERNATED, _of_cluster(o, message))
    return Step(tuple(actions), (*_told(HIBERNATED, message), *of_groups), at_rest=True)


def plan_hibernation(
    o: Observation,
    spec: TabletClusterSpec,
    identity: Identity,
    everyone: tuple[Member, ...],
    budgets: Sequence[Budget],
) -> Step | None:
    """The next step to sleep or to wake; None for a cluster that is awake and is to stay awake."""
    if spec.hibernate and not _hinders(everyone):
        return _to_sleep(o, spec, identity, everyone)
    return _wake(o, spec, identity, everyone, budgets) if identity.asleep else None


def find_waiting(spec: TabletClusterSpec, everyone: tuple[Member, ...]) -> list[Finding]:
    """Findings that say why a cluster that is to hibernate stays awake; empty if nothing keeps it awake."""
    if not (spec.hibernate and (names := _hinders(everyone))):
        return []
    message = (
        f"spec.hibernate is true, but somebody deleted the claims {some(names)}, and each volume goes with its pod. "
        "The pods stay until these members are replaced (the condition Stalled says how)"
    )
    return [Finding(Kind.RECONCILING, "HibernateWaits", message)]


def _hinders(everyone: tuple[Member, ...]) -> list[str]:
    """Names of members whose claims are being deleted, so that their volumes would be lost with their pods."""
    return [m.name for m in going(everyone) if m.pod is not None and not m.pod.deleting]


def _told(reason: str, message: str) -> list[Finding]:
    return [Finding(Kind.RECONCILING, reason, message), Finding(Kind.NOT_READY, reason, message)]


def _to_sleep(
    o: Observation, spec: TabletClusterSpec, identity: Identity, everyone: tuple[Member, ...]
) -> Step:
    still = [p.name for p in o.pods if member_objects.stands_still(o, p)]
    pods = [p for p in o.pods if p.name not in still]
    forced = [p for p in o.pods if p.deleting and member_objects.machine_removed(o, p)]
    asleep = identity.asleep and not pods and not forced
    message = f"spec.hibernate is true: {_left(pods)}"
    if asleep:
        stands = f"; the pods {some(still)} end once their machines are back" if still else ""
        message = f"{_NO_PODS}{stands}"
    elif o.catalog is not None and (changes := len(o.catalog.view.intents)):
        message += f"; {changes} changes of tablets under way go on after waking"
    reason = HIBERNATED if asleep else HIBERNATING
    actions: list[Action] = []
    if not identity.asleep or identity.waking_s:
        mark = replace(identity, asleep=True, waking_s=0)
        actions.append(
            formation.replace_identity(o, mark, "spec.hibernate is true: the cluster goes to sleep")
        )
    elif not asleep:
        role: Role = "node" if any(p.role == "node" for p in (*pods, *forced)) else "master"
        actions += member_objects.plan_stopping(o, spec, everyone, role, "spec.hibernate is true")
    more, of_groups = tables.plan_sleeping(o, reason, _of_cluster(o, message))
    found = (*_told(reason, message), *diagnosis.find_volumes(o, everyone), *of_groups)
    return Step((*actions, *more), found, at_rest=asleep and not more)


def _left(pods: Sequence[object]) -> str:
    return "nodes stop first, then masters, and all claims are kept" if pods else "the cluster goes to sleep"


def _wake(
    o: Observation,
    spec: TabletClusterSpec,
    identity: Identity,
    everyone: tuple[Member, ...],
    budgets: Sequence[Budget],
) -> Step:
    awaited = [m for m in everyone if _awaited(o, spec, identity, m)]
    if not identity.formed or (o.catalog is not None and not awaited):
        missing = [m.name for m in everyone if o.catalog is not None and _missing(o, m)]
        why = f"all but {some(missing)} are back" if missing else "all members are back"
        why = why if identity.formed else "it has not formed yet, so it waits for nobody"
        message = f"the cluster is awake: {why}"
        actions: list[Action] = [
            formation.replace_identity(o, replace(identity, asleep=False, waking_s=0), message),
        ]
    else:
        message = _waking(o, awaited)
        made, _ = member_objects.plan_members(o, spec, identity, everyone, Count(0))
        actions = [
            *member_objects.plan_services(o, budgets),
            *formation.plan_formation(o, identity)[0],
            *made,
        ]
        if o.catalog is not None and not identity.waking_s:
            begun = replace(identity, waking_s=int(o.now_s))
            why = "the cluster wakes, and the pods of all members have been asked for"
            actions.append(formation.replace_identity(o, begun, why))
    more, of_groups = tables.plan_sleeping(o, WAKING, _of_cluster(o, message))
    found = (
        Finding(Kind.RECONCILING, WAKING, message),
        *find_waiting(spec, everyone),
        *diagnosis.find_members(o, everyone),
        *of_groups,
    )
    return Step((*actions, *more), found, keeps_budgets=True)


def _waking(o: Observation, awaited: Sequence[Member]) -> str:
    if o.catalog is None:
        return f"the cluster wakes: masters start, and nodes once a master leads ({o.catalog_problem})"
    return (
        f"the cluster wakes: it waits for {some([m.name for m in awaited])}; nobody counts as lost meanwhile"
    )


def _of_cluster(o: Observation, message: str) -> str:
    return f"TabletCluster {o.cluster.name}: {message}"


def _missing(o: Observation, m: Member) -> bool:
    """Whether a member that tablets may name is not back. Members that never ran hold nothing. Parked members
    may stay away, and members without a volume never come back. A master without the catalog only has to be
    heard. It becomes ready after waking, when the driver gives it a copy.
    """
    if m.claim is None or not m.formed or m.state in (State.READY, State.RETIRED, State.PARKED):
        return False
    if m.fate in (Fate.VOLUME_LOST, Fate.VOLUME_EMPTY) or (m.claim.deleting and m.pod is None):
        return False
    heard = m.node is not None and m.node.ever_heard and m.silent_s < SILENT_S
    return not (heard and m.pod is not None and (m.pod.ready or _without_catalog(o, m)))


def _without_catalog(o: Observation, m: Member) -> bool:
    catalog = catalog_tablet(o)
    return m.role == "master" and catalog is not None and catalog.config.peer_on(NodeId(m.node_id)) is None


def _awaited(o: Observation, spec: TabletClusterSpec, identity: Identity, m: Member) -> bool:
    """Whether waking waits for the member. It waits as long as healing would wait before it replaces the
    member.

    The time counts from when the pod was made, so no earlier time counts in which the operator was away or
    paused. If there is no pod, perhaps because Kubernetes refuses it, the time counts from when the pods of
    all members had been asked for.
    """
    patience_s = max(seconds(spec.healing.silentAfter), seconds(spec.healing.machineLostAfter))
    since_s = m.pod.created_s if m.pod is not None else identity.waking_s or o.now_s
    return _missing(o, m) and o.now_s - since_s < patience_s
