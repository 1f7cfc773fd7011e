"""Which members the operator may take away at once, within spec.budget.maxUnavailable. Called by rolling and
leaving; pure.

Invariant: a tablet with a replica on one of the members that are away keeps a majority. A tablet with
replicas on several of them keeps a majority and one voter more. While a member is away for another reason,
such as a fault, none is taken away.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from stele.driver.view import TabletView
from stele_operator.plan.fates import SILENT_S, Fate, Member, State
from stele_operator.plan.health import leads, live_nodes, row_nodes
from stele_operator.plan.observation import Observation, Pod

COMING = (State.READY, State.STARTING, State.SILENT, State.PENDING)
"""States of a member whose pod was just made again."""


_FATES = (Fate.NONE, Fate.RESTARTING, Fate.MACHINE_SILENT)


def serves(o: Observation, pod: Pod | None) -> bool:
    """Whether a pod is ready, and its machine too. The pod is not enough: masters still hear a node for some
    seconds after its pod has gone.
    """
    if pod is None or pod.deleting or not pod.ready:
        return False
    machine = o.machine(pod.machine)
    return o.machines is None or (machine is not None and machine.ready)


def is_away(o: Observation, m: Member) -> bool:
    """Whether a member does not serve, or may stop at any moment because it is parked."""
    return m.state is not State.READY or m.parked or not serves(o, m.pod)


def away_nodes(o: Observation, everyone: Sequence[Member]) -> list[Member]:
    """Nodes that may have replicas and do not serve, whatever the reason, or are parked."""
    return [
        m
        for m in everyone
        if m.role == "node"
        and m.node is not None
        and m.formed
        and m.state is not State.RETIRED
        and (m.node.parked or (m.node.replicas > 0 and not (m.silent_s < SILENT_S and serves(o, m.pod))))
    ]


def beside(
    o: Observation,
    members: Sequence[Member],
    order: Sequence[Member],
    present: Collection[str],
    most: int,
) -> Member | None:
    """The first node of `order` whose pod may be made again while others are away; None if none may.

    `present`: names of members whose pods have the present spec. `most`: the most members that may be away at
    once.
    """
    away = [m for m in members if is_away(o, m)]
    if o.catalog is None or o.catalog.view.intents or not 0 < len(away) < most:
        return None
    if any(m.role == "master" for m in (*away, *order)) or not all(_by_us(o, m, present) for m in away):
        return None
    # The first one goes alone: it shows whether pods come back from the present spec.
    proven = any(m.role == "node" and m.name in present and m not in away for m in members)
    if not proven and not all(m.parked for m in away):
        return None
    barred = _barred(o, {m.node_id for m in away})
    if barred is None:
        return None
    return next((m for m in order if m not in away and m.node_id not in barred), None)


def _by_us(o: Observation, m: Member, present: Collection[str]) -> bool:
    """Whether a node is away by the operator's own doing: it is parked, or its pod ends or was just made
    again.
    """
    if m.parked:
        return True
    if m.state not in COMING or m.fate not in _FATES or not m.formed:
        return False
    machine = o.machine(m.machine)
    if o.machines is not None and m.machine and (machine is None or not machine.ready):
        return False
    if m.pod is None:
        return True
    if m.pod.unschedulable or m.pod.waiting or m.pod.restarts:
        return False
    return m.pod.deleting or m.name in present


def _barred(o: Observation, away: set[str]) -> set[str] | None:
    """Nodes that must not go while `away` are away. None means that no node may go, because a tablet lacks
    further voters or its leader.
    """
    assert o.catalog is not None
    barred: set[str] = set()
    for tablet in o.catalog.view.tablets:
        if tablet.state != "RUNNING":
            continue
        if tablet.replication_factor == 1 and (row_nodes(tablet) & away or o.catalog.is_dropped(tablet)):
            continue  # nobody can use it before its node is back, whoever else goes
        left = live_nodes(o, tablet) - away
        if not _led(o, tablet, away) or len(left | (row_nodes(tablet) & away)) < _whole(tablet):
            return None
        named = {p.node_id for p in tablet.config.peers}
        needed = tablet.config.majority + (1 if named & away else 0)
        if tablet.replication_factor > 1:
            barred |= {n for n in named if len(left - {n}) < needed}
    return barred


def _led(o: Observation, tablet: TabletView, away: set[str]) -> bool:
    return leads(o, tablet) and tablet.leader_node not in away


def _whole(tablet: TabletView) -> int:
    """How many voters the tablet needs so that it can lose one. A tablet of one replica needs that one."""
    return tablet.config.majority + min(1, tablet.replication_factor - 1)
