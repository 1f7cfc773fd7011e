"""Plans the cluster's identity, and how its first masters form a cluster. Called by cluster_plan; pure.

Invariants: identities are in the ConfigMap and on the claims before any pod starts. A cluster is formed once,
by one compare-and-set, with exactly the volumes that were formatted and synced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.plan import manifests, naming
from stele_operator.plan.actions import Action, ConfirmFormation, CreateObject, PatchObject, ReplaceIdentity
from stele_operator.plan.findings import Finding, Kind
from stele_operator.plan.observation import (
    ROLES,
    Claim,
    FirstMaster,
    Identity,
    MasterReport,
    Observation,
    Role,
)


def plan_identity(
    o: Observation, spec: TabletClusterSpec
) -> tuple[Identity | None, list[Action], list[Finding]]:
    """The present identity. If there is none, or it belongs to an earlier TabletCluster: None, with the
    action that writes one. If no identity can be restored: None, with a finding that says why.
    """
    # Kubernetes will delete the claims that an earlier TabletCluster owned, however long that takes, so they
    # do not count.
    kept = [c for c in o.claims if not c.deleting and (not c.owned or c.owner_uid == o.cluster.uid)]
    if o.identity is None:
        identity = _rebuilt(o, kept) if kept else _new(o, spec, _next_serials(o))
        reason = (
            f"the identity of {o.cluster.name} was missing and is restored from its claims{_adopting(kept)}"
            if kept
            else f"a new cluster with {spec.masters.replicas} first masters"
        )
        if identity is None:
            message = (
                f"the ConfigMap {naming.identity_name(o.cluster.name)} is gone, and the claims of {o.cluster.name} have "
                f"different cluster UUIDs or fork ids; restore the ConfigMap, or remove the claims that do not belong to it"
            )
            return None, [], [Finding(Kind.STALLED, "IdentityLost", message)]
        manifest = manifests.identity_config_map(o.cluster, identity)
        return None, [CreateObject(reason=reason, manifest=manifest, must_be_new=True)], []
    if o.identity.owner_uid == o.cluster.uid:
        return o.identity, [], []
    # The TabletCluster was deleted and created again. If there are volumes it adopts them; else it is a new
    # cluster.
    taken = [c for c in kept if c.cluster_id == o.identity.cluster_id]
    if taken:
        fork_id = o.fresh_ids[0] if _all_copied(taken) else o.identity.fork_id
        adopted = replace(o.identity, owner_uid=o.cluster.uid, fork_id=fork_id)
        reason = f"this TabletCluster adopts the volumes of an earlier one{_adopting(taken)}"
        return None, [replace_identity(o, adopted, reason)], []
    fresh = _new(o, spec, o.identity.next_serial)
    return (
        None,
        [replace_identity(o, fresh, "a new cluster: the earlier one of this name left no volume")],
        [],
    )


def _all_copied(claims: Sequence[Claim]) -> bool:
    """Whether all claims are copies of a cluster's claims: their own uids differ from the uids noted on them.
    The originals may still be in use elsewhere.

    If one claim is not a copy, the cluster is the original, and the masters judge the volumes of the others.
    """
    return bool(claims) and all(c.copied for c in claims)


def _adopting(claims: Sequence[Claim]) -> str:
    return "; they are copies, so this cluster runs under a new fork id" if _all_copied(claims) else ""


def replace_identity(o: Observation, identity: Identity, reason: str) -> ReplaceIdentity:
    """The action that replaces the whole identity ConfigMap by compare-and-set."""
    return ReplaceIdentity(
        reason=reason,
        kind="ConfigMap",
        name=naming.identity_name(o.cluster.name),
        uid="",
        resource_version=o.identity.resource_version if o.identity else "",
        patch={"data": manifests.identity_data(identity)},
        identity=identity,
    )


def _new(o: Observation, spec: TabletClusterSpec, serials: dict[Role, int]) -> Identity:
    first = int(serials["master"])
    count = spec.masters.replicas
    masters = tuple(
        FirstMaster(naming.member_name(o.cluster.name, "master", first + n), o.fresh_ids[n + 1])
        for n in range(count)
    )
    return Identity(
        resource_version="",
        cluster_id=o.fresh_ids[0],
        owner_uid=o.cluster.uid,
        next_serial={"master": first + count, "node": int(serials["node"])},
        first_serial=serials,
        first_masters=masters,
    )


def _next_serials(o: Observation) -> dict[Role, int]:
    return {role: max((c.serial for c in o.claims if c.role == role), default=-1) + 1 for role in ROLES}


def _rebuilt(o: Observation, kept: Sequence[Claim]) -> Identity | None:
    """The identity restored from the claims; None if they disagree on the cluster UUID or fork id.

    A formed cluster counts as asleep, because it may have been asleep or waking. So no member counts as lost
    before all had time to come back (hibernation.py). The cluster has formed if each claim of a master has a
    format id, because these ids are recorded before forming. Claims of masters that joined later lack the id
    while a first master is left. So the cluster has also formed if there are claims that only a formed
    cluster has: those of nodes, or released ones.
    """
    cluster_ids = {c.cluster_id for c in kept}
    fork_ids = {c.fork_id for c in kept if c.noted_uid == c.uid} or {""}
    if len(cluster_ids) != 1 or len(fork_ids) != 1:
        return None
    fork_id = o.fresh_ids[0] if _all_copied(kept) else fork_ids.pop()
    claims = [c for c in o.claims if c.cluster_id in cluster_ids]
    masters = sorted((c for c in claims if c.role == "master"), key=lambda c: c.serial)
    noted = {c.node_id: c.format_id for c in masters if c.format_id}
    later = any(c.role == "node" or c.released_s is not None for c in claims)
    formed = noted if later or len(noted) == len(masters) else {}
    kept_masters = sum(c.role == "master" and c.released_s is None and not c.retired for c in kept)
    return Identity(
        resource_version="",
        cluster_id=cluster_ids.pop(),
        owner_uid=o.cluster.uid,
        next_serial=_next_serials(o),
        first_masters=tuple(
            FirstMaster(c.name, c.node_id) for c in masters if not formed or c.node_id in formed
        ),
        formed=formed,
        fork_id=fork_id,
        asleep=bool(formed),
        masters=kept_masters if formed else 0,
    )


def plan_formation(o: Observation, identity: Identity) -> tuple[list[Action], list[Finding]]:
    """Actions and findings of the next step towards a formed cluster. After that, only actions that tell a
    first master of it and that record format ids (`_heirs`).
    """
    reports = {r.node_id: r for r in o.master_reports if r.cluster_id == identity.cluster_id and r.format_id}
    claims = {c.node_id: c for c in o.claims}
    if identity.formed:
        return [*_heirs(identity, reports, claims), *_confirmations(o, identity)], []
    unnoted: list[Action] = []
    for first in identity.first_masters:
        report, claim = reports.get(first.node_id), claims.get(first.node_id)
        if report is not None and claim is not None and claim.format_id != report.format_id:
            unnoted.append(_note_format(claim, report.format_id))
    missing = [m.name for m in identity.first_masters if m.node_id not in reports]
    if missing:
        message = f"waiting for the first masters {', '.join(missing)} to format their volumes"
        return unnoted, [Finding(Kind.NOT_READY, "Forming", message)]
    waiting = Finding(
        Kind.NOT_READY, "Forming", "all first masters have formatted their volumes; confirming them"
    )
    if unnoted:
        return unnoted, [waiting]
    formed = replace(
        identity,
        formed={m.node_id: reports[m.node_id].format_id for m in identity.first_masters},
        masters=len(identity.first_masters),
    )
    names = ", ".join(m.name for m in identity.first_masters)
    return [replace_identity(o, formed, f"{names} have formatted their volumes and form the cluster")], [
        waiting
    ]


def _heirs(
    identity: Identity, reports: dict[str, MasterReport], claims: dict[str, Claim]
) -> list[PatchObject]:
    """Actions that record format ids on claims of later masters, once no claim of a first master is left.

    If the ConfigMap is lost, these ids show that the cluster has formed.
    """
    if any(first.node_id in claims for first in identity.first_masters):
        return []
    return [
        _note_format(claims[r.node_id], r.format_id)
        for r in reports.values()
        if r.formed and r.node_id in claims and claims[r.node_id].format_id != r.format_id
    ]


def _note_format(claim: Claim, format_id: str) -> PatchObject:
    return PatchObject(
        reason=f"{claim.name} has formatted its volume",
        kind="PersistentVolumeClaim",
        name=claim.name,
        uid=claim.uid,
        resource_version=claim.resource_version,
        patch={"metadata": {"annotations": {naming.ANNOTATION_FORMAT_ID: format_id}}},
    )


def _confirmations(o: Observation, identity: Identity) -> list[Action]:
    names = {m.node_id: m.name for m in identity.first_masters}
    addresses = {
        node_id: f"{naming.peer_host(o.cluster.name, o.cluster.namespace, name)}:{naming.PORT_MASTER}"
        for node_id, name in names.items()
    }
    # A master reports its pod's address. A DNS name would outlive the pod, but it does not resolve before the
    # peers' Service lists the pod.
    for report in o.master_reports:
        addresses[report.node_id] = report.address or addresses.get(report.node_id, "")
    masters = tuple(
        (node_id, format_id, addresses.get(node_id, ""))
        for node_id, format_id in sorted(identity.formed.items())
    )
    return [
        ConfirmFormation(
            reason=f"{names.get(report.node_id, report.node_id)} is a first master of {o.cluster.name}",
            address=report.address,
            node_id=report.node_id,
            cluster_id=identity.cluster_id,
            masters=masters,
        )
        for report in o.master_reports
        if not report.formed and identity.formed.get(report.node_id) == report.format_id
    ]
