"""Pods, claims and Services: what should be there and is not, and what should go. Called by planner; pure.

Invariant: a serial is set aside before the claim that uses it, a claim stands and its node is registered before its
pod starts, a node is RETIRED, and that noted on its claim, before its pod goes, its pod is gone before its claim is
let go, and what was let go is deleted only while every tablet has what it should have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stele.driver.view import TabletView
from stele.model.clock import CLOCK_OFF_MAX_US
from stele_operator.api.cluster import DeletionPolicy, TabletClusterSpec
from stele_operator.api.scalars import byte_count, seconds
from stele_operator.plan import manifests, naming
from stele_operator.plan.actions import (
    Action,
    CreateClaim,
    CreateObject,
    CreatePod,
    DeleteClaim,
    DeletePod,
    GrowClaim,
    Json,
    PatchObject,
    RegisterNode,
    ReleaseClaim,
    RetireClaim,
)
from stele_operator.plan.budgets import Budget, some, tablet_name
from stele_operator.plan.fates import START_PATIENCE_S, Fate, Member, State
from stele_operator.plan.findings import Finding, Kind
from stele_operator.plan.formation import replace_identity
from stele_operator.plan.health import going, in_danger, masters_wanted
from stele_operator.plan.observation import (
    ROLES,
    Catalog,
    Claim,
    Identity,
    Observation,
    Pod,
    RefusedGrowth,
    Role,
)
from stele_operator.plan.placement import choose_zones, keeps_off, misplaced, zone_faults
from stele_operator.plan.rules import masters_differ

_UNBOUND_PATIENCE_S = 60.0
Result = tuple[list[Action], list[Finding]]
Needing = Mapping[Role, tuple[TabletView, ...]]
"""Tablets in danger, of the roles of which a claim is due to go."""


def plan_services(o: Observation, budgets: Sequence[Budget]) -> list[Action]:
    """Services and disruption budgets, made and kept as they should be."""
    wanted: list[Json] = [
        manifests.peers_service(o.cluster),
        manifests.masters_service(o.cluster),
        *(manifests.disruption_budget(o.cluster, b.role, b.min_available) for b in budgets),
    ]
    actions: list[Action] = []
    for manifest in wanted:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        there = next((e for e in o.existing if (e.kind, e.name) == (kind, name)), None)
        digest = manifest["metadata"]["annotations"][naming.ANNOTATION_DIGEST]
        if there is None:
            actions.append(CreateObject(reason=f"{kind} {name} is missing", manifest=manifest))
            continue
        adopting = manifests.adopting(o.cluster, there.owners)
        if adopting or there.digest != digest or not _covers(there.spec, manifest["spec"]):
            patch = {
                "metadata": {"annotations": {naming.ANNOTATION_DIGEST: digest}, **adopting},
                "spec": manifest["spec"],
            }
            reason = f"{kind} {name} is not as it should be"
            actions.append(PatchObject(reason, kind, name, there.uid, there.resource_version, patch))
    return actions


def _covers(there: Any, wanted: Any) -> bool:
    """Whether all that is wanted is there; the API server adds defaults to it."""
    if isinstance(wanted, dict):
        return isinstance(there, dict) and all(k in there and _covers(there[k], v) for k, v in wanted.items())
    if isinstance(wanted, list):
        return isinstance(there, list) and len(there) == len(wanted) and all(map(_covers, there, wanted))
    return bool(there == wanted)


def plan_members(
    o: Observation, spec: TabletClusterSpec, identity: Identity, everyone: tuple[Member, ...]
) -> Result:
    """Claims and pods of all members."""
    actions: list[Action] = list(_first_claims(o, spec, identity))
    if identity.formed and o.catalog is not None:
        actions.extend(_registrations(o.catalog, everyone))
    needing = _needing(o, spec, everyone)
    for member in everyone:
        actions.extend(_one(o, spec, identity, member, everyone, needing))
    known = {m.pod.name for m in everyone if m.pod is not None}
    for pod in o.pods:
        if pod.name not in known and not pod.deleting and o.catalog is not None:
            reason = f"pod {pod.name} belongs to a node that is no longer part of the cluster"
            actions.append(
                DeletePod(reason, "Pod", pod.name, pod.uid, pod.resource_version, force=_gone(o, pod.machine))
            )
    if identity.formed and o.catalog is not None:
        actions.extend(_newcomers(o, spec, identity, everyone))
    return actions, [*find_members(o, everyone), *_claims_refused(o, actions)]


def find_members(o: Observation, everyone: tuple[Member, ...]) -> list[Finding]:
    """What is the matter with members, whether or not anything may be done about it."""
    findings: list[Finding] = []
    spec, identity = o.cluster.spec, o.identity
    if identity is None or identity.owner_uid != o.cluster.uid:
        return findings  # what is there may be an earlier cluster's, on its way out
    if spec is not None:
        findings += [Finding(Kind.STALLED, "UnknownZone", fault) for fault in zone_faults(o, spec)]
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


def _needing(o: Observation, spec: TabletClusterSpec, everyone: tuple[Member, ...]) -> Needing:
    due = {m.role for m in everyone if m.claim is not None and _due(o, spec, m.claim)}
    return {role: in_danger(o, role) for role in due}


def _claims_refused(o: Observation, actions: Sequence[Action]) -> list[Finding]:
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
        f"zones and machineSpread count for new members; these stay where they are: {some(faults)}. To have one made anew: delete "
        "its claim, then its pod, and before the next one wait until all tablets are healthy (status.tablets)"
    )
    return [Finding(Kind.REMARK, "Misplaced", message)]


def _first_claims(o: Observation, spec: TabletClusterSpec, identity: Identity) -> list[Action]:
    """The first masters' claims, until the cluster has formed: there is nothing on them that could be lost."""
    if identity.formed:
        return []
    there = {c.name for c in o.claims}
    missing = [m for m in identity.first_masters if m.name not in there]
    zones = choose_zones(o, spec, "master", len(missing), o.claims, ())
    reason = "a first master of the cluster"
    return [
        CreateClaim(
            f"{first.name}: {reason}",
            manifests.claim(o.cluster, spec, "master", first.name, first.node_id, identity.cluster_id, zone),
        )
        for first, zone in zip(missing, zones, strict=True)
    ]


def _one(
    o: Observation,
    spec: TabletClusterSpec,
    identity: Identity,
    member: Member,
    everyone: tuple[Member, ...],
    needing: Needing,
) -> list[Action]:
    claim, pod = member.claim, member.pod
    if claim is None:
        return []
    if not (claim.labelled and claim.identified):
        return [_as_made(o, claim)]
    if member.state is State.RETIRED:
        return _retired(o, spec, member, claim, needing)
    if claim.deleting:
        return []
    actions = _claim_upkeep(o, spec, claim)
    if pod is None:
        complete = {c.name for c in o.claims} >= {m.name for m in identity.first_masters}
        if identity.formed or (member.role == "master" and complete):
            actions.append(_start(o, spec, identity, member, claim, everyone))
        return actions
    if pod.deleting:
        if member.fate is Fate.MACHINE_DELETED:
            reason = f"{member.why}: nobody is left to stop pod {pod.name}"
            actions.append(DeletePod(reason, "Pod", pod.name, pod.uid, pod.resource_version, force=True))
        return actions
    if pod.phase in ("Failed", "Succeeded"):
        reason = f"pod {pod.name} has ended ({pod.exit_message or pod.phase}); it is made again on its volume"
        actions.append(DeletePod(reason, "Pod", pod.name, pod.uid, pod.resource_version))
    elif pod.claim_uid != claim.uid:
        reason = f"pod {pod.name} was made for another claim of this name"
        actions.append(DeletePod(reason, "Pod", pod.name, pod.uid, pod.resource_version))
    elif _stranded(o, claim, pod.created_s):
        reason = f"the volume of {pod.name} was to be made on {claim.selected_machine}, which is down; chosen again"
        actions.append(DeletePod(reason, "Pod", pod.name, pod.uid, pod.resource_version, force=True))
        actions.append(
            DeleteClaim(reason, "PersistentVolumeClaim", claim.name, claim.uid, claim.resource_version)
        )
    elif _waits_in_vain(o, pod, keeps_off(o, spec, member, everyone)):
        reason = f"{pod.name} waits for a machine; made again, as those that it leaves to others have changed"
        actions.append(DeletePod(reason, "Pod", pod.name, pod.uid, pod.resource_version))
    elif _outdated(o, spec, pod) and _rests(o, pod):
        reason = f"{pod.name} does not run ({_why_not(pod)}) and was made from an older spec; it is made again from this one"
        actions.append(DeletePod(reason, "Pod", pod.name, pod.uid, pod.resource_version))
    elif adopting := manifests.adopting(o.cluster, pod.owners):
        reason = f"pod {pod.name} has lost its owner: it would outlive the TabletCluster"
        actions.append(
            PatchObject(reason, "Pod", pod.name, pod.uid, pod.resource_version, {"metadata": adopting})
        )
    return actions


def _as_made(o: Observation, claim: Claim) -> PatchObject:
    """Its labels, and whose volume it is, put back."""
    notes = {
        naming.ANNOTATION_NODE_ID: claim.node_id,
        naming.ANNOTATION_CLUSTER_ID: claim.cluster_id,
    }
    patch = {"metadata": {"labels": naming.labels(o.cluster.name, claim.role), "annotations": notes}}
    reason = (
        f"{claim.name} has lost its labels: nobody who lists claims finds it"
        if not claim.labelled
        else f"{claim.name} no longer says whose volume it is"
    )
    return PatchObject(reason, "PersistentVolumeClaim", claim.name, claim.uid, claim.resource_version, patch)


def _stranded(o: Observation, claim: Claim, since_s: float) -> bool:
    machine = o.machine(claim.selected_machine)
    down = claim.selected_machine and o.machines is not None and (machine is None or not machine.ready)
    return bool(claim.phase == "Pending" and down and o.now_s - since_s > _UNBOUND_PATIENCE_S)


def _waits_in_vain(o: Observation, pod: Pod, off: Sequence[str]) -> bool:
    """Whether a pod that no machine takes could take one which it is to leave to others, or must not take one that is up and
    free. Only the masters can say who has run where."""
    if pod.machine or not pod.unschedulable or o.catalog is None:
        return False
    left, free = set(off) - set(pod.keeps_off), set(pod.keeps_off) - set(off)
    return bool(left) or any(not _gone(o, machine) for machine in free)


def _outdated(o: Observation, spec: TabletClusterSpec, pod: Pod) -> bool:
    return pod.spec_hash != manifests.spec_hash(spec, pod.role, spec.image or o.default_image)


def _rests(o: Observation, pod: Pod) -> bool:
    """Whether nothing of a pod runs: no machine has it, or its kubelet says so, and could stop it. What it said when it ended
    may be why its node is given up, and is not to be forgotten."""
    if pod.running or pod.ready or pod.exit_code in naming.EXITS_OF_VOLUMES:
        return False
    return not pod.machine or (bool(pod.waiting) and not _gone(o, pod.machine))


def _why_not(pod: Pod) -> str:
    return pod.waiting or pod.unschedulable or "it has no machine yet"


def _start(
    o: Observation,
    spec: TabletClusterSpec,
    identity: Identity,
    member: Member,
    claim: Claim,
    everyone: tuple[Member, ...],
) -> CreatePod:
    first = {m.node_id for m in identity.first_masters}
    flags: list[str] = []
    if member.role == "master" and member.node_id in first and not identity.formed:
        hosts = [
            f"{m.node_id}={naming.peer_host(o.cluster.name, o.cluster.namespace, m.name)}:{naming.PORT_MASTER}"
            for m in identity.first_masters
        ]
        flags, reason = ["--first-masters", ",".join(hosts)], "a first master of the cluster"
    elif member.role == "master" and member.node_id not in identity.formed:
        flags, reason = (
            ["--join"],
            "takes the place of a lost master" if not member.formed else "back on its volume",
        )
    else:
        # A volume that is bound has been used; the masters, which know for certain, may not be there yet.
        reason = "back on its volume" if member.formed or claim.phase == "Bound" else "a new node"
    masters = [m.name for m in everyone if m.role == "master" and m.active]
    masters = masters or [m.name for m in identity.first_masters]
    image = spec.image or o.default_image
    off = keeps_off(o, spec, member, everyone)
    manifest = manifests.pod(o.cluster, spec, claim, image, masters, flags, off)
    return CreatePod(f"{member.name}: {reason}", manifest)


def _claim_upkeep(o: Observation, spec: TabletClusterSpec, claim: Claim) -> list[Action]:
    """One thing in a pass, its owner first: a size may be refused for good (no allowVolumeExpansion, a quota), and must
    not decide whether the volume goes with the TabletCluster."""
    if claim.owned != (spec.deletionPolicy is DeletionPolicy.DELETE):
        return [_owner_patch(o, spec, claim)]
    size = manifests.storage_of(spec, claim.role).size
    if claim.phase != "Bound" or claim.requested_bytes >= byte_count(size):
        return []  # never made smaller: Kubernetes cannot
    refused = _refused(o, claim, size)
    if refused is not None and o.now_s < refused.again_s:
        return []
    patch = {"spec": {"resources": {"requests": {"storage": size}}}}
    reason, again = f"{claim.name}: storage.size is {size} now", refused is not None
    seen = (claim.name, claim.uid, claim.resource_version)
    return [GrowClaim(reason, "PersistentVolumeClaim", *seen, patch, size, again)]


def _refused(o: Observation, claim: Claim, size: str) -> RefusedGrowth | None:
    refused = o.refused_growth.get(claim.uid)
    return refused if refused is not None and refused.size == size else None


def _sizes(o: Observation, spec: TabletClusterSpec, everyone: tuple[Member, ...]) -> list[Finding]:
    """Volumes that may not grow to what is asked for, and those that are larger already."""
    found = []
    for role in ROLES:
        size = manifests.storage_of(spec, role).size
        claims = [m.claim for m in everyone if m.role == role and m.active and m.claim is not None]
        small = [c for c in claims if c.requested_bytes < byte_count(size)]
        refused = [(c.name, r) for c in small if (r := _refused(o, c, size)) is not None]
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


def _owner_patch(o: Observation, spec: TabletClusterSpec, claim: Claim) -> PatchObject:
    owned = spec.deletionPolicy is DeletionPolicy.DELETE
    patch = {"metadata": {"ownerReferences": [manifests.owner(o.cluster)] if owned else None}}
    reason = f"{claim.name}: deletionPolicy is {spec.deletionPolicy.value}"
    return PatchObject(reason, "PersistentVolumeClaim", claim.name, claim.uid, claim.resource_version, patch)


def plan_retaining(
    o: Observation, spec: TabletClusterSpec, everyone: tuple[Member, ...]
) -> tuple[Action, ...]:
    """Volumes of this TabletCluster that are to stay when it goes. The one thing that is done to a cluster that is paused
    or breaks a rule: Kubernetes deletes what is owned all the same."""
    if spec.deletionPolicy is not DeletionPolicy.RETAIN:
        return ()
    in_use = [m.claim for m in everyone if m.claim is not None and m.state is not State.RETIRED]
    own = [c for c in in_use if c.owned and c.owner_uid == o.cluster.uid and not c.deleting]
    return tuple(_owner_patch(o, spec, claim) for claim in own)


def _gone(o: Observation, machine: str) -> bool:
    """Whether nobody is left on that machine to stop a pod."""
    seen = o.machine(machine)
    return bool(machine) and o.machines is not None and (seen is None or not seen.ready)


def _retired(
    o: Observation, spec: TabletClusterSpec, member: Member, claim: Claim, needing: Needing
) -> list[Action]:
    """Retired → so noted on its claim → pod deleted → claim released → claim deleted, one after the other."""
    pod = member.pod
    if member.node is None:
        return []  # noted once; those who decide it cannot be asked: nothing is started, nothing taken away
    if pod is not None and claim.released_s is None and not claim.retired:
        patch = {"metadata": {"annotations": {naming.ANNOTATION_RETIRED: f"{o.now_s:.0f}"}}}
        reason = f"{member.name} is retired: nothing is to start on its volume again"
        return [
            RetireClaim(
                reason, "PersistentVolumeClaim", claim.name, claim.uid, claim.resource_version, patch
            ),
        ]
    if pod is not None:
        force = _gone(o, pod.machine)
        if pod.deleting and not force:
            return []
        reason = f"{member.name} is retired: no tablet counts on it any more"
        return [DeletePod(reason, "Pod", pod.name, pod.uid, pod.resource_version, force=force)]
    if claim.released_s is None:
        patch = {"metadata": {"annotations": {naming.ANNOTATION_RELEASED: f"{o.now_s:.0f}"}}}
        reason = f"{member.name} is retired; its claim stays for {spec.healing.keepFor}"
        return [
            ReleaseClaim(
                reason, "PersistentVolumeClaim", claim.name, claim.uid, claim.resource_version, patch
            ),
        ]
    if _due(o, spec, claim) and not needing[member.role]:
        reason = f"{claim.name} was released {spec.healing.keepFor} ago"
        return [DeleteClaim(reason, "PersistentVolumeClaim", claim.name, claim.uid, claim.resource_version)]
    return []


def _due(o: Observation, spec: TabletClusterSpec, claim: Claim) -> bool:
    """Whether it was let go long enough ago to be deleted."""
    long_ago = claim.released_s is not None and o.now_s - claim.released_s >= seconds(spec.healing.keepFor)
    return long_ago and not claim.deleting


def _kept_longer(o: Observation, spec: TabletClusterSpec, everyone: tuple[Member, ...]) -> list[Finding]:
    """Volumes that are due to go, and may be the last to hold what others have lost since."""
    found, needing = [], _needing(o, spec, everyone)
    for member in everyone:
        if member.state is not State.RETIRED or member.claim is None or not _due(o, spec, member.claim):
            continue
        if needing[member.role]:
            message = (
                f"{member.name} was released {spec.healing.keepFor} ago; its claim stays until every tablet has a leader and "
                f"can lose a voter: {some([tablet_name(t) for t in needing[member.role]])}"
            )
            found.append(Finding(Kind.RECONCILING, "ClaimKept", message))
    return found


def _registrations(catalog: Catalog, everyone: tuple[Member, ...]) -> list[Action]:
    """Members whose claims stand: what is registered is on record for ever, so a claim that is refused must not be."""
    # First masters are on record by their own word, before anybody could tell their names.
    registered = {n.node_id for n in catalog.view.nodes if catalog.names.get(n.node_id)}
    return [
        RegisterNode(f"{m.name} is part of the cluster", m.node_id, m.role, m.name)
        for m in everyone
        if m.active and m.node_id not in registered
    ]


def _newcomers(
    o: Observation, spec: TabletClusterSpec, identity: Identity, everyone: tuple[Member, ...]
) -> list[Action]:
    """Members that are missing: their serials set aside first, then their claims; the next pass registers them."""
    fresh = iter(o.fresh_ids)
    wanted: dict[Role, int] = {"master": masters_wanted(o, spec), "node": spec.nodes.replicas}
    missing = {
        role: max(0, wanted[role] - sum(m.role == role and m.active for m in everyone)) for role in ROLES
    }
    if not any(missing.values()):
        return []
    serials = {role: _unused(o, identity, role)[: missing[role]] for role in ROLES}
    more = {role: missing[role] - len(serials[role]) for role in ROLES}
    actions: list[Action] = []
    if any(more.values()):
        reason = f"serials for {more['master']} masters and {more['node']} nodes"
        actions.append(replace_identity(o, identity.with_more(more), reason))
    staying = [m.claim for m in everyone if m.active and m.claim is not None]
    for role in ROLES:
        begin = identity.next_serial[role]
        chosen = [*serials[role], *range(begin, begin + more[role])]
        zones = choose_zones(o, spec, role, missing[role], staying, everyone)
        for serial, zone in zip(chosen, zones, strict=True):
            name, node_id = naming.member_name(o.cluster.name, role, serial), next(fresh)
            why = f"{name}: {wanted[role]} {role}s are asked for, {wanted[role] - missing[role]} are there"
            manifest = manifests.claim(o.cluster, spec, role, name, node_id, identity.cluster_id, zone)
            actions.append(CreateClaim(why, manifest))
    return actions


def _unused(o: Observation, identity: Identity, role: Role) -> list[int]:
    """Serials that are set aside, and with which nothing was ever made: else a claim that is refused would take a new one in
    each pass. Whoever had a pod is on the masters' record for ever, and with it its name."""
    used = {m.name for m in identity.first_masters} | {c.name for c in o.claims} | {p.name for p in o.pods}
    used |= set(o.catalog.names.values()) if o.catalog is not None else set()
    aside = range(identity.own_from(role), identity.next_serial[role])
    return [n for n in aside if naming.member_name(o.cluster.name, role, n) not in used]


_TITLES: Mapping[Role, str] = {"master": "Master", "node": "Node"}


def _findings(o: Observation, member: Member) -> list[Finding]:
    title = _TITLES[member.role]
    match member.state:
        case State.LOST | State.DRAINING:
            doing = "lost" if member.state is State.LOST else "being taken out"
            fate = f" ({member.fate.value}: {member.why})" if member.fate is not Fate.NONE else ""
            message = f"{member.name} is {doing}{fate}"
            return [Finding(Kind.DEGRADED, f"{title}Lost", message, member=member.name)]
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
    why = member.why or f"kubectl describe pod {pod.name} may say why"
    return f"its pod has not been ready for more than {START_PATIENCE_S:.0f} s: {why}"
