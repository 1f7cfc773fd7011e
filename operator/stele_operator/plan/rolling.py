"""Rolls pods: gives running pods what the spec asks for now, such as image, resources and fields of pods. It
makes one pod again at a time, or as many nodes as `spec.budget.maxUnavailable` allows. Called by
cluster_plan; pure.

A pod is deleted, and made again on its volume from the present spec (member_objects). A node that ends hands
its leaders over first.

Invariants: no pod is deleted while another member is not ready, a tablet could not lose a voter, or tablets
change. One exception: nodes that are away only because the operator rolls or parks them may have others
beside them (together.py). So heals go first, and a roll stops at the first pod that does not come back.
Masters come before nodes, the leading master last of them. A member that could not be placed again where its
volume is keeps its pod.
"""

from __future__ import annotations

from collections.abc import Sequence

from stele.driver.view import TabletView
from stele.model.ids import CATALOG_TABLET_ID
from stele_operator.api.cluster import TabletClusterSpec, UpdateStrategy
from stele_operator.plan import manifests, naming, together
from stele_operator.plan.actions import Action, RollPod
from stele_operator.plan.budgets import some, tablet_name
from stele_operator.plan.fates import START_PATIENCE_S, Member, State
from stele_operator.plan.findings import Finding, Kind
from stele_operator.plan.health import in_danger, needless
from stele_operator.plan.observation import ROLES, Observation, Pod
from stele_operator.plan.placement import misplaced

STOPPED_AFTER_S = 300.0
"""Seconds that a running pod may be not ready before the roll stops. If the pod cannot run, START_PATIENCE_S
applies.
"""


def outdated(o: Observation, spec: TabletClusterSpec, pod: Pod) -> bool:
    """Whether the pod was made from a spec other than the present one."""
    return pod.spec_hash != manifests.spec_hash(spec, pod.role, spec.image or o.default_image)


def wants_roll(o: Observation, spec: TabletClusterSpec, everyone: Sequence[Member]) -> bool:
    """Whether any pods are to be made again, now or later."""
    return bool(_old(o, spec, everyone))


def _old(o: Observation, spec: TabletClusterSpec, everyone: Sequence[Member]) -> list[Member]:
    """Members whose pods are to be made again."""
    if spec.updateStrategy is UpdateStrategy.ON_DELETE or o.catalog is None:
        return []
    stays = {name for name, _ in misplaced(o, spec, everyone)}
    members = (m for m in everyone if m.state is not State.RETIRED and m.claim is not None)
    with_pods = (m for m in members if m.pod is not None and not m.pod.deleting and m.name not in stays)
    return [m for m in with_pods if m.pod is not None and outdated(o, spec, m.pod)]


def plan_roll(
    o: Observation, spec: TabletClusterSpec, everyone: Sequence[Member], *, hold: str = ""
) -> tuple[list[Action], list[Finding]]:
    """Delete the next pod to make again, if it may go now, and report how far the roll is. `hold`: why no
    running pod may go now; "" if one may.
    """
    old = _old(o, spec, everyone)
    if not old:
        return [], []
    members = [m for m in everyone if m.state is not State.RETIRED and m.claim is not None]
    stays = {name for name, _ in misplaced(o, spec, everyone)}
    total = len(members) - len(stays)
    far = f"{total - len(old)} of {total} pods have the present spec"
    if (broken := _broken(o, old)) is not None:
        return [_roll(broken, f"it is not ready, and its spec is an older one ({far})")], []
    if (why := _stopped(o, spec, members)) is not None:
        message = f"{far}, and the roll stops: {why}. Correct the spec, or set it back; the operator then makes that pod again first"
        return [], [Finding(Kind.STALLED, "RollStopped", message)]
    order = _in_order(o, old)
    chosen, why = order[0], hold or _waits_for(o, members)
    if why and not hold and (other := _beside(o, spec, members, order)) is not None:
        chosen, why = other, ""
    if why:
        return [], [Finding(Kind.RECONCILING, "RollWaits", f"{far}; {chosen.name} waits: {why}")]
    alone = _alone(o, chosen)
    noted = f"; meanwhile these cannot be used, since each has one replica: {some(alone)}" if alone else ""
    message = f"{far}; {chosen.name} is made again from the present spec{noted}"
    return [_roll(chosen, f"it gets the present spec ({far}){noted}")], [
        Finding(Kind.RECONCILING, "Rolling", message)
    ]


def _roll(member: Member, why: str) -> RollPod:
    assert member.pod is not None
    pod = member.pod
    return RollPod(f"{member.name}: {why}", "Pod", pod.name, pod.uid, pod.resource_version)


def _broken(o: Observation, old: Sequence[Member]) -> Member | None:
    """A member whose pod has an older spec, is unheard by the masters, and has not been ready for long; None
    if there is none. Nothing is lost when this pod is deleted.
    """
    for m in old:
        if m.pod is None or m.pod.ready or m.pod.exit_code in naming.EXITS_OF_VOLUMES:
            continue
        if m.state in (State.LOST, State.PARKED, State.DRAINING):
            continue
        unheard = m.node is None or m.silent_s >= START_PATIENCE_S or not m.formed
        machine = o.machine(m.pod.machine)
        reached = o.machines is None or (
            machine is not None and machine.ready
        )  # its kubelet can stop the pod
        if unheard and reached and o.now_s - m.pod.unready_since_s >= START_PATIENCE_S:
            return m
    return None


def _stopped(o: Observation, spec: TabletClusterSpec, members: Sequence[Member]) -> str | None:
    """Why a pod with the present spec does not come back; None if each is back, or may still come back."""
    for m in members:
        if m.pod is None or m.pod.ready or m.pod.deleting or outdated(o, spec, m.pod):
            continue
        unready_s = o.now_s - m.pod.unready_since_s
        cannot_run = bool(m.pod.waiting or m.pod.unschedulable)
        if unready_s >= (START_PATIENCE_S if cannot_run else STOPPED_AFTER_S):
            said = m.pod.waiting or m.pod.unschedulable or m.pod.exit_message or m.pod.exit_reason or m.why
            return f"{m.name} has not been ready for {unready_s:.0f} s{f' ({said})' if said else ''}"
    return None


def _waits_for(o: Observation, members: Sequence[Member]) -> str:
    """Why no pod may be deleted now; "" if one may be."""
    away = [m.name for m in members if together.is_away(o, m)]
    if away:
        return f"{some(away)} must be ready first, and no member may be parked or leaving"
    weak = [tablet_name(t) for role in ROLES for t in in_danger(o, role) if not needless(o, t)]
    if weak:
        return f"tablets must be healed first: {some(weak)}"
    assert o.catalog is not None
    if changing := len(o.catalog.view.intents):
        return f"{changing} changes of tablets must end first"
    return ""


def _beside(
    o: Observation, spec: TabletClusterSpec, members: Sequence[Member], order: Sequence[Member]
) -> Member | None:
    """A node whose pod may be deleted although others are away; None if there is none."""
    present = {m.name for m in members if m.pod is not None and not outdated(o, spec, m.pod)}
    return together.beside(o, members, order, present, spec.budget.maxUnavailable)


def _in_order(o: Observation, old: Sequence[Member]) -> list[Member]:
    """Masters first, the leading one last of them; then nodes, by name."""
    assert o.catalog is not None
    catalog = o.catalog.view.tablet(CATALOG_TABLET_ID)
    leader = catalog.leader_node if catalog is not None else ""
    return sorted(old, key=lambda m: (m.role != "master", m.node_id == leader, len(m.name), m.name))


def _alone(o: Observation, member: Member) -> list[str]:
    """Names of the tablets whose only replica is on this member. Nobody can use them while the member is
    away.
    """
    assert o.catalog is not None
    return [tablet_name(t) for t in o.catalog.view.tablets if _is_alone(t, member) and not needless(o, t)]


def _is_alone(tablet: TabletView, member: Member) -> bool:
    voters = tablet.config.voters
    return tablet.state == "RUNNING" and [p.node_id for p in voters] == [member.node_id]
