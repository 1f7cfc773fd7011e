"""Plans one pass: from an observation to actions, findings and the time until the next pass. Called by
reconcile and tests.

Pure. Invariants: an unknown object never counts as gone: a claim or table that a list lacks is neither
released nor dropped. If the spec breaks a rule, only actions that keep volumes and tables are planned; faults
are found all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from stele.driver.policy import TIME_MAX_MS, Policy, StandingPolicy
from stele.driver.view import Holder
from stele.model.cluster_version import RELEASES
from stele_operator.api.scalars import RATE_MIN, bytes_per_second, seconds
from stele_operator.plan import (
    counting,
    diagnosis,
    formation,
    hibernation,
    holder,
    member_objects,
    rolling,
    tables,
)
from stele_operator.plan.actions import (
    Action,
    CreateTable,
    DeleteObject,
    FinalizeVersion,
    GrowClaim,
    MarkPod,
    PatchObject,
    RollPod,
    SetDriverPolicy,
    SetMasterCount,
    SetReplicationFactor,
)
from stele_operator.plan.budgets import Budget, plan_budgets, some
from stele_operator.plan.compared import OpenCopy, open_copies
from stele_operator.plan.fates import Member, State, members
from stele_operator.plan.findings import OPERATOR_OLDER, Finding, Kind, overlooked
from stele_operator.plan.health import Health, TabletCounts, lost_in_use, patience_s, tablet_health
from stele_operator.plan.leaving import plan_leaving
from stele_operator.plan.majorities import find_lost_majorities
from stele_operator.plan.observation import MASTERS_REFUSED, Observation
from stele_operator.plan.ownership import with_owners
from stele_operator.plan.rules import cluster_faults
from stele_operator.plan.surplus import unneeded

QUIET_S = 30.0
BUSY_S = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The result of planning. `policy`: what the driver may do; None if no healing may run. `wait_s`: seconds
    until the next pass, unless something wakes the operator earlier. `budgets`: the disruption budgets to
    write; unchanged ones are left out.
    """

    actions: tuple[Action, ...]
    findings: tuple[Finding, ...]
    members: tuple[Member, ...]
    health: Health
    policy: Policy | None
    wait_s: float
    budgets: tuple[Budget, ...] = ()
    copies: tuple[OpenCopy, ...] = ()
    """New replicas that differ from another voter, or wait to be compared."""
    _by_group: Mapping[str, Sequence[Finding]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_group: dict[str, list[Finding]] = {}
        for finding in self.findings:
            by_group.setdefault(finding.group, []).append(finding)
        object.__setattr__(self, "_by_group", by_group)

    def about(self, group: str) -> Sequence[Finding]:
        """Findings about the TabletGroup of this name. With "", findings about the cluster itself."""
        return self._by_group.get(group, ())

    @property
    def tablets(self) -> TabletCounts:
        """The numbers of tablets of all tables."""
        return self.health.counts


def make_plan(o: Observation) -> Plan:
    """Plan the next pass: what to do, and why."""
    return replace(_planned(o), copies=open_copies(o))


def _planned(o: Observation) -> Plan:
    o = with_owners(o)
    everyone = members(o)
    health = tablet_health(o)
    spec = o.cluster.spec
    retaining = member_objects.plan_retaining(o, spec, everyone) if spec is not None else ()
    if o.cluster.deleting:
        actions, findings = tables.plan_tables(o, everyone, health)
        return Plan((*retaining, *actions), tuple(findings), everyone, health, None, QUIET_S)
    faults = o.cluster.faults or cluster_faults(o)
    if spec is None or faults:
        why = Finding(Kind.STALLED, "InvalidSpec", "; ".join(faults))
        going, waiting = tables.plan_letting_go(
            o, f"the spec of TabletCluster {o.cluster.name} breaks a rule"
        )
        found = (*waiting, *_held(o, why, everyone, health))
        return Plan((*retaining, *going), found, everyone, health, None, QUIET_S)
    if spec.paused:
        why = Finding(
            Kind.RECONCILING, "Paused", "spec.paused is true: nothing is created, changed or healed"
        )
        going, waiting = tables.plan_letting_go(o, f"TabletCluster {o.cluster.name} is paused")
        found = (*waiting, *_held(o, why, everyone, health))
        actions = [*retaining, *going, *_standing(o, None)]
        return Plan(tuple(actions), found, everyone, health, None, QUIET_S)

    unborn = hibernation.plan_unborn(o, spec)
    if unborn is not None:
        return Plan((*retaining, *unborn.actions), unborn.findings, everyone, health, None, QUIET_S)
    identity, actions, findings = formation.plan_identity(o, spec)
    if identity is None:
        return Plan(tuple(actions), tuple(findings), everyone, health, None, BUSY_S)
    budgets = plan_budgets(o, spec, everyone)
    step = hibernation.plan_hibernation(o, spec, identity, everyone, budgets)
    if step is not None:
        held = f"TabletCluster {o.cluster.namespace}/{o.cluster.name} hibernates, or wakes and waits for its members"
        names = holder.holders(everyone, step.findings, None)
        actions = [
            *retaining,
            *_standing(o, None, held, holder.for_catalog(o, everyone, names, ())),
            *step.actions,
        ]
        found = (*step.findings, *find_lost_majorities(o, everyone), *_older(o))
        wait_s = QUIET_S if step.at_rest else BUSY_S
        shown = budgets if step.keeps_budgets else ()
        return Plan(tuple(actions), found, everyone, health, None, wait_s, shown)
    count = counting.plan_count(o, spec, identity, everyone, rolls=rolling.wants_roll(o, spec, everyone))
    steps: list[tuple[list[Action], list[Finding]]] = [
        (member_objects.plan_services(o, budgets), []),
        formation.plan_formation(o, identity),
        (list(count.actions), list(count.findings)),
        member_objects.plan_members(o, spec, identity, everyone, count),
        tables.plan_tables(o, everyone, health),
    ]
    for more_actions, more_findings in steps:
        actions.extend(more_actions)
        findings.extend(more_findings)
    findings += [*_older(o), *hibernation.find_waiting(spec, everyone)]
    too_many = _too_many(o, everyone)
    rolls: list[Action] = []
    policy = _policy(o, everyone, bool(too_many), count.pods)
    if policy is not None:
        leaving = plan_leaving(o, spec, everyone, policy, hold=bool(too_many))
        policy = replace(policy, retiring=leaving.retiring, parked=leaving.parked)
        findings += leaving.findings
        hold = (
            count.changing
            or ("masters that are not needed leave first" if policy.unneeded else "")
            or leaving.first
        )
        rolls, more_findings = rolling.plan_roll(o, spec, everyone, hold=hold)
        findings += more_findings
    findings[:0] = [*find_lost_majorities(o, everyone), *too_many, *_too_many_masters(o, everyone)]
    # Who holds the budget is in the catalog before anything is taken away.
    budget = holder.for_catalog(
        o,
        everyone,
        holder.holders(everyone, findings, policy),
        {a.name for a in rolls if isinstance(a, RollPod)},
    )
    actions += [*_standing(o, policy, budget=budget), *rolls]
    more_actions, more_findings = _finalizing(o)
    actions += more_actions
    findings += more_findings
    actions = _once(actions)
    wait_s = BUSY_S if count.changing else _wait_s(o, everyone, actions, health)
    return Plan(tuple(actions), tuple(findings), everyone, health, policy, wait_s, budgets)


def _once(actions: Sequence[Action]) -> list[Action]:
    """The actions, except marks on pods that another action deletes or changes. If such a pod stays, the next
    pass marks it.
    """
    of_pods = (a for a in actions if isinstance(a, PatchObject | DeleteObject) and a.kind == "Pod")
    touched = {a.name for a in of_pods if not isinstance(a, MarkPod)}
    return [a for a in actions if not (isinstance(a, MarkPod) and a.name in touched)]


def plan_keeping(o: Observation) -> tuple[Action, ...]:
    """Actions that keep the volumes of a TabletCluster that is being deleted under Retain. They do not wait
    for the masters.

    Kubernetes deletes the claims that the TabletCluster still owns as soon as it is gone. It deletes the pods
    in the meantime, masters included.
    """
    spec = o.cluster.spec
    if not o.cluster.deleting or spec is None:
        return ()
    o = with_owners(o)
    return member_objects.plan_retaining(o, spec, members(o))


def _held(o: Observation, why: Finding, everyone: tuple[Member, ...], health: Health) -> tuple[Finding, ...]:
    """Findings about a cluster that the operator must not change. `why` comes first.

    Faults are reported as usual; findings about progress are left out.
    """
    found = [
        why,
        *find_lost_majorities(o, everyone),
        *_too_many(o, everyone),
        *_too_many_masters(o, everyone),
        *diagnosis.find_members(o, everyone),
    ]
    actions, of_groups = tables.plan_tables(o, everyone, health)
    unmade = [a.group for a in actions if isinstance(a, CreateTable)]
    message = f"TabletCluster {o.cluster.name}: {why.message}"
    found += [f for f in of_groups if f.kind is not Kind.NOT_READY or f.group not in unmade]
    found += [Finding(Kind.NOT_READY, why.reason, message, group) for group in unmade]
    found += _older(o)
    return tuple(f for f in found if f is why or f.kind is not Kind.RECONCILING)


def _older(o: Observation) -> list[Finding]:
    return [Finding(Kind.REMARK, OPERATOR_OLDER, overlooked(o.cluster.unknown))] if o.cluster.unknown else []


def _too_many(o: Observation, everyone: tuple[Member, ...]) -> list[Finding]:
    spec, in_use = o.cluster.spec, lost_in_use(o, everyone)
    if spec is None or len(in_use) <= spec.healing.maxLostNodes:
        return []
    names = ", ".join(m.name for m in in_use)
    message = (
        f"{len(in_use)} nodes are lost at once ({names}), more than healing.maxLostNodes={spec.healing.maxLostNodes}; "
        "bring their machines back, or raise maxLostNodes to heal their tablets from the remaining replicas"
    )
    return [Finding(Kind.STALLED, "TooManyLost", message)]


def _too_many_masters(o: Observation, everyone: tuple[Member, ...]) -> list[Finding]:
    """Report that more masters are lost than maxLostNodes allows. The driver then leaves the catalog as it is (its
    `too_many_lost`). Tables still heal."""
    spec, in_use = o.cluster.spec, lost_in_use(o, everyone, "master")
    if spec is None or len(in_use) <= spec.healing.maxLostNodes:
        return []
    message = (
        f"{len(in_use)} masters are lost at once ({some([m.name for m in in_use])}), more than "
        f"healing.maxLostNodes={spec.healing.maxLostNodes}; the other masters keep the catalog, but no lost master is replaced "
        "or retired; bring their machines back, or raise maxLostNodes"
    )
    return [Finding(Kind.STALLED, "TooManyLost", message)]


def _policy(o: Observation, everyone: tuple[Member, ...], too_many: bool, masters: int) -> Policy | None:
    """What the driver may do. While too many nodes are lost at once, no node is given up, so nothing is
    healed.
    """
    spec = o.cluster.spec
    if o.catalog is None or spec is None:
        return None
    given_up = frozenset() if too_many else frozenset(m.node_id for m in everyone if m.given_up)
    made_in_vain = frozenset() if too_many else unneeded(o, masters, everyone)
    rate = bytes_per_second(spec.budget.bytesPerSecond)
    # With a low rate run fewer copies rather than slower ones: a copy that gets nothing for minutes is
    # restarted.
    copies = min(spec.budget.copies, rate // RATE_MIN)
    return Policy(
        dead_after_ms=int(patience_s(o) * 1000),
        lost=given_up,
        unneeded=made_in_vain,
        max_lost_nodes=spec.healing.maxLostNodes,
        max_copies=copies,
        bytes_per_second=rate // copies,
        balance_leaders=spec.balance.leaders,
        rebalance=spec.balance.replicas,
    )


def _standing(
    o: Observation,
    policy: Policy | None,
    held: str = "",
    budget: tuple[tuple[Holder, ...], tuple[str, ...]] | None = None,
) -> list[Action]:
    """Keep the policy in the catalog up to date. Without a policy the masters must not heal either. `held`:
    why no driver may work at all; "" if one may. `budget`: who holds it and who waits for it; None keeps what
    the catalog has.
    """
    spec = o.cluster.spec
    if o.catalog is None or o.catalog.standing is None or spec is None:
        return []
    owner = f"TabletCluster {o.cluster.namespace}/{o.cluster.name}"
    if policy is None:
        wanted = replace(o.catalog.standing, drive_after_ms=0, owner=owner, held=held, holding=(), waiting=())
    else:
        wanted = StandingPolicy(
            min(policy.dead_after_ms, TIME_MAX_MS),
            policy.max_lost_nodes,
            policy.max_copies,
            policy.bytes_per_second,
            min(int(seconds(spec.healing.mastersDriveAfter) * 1000), TIME_MAX_MS),
            owner,
            policy.balance_leaders,
            policy.rebalance,
        )
    holding, waiting = budget or (o.catalog.standing.holding, o.catalog.standing.waiting)
    changed = wanted != replace(o.catalog.standing, holding=(), waiting=())
    wanted = replace(wanted, holding=holding, waiting=waiting)
    if wanted == o.catalog.standing:
        return []
    why = "the policy of the masters differs from spec.healing and spec.budget"
    if not changed:
        why = "other changes hold the budget, or wait for it"
    return [SetDriverPolicy(why, wanted, only_holders=not changed)]


def _finalizing(o: Observation) -> tuple[list[Action], list[Finding]]:
    """Finalize the cluster version of spec.version, once all members can read its formats. The masters check
    that again.
    """
    release = o.cluster.spec.version if o.cluster.spec is not None else None
    if release is None or o.catalog is None or o.catalog.finalized >= RELEASES[release]:
        return [], []
    wanted = RELEASES[release]
    if o.catalog.readable < wanted:
        behind = sorted(label for label, reads in o.catalog.lagging.items() if reads < wanted)
        message = (
            f"spec.version is {release}, and cluster version {wanted} waits for {some(behind)}: give them an image of "
            f"release {release}, or retire them"
        )
        return [], [Finding(Kind.RECONCILING, "VersionWaits", message)]
    why = f"spec.version is {release}, and all masters and nodes read cluster version {wanted}"
    return [FinalizeVersion(why, wanted)], []


def asked_again(o: Observation, action: Action) -> bool:
    """Whether the action repeats a request that was refused and would, as far as is known, be refused again."""
    match action:
        case GrowClaim():
            return action.again
        case CreateTable() | SetReplicationFactor():
            return ("TabletGroup", action.group) in o.refused
        case SetMasterCount():
            return MASTERS_REFUSED in o.refused
    return False


def _rests(m: Member) -> bool:
    """Whether this member gives no reason for an early next pass."""
    if m.state in (State.READY, State.RETIRED, State.PARKED):
        return True
    return m.state is State.DRAINING and m.active and m.node is not None and not m.node.replicas


def _wait_s(
    o: Observation,
    everyone: tuple[Member, ...],
    actions: list[Action],
    health: Health,
) -> float:
    settled = (
        all(asked_again(o, a) for a in actions)
        and o.catalog is not None
        and not o.catalog.view.intents
        and all(_rests(m) for m in everyone)
        and health.settled
    )
    # Kubernetes sends no event for a process that hangs or that the masters do not hear, so passes must look
    # for it.
    return min(QUIET_S, patience_s(o)) if settled else BUSY_S
