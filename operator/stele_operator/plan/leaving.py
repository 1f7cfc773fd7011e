"""Decides which nodes leave and which are parked, by the spec: scale in, nodes.retire, nodes.park. Called by
cluster_plan; pure.

The driver gets these nodes in its Policy. It drains a node that leaves, and retires the node once no tablet
names it. Then the pod and claim are deleted like those of any retired member (member_objects.py). Until a
node is retired, a changed spec takes it back.

Invariants: the same nodes leave from pass to pass, whatever their states become. Without them, as many nodes
are ready as the spec asks for. A node begins to leave only if the others can take its replicas. A node is
parked only while fewer than `budget.maxUnavailable` are away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from stele.driver.feasible import absence, drain_faults
from stele.driver.nodes import ADMINISTRATOR, DRIVER
from stele.driver.policy import Policy
from stele.driver.view import NodeState, Wanted
from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.plan import naming
from stele_operator.plan.budgets import some
from stele_operator.plan.fates import Member, State
from stele_operator.plan.findings import PARK_REFUSED, PARK_WAITS, Finding, Kind
from stele_operator.plan.observation import Observation
from stele_operator.plan.together import away_nodes


@dataclass(frozen=True, slots=True)
class Leaving:
    """The nodes that the policy retires and parks, with reasons by node id. `findings`: what users should
    know about them.
    """

    retiring: Mapping[str, str]
    parked: Mapping[str, str]
    findings: tuple[Finding, ...] = ()
    first: str = ""
    """Why no pod may be made again now: nodes leave, or are parked from this pass on. "" if there are none."""


def leaves(m: Member) -> bool:
    """Whether the driver drains the member to retire it. The member can still be taken back."""
    return (
        m.node is not None
        and m.node.state is NodeState.DRAINING
        and m.node.asked is Wanted.RETIRED
        and m.node.wanted_by == DRIVER
    )


def staying_nodes(spec: TabletClusterSpec, everyone: Sequence[Member]) -> list[Member]:
    """Nodes that may make up the spec's number: those in service, and those that leave but can be taken back.
    Nodes that nodes.retire names are left out.
    """
    nodes = [m for m in everyone if m.role == "node" and m.name not in spec.nodes.retire]
    return [m for m in nodes if m.active or (leaves(m) and m.state is State.DRAINING)]


def staying_masters(everyone: Sequence[Member]) -> list[Member]:
    """Masters that may make up the spec's number: those in service, and those that leave but can be taken
    back.
    """
    masters = (m for m in everyone if m.role == "master")
    return [m for m in masters if m.active or (leaves(m) and m.state is State.DRAINING)]


def plan_leaving(
    o: Observation,
    spec: TabletClusterSpec,
    everyone: Sequence[Member],
    policy: Policy,
    *,
    hold: bool,
) -> Leaving:
    """The nodes to retire and to park. With `hold`, because too many nodes are lost, no node begins to leave."""
    if o.catalog is None:
        return Leaving({}, {})
    wanted, findings = _scale_in(spec, everyone)
    for m in everyone:
        if m.role == "node" and m.name in spec.nodes.retire and m.state is not State.RETIRED:
            wanted[m.node_id] = "nodes.retire names it"
    under_way = {m.node_id for m in everyone if leaves(m)}
    fresh = {node_id for node_id in wanted if node_id not in under_way}
    names = {m.node_id: m.name for m in everyone}
    faults: tuple[str, ...] = ()
    if fresh and not hold:
        faults = (*drain_faults(o.catalog.view, policy, wanted), *_emptied(spec, everyone, fresh))
    if faults:
        who = some(sorted(names[n] for n in fresh))
        findings.append(
            Finding(Kind.STALLED, "DrainRefused", f"{who} cannot be drained: {'; '.join(faults)}")
        )
    retiring = {n: why for n, why in wanted.items() if n in under_way or not (faults or hold)}
    findings += _beginning(retiring, under_way, names)
    findings += _overruled(everyone, wanted)
    parked, more = _parked(o, spec, everyone, policy)
    first = _first(everyone, retiring, parked)
    return Leaving(retiring, parked, (*findings, *more, *_unknown(o, spec)), first)


def _first(everyone: Sequence[Member], retiring: Mapping[str, str], parked: Mapping[str, str]) -> str:
    going = [m.name for m in everyone if m.node_id in retiring and m.state is not State.RETIRED]
    if going:
        return f"{some(going)} must leave first"
    fresh = [m.name for m in everyone if m.node_id in parked and m.node is not None and not m.node.parked]
    return f"{some(fresh)} must be parked first" if fresh else ""


def _scale_in(spec: TabletClusterSpec, everyone: Sequence[Member]) -> tuple[dict[str, str], list[Finding]]:
    """Nodes beyond the spec's number that leave: the reason by node id, and findings."""
    staying = staying_nodes(spec, everyone)
    surplus = len(staying) - spec.nodes.replicas
    if surplus <= 0:
        return {}, []
    why = f"nodes.replicas is {spec.nodes.replicas}"
    going = [m for m in staying if leaves(m)]
    going = sorted(going, key=_serial, reverse=True)[:surplus]
    for _ in range(surplus - len(going)):
        victim = _next_victim([m for m in staying if m not in going])
        if victim is None:
            break
        going.append(victim)
    left = [m for m in staying if m not in going]
    ready = sum(m.state is State.READY for m in left)
    if ready >= spec.nodes.replicas:
        return {m.node_id: why for m in going}, []
    begun = {m.node_id: why for m in going if leaves(m)}
    waiting = [m for m in going if not leaves(m)]
    if not waiting:
        return begun, []
    who = some([m.name for m in waiting])
    message = f"{why}: {who} will be drained, but only {ready} of the {spec.nodes.replicas} nodes that stay are ready; the drain waits for them"
    return begun, [Finding(Kind.RECONCILING, "ScaleInWaits", message)]


def _next_victim(nodes: Sequence[Member]) -> Member | None:
    """The next node to leave; None if none may. Prefer a node that holds nothing, then one that is not ready,
    then one in the zone with the most nodes, then the newest. Never choose one for which an administrator
    wants a state.
    """
    zones = Counter(_zone(m) for m in nodes)
    free = [m for m in nodes if m.node is None or m.node.wanted_by != ADMINISTRATOR]
    return max(
        free,
        key=lambda m: (
            m.node is None or not m.node.replicas,
            m.state is not State.READY,
            zones[_zone(m)],
            _serial(m),
        ),
        default=None,
    )


def _zone(m: Member) -> str:
    return (m.claim.zone if m.claim else "") or (m.node.zone if m.node else "")


def _serial(m: Member) -> int:
    return m.claim.serial if m.claim is not None else -1


def _emptied(spec: TabletClusterSpec, everyone: Sequence[Member], fresh: Collection[str]) -> tuple[str, ...]:
    """Why nodes that nodes.retire names must not begin to leave: a zone of the spec would have no node left,
    while another zone has several.
    """
    left = Counter(_zone(m) for m in staying_nodes(spec, everyone) if not leaves(m))
    last: dict[str, list[str]] = {}
    for m in everyone:
        zone = _zone(m)
        if m.node_id in fresh and m.name in spec.nodes.retire and zone in spec.zones and not left[zone]:
            last.setdefault(zone, []).append(m.name)
    if max(left.values(), default=0) < 2:
        return ()
    return tuple(
        f"zone {zone} would have no node without {some(sorted(names))}; name nodes of other zones in nodes.retire, or "
        f"remove {zone} from zones"
        for zone, names in sorted(last.items())
    )


def _beginning(retiring: Mapping[str, str], under_way: set[str], names: Mapping[str, str]) -> list[Finding]:
    """Findings about nodes that begin to leave with this pass, one for each reason. Users see the names
    before anything is done.
    """
    by_reason: dict[str, list[str]] = {}
    for node_id, why in retiring.items():
        if node_id not in under_way:
            by_reason.setdefault(why, []).append(names[node_id])
    return [
        Finding(
            Kind.RECONCILING,
            "NodesLeaving",
            f"{some(sorted(who))} will be drained and retired, because {why}; change that back to keep them",
        )
        for why, who in by_reason.items()
    ]


def _overruled(everyone: Sequence[Member], wanted: Mapping[str, str]) -> list[Finding]:
    """A finding about nodes that the spec wants to leave, although an administrator asked for another state."""
    names = [
        m.name
        for m in everyone
        if m.node_id in wanted
        and m.node is not None
        and m.node.wanted_by == ADMINISTRATOR
        and m.node.asked is not Wanted.RETIRED
    ]
    if not names:
        return []
    message = (
        f"nodes.retire names {some(names)}, but an administrator asked for another state (`stele node "
        "list`); the operator waits for `stele node undrain` or `unpark`"
    )
    return [Finding(Kind.STALLED, "AskedByHand", message)]


def _parked(
    o: Observation, spec: TabletClusterSpec, everyone: Sequence[Member], policy: Policy
) -> tuple[dict[str, str], list[Finding]]:
    """Nodes that nodes.park names: the reason by node id, and findings. A node is left out if too many would
    be away, or if tablets would stop without it.
    """
    named = [
        m for m in everyone if m.role == "node" and m.name in spec.nodes.park and m.state is not State.RETIRED
    ]
    why = "nodes.park names it"
    parked = {m.node_id: why for m in named if m.node is not None and m.node.parked}
    fresh = [m for m in named if m.node is not None and m.node_id not in parked]
    if not fresh or o.catalog is None:
        return parked, []
    gone = away_nodes(o, everyone)
    others = [m for m in gone if m not in fresh]
    here = [m for m in fresh if m not in gone]  # whoever is away in any case takes no place from others
    fresh = [m for m in fresh if m in gone]
    place = max(0, spec.budget.maxUnavailable - len(others) - len(fresh))
    fresh += here[:place]
    findings = [_no_place(m, [*others, *fresh], spec) for m in here[place:]]
    absent = absence(o.catalog.view, policy, {m.node_id for m in (*others, *fresh)}) if fresh else None
    if absent is not None and absent.faults:
        who = some([m.name for m in fresh])
        message = f"{who} cannot be parked: {'; '.join(absent.faults)}"
        return parked, [Finding(Kind.STALLED, PARK_REFUSED, message), *findings]
    return {**parked, **{m.node_id: why for m in fresh}}, findings


def _no_place(m: Member, away: Sequence[Member], spec: TabletClusterSpec) -> Finding:
    """A finding that says why a node is not parked yet: as many nodes are away as may be. If all of those are
    parked, a person must decide.
    """
    most = spec.budget.maxUnavailable
    who = some([a.name for a in away])
    if all(a.name in spec.nodes.park for a in away):
        message = (
            f"{m.name} cannot be parked: {who} {'is' if len(away) == 1 else 'are'} parked, and budget.maxUnavailable is "
            f"{most}; raise budget.maxUnavailable, or remove a name from nodes.park"
        )
        return Finding(Kind.STALLED, PARK_REFUSED, message, member=m.name)
    message = f"{m.name} waits to be parked: {who} must be back first, since budget.maxUnavailable is {most}"
    return Finding(Kind.RECONCILING, PARK_WAITS, message, member=m.name)


def _unknown(o: Observation, spec: TabletClusterSpec) -> list[Finding]:
    """Findings about names in nodes.retire and nodes.park that no node of this cluster ever had."""
    used = range(o.identity.next_serial["node"]) if o.identity is not None else range(0)
    known = {naming.member_name(o.cluster.name, "node", n) for n in used}
    found = []
    for field, listed in (("retire", spec.nodes.retire), ("park", spec.nodes.park)):
        wrong = [name for name in listed if name not in known]
        if wrong:
            message = (
                f"nodes.{field} names {some(wrong)}, and no node of this cluster has that name; status.members lists the "
                "names"
            )
            found.append(Finding(Kind.STALLED, "UnknownNode", message))
    return found
