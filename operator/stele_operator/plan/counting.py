"""Brings the number of masters to `spec.masters.replicas`. Called by cluster_plan; pure.

To add masters, claims and pods are made first. Once the masters hear all of them, they are told the number.
The driver gives each new master a copy of the catalog and then a vote. Then the identity records the number.
To remove masters, the identity records the number first, and then the masters are told. The driver takes
votes away. Masters that no configuration names any more retire (surplus.py).

Invariants: while no master leads, the number in the identity says how many volumes a majority needs. This
number is never above the count of voters that the catalog has and keeps, so masters that left do not count as
lost. A change begins only while nothing heals, drains or is rolled, and no pod is rolled before the change
ends. If the spec's number changes meanwhile, the new one replaces the one under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stele.driver.view import TabletView
from stele.model.config import MemberType
from stele.model.ids import CATALOG_TABLET_ID
from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.plan import holder
from stele_operator.plan.actions import Action, SetMasterCount
from stele_operator.plan.budgets import some
from stele_operator.plan.fates import SILENT_S, Member, State
from stele_operator.plan.findings import Finding, Kind
from stele_operator.plan.formation import replace_identity
from stele_operator.plan.health import catalog_tablet, live_nodes, live_voters
from stele_operator.plan.observation import MASTERS_REFUSED, Identity, Observation
from stele_operator.plan.placement import admits

COUNT_VERSION = 2
"""The cluster version that another number of masters needs. The operator of the release before would take removed
masters for lost volumes."""


@dataclass(frozen=True, slots=True)
class Count:
    """The next step to the wanted number of masters. `pods`: how many masters there are to be now.
    `recording`: the identity changes in this pass. `changing`: why no pod may be rolled meanwhile; "" if pods
    may be rolled.
    """

    pods: int
    actions: tuple[Action, ...] = ()
    findings: tuple[Finding, ...] = ()
    recording: bool = False
    changing: str = ""


def plan_count(
    o: Observation, spec: TabletClusterSpec, identity: Identity, everyone: Sequence[Member], *, rolls: bool
) -> Count:
    """The next step to the number that the spec asks for. `rolls`: some pods are still to be made anew from a
    changed spec.
    """
    catalog = catalog_tablet(o)
    asked = spec.masters.replicas
    if catalog is None or not identity.formed:
        return Count(asked)
    now = catalog.replication_factor
    if asked > now:
        count = _more(o, spec, catalog, everyone, rolls)
    elif asked < now:
        count = _fewer(o, spec, catalog, identity, everyone, rolls)
    else:
        count = _under_way(o, catalog, identity)
    goal = asked if asked < now and count.changing else now
    recorded = _recorded(identity, goal, catalog)
    if recorded == identity:
        return count
    what = f"the number of masters that hold the catalog is {goal}"
    return replace(count, actions=(replace_identity(o, recorded, what), *count.actions), recording=True)


def _recorded(identity: Identity, goal: int, catalog: TabletView) -> Identity:
    """The identity with the number `goal`. A lower number is recorded before any master leaves, a higher one
    after all have a vote.
    """
    if goal > identity.masters and not _all_vote(catalog, goal):
        return identity
    return replace(identity, masters=goal)


def _all_vote(catalog: TabletView, number: int) -> bool:
    """Whether the catalog has exactly `number` members, and all are voters with its rows."""
    peers = catalog.config.peers
    return len(peers) == number and all(p.member_type is MemberType.VOTER for p in peers)


def _more(
    o: Observation, spec: TabletClusterSpec, catalog: TabletView, everyone: Sequence[Member], rolls: bool
) -> Count:
    asked, now = spec.masters.replicas, catalog.replication_factor
    begun = sum(m.role == "master" and m.active for m in everyone) > now
    if refused := _refused(o, asked, now) or (None if begun else _too_few_machines(o, spec, everyone)):
        return Count(asked if begun else now, findings=(refused,))
    first = [*holder.heals(everyone), *holder.drains(everyone), *(["upgrade"] if rolls else [])]
    if first and not begun:
        return Count(now, findings=(_waits(asked, now, first),))
    able = _able(everyone)
    message = (
        f"masters.replicas is {asked}: {min(able, asked)} of {asked} masters run; once all do, the driver gives each new one "
        "a copy of the catalog and then a vote"
    )
    told = Finding(Kind.RECONCILING, holder.MASTERS_CHANGING, message)
    actions = (SetMasterCount(f"masters.replicas is {asked}, and {able} masters run", asked, now),)
    return Count(asked, actions if able >= asked else (), (told,), changing=_changing(asked))


def _fewer(
    o: Observation,
    spec: TabletClusterSpec,
    catalog: TabletView,
    identity: Identity,
    everyone: Sequence[Member],
    rolls: bool,
) -> Count:
    asked, now = spec.masters.replicas, catalog.replication_factor
    if refused := _refused(o, asked, now):
        return Count(now, findings=(refused,))
    live = live_voters(o, catalog)
    # Masters that are lost leave first, so they need no heal.
    heals = holder.heals([m for m in everyone if m.role != "master"])
    first = [*heals, *holder.drains(everyone), *(["upgrade"] if rolls else [])]
    begun = identity.masters <= asked
    if first and not begun:
        return Count(now, findings=(_waits(asked, now, first),))
    if live < asked:
        without = {p.node_id for p in catalog.config.voters} - live_nodes(o, catalog)
        away = some([m.name for m in everyone if m.node_id in without])
        message = f"masters.replicas is {asked}: only {live} of {len(catalog.config.voters)} masters answer; the change waits for {away}"
        return Count(now, findings=(Finding(Kind.RECONCILING, holder.MASTERS_WAIT, message),))
    told = Finding(Kind.RECONCILING, holder.MASTERS_CHANGING, _leaving(catalog, asked))
    actions = (SetMasterCount(f"masters.replicas is {asked}, and the cluster has {now}", asked, now),)
    return Count(now, actions if begun else (), (told,), changing=_changing(asked))


def _under_way(o: Observation, catalog: TabletView, identity: Identity) -> Count:
    """The step once the masters know the number: wait until the driver has added or removed masters."""
    now, voters = catalog.replication_factor, len(catalog.config.voters)
    heals = o.catalog is not None and o.catalog.view.intent(CATALOG_TABLET_ID) is not None
    if identity.masters < now and not _all_vote(catalog, now):
        message = f"masters.replicas is {now}: {voters} of {now} masters hold the catalog; the others get it one at a time"
    elif voters > now and not heals:
        message = _leaving(catalog, now)
    else:
        return Count(now)
    told = Finding(Kind.RECONCILING, holder.MASTERS_CHANGING, message)
    return Count(now, findings=(told,), changing=_changing(now))


def _leaving(catalog: TabletView, asked: int) -> str:
    voters = len(catalog.config.voters)
    return (
        f"masters.replicas is {asked}: {voters - asked} of {voters} masters give the catalog up, one at a time, and retire; "
        "those that are away go first, the leader last. Set masters.replicas back to keep those that have not left"
    )


def _changing(asked: int) -> str:
    return f"the number of masters becomes {asked} first"


def _waits(asked: int, now: int, first: Sequence[str]) -> Finding:
    message = f"masters.replicas is {asked}, and the cluster has {now}: the change waits for {some(first)}"
    return Finding(Kind.RECONCILING, holder.MASTERS_WAIT, message)


def _refused(o: Observation, asked: int, now: int) -> Finding | None:
    """Why the masters would refuse another number, or have refused it; None if neither."""
    if o.catalog is not None and o.catalog.finalized < COUNT_VERSION:
        why = (
            f"this needs cluster version {COUNT_VERSION}, and {o.catalog.finalized} is finalized; once all masters and nodes "
            "run this release, set spec.version to it"
        )
    elif MASTERS_REFUSED in o.refused:
        why = o.refused[MASTERS_REFUSED]
    else:
        return None
    return Finding(
        Kind.STALLED, "MastersRefused", f"masters.replicas is {asked}, and the cluster keeps {now}: {why}"
    )


def _too_few_machines(o: Observation, spec: TabletClusterSpec, everyone: Sequence[Member]) -> Finding | None:
    """A finding if there are fewer machines than masters, since each master needs its own. None if machines
    cannot be read.
    """
    asked = spec.masters.replicas
    if o.machines is None:
        return None
    in_zones = [m for m in o.machines if not spec.zones or m.zone in spec.zones]
    able = {m.name for m in in_zones if admits(spec, "master", m)}
    able |= {
        m.machine for m in everyone if m.role == "master" and m.active and o.machine(m.machine) is not None
    }
    if len(able) >= asked:
        return None
    message = (
        f"masters.replicas is {asked}, but only {len(able)} machines can run masters, and each master needs its own; add "
        "machines, or lower masters.replicas"
    )
    return Finding(Kind.STALLED, "TooFewMachines", message)


def _able(everyone: Sequence[Member]) -> int:
    """How many machines run a master that could hold the catalog: it is heard, it is in service, and its
    volume is known.
    """
    return len(
        {
            m.machine or m.name
            for m in everyone
            if m.role == "master"
            and m.active
            and m.state not in (State.LOST, State.SILENT)
            and m.formed
            and m.node is not None
            and m.node.takes_replicas
            and m.node.ever_heard
            and m.silent_s < SILENT_S
        }
    )
