"""Finds faults of members, volumes and machines, for people only: no action depends on them.

Called by cluster_plan and member_objects; pure. Invariant: findings do not depend on what the operator may
do. They are also reported for a cluster that is paused, or whose spec breaks a rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stele.driver.view import TabletView, Wanted
from stele.model.clock import CLOCK_OFF_MAX_US
from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.api.scalars import byte_count, seconds
from stele_operator.plan import manifests, naming
from stele_operator.plan.actions import (
    Action,
    CreateClaim,
)
from stele_operator.plan.budgets import some, tablet_name
from stele_operator.plan.fates import START_PATIENCE_S, Fate, Member, State
from stele_operator.plan.findings import Finding, Kind
from stele_operator.plan.health import going, in_danger
from stele_operator.plan.observation import (
    ROLES,
    Claim,
    Identity,
    Observation,
    Pod,
    RefusedGrowth,
    Role,
)
from stele_operator.plan.placement import misplaced, part_of, selector_faults, zone_faults

Needing = Mapping[Role, tuple[TabletView, ...]]
"""Tablets in danger, for the roles that have a claim due for deletion."""

_TITLES: Mapping[Role, str] = {"master": "Master", "node": "Node"}


def find_members(o: Observation, everyone: tuple[Member, ...]) -> list[Finding]:
    """Faults of members, also while the operator may do nothing about them."""
    findings: list[Finding] = []
    spec, identity = o.cluster.spec, o.identity
    if identity is None or identity.owner_uid != o.cluster.uid:
        return findings  # the members may be those of an earlier cluster that is being deleted
    if spec is not None:
        findings += [Finding(Kind.STALLED, "UnknownZone", fault) for fault in zone_faults(o, spec)]
        findings += [Finding(Kind.STALLED, "NoMachineSelected", fault) for fault in selector_faults(o, spec)]
    findings += _masters_lost(o, identity)
    findings += _claims_going(everyone)
    for member in everyone:
        findings.extend(_findings(o, member))
    if spec is not None:
        findings += _kept_longer(o, spec, everyone)
        findings += _misplaced(o, spec, everyone)
        findings += _sizes(o, spec, everyone)
    findings += _disks_low(spec, everyone)
    findings += _clocks_wrong(everyone)
    return findings


def find_volumes(o: Observation, everyone: tuple[Member, ...]) -> list[Finding]:
    """Faults of volumes alone, for a cluster that hibernates: without pods, nothing else can be wrong."""
    if o.identity is None or o.identity.owner_uid != o.cluster.uid:
        return []
    return [*_masters_lost(o, o.identity), *_claims_going(everyone)]


def _findings(o: Observation, member: Member) -> list[Finding]:
    title = _TITLES[member.role]
    asked = member.node.asked if member.node is not None else Wanted.IN_SERVICE
    match member.state:
        case State.DRAINING if asked is not Wanted.IN_SERVICE and member.fate is Fate.NONE:
            return [_leaving(member, title, asked)]
        case State.PARKED:
            how = "runs and serves nobody" if asked is Wanted.FENCED else "is away"
            message = f"{member.name} {how}, and its replicas wait for it ({member.why})"
            return [Finding(Kind.REMARK, f"{title}Parked", message, member=member.name)]
        case State.LOST | State.DRAINING:
            doing = "lost" if member.state is State.LOST else "being drained"
            fate = f" ({member.fate.value}: {member.why})" if member.fate is not Fate.NONE else ""
            message = f"{member.name} is {doing}{fate}"
            fated = member.fate.value
            return [Finding(Kind.DEGRADED, f"{title}Lost", message, member=member.name, fate=fated)]
        case State.SILENT:
            message = f"{member.name} sends no heartbeats ({member.fate.value}: {member.why})"
            return [Finding(Kind.RECONCILING, f"{title}Silent", message)]
        case State.HIBERNATED if member.pod is None and member.why:  # its pod is refused
            message = f"{member.name}: {member.why}"
            return [Finding(Kind.DEGRADED, f"{title}Pending", message, member=member.name)]
        case State.PENDING | State.STARTING if waits := _waits(o, member):
            message = f"{member.name}: {waits}"
            return [Finding(Kind.DEGRADED, f"{title}Pending", message, member=member.name)]
        case State.PENDING | State.STARTING:
            why = f" ({member.why})" if member.why else ""
            return [Finding(Kind.RECONCILING, f"{title}sStarting", f"{member.name} is starting{why}")]
        case _:
            return []


def _leaving(member: Member, title: str, asked: Wanted) -> Finding:
    """A finding about a member that somebody wants drained or retired. The message omits the number of its
    replicas, because that number changes.
    """
    why = f" ({member.why})" if member.why else ""
    if asked is Wanted.RETIRED:
        message = f"{member.name} is being drained, and is retired once no tablet names it{why}"
        return Finding(Kind.RECONCILING, f"{title}Draining", message, member=member.name)
    holds = member.node is not None and member.node.replicas
    state = (
        "is being drained" if holds else "is drained, and stays so until `stele node undrain` takes it back"
    )
    kind = Kind.RECONCILING if holds else Kind.REMARK
    reason = f"{title}Draining" if holds else f"{title}Drained"
    return Finding(kind, reason, f"{member.name} {state}{why}", member=member.name)


def _waits(o: Observation, member: Member) -> str:
    """Why a member has not started, if that takes longer than a normal start; otherwise ""."""
    pod, new = (
        member.pod,
        member.state is State.PENDING,
    )  # a member that has run soon counts as silent instead
    if pod is None:
        return member.why if new and ("Pod", member.name) in o.refused else ""
    if new and pod.unschedulable:
        off = f" (reserved for members that ran there: {some(pod.keeps_off)})" if pod.keeps_off else ""
        return f"{member.why}{off}"
    if pod.ready or o.now_s - pod.unready_since_s < START_PATIENCE_S:
        return ""  # a ready pod may be unheard for a moment, as when its machine has just failed
    why = member.why or _unplaced(o, pod) or f"kubectl describe pod {pod.name} may say why"
    return f"its pod has not been ready for more than {START_PATIENCE_S:.0f} s: {why}"


def _unplaced(o: Observation, pod: Pod) -> str:
    """A text if spec names another scheduler and that one has not placed the pod; otherwise "". Nothing else
    would report this fault.
    """
    name = part_of(o.cluster.spec, pod.role).schedulerName if o.cluster.spec is not None else None
    return (
        f"the scheduler {name} ({pod.role}s.schedulerName) has not placed it"
        if name and not pod.machine
        else ""
    )


def claims_refused(o: Observation, actions: Sequence[Action]) -> list[Finding]:
    """Findings about claims that the API server refused. Their members do not exist yet, so nothing else
    reports them.
    """
    return [
        Finding(
            Kind.DEGRADED,
            f"{_TITLES[a.role]}Pending",
            f"{a.name}: its claim cannot be created: {o.refused[a.kind, a.name]}",
            member=a.name,
        )
        for a in actions
        if isinstance(a, CreateClaim) and (a.kind, a.name) in o.refused
    ]


def _masters_lost(o: Observation, identity: Identity) -> list[Finding]:
    """A finding if too few masters' volumes are left to elect a leader, so that lost masters cannot be
    replaced one by one.
    """
    kept = [c for c in o.claims if c.released_s is None and (not c.deleting or o.pod(c.name) is not None)]
    there = sum(c.role == "master" for c in kept)
    wanted = identity.masters  # the spec may have another number, and the catalog cannot be asked
    if not wanted or o.catalog is not None or 2 * there > wanted:
        return []
    message = (
        f"only {there} of {wanted} masters' volumes exist, too few to elect a leader, and the others cannot be "
        "replaced. Restore their claims. Or, to give up all data, delete the TabletCluster, its claims "
        f"(kubectl delete pvc -l {naming.LABEL_CLUSTER}={o.cluster.name}) and the ConfigMap "
        f"{naming.identity_name(o.cluster.name)}, then apply the TabletCluster again"
    )
    return [Finding(Kind.STALLED, "MastersLost", message)]


def _claims_going(everyone: tuple[Member, ...]) -> list[Finding]:
    """A finding about claims that somebody deleted. Nothing is lost yet, but each volume is destroyed as soon
    as its pod ends.
    """
    leaving = going(everyone)
    if not leaving:
        return []
    message = (
        f"somebody deleted the claims {some([m.name for m in leaving])}. That cannot be undone: each claim is gone, with its "
        "volume, as soon as its pod ends. To replace them without losing rows, delete their pods (kubectl delete pod) one at a "
        "time. Before the next, wait until a new member has replaced it and all tablets are healthy (status.members, "
        "status.tablets)"
    )
    return [Finding(Kind.STALLED, "ClaimsGoing", message)]


def _disks_low(spec: TabletClusterSpec | None, everyone: tuple[Member, ...]) -> list[Finding]:
    """Members that refuse writes because their disks are nearly full. The message omits the free bytes,
    because they always change.
    """
    found = []
    for member in everyone:
        if member.node is not None and member.node.disk_low and member.state in (State.READY, State.STARTING):
            now = f" (now {manifests.storage_of(spec, member.role).size})" if spec is not None else ""
            message = (
                f"{member.name} refuses writes because its disk is nearly full: raise {member.role}s.storage.size{now}, which "
                "needs a StorageClass that allows expansion, or delete tables"
            )
            found.append(Finding(Kind.DEGRADED, "DiskFull", message, member=member.name))
    return found


def _clocks_wrong(everyone: tuple[Member, ...]) -> list[Finding]:
    """Members whose clocks are wrong. The message omits the error of the clock, because it always changes."""
    found = []
    for member in everyone:
        ahead_us = member.node.clock_ahead_us if member.node is not None else 0
        if abs(ahead_us) > CLOCK_OFF_MAX_US and member.state in (State.READY, State.STARTING):
            where = "ahead of" if ahead_us > 0 else "behind"
            machine = (
                f" of machine {member.pod.machine}" if member.pod is not None and member.pod.machine else ""
            )
            message = (
                f"the clock of {member.name} is {where} most clocks of the cluster. Until it is right, {member.name} leads a "
                f"tablet only if no other replica can, and then refuses writes. Synchronize the clock{machine} with NTP"
            )
            found.append(Finding(Kind.DEGRADED, "ClockWrong", message, member=member.name))
    return found


def _misplaced(o: Observation, spec: TabletClusterSpec, everyone: tuple[Member, ...]) -> list[Finding]:
    """A finding about members on machines that the spec, since it was changed, would not choose."""
    faults = [f"{name} ({where})" for name, where in misplaced(o, spec, everyone)]
    if not faults:
        return []
    message = (
        f"zones, nodeSelector, affinity and machineSpread apply to new members; these stay where they are: {some(faults)}. To "
        "replace one, delete its claim, then its pod. Before the next, wait until all tablets are healthy (status.tablets)"
    )
    return [Finding(Kind.REMARK, "Misplaced", message)]


def _sizes(o: Observation, spec: TabletClusterSpec, everyone: tuple[Member, ...]) -> list[Finding]:
    """Findings about volumes that were refused the requested size, and about volumes that are already larger."""
    found = []
    for role in ROLES:
        size = manifests.storage_of(spec, role).size
        claims = [m.claim for m in everyone if m.role == role and m.active and m.claim is not None]
        small = [c for c in claims if c.requested_bytes < byte_count(size)]
        refused = [(c.name, r) for c in small if (r := refused_growth(o, c, size)) is not None]
        if refused:
            message = (
                f"{role}s.storage.size is {size}, but {some([name for name, _ in refused])} cannot grow to that: "
                f"{refused[0][1].why}. The operator tries again every few minutes. Allow expansion in the StorageClass, raise the "
                "quota, or restore the old size"
            )
            found.append(Finding(Kind.STALLED, "GrowthRefused", message, member=role))
        larger = [c.name for c in claims if c.requested_bytes > byte_count(size)]
        if larger:
            message = (
                f"{role}s.storage.size is {size}, but {some(larger)} are larger and stay so, because a volume cannot be made "
                "smaller"
            )
            found.append(Finding(Kind.REMARK, "VolumesLarger", message, member=role))
    return found


def refused_growth(o: Observation, claim: Claim, size: str) -> RefusedGrowth | None:
    refused = o.refused_growth.get(claim.uid)
    return refused if refused is not None and refused.size == size else None


def _kept_longer(o: Observation, spec: TabletClusterSpec, everyone: tuple[Member, ...]) -> list[Finding]:
    """Released claims that are kept past `keepFor`, because other replicas may have lost rows that these
    volumes hold.
    """
    found, danger = [], needing(o, spec, everyone)
    for member in everyone:
        if member.state is not State.RETIRED or member.claim is None or not due(o, spec, member.claim):
            continue
        if danger[member.role]:
            message = (
                f"{member.name} was released {spec.healing.keepFor} ago; its claim is kept until every tablet has a leader and "
                f"can lose a voter: {some([tablet_name(t) for t in danger[member.role]])}"
            )
            found.append(Finding(Kind.RECONCILING, "ClaimKept", message))
    return found


def needing(o: Observation, spec: TabletClusterSpec, everyone: tuple[Member, ...]) -> Needing:
    roles = {m.role for m in everyone if m.claim is not None and due(o, spec, m.claim)}
    return {role: in_danger(o, role) for role in roles}


def due(o: Observation, spec: TabletClusterSpec, claim: Claim) -> bool:
    """Whether the claim was released at least `keepFor` ago."""
    long_ago = claim.released_s is not None and o.now_s - claim.released_s >= seconds(spec.healing.keepFor)
    return long_ago and not claim.deleting
