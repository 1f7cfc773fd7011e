"""A simulated cluster on which plans are tried: every action succeeds, and every pod that finds a machine is
ready at once. Called by rehearsal; pure.

Owns the simulated state. Invariants: the state begins as it was observed. Only actions of the plan, steps of
the driver, and the placing of new pods change it. The stage heals nothing that is broken now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stele.driver.rehearsal import carried_out
from stele.driver.steps import Step
from stele.driver.view import ClusterView, NodeView
from stele.model.ids import CATALOG_TABLET_ID, NodeId
from stele.model.ranges import AddRange, DropRange
from stele.model.steps import AddColumn, DropColumn, RenameColumn, SetHistory
from stele_operator.api.scalars import byte_count
from stele_operator.plan import naming
from stele_operator.plan.actions import (
    Action,
    AlterTable,
    CreateClaim,
    CreateObject,
    CreatePod,
    CreateTable,
    DeleteClaim,
    DeletePod,
    DeleteTable,
    FinalizeVersion,
    GrowClaim,
    Json,
    MarkPod,
    PatchObject,
    RegisterNode,
    ReplaceIdentity,
    RollPod,
    SetDriverPolicy,
    SetFinalizers,
    SetMasterCount,
    SetReplicationFactor,
)
from stele_operator.plan.observation import (
    Catalog,
    Claim,
    Column,
    Existing,
    Identity,
    Machine,
    Observation,
    Pod,
    Role,
    Table,
)
from stele_operator.plan.placement import admits, never_share
from stele_operator.plan.ranges import table_ranges, tablets_of
from stele_operator.plan.rules import history_ms


class Stage:
    """The simulated cluster. It needs an observation with a catalog."""

    def __init__(self, o: Observation, catalog: Catalog) -> None:
        self._o = o
        self._catalog = catalog
        self._identity = o.identity
        self._claims = {c.name: c for c in o.claims}
        self._pods = {p.name: p for p in o.pods}
        self._existing = {(e.kind, e.name): e for e in o.existing}
        self._groups = {g.name: g for g in o.groups}
        self._tables = {t.table_id: t for t in catalog.tables}
        self._view = catalog.view
        self._formed = set(catalog.formed_nodes)
        self._names = dict(catalog.names)
        self._standing, self._finalized = catalog.standing, catalog.finalized
        self._made: set[str] = set()
        """Pods that were made on this stage. Others keep the state in which they were observed."""

    @property
    def view(self) -> ClusterView:
        """The simulated view of the masters."""
        return self._view

    def pod(self, name: str) -> Pod | None:
        """The pod of this name, or None."""
        return self._pods.get(name)

    def observe(self) -> Observation:
        """What the operator would observe now."""
        peers = (t.config.voters for t in self._view.tablets if t.tablet_id == CATALOG_TABLET_ID)
        voters = {p.node_id for found in peers for p in found}
        running = sum(p.ready and p.node_id in voters for p in self._pods.values())
        leads = running > len(voters) // 2
        catalog = replace(
            self._catalog,
            view=self._view,
            tables=tuple(self._tables.values()),
            formed_nodes=frozenset(self._formed),
            names=dict(self._names),
            standing=self._standing,
            finalized=self._finalized,
        )
        return replace(
            self._o,
            identity=self._identity,
            claims=tuple(self._claims.values()),
            pods=tuple(self._pods.values()),
            existing=tuple(self._existing.values()),
            groups=tuple(self._groups.values()),
            catalog=catalog if leads else None,
            catalog_problem="" if leads else "no master pod runs",
            fresh_ids=tuple(i for i in self._o.fresh_ids if i not in self._names),
        )

    def steps(self, steps: Sequence[Step]) -> None:
        """Carry out steps of the driver."""
        self._view = carried_out(self._view, steps)

    def actions(self, actions: Sequence[Action]) -> None:
        """Carry out actions of the plan. Then new pods get machines and start.

        New pods do not start while further pods are deleted for a roll. So the stage shows the most pods that
        can be away together.
        """
        for action in actions:
            self._apply(action)
        if any(isinstance(action, RollPod) for action in actions):
            return
        for pod in [p for p in self._pods.values() if p.name in self._made and not p.ready]:
            self._start(pod)

    def _apply(self, action: Action) -> None:
        match action:
            case CreateClaim():
                self._claims[action.name] = _claim(action, self._o.now_s, self._identity)
            case CreatePod():
                self._made.add(action.name)
                self._pods[action.name] = _pod(action, self._o.now_s)
            case CreateObject():
                self._keep(action.kind, action.name, action.manifest)
            case ReplaceIdentity():
                self._identity = action.identity
            case PatchObject(kind="PersistentVolumeClaim"):
                before = self._claims[action.name]
                self._claims[action.name] = after = _patched(before, action.patch)
                if isinstance(action, GrowClaim):
                    self._grow(before.node_id, after.requested_bytes - before.requested_bytes)
            case MarkPod():
                self._pods[action.name] = replace(self._pods[action.name], parked=action.parked)
            case PatchObject(kind="Pod"):
                owners = tuple(action.patch["metadata"]["ownerReferences"])
                self._pods[action.name] = replace(self._pods[action.name], owners=owners)
            case PatchObject():
                self._keep(action.kind, action.name, action.patch)
            case DeletePod():
                self._pods.pop(action.name, None)
            case DeleteClaim():
                self._claims.pop(action.name, None)
            case RegisterNode():
                self._names[action.node_id] = action.name
                if self._view.node(action.node_id) is None:
                    node = NodeView(NodeId(action.node_id), action.role, "", "", "", ever_heard=False)
                    self._view = replace(self._view, nodes=(*self._view.nodes, node))
            case SetDriverPolicy():
                self._standing = action.policy
            case SetMasterCount():
                self._set_masters(action.masters)
            case FinalizeVersion():
                self._finalized = action.version
            case SetFinalizers():
                group = self._groups[action.group]
                self._groups[action.group] = replace(group, finalizers=action.finalizers)
            case CreateTable():
                self._tables[action.table_id] = _table(action)
            case SetReplicationFactor():
                self._set_factor(self._tables[action.table_id], action.factor)
            case AlterTable():
                self._tables[action.table_id] = _altered(self._tables[action.table_id], action)
            case DeleteTable():
                self._tables.pop(action.table_id, None)
                tablets = tuple(t for t in self._view.tablets if t.table_id != action.table_id)
                self._view = replace(self._view, tablets=tablets)
            case _:
                pass  # the cluster has formed

    def _keep(self, kind: str, name: str, manifest: Json) -> None:
        before = self._existing.get((kind, name))
        metadata = manifest["metadata"]
        self._existing[kind, name] = Existing(
            kind,
            name,
            before.uid if before is not None else f"new-{name}",
            before.resource_version if before is not None else "",
            metadata["annotations"][naming.ANNOTATION_DIGEST],
            {**(before.spec if before is not None else {}), **manifest["spec"]},
            tuple(
                metadata.get("ownerReferences") or (before.owners if before is not None else ()),
            ),
        )

    def _grow(self, node_id: str, more: int) -> None:
        nodes = tuple(
            replace(n, disk_free_bytes=n.disk_free_bytes + more)
            if n.node_id == node_id and (n.disk_free_bytes or n.disk_used_bytes)
            else n
            for n in self._view.nodes
        )
        self._view = replace(self._view, nodes=nodes)

    def _set_factor(self, table: Table, factor: int) -> None:
        before = table.replication_factor
        self._tables[table.table_id] = replace(
            table, replication_factor=factor, replication_factor_before=before
        )
        tablets = tuple(
            replace(t, replication_factor=t.replication_factor + factor - before)
            if t.table_id == table.table_id
            else t
            for t in self._view.tablets
        )
        self._view = replace(self._view, tablets=tablets)

    def _set_masters(self, masters: int) -> None:
        tablets = tuple(
            replace(t, replication_factor=masters) if t.tablet_id == CATALOG_TABLET_ID else t
            for t in self._view.tablets
        )
        self._view = replace(self._view, tablets=tablets)

    # -- what happens by itself

    def _start(self, pod: Pod) -> None:
        claim = self._claims[pod.name]
        machine, why = self._machine(pod, claim)
        if why:
            self._pods[pod.name] = replace(pod, unschedulable=why)
            return
        self._pods[pod.name] = replace(
            pod, machine=machine, phase="Running", ready=True, running=True, unschedulable=""
        )
        self._claims[pod.name] = replace(claim, phase="Bound", selected_machine=machine)
        nodes = tuple(
            self._running(n, machine, claim) if n.node_id == pod.node_id else n for n in self._view.nodes
        )
        self._view = replace(self._view, nodes=nodes)
        self._formed.add(pod.node_id)

    def _running(self, node: NodeView, machine: str, claim: Claim) -> NodeView:
        if node.node_id in self._formed:  # its volume keeps what it had
            return replace(node, machine=machine, heartbeat_age_ms=0, ever_heard=True)
        return replace(
            node,
            machine=machine,
            zone=claim.zone,  # what its pod is told, whatever zone its machine is in
            heartbeat_age_ms=0,
            ever_heard=True,
            formed=True,
            disk_free_bytes=claim.requested_bytes,
            disk_used_bytes=0,
        )

    def _machine(self, pod: Pod, claim: Claim) -> tuple[str, str]:
        """The machine for a pod and "", or "" and why there is none. A pod that ran goes where its volume is."""
        node = self._view.node(pod.node_id)
        ran = (node.machine if node is not None else "") or claim.selected_machine
        spec = self._o.cluster.spec
        if self._o.machines is None or spec is None:
            return ran or f"machine-of-{pod.name}", ""
        alone = never_share(spec, pod.role)
        taken = [p.machine for p in self._pods.values() if p.role == pod.role and p.machine]
        if ran and pod.node_id in self._formed:
            machine = self._o.machine(ran)
            if machine is None or not admits(spec, pod.role, machine):
                return "", f"its volume is on machine {ran}, which takes no pods or is excluded by the spec"
            return (ran, "") if not (alone and ran in taken) else ("", f"another {pod.role} is on {ran}")
        able = [m for m in self._o.machines if admits(spec, pod.role, m) and m.name not in pod.keeps_off]
        able = [m for m in able if claim.zone in ("", m.zone) and not (alone and m.name in taken)]
        if not able:
            return "", _no_machine(pod.role, claim.zone, alone)
        return min(able, key=lambda m: (taken.count(m.name), _rank(m))).name, ""


def _rank(machine: Machine) -> tuple[int, str]:
    return len(machine.name), machine.name


def _no_machine(role: Role, zone: str, alone: bool) -> str:
    where = f" in zone {zone}" if zone else ""
    free = f" without another {role}" if alone else ""
    return f"there is no machine{where}{free} that the spec admits; add a machine"


def _claim(action: CreateClaim, now_s: float, identity: Identity | None) -> Claim:
    metadata, spec = action.manifest["metadata"], action.manifest["spec"]
    notes, uid = metadata["annotations"], f"new-{action.name}"
    owners = metadata.get("ownerReferences") or ()
    return Claim(
        name=action.name,
        uid=uid,
        resource_version="",
        role=action.role,
        node_id=notes[naming.ANNOTATION_NODE_ID],
        cluster_id=notes[naming.ANNOTATION_CLUSTER_ID],
        serial=int(action.name.rpartition("-")[2]),
        zone=notes[naming.ANNOTATION_ZONE],
        phase="Pending",
        deleting=False,
        selected_machine="",
        requested_bytes=byte_count(str(spec["resources"]["requests"]["storage"])),
        created_s=now_s,
        owned=bool(owners),
        owner_uid=str(owners[0]["uid"]) if owners else "",
        noted_uid=uid,
        fork_id=identity.fork_id if identity is not None else "",
    )


def _pod(action: CreatePod, now_s: float) -> Pod:
    metadata = action.manifest["metadata"]
    notes = metadata["annotations"]
    return Pod(
        name=action.name,
        uid=f"new-{action.name}",
        resource_version="",
        role=action.role,
        node_id=notes[naming.ANNOTATION_NODE_ID],
        claim_uid=notes[naming.ANNOTATION_CLAIM_UID],
        machine="",
        ip="",
        phase="Pending",
        ready=False,
        deleting=False,
        created_s=now_s,
        spec_hash=notes[naming.ANNOTATION_HASH],
        keeps_off=tuple(m for m in notes.get(naming.ANNOTATION_KEEPS_OFF, "").split(",") if m),
        unready_since_s=now_s,
        owners=tuple(metadata["ownerReferences"]),
        parked=naming.LABEL_PARKED in metadata["labels"],
    )


def _patched(claim: Claim, patch: Json) -> Claim:
    metadata = patch.get("metadata") or {}
    notes = metadata.get("annotations") or {}
    if naming.ANNOTATION_CLAIM_UID in notes:
        claim = replace(
            claim,
            noted_uid=notes[naming.ANNOTATION_CLAIM_UID],
            fork_id=notes[naming.ANNOTATION_FORK_ID],
        )
    if naming.ANNOTATION_NODE_ID in notes:
        claim = replace(
            claim,
            labelled=True,
            identified=True,
            node_id=notes[naming.ANNOTATION_NODE_ID],
            cluster_id=notes[naming.ANNOTATION_CLUSTER_ID],
        )
    if naming.ANNOTATION_RETIRED in notes:
        claim = replace(claim, retired=True)
    if naming.ANNOTATION_RELEASED in notes:
        claim = replace(claim, released_s=float(notes[naming.ANNOTATION_RELEASED]))
    if "ownerReferences" in metadata:
        owners = metadata["ownerReferences"] or ()
        claim = replace(claim, owned=bool(owners), owner_uid=str(owners[0]["uid"]) if owners else "")
    if "spec" in patch:
        claim = replace(
            claim, requested_bytes=byte_count(str(patch["spec"]["resources"]["requests"]["storage"]))
        )
    return claim


def _table(action: CreateTable) -> Table:
    spec = action.spec
    return Table(
        action.table_id,
        action.name,
        "RUNNING",
        tuple(Column(c.name, c.type, c.nullable) for c in spec.columns),
        tuple(spec.primaryKey),
        tuple((tuple(h.columns), h.buckets) for h in spec.partitioning.hash),
        table_ranges(spec),
        spec.replicationFactor,
        tablets_of(spec),
        owner=spec.owner or "",
        comment=spec.comment or "",
        history_ms=history_ms(spec) or 0,
    )


def _altered(table: Table, action: AlterTable) -> Table:
    columns = list(table.columns)
    covered = list(table.range.covered) if table.range is not None else []
    for step in action.steps:
        match step:
            case AddRange():
                covered.append((step.start, step.end))
            case DropRange():
                covered.remove((step.start, step.end))
            case AddColumn():
                columns.append(Column(step.name, step.type, step.nullable))
            case DropColumn():
                columns = [c for c in columns if c.name != step.name]
            case RenameColumn():
                columns = [replace(c, name=step.new_name) if c.name == step.name else c for c in columns]
            case SetHistory():
                table = replace(table, history_ms=step.history_ms)
    ranges = replace(table.range, covered=tuple(sorted(covered))) if table.range is not None else None
    notes = dict(action.notes)
    owner, comment = notes.get("owner", table.owner), notes.get("comment", table.comment)
    return replace(table, columns=tuple(columns), range=ranges, owner=owner, comment=comment)
