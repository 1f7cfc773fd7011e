"""Chooses the zone of a new member, and the machines that it must not use. Called by member_objects; pure.

Invariants: members of a role are spread over the zones as evenly as live machines allow. A member that never
ran uses no machine to which another member may return.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import assert_never

from stele_operator.api.affinity import FieldOperator, NodeOperator, NodeRequirement, NodeTerm
from stele_operator.api.cluster import MachineSpread, Masters, Nodes, TabletClusterSpec
from stele_operator.api.pods import TaintEffect, Toleration, TolerationOperator
from stele_operator.plan.fates import Member, State
from stele_operator.plan.observation import ROLES, Claim, Machine, Observation, Role, Taint

_WHOLE = re.compile("-?[0-9]{1,18}")


def zone_faults(o: Observation, spec: TabletClusterSpec) -> tuple[str, ...]:
    """A text for each zone of the spec without any machine; empty if machines cannot be read."""
    if o.machines is None:
        return ()
    known = sorted({m.zone for m in o.machines if m.zone})
    return tuple(
        f"zones names {zone}, but no machine is in that zone; add a machine there, or correct zones. Known zones: {', '.join(known) or 'none'}"
        for zone in spec.zones
        if zone not in known
    )


def selector_faults(o: Observation, spec: TabletClusterSpec) -> tuple[str, ...]:
    """A text for each role whose nodeSelector and affinity match no machine, or no machine in a zone of the
    spec.

    Empty if machines cannot be read. Machines that are down count. Taints are ignored, because admission
    webhooks may add tolerations to pods.
    """
    if o.machines is None:
        return ()
    faults = []
    for role in ROLES:
        asked = _asked(spec, role)
        there = {m.zone for m in o.machines if selects(spec, role, m)}
        known = {m.zone for m in o.machines}
        if asked and not there:
            faults.append(f"{asked}, which no machine matches; label machines, or correct the spec")
        elif asked:
            faults += [
                f"{asked}, which no machine in zone {zone} matches; label machines there, or correct the spec"
                for zone in spec.zones
                if zone in known - there
            ]
    return tuple(faults)


def _asked(spec: TabletClusterSpec, role: Role) -> str:
    """In words, which machines a role asks for, and by which fields; "" if any machine will do."""
    part, fields, wanted = part_of(spec, role), [], []
    if part.nodeSelector:
        fields.append(f"{role}s.nodeSelector")
        wanted.append(", ".join(f"{k}={v}" for k, v in sorted(part.nodeSelector.items())))
    if terms := _terms(part):
        fields.append(f"{role}s.affinity")
        wanted.append(" or ".join(map(_in_words, terms)))
    return (
        f"{' and '.join(fields)} {'asks' if len(fields) == 1 else 'ask'} for {', and for '.join(wanted)}"
        if fields
        else ""
    )


def _in_words(term: NodeTerm) -> str:
    requirements = (*(term.matchExpressions or ()), *(term.matchFields or ()))
    return " and ".join(" ".join((r.key, r.operator, *(r.values or ()))) for r in requirements) or "nothing"


def misplaced(
    o: Observation, spec: TabletClusterSpec, everyone: Iterable[Member]
) -> tuple[tuple[str, str], ...]:
    """Members on machines that the present spec would not choose. Each with its name and a text that says
    where it is. They are not moved.
    """
    faults = []
    first_on: dict[tuple[Role, str], str] = {}
    for member in everyone:
        if member.claim is None or not member.active:
            continue
        machine = o.machine(member.machine)
        zone = member.claim.zone or (machine.zone if machine is not None else "")
        if spec.zones and zone and zone not in spec.zones:
            faults.append((member.name, f"in zone {zone}"))
        if member.pod is None or not member.pod.machine:
            continue
        if machine is not None and (field := _leaves_out(part_of(spec, member.role), machine)):
            where = f"on machine {machine.name}, which {member.role}s.{field} leaves out"
            faults.append((member.name, where))
        if not never_share(spec, member.role):
            continue
        other = first_on.setdefault((member.role, member.pod.machine), member.name)
        if other != member.name:
            faults.append((member.name, f"on machine {member.pod.machine}, as {other}"))
    return tuple(faults)


def choose_zones(
    o: Observation,
    spec: TabletClusterSpec,
    role: Role,
    count: int,
    staying: Iterable[Claim],
    everyone: Collection[Member],
) -> list[str]:
    """A zone for each of `count` new members; "" for each if the spec names no zones.

    `staying`: claims of the members that stay. A member that is being retired holds no zone; otherwise its
    replacement would go to a zone that already has a member. A machine to which one of `everyone` may return
    offers no room (`keeps_off`).
    """
    if not spec.zones:
        return [""] * count
    taken = dict.fromkeys(spec.zones, 0)
    room = _room(o, spec, role, everyone)
    for claim in staying:
        if claim.role == role and claim.zone in taken:
            taken[claim.zone] += 1
    chosen = []
    for _ in range(count):
        able = [z for z in spec.zones if room is None or room.get(z, 0) > 0] or spec.zones
        zone = min(able, key=lambda z: (taken[z], spec.zones.index(z)))
        taken[zone] += 1
        if room is not None:
            room[zone] = room.get(zone, 0) - 1
        chosen.append(zone)
    return chosen


def _room(
    o: Observation, spec: TabletClusterSpec, role: Role, everyone: Collection[Member]
) -> dict[str, int] | None:
    """How many members of the role the live machines of each zone can take; None if machines cannot be read."""
    if o.machines is None:
        return None
    alone = never_share(spec, role)
    occupied = {p.machine for p in o.pods if p.role == role} if alone else set()
    if alone:
        occupied |= {m.machine for m in everyone if m.role == role and _may_come_back(m)}
    room: dict[str, int] = {}
    for machine in o.machines:
        if machine.name not in occupied and admits(spec, role, machine):
            room[machine.zone] = room.get(machine.zone, 0) + (1 if alone else 100)
    return room


def admits(spec: TabletClusterSpec, role: Role, machine: Machine) -> bool:
    """Whether a new pod of the role could run on the machine, apart from other pods there."""
    tolerations = part_of(spec, role).tolerations or ()
    barred = (not any(_tolerates(t, taint) for t in tolerations) for taint in machine.taints if _bars(taint))
    return machine.ready and machine.schedulable and selects(spec, role, machine) and not any(barred)


def selects(spec: TabletClusterSpec, role: Role, machine: Machine) -> bool:
    """Whether the machine matches the role's nodeSelector and affinity."""
    return not _leaves_out(part_of(spec, role), machine)


def _leaves_out(part: Masters | Nodes, machine: Machine) -> str:
    """The field that excludes the machine for pods of a role; "" if none does."""
    if not (part.nodeSelector or {}).items() <= machine.labels.items():
        return "nodeSelector"
    terms = _terms(part)
    return "affinity" if terms and not any(_meets(machine, term) for term in terms) else ""


def _terms(part: Masters | Nodes) -> list[NodeTerm]:
    """The affinity terms, of which a machine must match one; empty if any machine will do."""
    nodes = part.affinity.nodeAffinity if part.affinity is not None else None
    required = nodes.requiredDuringSchedulingIgnoredDuringExecution if nodes is not None else None
    return required.nodeSelectorTerms if required is not None else []


def _meets(machine: Machine, term: NodeTerm) -> bool:
    """Whether the machine matches a term as Kubernetes' scheduler decides it. An empty term matches no
    machine.
    """
    labels, fields = term.matchExpressions or (), term.matchFields or ()
    named = ((machine.name in r.values) is (r.operator is FieldOperator.IN) for r in fields)
    return bool(labels or fields) and all(_holds(r, machine.labels) for r in labels) and all(named)


def _holds(requirement: NodeRequirement, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(requirement.key), requirement.values or []
    match requirement.operator:
        case NodeOperator.IN:
            return value in values
        case NodeOperator.NOT_IN:
            return value not in values
        case NodeOperator.EXISTS:
            return value is not None
        case NodeOperator.DOES_NOT_EXIST:
            return value is None
        case NodeOperator.GT | NodeOperator.LT:
            numbers = [value or "", *values]
            if len(numbers) != 2 or not all(map(_WHOLE.fullmatch, numbers)):
                return False
            more = int(numbers[0]) - int(numbers[1])
            return more > 0 if requirement.operator is NodeOperator.GT else more < 0
        case _:
            assert_never(requirement.operator)


def _bars(taint: Taint) -> bool:
    return taint.effect in (TaintEffect.NO_SCHEDULE, TaintEffect.NO_EXECUTE)


def _tolerates(toleration: Toleration, taint: Taint) -> bool:
    same = toleration.operator is TolerationOperator.EXISTS or (toleration.value or "") == taint.value
    return same and toleration.key == taint.key and toleration.effect in (None, taint.effect)


def part_of(spec: TabletClusterSpec, role: Role) -> Masters | Nodes:
    """The part of the spec for a role."""
    return spec.masters if role == "master" else spec.nodes


def never_share(spec: TabletClusterSpec, role: Role) -> bool:
    """Whether two members of the role must never be on one machine."""
    return role == "master" or spec.nodes.machineSpread is MachineSpread.REQUIRED


def keeps_off(
    o: Observation, spec: TabletClusterSpec, member: Member, everyone: Iterable[Member]
) -> tuple[str, ...]:
    """Names of machines that are reserved for other members of its role. Empty for a member that ran before.

    Without this, a waiting pod would get a machine the moment that another member's pod there is deleted,
    before that pod is created again. But the other member's volume may be usable only on that machine.
    """
    if not never_share(spec, member.role) or member.claim is None or _may_have_run(o, member, member.claim):
        return ()
    others = (m for m in everyone if m.role == member.role and m.name != member.name)
    return tuple(sorted({m.machine for m in others if m.machine and _may_come_back(m)}))


def _may_have_run(o: Observation, member: Member, claim: Claim) -> bool:
    """Whether the member may have run. The masters know for certain; while they cannot be asked, a bound
    volume counts as proof.
    """
    return member.formed or (o.catalog is None and claim.phase == "Bound")


def _may_come_back(member: Member) -> bool:
    claim = member.claim
    has_volume = claim is not None and claim.phase == "Bound" and not claim.deleting
    return has_volume and member.state is not State.RETIRED
