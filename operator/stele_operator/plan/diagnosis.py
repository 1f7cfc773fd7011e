"""What is the matter with members, their volumes and machines, for people: nothing is decided by it. Called by planner and
upkeep; pure.

Invariant: what is found does not go by whether anything may be done about it: a cluster that is paused, or whose spec breaks a
rule, is told of all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stele.driver.view import TabletView
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
from stele_operator.plan.rules import masters_differ

Needing = Mapping[Role, tuple[TabletView, ...]]
"""Tablets in danger, of the roles of which a claim is due to go."""

_TITLES: Mapping[Role, str] = {"master": "Master", "node": "Node"}


def find_members(o: Observation, everyone: tuple[Member, ...]) -> list[Finding]:
    """What is the matter with members, whether or not anything may be done about it."""
    findings: list[Finding] = []
    spec, identity = o.cluster.spec, o.identity
    if identity is None or identity.owner_uid != o.cluster.uid:
        return findings  # what is there may be an earlier cluster's, on its way out
    if spec is not None:
        findings += [Finding(Kind.STALLED, "UnknownZone", fault) for fault in zone_faults(o, spec)]
        findings += [Finding(Kind.STALLED, "NoMachineSelected", fault) for fault in selector_faults(o, spec)]
        if differ := masters_differ(o, spec):
            findings.append(Finding(Kind.STALLED, "MastersDiffer", differ))
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


def _findings(o: Observation, member: Member) -> list[Finding]:
    title = _TITLES[member.role]
    match member.state:
        case State.LOST | State.DRAINING:
            doing = "lost" if member.state is State.LOST else "being taken out"
            fate = f" ({member.fate.value}: {member.why})" if member.fate is not Fate.NONE else ""
            message = f"{member.name} is {doing}{fate}"
            fated = member.fate.value
            return [Finding(Kind.DEGRADED, f"{title}Lost", message, member=member.name, fate=fated)]
        case State.SILENT:
            message = f"{member.name} is not heard ({member.fate.value}: {member.why})"
            return [Finding(Kind.RECONCILING, f"{title}Silent", message)]
        case State.PENDING | State.STARTING if waits := _waits(o, member):
            message = f"{member.name}: {waits}"
            return [Finding(Kind.DEGRADED, f"{title}Pending", message, member=member.name)]
        case State.PENDING | State.STARTING:
            why = f" ({member.why})" if member.why else ""
            return [Finding(Kind.RECONCILING, f"{title}sStarting", f"{member.name} is starting{why}")]
        case _:
            return []


def _waits(o: Observation, member: Member) -> str:
    """What keeps a member from starting, if it is more than that starting takes its time; else empty."""
    pod, new = member.pod, member.state is State.PENDING  # one that has run is silent soon, and told as that
    if pod is None:
        return member.why if new and ("Pod", member.name) in o.refused else ""
    if new and pod.unschedulable:
        off = f" (left to those who ran there: {some(pod.keeps_off)})" if pod.keeps_off else ""
        return f"{member.why}{off}"
    if o.now_s - pod.unready_since_s < START_PATIENCE_S:
        return ""
    why = member.why or _unplaced(o, pod) or f"kubectl describe pod {pod.name} may say why"
    return f"its pod has not been ready for more than {START_PATIENCE_S:.0f} s: {why}"


def _unplaced(o: Observation, pod: Pod) -> str:
    """That nobody seems to place such pods: another scheduler was asked to, and nothing else would tell of it."""
    name = part_of(o.cluster.spec, pod.role).schedulerName if o.cluster.spec is not None else None
    return (
        f"the scheduler {name} ({pod.role}s.schedulerName) has not placed it"
        if name and not pod.machine
        else ""
    )


def claims_refused(o: Observation, actions: Sequence[Action]) -> list[Finding]:
    """Members that are not there yet, so that nothing else could tell of them."""
    return [
        Finding(
            Kind.DEGRADED,
            f"{_TITLES[a.role]}Pending",
            f"{a.name}: its claim cannot be made: {o.refused[a.kind, a.name]}",
            member=a.name,
        )
        for a in actions
        if isinstance(a, CreateClaim) and (a.kind, a.name) in o.refused
    ]


def _masters_lost(o: Observation, identity: Identity) -> list[Finding]:
    """A majority of the masters' volumes is gone: nobody is left who could replace them one by one."""
    kept = [c for c in o.claims if c.released_s is None and (not c.deleting or o.pod(c.name) is not None)]
    there = sum(c.role == "master" for c in kept)
    wanted = len(identity.formed)  # the spec may say another number, and the catalog cannot be asked
    if not wanted or o.catalog is not None or 2 * there > wanted:
        return []
    message = (
        f"{there} of {wanted} masters' volumes are there, too few to elect a leader, and nothing can make up for the "
        "others: put their claims back; or, to give up all data, delete the TabletCluster, its claims "
        f"(kubectl delete pvc -l {naming.LABEL_CLUSTER}={o.cluster.name}) and the ConfigMap "
        f"{naming.identity_name(o.cluster.name)}, and apply it anew"
    )
    return [Finding(Kind.STALLED, "MastersLost", message)]


def _claims_going(everyone: tuple[Member, ...]) -> list[Finding]:
    """Nothing is lost yet, and whatever ends a pod, a drain or the scheduler, destroys a volume."""
    leaving = going(everyone)
    if not leaving:
        return []
    message = (
        f"somebody deleted the claims {some([m.name for m in leaving])}: nothing undoes that, and each goes, with its volume, "
        "as soon as its pod does. To replace them without losing rows: kubectl delete pod, one at a time, and before the next "
        "one wait until a new member has taken its place and all tablets are healthy (status.members, status.tablets)"
    )
    return [Finding(Kind.STALLED, "ClaimsGoing", message)]


def _disks_low(spec: TabletClusterSpec | None, everyone: tuple[Member, ...]) -> list[Finding]:
    """Members that refuse writes for want of space. How much is free is not said: it is another number in each pass."""
    found = []
    for member in everyone:
        if member.node is not None and member.node.disk_low and member.state in (State.READY, State.STARTING):
            now = f" (now {manifests.storage_of(spec, member.role).size})" if spec is not None else ""
            message = (
                f"{member.name} refuses writes, its disk is nearly full: raise {member.role}s.storage.size{now}, which "
                "needs a StorageClass that allows expansion, or delete tables"
            )
            found.append(Finding(Kind.DEGRADED, "DiskFull", message, member=member.name))
    return found


def _clocks_wrong(everyone: tuple[Member, ...]) -> list[Finding]:
    """Members whose clocks are wrong. By how much is not said: it is another number in each pass."""
    found = []
    for member in everyone:
        ahead_us = member.node.clock_ahead_us if member.node is not None else 0
        if abs(ahead_us) > CLOCK_OFF_MAX_US and member.state in (State.READY, State.STARTING):
            where = "ahead of" if ahead_us > 0 else "behind"
            machine = (
                f" of machine {member.pod.machine}" if member.pod is not None and member.pod.machine else ""
            )
            message = (
                f"the clock of {member.name} is {where} what most clocks of the cluster say: it leads only where nobody else "
                f"can, and writes nothing there; set the clock{machine} right, with NTP"
            )
            found.append(Finding(Kind.DEGRADED, "ClockWrong", message, member=member.name))
    return found


def _misplaced(o: Observation, spec: TabletClusterSpec, everyone: tuple[Member, ...]) -> list[Finding]:
    """Members that stand where the spec would put none: it was changed since."""
    faults = misplaced(o, spec, everyone)
    if not faults:
        return []
    message = (
        f"zones, nodeSelector, affinity and machineSpread count for new members; these stay where they are: {some(faults)}. To have "
        "one made anew: delete its claim, then its pod, and before the next one wait until all tablets are healthy (status.tablets)"
    )
    return [Finding(Kind.REMARK, "Misplaced", message)]


def _sizes(o: Observation, spec: TabletClusterSpec, everyone: tuple[Member, ...]) -> list[Finding]:
    """Volumes that may not grow to what is asked for, and those that are larger already."""
    found = []
    for role in ROLES:
        size = manifests.storage_of(spec, role).size
        claims = [m.claim for m in everyone if m.role == role and m.active and m.claim is not None]
        small = [c for c in claims if c.requested_bytes < byte_count(size)]
        refused = [(c.name, r) for c in small if (r := refused_growth(o, c, size)) is not None]
        if refused:
            message = (
                f"{role}s.storage.size is {size}, and {some([name for name, _ in refused])} may not grow to that: "
                f"{refused[0][1].why}; it is tried again every few minutes. Let the StorageClass allow expansion, or raise the "
                "quota; or take the size back"
            )
            found.append(Finding(Kind.STALLED, "GrowthRefused", message, member=role))
        larger = [c.name for c in claims if c.requested_bytes > byte_count(size)]
        if larger:
            message = (
                f"{role}s.storage.size is {size}; larger already, and so they stay, are {some(larger)}: a volume cannot be made "
                "smaller"
            )
            found.append(Finding(Kind.REMARK, "VolumesLarger", message, member=role))
    return found


def refused_growth(o: Observation, claim: Claim, size: str) -> RefusedGrowth | None:
    refused = o.refused_growth.get(claim.uid)
    return refused if refused is not None and refused.size == size else None


def _kept_longer(o: Observation, spec: TabletClusterSpec, everyone: tuple[Member, ...]) -> list[Finding]:
    """Volumes that are due to go, and may be the last to hold what others have lost since."""
    found, danger = [], needing(o, spec, everyone)
    for member in everyone:
        if member.state is not State.RETIRED or member.claim is None or not due(o, spec, member.claim):
            continue
        if danger[member.role]:
            message = (
                f"{member.name} was released {spec.healing.keepFor} ago; its claim stays until every tablet has a leader and "
                f"can lose a voter: {some([tablet_name(t) for t in danger[member.role]])}"
            )
            found.append(Finding(Kind.RECONCILING, "ClaimKept", message))
    return found


def needing(o: Observation, spec: TabletClusterSpec, everyone: tuple[Member, ...]) -> Needing:
    roles = {m.role for m in everyone if m.claim is not None and due(o, spec, m.claim)}
    return {role: in_danger(o, role) for role in roles}


def due(o: Observation, spec: TabletClusterSpec, claim: Claim) -> bool:
    """Whether it was let go long enough ago to be deleted."""
    long_ago = claim.released_s is not None and o.now_s - claim.released_s >= seconds(spec.healing.keepFor)
    return long_ago and not claim.deleting
