"""Pods, claims and Services: what should be there and is not, and what should go. Called by planner; pure.

Invariant: a serial is set aside before the claim that uses it, a claim stands and its node is registered before its
pod starts, a node is RETIRED, and that noted on its claim, before its pod goes, its pod is gone before its claim is
let go, and what was let go is deleted only while every tablet has what it should have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stele_operator.api.cluster import DeletionPolicy, TabletClusterSpec
from stele_operator.api.scalars import byte_count
from stele_operator.plan import diagnosis, manifests, naming
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
from stele_operator.plan.budgets import Budget
from stele_operator.plan.fates import Fate, Member, State
from stele_operator.plan.findings import Finding
from stele_operator.plan.formation import replace_identity
from stele_operator.plan.health import masters_wanted
from stele_operator.plan.observation import (
    ROLES,
    Catalog,
    Claim,
    Identity,
    Observation,
    Pod,
    Role,
)
from stele_operator.plan.placement import choose_zones, keeps_off

_UNBOUND_PATIENCE_S = 60.0
Result = tuple[list[Action], list[Finding]]


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
    needing = diagnosis.needing(o, spec, everyone)
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
    return actions, [*diagnosis.find_members(o, everyone), *diagnosis.claims_refused(o, actions)]


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
    needing: diagnosis.Needing,
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
    actions = _claim_changes(o, spec, claim, identity.fork_id)
    if pod is None and claim.copied:
        return actions  # what a lost identity is read back from is noted before anything runs under the new fork id
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
    manifest = manifests.pod(o.cluster, spec, claim, image, masters, flags, off, identity.fork_id)
    return CreatePod(f"{member.name}: {reason}", manifest)


def _claim_changes(o: Observation, spec: TabletClusterSpec, claim: Claim, fork_id: str) -> list[Action]:
    """One thing in a pass: which copy of the cluster it is of, its owner, its size. The owner comes before the size: a size may be refused for good (no allowVolumeExpansion, a quota), and must
    not decide whether the volume goes with the TabletCluster."""
    if not claim.noted(fork_id):
        notes = {naming.ANNOTATION_CLAIM_UID: claim.uid, naming.ANNOTATION_FORK_ID: fork_id}
        reason = f"{claim.name}: notes which claim it is, by which a copy of it will be known"
        patch: Json = {"metadata": {"annotations": notes}}
        kind = "PersistentVolumeClaim"
        return [PatchObject(reason, kind, claim.name, claim.uid, claim.resource_version, patch)]
    if claim.owned != (spec.deletionPolicy is DeletionPolicy.DELETE):
        return [_owner_patch(o, spec, claim)]
    size = manifests.storage_of(spec, claim.role).size
    if claim.phase != "Bound" or claim.requested_bytes >= byte_count(size):
        return []  # never made smaller: Kubernetes cannot
    refused = diagnosis.refused_growth(o, claim, size)
    if refused is not None and o.now_s < refused.again_s:
        return []
    patch = {"spec": {"resources": {"requests": {"storage": size}}}}
    reason, again = f"{claim.name}: storage.size is {size} now", refused is not None
    seen = (claim.name, claim.uid, claim.resource_version)
    return [GrowClaim(reason, "PersistentVolumeClaim", *seen, patch, size, again)]


def _owner_patch(o: Observation, spec: TabletClusterSpec, claim: Claim) -> PatchObject:
    owned = spec.deletionPolicy is DeletionPolicy.DELETE
    patch = {"metadata": {"ownerReferences": [manifests.owner(o.cluster)] if owned else None}}
    reason = f"{claim.name}: deletionPolicy is {spec.deletionPolicy.value}"
    return PatchObject(reason, "PersistentVolumeClaim", claim.name, claim.uid, claim.resource_version, patch)


def plan_retaining(
    o: Observation, spec: TabletClusterSpec, everyone: tuple[Member, ...]
) -> tuple[Action, ...]:
    """Volumes of this TabletCluster that are to stay when it goes. The one thing that is done to a cluster that is paused,
    breaks a rule or is being deleted: Kubernetes deletes what is owned all the same."""
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
    o: Observation, spec: TabletClusterSpec, member: Member, claim: Claim, needing: diagnosis.Needing
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
    if diagnosis.due(o, spec, claim) and not needing[member.role]:
        reason = f"{claim.name} was released {spec.healing.keepFor} ago"
        return [DeleteClaim(reason, "PersistentVolumeClaim", claim.name, claim.uid, claim.resource_version)]
    return []


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
