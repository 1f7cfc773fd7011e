"""The state of each member, and its fate: why it does not serve. Called by cluster_plan and status; pure.

Heartbeats to the masters decide whether a member is silent; Kubernetes only says why. Invariant: the checks
run in a fixed order and the first match decides, so the same facts give the same fate. A fate alone removes
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stele.driver.view import NodeState, NodeView, Wanted
from stele.model.ids import NodeId
from stele_operator.api.cluster import Healing
from stele_operator.api.scalars import seconds
from stele_operator.plan import naming
from stele_operator.plan.observation import ROLES, Claim, Identity, Machine, Observation, Pod, Role

SILENT_S = 3.0
"""Three missed heartbeats."""
START_PATIENCE_S = 60.0
"""A pod that is not ready for longer than this has a fault."""


class Fate(StrEnum):
    """Why a member is not serving."""

    NONE = ""
    RESTARTING = "Restarting"
    MACHINE_SILENT = "MachineSilent"
    MACHINE_LOST = "MachineLost"
    MACHINE_DELETED = "MachineDeleted"
    VOLUME_LOST = "VolumeLost"
    VOLUME_EMPTY = "VolumeEmpty"


class State(StrEnum):
    """A member in one word, as status shows it."""

    READY = "Ready"
    STARTING = "Starting"
    PENDING = "Pending"
    SILENT = "Silent"
    LOST = "Lost"
    PARKED = "Parked"
    DRAINING = "Draining"
    RETIRED = "Retired"
    HIBERNATED = "Hibernated"


@dataclass(frozen=True, slots=True)
class Member:
    """A node or master, with its claim, pod and catalog entry where these exist."""

    role: Role
    name: str
    node_id: str
    claim: Claim | None
    pod: Pod | None
    node: NodeView | None
    state: State
    fate: Fate
    why: str
    silent_s: float
    formed: bool
    given_up: bool
    """The time-out of its fate has passed, so it may be drained, retired and replaced."""

    @property
    def active(self) -> bool:
        """Whether the member counts towards the replicas that the spec asks for. A drained member counts."""
        if self.state is State.RETIRED:
            return False
        stays = self.node is not None and (
            self.node.state is NodeState.ACTIVE or self.node.asked is Wanted.DRAINED
        )
        if self.claim is None or self.claim.deleting:  # it counts while it serves, or until it is given up
            return stays and self.formed
        return self.node is None or stays

    @property
    def parked(self) -> bool:
        """Whether the member is parked: it is away, or may be away at any moment."""
        there = self.state is State.READY and self.node is not None and self.node.parked
        return there or self.state is State.PARKED

    @property
    def machine(self) -> str:
        """The machine on which its pod runs or ran last. If it never ran, the machine for which its volume
        was made.
        """
        return _machine(self.claim, self.pod, self.node)

    @property
    def lost(self) -> bool:
        """Whether its state is LOST: it is silent for longer than the policy allows, and not retired."""
        return self.state is State.LOST


def members(o: Observation) -> tuple[Member, ...]:
    """All members with a claim or a catalog entry, by role and serial."""
    healing = o.cluster.spec.healing if o.cluster.spec else Healing()
    nodes = {n.node_id: n for n in o.catalog.view.nodes} if o.catalog else {}
    formed = o.catalog.formed_nodes if o.catalog else frozenset()
    found: list[Member] = []
    known: set[str] = set()
    own = o.identity.cluster_id if o.identity is not None else ""
    # Other claims belong to an earlier cluster of this name that is being deleted.
    mine = [c for c in o.claims if c.cluster_id == own or not own]
    for claim in sorted(mine, key=lambda c: (ROLES.index(c.role), c.serial)):
        pod = o.pod(claim.name)
        known.add(claim.node_id)
        node = nodes.get(NodeId(claim.node_id))
        found.append(_member(o, healing, claim.role, claim.name, claim.node_id, claim, pod, node, formed))
    for node in sorted(nodes.values(), key=lambda n: (n.role, n.node_id)):
        if node.node_id not in known and node.role in ROLES and node.state is not NodeState.RETIRED:
            role: Role = "master" if node.role == "master" else "node"
            pod = next((p for p in o.pods if p.node_id == node.node_id), None)
            name = pod.name if pod else f"{o.cluster.name}-{role}-?{node.node_id[:8]}"
            found.append(_member(o, healing, role, name, node.node_id, None, pod, node, formed))
    return tuple(found)


def _member(
    o: Observation,
    healing: Healing,
    role: Role,
    name: str,
    node_id: str,
    claim: Claim | None,
    pod: Pod | None,
    node: NodeView | None,
    formed_nodes: frozenset[str],
) -> Member:
    formed = node_id in formed_nodes
    silent_s = node.heartbeat_age_ms / 1000 if node is not None else 0.0
    heard = node is not None and silent_s < SILENT_S and node.ever_heard
    fate, why = (Fate.NONE, "") if heard else _fate(o, claim, pod, node, node_id, role)
    too_long = silent_s >= max(SILENT_S, time_out_s(fate, healing, o.machines is not None))
    if node is not None and node.parked and fate not in _NO_VOLUME:
        too_long = False  # it is waited for
    state = _state(healing, claim, pod, node, heard, formed, silent_s, fate, too_long)
    if state in (State.READY, State.STARTING, State.PENDING) and fate in _HARMLESS:
        fate, why = Fate.NONE, _waiting(o, claim, pod)
    if state is State.RETIRED:  # it is never started again, so its machine does not matter
        fate, why = Fate.NONE, "no tablet needs it any more"
    if not why or state is State.PARKED:
        why = "; ".join(text for text in (why, _wanted(node)) if text)
    if o.asleep and state is not State.RETIRED and fate not in _NO_VOLUME:
        state, fate, why = _resting(o, claim, pod, state, why)
    given_up = node is not None and node.state is not NodeState.RETIRED and fate is not Fate.NONE and too_long
    return Member(role, name, node_id, claim, pod, node, state, fate, why, silent_s, formed, given_up)


_NO_VOLUME = (Fate.VOLUME_LOST, Fate.VOLUME_EMPTY)
"""Fates from which a node does not come back with its data, so nothing waits for the node."""
_HARMLESS = (Fate.RESTARTING, Fate.MACHINE_SILENT)
"""Fates that a member may have while it is only starting."""


def _resting(
    o: Observation, claim: Claim | None, pod: Pod | None, state: State, why: str
) -> tuple[State, Fate, str]:
    """The state, fate and reason of a member while the cluster hibernates or wakes. Its silence means
    nothing, so it has no fate.
    """
    if pod is None:
        return State.HIBERNATED, Fate.NONE, _waiting(o, claim, pod)
    if pod.deleting:
        machine = o.machine(pod.machine)
        stands = o.machines is not None and (machine is None or not machine.ready)
        when = f"once machine {pod.machine} is back" if stands and pod.machine else "in a moment"
        return State.HIBERNATED, Fate.NONE, f"its pod ends {when}"
    if state in (State.LOST, State.SILENT):
        return State.STARTING, Fate.NONE, _waiting(o, claim, pod)
    return state, Fate.NONE, why


def time_out_s(fate: Fate, healing: Healing, machines_known: bool) -> float:
    """How long, in seconds, a member with this fate may be silent before it is given up. If machines cannot
    be read, this is the longest time that may apply.
    """
    silent, lost = seconds(healing.silentAfter), seconds(healing.machineLostAfter)
    match fate:
        case Fate.MACHINE_LOST:
            return lost
        case Fate.MACHINE_DELETED:
            return seconds(healing.machineDeletedAfter)
        case Fate.VOLUME_LOST | Fate.VOLUME_EMPTY:
            return seconds(healing.volumeLostAfter)
        case _:
            return silent if machines_known else max(silent, lost)


_EXITS = {
    naming.EXIT_VOLUME_EMPTY: (Fate.VOLUME_EMPTY, "its volume is empty, although it once held data"),
    naming.EXIT_VOLUME_FOREIGN: (Fate.VOLUME_EMPTY, "its volume belongs to another node or cluster"),
    naming.EXIT_DISK_CORRUPT: (Fate.VOLUME_LOST, "its disk is damaged, and not only single replicas"),
    naming.EXIT_VOLUME_OLD: (Fate.VOLUME_LOST, "its volume is an outdated copy"),
}


def _fate(
    o: Observation, claim: Claim | None, pod: Pod | None, node: NodeView | None, node_id: str, role: Role
) -> tuple[Fate, str]:
    if claim is None:
        return Fate.VOLUME_LOST, "its claim is gone"
    if claim.phase == "Lost":
        return Fate.VOLUME_LOST, "its volume is gone"
    if pod is not None and pod.claim_uid and pod.claim_uid != claim.uid:
        return Fate.VOLUME_LOST, "somebody deleted its claim and created another one"
    if pod is not None and not pod.running and pod.exit_code in _EXITS:
        fate, why = _EXITS[pod.exit_code]
        return fate, f"{why}: {pod.exit_message}" if pod.exit_message else why
    if role == "master" and _formatted_anew(o.identity, o, node_id):
        return Fate.VOLUME_EMPTY, "its volume was formatted again after the cluster had formed"
    name = _machine(claim, pod, node)
    machine: Machine | None = o.machine(name)
    # A pod that was drained first may move with its volume, so it is not lost with its machine.
    if pod is not None and pod.machine and o.machines is not None and machine is None:
        return Fate.MACHINE_DELETED, f"machine {name} is no longer part of Kubernetes"
    if machine is not None and not machine.ready:
        return Fate.MACHINE_LOST, f"machine {name} is not ready"
    if pod is not None and pod.running and not pod.deleting:
        return (
            Fate.MACHINE_SILENT,
            f"its pod runs on {name or 'a machine'}, but the masters get no heartbeats from it",
        )
    return Fate.RESTARTING, _waiting(o, claim, pod) or "its pod is being started again"


def _machine(claim: Claim | None, pod: Pod | None, node: NodeView | None) -> str:
    # The machine for which its volume was made does not matter if the node has run elsewhere since.
    ran = (pod.machine if pod else "") or (node.machine if node else "")
    return ran or (claim.selected_machine if claim else "")


def _formatted_anew(identity: Identity | None, o: Observation, node_id: str) -> bool:
    """Whether the volume of a first master was formatted again, and no driver has copied the catalog to it
    since.
    """
    if identity is None or node_id not in identity.formed:
        return False
    mine = [r for r in o.master_reports if r.node_id == node_id and r.format_id and not r.formed]
    return any(r.format_id != identity.formed[node_id] for r in mine)


def _waiting(o: Observation, claim: Claim | None, pod: Pod | None) -> str:
    if pod is None:
        error = o.refused.get(("Pod", claim.name)) if claim is not None else None
        return f"its pod cannot be created: {error}" if error else ""
    if pod.unschedulable:
        return f"no machine takes it: {pod.unschedulable}"
    if pod.ready:
        return ""
    return "; ".join(text for text in (pod.waiting, _last_end(pod)) if text)


def _last_end(pod: Pod) -> str:
    if not pod.exit_code and not pod.exit_message:
        return ""
    code = f"ended with {pod.exit_code}" if pod.exit_code is not None else "ended"
    word = f" ({pod.exit_reason})" if pod.exit_reason else ""
    return f"{code}{word}: {pod.exit_message}" if pod.exit_message else f"{code}{word}"


def _wanted(node: NodeView | None) -> str:
    """Who wants the node in a state other than in service, and why. "" if nobody does, or if the node is
    RETIRED.
    """
    if node is None or node.asked is Wanted.IN_SERVICE or node.state is NodeState.RETIRED:
        return ""
    who = "an administrator asked for it" if node.wanted_by == "administrator" else ""
    return "; ".join(text for text in (who, node.wanted_reason) if text)


def _retired(claim: Claim | None, node: NodeView | None) -> bool:
    """Whether the member is RETIRED according to the masters. While they cannot be asked, the record on the
    claim decides.
    """
    if node is not None:
        return node.state is NodeState.RETIRED
    return claim is not None and (claim.retired or claim.released_s is not None)


def _state(
    healing: Healing,
    claim: Claim | None,
    pod: Pod | None,
    node: NodeView | None,
    heard: bool,
    formed: bool,
    silent_s: float,
    fate: Fate,
    too_long: bool,
) -> State:
    if _retired(claim, node):
        return State.RETIRED
    if node is not None and node.state is NodeState.DRAINING:
        return State.DRAINING
    if node is None or not formed:
        if pod is None or not pod.machine:
            return State.PENDING
        return State.READY if pod.ready and (node is None or heard) else State.STARTING
    if heard and (pod is None or pod.ready):
        return State.READY
    if heard:  # one that is fenced is never ready
        return State.PARKED if node.parked else State.STARTING
    if node.parked and fate not in _NO_VOLUME:
        return State.PARKED
    gone = fate in (Fate.VOLUME_LOST, Fate.VOLUME_EMPTY, Fate.MACHINE_DELETED)
    # A member that may be given up counts as lost even before witnessAfter; otherwise maxLostNodes would not
    # count it.
    if silent_s >= seconds(healing.witnessAfter) or (gone and silent_s >= SILENT_S) or too_long:
        return State.LOST
    return State.SILENT if silent_s >= SILENT_S else State.STARTING
