"""Creates, alters and drops the tables of TabletGroups. Called by cluster_plan; pure.

Invariants: columns and ranges of a table are altered only for the TabletGroup that created it; the table's id
is its uid. A table that somebody else made is adopted if it equals what the TabletGroup asks for. From then
on its replication factor, owner, comment and history follow the TabletGroup. A table is dropped only for its
own TabletGroup, while that is being deleted and its spec says `deletionPolicy: Delete`. A TabletGroup that
breaks a rule changes nothing. If it has unknown fields that matter, no table is created.
"""

from __future__ import annotations

from collections.abc import Callable

from stele.model.amounts import plural
from stele.model.ranges import DropRange, RangeStep
from stele.model.steps import SetHistory, Step
from stele_operator.api.cluster import DeletionPolicy
from stele_operator.api.group import TabletGroupSpec
from stele_operator.plan.actions import (
    Action,
    AlterTable,
    CreateTable,
    DeleteTable,
    SetFinalizers,
    SetReplicationFactor,
)
from stele_operator.plan.fates import START_PATIENCE_S, Member, State
from stele_operator.plan.findings import OPERATOR_OLDER, Finding, Kind, overlooked
from stele_operator.plan.health import Health
from stele_operator.plan.naming import FINALIZER_TABLE
from stele_operator.plan.observation import GroupObject, Observation, Table
from stele_operator.plan.rules import (
    group_faults,
    history_steps,
    note_differences,
    other_differences,
    other_notes,
    table_differences,
    table_steps,
)

_KEEPS_DROPPED = 2
"""The first cluster version in which a dropped table can be recalled."""
_RETAINED = "deletionPolicy is Retain: its table stays"


def table_of(o: Observation, group: GroupObject) -> Table | None:
    """The table of a TabletGroup: the one created under its uid, else the one of its name; None if there is
    none.
    """
    if o.catalog is None:
        return None
    own = o.catalog.table(group.own_table_id)
    if own is not None:
        return own
    if _rival(o, group) is not None:
        return None
    return o.catalog.table_named(group.table_name)


def _owned(o: Observation, group: GroupObject) -> Table | None:
    """The table that is dropped with a TabletGroup; None if there is none. It was created under the group's
    uid. Or the group's status records it, and it equals what the group asks for.

    The name alone does not make a table its own: another TabletGroup may have retained it a moment ago.
    """
    here = o.identity is not None and group.recorded_cluster == o.identity.cluster_id
    for table_id in (group.own_table_id, group.recorded_table if here else ""):
        table = o.catalog.table(table_id) if o.catalog is not None else None
        if table is not None and o.maker(table_id) in (None, group) and not _foreign(o, group, table):
            return table
    return None


def _is_recorded(o: Observation, group: GroupObject, table: Table) -> bool:
    """Whether the status of the TabletGroup names the table as its own."""
    here = o.identity is not None and group.recorded_cluster == o.identity.cluster_id
    return here and group.recorded_table == table.table_id


def _differences(o: Observation, group: GroupObject, spec: TabletGroupSpec, table: Table) -> tuple[str, ...]:
    """How the table differs from its TabletGroup in ways that the operator does not change.

    Replication factor, owner, comment and history are among these only until the table is the TabletGroup's
    own.
    """
    found = table_differences(spec, table)
    own = table.table_id == group.own_table_id or _is_recorded(o, group, table)
    if own:
        return found
    if spec.replicationFactor != table.replication_factor:
        found += (f"the table has replication factor {table.replication_factor}",)
    return found + note_differences(spec, table)


def _foreign(o: Observation, group: GroupObject, table: Table) -> bool:
    """Whether somebody else created the table, and it differs from the TabletGroup's definition. Such a table
    is left unchanged.

    False if the spec cannot be read.
    """
    own = table.table_id == group.own_table_id
    return not own and group.spec is not None and bool(_differences(o, group, group.spec, table))


def may_record(o: Observation, group: GroupObject, table: Table) -> bool:
    """Whether a TabletGroup's status may record the table as its own. A foreign table may not be recorded.

    A recorded table stays recorded. Otherwise a table that somebody else dropped would be created again.
    """
    return not _foreign(o, group, table) or _is_recorded(o, group, table)


def _was_dropped(o: Observation, group: GroupObject) -> bool:
    """Whether its table existed in this cluster and was dropped."""
    here = o.identity is not None and group.recorded_cluster == o.identity.cluster_id
    return here and bool(group.recorded_table)


def plan_tables(
    o: Observation, everyone: tuple[Member, ...], health: Health
) -> tuple[list[Action], list[Finding]]:
    """Actions and findings for every TabletGroup of the cluster, oldest first."""
    actions: list[Action] = []
    findings: list[Finding] = []
    for group in sorted(o.groups, key=lambda g: (g.created, g.name)):
        if group.deleting:
            actions.extend(_leaving(o, group, findings))
            continue
        if (invalid := _invalid(group)) is not None:
            findings.append(invalid)
            continue
        if o.cluster.deleting:
            message = f"TabletCluster {o.cluster.name} is being deleted"
            findings.append(Finding(Kind.NOT_READY, "ClusterGoing", message, group.name))
            continue
        if group.unknown:
            findings.append(Finding(Kind.REMARK, OPERATOR_OLDER, overlooked(group.unknown), group.name))
        actions.extend(_finalizer(group))
        actions.extend(_staying(o, group, everyone, health, findings))
    return actions, findings


def _finalizer(group: GroupObject) -> list[Action]:
    wanted = group.spec is not None and group.spec.deletionPolicy is DeletionPolicy.DELETE
    if wanted == (FINALIZER_TABLE in group.finalizers):
        return []
    others = tuple(f for f in group.finalizers if f != FINALIZER_TABLE)
    reason = (
        "deletionPolicy is Delete: when this TabletGroup is deleted, the finalizer keeps it until its table is dropped"
        if wanted
        else "deletionPolicy is Retain: when this TabletGroup is deleted, its table stays"
    )
    finalizers = (*others, FINALIZER_TABLE) if wanted else others
    return [SetFinalizers(reason, group.name, group.uid, group.resource_version, finalizers)]


def let_go(group: GroupObject, reason: str) -> list[Action]:
    """Remove the finalizer of a TabletGroup that is being deleted, so that Kubernetes can delete it."""
    if FINALIZER_TABLE not in group.finalizers:
        return []
    others = tuple(f for f in group.finalizers if f != FINALIZER_TABLE)
    return [SetFinalizers(reason, group.name, group.uid, group.resource_version, others)]


def plan_letting_go(o: Observation, why: str) -> tuple[list[Action], list[Finding]]:
    """Handle TabletGroups that are being deleted, in a cluster that the operator must not change.

    TabletGroups that retain their tables lose the finalizer. The others get a message that says why they
    wait.
    """
    actions: list[Action] = []
    findings: list[Finding] = []
    for group in o.groups:
        if not group.deleting or FINALIZER_TABLE not in group.finalizers:
            continue
        if _retains(group):
            actions.extend(let_go(group, _RETAINED))
            continue
        message = f"the table is not dropped while {why}; to keep the table, set deletionPolicy to Retain"
        findings.append(Finding(Kind.NOT_READY, "ClusterNotKept", message, group.name))
    return actions, findings


def plan_sleeping(o: Observation, reason: str, message: str) -> tuple[list[Action], list[Finding]]:
    """Actions and findings for the TabletGroups of a cluster that hibernates or wakes. Each gets this reason
    and message, unless it is being deleted or breaks a rule.
    """
    actions, findings = plan_letting_go(o, message)
    for group in (g for g in o.groups if not g.deleting):
        findings.append(_invalid(group) or Finding(Kind.NOT_READY, reason, message, group.name))
    return actions, findings


def _invalid(group: GroupObject) -> Finding | None:
    """A finding about the rules that the spec of a TabletGroup breaks; None if it breaks none."""
    faults = group.faults or (group_faults(group.spec) if group.spec else ("spec is missing",))
    return Finding(Kind.STALLED, "InvalidSpec", "; ".join(faults), group.name) if faults else None


def _retains(group: GroupObject) -> bool:
    """Whether the present spec retains the table. The finalizer only shows the policy of an earlier pass."""
    return group.spec is not None and group.spec.deletionPolicy is DeletionPolicy.RETAIN


def _leaving(o: Observation, group: GroupObject, findings: list[Finding]) -> list[Action]:
    if FINALIZER_TABLE not in group.finalizers:
        return []
    if o.cluster.deleting:
        return let_go(
            group,
            f"TabletCluster {o.cluster.name} is being deleted; the table goes with it, or with its volumes",
        )
    if o.identity is not None and not o.identity.formed:
        return let_go(group, "the cluster has not formed, so there is no table yet")
    if _retains(group):
        return let_go(group, _RETAINED)
    if o.catalog is None:
        message = f"the table cannot be dropped while no master leads: {o.catalog_problem}"
        findings.append(Finding(Kind.NOT_READY, "MastersUnavailable", message, group.name))
        return []
    table = _owned(o, group)
    if table is None:
        return let_go(group, "its table is gone; another table that has the name now is kept")
    if group.spec is None:
        message = (
            f"table {table.name} is kept, because this operator cannot read the spec, which may say Retain: "
            f"{'; '.join(group.faults)}. Correct the spec, or upgrade the operator. To keep the table, remove the finalizer {FINALIZER_TABLE}"
        )
        findings.append(Finding(Kind.STALLED, "InvalidSpec", message, group.name))
        return []
    reason = "the TabletGroup was deleted and its deletionPolicy is Delete"
    kept = o.catalog.finalized >= _KEEPS_DROPPED
    if kept:
        reason += f"; for a time `stele table recall {table.table_id[:8]}` brings the table back"
    return [DeleteTable(reason, group.name, table.table_id, table.name, kept)]


def _rival(o: Observation, group: GroupObject) -> GroupObject | None:
    """Another TabletGroup whose table has the same name; None if there is none. It made the table, or it is
    older and so will make it.
    """
    others = [g for g in o.groups_of_table(group.table_name) if g.uid != group.uid]
    makers = [g for g in others if o.catalog is not None and o.catalog.table(g.own_table_id) is not None]
    # Creation times have whole seconds, so among two of the same second the names decide.
    older = [g for g in others if (g.created, g.name) < (group.created, group.name)]
    return next(iter(makers + older), None)


def _staying(
    o: Observation,
    group: GroupObject,
    everyone: tuple[Member, ...],
    health: Health,
    findings: list[Finding],
) -> list[Action]:
    spec, cluster = group.spec, o.cluster.spec

    def found(kind: Kind, reason: str, message: str) -> list[Action]:
        findings.append(Finding(kind, reason, message, group.name))
        return []

    if spec is None or cluster is None:
        return found(
            Kind.NOT_READY,
            "ClusterNotReady",
            f"the spec of TabletCluster {o.cluster.name} breaks a rule; its condition Stalled says which",
        )
    if o.catalog is None:
        return found(
            Kind.NOT_READY, "ClusterNotReady", f"no master of {o.cluster.name} leads yet: {o.catalog_problem}"
        )
    table = table_of(o, group)
    if table is not None:
        differences = _differences(o, group, spec, table)
        steps: tuple[Step | RangeStep, ...] = ()
        notes: tuple[tuple[str, str], ...] = ()
        if table.table_id == group.own_table_id:
            steps, faults = table_steps(spec, table)
            differences = (*faults, *other_differences(spec, table))
        steps, notes = (*steps, *history_steps(spec, table)), other_notes(spec, table)
        actions: list[Action] = []
        if table.state == "ALTERING":
            found(Kind.RECONCILING, "Altering", f"table {table.name}: its tablets take over a change")
        elif differences:
            found(
                Kind.STALLED,
                "TableDiffers",
                f"table {table.name} exists with another definition and is left unchanged: {'; '.join(differences)}",
            )
        elif steps or notes:
            actions = _alter(o, group, table, steps, notes, found)
        elif spec.replicationFactor != table.replication_factor:
            actions = _factor(o, group, spec, table, findings)
        counts = health.of(table.table_id).counts
        if counts.total == 0 or counts.unavailable:
            lost = counts.unavailable - counts.creating
            if lost:
                reason = "NoLeader"
                message = f"{lost} of {counts.total} tablets have no leader"
                message += f"; {counts.creating} others are still being created" if counts.creating else ""
            else:
                reason, served = "Creating", counts.total - counts.unavailable
                message = f"table {table.name}: {served} of {counts.total or 'its'} tablets serve so far; the others are being created"
            found(Kind.NOT_READY, reason, message)
        if counts.under_replicated:
            message = f"{counts.under_replicated} of {counts.total} tablets have lost a voter"
            found(Kind.DEGRADED, "VoterLost", message)
        if counts.growing:
            message = f"{counts.growing} of {counts.total} tablets get more replicas, for replicationFactor {table.replication_factor}"
            found(Kind.RECONCILING, "AddingReplicas", message)
        return actions
    if _was_dropped(o, group):
        return found(
            Kind.STALLED,
            "TableRemoved",
            f"somebody else dropped table {group.table_name}; `stele table recall` may bring it back. For a new table, delete this TabletGroup and create it again",
        )
    rival = _rival(o, group)
    if rival is not None:
        return found(
            Kind.STALLED,
            "NameTaken",
            f"table {group.table_name} belongs to TabletGroup {rival.name}; choose another tableName",
        )
    if group.unknown:
        message = f"the table is not created yet, because its definition could not be changed later: {overlooked(group.unknown)}"
        return found(Kind.NOT_READY, OPERATOR_OLDER, message)
    if spec.replicationFactor > cluster.nodes.replicas:
        return found(
            Kind.STALLED,
            "TooFewNodes",
            f"replicationFactor {spec.replicationFactor} needs as many nodes, but TabletCluster {o.cluster.name} has "
            f"nodes.replicas={cluster.nodes.replicas}; raise nodes.replicas, or lower replicationFactor",
        )
    waiting = [m.name for m in everyone if m.role == "node" and m.active and _may_still_start(o, m)]
    ready = sum(m.role == "node" and m.active and m.state is State.READY for m in everyone)
    if waiting or ready < spec.replicationFactor:
        message = (
            f"waiting for nodes {', '.join(waiting)} to start"
            if waiting
            else f"{ready} nodes are ready, but {spec.replicationFactor} are needed"
        )
        return found(Kind.NOT_READY, "NodesStarting", message)
    refused = o.refused.get(("TabletGroup", group.name))
    if refused is not None:
        message = f"{refused}; the table is not created: correct the spec or, if the field cannot change, delete the TabletGroup and create it again"
        found(Kind.STALLED, "Refused", message)
    else:
        found(Kind.NOT_READY, "Creating", f"table {group.table_name} is being created")
    reason = f"TabletGroup {group.name} asks for table {group.table_name}"
    return [CreateTable(reason, group.name, group.own_table_id, group.table_name, spec)]


def _factor(
    o: Observation, group: GroupObject, spec: TabletGroupSpec, table: Table, findings: list[Finding]
) -> list[Action]:
    """Set the table's replication factor to that of its TabletGroup, unless there are too few nodes."""
    wanted, cluster = spec.replicationFactor, o.cluster.spec
    kept = f"the table keeps replication factor {table.replication_factor}"
    if cluster is not None and wanted > max(cluster.nodes.replicas, table.replication_factor):
        message = (
            f"replicationFactor {wanted} needs as many nodes, but TabletCluster {o.cluster.name} has "
            f"nodes.replicas={cluster.nodes.replicas}; {kept}: raise nodes.replicas, or lower replicationFactor"
        )
        findings.append(Finding(Kind.STALLED, "TooFewNodes", message, group.name))
        return []
    refused = o.refused.get(("TabletGroup", group.name))
    if refused is not None:
        message = f"{refused}; {kept}: lower replicationFactor, or add nodes"
        findings.append(Finding(Kind.STALLED, "Refused", message, group.name))
    else:
        message = f"replicationFactor becomes {wanted}; it was {table.replication_factor}"
        findings.append(Finding(Kind.RECONCILING, "ReplicationFactor", message, group.name))
    reason = f"TabletGroup {group.name} asks for replicationFactor {wanted} of table {table.name}; it was {table.replication_factor}"
    return [SetReplicationFactor(reason, group.name, table.table_id, wanted)]


def _alter(
    o: Observation,
    group: GroupObject,
    table: Table,
    steps: tuple[Step | RangeStep, ...],
    notes: tuple[tuple[str, str], ...],
    found: Callable[[Kind, str, str], list[Action]],
) -> list[Action]:
    """Change the table to the columns, ranges, history and notes that its TabletGroup asks for: all of them,
    or none.
    """
    parts = ["columns or ranges"] * any(not isinstance(step, SetHistory) for step in steps)
    parts += ["history retention"] * any(isinstance(step, SetHistory) for step in steps)
    what = " and ".join([*parts, *(name for name, _ in notes)])
    if group.unknown:
        message = f"the table is not altered yet, because fields that the operator ignores may matter: {overlooked(group.unknown)}"
        return found(Kind.NOT_READY, OPERATOR_OLDER, message)
    refused = o.refused.get(("TabletGroup", group.name))
    if refused is not None:
        found(Kind.STALLED, "Refused", f"{refused}; the table is left unchanged: correct the {what}")
    else:
        gets = what.replace(" or ", " and ")
        found(Kind.RECONCILING, "Altering", f"table {table.name} gets the {gets} of the TabletGroup")
    dropped = sum(isinstance(s, DropRange) for s in steps)
    drops = f"; {plural(dropped, 'range')} dropped with all rows" if dropped else ""
    reason = f"TabletGroup {group.name} asks for other {what}{drops}"
    return [AlterTable(reason, group.name, table.table_id, table.name, steps, notes)]


def _may_still_start(o: Observation, member: Member) -> bool:
    """Whether to wait for this node before a table is created. Otherwise all tablets would be placed on the
    nodes that started first.
    """
    if member.state is State.STARTING:
        return member.pod is None or o.now_s - member.pod.created_s < START_PATIENCE_S
    pending_s = o.now_s - (
        member.pod.created_s if member.pod else member.claim.created_s if member.claim else 0.0
    )
    return (
        member.state is State.PENDING
        and pending_s < START_PATIENCE_S
        and not (member.pod and member.pod.unschedulable)
    )
