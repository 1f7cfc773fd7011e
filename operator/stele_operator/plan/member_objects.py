"""Pods, claims and Services: which to create, change and delete. Called by cluster_plan; pure.

Invariants: a serial is reserved before a claim uses it. A claim exists and its node is registered before its
pod starts. A node is RETIRED, and its claim says so, before its pod is deleted. Its pod is gone before its
claim is released. A released claim is deleted only while every tablet of the role can lose a voter.
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
    MarkPod,
    PatchObject,
    RegisterNode,
    ReleaseClaim,
    RetireClaim,
)
from stele_operator.plan.budgets import Budget
from stele_operator.plan.counting import Count
from stele_operator.plan.fates import Fate, Member, State
from stele_operator.plan.findings import Finding
from stele_operator.plan.formation import replace_identity
from stele_operator.plan.leaving import staying_masters, staying_nodes
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
from stele_operator.plan.rolling import outdated

_UNBOUND_PATIENCE_S = 60.0
Result = tuple[list[Action], list[Finding]]


def plan_services(o: Observation, budgets: Sequence[Budget]) -> list[Action]:
    """Create the Services and disruption budgets, and restore them where somebody changed them."""
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
            reason = f"{kind} {name} differs from what the operator needs"
            actions.append(PatchObject(reason, kind, name, there.uid, there.resource_version, patch))
    return actions


def _covers(there: Any, wanted: Any) -> bool:
    """Whether the present part `there` contains all of `wanted`. It may contain more, because the API server
    adds defaults.
    """
    if isinstance(wanted, dict):
        return isinstance(there, dict) and all(k in there and _covers(there[k], v) for k, v in wanted.items())
    if isinstance(wanted, list):
        return isinstance(there, list) and len(there) == len(wanted) and all(map(_covers, there, wanted))
    return bool(there == wanted)


def plan_members(
    o: Observation,
    spec: TabletClusterSpec,
    identity: Identity,
    everyone: tuple[Member, ...],
    count: Count,
) -> Result:
    """Actions on the claims and pods of all members. `count`: how many masters there are to be.

    While the cluster wakes, nodes start once a master leads, and no new members are made.
    """
    actions: list[Action] = list(_first_claims(o, spec, identity))
    if identity.formed and o.catalog is not None:
        actions.extend(_registrations(o.catalog, everyone))
    needing = diagnosis.needing(o, spec, everyone)
    for member in everyone:
        if member.role == "master" or o.catalog is not None or not o.asleep:
            actions.extend(_one(o, spec, identity, member, everyone, needing))
    actions.extend(_marks(everyone))
    known = {m.pod.name for m in everyone if m.pod is not None}
    for pod in o.pods:
        if pod.name not in known and not pod.deleting and o.catalog is not None:
            reason = f"pod {pod.name} belongs to a node that is no longer part of the cluster"
            actions.append(
                DeletePod(reason, "Pod", pod.name, pod.uid, pod.resource_version, force=_gone(o, pod.machine))
            )
    # The identity changes once in a pass.
    if identity.formed and o.catalog is not None and not o.asleep and not count.recording:
        actions.extend(_newcomers(o, spec, identity, everyone, count.pods))
    return actions, [*diagnosis.find_members(o, everyone), *diagnosis.claims_refused(o, actions)]


def _marks(everyone: Sequence[Member]) -> list[Action]:
    """Label the pods of parked nodes, and unlabel those of others. A disruption budget counts only pods
    without the label.
    """
    found: list[Action] = []
    for m in everyone:
        pod = m.pod
        if pod is None or pod.deleting or m.node is None or pod.parked == m.node.parked:
            continue
        is_now = "is parked" if m.node.parked else "is not parked any more"
        patch = {"metadata": {"labels": {naming.LABEL_PARKED: "true" if m.node.parked else None}}}
        found.append(
            MarkPod(
                f"{m.name} {is_now}", "Pod", pod.name, pod.uid, pod.resource_version, patch, m.node.parked
            )
        )
    return found


def plan_stopping(
    o: Observation, spec: TabletClusterSpec, everyone: tuple[Member, ...], role: Role, reason: str
) -> list[Action]:
    """Delete the pods of a role, and keep their claims. A pod is deleted by force only if its machine is no
    longer part of Kubernetes. If a member is RETIRED, its claim records that first.
    """
    of_pod = {m.pod.name: m for m in everyone if m.pod is not None}
    actions: list[Action] = []
    for pod in (p for p in o.pods if p.role == role):
        member = of_pod.get(pod.name)
        if member is not None and member.claim is not None and member.state is State.RETIRED and member.node:
            actions += _retired(o, spec, member, member.claim, {r: () for r in ROLES})
            continue
        force = machine_removed(o, pod)
        if force or not pod.deleting:
            why = f"{pod.name}: {reason}"
            actions.append(DeletePod(why, "Pod", pod.name, pod.uid, pod.resource_version, force=force))
    return actions


def machine_removed(o: Observation, pod: Pod) -> bool:
    """Whether a pod's machine is no longer part of Kubernetes, so that only force ends the pod."""
    return bool(pod.machine) and o.machines is not None and o.machine(pod.machine) is None


def stands_still(o: Observation, pod: Pod) -> bool:
    """Whether a pod is deleted but remains until its machine is back, because no kubelet can stop it now."""
    return pod.deleting and _gone(o, pod.machine)


def _first_claims(o: Observation, spec: TabletClusterSpec, identity: Identity) -> list[Action]:
    """Create the missing claims of the first masters. Before the cluster has formed, these claims hold
    nothing that could be lost.
    """
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
        return actions  # record the fork id on the claim before anything runs under it; a lost identity is restored from it
    if pod is None:
        complete = {c.name for c in o.claims} >= {m.name for m in identity.first_masters}
        if identity.formed or (member.role == "master" and complete):
            actions.append(_start(o, spec, identity, member, claim, everyone))
        return actions
    if pod.deleting:
        if member.fate is Fate.MACHINE_DELETED:
            reason = f"{member.why}: its kubelet cannot stop pod {pod.name}"
            actions.append(DeletePod(reason, "Pod", pod.name, pod.uid, pod.resource_version, force=True))
        return actions
    if pod.phase in ("Failed", "Succeeded"):
        reason = (
            f"pod {pod.name} has ended ({pod.exit_message or pod.phase}); it is created again on its volume"
        )
        actions.append(DeletePod(reason, "Pod", pod.name, pod.uid, pod.resource_version))
    elif pod.claim_uid != claim.uid:
        reason = f"pod {pod.name} was created for another claim of this name"
        actions.append(DeletePod(reason, "Pod", pod.name, pod.uid, pod.resource_version))
    elif _stranded(o, claim, pod.created_s):
        reason = f"the volume of {pod.name} was assigned to {claim.selected_machine}, which is down; it is assigned again"
        actions.append(DeletePod(reason, "Pod", pod.name, pod.uid, pod.resource_version, force=True))
        actions.append(
            DeleteClaim(reason, "PersistentVolumeClaim", claim.name, claim.uid, claim.resource_version)
        )
    elif _waits_in_vain(o, pod, keeps_off(o, spec, member, everyone)):
        reason = f"{pod.name} waits for a machine; it is created again because the machines reserved for others have changed"
        actions.append(DeletePod(reason, "Pod", pod.name, pod.uid, pod.resource_version))
    elif outdated(o, spec, pod) and _rests(o, pod):
        reason = f"{pod.name} does not run ({_why_not(pod)}) and has an older spec; it is created again from the present spec"
        actions.append(DeletePod(reason, "Pod", pod.name, pod.uid, pod.resource_version))
    elif adopting := manifests.adopting(o.cluster, pod.owners):
        reason = f"pod {pod.name} has lost its owner, so it would outlive the TabletCluster"
        actions.append(
            PatchObject(reason, "Pod", pod.name, pod.uid, pod.resource_version, {"metadata": adopting})
        )
    return actions


def _as_made(o: Observation, claim: Claim) -> PatchObject:
    """Restore the labels of a claim, and the identity of its node."""
    notes = {
        naming.ANNOTATION_NODE_ID: claim.node_id,
        naming.ANNOTATION_CLUSTER_ID: claim.cluster_id,
    }
    patch = {"metadata": {"labels": naming.labels(o.cluster.name, claim.role), "annotations": notes}}
    reason = (
        f"{claim.name} has lost its labels, so lists of claims omit it"
        if not claim.labelled
        else f"{claim.name} has lost the identity of its node"
    )
    return PatchObject(reason, "PersistentVolumeClaim", claim.name, claim.uid, claim.resource_version, patch)


def _stranded(o: Observation, claim: Claim, since_s: float) -> bool:
    machine = o.machine(claim.selected_machine)
    down = claim.selected_machine and o.machines is not None and (machine is None or not machine.ready)
    return bool(claim.phase == "Pending" and down and o.now_s - since_s > _UNBOUND_PATIENCE_S)


def _waits_in_vain(o: Observation, pod: Pod, off: Sequence[str]) -> bool:
    """Whether a waiting pod has an outdated list of machines reserved for others. Only the masters know who
    ran where, so this is False while none leads.
    """
    if pod.machine or not pod.unschedulable or o.catalog is None:
        return False
    left, free = set(off) - set(pod.keeps_off), set(pod.keeps_off) - set(off)
    return bool(left) or any(not _gone(o, machine) for machine in free)


def _rests(o: Observation, pod: Pod) -> bool:
    """Whether nothing of a pod runs: it has no machine, or its kubelet says so and can stop it.

    False for an ended pod whose exit code may be the reason to give up its node.
    """
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
            "joins the other masters" if not member.formed else "starts again on its volume",
        )
    else:
        # A bound volume has been used. The masters know for certain, but they may not run yet.
        reason = "starts again on its volume" if member.formed or claim.phase == "Bound" else "a new node"
    masters = [m.name for m in everyone if m.role == "master" and m.active]
    masters = masters or [m.name for m in identity.first_masters]
    image = spec.image or o.default_image
    off = keeps_off(o, spec, member, everyone)
    parked = member.node is not None and member.node.parked
    manifest = manifests.pod(
        o.cluster, spec, claim, image, masters, flags, off, identity.fork_id, parked=parked
    )
    return CreatePod(f"{member.name}: {reason}", manifest)


def _claim_changes(o: Observation, spec: TabletClusterSpec, claim: Claim, fork_id: str) -> list[Action]:
    """The next change of a claim, at most one in a pass: the fork id and uid, then the owner, then the size.

    The owner comes before the size, because a size may be refused for good (no allowVolumeExpansion, a
    quota). Such a refusal must not decide whether the volume is deleted with the TabletCluster.
    """
    if not claim.noted(fork_id):
        notes = {naming.ANNOTATION_CLAIM_UID: claim.uid, naming.ANNOTATION_FORK_ID: fork_id}
        reason = f"{claim.name}: records its own uid, so that a copy of the claim can be recognized"
        patch: Json = {"metadata": {"annotations": notes}}
        kind = "PersistentVolumeClaim"
        return [PatchObject(reason, kind, claim.name, claim.uid, claim.resource_version, patch)]
    if claim.owned != (spec.deletionPolicy is DeletionPolicy.DELETE):
        return [_owner_patch(o, spec, claim)]
    size = manifests.storage_of(spec, claim.role).size
    if claim.phase != "Bound" or claim.requested_bytes >= byte_count(size):
        return []  # Kubernetes cannot shrink volumes
    refused = diagnosis.refused_growth(o, claim, size)
    if refused is not None and o.now_s < refused.again_s:
        return []
    patch = {"spec": {"resources": {"requests": {"storage": size}}}}
    reason, again = f"{claim.name}: storage.size is now {size}", refused is not None
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
    """Remove the owner from claims under Retain, so that the volumes outlive the TabletCluster.

    For a cluster that is paused or being deleted, or whose spec breaks a rule, this is the only change.
    Kubernetes deletes owned claims in these cases too.
    """
    if spec.deletionPolicy is not DeletionPolicy.RETAIN:
        return ()
    in_use = [m.claim for m in everyone if m.claim is not None and m.state is not State.RETIRED]
    own = [c for c in in_use if c.owned and c.owner_uid == o.cluster.uid and not c.deleting]
    return tuple(_owner_patch(o, spec, claim) for claim in own)


def _gone(o: Observation, machine: str) -> bool:
    """Whether the machine is down or no longer part of Kubernetes, so that no kubelet can stop a pod there."""
    seen = o.machine(machine)
    return bool(machine) and o.machines is not None and (seen is None or not seen.ready)


def _retired(
    o: Observation, spec: TabletClusterSpec, member: Member, claim: Claim, needing: diagnosis.Needing
) -> list[Action]:
    """The next step for a retired member: record RETIRED on the claim, delete the pod, release the claim,
    delete the claim.
    """
    pod = member.pod
    if member.node is None:
        return []  # recorded before, and the masters cannot be asked now: start nothing, delete nothing
    if pod is not None and claim.released_s is None and not claim.retired:
        patch = {"metadata": {"annotations": {naming.ANNOTATION_RETIRED: f"{o.now_s:.0f}"}}}
        reason = f"{member.name} is retired: no pod may start on its volume again"
        return [
            RetireClaim(
                reason, "PersistentVolumeClaim", claim.name, claim.uid, claim.resource_version, patch
            ),
        ]
    if pod is not None:
        force = _gone(o, pod.machine)
        if pod.deleting and not force:
            return []
        reason = f"{member.name} is retired: no tablet needs it any more"
        return [DeletePod(reason, "Pod", pod.name, pod.uid, pod.resource_version, force=force)]
    if claim.released_s is None:
        patch = {"metadata": {"annotations": {naming.ANNOTATION_RELEASED: f"{o.now_s:.0f}"}}}
        reason = f"{member.name} is retired; its claim is kept for {spec.healing.keepFor}"
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
    """Register members whose claims exist. A registration cannot be undone, so a member with a refused claim
    is not registered.
    """
    # First masters register themselves, without a name.
    registered = {n.node_id for n in catalog.view.nodes if catalog.names.get(n.node_id)}
    return [
        RegisterNode(f"{m.name} is part of the cluster", m.node_id, m.role, m.name)
        for m in everyone
        if m.active and m.node_id not in registered
    ]


def _newcomers(
    o: Observation, spec: TabletClusterSpec, identity: Identity, everyone: tuple[Member, ...], masters: int
) -> list[Action]:
    """Create missing members: reserve their serials, then create their claims. The next pass registers the
    members.
    """
    fresh = iter(o.fresh_ids)
    wanted: dict[Role, int] = {"master": masters, "node": spec.nodes.replicas}
    there = {
        "master": len(staying_masters(everyone)),
        "node": len(staying_nodes(spec, everyone)),
    }
    missing = {role: max(0, wanted[role] - there[role]) for role in ROLES}
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
            why = f"{name}: {wanted[role]} {role}s are asked for, but {wanted[role] - missing[role]} exist"
            manifest = manifests.claim(o.cluster, spec, role, name, node_id, identity.cluster_id, zone)
            actions.append(CreateClaim(why, manifest))
    return actions


def _unused(o: Observation, identity: Identity, role: Role) -> list[int]:
    """Reserved serials with which nothing was created. They are used before new ones are reserved.

    Otherwise each pass would reserve a new serial while the API server refuses to create a claim. The catalog
    keeps the names of all members that had a pod, so the serials in these names are never used again.
    """
    used = {m.name for m in identity.first_masters} | {c.name for c in o.claims} | {p.name for p in o.pods}
    used |= set(o.catalog.names.values()) if o.catalog is not None else set()
    reserved = range(identity.own_from(role), identity.next_serial[role])
    return [n for n in reserved if naming.member_name(o.cluster.name, role, n) not in used]
